"""Matrices for which LAPACK fails or returns NaN: finite results within the documented error."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torchium
from matrix_cases import norm
from torch import Tensor, nn
from torchium.linalg import eigh, eigh_retries, matrix_inverse_root, matrix_power, spd_inverse


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_alone(n: int, seed: int) -> Tensor:
    """The Gram matrix of gradients with four nonzero rows, as for an embedding."""
    G = torch.zeros(n, 64, dtype=torch.float64)
    rows = torch.randperm(n, generator=generator(seed))[:4]
    G[rows] = torch.randn(len(rows), 64, generator=generator(seed), dtype=torch.float64)
    return G @ G.T


def average(n: int, seed: int) -> Tensor:
    """A running average of them, over many scales."""
    A = torch.zeros(n, n, dtype=torch.float64)
    for t in range(6):
        A = 0.95 * A + 0.05 * 10.0 ** (-2 * t) * rows_alone(n, 6 * seed + t)
    return A


def decayed(n: int, seed: int) -> Tensor:
    """Rows of which all but a few were last nonzero long ago."""
    scales = torch.logspace(0, -15, n, dtype=torch.float64)
    v = torch.randn(n, 8, generator=generator(seed), dtype=torch.float64) * scales[:, None]
    return v @ v.T


def bag_of_words(n: int, seed: int) -> Tensor:
    words = (torch.rand(32, n, generator=generator(seed)) < 4 / n).double()
    return words.T @ words / 32


def blocks(n: int, seed: int) -> Tensor:
    sizes = [n // 3, 1, n - n // 3 - 1]
    parts = [rows_alone(size, seed) * 10.0**-i for i, size in enumerate(sizes)]
    return torch.block_diag(*parts)


def repeated(n: int, seed: int) -> Tensor:
    Q, _ = torch.linalg.qr(torch.randn(n, n, generator=generator(seed), dtype=torch.float64))
    A = (Q * torch.tensor([1.0, 1e-3]).double().repeat(n)[:n]) @ Q.T
    return (A + A.T) / 2


KINDS = [rows_alone, average, decayed, bag_of_words, blocks, repeated]


def noise(n: int, dtype: torch.dtype) -> float:
    """The floor of `eigh` in docs/roots.md, in units of the largest eigenvalue."""
    return (4 + math.sqrt(n) / 4) * torch.finfo(dtype).eps


def assert_eigensystem(A: Tensor, values: Tensor, vectors: Tensor) -> None:
    n, A = A.shape[-1], A.double()
    tolerance = 4 * n * torch.finfo(values.dtype).eps
    Q, D = vectors.double(), values.double()
    assert values.isfinite().all()
    assert (values.diff(dim=-1) >= 0).all()
    assert (norm(A @ Q - Q * D.unsqueeze(-2)) <= tolerance * norm(A)).all()
    assert (norm(Q.mT @ Q - torch.eye(n)) <= tolerance).all()
    expected = torch.linalg.eigvalsh(A)
    largest = expected.abs().amax(-1, keepdim=True)
    # The noise is that of small eigenvalues; large coinciding ones have larger errors.
    assert ((D - expected).abs() <= 4 * noise(n, values.dtype) * largest).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [5, 40, 128, 300])
def test_every_finite_matrix_has_an_eigensystem(n, kind, dtype):
    A = torch.stack([kind(n, seed) for seed in range(12)]).to(dtype)
    assert_eigensystem(A, *eigh(A))


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-10, 1e10, 1e30])
def test_scales(scale):
    A = torch.stack([kind(60, 0) / kind(60, 0).abs().max() for kind in KINDS]).float()
    values, vectors = eigh(A * scale)
    assert values.isfinite().all()
    largest = torch.linalg.eigvalsh(A.double()).amax(-1, keepdim=True) * scale
    # Entries below the smallest normal number have few digits.
    allowed = 2 * noise(60, torch.float32) + 60 * 2.0**-149 / scale
    residual = (A.double() * scale) @ vectors.double() - vectors.double() * values.double()[:, None]
    assert (norm(residual) <= 60 * allowed * largest[:, 0]).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_neighbours_and_layouts(count, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        A = torch.stack([KINDS[i % len(KINDS)](48, i) for i in range(count)] or [torch.eye(48)])
        A = A.float()[:count]
        alone = [eigh(a) for a in A]
        strided = torch.stack([A, A], dim=-1).transpose(1, 2)[..., 0]
        together = eigh(strided)
        for i, (values, vectors) in enumerate(alone):
            assert torch.equal(together[0][i], values)
            assert torch.equal(together[1][i], vectors)
        if count > 1:
            A[1, 2, 3] = math.nan
            values, vectors = eigh(A)
            assert values[1].isnan().all()
            for i in (0, *range(2, count)):
                assert torch.equal(values[i], alone[i][0])
                assert torch.equal(vectors[i], alone[i][1])
    finally:
        torch.set_num_threads(before)


def test_rows_without_couplings_keep_their_digits():
    diagonal = torch.tensor([1.0, 1e-20, 0.0, 3e-12, 2.0])
    values, vectors = eigh(torch.diag(diagonal))
    assert torch.equal(values, diagonal.sort().values)
    assert torch.equal(vectors, torch.eye(5)[:, diagonal.argsort()])


def test_retries_are_counted():
    before = eigh_retries()
    for seed in range(3):
        eigh(repeated(20, seed).float())
    assert eigh_retries() == before  # LAPACK is correct for these


@pytest.mark.parametrize("method", ["auto", "eigh", "newton"])
@pytest.mark.parametrize("kind", KINDS)
def test_roots(kind, method):
    A = torch.stack([kind(96, seed) for seed in range(8)]).float()
    X, info = matrix_inverse_root(A, 4, relative_eps=1e-4, method=method, return_info=True)
    assert X.isfinite().all()
    assert (info.residual < 1e-2).all()
    assert matrix_inverse_root(A, 2, method=method).isfinite().all()
    assert matrix_power(A, 0.5).isfinite().all()
    assert spd_inverse(A).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [3, 40, 300])
def test_the_floor_of_eigh_is_the_documented_one(n, dtype, device):
    """(4 + sqrt(n) / 4) u times the largest eigenvalue: smaller ones count as this."""
    v = torch.randn(n, 2, generator=generator(0), dtype=torch.float64)
    A = (v @ v.T).to(device, dtype)
    largest = torch.linalg.eigvalsh(v @ v.T)[-1]
    X, info = matrix_inverse_root(A, 2, method="eigh", return_info=True)
    expected = noise(n, dtype) * largest
    assert float(info.floor) == pytest.approx(float(expected), rel=1e-5)
    at_the_floor = torch.linalg.eigvalsh(X.cpu().double())[-1]
    assert at_the_floor == pytest.approx(float(expected) ** -0.5, rel=1e-3)


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 1e-20, 1e20, 1e38])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1.0])
@pytest.mark.parametrize("root", [1, 2, 4])
def test_no_root_of_a_finite_matrix_fails(root, eps, largest):
    v = torch.randn(6, 40, generator=generator(0))
    A = torch.einsum("bi,bj->bij", v, v)
    A = A / A.abs().amax((1, 2), keepdim=True) * largest
    for method in ("eigh", "newton"):
        X, info = matrix_inverse_root(A, root, eps=eps, method=method, return_info=True)
        assert X.isfinite().all()
        below_the_floor = info.floor > torch.linalg.matrix_norm(A.double(), 2)
        assert ((info.residual <= 0.25) | below_the_floor).all()


def root_failures(optimizer: torch.optim.Optimizer) -> int:
    failures = [
        value.max()
        for state in optimizer.state.values()
        for key, value in state.items()
        if key.startswith("root_failures")
    ]
    return int(torch.stack(failures).max())


@pytest.mark.parametrize("scale", [1e-22, 1e-20, 1e-10, 1e10, 1e16])
@pytest.mark.parametrize("method", ["auto", "eigh", "newton"])
def test_statistics_of_any_scale(method, scale):
    weight = nn.Parameter(torch.ones(40, 24))
    optimizer = torchium.Shampoo(
        [weight], lr=1e-3, eps=0.0, update_freq=1, root_method=method, grafting="sgd"
    )
    for step in range(4):
        weight.grad = scale * torch.randn(40, 24, generator=generator(step))
        optimizer.step()
        assert root_failures(optimizer) == 0
    roots = [v for k, v in optimizer.state[weight].items() if k.startswith("roots")]
    assert all(root.isfinite().all() for root in roots)
    assert not any(torch.equal(root[0], torch.eye(len(root[0]))) for root in roots)


OPTIMIZERS = {
    "shampoo": lambda p: torchium.Shampoo(p, lr=0.01, update_freq=1, block_size=256),
    "shampoo without damping": lambda p: torchium.Shampoo(
        p, lr=0.01, eps=0.0, update_freq=1, exponent=-1.0, grafting="sgd"
    ),
    "from_adamw": lambda p: torchium.Shampoo.from_adamw(p, lr=1e-3, update_freq=1),
    "adagrad": lambda p: torchium.Adagrad(p, lr=0.01, full_matrix=True),
    "adagrad by newton": lambda p: torchium.Adagrad(
        p, lr=0.01, full_matrix=True, root_method="newton"
    ),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_embeddings_train(make):
    embedding = nn.Embedding(300, 32)
    optimizer = make(embedding.parameters())
    for step in range(12):
        optimizer.zero_grad()
        words = torch.randint(300, (4,), generator=generator(step))
        embedding(words).pow(2).sum().backward()
        optimizer.step()
        assert root_failures(optimizer) == 0
    assert embedding.weight.isfinite().all()


@pytest.mark.parametrize(
    ("split", "method"),
    [
        ("pi", "eigh"),
        ("pi", "newton"),
        ("pi", "auto"),
        ("plain", "eigh"),
        ("plain", "newton"),
        ("pi", "cholesky"),
        ("exact", "eigh"),
    ],
)
@pytest.mark.parametrize("damping", [1e-3, 0.0])
def test_kfac_on_bags_of_words(split, method, damping):
    model = nn.Sequential(nn.Linear(300, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torchium.KFAC(
        model, lr=1e-3, TCov=1, TInv=1, damping=damping, damping_split=split, solver=method
    )
    for step in range(8):
        optimizer.zero_grad()
        words = (torch.rand(16, 300, generator=generator(step)) < 0.01).float()
        nn.functional.cross_entropy(model(words), torch.arange(16) % 3).backward()
        optimizer.step()
        assert root_failures(optimizer) == 0
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("scale", [1e-30, 1.0, 10.0])
@pytest.mark.parametrize("split", ["pi", "plain"])
def test_methods_of_kfac_agree(split, scale):
    results = []
    for method in ("eigh", "newton", "cholesky", "auto"):
        torch.manual_seed(0)
        model = nn.Linear(20, 6)
        optimizer = torchium.KFAC(
            model, lr=0.1, damping=0.1, damping_split=split, solver=method, kl_clip=None
        )
        x = torch.randn(64, 20, generator=generator(1)) * scale
        nn.functional.cross_entropy(model(x), torch.arange(64) % 6).backward()
        optimizer.step()
        results.append(optimizer.state[model.weight]["A_inverse"])
        assert root_failures(optimizer) == 0
    for other in results[1:]:
        assert norm(other - results[0]) <= 1e-4 * norm(results[0])


def test_newton_has_no_eigenvectors_for_kfac():
    with pytest.raises(ValueError, match="damping_split='exact'"):
        torchium.KFAC(nn.Linear(2, 2), damping_split="exact", solver="newton")


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda model: torchium.Shampoo(model.parameters(), update_freq=1), "statistics.0"),
        (lambda model: torchium.Adagrad(model.parameters(), full_matrix=True), "statistics.0"),
        (lambda model: torchium.KFAC(model, TCov=1, TInv=1), "A"),
    ],
    ids=["Shampoo", "Adagrad", "KFAC"],
)
def test_remedy_names_options_of_the_class(make, key):
    model = nn.Linear(4, 3, bias=False)
    optimizer = make(model)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator(0))).square().mean().backward()
        optimizer.step()

    def fail_three_times() -> None:
        for _ in range(3):
            optimizer.state[model.weight][key].fill_(math.nan)
            step()

    step()
    with pytest.raises(RuntimeError, match="failed 3 times in a row") as error:
        fail_three_times()
    options = optimizer.param_groups[0].keys()
    named = {"eps", "relative_eps", "damping", "root_method", "solver", "lr"} & set(
        re.findall(r"\w+", str(error.value).split(";")[-1])
    )
    assert named & {"root_method", "solver"}
    assert named <= options
