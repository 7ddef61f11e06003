"""A few steps of every optimizer on odd shapes, and roots of every size class, on a CUDA device.

usage: gpu_smoke.py [PART...]   (default: all; a part is roots, products, graphs, factors, samples, krylov, estimators,
kronecker, elements, decompositions, definite, streams or the name of an optimizer)

gpu_check.sh runs it under compute-sanitizer, which makes it some hundred times slower: keep it small.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torchium
from torch import Tensor, nn
from torchium import linalg

ORDERS = (1, 16, 17, 40, 65, 128, 130, 330)  # of matrices, for every kernel
SHAPES = [(33, 17), (1, 7), (7, 1), (64,), (), (3, 5, 4)]
# Every matrix function in each step.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "adagrad": [{}, {"full_matrix": True, "eps": 1e-4}],
    "adahessian": [{"n_samples": 2}],
    "kfac": [
        {"TCov": 1, "TInv": 1, "damping_split": split, "max_factor_size": size}
        for split, size in (("pi", 5000), ("exact", 5000), ("plain", 16))
    ],
    "naturalgradient": [{"solver": solver, "momentum": 0.5} for solver in ("gram", "cg")],
    "shampoo": [
        {"update_freq": 1},
        {"betas": (0.9, 0.99), "grafting": "adam", "momentum": 0.9, "block_size": 16},
    ],
    "shampoow": [{"max_preconditioned_dim": 40}],
}
SEE_LAYERS = ("kfac", "naturalgradient")
NEED_MODEL = (*SEE_LAYERS, "adahessian")


class SmallModel(nn.Module):
    """One of each layer whose uses are captured; K-FAC takes SGD steps for some."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        self.convolution = nn.Conv2d(2, 6, 3, padding=1, groups=2)
        self.group_norm = nn.GroupNorm(3, 6)
        self.wide = nn.Conv2d(6, 40, 2)
        self.linear = nn.Linear(80, 40)
        self.layer_norm = nn.LayerNorm(40)
        self.last = nn.Linear(40, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).view(-1, 2, 2, 3)
        x = self.group_norm(self.convolution(x)).relu()
        x = self.wide(x)
        return self.last(self.layer_norm(self.linear(x.flatten(1))))


def plain_steps(name: str, options: dict[str, Any]) -> list[Tensor]:
    parameters = [torch.randn(shape, device="cuda", requires_grad=True) for shape in SHAPES]
    optimizer = torchium.create_optimizer(name, parameters, lr=0.01, **options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return parameters


def model_steps(name: str, options: dict[str, Any]) -> list[Tensor]:
    model = SmallModel().cuda()
    params = model if name in SEE_LAYERS else model.parameters()
    optimizer = torchium.create_optimizer(name, params, lr=0.01, **options)
    tokens, targets = torch.randint(11, (9,), device="cuda"), torch.randint(5, (9,), device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), targets)
        loss.backward(create_graph=name == "adahessian")
        optimizer.step()
    torchium.per_sample_gradients(model, nn.functional.cross_entropy, tokens, targets)
    return list(model.parameters())


def roots() -> None:
    for n in ORDERS:
        A = torch.randn(3, n, n, device="cuda")
        A = A @ A.mT
        A[1, 0, -1] = torch.nan
        for root in (1, 4) if n < 100 else (4,):  # the large ones take long
            X = torchium.linalg.matrix_inverse_root(A, root, relative_eps=1e-4, method="newton")
            assert X[0].isfinite().all()
            assert X[1].isnan().all()
        print(f"roots of {n} x {n}: finite")


def products() -> None:
    """Products of fp16 parts, of whole tiles and parts of them; no roots."""
    shapes = [(264, 392), (136, 24), (8, 200)]
    parameters = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in shapes]
    for precision, root_dtype in (("highest", None), ("high", None), ("highest", torch.bfloat16)):
        optimizer = torchium.Shampoo(
            parameters,
            betas=(0.9, 0.99),
            grafting="adam",
            start_preconditioning_step=100,
            matmul_precision=precision,
            root_dtype=root_dtype,
        )
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        assert all(bool(parameter.isfinite().all()) for parameter in parameters)
    print("steps by products of fp16 parts: finite")


def graphs() -> None:
    """Steps that the optimizer captures and replays itself."""
    shapes = ((40, 24), (24,), (20, 90), (200, 150))  # roots of several orders at the same time
    parameters = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in shapes]
    optimizer = torchium.Shampoo(
        parameters, lr=0.01, betas=(0.9, 0.99), grafting="adam", update_freq=2, graphs=True
    )
    for _ in range(20):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    assert optimizer.memory_report().total.graphs > 0
    assert all(bool(parameter.isfinite().all()) for parameter in parameters)
    print("replayed steps: finite")


