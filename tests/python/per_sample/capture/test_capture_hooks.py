"""Hooks of capturing optimizers: they leave no trace, find new modules, and serve many threads."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import warnings
import weakref

import pytest
import torch
import torchium
from optimizer_cases import values
from torch import nn
from torch._dynamo import compiled_autograd
from torch.nn import functional as F
from torch.nn.modules import module as nn_module
from torch.utils.checkpoint import checkpoint

OPTIMIZERS = {
    "kfac": lambda params: torchium.KFAC(params, lr=0.1, TCov=1, TInv=1, kl_clip=None),
    "natural_gradient": lambda params: torchium.NaturalGradient(params, lr=0.1, damping=0.1),
}
both = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    x, y = batch(number)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


# ---- no trace


def traces() -> list[int]:
    hooks = [getattr(nn_module, name) for name in dir(nn_module) if name.startswith("_global_")]
    return [len(entries) for entries in hooks if isinstance(entries, dict)]


@both
def test_optimizers_leave_no_trace_in_torch(make):
    make(mlp().parameters())  # one hook for new parameters serves all later optimizers
    gc.collect()
    before = traces()
    for _ in range(5):
        model = mlp()
        optimizer = make(model.parameters())
        step(model, optimizer)
        unused = make(mlp().parameters())  # still looking for its layers when deleted
        del optimizer, unused
        gc.collect()
    assert traces() == before


@both
def test_compiled_models_do_not_warn_of_optimizers_that_are_gone(make):
    for _ in range(3):
        model = mlp()
        step(model, make(model.parameters()))
    gc.collect()
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(mlp(), backend="eager")(torch.randn(2, 4))


def test_optimizers_may_go_while_modules_are_built():
    """The garbage collector runs whenever Python allocates, also between the hooks of a module."""
    left = [torchium.KFAC(mlp().parameters()) for _ in range(3)]

    def collects(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        left.clear()
        gc.collect()

    handle = nn_module.register_module_parameter_registration_hook(collects)
    try:
        later = nn_module.register_module_parameter_registration_hook(lambda *args: None)
        nn.Linear(2, 2)
        later.remove()
    finally:
        handle.remove()
    assert not left


@both
def test_no_cycle_keeps_an_optimizer_alive(make):
    make(mlp())  # torch keeps the frames of the process's first optimizer
    gc.collect()
    gc.disable()
    try:
        for unused in (False, True):
            model = mlp()
            optimizer = make(model.parameters())
            if not unused:
                step(model, optimizer)
                with pytest.raises(ValueError, match="lr"):
                    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": -1.0})
            reference = weakref.ref(optimizer)
            del optimizer
            assert reference() is None
            assert not nn_module._has_any_global_hook()
            assert not model[0]._forward_hooks
    finally:
        gc.enable()


# ---- hooks of other code that run first


class _SteeperGradient(torch.autograd.Function):
    """The same values with another gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


REPLACEMENTS = {
    "doubled": lambda output: 2 * output,
    "in_place": lambda output: output.mul_(2),
    "steeper": _SteeperGradient.apply,
}


def hook_before(place: str, layer: nn.Module, function) -> torch.utils.hooks.RemovableHandle:
    def hook(module, args, output):
        return function(output) if module is layer else None

    if place == "global":
        return nn_module.register_module_forward_hook(hook)
    return layer.register_forward_hook(hook, prepend=True)


@pytest.mark.parametrize("place", ["global", "prepended"])
@pytest.mark.parametrize("replaced", REPLACEMENTS.values(), ids=REPLACEMENTS.keys())
def test_an_output_that_a_hook_has_replaced_is_not_that_of_the_layer(place, replaced):
    """Its gradient is not that of the layer's output."""
    model = mlp()
    kfac, natural = (make(model) for make in OPTIMIZERS.values())
    handle = hook_before(place, model[2], replaced)
    try:
        with pytest.warns(UserWarning, match="used outside of its layer"):
            step(model, kfac)
        with pytest.raises(ValueError, match=r"'2\.weight'.* does not come from its layer alone"):
            step(model, natural)
    finally:
        handle.remove()
    assert kfac.report()["fallback"] == ["2.weight", "2.bias"]


@pytest.mark.parametrize("place", ["global", "prepended"])
@pytest.mark.parametrize("is_training", [True, False])
def test_a_hook_that_runs_first_does_not_count_a_batch_twice(place, is_training):
    results = []
    for is_watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
        model.train(is_training)
        optimizer = torchium.KFAC(model, TInv=1)
        handle = hook_before(place, model[1], lambda output: None) if is_watched else None
        step(model, optimizer)
        if handle is not None:
            handle.remove()
        assert optimizer.report()["fallback"] == []
        results.append(list(model.state_dict().values()))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@both
@pytest.mark.parametrize("place", ["global", "prepended"])
def test_hooks_that_run_first_and_replace_nothing_do_not_matter(make, place):
    results = []
    for is_watched in (False, True):
        model = mlp()
        optimizer = make(model)
        seen: list[torch.Tensor] = []
        if is_watched:
            handle = hook_before(place, model[2], seen.append)
        for number in range(3):
            step(model, optimizer, number)
        results.append(values(model))
    handle.remove()
    assert len(seen) == 3
    torch.testing.assert_close(*results, rtol=0, atol=0)


