"""Lists of batches of mixed orders, dtypes and devices: one solve per kind, each result as for the entry
alone.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from reference.matrix_functions import from_spectrum, relative_error
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torchium.linalg import InverseRootInfo, eigh, matrix_inverse_root, matrix_power

ops = torch.ops.torchium
OPTIONS = {"eps": 1e-2, "method": "newton"}


def stack(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """[*shape, n, n] for shape = (..., n): positive definite, condition 100."""
    spectrum = torch.logspace(0, -2, shape[-1], dtype=torch.float64)
    return from_spectrum(spectrum.expand(shape), seed=seed).to(dtype)


def mixed(device: torch.device | str = "cpu") -> list[Tensor]:
    """Seven batches of four kinds, with strides and an empty batch among them."""
    return [
        A.to(device)
        for A in (
            stack(3, 5),
            stack(2, 2, 9, dtype=torch.float32),
            stack(5, seed=1),
            stack(0, 5),
            stack(4, 9, dtype=torch.float32, seed=2).mT,
            stack(2, 5, dtype=torch.float32),
            stack(3, 9, dtype=torch.bfloat16),
        )
    ]


class Calls(TorchDispatchMode):
    """Counts the operators below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count[str(op)] += 1
        return op(*args, **(kwargs or {}))


def assert_like(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert actual.device == expected.device
    tolerance = 100 * torch.finfo(expected.dtype).eps if expected.is_floating_point() else 0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("container", [list, tuple])
def test_every_entry_has_the_root_that_it_has_alone(device, container):
    A = mixed(device)
    roots = matrix_inverse_root(container(A), 4, **OPTIONS)
    assert isinstance(roots, list)
    for X, batch in zip(roots, A, strict=True):
        assert_like(X, matrix_inverse_root(batch, 4, **OPTIONS))


def test_infos_come_one_an_entry(device):
    A = mixed(device)
    roots, infos = matrix_inverse_root(A, 2, return_info=True, **OPTIONS)
    assert len(roots) == len(infos) == len(A)
    for X, info, batch in zip(roots, infos, A, strict=True):
        expected, expected_info = matrix_inverse_root(batch, 2, return_info=True, **OPTIONS)
        assert isinstance(info, InverseRootInfo)
        assert_like(X, expected)
        assert torch.equal(info.iterations, expected_info.iterations)
        assert torch.equal(info.floor, expected_info.floor)
        assert_like(info.residual, expected_info.residual)


def test_powers_and_eigensystems(device):
    A = mixed(device)
    powers = matrix_power(A, -0.3, relative_eps=1e-3)
    values, vectors = eigh(A)
    for X, d, Q, batch in zip(powers, values, vectors, A, strict=True):
        assert_like(X, matrix_power(batch, -0.3, relative_eps=1e-3))
        assert_like(d, eigh(batch)[0])
        composed = (Q.double() * d.double().unsqueeze(-2)) @ Q.double().mT
        assert (
            relative_error(composed, batch.double().cpu()) < 20 * torch.finfo(X.dtype).eps
        ).all()


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("matrix_inverse_root", lambda A: matrix_inverse_root(A, 4, **OPTIONS)),
        ("matrix_inverse_root_info", lambda A: matrix_inverse_root(A, 4, return_info=True)),
        ("matrix_power", lambda A: matrix_power(A, 0.5)),
        ("eigh", eigh),
    ],
)
def test_matrices_of_one_kind_are_one_solve(name, call):
    with Calls() as calls:
        call(mixed() * 10)
    assert calls.count[f"torchium.{name}.default"] == 4
    assert calls.count["aten.cat.default"] == 4


def test_a_solve_takes_no_more_than_keeps_the_device_busy():
    large = torch.empty(5, 4096, 4096, device="meta")  # more than 2^26 elements
    small = torch.empty(4096, 4096, device="meta")
    with Calls() as calls:
        roots = matrix_inverse_root([large, small, small, large, small], 4)
    assert [X.shape for X in roots] == [A.shape for A in (large, small, small, large, small)]
    assert calls.count["torchium.matrix_inverse_root.default"] == 3


