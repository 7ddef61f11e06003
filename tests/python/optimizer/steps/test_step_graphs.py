"""Steps that Shampoo captures in CUDA graphs equal launched steps, bitwise."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from typing import Any

import pytest
import torch
import torchium
from graph_steps import (
    assert_both_same,
    change_learning_rates_between_replays,
    change_learning_rates_in_tensors,
    check_capture_of_the_caller,
    check_skipped_steps,
    freeze,
    give_gradients,
    graph_count,
    launches_of_a_step,
    reload,
    replace_data,
    set_option,
    train,
    train_with_gradients_anywhere,
    values,
)
from optimizer_cases import assert_same
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.cuda

# Multiples of 8 are for the split fp16 kernels, the others for cuBLAS.
SHAPES = [(64, 32), (32,), (48, 64), (48,), (16, 8, 3, 3), (20, 90)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "averages": {"betas": (0.9, 0.99), "momentum": 0.9, "grafting": "adam"},
    "adamw": {
        "betas": (0.9, 0.99), "grafting": "adam", "exponent": -0.5, "exponent_warmup": 20,
        "decoupled_weight_decay": True, "weight_decay": 0.01,
    },
    "tf32": {"betas": (0.9, 0.99), "matmul_precision": "high"},
    "penalty": {"weight_decay": 0.01, "grafting": "rmsprop", "nesterov": True, "momentum": 0.5},
    "late": {"start_preconditioning_step": 6, "grafting": "adagrad"},
    "capturable": {"capturable": True},
}  # fmt: skip


def parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).cuda()) for s in SHAPES]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def shampoo(params: list[nn.Parameter], graphs: str | bool = "auto", **options: Any):
    return torchium.Shampoo(params, **{"lr": 0.01, "update_freq": 5, **options}, graphs=graphs)


def both(**options: Any):
    """The same optimizer twice: with and without graphs."""
    pairs = []
    for graphs in ("always", "never"):
        params = parameters()
        pairs.append((shampoo(params, graphs, **options), params))
    return pairs


@pytest.mark.parametrize("name", OPTIONS)
def test_replayed_steps_equal_launched_ones(name):
    pairs = both(**OPTIONS[name])
    for optimizer, params in pairs:
        train(optimizer, params, 0, 33)
    assert graph_count(pairs[0][0]) > 0
    assert graph_count(pairs[1][0]) == 0
    assert_both_same(pairs)


def test_from_adamw_replays_by_default():
    params = parameters()
    optimizer = torchium.Shampoo.from_adamw(torch.optim.AdamW(params))
    train(optimizer, params, 0, 40)
    assert graph_count(optimizer) > 0
    assert "graphs: auto" in repr(optimizer)


def test_learning_rates_change_between_replays():
    pairs = both()
    change_learning_rates_between_replays(pairs)
    assert graph_count(pairs[0][0]) > 0
    assert_both_same(pairs)


def test_learning_rates_in_tensors_are_read_again():
    pairs = both(capturable=True)
    change_learning_rates_in_tensors(pairs, 20)
    assert graph_count(pairs[0][0]) > 0
    assert_both_same(pairs)


def replace_state(optimizer, params: list[nn.Parameter]) -> None:
    optimizer.state[params[0]]["exp_avg"] = torch.zeros_like(params[0])


def add_group(optimizer, params: list[nn.Parameter]) -> None:
    params.append(nn.Parameter(torch.ones(24, 16, device="cuda")))
    optimizer.add_param_group({"params": [params[-1]]})


def renew(optimizer, params: list[nn.Parameter]) -> None:
    optimizer.update_preconditioners()


CHANGES = {
    "data": replace_data, "state": replace_state, "reload": reload, "freeze": freeze,
    "add_group": add_group, "eps": set_option(eps=1e-2), "betas": set_option(betas=(0.5, 0.9)),
    "weight_decay": set_option(weight_decay=0.1), "maximize": set_option(maximize=True),
    "matmul_precision": set_option(matmul_precision="high"), "roots": renew,
    "no_average": set_option(betas=(0.0, 0.9)), "grafting": set_option(grafting="sgd"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name):
    pairs = both(betas=(0.9, 0.99), grafting="adam", update_freq=50)
    for optimizer, params in pairs:
        train(optimizer, params, 0, 60)
    assert graph_count(pairs[0][0]) > 0
    for optimizer, params in pairs:
        CHANGES[name](optimizer, params)
        train(optimizer, params, 60, 60)
    assert graph_count(pairs[0][0]) > 0
    assert_both_same(pairs)


def test_the_global_precision_is_noticed():
    pairs = both(betas=(0.9, 0.99), grafting="adam", update_freq=50)
    before = torch.get_float32_matmul_precision()
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            for optimizer, params in pairs:
                train(optimizer, params, 0, 30)
    finally:
        torch.set_float32_matmul_precision(before)
    assert_both_same(pairs)


def test_gradients_may_lie_anywhere():
    pairs = both()
    train_with_gradients_anywhere(pairs, 40)
    assert graph_count(pairs[0][0]) == 2  # steps with roots and without
    assert_both_same(pairs)


def test_replays_launch_no_other_kernels():
    params = parameters()
    optimizer = shampoo(params, "always")
    taken = 0
    for t in (62, 65):  # without roots, and with
        train(optimizer, params, taken, t - 1 - taken)
        give_gradients(params, t)
        assert launches_of_a_step(optimizer) == ["cudaLaunchKernel", "cudaGraphLaunch"]
        taken = t


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_alignment_of_gradients_is_noticed(offset):
    pairs = both()
    for optimizer, params in pairs:
        for index in range(40):
            give_gradients(params, index)
            if index % 4 == 3:
                memory = torch.empty(params[0].numel() + offset, device="cuda")
                params[0].grad = memory[offset:].view_as(params[0]).copy_(params[0].grad)
            optimizer.step()
    assert graph_count(pairs[0][0]) > 0
    assert_both_same(pairs)


def test_strides_of_gradients_are_noticed():
    pairs = both()
    for optimizer, params in pairs:
        memory = torch.empty(48 * 64, device="cuda")
        for index in range(30):
            give_gradients(params, index)
            values = params[2].grad
            view = memory.view(48, 64) if index % 20 < 10 else memory.view(64, 48).t()
            params[2].grad = view.copy_(values)
            optimizer.step()
    assert_both_same(pairs)


def test_skipped_steps_are_skipped_and_reported():
    pairs = both()
    check_skipped_steps(pairs)


def test_a_capture_of_the_caller_has_no_graph_in_it():
    check_capture_of_the_caller(both(capturable=True), before=12)


def test_other_threads_use_the_device_meanwhile():
    pairs = both()
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                host = torch.ones(1 << 16).pin_memory()
                on_device = host.to("cuda", non_blocking=True) * 2
                event = torch.cuda.Event()
                event.record()
                event.synchronize()
                assert on_device.sum().item() == 2 << 16
                torch.empty(5 << 20, device="cuda")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            for optimizer, params in pairs:
                replace_data(optimizer, params)  # captured again
                give_gradients(params, 0)
                for _ in range(12):
                    optimizer.step()
        assert graph_count(pairs[0][0]) > 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, failures
    assert_both_same(pairs)


def test_a_data_loader_pins_memory_beside_captures():
    pairs = both()
    noise = TensorDataset(torch.randn(640, 64, generator=torch.Generator().manual_seed(0)))
    for optimizer, params in pairs:
        loader = DataLoader(noise, batch_size=8, num_workers=2, pin_memory=True)
        for index, (batch,) in enumerate(loader):
            assert batch.is_pinned()
            shift = batch.to("cuda", non_blocking=True).mean()
            if index % 10 == 0:
                replace_data(optimizer, params)  # captured again
            for p in params:
                p.grad = 0.1 * p.detach() + shift
            optimizer.step()
    assert graph_count(pairs[0][0]) > 0
    assert_both_same(pairs)


def train_beside_nccl(rank: int, store: str) -> None:
    """Of two processes: NCCL's own thread looks at events while steps are captured."""
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    results = []
    for graphs in ("always", "never"):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 20)).cuda()
        model, params = DistributedDataParallel(layers, device_ids=[rank]), [*layers.parameters()]
        optimizer = shampoo(params, graphs, betas=(0.9, 0.99), grafting="adam")
        generator = torch.Generator().manual_seed(1 + rank)
        for index in range(60):
            if index % 20 == 0:
                optimizer.param_groups[0]["eps"] = 1e-4 * (1 + index)  # captured again
            optimizer.zero_grad()
            model(torch.randn(16, 64, generator=generator).cuda()).square().mean().backward()
            optimizer.step()
        optimizer.check_errors()
        assert (graph_count(optimizer) > 0) == (graphs == "always")
        results.append(values(optimizer, params))
    assert_same(*results)
    own = torch.cat([p.detach().flatten() for p in params])
    both_ranks = [torch.empty_like(own) for _ in range(2)]
    distributed.all_gather(both_ranks, own)
    assert_same(*both_ranks)
    distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_nccl_reduces_gradients_beside_captures(tmp_path):
    torch.multiprocessing.spawn(train_beside_nccl, (str(tmp_path / "store"),), nprocs=2)


