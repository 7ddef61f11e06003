"""State dicts: their contents, and bitwise identical resumption."""

from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys

import pytest
import torch
import torchium
from optimizer_cases import (
    ALL_CASES,
    all_cases,
    assert_same,
    give_gradients,
    ignore_fallback,
    mlp,
    plain_cases,
    run,
    set_gradients,
    through_a_file,
    trained,
    values,
)
from torch import Tensor, nn

pytestmark = ignore_fallback


def tensors_of(state_dict: dict) -> list[Tensor]:
    return [t for state in state_dict["state"].values() for t in state.values()]


# ---- contents of a state dict


@all_cases
def test_state_dict_holds_tensors_and_plain_python_only(make):
    model = mlp()
    optimizer = make(model.named_parameters())
    run(model, optimizer)
    state_dict = optimizer.state_dict()
    assert all(type(t) is Tensor for t in tensors_of(state_dict))
    assert type(state_dict["state"]) is dict

    def plain(value: object) -> bool:
        if isinstance(value, (list, tuple, dict)):
            return all(map(plain, value.values() if isinstance(value, dict) else value))
        return type(value) in (int, float, str, bool, type(None))

    assert plain(state_dict["param_groups"])
    assert_same(through_a_file(state_dict), state_dict)


@all_cases
def test_state_dict_is_a_snapshot_without_block_storage(make):
    model, optimizer = trained(make)
    state_dict = optimizer.state_dict()
    for tensor in tensors_of(state_dict):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    kept = copy.deepcopy(state_dict)
    run(model, optimizer, 4)
    assert_same(state_dict, kept)


def test_keys_of_the_state():
    weight, bias = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))

    def keys(optimizer):
        set_gradients([weight, bias], 0)
        optimizer.step()
        return [set(optimizer.state[p]) for p in (weight, bias)]

    slots = {f"{key}.{i}" for key in ("statistics", "roots", "root_failures") for i in range(2)}
    assert keys(torchium.Shampoo([weight, bias])) == [{"step", *slots}, {"step", "diagonal"}]
    averages = ("exp_avg", "grafting_second_moment")
    buffers = {*averages, *(f"{key}_start" for key in averages), "momentum_buffer"}
    everything = torchium.Shampoo(
        [weight, bias], betas=(0.9, 1.0), grafting="adagrad", momentum=0.9
    )
    assert keys(everything) == [{"step", *slots, *buffers}, {"step", "diagonal", *buffers}]
    assert keys(torchium.Adagrad([weight, bias])) == [{"step", "sum"}] * 2
    one_slot = {"step", "statistics.0", "roots.0", "root_failures.0"}
    assert keys(torchium.Adagrad([weight, bias], full_matrix=True)) == [one_slot] * 2


def test_keys_of_the_state_of_layers():
    """Weight, bias, and the scale of a norm."""

    def keys(cls, **options):
        model = mlp()
        optimizer = cls(model, **options)
        run(model, optimizer, steps=1)
        return [set(optimizer.state[p]) for p in list(model.parameters())[:3]]

    factors = {"A", "G", "factor_updates", "root_failures"}
    inverses = {"A_inverse", "G_inverse"}
    eigen = {"A_eigenvectors", "G_eigenvectors", "A_eigenvalues", "G_eigenvalues"}
    blocks = {"fisher_blocks", "factor_updates"}
    plain, momentum = {"step"}, {"step", "momentum_buffer"}
    for split, roots in {"pi": inverses, "plain": inverses, "exact": eigen}.items():
        weight, norm = momentum | factors | roots, momentum | blocks
        assert keys(torchium.KFAC, damping_split=split) == [weight, momentum, norm]
    without = [plain | factors | inverses, plain, plain | blocks]
    assert keys(torchium.KFAC, momentum=0.0) == without
    assert keys(torchium.NaturalGradient, momentum=0.0) == [plain] * 3
    assert keys(torchium.NaturalGradient) == [momentum] * 3
    use = {"step", "inputs.0", "output_gradients.0", "uses", "use_eps"}
    assert keys(torchium.NaturalGradient, update_freq=2, momentum=0.0) == [use, plain, use]


