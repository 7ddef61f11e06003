"""Which calls of one backward pass are samples, positions, or of another model."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torchium
from torch import nn
from torch.nn import functional as F


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))


def losses(model: nn.Module, *sizes: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [F.cross_entropy(model(torch.randn(n, 4)), torch.arange(n) % 3) for n in sizes]


def test_parts_of_different_sizes_in_one_backward_pass_are_named_once():
    model = mlp()
    optimizer = torchium.KFAC(model, TCov=1)
    messages = []
    for _ in range(2):
        optimizer.zero_grad()
        sum(losses(model, 6, 4)).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        messages += [str(w.message) for w in caught]
    (message,) = messages
    assert "KFAC takes all calls of a layer in one backward pass as positions" in message
    assert "3 (4 and 6 samples: 0.weight, 2.weight, 1 more)" in message
    assert "call backward() for each part" in message


class Windows(nn.Module):
    """Attends to nothing, but cuts each sample into windows for one layer, as Swin does."""

    def __init__(self, keeps_batch: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.window, self.leave = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.keeps_batch = keeps_batch

    def forward(self, x):
        h = torch.tanh(self.enter(x)).unflatten(1, (3, 2))  # [batch, windows, positions, features]
        h = self.window(h if self.keeps_batch else h.flatten(0, 1)).reshape(len(x), 6, 5)
        return self.leave(torch.tanh(h).mean(1))


def step_on_windows(fisher: str, keeps_batch: bool) -> tuple[Windows, torchium.KFAC, list[str]]:
    model = Windows(keeps_batch)
    optimizer = torchium.KFAC(model, fisher=fisher)
    torch.manual_seed(1)
    outputs = model(torch.randn(4, 6, 4))
    if fisher != "empirical":
        optimizer.update_curvature(outputs, "cross_entropy")
    F.cross_entropy(outputs, torch.arange(4) % 3).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):  # the second has no new factors
            optimizer.step()
            for p in model.parameters():
                p.grad = torch.ones_like(p)
    return model, optimizer, [str(w.message) for w in caught]


def test_a_layer_with_other_samples_than_most_is_named():
    model, optimizer, (message,) = step_on_windows("empirical", keeps_batch=False)
    assert "KFAC takes dimension 0 of a layer's input as the samples" in message
    assert "1 (12 where other layers have 4: window.weight)" in message
    assert 'Give every layer inputs [batch, ..., features], or set fisher to "mc"' in message
    twin, other, messages = step_on_windows("empirical", keeps_batch=True)
    assert messages == []
    G, G_of_batch = (
        opt.state[m.window.weight]["G"] for opt, m in ((optimizer, model), (other, twin))
    )
    torch.testing.assert_close(G, 3 * G_of_batch)  # what the warning is about


def test_curvature_counts_the_samples_of_the_outputs():
    model, optimizer, messages = step_on_windows("ggn", keeps_batch=False)
    twin, other, others_messages = step_on_windows("ggn", keeps_batch=True)
    assert messages == others_messages == []
    for key in ("A", "G"):
        torch.testing.assert_close(
            optimizer.state[model.window.weight][key], other.state[twin.window.weight][key]
        )


def test_a_backward_pass_for_each_part_equals_one_batch():
    model, twin = mlp(), mlp()
    x, y = torch.randn(10, 4), torch.arange(10) % 3
    one, other = torchium.KFAC(model, TCov=1), torchium.KFAC(twin, TCov=1)
    F.cross_entropy(model(x), y).backward()
    for part in (slice(0, 6), slice(6, 10)):
        (F.cross_entropy(twin(x[part]), y[part], reduction="sum") / 10).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one.step()
        other.step()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("fisher", ["ggn", "mc"])
@pytest.mark.parametrize("optimizer_class", [torchium.KFAC, torchium.NaturalGradient])
def test_outputs_of_another_model_raise_before_anything_changes(optimizer_class, fisher):
    model, other = mlp(), mlp()
    optimizer = optimizer_class(model, fisher=fisher)
    x, y = torch.randn(6, 4), torch.arange(6) % 3
    outputs = model(x)
    with pytest.raises(ValueError, match="do not depend on any parameter of this"):
        optimizer.update_curvature(other(x), "cross_entropy")
    twin = copy.deepcopy(model)
    second = optimizer_class(twin, fisher=fisher)
    for each, opt in ((outputs, optimizer), (twin(x), second)):  # nothing was recorded
        torch.manual_seed(2)
        opt.update_curvature(each, "cross_entropy")
        F.cross_entropy(each, y).backward()
        opt.step()
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()), rtol=0, atol=0)


def test_a_model_without_known_layers_is_no_other_model():
    model = nn.LSTM(4, 3)
    optimizer = torchium.KFAC(model, fisher="ggn")
    outputs = model(torch.randn(2, 5, 4))[0][-1]
    optimizer.update_curvature(outputs, "cross_entropy")
    outputs.sum().backward()
    with pytest.warns(UserWarning, match="preconditions 0 of 4"):
        optimizer.step()


def test_messages_describe_tensors_in_the_words_of_python():
    model = mlp()
    optimizer = torchium.KFAC(model, fisher="ggn")
    outputs = model(torch.randn(6, 4))
    with pytest.raises(
        ValueError, match=r"a tensor of dtype int64 and shape \[6\] on cpu"
    ) as refused:
        optimizer.update_curvature(outputs, "cross_entropy", mask=torch.ones(6, dtype=torch.int64))
    assert "CPU" not in str(refused.value)
    with pytest.raises(
        ValueError, match=r"a tensor of dtype int64 and shape \[6\] on cpu"
    ) as refused:
        optimizer.update_curvature(torch.arange(6), "cross_entropy")
    assert "CPU" not in str(refused.value)


@pytest.mark.parametrize("how", ["expanded", "overlapping"])
def test_a_gradient_that_shares_memory_is_refused_before_it_is_written(how):
    model = mlp()
    preconditioner = torchium.KFACPreconditioner(model)
    losses(model, 6)[0].backward()
    weight = model[0].weight
    good = weight.grad
    if how == "expanded":
        weight.grad = good.mean().expand(good.shape)
    else:
        weight.grad = torch.as_strided(good.clone(), good.shape, (1, 1))
    bad = weight.grad.clone()
    before = copy.deepcopy(preconditioner.state_dict())
    with pytest.raises(ValueError, match=r"'0.weight'.* share memory .*p\.grad\.clone\(\)"):
        preconditioner.step()
    assert torch.equal(weight.grad, bad)
    assert preconditioner.state_dict() == before
    preconditioner.zero_grad()
    losses(model, 6)[0].backward()
    wide = torch.zeros(*weight.shape, 2)  # not dense, but without overlap
    wide[..., 0] = weight.grad
    weight.grad = wide[..., 0]
    preconditioner.step()
    assert not torch.equal(wide[..., 0], good)
    assert not wide[..., 1].any()


def test_per_sample_names_a_bare_parameter_and_the_remedies():
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 3), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.layer(x) * self.scale

    model = Scaled()
    with (
        pytest.raises(ValueError, match="'scale' beside its layers") as refused,
        torchium.per_sample(model),
    ):
        pass
    for remedy in ("register_layer()", "requires_grad_(False)", "per_sample_gradients()"):
        assert remedy in str(refused.value)
    assert "unsupported type" not in str(refused.value)
    model.scale.requires_grad_(False)
    with torchium.per_sample(model):
        model(torch.randn(5, 4)).square().mean().backward()
    assert model.layer.weight.grad_sample.shape == (5, 3, 4)
