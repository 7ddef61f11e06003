"""What processes that share the steps of Shampoo check together. Run by test_shared_steps.py.

``CASES[name](ranks)`` runs on all ranks of a group at the same time.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)

SHAPES = [(40, 24), (16, 16), (24,), (33, 17), (), (8, 3, 3, 3), (50, 7), (0, 3), (5, 3, 4), (70,)]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all_buffers": {
        "betas": (0.9, 0.99),
        "grafting": "adam",
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
        "momentum": 0.9,
    },
    "penalty": {
        "weight_decay": 0.1,
        "maximize": True,
        "preconditioner_1d": "full",
        "grafting": "sgd",
    },
    "unpreconditioned": {
        "max_preconditioned_dim": 30,
        "grafting": "rmsprop",
        "momentum": 0.5,
        "nesterov": True,
        "start_preconditioning_step": 3,
    },
    "diagonal": {"max_preconditioned_dim": 30, "grafting": "sgd", "betas": (0.5, 0.9)},
}
CASES: dict[str, Callable[[int], None]] = {}


def case(function: Callable[[int], None]) -> Callable[[int], None]:
    CASES[function.__name__] = function
    return function


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def shampoo(params: Any, ranks: Any = None, **options: Any) -> torch.optim.Optimizer:
    import torchium

    given = {"block_size": 16, "update_freq": 3, "root_method": "eigh", "bucket_bytes": 1000}
    return torchium.Shampoo(params, process_group=ranks, **{**given, **options})


def world() -> Any:
    return dist.group.WORLD


def train(optimizer: Any, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def values(optimizer: Any, params: list[nn.Parameter]) -> dict[str, Tensor]:
    """Parameters and the whole state."""
    result = {f"parameter {i}": p.detach().clone() for i, p in enumerate(params)}
    for i, state in optimizer.state_dict()["state"].items():
        result.update({f"{key} of {i}": value for key, value in state.items()})
    return result


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    different = [key for key in actual if not torch.equal(actual[key], expected[key])]
    assert not different, different


def assert_same_on_all_ranks(tensors: list[Tensor]) -> None:
    own = torch.cat([t.detach().flatten().double() for t in tensors])
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    assert all(torch.equal(own, other) for other in every)


def message_of(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@case
def equals_one_process(ranks: int) -> None:
    for name, options in OPTIONS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for method in ("eigh", "newton") if dtype == torch.float32 else ("eigh",):
                results = []
                for group in (None, world()):
                    params = parameters(dtype)
                    optimizer = shampoo(params, group, root_method=method, **options)
                    train(optimizer, params, range(5))
                    results.append(values(optimizer, params))
                try:
                    assert_same(results[1], results[0])
                except AssertionError as error:
                    raise AssertionError(f"{name}, {dtype}, {method}") from error


@case
def float64_stays_float64(ranks: int) -> None:
    for options in OPTIONS.values():
        results = []
        for group in (None, world()):
            params = parameters(torch.float64)
            optimizer = shampoo(params, group, **options)
            train(optimizer, params, range(6))
            results.append(values(optimizer, params))
        for key, expected in results[0].items():
            torch.testing.assert_close(results[1][key], expected, rtol=1e-9, atol=1e-11)


@case
def each_rank_keeps_its_share(ranks: int) -> None:
    params = parameters(shapes=[(64, 64), (64, 48), (64,), (32, 32)])
    optimizer = shampoo(params, world(), betas=(0.9, 0.99))
    train(optimizer, params, range(2))
    own = sum(t.numel() for p in params for t in optimizer.state[p].values())
    whole = sum(t.numel() for s in optimizer.state_dict()["state"].values() for t in s.values())
    assert own < 1.2 * whole / ranks
    counts = torch.tensor([optimizer.state[params[0]]["statistics.0"].shape[0]])
    dist.all_reduce(counts)
    assert counts.item() == 16
    assert optimizer.state_dict()["state"][0]["statistics.0"].shape == (16, 16, 16)


@case
def buckets_do_not_matter(ranks: int) -> None:
    results = []
    for bucket_bytes in (1, 700, 2**25):
        params = parameters()
        optimizer = shampoo(params, world(), bucket_bytes=bucket_bytes)
        train(optimizer, params, range(3))
        results.append(values(optimizer, params))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@case
def updates_travel_in_16_bits(ranks: int) -> None:
    for dtype, error in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
        exact, rounded = parameters(), parameters()
        a, b = shampoo(exact, world()), shampoo(rounded, world(), comm_dtype=dtype)
        starts = [p.detach().clone() for p in exact]
        train(a, exact, range(1))
        train(b, rounded, range(1))
        assert_same_on_all_ranks(rounded)
        for start, x, y in zip(starts, exact, rounded, strict=True):
            moved = (x - start).abs()
            assert torch.all((x - y).abs() <= error * moved + 1e-6)
        assert any(not torch.equal(x, y) for x, y in zip(exact, rounded, strict=True))


@case
def late_and_missing_gradients(ranks: int) -> None:
    results = []
    for group in (None, world()):
        params = parameters()
        params[0].requires_grad_(False)
        optimizer = shampoo(params, group, betas=(0.9, 0.99))
        for step in range(8):
            set_gradients(params, step)
            params[0].grad = None
            if step < 3:
                params[1].grad = None
            if step % 2:
                params[3].grad = params[6].grad = None
            if step == 6:
                params[0].requires_grad_(True)
                params[0].grad = torch.ones_like(params[0])
            optimizer.step()
        results.append(values(optimizer, params))
    assert_same(results[1], results[0])


@case
def groups_and_options_change(ranks: int) -> None:
    results = []
    for group in (None, world()):
        params = parameters()
        optimizer = shampoo([{"params": params[:4]}, {"params": params[4:7], "lr": 0.1}], group)
        train(optimizer, params, range(2))
        optimizer.add_param_group({"params": params[7:], "grafting": "adam"})
        train(optimizer, params, range(2, 4))
        optimizer.param_groups[0].update(momentum=0.9, betas=(0.9, 0.9), update_freq=2)
        optimizer.param_groups[1].update(lr=0.02, weight_decay=0.1, grafting="rmsprop")
        train(optimizer, params, range(4, 7))
        optimizer.update_preconditioners()
        train(optimizer, params, range(7, 9))
        optimizer.param_groups[1].update(grafting="adagrad")
        train(optimizer, params, range(9, 11))
        results.append(values(optimizer, params))
    assert_same(results[1], results[0])


@case
def other_memory_layouts(ranks: int) -> None:
    results = []
    for group in (None, world()):
        layer = nn.Conv2d(6, 20, 3).to(memory_format=torch.channels_last)
        weight = torch.Generator().manual_seed(0)
        layer.weight.data.copy_(torch.randn(layer.weight.shape, generator=weight))
        layer.bias.data.zero_()
        assert not layer.weight.is_contiguous()
        optimizer = shampoo(layer.parameters(), group, betas=(0.9, 0.9), weight_decay=0.1, eps=0.1)
        train(optimizer, [*layer.parameters()], range(4))
        results.append(values(optimizer, [*layer.parameters()]))
    for key, expected in results[0].items():
        torch.testing.assert_close(results[1][key], expected, rtol=1e-4, atol=1e-5)
        assert results[1][key].stride() == expected.stride()


@case
def all_ranks_skip_and_raise_together(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo([(f"p{i}", p) for i, p in enumerate(params)], world())
    train(optimizer, params, range(2))
    before = values(optimizer, params)
    for attempt in range(3):
        set_gradients(params, 2)
        if dist.get_rank() == ranks - 1:  # one of its own blocks is among them
            for p in params[3:]:
                p.grad.fill_(float("nan"))
        kind, message = message_of(optimizer.step)
        assert (kind == "RuntimeError") == (attempt == 2), message
    assert "3 steps in a row" in message
    assert "parameter 'p" in message
    texts: list[Any] = [None] * ranks
    dist.all_gather_object(texts, message)
    assert len(set(texts)) == 1, texts
    assert_same(values(optimizer, params), before)
    train(optimizer, params, range(2, 4))
    assert optimizer.state[params[0]]["step"] == 4


@case
def a_scaler_that_found_inf_on_one_rank(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world())
    train(optimizer, params, range(1))
    before = values(optimizer, params)
    for _ in range(4):
        set_gradients(params, 1)
        optimizer.found_inf = torch.tensor([float(dist.get_rank() == 0)])
        optimizer.step()
        del optimizer.found_inf
    assert_same(values(optimizer, params), before)


@case
def an_error_on_one_rank_is_one_on_all(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world())
    train(optimizer, params, range(2))
    before = values(optimizer, params)
    last = dist.get_rank() == ranks - 1

    def sparse() -> None:
        params[1].grad = torch.eye(16).to_sparse()

    def wrong_option() -> None:
        optimizer.param_groups[0]["eps"] = -1.0

    def capturable() -> None:
        optimizer.param_groups[0]["capturable"] = True

    for spoil, text in (
        (sparse, "layout"),
        (wrong_option, "eps must be"),
        (capturable, "capturable"),
    ):
        set_gradients(params, 2)
        if last:
            spoil()
        kind, message = message_of(optimizer.step)
        if last:
            assert kind == "ValueError"
            assert text in message
        else:
            assert kind == "RuntimeError"
            assert f"rank {ranks - 1} of the process group raised an error in step()" in message
        optimizer.param_groups[0].update(eps=1e-4, capturable=False)
        assert_same(values(optimizer, params), before)
    train(optimizer, params, range(2, 3))
    assert_same_on_all_ranks(params)


@case
def gradients_of_other_parameters_on_one_rank(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo([(f"p{i}", p) for i, p in enumerate(params)], world())
    for step in range(3):
        before = values(optimizer, params)
        set_gradients(params, step)
        if dist.get_rank() == 1:
            params[3].grad = None
        kind, message = message_of(optimizer.step)
        assert kind == "RuntimeError"
        others = ", ".join(str(r) for r in range(ranks) if r != 1)
        assert f"'p3' of group 0 (shape [33, 17]) has a gradient on rank {others} of" in message
        assert "none on rank 1" in message
        if before:
            assert_same({k: v for k, v in values(optimizer, params).items() if k in before}, before)
        train(optimizer, params, range(step, step + 1))


@case
def other_options_on_one_rank(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world())
    train(optimizer, params, range(1))
    before = values(optimizer, params)
    last = dist.get_rank() == ranks - 1
    for name, wrong in (("lr", 0.5), ("eps", 0.5), ("block_size", 8)):
        right = optimizer.param_groups[0][name]
        if last:
            optimizer.param_groups[0][name] = wrong
        set_gradients(params, 1)
        kind, message = message_of(optimizer.step)
        if name == "block_size":  # the state does not fit on that rank
            assert "set block_size" in message if last else "raised an error" in message
        else:
            assert kind == "RuntimeError"
            assert f"rank {ranks - 1} of the process group has other parameters, options" in message
        optimizer.param_groups[0][name] = right
        assert_same(values(optimizer, params), before)


@case
def a_failed_root_raises_on_all_ranks(ranks: int) -> None:
    params = parameters(shapes=[(16, 16)] * 4)
    optimizer = shampoo(params, world(), max_root_failures=1, update_freq=1)
    train(optimizer, params, range(1))
    for p in params[:1]:
        for key in ("statistics.0", "statistics.1"):
            optimizer.state[p][key].fill_(float("inf"))  # on the rank that has it
    set_gradients(params, 1)
    optimizer.step()
    set_gradients(params, 2)
    kind, message = message_of(optimizer.step)
    assert kind == "RuntimeError"
    assert "parameter 0 of group 0" in message
    assert "failed 1 times in a row" in message or "failed" in message


@case
def checkpoints_on_other_numbers_of_ranks(ranks: int) -> None:
    rank = dist.get_rank()
    groups = {
        1: dist.new_group([0]),
        2: dist.new_group([0, 1]),
        3: dist.new_group([0, 1, 2]),
    }
    options = OPTIONS["all_buffers"]
    expected_params = parameters()
    expected = shampoo(expected_params, **options)
    train(expected, expected_params, range(5))
    final = values(expected, expected_params)
    for before, after in ((1, 2), (2, 1), (2, 3), (3, 2), (0, 3), (3, 0)):  # 0: no group
        params = parameters()
        saved: list[Any] = [None, None]
        if rank < max(before, 1):
            optimizer = shampoo(params, groups.get(before), **options)
            train(optimizer, params, range(3))
            buffer = io.BytesIO()
            torch.save(optimizer.state_dict(), buffer)
            saved = [buffer.getvalue(), [p.detach() for p in params]]
        dist.broadcast_object_list(saved, 0)
        params = [nn.Parameter(p.clone()) for p in saved[1]]
        if rank < max(after, 1):
            optimizer = shampoo(params, groups.get(after), **options)
            optimizer.load_state_dict(torch.load(io.BytesIO(saved[0])))
            at_once = values(optimizer, params)
            train(optimizer, params, range(3, 5))
            assert_same(values(optimizer, params), final)
            assert "statistics.0 of 0" in at_once


@case
def copies_and_pickles_go_on(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params, world(), **OPTIONS["all_buffers"])
    train(optimizer, params, range(3))
    copied = copy.deepcopy((params, optimizer))
    pickled = pickle.loads(pickle.dumps((params, optimizer)))
    train(optimizer, params, range(3, 5))
    for other_params, other in (copied, pickled):
        train(other, other_params, range(3, 5))
        assert_same(values(other, other_params), values(optimizer, params))


@case
def distributed_checkpoints(ranks: int) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    folder = Path(os.environ["SHARED_STEPS_FOLDER"]) / f"dcp{ranks}"

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 7))

    model = network()
    optimizer = shampoo(model.parameters(), world(), betas=(0.9, 0.9))
    train(optimizer, [*model.parameters()], range(3))
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
    other_model = network()
    other_model.load_state_dict(model.state_dict())
    other = shampoo(other_model.parameters(), world(), betas=(0.9, 0.9))
    state = get_optimizer_state_dict(other_model, other)  # takes a step with gradients of zero
    other_model.load_state_dict(model.state_dict())
    dcp.load({"optimizer": state}, checkpoint_id=folder)
    set_optimizer_state_dict(other_model, other, state)
    params, others = [*model.parameters()], [*other_model.parameters()]
    train(optimizer, params, range(3, 5))
    train(other, others, range(3, 5))
    assert_same(values(other, others), values(optimizer, params))


@case
def data_parallel_training(ranks: int) -> None:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(40, 12 * ranks, 10, generator=generator)
    losses = {}
    for group in (None, world()):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 3))
        model = net if group is None else DistributedDataParallel(net)
        optimizer = shampoo(net.parameters(), group, grafting="adam", betas=(0.9, 0.99), lr=0.01)
        for step in range(20):
            optimizer.zero_grad()
            for half in range(2):
                batch = data[2 * step + half]
                inputs = batch if group is None else batch[12 * rank : 12 * rank + 12]
                loss = (model(inputs) - inputs[:, :3].square()).square().mean() / 2
                if group is not None and half == 0:
                    with model.no_sync():
                        loss.backward()
                else:
                    loss.backward()
            optimizer.step()
        losses[group is None] = (net(data[0]) - data[0, :, :3].square()).square().mean().item()
    assert_same_on_all_ranks([*net.parameters()])
    assert abs(losses[True] - losses[False]) < 1e-3 * losses[True]


@case
def closures_and_tensors_as_learning_rates(ranks: int) -> None:
    results = []
    for group in (None, world()):
        params = parameters()
        optimizer = shampoo(params, group, lr=torch.tensor(0.05))

        def closure(params: list[nn.Parameter] = params) -> float:
            set_gradients(params, 3)
            return 1.5

        assert optimizer.step(closure) == 1.5
        results.append(values(optimizer, params))
    assert_same(results[1], results[0])


@case
def as_a_replacement_of_adamw(ranks: int) -> None:
    import torchium

    results = []
    for group in (None, world()):
        params = parameters()
        adamw = torch.optim.AdamW(params, lr=1e-2)
        optimizer = torchium.Shampoo.from_adamw(
            adamw, block_size=16, root_method="eigh", process_group=group
        )
        assert "process_group" not in optimizer.param_groups[0]
        train(optimizer, params, range(4))
        results.append(values(optimizer, params))
    assert_same(results[1], results[0])


@case
def wrong_arguments(ranks: int) -> None:
    params = parameters()
    for wrong, text in (
        ({"comm_dtype": torch.int8}, "comm_dtype must be one of torch.float32"),
        ({"bucket_bytes": 0}, "bucket_bytes must be an integer of at least 1, got 0"),
        ({"bucket_bytes": 1.5}, "bucket_bytes must be"),
        ({"process_group": "WORLD"}, "process_group must be a torch.distributed.ProcessGroup"),
    ):
        import torchium

        kind, message = message_of(lambda wrong=wrong: torchium.Shampoo(params, **wrong))
        assert kind == "ValueError"
        assert text in message


@case
def repeated_work_is_warned_of(ranks: int) -> None:
    params = parameters()
    optimizer = shampoo(params)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(optimizer, params, range(3))
        params[1].grad = None
        optimizer.step()
    texts = [str(w.message) for w in caught]
    assert len(texts) == 1, texts
    assert f"each of {ranks} processes repeats the whole step of Shampoo" in texts[0]
    assert "process_group=torch.distributed.group.WORLD" in texts[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(shampoo(params, world()), params, range(2))


def cases_of(ranks: int) -> list[str]:
    """All with three ranks; with two those whose work is shared out in another way."""
    few = ("equals_one_process", "groups_and_options_change", "all_ranks_skip_and_raise_together")
    return [*CASES] if ranks > 2 else [*few]


def run(rank: int, ranks: int, folder: str) -> None:
    """All cases, in one process of a group; writes the traceback of each that fails."""
    os.environ["SHARED_STEPS_FOLDER"] = folder
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store{ranks}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=20),
    )
    for name in cases_of(ranks):
        failure = ""
        try:
            CASES[name](ranks)
        except BaseException:
            failure = traceback.format_exc()
        Path(folder, f"{ranks}.{name}.{rank}").write_text(failure)
        if failure:  # the others may be at another place: they fail too
            break
    dist.destroy_process_group()
