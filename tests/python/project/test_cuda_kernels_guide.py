"""Every code sample of the guide to torchium.utils.cuda_kernels, as printed."""

from __future__ import annotations

import copy
import shutil
import sys
import textwrap

import pytest
import torch
import torchium
from reference import damped_power
from torch import nn
from torchium.utils.cuda_kernels import CUDAGradientOps, CUDAMatrixOps, CUDAMemoryOps

# The samples, verbatim. 'cuda' is replaced by the device of the test.
IMPORTS = """
from torchium.utils.cuda_kernels import (
    CUDAMatrixOps,      # Matrix operations
    CUDAGradientOps,    # Gradient computations
    CUDAMemoryOps,      # Memory management
    is_cuda_available,  # Device utilities
    get_optimal_device
)
"""

MATRIX_ROOT = """
import torch
from torchium.utils.cuda_kernels import CUDAMatrixOps

# Create a symmetric matrix
G = torch.randn(100, 100, device='cuda')
G = G @ G.t()  # Make symmetric

# Compute G^(-1/4) using CUDA optimization
G_sqrt_inv = CUDAMatrixOps.matrix_sqrt_inv_eigen(
    G,
    power=-0.25,  # -1/4 power
    eps=1e-8      # Numerical stability
)
"""

KRONECKER = """
from torchium.utils.cuda_kernels import CUDAMatrixOps

# Input and output covariance matrices
A = torch.randn(50, 50, device='cuda')
G = torch.randn(100, 100, device='cuda')

# Efficient Kronecker product approximation
kron_product = CUDAMatrixOps.kronecker_product_approx(A, G)
"""

PER_SAMPLE_FUNCTION = """
class PerSampleGradFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight, bias):
        ctx.save_for_backward(input, weight, bias)
        return torch.nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx, grad_output):
        input, weight, bias = ctx.saved_tensors

        # Compute per-sample gradients
        per_sample_grads = []
        for i in range(input.shape[0]):
            sample_input = input[i:i+1]
            sample_grad = grad_output[i:i+1]

            # Compute gradient for this sample
            grad_weight = sample_grad.t() @ sample_input
            per_sample_grads.append(grad_weight)

        return None, torch.stack(per_sample_grads), None
"""

MATMUL = """
from torchium.utils.cuda_kernels import CUDAMemoryOps

# Large matrices that might cause OOM
A = torch.randn(5000, 5000, device='cuda')
B = torch.randn(5000, 5000, device='cuda')

# Memory-efficient multiplication with automatic chunking
result = CUDAMemoryOps.memory_efficient_matmul(A, B)
"""

MEMORY_INFORMATION = """
from torchium.utils.cuda_kernels import cuda_memory_info

memory_info = cuda_memory_info()
print(f"Total memory: {memory_info['total_memory'] / 1e9:.2f} GB")
print(f"Allocated: {memory_info['allocated_memory'] / 1e9:.2f} GB")
print(f"Free: {memory_info['free_memory'] / 1e9:.2f} GB")
"""

MIXED_PRECISION = """
from torch.cuda.amp import autocast, GradScaler

scaler = GradScaler()

with autocast():
    output = model(input)
    loss = criterion(output, target)

scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
"""

MEMORY_LAYOUT = """
# Use contiguous memory format
tensor = tensor.contiguous(memory_format=torch.channels_last)

# Efficient tensor creation
tensor = CUDAMemoryOps.efficient_tensor_creation(
    shape=(1000, 1000),
    device=torch.device('cuda'),
    dtype=torch.float32
)
"""

BATCHES = """
# Batch multiple small operations
results = CUDAMatrixOps.batch_matrix_multiply(
    A_batch,  # [batch_size, m, k]
    B_batch   # [batch_size, k, n]
)
"""