@all_cases
def test_state_dict_of_a_copy_is_a_snapshot_too(make):
    """It is made by a hook, which torch does not copy."""
    model, optimizer = trained(make)
    for copied in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        other_model, other = copied((model, optimizer))
        state_dict = other.state_dict()
        kept = copy.deepcopy(state_dict)
        run(other_model, other, 4)
        assert_same(state_dict, kept)


@all_cases
def test_a_learning_rate_in_a_tensor_is_not_shared_with_the_checkpoint(make):
    model = mlp()
    optimizer = make(model.parameters(), lr=torch.tensor(0.01))
    run(model, optimizer)
    state_dict = copy.deepcopy(optimizer.state_dict())
    other = make(mlp().parameters())
    other.load_state_dict(state_dict)
    other.param_groups[0]["lr"].fill_(0.5)
    assert state_dict["param_groups"][0]["lr"] == torch.tensor(0.01)
    state_dict = optimizer.state_dict()
    optimizer.param_groups[0]["lr"].fill_(0.5)  # as schedulers do
    assert state_dict["param_groups"][0]["lr"] == torch.tensor(0.01)


@plain_cases
def test_matrices_of_one_size_lie_side_by_side_in_the_order_of_the_group(make):
    """In whatever order the parameters first got state."""
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))
    optimizer = make(layers.parameters())
    params = list(layers.parameters())
    for step, active in enumerate(([2], [0, 3], [0, 1, 2, 3])):
        for p in params:
            p.grad = None
        set_gradients([params[i] for i in active], step)
        optimizer.step()
    for key in optimizer.state[params[0]]:
        if key.startswith(("statistics", "roots")):
            views = [optimizer.state[p][key] for p in params]
            assert len({v.untyped_storage().data_ptr() for v in views}) == 1
            offsets = [v.storage_offset() for v in views]
            assert offsets == sorted(offsets)
            assert len(set(offsets)) == 4


# ---- resuming


@all_cases
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_new_optimizer_continues_bit_for_bit(make, steps, device):
    model = mlp(device)
    optimizer = make(model.parameters())
    run(model, optimizer, 0, steps)
    other = mlp(device)
    other.load_state_dict(model.state_dict())
    other_optimizer = make(other.parameters(), lr=123.0)
    other_optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    expected = run(model, optimizer, steps, 6)
    assert_same(run(other, other_optimizer, steps, 6), expected)
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())


@all_cases
def test_optimizer_that_ran_on_goes_back_bit_for_bit(make):
    model, optimizer = trained(make)
    saved = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    expected = run(model, optimizer, 4, 5)
    run(model, optimizer, 100, 3)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert_same(run(model, optimizer, 4, 5), expected)


@all_cases
def test_some_parameters_without_state_continue_bit_for_bit(make):
    """The layout of the block storage must not make the two runs differ."""
    runs = []
    for resumed in (False, True):
        model = mlp()
        optimizer = make(model.parameters())
        params = list(model.parameters())
        for step, active in enumerate((params[4:], params[:1], params[1:], params, params)):
            if resumed and step == 2:
                state_dict = through_a_file(optimizer.state_dict())
                optimizer = make(model.parameters())
                optimizer.load_state_dict(state_dict)
            optimizer.zero_grad()
            give_gradients(model, optimizer, step)
            for p in params:
                if all(p is not a for a in active):
                    p.grad = None
            optimizer.step()
        runs.append((values(model), optimizer.state_dict()))
    assert_same(runs[1], runs[0])


FRESH_PROCESS = """
import sys
import torch
from optimizer_cases import ALL_CASES, mlp, run

device, folder = sys.argv[1:]
for name, make in ALL_CASES.items():
    saved = torch.load(f"{folder}/{name}.pt", weights_only=True)
    model = mlp(device)
    model.load_state_dict(saved["model"])
    optimizer = make(model.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    run(model, optimizer, 4, 6)
    resumed = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(resumed, f"{folder}/{name}_resumed.pt")
"""


def test_fresh_process_continues_bit_for_bit(tmp_path, device):
    runs = {}
    for name, make in ALL_CASES.items():
        model, optimizer = trained(make, device)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, tmp_path / f"{name}.pt")
        runs[name] = model, optimizer
    subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, str(device), str(tmp_path)],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=300,
    )
    for name, (model, optimizer) in runs.items():
        print(name)  # pytest shows the last one when the test fails
        run(model, optimizer, 4, 6)
        resumed = torch.load(tmp_path / f"{name}_resumed.pt", weights_only=True)
        assert_same(resumed["optimizer"], optimizer.state_dict())
        assert_same(resumed["model"], dict(model.state_dict()))


