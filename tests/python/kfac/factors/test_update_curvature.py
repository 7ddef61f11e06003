"""update_curvature() of K-FAC and natural gradient: passes, errors, copies and the option ``fisher``.

test_kfac_fisher.py and test_natural_gradient_fisher.py compare the results with dense matrices.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from curvature_losses import FISHERS
from kfac_problems import assert_each_close_in_norm, batch_of, make_model, mlp
from optimizer_cases import ignore_fallback, through_a_file
from test_kfac_fisher import train
from torch import nn
from torch.nn import functional as F
from torchium import KFAC, NaturalGradient

pytestmark = ignore_fallback

# Entries in the state of a weight after the first step.
STATE = {KFAC: {"A", "G", "A_inverse", "G_inverse"}, NaturalGradient: {"momentum_buffer"}}
kinds = pytest.mark.parametrize("kind", STATE)
fishers = pytest.mark.parametrize("fisher", FISHERS)


def make(kind: type, params: Any, every: int = 1, **options: Any) -> Any:
    """An optimizer that takes a new matrix in every so many steps."""
    intervals = ("TCov", "TInv") if kind is KFAC else ("update_freq",)
    return kind(params, **dict.fromkeys(intervals, every), **options)


@kinds
def test_steps_without_a_new_matrix_take_no_passes(kind, device):
    model, shape = make_model("mlp")
    model.to(device)
    optimizer = make(kind, model, fisher="ggn", every=3)
    passes = []
    for step in range(7):
        x, y = (t.to(device) for t in batch_of(shape, step))
        optimizer.zero_grad()
        outputs = model(x)
        count = [0]
        outputs.register_hook(lambda g, count=count: count.__setitem__(0, count[0] + 1))
        optimizer.update_curvature(outputs, "cross_entropy")
        passes.append(count[0])
        F.cross_entropy(outputs, y).backward()
        optimizer.step()
    assert passes == [3, 0, 0, 3, 0, 0, 3]  # one per class


@kinds
@fishers
@pytest.mark.parametrize("step", [0, 2])
def test_a_step_without_curvature_raises_and_changes_nothing(step, fisher, kind, device):
    model, shape = make_model("mlp")
    model.to(device)
    optimizer = make(kind, model, fisher=fisher, every=2)
    train(model, optimizer, shape, step)
    x, y = (t.to(device) for t in batch_of(shape, step))
    optimizer.zero_grad()
    outputs = model(x)
    F.cross_entropy(outputs, y).backward(retain_graph=True)
    before = copy.deepcopy([list(model.parameters()), optimizer.state_dict()["state"]])
    with pytest.raises(RuntimeError, match=r"call it with the outputs of the model in each iter"):
        optimizer.step()
    after = [list(model.parameters()), optimizer.state_dict()["state"]]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    optimizer.update_curvature(outputs, "cross_entropy")  # the remedy
    optimizer.step()
    assert not torch.equal(model[0].weight, before[0][0])


@kinds
def test_zero_grad_forgets_the_curvature(kind, device):
    model = nn.Linear(4, 3).to(device)
    optimizer = kind(model, fisher="ggn")
    outputs = model(torch.ones(2, 4, device=device))
    optimizer.update_curvature(outputs, "mse")
    optimizer.zero_grad()
    outputs.sum().backward()
    with pytest.raises(RuntimeError, match="after zero_grad"):
        optimizer.step()


@kinds
def test_a_freed_graph_is_an_error(kind, device):
    for model in (nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))):
        model.to(device)
        optimizer = kind(model, fisher="ggn")
        outputs = model(torch.ones(2, 4, device=device))
        outputs.sum().backward()
        with pytest.raises(RuntimeError, match=r"call update_curvature\(\) before it"):
            optimizer.update_curvature(outputs, "mse")


@kinds
def test_an_input_changed_in_place_is_an_error(kind, device):
    model = nn.Linear(4, 3).to(device)
    optimizer = kind(model, fisher="ggn")
    x = torch.ones(2, 4, device=device)
    outputs = model(x)
    x += 1
    with pytest.raises(RuntimeError, match="changed in place after the layer had used it"):
        optimizer.update_curvature(outputs, "mse")


@kinds
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_a_loss_scale_does_not_matter(every, unscale, kind, device):
    results = []
    for scaled in (False, True):
        model, shape = make_model("convolutions")
        model.to(device)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=scaled)
        optimizer = make(kind, model, every, lr=0.1, damping=0.1, fisher="ggn")
        for step in range(3):
            x, y = (t.to(device) for t in batch_of(shape, step))
            optimizer.zero_grad()
            outputs = model(x)
            optimizer.update_curvature(outputs, "cross_entropy")
            scaler.scale(F.cross_entropy(outputs, y)).backward()
            if unscale:
                scaler.unscale_(optimizer)  # without grad_scaler=
            scaler.step(optimizer)
            scaler.update()
        factors = [s[key] for s in optimizer.state.values() for key in ("A", "G") if key in s]
        results.append([*factors, *(p.detach() for p in model.parameters())])
    assert_each_close_in_norm(*results, 1e-10)


@kinds
@fishers
def test_a_first_step_of_zeros_creates_the_state(fisher, kind, device):
    """torch.distributed.checkpoint takes such a step before it loads."""
    model = mlp(4, 5, 3).to(device)
    optimizer = kind(model, fisher=fisher, lr=0.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert optimizer.state[model[0].weight].keys() >= STATE[kind]


@kinds
def test_the_option_is_the_same_in_all_groups(kind):
    model = mlp(4, 5, 3)
    groups = [{"params": model[0].parameters(), "fisher": "mc"}, {"params": model[2].parameters()}]
    with pytest.raises(ValueError, match="fisher must be the same in all parameter groups"):
        kind(groups)


@kinds
@fishers
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("how", ["deepcopy", "state_dict"])
def test_copies_and_checkpoints_go_on_alike(how, every, fisher, kind, device):
    model, shape = make_model("tied_head")
    model.to(device)
    optimizer = make(kind, model, every, lr=0.1, damping=0.1, fisher=fisher)
    train(model, optimizer, shape, 2)
    if how == "deepcopy":
        twin, other = copy.deepcopy((model, optimizer))
    else:
        twin = copy.deepcopy(model)
        other = kind(twin)
        other.load_state_dict(through_a_file(optimizer.state_dict()))
        assert other.param_groups[0]["fisher"] == fisher
    for each, its in ((model, optimizer), (twin, other)):
        train(each, its, shape, 4, first=2)
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=0, atol=0)


@kinds
def test_empirical_matrices_take_no_curvature(kind):
    model = nn.Linear(4, 3)
    optimizer = kind(model)
    with pytest.raises(RuntimeError, match="needs fisher='mc' or 'ggn', got 'empirical'"):
        optimizer.update_curvature(model(torch.ones(2, 4)), "mse")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no_tensor": ({"outputs": [1.0]}, "outputs must be of type Tensor, got list"),
    "model_output": (
        {"outputs": SimpleNamespace(logits=torch.ones(1))},
        "got SimpleNamespace; pass its logits",
    ),
    "no_graph": ({"outputs": torch.ones(2, 3)}, "do not require gradients"),
    "one_dimension": ({"outputs": torch.ones(3, requires_grad=True)}, r"must be \[N, C\]"),
    "integers": ({"outputs": torch.ones(2, 3, dtype=torch.long)}, "real floating-point tensor"),
    "loss": ({"loss": "nll"}, "loss must be one of 'cross_entropy', 'mse', 'bce', got 'nll'"),
    "loss_type": ({"loss": F.cross_entropy}, "loss must be of type str, got function"),
    "reduction": ({"reduction": "none"}, "reduction must be one of 'mean', 'sum', got 'none'"),
    "class_dim": ({"class_dim": 0}, "class_dim must be a dimension of the outputs"),
    "class_dim_range": ({"class_dim": 2}, "class_dim must be a dimension of the outputs"),
    "class_dim_needless": (
        {"loss": "mse", "class_dim": 1},
        "class_dim is for loss='cross_entropy'",
    ),
    "class_dim_missing": (
        {"outputs": torch.ones(2, 3, 4, requires_grad=True)},
        "have more than two dimensions: pass class_dim",
    ),
    "mask_shape": ({"mask": torch.ones(2, 3, dtype=torch.bool)}, r"mask must be a bool tensor of"),
    "mask_dtype": ({"mask": torch.ones(2)}, r"mask must be a bool tensor of shape \[2\]"),
    "samples": ({"samples": 0}, "samples must be an integer of at least 1, got 0"),
    "samples_type": ({"samples": 1.5}, "samples must be of type int, got float"),
}


@kinds
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case, kind):
    arguments, message = WRONG[case]
    model = nn.Linear(4, 3)
    optimizer = kind(model, fisher="mc")
    outputs = model(torch.ones(2, 4))
    given: dict[str, Any] = {"outputs": outputs, "loss": "cross_entropy", **arguments}
    with pytest.raises(ValueError, match=message):
        optimizer.update_curvature(**given)
    outputs.sum().backward()
    with pytest.raises(RuntimeError, match="was not called"):  # nothing was recorded
        optimizer.step()
