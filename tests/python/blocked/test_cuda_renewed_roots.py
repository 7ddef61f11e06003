"""Roots that optimizers update in place on a CUDA device, against roots computed elsewhere."""

from __future__ import annotations

import functools

import pytest
import torch
import torchium
from cuda_waits import no_waits
from reference.matrix_functions import damped_power, from_spectrum, relative_error
from torch import Tensor, nn
from torchium.linalg import matrix_inverse_root

pytestmark = pytest.mark.cuda

EPS = 1e-3
# Orders for every kernel, and numbers of blocks: batches of at most 2^22 elements are joined.
JOINED = [(2, 5), (16, 6), (33, 5), (100, 4), (200, 3)]
ALONE = [(64, 1100), (200, 110), (1024, 5)]
OPTIONS = {"lr": 0.1, "eps": EPS, "update_freq": 1}


@functools.cache
def spread(n: int, seed: int) -> Tensor:
    """Two matrices with eigenvalues from 1 to 1e-4."""
    return from_spectrum(torch.logspace(0, -4, n, dtype=torch.float64).expand(2, n), seed).float()


class Blocks:
    """One parameter of `blocks` blocks [n, n], with two batches of statistics, after a step with zero
    gradient.
    """

    def __init__(self, n: int, blocks: int, seed: int = 0, **options: object) -> None:
        self.param = nn.Parameter(torch.zeros(blocks * n, n, device="cuda"))
        self.optimizer = torchium.Shampoo(
            [self.param],
            block_size=n,
            merge_dims=False,
            max_preconditioned_dim=None,
            **{**OPTIONS, **options},
        )
        self.step()
        scale = torch.linspace(1, 2, blocks, device="cuda").view(-1, 1, 1)
        for mode in range(2):
            L = spread(n, seed + mode).cuda().repeat(blocks // 2 + 1, 1, 1)[:blocks]
            self.state(f"statistics.{mode}").copy_(L * scale)

    def step(self, gradient: float = 0.0) -> None:
        self.param.grad = torch.full_like(self.param, gradient)
        self.optimizer.step()

    def state(self, name: str) -> Tensor:
        return self.optimizer.state[self.param][name]

    def copies(self, name: str) -> list[Tensor]:
        return [self.state(f"{name}.{mode}").clone() for mode in range(2)]

    def composed(self, c: float) -> list[Tensor]:
        return [matrix_inverse_root(L / c, 4, eps=EPS) for L in self.copies("statistics")]


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize(("n", "blocks"), [*JOINED, *ALONE])
def test_as_roots_of_divided_statistics(n: int, blocks: int, capturable: bool) -> None:
    """Bitwise, where the division is exact."""
    case = Blocks(n, blocks, betas=(0.0, 0.5), capturable=capturable)
    case.optimizer.update_preconditioners()
    for X, expected in zip(case.copies("roots"), case.composed(0.5), strict=True):
        assert torch.equal(X, expected)

    case.step()  # c = 0.75, and the statistics are halved
    case.optimizer.update_preconditioners()
    for L, X in zip(case.copies("statistics"), case.copies("roots"), strict=True):
        exact = damped_power(L[-2:].double().cpu() / 0.75, -0.25, eps=EPS)
        assert (relative_error(X[-2:], exact) <= 1e-4).all()
        assert torch.equal(X, X.mT)
    assert not torch.cat(case.copies("root_failures")).any()


@pytest.mark.parametrize("decay", [0.5, 1.0])
@pytest.mark.parametrize(("n", "blocks"), [*JOINED, *ALONE])
def test_a_failed_root_is_kept_and_counted(n: int, blocks: int, decay: float) -> None:
    case = Blocks(n, blocks, betas=(0.0, decay), max_root_failures=10)
    middle, last = blocks // 2, blocks - 1
    case.state("statistics.0")[middle, n // 2, 0] = torch.nan
    case.state("statistics.1")[last] = -case.state("statistics.1")[last]  # far from semi-definite
    failed = torch.zeros(2, blocks, dtype=torch.bool, device="cuda")
    failed[0, middle] = failed[1, last] = True
    case.state("root_failures.0")[0] = 3  # ends with a root
    before = case.copies("roots")
    expected = case.composed(decay)
    for times in (1, 2):
        case.optimizer.update_preconditioners()
        for mode in range(2):
            X, wanted = case.state(f"roots.{mode}"), failed[mode]
            assert torch.equal(X[wanted], before[mode][wanted])
            assert torch.equal(X[~wanted], expected[mode][~wanted])
            assert torch.equal(case.state(f"root_failures.{mode}"), (times * wanted).int())


@pytest.mark.parametrize(("n", "blocks"), [*JOINED, *ALONE])
def test_a_skipped_step_changes_nothing(n: int, blocks: int) -> None:
    case = Blocks(n, blocks, betas=(0.0, 0.5))
    case.state("statistics.0")[0].neg_()
    case.state("root_failures.1")[-1] = 2
    before = [case.copies(name) for name in ("statistics", "roots", "root_failures")]
    case.step(gradient=torch.nan)
    after = [case.copies(name) for name in ("statistics", "roots", "root_failures")]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    case.step()
    assert case.state("root_failures.0")[0] == 1
    assert case.state("root_failures.1")[-1] == 0


@pytest.mark.parametrize(("n", "blocks"), [(33, 5), (200, 3), (200, 110)])
def test_renewal_is_captured_and_waits_for_nothing(n: int, blocks: int) -> None:
    case = Blocks(n, blocks, betas=(0.0, 0.5), capturable=True)
    case.optimizer.update_preconditioners()
    with no_waits() as asleep:
        case.optimizer.update_preconditioners()
    assert not asleep.query()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        case.optimizer.update_preconditioners()
    for mode, L in enumerate(Blocks(n, blocks, seed=7).copies("statistics")):
        case.state(f"statistics.{mode}").copy_(L)
    graph.replay()
    for X, expected in zip(case.copies("roots"), case.composed(0.5), strict=True):
        assert torch.equal(X, expected)


@pytest.mark.parametrize("graphs", ["never", "always"])
def test_orders_that_are_renewed_at_once_do_not_affect_each_other(graphs: str) -> None:
    """More solves than streams, bitwise as each alone."""
    counts = {16: 40, 64: 300, 160: 2, 200: 30, 256: 40, 384: 30, 512: 6, 640: 7, 768: 3, 1024: 5}

    def parameters(n: int) -> list[nn.Parameter]:
        torch.manual_seed(n)
        return [nn.Parameter(torch.randn(n, n, device="cuda")) for _ in range(counts[n])]

    def step(optimizer: torchium.Shampoo, seed: int) -> None:
        for p in optimizer.param_groups[0]["params"]:
            torch.manual_seed(seed + p.size(0))
            p.grad = torch.randn_like(p)
        optimizer.step()

    together = [p for n in counts for p in parameters(n)]
    alone = [parameters(n) for n in counts]
    optimizers = [
        torchium.Shampoo(params, graphs=graphs, exponent_warmup=0, **OPTIONS)
        for params in (together, *alone)
    ]
    for seed in range(6):
        for optimizer in optimizers:
            step(optimizer, seed)
    for p, expected in zip(together, (p for params in alone for p in params), strict=True):
        assert torch.equal(p, expected)


def test_large_batches_are_renewed_without_copies() -> None:
    """The workspace is 4 n^2 floats per matrix of both modes, which are renewed at once; a copy of all
    statistics or roots would be n^2 more.
    """
    case = Blocks(1024, 5, betas=(0.0, 0.5))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.optimizer.update_preconditioners()
    used = torch.cuda.max_memory_allocated() - before
    assert used <= 4.1 * 4 * 2 * case.state("statistics.0").numel()
