"""Options of K-FAC as functions of the step number."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from cuda_waits import no_waits
from optimizer_cases import assert_same, backward, mlp, snapshot, through_a_file, values
from torch import Tensor, nn
from torchium import KFAC, KFACPreconditioner

pytestmark = pytest.mark.filterwarnings("ignore:KFAC")

SCHEDULES: dict[str, Any] = {
    "damping": lambda step: 0.5 / step,
    "stat_decay": lambda step: min(0.95, 0.1 * step),
    "TCov": lambda step: 1 if step < 4 else 2,
    "TInv": lambda step: 2 + step // 3,
    "kl_clip": lambda step: None if step < 3 else 1e-3 * step,
}


def half(step: int) -> float:
    """A function that pickles."""
    return 0.5 / step


def decoupled(step: int) -> int:
    return 1 + step % 2


def trained(optimizer: Any, model: nn.Module, first: int = 1, last: int = 10) -> list[Tensor]:
    for step in range(first, last):
        backward(model, step)
        optimizer.step()
    return values(model)


def trained_by_hand(model: nn.Module, schedules: dict[str, Any], **options: Any) -> list[Tensor]:
    """The same steps with numbers that are set before each of them."""
    optimizer = KFAC(model, **options)
    for step in range(1, 10):
        for group in optimizer.param_groups:
            group.update({name: function(step) for name, function in schedules.items()})
        trained(optimizer, model, step, step + 1)
    return values(model)


@pytest.mark.parametrize("split", ["pi", "exact"])
@pytest.mark.parametrize("names", [*[[name] for name in SCHEDULES], list(SCHEDULES)])
def test_functions_are_numbers_that_change(names, split, device):
    schedules = {name: SCHEDULES[name] for name in names}
    model, other, plain = mlp(device), mlp(device), mlp(device)
    options = {"lr": 0.05, "TCov": 2, "TInv": 2, "damping_split": split}
    optimizer = KFAC(model, **{**options, **schedules})
    actual = trained(optimizer, model)
    assert_same(actual, trained_by_hand(other, schedules, **options))
    for name, function in schedules.items():
        assert optimizer.param_groups[0][name] == function(9)
    constant = KFAC(plain, **options)
    assert not torch.equal(trained(constant, plain)[0], actual[0])


def test_steps_count_from_one_and_skipped_ones_do_not():
    model, seen = mlp(), []
    optimizer = KFAC(model, damping=lambda step: seen.append(step) or 0.1)
    assert set(seen) == {1}
    assert optimizer.param_groups[0]["damping"] == 0.1
    for bad in (False, True, False):
        seen.clear()
        backward(model, 0)
        if bad:
            model[0].weight.grad.fill_(torch.inf)
        optimizer.step()
        assert len(set(seen)) == 1
        assert seen[0] == float(optimizer.state[model[0].weight]["step"]) + bad


def test_factors_are_due_by_the_value_of_their_step():
    model = mlp()
    optimizer = KFAC(model, TCov=lambda step: 3 if step > 4 else 1)
    updates = []
    for step in range(1, 9):
        trained(optimizer, model, step, step + 1)
        updates.append(int(optimizer.state[model[0].weight]["factor_updates"]))
    assert updates == [1, 2, 3, 4, 4, 4, 5, 5]  # step - 1 is divisible by 3 at step 7


def test_groups_have_functions_and_steps_of_their_own():
    model = mlp()
    optimizer = KFAC(
        [
            {"params": list(model[0].parameters())},
            {"params": list(model[1].parameters()), "damping": 0.3},
        ],
        damping=lambda step: 1.0 / step,
    )
    trained(optimizer, model, 1, 4)
    optimizer.add_param_group({"params": list(model[3].parameters())})
    assert [group["damping"] for group in optimizer.param_groups] == [1 / 3, 0.3, 1.0]
    trained(optimizer, model, 4, 6)
    assert [group["damping"] for group in optimizer.param_groups] == [1 / 5, 0.3, 1 / 2]
    assert [sorted(group["schedules"]) for group in optimizer.param_groups] == [
        ["damping"],
        [],
        ["damping"],
    ]


def test_functions_may_be_set_replaced_and_deleted():
    model = mlp()
    optimizer = KFAC(model)
    group = optimizer.param_groups[0]
    trained(optimizer, model, 1, 3)
    group["damping"] = lambda step: 10.0 * step
    trained(optimizer, model, 3, 4)
    assert group["damping"] == 30.0
    group["damping"] = 1.0  # by hand, until the next step
    trained(optimizer, model, 4, 5)
    assert group["damping"] == 40.0
    group["schedules"]["damping"] = lambda step: 2.0
    trained(optimizer, model, 5, 6)
    assert group["damping"] == 2.0
    del group["schedules"]["damping"]
    group["damping"] = 1.0
    trained(optimizer, model, 6, 7)
    assert group["damping"] == 1.0


@pytest.mark.cuda
def test_a_step_with_functions_does_not_wait():
    model = mlp("cuda")
    optimizer = KFAC(model, **{**SCHEDULES, "TInv": lambda step: 5})
    trained(optimizer, model, 1, 3)
    backward(model, 3)
    with no_waits() as asleep:
        optimizer.step()
    assert not asleep.query()
    assert optimizer.param_groups[0]["damping"] == 0.5 / 3


# ---- wrong values


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("damping", -1.0, r"damping must be a finite number in \[0, inf\), got -1.0"),
        ("damping", "much", r"damping must be .*, got 'much'"),
        ("TCov", 0, "TCov must be an integer of at least 1, got 0"),
        ("TInv", 1.5, r"TInv must be an integer of at least 1, got 1.5"),
        ("stat_decay", 2.0, r"stat_decay must be .*, got 2.0"),
        ("kl_clip", 0.0, r"kl_clip must be None or .*, got 0.0"),
    ],
)
def test_wrong_values_raise_and_change_nothing(name, value, text):
    text += r", which its function returned for step {}; change the function"
    with pytest.raises(ValueError, match=text.format(1)):
        KFAC(mlp(), **{name: lambda step: value})
    model = mlp()
    good = {"TCov": 1, "TInv": 1}.get(name, 0.5)
    optimizer = KFAC(model, **{name: lambda step: value if step == 3 else good})
    trained(optimizer, model, 1, 3)
    backward(model, 3)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=text.format(3)):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    optimizer.param_groups[0]["schedules"][name] = lambda step: good
    backward(model, 3)
    optimizer.step()
    assert int(optimizer.state[model[0].weight]["step"]) == 3


def test_a_function_that_raises_does_so_in_the_step():
    model = mlp()
    optimizer = KFAC(model, damping=lambda step: 1.0 / (2 - step))
    trained(optimizer, model, 1, 2)
    backward(model, 2)  # the first forward pass asks for TCov
    with pytest.raises(ZeroDivisionError):
        optimizer.step()


@pytest.mark.parametrize("option", ["momentum", "damping_split", "lr", "batch_averaged"])
def test_other_options_are_no_functions(option):
    with pytest.raises(ValueError, match=f"{option} must be"):
        KFAC(mlp(), **{option: lambda step: 0.5})
    model = mlp()
    optimizer = KFAC(model, damping=half)
    optimizer.param_groups[0]["schedules"][option] = half
    backward(model, 0)
    with pytest.raises(ValueError, match=f"schedules has '{option}'; .* damping, TCov, TInv"):
        optimizer.step()


def test_a_clip_that_differs_between_groups_raises():
    model = mlp()
    groups = [
        {"params": list(model[0].parameters()), "kl_clip": lambda step: 0.1},
        {"params": list(model[3].parameters()), "kl_clip": lambda step: 0.1 * min(step, 2)},
    ]
    optimizer = KFAC(groups)
    trained(optimizer, model, 1, 2)
    backward(model, 2)
    with pytest.raises(ValueError, match="kl_clip must be the same in all parameter groups"):
        optimizer.step()
    assert [group["kl_clip"] for group in optimizer.param_groups] == [0.1, 0.1]


def test_a_clip_follows_the_group_that_has_taken_most_steps():
    model = mlp()
    optimizer = KFAC(
        [{"params": list(model[i].parameters())} for i in (0, 3)], kl_clip=lambda step: 0.1 / step
    )
    model[3].requires_grad_(False)
    trained(optimizer, model, 1, 3)
    model[3].requires_grad_(True)
    trained(optimizer, model, 3, 4)
    added = nn.Linear(3, 3)
    optimizer.add_param_group({"params": added.parameters()})
    trained(optimizer, model.append(added), 4, 6)
    assert [group["kl_clip"] for group in optimizer.param_groups] == [0.1 / 5] * 3


def test_a_group_is_added_beside_one_that_was_given_a_function():
    model = mlp()
    optimizer = KFAC([{"params": list(model[0].parameters())}])
    optimizer.param_groups[0]["damping"] = lambda step: 0.1 * step
    optimizer.add_param_group({"params": model[3].parameters()})
    trained(optimizer, model, 1, 3)
    assert [group["damping"] for group in optimizer.param_groups] == [0.2, 0.01]


# ---- checkpoints and copies


@pytest.mark.parametrize("pause", [2, 3, 5])
def test_a_checkpoint_has_values_and_the_optimizer_its_functions(pause, device):
    model = mlp(device)
    optimizer = KFAC(model, lr=0.05, **SCHEDULES)
    trained(optimizer, model, 1, pause)
    weights, state = through_a_file([model.state_dict(), optimizer.state_dict()])
    expected = trained(optimizer, model, pause)
    assert "schedules" not in state["param_groups"][0]
    assert state["param_groups"][0]["damping"] == 0.5 / (pause - 1)
    resumed = mlp(device)
    resumed.load_state_dict(weights)
    other = KFAC(resumed, lr=0.05, **SCHEDULES)
    other.load_state_dict(state)
    assert_same(trained(other, resumed, pause), expected)
    without = KFAC(resumed)
    without.load_state_dict(state)
    trained(without, resumed, 1, 2)
    assert without.param_groups[0]["damping"] == 0.5 / (pause - 1)


def test_copies_and_pickles_keep_functions():
    model = mlp()
    optimizer = KFAC(model, lr=0.05, damping=half, TCov=decoupled)
    trained(optimizer, model, 1, 4)
    copies = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
    expected = trained(optimizer, model, 4)
    for other_model, other in copies:
        assert_same(trained(other, other_model, 4), expected)
        assert other.param_groups[0]["schedules"] == {"damping": half, "TCov": decoupled}
    lambdas = KFAC(mlp(), damping=lambda step: 0.5)
    copy.deepcopy(lambdas)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(lambdas)


# ---- the preconditioner


def test_the_preconditioner_follows_the_learning_rate_of_the_optimizer(device):
    model, other = mlp(device), mlp(device)
    kfac = KFAC(model, lr=0.1, **SCHEDULES)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(kfac, 0.7)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    of_sgd = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.7)
    names = {"stat_decay": "factor_decay", "TCov": "factor_update_steps"}
    names["TInv"] = "inv_update_steps"
    preconditioner = KFACPreconditioner(
        other,
        lr=lambda step: sgd.param_groups[0]["lr"],
        **{names.get(name, name): function for name, function in SCHEDULES.items()},
    )
    for step in range(1, 10):
        trained(kfac, model, step, step + 1)
        scheduler.step()
        backward(other, step)
        preconditioner.step()
        assert preconditioner.param_groups[0]["lr"] == sgd.param_groups[0]["lr"]
        sgd.step()
        of_sgd.step()
    # SGD keeps lr outside of its momentum buffer, as KFAC does.
    torch.testing.assert_close(values(other), values(model), rtol=1e-4, atol=1e-5)


def test_wrong_learning_rates_of_functions_raise():
    with pytest.raises(ValueError, match=r"lr must be .*, got -1.0, which its function returned"):
        KFACPreconditioner(mlp(), lr=lambda step: -1.0)
