"""lanczos() and arnoldi(), against dense float64 eigenproblems."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torchium
from torch import Tensor, nn
from torch.nn import functional as F

linalg = torchium.linalg
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def with_eigenvalues(values: Tensor, device: str = "cpu") -> Tensor:
    torch.manual_seed(0)
    Q, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))
    A = (Q * values.double()) @ Q.T
    return ((A + A.T) / 2).to(device, values.dtype)


def unsymmetric(n: int = 200) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(n, n, dtype=torch.float64) / n**0.5


def assert_pairs(A: Tensor, found, expected: Tensor, error: float) -> None:
    """Eigenvalues, residuals as they are, and vectors of norm 1."""
    scale = expected.abs().max().item()
    assert bool(found.converged.all())
    assert (found.eigenvalues.to(expected) - expected).abs().max() <= error * scale
    X = found.eigenvectors.to(
        torch.complex128 if found.eigenvectors.is_complex() else torch.float64
    )
    residuals = (A.to(X) @ X - X * found.eigenvalues.to(X)).norm(dim=0)
    assert residuals.max() <= error * scale
    torch.testing.assert_close(X.norm(dim=0).real, torch.ones_like(residuals), rtol=0, atol=error)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("which", ["LA", "SA", "LM"])
@pytest.mark.parametrize("block_size", [None, 1, 4, 8])
def test_lanczos_finds_the_wanted_eigenvalues(device, dtype, which, block_size):
    values = torch.cat([torch.linspace(-2, 1, 290), torch.linspace(1.5, 3, 10)]).to(dtype)
    A = with_eigenvalues(values, device)
    found = linalg.lanczos(A, 5, which=which, block_size=block_size)
    order = {"LA": -values, "SA": values, "LM": -values.abs()}[which].argsort()
    error = 30 * torch.finfo(dtype).eps ** (2 / 3)
    assert_pairs(A, found, values.double()[order[:5]].to(device), error)
    assert found.eigenvalues.dtype == found.eigenvectors.dtype == dtype
    X = found.eigenvectors.double()
    identity = torch.eye(5, dtype=torch.float64, device=device)
    torch.testing.assert_close(X.T @ X, identity, rtol=0, atol=200 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("which", ["LM", "LR", "SR", "LI"])
@pytest.mark.parametrize("block_size", [1, 3])
def test_arnoldi_finds_the_wanted_eigenvalues(device, which, block_size):
    A = unsymmetric()
    values = torch.linalg.eigvals(A)
    priority = {"LM": values.abs(), "LR": values.real, "SR": -values.real, "LI": values.imag.abs()}
    order = priority[which].argsort(descending=True)
    found = linalg.arnoldi(
        A.to(device), 6, which=which, block_size=block_size, max_basis=40, max_restarts=300
    )
    assert bool(found.converged.all())
    # The order of a conjugate pair is open.
    expected = values[order[:7]].cpu()
    for value in found.eigenvalues.cpu():
        assert (expected - value).abs().min() <= 1e-9
    X, A = found.eigenvectors.cpu(), A.to(torch.complex128)
    assert (A @ X - X * found.eigenvalues.cpu()).norm(dim=0).max() <= 1e-9


def test_a_block_finds_all_copies_of_a_multiple_eigenvalue():
    values = torch.cat([torch.linspace(0, 1, 200), torch.full((4,), 2.0)]).double()
    found = linalg.lanczos(with_eigenvalues(values), 5, block_size=4)
    expected = torch.tensor([2.0, 2, 2, 2, 1], dtype=torch.float64)
    torch.testing.assert_close(found.eigenvalues, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 5, 22, 23, 24, 25, 38, 39, 40, 41])
@pytest.mark.parametrize("block_size", [1, 3])
def test_small_matrices(n, block_size):
    A = with_eigenvalues(torch.arange(n).double())
    found = linalg.lanczos(A, min(n, 3), which="SA", block_size=block_size)
    torch.testing.assert_close(
        found.eigenvalues, torch.arange(n).double()[:3], rtol=0, atol=1e-12 * n
    )
    general = linalg.arnoldi(A, min(n, 3), block_size=block_size)
    torch.testing.assert_close(
        general.eigenvalues.real, torch.arange(n).double().flip(0)[:3], rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
@pytest.mark.parametrize("matrix", ["zero", "identity", "rank one", "diagonal"])
def test_invariant_spaces_are_left(device, dtype, block_size, matrix):
    """The Krylov space of the start ends early; random vectors continue it."""
    n = 150
    one = torch.ones(n, 1, dtype=dtype)
    A = {
        "zero": torch.zeros(n, n, dtype=dtype),
        "identity": torch.eye(n, dtype=dtype),
        "rank one": one @ one.T,
        "diagonal": torch.diag(torch.arange(n).to(dtype) // 30),
    }[matrix].to(device)
    noise = 10 * n * torch.finfo(dtype).eps
    expected = torch.linalg.eigvalsh(A).flip(0)
    for seed in range(10):
        found = linalg.lanczos(A, 4, block_size=block_size, seed=seed)
        assert bool(found.converged.all())
        assert abs(found.eigenvalues[0] - expected[0]) <= noise * max(1.0, float(expected[0]))
        residuals = (A @ found.eigenvectors - found.eigenvectors * found.eigenvalues).norm(dim=0)
        assert residuals.max() <= torch.finfo(dtype).eps ** (2 / 3) * n


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [64, 1024, 1030])
@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8, 9])
def test_products_with_a_dense_matrix(device, dtype, n, columns):
    torch.manual_seed(0)
    A = torch.randn(n, n, dtype=dtype, device=device)
    X = torch.randn(columns, n, dtype=dtype, device=device).T
    for matrix in (A, A.T):  # contiguous, and not
        found = torch.ops.torchium._dense_product(matrix, X)
        exact = matrix.double() @ X.double()
        error = (found.double() - exact).norm() / exact.norm()
        reference = ((matrix @ X).double() - exact).norm() / exact.norm()
        assert error <= 4 * max(float(reference), torch.finfo(dtype).eps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [130, 6144, 6274, 6404])  # a GPU has a kernel from 6144 on
@pytest.mark.parametrize("columns", [1, 3, 8, 9])
def test_products_with_a_symmetric_matrix(device, n, columns):
    if device == "cpu":
        n //= 10
    torch.manual_seed(0)
    A = torch.randn(n, n, device=device) * torch.logspace(-3, 3, n, device=device)
    A = A + A.T
    X = torch.randn(columns, n, device=device).T
    found = torch.ops.torchium._symmetric_dense_product(A, X)
    exact = A.double() @ X.double()
    error = (found.double() - exact).norm() / exact.norm()
    reference = ((A @ X).double() - exact).norm() / exact.norm()
    assert error <= 4 * max(float(reference), torch.finfo(torch.float32).eps)
    assert torch.equal(found, torch.ops.torchium._symmetric_dense_product(A, X))


@pytest.mark.cuda
def test_a_large_symmetric_matrix_is_read_below_the_diagonal():
    torch.manual_seed(0)
    n = 8192
    A = torch.randn(n, n, device="cuda")
    X = torch.randn(5, n, device="cuda").T
    found = torch.ops.torchium._symmetric_dense_product(A, X)
    lower = A.clone()
    for begin in range(0, n, 128):  # the tiles on the diagonal are read whole
        lower[begin : begin + 128, begin + 128 :] = 0
    mirrored = lower + lower.T
    for begin in range(0, n, 128):
        tile = slice(begin, begin + 128)
        mirrored[tile, tile] = A[tile, tile]
    torch.testing.assert_close(found, mirrored @ X, rtol=1e-4, atol=1e-3)
    whole = torch.ops.torchium._symmetric_dense_product(A.T, X)  # a view: the kernel cannot
    torch.testing.assert_close(whole, A.T @ X, rtol=1e-4, atol=1e-3)


@pytest.mark.cuda
def test_a_large_matrix_that_is_not_symmetric_is_refused():
    torch.manual_seed(0)
    A = torch.randn(6400, 6400, device="cuda")
    for matrix in (A, A.tril(), A.triu()):
        with pytest.raises(ValueError, match="the operator is not symmetric"):
            linalg.lanczos(matrix, 2)
    S = A + A.T
    S[5000, 100] = float("nan")
    with pytest.raises(ValueError, match="a product of the operator is not finite"):
        linalg.lanczos(S, 2)


def test_products_stop_as_soon_as_the_residuals_allow_it():
    A = with_eigenvalues(torch.cat([torch.linspace(0, 1, 390), torch.linspace(5, 20, 10)]))
    few = linalg.lanczos(A, 3, max_basis=100)
    assert bool(few.converged.all())
    assert few.products < 50


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [100, 2000])
def test_only_what_is_not_symmetric_is_refused(device, dtype, n):
    """Not the rounding errors of products of length n."""
    torch.manual_seed(0)
    A = torch.randn(n, n, dtype=dtype, device=device)
    A = A + A.T
    skew = torch.randn(n, n, dtype=dtype, device=device)
    for block_size in (1, 8):
        linalg.lanczos(A, 2, block_size=block_size, max_restarts=0, tol=1.0)
        with pytest.raises(ValueError, match="the operator is not symmetric"):
            linalg.lanczos(A + 0.1 * (skew - skew.T), 2, block_size=block_size)


def test_an_operator_and_a_sparse_matrix_give_the_same_pairs():
    n = 500
    diagonals = torch.stack([-torch.ones(n), 2 * torch.ones(n), -torch.ones(n)]).double()
    sparse = torch.sparse.spdiags(diagonals, torch.tensor([-1, 0, 1]), (n, n))
    dense = sparse.to_dense()
    calls = []

    def product(X: Tensor) -> Tensor:
        calls.append(X.shape[1])
        return dense @ X

    operator = linalg.LinearOperator(n, product, dtype=torch.float64)
    of_operator = linalg.lanczos(operator, 3, max_basis=60)
    of_sparse = linalg.lanczos(sparse, 3, max_basis=60)
    exact = 2 - 2 * torch.cos(torch.pi * torch.arange(n, n - 3, -1).double() / (n + 1))
    torch.testing.assert_close(of_operator.eigenvalues, exact, rtol=1e-9, atol=0)
    torch.testing.assert_close(of_sparse.eigenvalues, exact, rtol=1e-9, atol=0)
    assert sum(calls) == of_operator.products


def test_the_seed_decides_and_global_random_numbers_are_not_used():
    A = with_eigenvalues(torch.linspace(0, 1, 100).double())
    state = torch.get_rng_state()
    first, again = linalg.lanczos(A, 2), linalg.lanczos(A, 2)
    other = linalg.lanczos(A, 2, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.eigenvectors, again.eigenvectors)
    assert not torch.equal(first.eigenvectors, other.eigenvectors)


def test_a_good_start_saves_products():
    A = with_eigenvalues(torch.linspace(0, 1, 400).double())
    first = linalg.lanczos(A, 1)
    again = linalg.lanczos(A, 1, start=first.eigenvectors[:, 0])
    assert again.products < first.products / 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tolerance_out_of_reach_does_not_cost_accuracy(dtype):
    """Every restart adds rounding errors: residuals grow once they have reached these."""
    values = torch.cat([torch.linspace(0, 1, 380), torch.linspace(2, 6, 20)]).to(dtype)
    found = linalg.lanczos(with_eigenvalues(values), 8, tol=0.0)
    assert bool(found.converged.all())
    assert found.residual_norms.max() <= 6 * 100 * torch.finfo(dtype).eps
    assert found.products < 400


@pytest.mark.parametrize("method", [linalg.lanczos, linalg.arnoldi])
def test_without_a_tolerance_restarts_end_at_rounding_errors(method):
    """They add up to more than those of a residual."""
    values = torch.linspace(0, 1, 500, dtype=torch.float64)
    A = with_eigenvalues(values)
    found = method(A, 3, tol=0.0)
    assert_pairs(A, found, values.flip(0)[:3].to(found.eigenvalues), 1e-13)
    assert found.products < 600


def test_what_has_not_converged_is_named():
    A = with_eigenvalues(torch.linspace(0, 1, 400).double())
    with pytest.warns(
        UserWarning, match="lanczos: 3 of 3 eigenpairs have not converged in 0 restarts"
    ) as caught:
        found = linalg.lanczos(A, 3, max_restarts=0)
    assert [each.filename for each in caught] == [__file__]  # the user's line
    assert not bool(found.converged.any())
    # The residuals are those of the pairs.
    X = found.eigenvectors
    residuals = (A @ X - X * found.eigenvalues).norm(dim=0)
    torch.testing.assert_close(found.residual_norms, residuals, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("function", [linalg.lanczos, linalg.arnoldi])
@pytest.mark.parametrize("n", [1, 3, 6, 7])
def test_the_default_k_fits_small_matrices(function, n):
    A = torch.diag(torch.arange(1, n + 1, dtype=torch.float64))
    found = function(A)
    expected = A.diagonal().flip(0)[:6]
    torch.testing.assert_close(found.eigenvalues.real, expected)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"k": 0}, "lanczos: k is 0; it must be between 1 and n = 50"),
        ({"k": 51}, "lanczos: k is 51; it must be between 1 and n = 50"),
        ({"which": "LR"}, 'lanczos: which is "LR"; it must be "LA", "SA" or "LM"'),
        ({"block_size": 0}, "lanczos: block_size is 0; it must be positive"),
        ({"max_basis": 7}, "lanczos: max_basis is 7; it must be at least k + 2 block_size = 8"),
        ({"max_restarts": -1}, "lanczos: max_restarts is -1; it must not be negative"),
        ({"tol": float("nan")}, "lanczos: tol is nan; it must be finite and not negative"),
        (
            {"start": torch.zeros(49)},
            r"lanczos: start is \[49\] of Float on cpu; it must be \[50, 1\]",
        ),
    ],
)
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        linalg.lanczos(torch.eye(50), **{"k": 6, **kwargs})


@pytest.mark.parametrize("method", [linalg.lanczos, linalg.arnoldi])
def test_a_function_is_an_operator(method):
    D = torch.arange(1.0, 301.0)[:, None]
    product = lambda X: D.to(X) * X  # noqa: E731
    for found, dtype in [
        (method(product, 2, n=300), torch.float32),
        (method(product, 2, n=300, dtype=torch.float64), torch.float64),
        (method(product, 2, start=torch.ones(300).double()), torch.float64),
        (method(product, 2, start=torch.ones(300, 2), block_size=2), torch.float32),
    ]:
        torch.testing.assert_close(found.eigenvalues.real, torch.tensor([300, 299]).to(dtype))
    expected = method(linalg.LinearOperator(300, product), 2)
    found = method(product, 2, n=300, device="cpu")
    assert all(map(torch.equal, found[:4], expected[:4]))
    name = method.__name__
    with pytest.raises(ValueError, match=rf"{name}: A is a function, whose order .*; pass n=, or"):
        method(product)
    with pytest.raises(ValueError, match=rf"{name}: n is 3, but A has its own; leave n out"):
        method(torch.eye(3), n=3)
    with pytest.raises(ValueError, match="n is 0; it must be a positive integer"):
        method(product, n=0)
    with pytest.raises(ValueError, match=rf"{name}: start is .*; it must be a tensor"):
        method(product, n=3, start=[1.0])
    with pytest.raises(ValueError, match=rf"{name}: start is \[4\] .*it must be \[300, 1\]"):
        method(product, n=300, start=torch.ones(4))


def test_bad_operators():
    with pytest.raises(ValueError, match=r"lanczos: A is \(3, 4\); it must be a square matrix"):
        linalg.lanczos(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"lanczos: A is torch\.bfloat16; it must be float32 or"):
        linalg.lanczos(torch.eye(3).bfloat16())
    with pytest.raises(ValueError, match=r"A is of type str; it must be a tensor .* or a torchium"):
        linalg.lanczos("A")
    with pytest.raises(ValueError, match="n is 0; it must be a positive integer"):
        linalg.LinearOperator(0, lambda X: X)
    with pytest.raises(ValueError, match=r"the operator is not symmetric: .* use arnoldi"):
        linalg.lanczos(unsymmetric())
    with pytest.raises(ValueError, match="a product of the operator is not finite"):
        linalg.lanczos(torch.full((100, 100), float("nan")))
    wrong = linalg.LinearOperator(100, lambda X: X[:50])
    with pytest.raises(ValueError, match=r"product with \[100, 1\] columns .* is \[50, 1\]"):
        linalg.lanczos(wrong)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
@pytest.mark.parametrize("method", [linalg.lanczos, linalg.arnoldi])
def test_squares_of_entries_may_leave_the_range_of_float32(device, scale, method):
    values = torch.cat([torch.linspace(0, 1, 290), torch.linspace(1.5, 3, 10)])
    A = (scale * with_eigenvalues(values, device).double()).float()
    found = method(A, 3)
    assert bool(found.converged.all())
    expected = values.double().flip(0)[:3].to(device)
    found_values = found.eigenvalues.to(torch.complex128).real / scale
    torch.testing.assert_close(found_values, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [12, 200])
@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
@pytest.mark.parametrize("method", [linalg.lanczos, linalg.arnoldi])
def test_squares_of_entries_may_leave_the_range_of_float64(device, n, scale, method):
    A = with_eigenvalues(torch.linspace(0, 1, n).double(), device)
    found, expected = method(scale * A, 3), method(A, 3)
    assert bool(found.converged.all())
    torch.testing.assert_close(found.eigenvalues / scale, expected.eigenvalues, rtol=1e-9, atol=0)
    assert (found.residual_norms / scale <= 1e-9).all()


@pytest.mark.parametrize("n", [20, 200])
def test_residuals_contain_what_is_not_symmetric(n):
    A = with_eigenvalues(torch.linspace(-1, 1, n).double())
    A += 1e-9 * torch.triu(A, 1)
    # Not symmetric enough to converge to the default tolerance.
    with pytest.warns(UserWarning, match="have not converged"):
        found = linalg.lanczos(A, 3)
    X = found.eigenvectors
    residuals = (A @ X - X * found.eigenvalues).norm(dim=0)
    assert bool((found.residual_norms >= 0.5 * residuals).all())
    assert found.residual_norms.min() > 1e-11


def test_a_start_that_is_not_finite_is_refused():
    start = torch.ones(50)
    start[7] = float("nan")
    with pytest.raises(ValueError, match="lanczos: start is not finite"):
        linalg.lanczos(torch.eye(50), 2, start=start)


@pytest.mark.parametrize("function", [linalg.lanczos, linalg.logdet, linalg.xdiag])
def test_an_operator_that_changes_its_operand_is_refused(function):
    operator = linalg.LinearOperator(100, lambda X: X.mul_(2))
    with pytest.raises(ValueError, match="product has changed X in place; it must leave X"):
        function(operator)


# ---- the Hessian


def network() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    return model, torch.randn(20, 6).double(), torch.randint(3, (20,))


def dense_hessian(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    names = [name for name, _ in model.named_parameters()]
    sizes = [p.numel() for p in model.parameters()]
    shapes = [p.shape for p in model.parameters()]

    def loss(flat: Tensor) -> Tensor:
        parts = [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]
        output = torch.func.functional_call(model, dict(zip(names, parts, strict=True)), x)
        return F.cross_entropy(output, y)

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    return torch.func.hessian(loss)(flat)


def test_hessian_vector_products():
    model, x, y = network()
    H = linalg.hvp_operator(lambda: F.cross_entropy(model(x), y), model.parameters())
    exact = dense_hessian(model, x, y)
    assert H.shape == exact.shape
    X = torch.randn(len(exact), 4, dtype=torch.float64)
    torch.testing.assert_close(H @ X, exact @ X)
    torch.testing.assert_close(H @ X[:, 0], exact @ X[:, 0])
    assert all(p.grad is None for p in model.parameters())


def test_the_spectrum_of_a_hessian():
    model, x, y = network()
    H = linalg.hvp_operator(lambda: F.cross_entropy(model(x), y), model.parameters())
    values = torch.linalg.eigvalsh(dense_hessian(model, x, y))
    found = linalg.lanczos(H, 3)
    torch.testing.assert_close(found.eigenvalues, values.flip(0)[:3], rtol=1e-8, atol=1e-10)
    assert abs(linalg.hutchpp(H, num_products=99).value - values.sum()) <= 0.05 * values.sum()


def test_a_hessian_of_parameters_that_enter_linearly_or_not_at_all():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    assert bool((linalg.hvp_operator(lambda: p.sum(), [p, q]) @ torch.ones(5) == 0).all())
    H = linalg.hvp_operator(lambda: p.square().sum(), [p, q])
    torch.testing.assert_close(H @ torch.ones(5), torch.tensor([2.0, 2, 2, 0, 0]))


def test_a_hessian_of_a_scalar_and_of_an_empty_parameter():
    s, empty = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.zeros(0))
    H = linalg.hvp_operator(lambda: s**3 + (empty * s).sum(), [s, empty])
    torch.testing.assert_close(H @ torch.eye(1), torch.tensor([[18.0]]))


def test_single_columns_need_no_vmap():
    torch.manual_seed(0)
    # vmap cannot batch the second derivative of GroupNorm.
    model, x = (
        nn.Sequential(nn.Linear(6, 4), nn.GroupNorm(2, 4)).double(),
        torch.randn(9, 6).double(),
    )
    params = list(model.parameters())
    loss = lambda: model(x).pow(3).mean()  # noqa: E731
    v = torch.randn(36, 1, dtype=torch.float64)
    gradient = torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss(), params, create_graph=True)]
    )
    expected = torch.autograd.grad(gradient @ v[:, 0], params)
    found = linalg.hvp_operator(loss, params) @ v
    torch.testing.assert_close(found[:, 0], torch.cat([e.flatten() for e in expected]))


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("fisher", [None, "empirical", "ggn"])
def test_products_through_group_norm_are_those_of_single_columns(groups, fisher):
    # Under vmap its second derivative raises an error, or with one group is wrong.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 2), nn.GroupNorm(groups, 4), nn.Tanh()).double()
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    params = list(model.parameters())
    if fisher is None:
        A = linalg.hvp_operator(lambda: model(x).pow(3).mean(), params)
    else:

        def losses():
            z = model(x)
            each = z.pow(4).sum(dim=(1, 2, 3))
            return (each, z) if fisher == "ggn" else each

        A = linalg.fisher_operator(losses, params, fisher=fisher)
    X = torch.eye(len(A), dtype=torch.float64)
    expected = torch.stack([A @ column for column in X], dim=1)
    torch.testing.assert_close(A @ X, expected)
    torch.testing.assert_close(expected, expected.T)


def test_parameters_of_which_there_is_no_hessian():
    model, x, y = network()
    params = list(model.parameters())

    def refuses(message: str, params, loss=lambda: F.cross_entropy(model(x), y)) -> None:
        with pytest.raises(ValueError, match=message):
            linalg.hvp_operator(loss, params)

    refuses("params is a Tensor; it must be a list of parameters", params[0])
    refuses(
        r"params\[0\] is a tuple, not a Tensor; pass model.parameters\(\)", model.named_parameters()
    )
    refuses(r"params is a model, Sequential; pass model.parameters\(\)", model)
    refuses(r"params is a model, Linear; pass model.parameters\(\)", torch.nn.Linear(2, 2))
    refuses(r"params\[2\] is in params twice", [params[0], params[1], params[0]])
    refuses("the loss depends on none of params", network()[0].parameters())
    refuses(
        "the loss that loss_fn returns is complex128; it must be real",
        params,
        lambda: torch.fft.fft(model(x)).sum(),
    )
    refuses("has no graph", params, lambda: F.cross_entropy(model(x), y).detach())
    refuses("hvp_operator: loss_fn is .*; it must be a function", params, model(x).square().mean())
    params[1].requires_grad_(False)
    refuses(r"params\[1\] does not require gradients; leave it out", params)


def test_an_operator_is_freed():
    model, x, y = network()
    H = linalg.hvp_operator(lambda: F.cross_entropy(model(x), y), model.parameters())
    linalg.lanczos(H, 2)
    alive = weakref.ref(H)
    del H
    gc.collect()
    assert alive() is None
