"""Matrix functions and optimizers on a CUDA device that is not the current one."""

from __future__ import annotations

import matrix_cases
import pytest
import torch
from matrix_cases import Function
from optimizer_cases import CASES, mlp, run
from reference.matrix_functions import from_spectrum
from torch import Tensor
from torchium.linalg import matrix_inverse_root

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

ORDERS = [5, 33, 100, 200]  # of every kernel
FUNCTIONS: dict[str, Function] = {
    **matrix_cases.FUNCTIONS,
    "root and info": lambda A: matrix_inverse_root(A, 2, eps=1e-3, return_info=True),
}


def stack(n: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    values = torch.logspace(0, -4, n, dtype=torch.float64).expand(3, n)
    return from_spectrum(values, seed).to(device, dtype)


def tensors(result: object) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    assert isinstance(result, list | tuple)
    return [t for part in result for t in tensors(part)]


def assert_same_bits(on_second: object, on_first: object) -> None:
    for actual, expected in zip(tensors(on_second), tensors(on_first), strict=True):
        assert actual.device == torch.device("cuda:1")
        assert torch.equal(actual.cpu(), expected.cpu())
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", ORDERS)
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_the_other_device_gives_the_same_bits(name: str, n: int, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    with torch.cuda.device(0):
        expected = function(stack(n, "cuda:0", dtype))
        assert_same_bits(function(stack(n, "cuda:1", dtype)), expected)


@pytest.mark.parametrize("n", ORDERS)
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_stream_of_the_other_device(name: str, n: int) -> None:
    function = FUNCTIONS[name]
    A = stack(n, "cuda:1")
    expected = function(stack(n, "cuda:0"))
    stream = torch.cuda.Stream("cuda:1")
    stream.wait_stream(torch.cuda.current_stream("cuda:1"))
    with torch.cuda.stream(stream), torch.cuda.device(0):
        result = function(A)
        assert torch.cuda.current_stream("cuda:1") == stream
    torch.cuda.current_stream("cuda:1").wait_stream(stream)
    assert_same_bits(result, expected)


@pytest.mark.parametrize("n", ORDERS)
def test_the_other_device_is_not_waited_for(n: int) -> None:
    A = stack(n, "cuda:1")
    expected = matrix_inverse_root(A, 4, eps=1e-3, method="newton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        X = matrix_inverse_root(A, 4, eps=1e-3, method="newton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(X, expected)


def test_a_list_over_two_devices() -> None:
    devices = ["cuda:0", "cuda:1", "cpu", "cuda:1", "cuda:0", "cpu"]
    A = [stack(n, device, seed=n) for n in ORDERS for device in devices]
    roots = matrix_inverse_root(A, 4, eps=1e-2, method="newton")
    for X, entry in zip(roots, A, strict=True):
        assert X.device == entry.device
        expected = matrix_inverse_root(entry, 4, eps=1e-2, method="newton")
        torch.testing.assert_close(X, expected, rtol=1e-4, atol=1e-4)
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("name", list(CASES))
def test_optimizers_on_the_other_device(name: str) -> None:
    models = [mlp(device) for device in ("cuda:0", "cuda:1")]
    first, second = (run(m, CASES[name](m.parameters()), steps=5) for m in models)
    assert_same_bits(second, first)