def factors() -> None:
    """K-FAC's factors of 16-bit layers: products of half matrices, sums for a bias, patches."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, stride=2, padding=1), nn.Flatten(), nn.Linear(8 * 36, 512)
    ).cuda()
    optimizer = torchium.KFAC(model, TCov=1, TInv=100)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            model(torch.randn(70, 3, 13, 13, device="cuda")).square().mean().backward()
        optimizer.step()
    kept = [optimizer.state[layer.weight][key] for layer in (model[0], model[2]) for key in "AG"]
    assert all(bool(factor.isfinite().all()) for factor in kept)
    print("factors of 16-bit layers: finite")


def samples() -> None:
    """Norms and inner products of gradients, and factors of images whose width fills 3 x 3 kernels."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(8, 72, 3, padding=1),
        nn.GroupNorm(4, 72),
        nn.Flatten(),
        nn.Linear(72 * 64, 10),
    ).cuda()
    inputs = torch.randn(20, 3, 8, 8, device="cuda")
    targets = torch.randint(10, (20,), device="cuda")
    batch = (nn.functional.cross_entropy, inputs, targets)
    norms = torchium.gradients.per_sample_norms(model, *batch)
    squares = torchium.gradients.gram(model, *batch).diag()
    torch.testing.assert_close(squares.sqrt().float(), norms, rtol=1e-3, atol=1e-5)
    clipped = torchium.gradients.clip_and_accumulate(model, *batch, 0.1)
    torch.testing.assert_close(clipped, norms, rtol=1e-3, atol=1e-5)
    gradients = torchium.per_sample_gradients(model, *batch)
    rows = torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)
    torch.testing.assert_close(rows.norm(dim=1), norms, rtol=1e-3, atol=1e-5)
    optimizer = torchium.KFAC(model, TCov=1, TInv=1)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    print("gradients of samples: consistent")