@both
def test_a_hook_that_runs_first_does_not_disturb_checkpoints(make):
    results = []
    for is_watched in (False, True):
        model = mlp()
        optimizer = make(model)
        if is_watched:
            handle = hook_before("prepended", model[2], lambda output: None)
        x, y = batch()
        F.cross_entropy(checkpoint(model, x, use_reentrant=False), y).backward()
        optimizer.step()
        results.append(values(model))
    handle.remove()
    torch.testing.assert_close(*results, rtol=0, atol=0)


# ---- calls of other forms


@both
def test_the_input_may_be_a_keyword_of_another_name(make):
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    results = []
    for by_keyword in (False, True):
        torch.manual_seed(0)
        layer = Conv1D(3, 4)
        optimizer = make(layer)
        x, y = batch()
        F.cross_entropy(layer(x=x) if by_keyword else layer(x), y).backward()
        optimizer.step()
        results.append(values(layer))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_layers_of_nested_tensors_are_not_captured(layout):
    layer = nn.Linear(4, 3)
    kfac, natural = (make(layer) for make in OPTIMIZERS.values())
    nested = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=layout)
    sum(each.square().sum() for each in layer(nested).unbind()).backward()
    with pytest.warns(UserWarning, match="preconditions 0 of 2 parameters"):
        kfac.step()
    with pytest.raises(ValueError, match="has captured no backward pass"):
        natural.step()


@both
def test_compiled_autograd_is_refused_by_its_name(make):
    model = mlp()
    optimizer = make(model)
    x, y = batch()
    loss = F.cross_entropy(model(x), y)
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(NotImplementedError, match="compiled_autograd = False"),
    ):
        loss.backward()
    step(model, optimizer)


# ---- modules constructed later


def with_new_layers(model: nn.Sequential) -> nn.Sequential:
    """The same parameters in other modules."""
    layers = []
    for old in model:
        layer = nn.Tanh()
        if isinstance(old, nn.Linear):
            layer = nn.Linear(old.in_features, old.out_features)
            layer.weight, layer.bias = old.weight, old.bias
        layers.append(layer)
    return nn.Sequential(*layers)


@both
@pytest.mark.parametrize("form", ["model", "parameters"])
def test_new_modules_around_known_parameters_are_seen(make, form):
    results = []
    for renewed in (False, True):
        model = mlp()
        optimizer = make(model if form == "model" else model.parameters())
        for number in range(6):
            step(model, optimizer, number)
            if renewed and number == 2:
                model = with_new_layers(model)
        if isinstance(optimizer, torchium.KFAC):
            assert optimizer.state[model[0].weight]["factor_updates"] == 6
        results.append(values(model))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@both
def test_one_of_two_layers_that_share_a_weight_may_be_new(make):
    """The other one still runs: the gradient is not missing, but incomplete."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.uses_both = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.a(x))
            return self.b(x) if self.uses_both else x

    results = []
    for late in (False, True):
        torch.manual_seed(0)
        model = Shared()
        weight = model.a.weight
        if late:
            optimizer = make([weight])
        else:
            model.b.weight = weight
            optimizer = make(model)
        step(model, optimizer)
        model.b.weight, model.uses_both = weight, True
        step(model, optimizer, 1)
        results.append(weight.detach())
    torch.testing.assert_close(*results, rtol=0, atol=0)


@both
def test_a_list_of_the_parameters_is_no_layer(make):
    """It never runs."""
    results = []
    for listed in (False, True):
        model = mlp()
        optimizer = make(model)
        step(model, optimizer)
        kept = nn.ParameterList(model.parameters()) if listed else None
        step(model, optimizer, 1)
        results.append(values(model))
        del kept
    torch.testing.assert_close(*results, rtol=0, atol=0)


# ---- threads


@pytest.fixture
def eager_switching():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def train_in_threads(model, optimizer, numbers: range) -> None:
    """One forward and backward pass per thread, all at once, then one step."""
    barrier, errors = threading.Barrier(len(numbers)), []

    def run(number: int) -> None:
        x, y = batch(number)
        try:
            barrier.wait()
            (F.cross_entropy(model(x), y) / len(numbers)).backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    optimizer.step()


@both
@pytest.mark.parametrize("form", ["model", "parameters"])
def test_threads_may_share_the_first_pass(make, form, eager_switching):
    start = nn.Sequential(
        *(m for _ in range(4) for m in (nn.Linear(4, 4), nn.Tanh())), nn.Linear(4, 3)
    )
    start.double()
    expected = copy.deepcopy(start)
    optimizer = make(expected)
    for number in range(4):
        x, y = (t.double() if t.is_floating_point() else t for t in batch(number))
        (F.cross_entropy(expected(x), y) / 4).backward()
    optimizer.step()
    for _ in range(40):
        model = copy.deepcopy(start)
        optimizer = make(model if form == "model" else model.parameters())
        train_in_threads(Doubled(model), optimizer, range(4))
        torch.testing.assert_close(values(model), values(expected), rtol=1e-8, atol=1e-10)


class Doubled(nn.Module):
    """Converts float32 inputs to float64."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.double())