def test_steps_on_another_stream():
    pairs = both()
    stream = torch.cuda.Stream()
    for optimizer, params in pairs:
        train(optimizer, params, 0, 10)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            train(optimizer, params, 10, 10)
        torch.cuda.current_stream().wait_stream(stream)
        train(optimizer, params, 20, 10)
    assert_both_same(pairs)


def test_a_capture_without_memory_leaves_launched_steps():
    pairs = both(betas=(0.9, 0.99), block_size=512, capturable=True)
    for optimizer, params in pairs:
        params[:] = [nn.Parameter(torch.ones(512, 512, device="cuda")) for _ in range(24)]
        optimizer.param_groups[0]["params"] = list(params)
        grads = [torch.randn(512, 512, device="cuda", generator=seeded(0)) for _ in params]
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        optimizer.step()
    optimizer, params = pairs[0]
    torch.cuda.synchronize()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        for _ in range(6):
            optimizer.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert graph_count(optimizer) == 0
    for _ in range(6):
        pairs[1][0].step()
    assert_both_same(pairs)
    torch.ones(3, device="cuda").sum().item()  # no error is left behind


class RaisesOnce(TorchDispatchMode):
    """Raises in the first captured operator."""

    def __init__(self) -> None:
        super().__init__()
        self.raised = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.cuda.is_current_stream_capturing() and not self.raised:
            self.raised = True
            raise ZeroDivisionError("a test")
        return func(*args, **(kwargs or {}))