def definite_matrices(count: int, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    X = torch.randn(count, n, 2 * n, device="cuda", dtype=dtype)
    return X @ X.mT / (2 * n)


def krylov() -> None:
    """Blocks that are orthogonalised and multiplied by kernels, with restarts."""
    n = 130
    A = torch.diag(torch.arange(1.0, n + 1, device="cuda"))
    A += 0.1 * (A[:, :1] @ A[:1])
    sizes = [(torch.float32, 8, 40), (torch.float32, 3, 40), (torch.float64, 2, 40)]
    for dtype, block_size, max_basis in [
        *sizes,
        (torch.float32, 8, 72),
    ]:  # the last ends on the device
        matrix = A.to(dtype)
        for method in (linalg.lanczos, linalg.arnoldi):
            symmetric = (matrix + matrix.T) / 2
            found = method(symmetric, 2, block_size=block_size, max_basis=max_basis, tol=1e-4)
            largest = torch.linalg.eigvalsh(symmetric.cpu())[-1]
            torch.testing.assert_close(found.eigenvalues[0].real.cpu(), largest, rtol=1e-4, atol=0)
    print("eigenpairs: correct")


def estimators() -> None:
    """Random signs of every stream and part of a block of them."""
    for n in (1, 7, 130):
        A = torch.diag(torch.linspace(1, 2, n, device="cuda"))
        for dtype in (torch.float32, torch.float64):
            matrix = A.to(dtype)
            diagonal = linalg.hutchinson_diagonal(matrix, num_samples=13).value
            torch.testing.assert_close(diagonal, matrix.diagonal())
            trace = linalg.hutchinson_trace(matrix, num_samples=20, tol=1e-2).value
            torch.testing.assert_close(trace, matrix.trace().double())
            assert linalg.hutchpp(matrix, num_products=9).value.isfinite()
            assert linalg.xdiag(matrix).value.isfinite().all()
            assert linalg.logdet(matrix, num_samples=4, num_steps=8).value.isfinite()
    print("estimates of diagonal matrices: exact")


def kronecker() -> None:
    """Lists of pairs of many shapes in common launches, and solutions."""
    orders = [(1, 1), (3, 17), (40, 33), (65, 8), (130, 20)]
    A = [definite_matrices(1, m)[0] for m, _ in orders]
    B = [definite_matrices(1, n)[0] for _, n in orders]
    X = [torch.randn(m * n, k, device="cuda") for k, (m, n) in enumerate(orders, 1)]
    for a, b, x, y in zip(A, B, X, linalg.kron_matmul(A, B, X), strict=True):
        torch.testing.assert_close(y, torch.kron(a, b) @ x, rtol=1e-4, atol=1e-4)
    for damping in (0.0, 1e-2):
        assert all(y.isfinite().all() for y in linalg.kron_solve(A, B, X, damping))
    operator = linalg.Kronecker(A[1], B[1])
    torch.testing.assert_close(operator @ X[1], linalg.kron(A[1], B[1]) @ X[1])
    print("Kronecker products: correct")


def elements() -> None:
    """a b + c of every dtype, aligned or not, alone and in lists."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for size in (1, 7, 1024, 5001):
            a, b, c = torch.randn(3, size + 1, device="cuda").to(dtype)[:, 1:]
            for operands in ((a, b, c), tuple(x.clone() for x in (a, b, c))):
                expected = torch.addcmul(operands[2], operands[0], operands[1])
                torch.testing.assert_close(linalg.fused_mul_add(*operands), expected)
    sizes = [1 + 37 * i % 600 for i in range(900)]  # more than a launch takes
    lists = [[torch.ones(size, device="cuda") for size in sizes] for _ in range(3)]
    linalg.fused_mul_add_(*lists)
    assert all(bool((x == 2).all()) for x in lists[2])
    print("a b + c: correct")


def decompositions() -> None:
    """Batches of singular values, polar factors, eigenvectors and powers."""
    for m, n in ((1, 1), (9, 5), (40, 40), (70, 90), (130, 66)):
        A = torch.randn(2, m, n, device="cuda")
        U, S, Vh = linalg.svd(A)
        torch.testing.assert_close((U * S.unsqueeze(-2)) @ Vh, A, rtol=1e-4, atol=1e-4)
        Q, H = linalg.polar(A)
        torch.testing.assert_close(Q @ H, A, rtol=1e-4, atol=1e-4)
        assert linalg.orthogonalize(A, rcond=1e-2).isfinite().all()
    for n in (3, 40, 66, 130):
        A = definite_matrices(2, n)
        values, V = linalg.eigh(A)
        torch.testing.assert_close((V * values.unsqueeze(-2)) @ V.mT, A, rtol=1e-4, atol=1e-4)
        half = linalg.matrix_power(A, 0.5)
        torch.testing.assert_close(half @ half, A, rtol=1e-3, atol=1e-3)
        for exponent in (-0.5, 3.0, -0.3):
            assert linalg.matrix_power(A, exponent).isfinite().all()
    print("decompositions: correct")


def definite() -> None:
    """Inverses, solutions, factors and determinants of positive definite matrices."""
    for dtype in (torch.float32, torch.float64):
        for n in (1, 17, 65, 130):
            A = definite_matrices(3, n, dtype)
            X = torch.randn(3, n, 2, device="cuda", dtype=dtype)
            eye = torch.eye(n, device="cuda", dtype=dtype).expand_as(A)
            inverse = linalg.spd_inverse(A, damping=0.1)
            torch.testing.assert_close(inverse @ (A + 0.1 * eye), eye, rtol=1e-3, atol=1e-3)
            assert linalg.spd_solve(A, X, damping=0.1).isfinite().all()
            A[1] = 0  # needs jitter
            assert linalg.cholesky(A).L.isfinite().all()
            assert linalg.spd_logdet(A).isfinite().all()
    print("positive definite matrices: correct")


def streams() -> None:
    """Products of operands in host memory by chunks, and of fp16 parts of operands on the device."""
    A, B = torch.randn(300, 520).pin_memory(), torch.randn(520, 280).pin_memory()
    expected = A @ B
    for a, b in ((A, B), (A.cuda(), B), (A, B.cuda())):
        for limit in (None, 200_000):
            product = linalg.chunked_matmul(a, b, limit)
            torch.testing.assert_close(product.cpu(), expected, rtol=1e-4, atol=1e-4)
    X = torch.randn(1100, 1030, device="cuda")
    product = linalg.chunked_matmul(X, X.mT, precision="highest")  # large enough for parts
    torch.testing.assert_close(product.double(), X.double() @ X.double().mT, rtol=1e-4, atol=1e-3)
    print("products in chunks: correct")


def steps_of(name: str) -> None:
    for options in OPTIONS[name]:
        steps = model_steps if name in NEED_MODEL else plain_steps
        parameters = steps(name, options)
        torch.cuda.synchronize()
        finite = all(bool(parameter.isfinite().all()) for parameter in parameters)
        print(f"{name} {options}: {'finite' if finite else 'NOT FINITE'}")
        assert finite


def main() -> None:
    torch.manual_seed(0)
    parts = {
        "roots": roots,
        "products": products,
        "graphs": graphs,
        "factors": factors,
        "samples": samples,
        "krylov": krylov,
        "estimators": estimators,
        "kronecker": kronecker,
        "elements": elements,
        "decompositions": decompositions,
        "definite": definite,
        "streams": streams,
    }
    for name in sys.argv[1:] or [*parts, *torchium.get_available_optimizers()]:
        if name in parts:
            parts[name]()
        else:
            steps_of(name)


if __name__ == "__main__":
    main()