# ---- uses outside layers that come and go


def penalized(model: nn.Sequential, number: int, scale: float | None) -> None:
    x, y = batch(number)
    loss = F.cross_entropy(model(x), y)
    if scale is not None:
        loss = loss + scale * F.linear(x.tanh(), model[0].weight).square().mean()
    loss.backward()


@pytest.mark.parametrize("scales", [[None, None, 1.0, None], [0.0, None, 0.0]], ids=str)
def test_natural_gradient_refuses_a_use_outside_whenever_it_begins(scales):
    """Also one whose factor is zero."""
    model = mlp()
    optimizer = OPTIMIZERS["natural_gradient"](model)
    for number, scale in enumerate(scales):
        optimizer.zero_grad()
        penalized(model, number, scale)
        if scale is not None:
            with pytest.raises(
                ValueError,
                match=r"'0\.weight'.* does not come from its layer alone.*update_jacobian\(\)",
            ):
                optimizer.step()
        else:
            optimizer.step()


def test_kfac_falls_back_as_long_as_a_weight_is_used_outside():
    model = mlp()
    optimizer = torchium.KFAC(model, TCov=2)
    fallback = [2, 2, 0, 0, 2, 2, 0]  # weight and bias, as of the last capture
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, expected in enumerate(fallback):
            optimizer.zero_grad()
            penalized(model, number, 1.0 if number in (0, 3, 4) else None)
            optimizer.step()
            assert len(optimizer.report()["fallback"]) == expected, number


def test_natural_gradient_refuses_a_micro_batch_that_uses_a_weight_outside_alone():
    model = mlp()
    optimizer = OPTIMIZERS["natural_gradient"](model)
    for number in range(2):
        x, y = batch(number)
        hidden = model[0](x) if number == 0 else F.linear(x, model[0].weight, model[0].bias)
        (F.cross_entropy(model[2](torch.tanh(hidden)), y) / 2).backward()
    with pytest.raises(ValueError, match=r"'0\.weight'.* does not come from its layer alone"):
        optimizer.step()


def test_layers_whose_factors_are_not_due_are_not_used_outside():
    model = mlp()
    groups = [{"params": model[0].parameters(), "TCov": 1}, {"params": model[2].parameters()}]
    optimizer = torchium.KFAC(groups, TCov=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(4):
            step(model, optimizer, number)
            assert optimizer.report()["fallback"] == []
    assert optimizer.state[model[0].weight]["factor_updates"] == 4
    assert optimizer.state[model[2].weight]["factor_updates"] == 2


# ---- tools that rewrite models


@both
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rewritten_models_run(make):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).eval()
    optimizer = make(model.parameters())
    x = torch.randn(1, 2, 5, 5)
    y = model(x)
    fused = torch.ao.quantization.fuse_modules(model, ["0", "1"])
    torch.testing.assert_close(fused(x), y)
    del optimizer
    torch.testing.assert_close(fused(x), y)


@both
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripting_names_the_remedy(make):
    model = mlp()
    optimizer = make(model)
    with pytest.raises(AttributeError, match="loaded its state_dict"):
        torch.jit.script(model)
    del optimizer
    torch.jit.script(model)


COMPILED = {
    "scripted": lambda model: torch.jit.script(model),
    "traced": lambda model: torch.jit.trace(model, batch()[0]),
    "part": lambda model: nn.Sequential(torch.jit.script(model[0]), *model[1:]),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:KFAC preconditions")
@pytest.mark.parametrize("compile", COMPILED.values(), ids=COMPILED.keys())
@pytest.mark.parametrize("params", [lambda model: model, lambda model: model.parameters()])
def test_layers_that_jit_has_compiled_are_no_layers(compile, params):
    model = compile(mlp())
    optimizer = OPTIMIZERS["kfac"](params(model))
    before = values(model)
    step(model, optimizer)
    assert not any(map(torch.equal, values(model), before))
    assert len(optimizer.report()["fallback"]) == (2 if type(model) is nn.Sequential else 4)
    with pytest.raises(ValueError, match=r"layer '0' .* is compiled by torch\.jit"):
        step(model, OPTIMIZERS["natural_gradient"](params(model)))
    compiled = pytest.raises(ValueError, match=r"model\.0 .* is compiled by torch\.jit")
    with compiled, torchium.per_sample(model):
        model(batch()[0])


def test_inputs_by_keyword():
    layer, x = nn.ConvTranspose1d(2, 3, 2), torch.randn(4, 2, 5)
    rows = []
    for call in (lambda: layer(x), lambda: layer(output_size=[6], input=x)):
        layer.zero_grad()
        with torchium.per_sample(layer):
            call().square().mean().backward()
        rows.append([p.grad_sample for p in layer.parameters()])
    assert all(map(torch.equal, *rows))