COMPLETE_OPTIMIZER = """
import torch
import torch.nn as nn
from torch.optim.optimizer import Optimizer
from torchium.utils.cuda_kernels import CUDAMatrixOps, CUDAMemoryOps

class CUDAShampoo(Optimizer):
    def __init__(self, params, lr=0.03, eps=1e-4, update_freq=100):
        defaults = dict(lr=lr, eps=eps, update_freq=update_freq)
        super().__init__(params, defaults)

    def step(self, closure=None):
        loss = None
        if closure is not None:
            loss = closure()

        for group in self.param_groups:
            for p in group['params']:
                if p.grad is None:
                    continue

                grad = p.grad.data
                state = self.state[p]

                if len(state) == 0:
                    state['step'] = 0
                    if len(p.shape) >= 2:
                        # Use efficient tensor creation
                        state['G_l'] = CUDAMemoryOps.efficient_tensor_creation(
                            (p.shape[0], p.shape[0]), p.device, p.dtype
                        )
                        state['G_r'] = CUDAMemoryOps.efficient_tensor_creation(
                            (p.shape[1], p.shape[1]), p.device, p.dtype
                        )

                state['step'] += 1

                if len(p.shape) >= 2:
                    G_l, G_r = state['G_l'], state['G_r']

                    # Update preconditioners
                    G_l.add_(torch.mm(grad, grad.t()))
                    G_r.add_(torch.mm(grad.t(), grad))

                    if state['step'] % group['update_freq'] == 0:
                        # CUDA-optimized matrix operations
                        G_l_sqrt_inv = CUDAMatrixOps.matrix_sqrt_inv_eigen(
                            G_l, power=-0.25, eps=group['eps']
                        )
                        G_r_sqrt_inv = CUDAMatrixOps.matrix_sqrt_inv_eigen(
                            G_r, power=-0.25, eps=group['eps']
                        )

                        # Memory-efficient matrix multiplication
                        search_direction = CUDAMemoryOps.memory_efficient_matmul(
                            CUDAMemoryOps.memory_efficient_matmul(G_l_sqrt_inv, grad),
                            G_r_sqrt_inv
                        )
                    else:
                        search_direction = grad

                p.data.add_(search_direction, alpha=-group['lr'])

        return loss
"""

CUSTOM_KERNEL = """
// custom_kernels.cu
#include <torch/extension.h>
#include <cuda_runtime.h>

__global__ void matrix_sqrt_kernel(
    const float* input,
    float* output,
    int size,
    float power
) {
    int idx = blockIdx.x * blockDim.x + threadIdx.x;
    if (idx < size) {
        output[idx] = powf(input[idx], power);
    }
}

torch::Tensor matrix_sqrt_cuda(torch::Tensor input, float power) {
    auto output = torch::zeros_like(input);

    int threads = 256;
    int blocks = (input.numel() + threads - 1) / threads;

    matrix_sqrt_kernel<<<blocks, threads>>>(
        input.data_ptr<float>(),
        output.data_ptr<float>(),
        input.numel(),
        power
    );

    return output;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    m.def("matrix_sqrt_cuda", &matrix_sqrt_cuda, "Matrix square root CUDA kernel");
}
"""

CUSTOM_WRAPPER = """
# custom_kernels.py
import torch
from torch.utils.cpp_extension import load

# Load the CUDA extension
custom_kernels = load(
    name="custom_kernels",
    sources=["custom_kernels.cu"],
    extra_cuda_cflags=["-O3", "--use_fast_math"]
)

def matrix_sqrt_cuda_optimized(matrix, power=-0.25):
    \"\"\"CUDA-optimized matrix square root.\"\"\"
    if matrix.is_cuda:
        return custom_kernels.matrix_sqrt_cuda(matrix, power)
    else:
        # Fallback to CPU
        return torch.pow(matrix, power)
"""

CUSTOM_INTEGRATION = """
# In your optimizer
try:
    from .custom_kernels import matrix_sqrt_cuda_optimized
    CUSTOM_KERNELS_AVAILABLE = True
except ImportError:
    CUSTOM_KERNELS_AVAILABLE = False

class OptimizedShampoo(Optimizer):
    def step(self, closure=None):
        # ... existing code ...

        if CUSTOM_KERNELS_AVAILABLE and G_l.is_cuda:
            G_l_sqrt_inv = matrix_sqrt_cuda_optimized(G_l, -0.25)
        else:
            # Fallback to standard implementation
            G_l_sqrt_inv = CUDAMatrixOps.matrix_sqrt_inv_eigen(G_l, -0.25)
"""


def run_sample(sample: str, device: torch.device, **names):
    """The names that a sample defines, given `names`."""
    scope = {"torch": torch, "__name__": "sample", **names}
    exec(compile(sample.replace("'cuda'", f"'{device.type}'"), "<sample>", "exec"), scope)
    return scope


# --- the samples ---


def test_sample_imports(device):
    scope = run_sample(IMPORTS, device)
    assert scope["is_cuda_available"]() == torch.cuda.is_available()


def test_sample_matrix_root(device):
    torch.manual_seed(0)
    scope = run_sample(MATRIX_ROOT, device)
    exact = damped_power(scope["G"].double().cpu(), -0.25, eps=1e-8)
    error = torch.linalg.matrix_norm(scope["G_sqrt_inv"].double().cpu() - exact)
    # G's condition is about 1e5, so its smallest eigenvalue is accurate to a percent.
    assert error < 0.02 * torch.linalg.matrix_norm(exact)


def test_sample_kronecker_product(device):
    scope = run_sample(KRONECKER, device)
    assert torch.equal(scope["kron_product"], torch.kron(scope["A"], scope["G"]))


