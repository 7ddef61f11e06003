"""memory_info, workspace_report, set_workspace_limit and the arena of efficient_tensor_creation."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torchium
from torch.profiler import ProfilerActivity, profile
from torchium import linalg
from torchium.utils.cuda_kernels import CUDAMemoryOps, cuda_memory_info

zeros = CUDAMemoryOps.efficient_tensor_creation
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _no_limit_and_empty_arenas():
    torchium.set_workspace_limit(None)
    gc.collect()
    CUDAMemoryOps.release_arenas()
    yield
    torchium.set_workspace_limit(None)
    CUDAMemoryOps.release_arenas()


# --- memory_info ---


def test_memory_of_the_machine():
    info = torchium.memory_info("cpu")
    assert info.device == torch.device("cpu")
    assert 0 < info.available <= info.total
    assert (info.allocated, info.cached, info.arena, info.workspace_limit) == (0, 0, 0, None)


@pytest.mark.cuda
def test_memory_of_a_cuda_device():
    x = torch.empty(MIB, device="cuda", dtype=torch.uint8)
    info, known = torchium.memory_info(), cuda_memory_info()
    assert info.device == torch.device("cuda", 0)
    assert info.total == known["total_memory"]
    assert (info.allocated, info.cached) == (known["allocated_memory"], known["cached_memory"])
    assert info.allocated >= x.nbytes
    assert torchium.memory_info(0) == torchium.memory_info("cuda:0")


def test_memory_of_a_device_that_does_not_exist():
    with pytest.raises(ValueError, match="device is meta"):
        torchium.memory_info("meta")
    with pytest.raises(ValueError, match="device is cuda:9"):
        torchium.memory_info("cuda:9")


# --- set_workspace_limit ---


def workspace_of_a_product() -> int:
    A, B = torch.ones(400, 300, dtype=torch.bfloat16), torch.ones(300, 500, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        C = linalg.chunked_matmul(A, B)
    assert (C == 300).all()
    memory = [e.self_cpu_memory_usage for e in recorded.events()]
    return sum(x for x in memory if x > 0) - C.nbytes


def test_the_limit_bounds_the_default_workspace_of_products():
    everything = 4 * (400 * 300 + 300 * 500 + 400 * 500)
    assert workspace_of_a_product() == everything
    torchium.set_workspace_limit(100_000)
    assert torchium.memory_info("cpu").workspace_limit == 100_000
    assert workspace_of_a_product() <= 100_000
    torchium.set_workspace_limit(None)
    assert workspace_of_a_product() == everything


def test_a_limit_that_holds_no_element_says_so():
    torchium.set_workspace_limit(10)
    A = torch.ones(3, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"max_workspace_bytes is 10; one element .* needs 28"):
        linalg.chunked_matmul(A, A)
    assert linalg.chunked_matmul(A, A, max_workspace_bytes=100).sum() == 27


@pytest.mark.parametrize("value", [1.5, "1", True])
def test_a_limit_is_an_integer(value):
    with pytest.raises(
        ValueError, match=r"set_workspace_limit: bytes is .*; it must be an integer"
    ):
        torchium.set_workspace_limit(value)


def test_a_limit_is_not_negative():
    torchium.set_workspace_limit(5)
    with pytest.raises(ValueError, match=r"set_workspace_limit: bytes is -1"):
        torchium.set_workspace_limit(-1)
    assert torchium.memory_info("cpu").workspace_limit == 5


# --- efficient_tensor_creation ---


def test_memory_is_taken_again_when_all_tensors_of_a_block_are_gone():
    a, b = zeros([100]), zeros([50], dtype=torch.float64)
    first, second = a.data_ptr(), b.data_ptr()
    assert second == first + 512
    a.fill_(1)
    b.fill_(2)
    assert a.sum() == 100
    del a
    c = zeros([10])
    assert c.data_ptr() not in (first, second)
    del b, c
    d = zeros([200], dtype=torch.int64)
    assert d.data_ptr() == first
    assert (d == 0).all()
    info = torchium.memory_info("cpu")
    assert (info.arena, info.arena_in_use) == (2 * MIB, 1792)


def test_tensors_are_ordinary(tmp_path):
    x = zeros([2, 3], dtype=torch.float16)
    assert (x.shape, x.dtype, x.device.type) == ((2, 3), torch.float16, "cpu")
    assert x.is_contiguous()
    assert x.untyped_storage().nbytes() == 12
    torch.save(x + 1, tmp_path / "x.pt")
    torch.save(x, tmp_path / "y.pt")
    assert (tmp_path / "y.pt").stat().st_size < 10_000
    y = zeros([3]).requires_grad_()
    (2 * y).sum().backward()
    assert (y.grad == 2).all()
    assert zeros([]).shape == ()
    assert zeros([0, 5]).numel() == 0
    assert zeros([2]).dtype == torch.get_default_dtype()
    with torch.device("meta"):
        assert zeros([2]).is_meta


def test_large_tensors_have_blocks_of_their_size():
    x = zeros([3 * MIB], dtype=torch.uint8)
    address = x.data_ptr()
    assert torchium.memory_info("cpu").arena == 3 * MIB
    del x
    assert zeros([2 * MIB + 1], dtype=torch.uint8).data_ptr() == address
    CUDAMemoryOps.release_arenas()
    assert torchium.memory_info("cpu").arena == 0


def test_release_keeps_blocks_in_use():
    x = zeros([8])
    CUDAMemoryOps.release_arenas()
    assert torchium.memory_info("cpu").arena == 2 * MIB
    x.fill_(3)
    assert x.sum() == 24


def test_beyond_the_limit_memory_is_torchs():
    torchium.set_workspace_limit(2 * MIB)
    x, y = zeros([MIB], dtype=torch.uint8), zeros([2 * MIB], dtype=torch.uint8)
    assert torchium.memory_info("cpu").arena == 2 * MIB
    assert (x == 0).all()
    assert (y == 0).all()


def test_threads_share_no_memory():
    wrong = []

    def work(number):
        for i in range(200):
            x = zeros([64 + i], dtype=torch.int64)
            y = zeros([32], dtype=torch.int64)
            x.fill_(number)
            if not ((x == number).all() and (y == 0).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_fake_tensors_take_no_memory():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        x = zeros([10, 10])
    assert isinstance(x, torch._subclasses.FakeTensor)
    assert torchium.memory_info("cpu").arena == 0


def test_a_negative_size():
    with pytest.raises(ValueError, match=r"shape is \[2, -1\]; its sizes must not be negative"):
        zeros([2, -1])


@pytest.mark.cuda
def test_the_arena_of_a_cuda_device():
    x = zeros([1000], device="cuda")
    address = x.data_ptr()
    assert torchium.memory_info().arena == 2 * MIB
    x.fill_(7)
    del x
    y = zeros([1000], device="cuda")
    assert y.data_ptr() == address
    assert (y == 0).all()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert zeros([1000], device="cuda").data_ptr() != address


# --- workspace_report ---


def uses(owner):
    return [use for use in torchium.workspace_report() if use.owner == owner]


@pytest.mark.parametrize(
    "name", ["Shampoo", "Adagrad", "KFAC", "NaturalGradient", "KFACPreconditioner", "AdaHessian"]
)
def test_the_report_lists_optimizers_with_their_state(name):
    gc.collect()
    before = len(uses(name))
    model = torch.nn.Linear(20, 10)
    optimizer = getattr(torchium, name)(model.parameters())
    assert len(uses(name)) == before
    loss = model(torch.randn(8, 20)).square().mean()
    loss.backward(create_graph=name == "AdaHessian")
    optimizer.step()
    found = uses(name)
    assert len(found) == before + 1
    use = next(u for u in found if u.parameters == 2)
    assert use.device == torch.device("cpu")
    state = {
        x.data_ptr(): x.nbytes
        for values in optimizer.state.values()
        for x in values.values()
        if isinstance(x, torch.Tensor)
    }
    assert use.state_bytes == sum(state.values())
    assert use.scratch_bytes == 0
    del optimizer, found, loss, state
    model.zero_grad(set_to_none=True)
    gc.collect()
    assert len(uses(name)) == before


def test_the_report_lists_the_arena():
    assert not uses("Arena")
    x = zeros([10])
    (use,) = uses("Arena")
    assert (use.scratch_bytes, use.state_bytes, use.parameters) == (2 * MIB, 0, 0)
    del x
    CUDAMemoryOps.release_arenas()
    assert not uses("Arena")


def test_devices_and_limits_that_do_not_fit_are_named():
    for device in ("meta", "banana", 3.5, -1):
        with pytest.raises(
            ValueError, match=rf"memory_info: device is '?{device}'?; it must be a CUDA"
        ):
            torchium.memory_info(device)
    with pytest.raises(
        ValueError, match=r"set_workspace_limit: bytes is 9223372036854775808 \(int\)"
    ):
        torchium.set_workspace_limit(2**63)


@pytest.mark.parametrize("shape", [5, "5", (1.5,), ("a",), None])
def test_shapes_of_the_arena_are_sequences_of_integers(shape):
    message = r"efficient_tensor_creation: shape is .*; it must be a sequence of integers"
    with pytest.raises(ValueError, match=message):
        zeros(shape)
    with pytest.raises(ValueError, match=r"dtype is 'f'; it must be a torch\.dtype"):
        zeros((2,), dtype="f")