@all_cases
def test_state_by_names_of_distributed_checkpoint(make):
    """torch.distributed.checkpoint.state_dict, as trainers use it, on one process."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model, other = mlp(), mlp()
    optimizer, other_optimizer = make(model.parameters()), make(other.parameters())
    run(model, optimizer)
    state_dict = get_optimizer_state_dict(model, optimizer)
    assert "0.weight" in state_dict["state"]
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, other_optimizer, state_dict)
    expected = run(model, optimizer, 4, 5)
    assert_same(run(other, other_optimizer, 4, 5), expected)


def test_a_step_that_only_creates_state_of_adahessian():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = mlp()
    optimizer = torchium.AdaHessian(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert state["0.weight"]["exp_avg"].shape == model[0].weight.shape
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(map(torch.equal, model.parameters(), before))


def test_a_step_that_only_creates_state_knows_the_groups_of_convolutions():
    states = []
    for creates_state in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Conv2d(4, 6, 3, groups=2)
        optimizer = torchium.KFAC(model, TCov=1)
        if creates_state:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            assert optimizer.state[model.weight]["A"].shape == (2, 19, 19)
            optimizer.zero_grad()
        model(torch.randn(5, 4, 6, 6)).square().mean().backward()
        optimizer.step()
        state = optimizer.state[model.weight]
        assert state.pop("step") == 1 + creates_state
        states.append(state)
    assert_same(*states)


@pytest.mark.parametrize("split", ["pi", "exact"])
def test_factors_in_flat_state_of_distributed_checkpoint(split):
    """It loads under the keys that a step with zero gradients has created."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    runs = [(m, torchium.KFAC(m, damping_split=split, TCov=2, TInv=3)) for m in (mlp(), mlp())]
    (model, optimizer), (other, other_optimizer) = runs
    run(model, optimizer)
    state_dict = get_optimizer_state_dict(model, optimizer, options=flat)
    assert "state.0.weight.A" in state_dict
    other.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other, other_optimizer, state_dict, options=flat)
    expected = run(model, optimizer, 4, 8)
    assert_same(run(other, other_optimizer, 4, 8), expected)


@all_cases
def test_loading_copies_and_never_changes_the_checkpoint(make):
    model, optimizer = trained(make)
    state_dict = optimizer.state_dict()
    kept = copy.deepcopy(state_dict)
    optimizer.load_state_dict(state_dict)
    run(model, optimizer, 4)
    optimizer.param_groups[0]["lr"] = 7.0
    assert_same(state_dict, kept)


@pytest.mark.parametrize(
    "make", [lambda params: torchium.KFAC(params, TCov=1), torchium.NaturalGradient]
)
def test_loading_between_backward_and_step_warns_of_gradients_without_calls(make, recwarn):
    model, optimizer = trained(make)
    optimizer.load_state_dict(optimizer.state_dict())
    give_gradients(model, optimizer, 5)
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    assert not [w for w in recwarn if "between backward" in str(w.message)]
    give_gradients(model, optimizer, 5)
    with pytest.warns(UserWarning, match=r"between backward\(\) and step\(\)"):
        optimizer.load_state_dict(optimizer.state_dict())


@all_cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_of_low_precision_parameters_is_not_cast(make, dtype):
    model = mlp(dtype=dtype)
    optimizer = make(model.parameters())
    run(model, optimizer)
    other = mlp(dtype=dtype)
    other.load_state_dict(model.state_dict())
    other_optimizer = make(other.parameters())
    other_optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())
    expected = run(model, optimizer, 4, 6)
    assert_same(run(other, other_optimizer, 4, 6), expected)


@pytest.mark.cuda
@all_cases
def test_checkpoints_cross_devices(make):
    model = mlp("cuda")
    optimizer = make(model.parameters())
    run(model, optimizer)
    state_dict = optimizer.state_dict()
    other_optimizer = make(mlp().parameters())
    other_optimizer.load_state_dict(state_dict)
    assert all(t.device.type == "cpu" for t in tensors_of(other_optimizer.state_dict()))
    back = make(mlp("cuda").parameters())
    back.load_state_dict(other_optimizer.state_dict())
    assert_same(back.state_dict(), state_dict)