def test_an_empty_list_has_no_results():
    assert matrix_inverse_root([], 4) == []
    assert matrix_inverse_root([], 4, return_info=True) == ([], [])
    assert matrix_power([], 0.5) == []
    assert eigh([]) == ([], [])


def test_a_non_finite_entry_is_alone(device):
    A = mixed(device)
    expected = matrix_inverse_root(A, 4, **OPTIONS)
    A[0][1, 0, 0] = torch.nan
    roots = matrix_inverse_root(A, 4, **OPTIONS)
    assert roots[0][1].isnan().all()
    expected[0][1] = torch.nan
    torch.testing.assert_close(roots, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.cuda
def test_a_list_over_host_and_device():
    A = [stack(2, 7), stack(3, 7).cuda(), stack(7, seed=3), stack(1, 7, seed=4).cuda()]
    for X, entry in zip(matrix_inverse_root(A, 4, eps=1e-2), A, strict=True):
        assert_like(X, matrix_inverse_root(entry, 4, eps=1e-2))


# Errors

BAD_ENTRIES = [
    (torch.zeros(2, 3), r"A\[1\] has shape \[2, 3\]"),
    (torch.zeros(3), r"A\[1\] has shape \[3\]"),
    (torch.eye(3).int(), r"A\[1\] has dtype Int"),
    (torch.eye(3).to_sparse(), r"A\[1\] has layout Sparse"),
]
FUNCTIONS = [lambda A: matrix_inverse_root(A, 2), lambda A: matrix_power(A, 0.5), eigh]


@pytest.mark.parametrize("call", FUNCTIONS)
@pytest.mark.parametrize(("entry", "message"), BAD_ENTRIES)
def test_errors_name_the_entry(call, entry, message):
    with pytest.raises(ValueError, match=message):
        call([torch.eye(3), entry])


def test_wrong_arguments():
    A = [torch.eye(3)]
    with pytest.raises(ValueError, match="root is 0"):
        matrix_inverse_root(A, 0)
    with pytest.raises(ValueError, match="method is 'qr'"):
        matrix_inverse_root(A, 2, method="qr")
    with pytest.raises(ValueError, match="eps is -1"):
        matrix_power(A, 2.0, eps=-1.0)


@pytest.mark.parametrize("call", [FUNCTIONS[0], eigh])
def test_functions_without_derivative_refuse_gradients(call):
    A = [torch.eye(3), torch.eye(3, requires_grad=True)]
    with pytest.raises(RuntimeError, match=r"A\[1\] requires grad"):
        call(A)
    with torch.no_grad():
        call(A)


# Operators


def test_gradients_of_powers_reach_every_entry():
    A = [stack(2, 3).requires_grad_(), stack(4).requires_grad_(), stack(3, seed=1).requires_grad_()]
    assert torch.autograd.gradcheck(lambda *A: tuple(matrix_power(A, -0.5, eps=0.1)), A)


def test_opcheck(device):
    A = [A.to(device) for A in (stack(3, 5), stack(4, 9, dtype=torch.float32).mT, stack(0, 5))]
    opcheck(ops.matrix_inverse_root.list, (A, 4), OPTIONS)
    opcheck(ops.matrix_inverse_root_info.list, (A, 4), OPTIONS)
    opcheck(ops.eigh.list, (A,))
    opcheck(ops.matrix_power.list, (A, -0.5), {"eps": 1e-2})
    A = [A[0].clone().requires_grad_(), A[1]]
    opcheck(ops.matrix_power.list, (A, 1.5), {"relative_eps": 1e-2})


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_call_matches_eager(dynamic):
    def call(A: list[Tensor]) -> list[Tensor]:
        return matrix_power(A, -0.5, eps=0.1) + matrix_inverse_root(A, 4, **OPTIONS)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for A in ([stack(2, 5), stack(6), stack(5)], [stack(3, 4), stack(6), stack(4)]):
        torch.testing.assert_close(compiled(A), call(A), rtol=0, atol=0)


def test_autocast_does_not_lower_the_precision(device):
    A = mixed(device)
    expected = matrix_inverse_root(A, 4, **OPTIONS)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        roots = matrix_inverse_root(A, 4, **OPTIONS)
    torch.testing.assert_close(roots, expected, rtol=0, atol=0)
