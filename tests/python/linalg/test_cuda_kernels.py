"""The functions of torchium.utils.cuda_kernels."""

from __future__ import annotations

import pickle

import pytest
import torch
import torchium
from torch import nn
from torchium.utils import cuda_kernels
from torchium.utils.cuda_kernels import (
    CUDAMatrixOps,
    CUDAMemoryOps,
    CUDAShampoo,
    cuda_memory_info,
    get_cuda_device_count,
    get_optimal_device,
    is_cuda_available,
    matrix_sqrt_cuda,
)


def test_matrix_powers_are_matrix_powers(device):
    torch.manual_seed(0)
    A = torch.randn(5, 10, dtype=torch.float64, device=device)
    A = A @ A.mT
    root = matrix_sqrt_cuda(A, 0.5)
    torch.testing.assert_close(root @ root, A)
    inverse_root = CUDAMatrixOps.matrix_sqrt_inv_eigen(A, eps=0.5)
    damped = A + 0.5 * torch.eye(5, dtype=A.dtype, device=device)
    identity = torch.eye(5, dtype=A.dtype, device=device)
    torch.testing.assert_close(torch.linalg.matrix_power(inverse_root, 4) @ damped, identity)


@pytest.mark.parametrize(
    ("A", "B", "message"),
    [
        (torch.ones(2, 3), torch.ones(1, 3, 2), r"A_batch has shape \(2, 3\)"),
        (torch.ones(1, 2, 3), torch.ones(3, 2), r"B_batch has shape \(3, 2\)"),
        (torch.ones(1, 2, 3), torch.ones(2, 3, 2), "A_batch holds 1 matrices and B_batch 2"),
        (torch.ones(1, 2, 3), torch.ones(1, 2, 3), "must be"),
        ([[[1.0]]], torch.ones(1, 2, 3), "A_batch is .*; it must be a tensor"),
    ],
)
def test_batch_matrix_multiply_refuses(A, B, message):
    with pytest.raises(ValueError, match=message):
        CUDAMatrixOps.batch_matrix_multiply(A, B)


def test_device_functions():
    assert is_cuda_available() == torch.cuda.is_available()
    assert get_cuda_device_count() == torch.cuda.device_count()
    expected = (
        torch.device("cuda", torch.cuda.current_device())
        if is_cuda_available()
        else torch.device("cpu")
    )
    assert get_optimal_device() == expected


def test_memory_information_of_a_cpu():
    nothing = {
        "total_memory": 0,
        "allocated_memory": 0,
        "free_memory": 0,
        "cached_memory": 0,
        "available": False,
    }
    assert cuda_memory_info("cpu") == nothing
    if not torch.cuda.is_available():
        for device in (None, 0, "cuda", torch.device("cuda:1")):
            assert cuda_memory_info(device) == nothing
    with pytest.raises(ValueError, match="device is meta"):
        cuda_memory_info("meta")


@pytest.mark.cuda
def test_memory_information_of_a_gpu():
    x = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    info = cuda_memory_info()
    assert info["available"] is True
    assert info["total_memory"] > 1e9
    assert x.nbytes <= info["allocated_memory"] <= info["cached_memory"] < info["total_memory"]
    assert 0 < info["free_memory"] < info["total_memory"]
    for device in (0, "cuda", "cuda:0", torch.device("cuda")):
        assert cuda_memory_info(device)["total_memory"] == info["total_memory"]
    with pytest.raises(ValueError, match="device is cuda:99"):
        cuda_memory_info("cuda:99")


def test_tensor_creation_defaults():
    zeros = CUDAMemoryOps.efficient_tensor_creation([2, 3])
    assert zeros.device.type == "cpu"
    assert zeros.dtype == torch.get_default_dtype()
    assert torch.equal(zeros, torch.zeros(2, 3))


def test_cuda_shampoo_is_shampoo(device):
    torch.manual_seed(0)
    start, gradient = torch.randn(4, 3, device=device), torch.randn(4, 3, device=device)
    results = []
    for optimizer_class in (CUDAShampoo, torchium.Shampoo):
        p = nn.Parameter(start.clone())
        optimizer = optimizer_class([p], 0.1, 1e-3, 2)
        for _ in range(3):
            p.grad = gradient.clone()
            optimizer.step()
        results.append(p.detach())
    assert issubclass(CUDAShampoo, torchium.Shampoo)
    assert torch.equal(*results)
    group = CUDAShampoo([nn.Parameter(start)]).param_groups[0]
    assert (group["lr"], group["eps"], group["update_freq"]) == (0.03, 1e-4, 100)


def test_cuda_shampoo_survives_pickle():
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = CUDAShampoo([p], lr=0.5)
    p.grad = torch.ones(2, 2)
    optimizer.step()
    loaded = pickle.loads(pickle.dumps(optimizer))
    assert type(loaded) is CUDAShampoo
    assert loaded.param_groups[0]["lr"] == 0.5


def test_all_names_exist():
    for name in cuda_kernels.__all__:
        assert hasattr(cuda_kernels, name)