def test_exceptions_of_python_in_a_capture_are_passed_on():
    params = parameters()
    optimizer = shampoo(params, "always", capturable=True)
    give_gradients(params, 0)
    mode = RaisesOnce()
    with mode:
        for _ in range(6):
            with contextlib.suppress(ZeroDivisionError):
                optimizer.step()
    assert mode.raised
    taken = optimizer.state[params[0]]["step"].item()
    for _ in range(6):
        optimizer.step()
    optimizer.check_errors()
    assert optimizer.state[params[0]]["step"].item() == taken + 6
    assert all(bool(p.isfinite().all()) for p in params)


def test_copies_start_without_graphs():
    pairs = both()
    for optimizer, params in pairs:
        train(optimizer, params, 0, 12)
    model = nn.ParameterList(pairs[0][1])
    twin = copy.deepcopy({"model": model, "optimizer": pairs[0][0]})
    assert graph_count(twin["optimizer"]) == 0
    pairs[0] = (twin["optimizer"], list(twin["model"]))
    for optimizer, params in pairs:
        train(optimizer, params, 12, 12)
    assert_both_same(pairs)


def test_memory_is_given_back():
    params = parameters()
    train(shampoo(params, "never"), params, 0, 1)  # cuBLAS allocates memory for the stream
    del params
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        params = parameters()
        optimizer = shampoo(params, "always", betas=(0.9, 0.99))
        train(optimizer, params, 0, 20)
        assert graph_count(optimizer) > 0
        assert optimizer.memory_report().total.graphs > 0
        del optimizer, params
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before <= 4 << 20


def test_auto_keeps_little_memory():
    """Its graphs hold at most 5 % of the state or 1 % of the device's memory."""
    device_bytes = torch.cuda.get_device_properties(0).total_memory
    count = int(0.01 * device_bytes) // (1024 * 1024 * 8) + 1  # 12 bytes per element are scratch
    if torch.cuda.mem_get_info()[0] < 0.3 * device_bytes:
        pytest.skip("needs 30 % of the device's memory")
    params = [nn.Parameter(torch.randn(1024, 1024, device="cuda")) for _ in range(count)]
    optimizer = torchium.Shampoo(
        params, lr=1e-3, update_freq=1000, start_preconditioning_step=1000, betas=(0.9, 0.99)
    )
    for p in params:
        p.grad = torch.randn_like(p)
    for _ in range(8):
        optimizer.step()
    assert graph_count(optimizer) == 0
    assert optimizer.memory_report().total.graphs == 0


def test_autograd_sees_that_parameters_have_changed():
    params = parameters()
    optimizer = shampoo(params, "always", update_freq=1000)
    train(optimizer, params, 0, 20)
    assert graph_count(optimizer) > 0
    loss = (params[0] * params[0]).sum()
    version = params[0]._version
    train(optimizer, params[1:], 20, 1)
    give_gradients(params, 21)
    optimizer.step()
    assert params[0]._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