@all_cases
def test_options_come_from_the_checkpoint_and_unknown_ones_stay(make):
    optimizer = make(mlp().parameters(), lr=0.5)
    state_dict = optimizer.state_dict()
    state_dict["param_groups"][0]["initial_lr"] = 0.25
    del state_dict["param_groups"][0]["eps"]
    other = make(mlp().named_parameters(), eps=0.125)
    other.load_state_dict(state_dict)
    group = other.param_groups[0]
    assert (group["lr"], group["initial_lr"], group["eps"]) == (0.5, 0.25, 0.125)
    assert group["param_names"][0] == "0.weight"


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_state_of_pytorch_adagrad_loads_and_continues_bit_for_bit(steps, dtype):
    model, other = mlp(dtype=dtype), mlp(dtype=dtype)
    options = {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.5}
    optimizer = torch.optim.Adagrad(model.parameters(), **options)
    run(model, optimizer, 0, steps)
    other.load_state_dict(model.state_dict())
    other_optimizer = torchium.Adagrad(other.parameters())
    other_optimizer.load_state_dict(through_a_file(optimizer.state_dict()))
    expected = run(model, optimizer, steps, 5)
    assert_same(run(other, other_optimizer, steps, 5), expected)


@all_cases
def test_hooks_of_state_dict_and_load_state_dict(make):
    _model, optimizer = trained(make)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("pre"))

    def note(opt, state_dict):
        calls.append("post")
        return {**state_dict, "note": 1}

    optimizer.register_state_dict_post_hook(note)
    state_dict = optimizer.state_dict()
    assert calls == ["pre", "post"]
    assert state_dict["note"] == 1

    def set_lr(opt, state_dict):
        calls.append("load pre")
        assert state_dict["note"] == 1
        groups = copy.deepcopy(state_dict["param_groups"])
        groups[0]["lr"] = 0.75
        return {**state_dict, "param_groups": groups}

    other = make(mlp().parameters())
    other.register_load_state_dict_pre_hook(set_lr)
    other.register_load_state_dict_post_hook(lambda opt: calls.append("load post"))
    other.load_state_dict(state_dict)
    assert calls[2:] == ["load pre", "load post"]
    assert other.param_groups[0]["lr"] == 0.75


@pytest.mark.parametrize("cls", [torchium.ShampooW, torchium.Adagrad, torchium.KFAC])
def test_state_that_other_code_keeps_with_parameters_is_kept(cls):
    """As Lookahead and weight averages do."""
    model = mlp()
    optimizer = cls(model.parameters())
    run(model, optimizer, 0, 2)
    first = next(model.parameters())
    frozen = nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [frozen]})
    optimizer.state[first].update(slow_buffer=torch.full((3,), math.nan), lookahead={"k": [5]})
    optimizer.state[frozen]["slow_buffer"] = torch.ones(2)
    saved = optimizer.state_dict()
    expected = copy.deepcopy(saved)
    for loaded in (optimizer, copy.deepcopy(optimizer)):
        loaded.load_state_dict(saved)
        state = loaded.state[loaded.param_groups[0]["params"][0]]
        assert state["slow_buffer"].isnan().all()
        assert state["lookahead"] == {"k": [5]}
        state["slow_buffer"].zero_()
        state["lookahead"]["k"].append(6)
        assert loaded.state[loaded.param_groups[1]["params"][0]].keys() == {"slow_buffer"}
    assert_same(
        {k: v for k, v in saved["state"][0].items() if k != "slow_buffer"},
        {k: v for k, v in expected["state"][0].items() if k != "slow_buffer"},
    )
    assert saved["state"][0]["slow_buffer"].isnan().all()
    run(model, optimizer, 2, 2)
    # Torchium's own names are refused where they do not belong.
    wrong = optimizer.state_dict()
    wrong["state"][0]["inputs.0"] = torch.ones(2)
    with pytest.raises(ValueError, match=r"unexpected \['inputs\.0'\]"):
        optimizer.load_state_dict(wrong)