def test_sample_per_sample_function():
    function = run_sample(PER_SAMPLE_FUNCTION, torch.device("cpu"))["PerSampleGradFunction"]
    torch.manual_seed(0)
    layer, inputs, targets = nn.Linear(4, 3), torch.randn(5, 4), torch.randn(5, 3)
    torch.testing.assert_close(function.apply(inputs, layer.weight, layer.bias), layer(inputs))

    class Context:
        saved_tensors = (inputs, layer.weight, layer.bias)

    with torch.no_grad():
        grad_output = 2 * (layer(inputs) - targets)
    _, gradients, _ = function.backward(Context, grad_output)

    def squared_error(output, target):
        return (output - target).square().sum()

    ours = CUDAGradientOps.per_sample_gradients(layer, squared_error, inputs, targets)
    torch.testing.assert_close(ours["weight"], gradients)


def test_sample_matmul(device):
    scope = run_sample(MATMUL.replace("5000", "500") if device.type == "cpu" else MATMUL, device)
    exact = scope["A"] @ scope["B"]
    if device.type == "cpu":
        torch.testing.assert_close(scope["result"], exact)
    assert (scope["result"] - exact).norm() <= 1e-5 * exact.norm()


def test_sample_memory_information(device, capsys):
    run_sample(MEMORY_INFORMATION, device)
    printed = capsys.readouterr().out
    assert printed.count(" GB\n") == 3
    if not torch.cuda.is_available():
        assert printed == "Total memory: 0.00 GB\nAllocated: 0.00 GB\nFree: 0.00 GB\n"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*CUDA is not available")
def test_sample_mixed_precision(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
    optimizer = torchium.Shampoo(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    run_sample(
        MIXED_PRECISION,
        device,
        model=model,
        input=torch.randn(16, 6, device=device),
        criterion=nn.CrossEntropyLoss(),
        target=torch.randint(3, (16,), device=device),
        optimizer=optimizer,
    )
    assert all(
        not torch.equal(p, before[n]) and p.isfinite().all() for n, p in model.named_parameters()
    )


def test_sample_memory_layout(device):
    image = torch.randn(2, 3, 4, 4, device=device)
    scope = run_sample(MEMORY_LAYOUT, device, tensor=image, CUDAMemoryOps=CUDAMemoryOps)
    zeros = scope["tensor"]
    assert zeros.shape == (1000, 1000)
    assert zeros.dtype == torch.float32
    assert zeros.device.type == device.type
    assert not zeros.any()


def test_sample_batches(device):
    A, B = torch.randn(6, 3, 4, device=device), torch.randn(6, 4, 5, device=device)
    scope = run_sample(BATCHES, device, CUDAMatrixOps=CUDAMatrixOps, A_batch=A, B_batch=B)
    torch.testing.assert_close(scope["results"], torch.bmm(A, B))


def test_sample_complete_optimizer(device):
    torch.manual_seed(0)
    optimizer_class = run_sample(COMPLETE_OPTIMIZER, device)["CUDAShampoo"]
    target, inputs = torch.randn(4, 3, device=device), torch.randn(50, 3, device=device)
    layer = nn.Linear(3, 4, bias=False, device=device)
    optimizer = optimizer_class(layer.parameters(), lr=0.01, update_freq=1)

    def closure():
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = (layer(inputs) - inputs @ target.mT).square().mean()
            loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(20)]
    assert losses[-1] < losses[0]


@pytest.mark.cuda
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_sample_custom_kernels(tmp_path, monkeypatch):
    package = tmp_path / "sample_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "custom_kernels.cu").write_text(CUSTOM_KERNEL)
    (package / "custom_kernels.py").write_text(CUSTOM_WRAPPER)
    names = (
        "from torch.optim import Optimizer\nfrom torchium.utils.cuda_kernels import CUDAMatrixOps\n"
    )
    (package / "integration.py").write_text(names + CUSTOM_INTEGRATION)
    monkeypatch.chdir(package)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    from sample_package import integration

    assert integration.CUSTOM_KERNELS_AVAILABLE
    x = torch.rand(5, 5, device="cuda") + 1
    torch.testing.assert_close(integration.matrix_sqrt_cuda_optimized(x), x.pow(-0.25))
    sys.modules.pop("sample_package", None)


def test_sample_integration_without_custom_kernels(device):
    header = textwrap.dedent("""
        from torch.optim import Optimizer
        from torchium.utils.cuda_kernels import CUDAMatrixOps
    """)
    G = 4 * torch.eye(3, device=device)
    scope = run_sample(header + CUSTOM_INTEGRATION, device, G_l=G)
    assert scope["CUSTOM_KERNELS_AVAILABLE"] is False
    scope["OptimizedShampoo"]([torch.zeros(1)], {}).step()
