"""Capture by optimizers: every way to write a training step gives the same result."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
import torchium
from capture_cases import (
    OPTIMIZERS,
    Forward,
    backward,
    batch,
    both,
    checkpointed,
    expected,
    net,
    train,
)
from optimizer_cases import assert_same, values
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings(
    "ignore:KFAC preconditions",
    "ignore:Using `torch.compile\\(module\\)` when there are global",
    "ignore:`torch.jit.trace",
)


# ---- no trace


def evaluate_without_graph(model, step):
    with torch.no_grad():
        model(batch(step + 50)[0])
    with torch.inference_mode():
        model(batch(step + 51)[0])


def evaluate_with_graph(model, step):
    model(batch(step + 50)[0])


def gradient_of_the_input(model, step):
    x, y = batch(step + 50)
    x.requires_grad_()
    torch.autograd.grad(F.cross_entropy(model(x), y), x)


def discarded_backward(model, step):
    backward(model, step + 50)
    model.zero_grad()  # not the optimizer's


def backward_discarded_in_place(model, step):
    backward(model, step + 50)
    model.zero_grad(set_to_none=False)


def backward_discarded_by_foreach(model, step):
    backward(model, step + 50)
    torch._foreach_zero_([p.grad for p in model.parameters()])


def failing_backward(model, step):
    def refuse(gradient):
        raise KeyError("a hook of the user")

    x, y = batch(step + 50)
    features = model.features(x)
    features.register_hook(refuse)
    with pytest.raises(KeyError):
        F.cross_entropy(model.head(features), y).backward()
    model.zero_grad()


def functional_transforms(model, step):
    params = {n: p.detach() for n, p in model.named_parameters()}
    x, y = batch(step + 50)

    def loss(params, x, y):
        return F.cross_entropy(torch.func.functional_call(model, params, (x[None],)), y[None])

    torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, x, y)


def traced_and_exported(model, step):
    x, _ = batch(step + 50)
    torch.jit.trace(model, x)
    program = torch.export.export(model, (x,), strict=False)
    assert not [n for n in program.graph.nodes if "new_empty" in str(n.target)]


def per_sample_gradients(model, step):
    torchium.per_sample_gradients(model, F.cross_entropy, *batch(step + 50))


@both
@pytest.mark.parametrize(
    "before",
    [
        evaluate_without_graph,
        evaluate_with_graph,
        gradient_of_the_input,
        discarded_backward,
        backward_discarded_in_place,
        backward_discarded_by_foreach,
        failing_backward,
        functional_transforms,
        traced_and_exported,
        per_sample_gradients,
    ],
)
def test_other_passes_leave_no_trace(make, before):
    model = net(inplace=before is not functional_transforms)
    assert_same(train(model, make(model.parameters()), before=before), expected(make))


# ---- ways to write the forward pass


def by_keyword(model, x):
    x = model.conv(input=x).relu().flatten(1)
    return model.head(model.norm(input=x))


def nested_checkpoints(**options) -> Forward:
    def forward(model, x):
        def inner(x):
            return model.head(checkpoint(model.features, x, **options))

        return checkpoint(inner, x.requires_grad_(), **options)

    return forward


def deeper_checkpoints(model, x):
    """Reentrant ones; the outer one runs only the inner one."""

    def inner(x):
        return checkpoint(model.features, x, use_reentrant=True)

    return model.head(checkpoint(inner, x.requires_grad_(), use_reentrant=True))


def offloaded(model, x):
    with torch.autograd.graph.save_on_cpu():
        return model(x)


def under_full_backward_hooks(model, x):
    handles = [m.register_full_backward_hook(lambda *_: None) for m in model.modules()]
    try:
        return model(x)
    finally:
        for handle in handles:
            handle.remove()


def with_a_later_hook(model, x):
    """It replaces the output, so it is not part of the layer."""
    handle = model.last.register_forward_hook(lambda module, args, output: output * 1.0)
    try:
        return model(x)
    finally:
        handle.remove()


@both
@pytest.mark.parametrize(
    "forward",
    [
        by_keyword,
        checkpointed(use_reentrant=True),
        checkpointed(use_reentrant=False),
        nested_checkpoints(use_reentrant=True),
        nested_checkpoints(use_reentrant=False),
        deeper_checkpoints,
        offloaded,
        under_full_backward_hooks,
        with_a_later_hook,
    ],
    ids=lambda f: f.__qualname__,
)
def test_the_way_the_forward_pass_is_written_does_not_matter(make, forward):
    model = net(inplace=forward is not under_full_backward_hooks)  # torch allows only one of them
    trained = train(model, make(model), forward=forward)
    torch.testing.assert_close(trained, expected(make), rtol=1e-5, atol=1e-6)


@both
def test_activations_in_place_do_not_matter(make):
    model = net(inplace=False)
    assert_same(train(model, make(model)), expected(make))


@both
@pytest.mark.parametrize("shape", [(6,), (4, 6), (4, 3, 6), (4, 2, 3, 6)], ids=str)
def test_activations_in_place_after_linear_layers_of_any_input(make, shape):
    """They may return views, whose in-place changes autograd treats differently."""
    results = []
    for inplace in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace), nn.Linear(5, 4), nn.ReLU(inplace))
        optimizer = make(model)
        x = torch.randn(shape)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        results.append(values(model))
    assert_same(results[1], results[0])


@both
@pytest.mark.parametrize(
    "form",
    [
        lambda model: model.parameters(),
        lambda model: model.named_parameters(),
        lambda model: [
            {"params": model.conv.parameters()},
            {"params": [*model.norm.parameters(), *model.twice.parameters()]},
            {"params": model.last.parameters()},
        ],
        lambda model: nn.ModuleDict({"inner": model}),
    ],
    ids=["parameters", "named", "groups", "outer_model"],
)
def test_the_form_of_the_first_argument_does_not_matter(make, form):
    model = net()
    assert_same(train(model, make(form(model))), expected(make))


@both
def test_weight_and_bias_may_be_in_different_groups(make):
    model = net()
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = make([{"params": weights}, {"params": others}])
    torch.testing.assert_close(train(model, optimizer), expected(make), rtol=1e-4, atol=1e-5)


@both
@pytest.mark.parametrize("replaces_gradients", [False, True])
def test_micro_batches_equal_one_batch(make, replaces_gradients):
    """Also if the gradients are other tensors after each of them."""
    model = net().double()
    whole = copy.deepcopy(model)
    optimizers = [make(model), make(whole)]
    for step in range(4):
        x, y = batch(step)
        x = x.double()
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in (slice(0, 4), slice(4, 8)):
            (F.cross_entropy(model(x[part]), y[part]) / 2).backward()
            for param in model.parameters():
                param.grad = param.grad.clone() if replaces_gradients else param.grad
        F.cross_entropy(whole(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(values(model), values(whole), rtol=1e-9, atol=1e-10)


@both
def test_micro_batches_after_one_forward_pass_each(make):
    """All forward passes first, then all backward passes."""
    model, interleaved = net().double(), net().double()
    optimizers = [make(model), make(interleaved)]
    for step in range(3):
        x, y = batch(step)
        parts = [(x[:4].double(), y[:4]), (x[4:].double(), y[4:])]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in [F.cross_entropy(model(a), b) / 2 for a, b in parts]:
            loss.backward()
        for a, b in parts:
            (F.cross_entropy(interleaved(a), b) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_same(values(model), values(interleaved))


@both
def test_backward_may_run_in_another_thread(make):
    model = net()
    optimizer = make(model)
    for step in range(4):
        optimizer.zero_grad()
        thread = threading.Thread(target=backward, args=(model, step))
        thread.start()
        thread.join()
        optimizer.step()
    assert_same(values(model), expected(make))


@both
def test_a_graph_that_is_kept_may_be_used_again(make):
    model = net()
    optimizer = make(model)
    for step in range(4):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(values(model), expected(make))


def test_kfac_warns_once_of_two_backward_passes_over_one_graph():
    model = net()
    optimizer = OPTIMIZERS["kfac"](model)
    messages = []
    for step in range(3):
        x, y = batch(step)
        optimizer.zero_grad()
        outputs = model(x)
        F.cross_entropy(outputs, y).backward(retain_graph=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outputs.square().mean().backward()
        messages += [str(w.message) for w in caught]
        optimizer.step()
    assert len(messages) == 1
    assert "a second backward pass has reached the same call of Linear" in messages[0]
    assert "add the losses of one forward pass and call backward() once" in messages[0]


@both
@pytest.mark.parametrize("clears", ["optimizer", "model", "model_in_place"])
def test_a_second_pass_after_the_first_was_discarded_does_not_warn(make, clears):
    model = net()
    optimizer = make(model)
    loss = F.cross_entropy(model(batch(0)[0]), batch(0)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward(retain_graph=True)
        if clears == "optimizer":
            optimizer.zero_grad()
        else:
            model.zero_grad(set_to_none=clears == "model")
        loss.backward()
    optimizer.step()


@both
@pytest.mark.parametrize(
    ("backend", "compiled_first", "form"),
    [
        ("eager", False, nn.Module.parameters),
        ("aot_eager", False, lambda m: m),
        ("aot_eager", True, nn.Module.parameters),
    ],
    ids=["eager", "aot_eager", "compiled_first"],
)
def test_a_compiled_model_is_seen(make, backend, compiled_first, form):
    torch._dynamo.reset()
    model = net()
    compiled = torch.compile(model, backend=backend)
    if compiled_first:
        compiled(batch(0)[0]).sum().backward()
        model.zero_grad()
    optimizer = make(form(model))
    trained = train(model, optimizer, forward=lambda _, x: compiled(x))
    torch.testing.assert_close(trained, expected(make), rtol=1e-5, atol=1e-6)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_about_the_same_direction(make, dtype, device):
    steps = []
    for enabled in (False, True):
        model = net(device)
        optimizer = make(model)
        start = values(model)
        with torch.autocast(device.type, dtype=dtype, enabled=enabled):
            x, y = batch(0, device)
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        steps.append(
            torch.cat([(p - s).flatten() for p, s in zip(values(model), start, strict=True)])
        )
    assert F.cosine_similarity(steps[0], steps[1], dim=0) > 0.99


@both
def test_frozen_layers_and_parts_under_no_grad(make):
    """A model whose first part is a fixed function."""
    model, reference = net(), net()
    for module in (model.conv, model.norm, reference.conv, reference.norm):
        module.requires_grad_(False)
    optimizer, other = (
        make(model),
        make([*reference.twice.parameters(), *reference.last.parameters()]),
    )

    def features_without_graph(model, x):
        with torch.no_grad():
            features = model.features(x)
        return model.head(features)

    trained = train(model, optimizer, forward=features_without_graph)
    assert_same(trained, train(reference, other))
    assert not optimizer.state.get(model.conv.weight)


@both
def test_unbatched_inputs_are_one_sample(make):
    one, batched = net(), net()
    optimizers = [make(one), make(batched)]
    x, y = batch(0)
    F.cross_entropy(one.head(one.norm(one.conv(x[0]).relu().flatten())), y[0]).backward()
    F.cross_entropy(batched(x[:1]), y[:1]).backward()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(values(one), values(batched), rtol=1e-5, atol=1e-6)


@both
def test_an_input_changed_in_place_is_an_error_that_names_the_layer(make):
    """Under autocast, autograd keeps a copy and would not notice."""
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = make(model)
    x = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    x += 1.0
    with pytest.raises(RuntimeError, match=r"input of Linear\(.*changed in place"):
        y.sum().backward()
    optimizer.zero_grad()


class _TenTimes(torch.autograd.Function):
    """A node that multiplies the gradient by ten."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return 10 * gradient


@pytest.mark.parametrize("make", [torchium.KFAC, torchium.NaturalGradient])
def test_what_a_hook_of_an_output_makes_of_its_gradient_is_captured(make):
    """A hook on the output of a layer equals a node after it."""

    def step(scaled: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.Linear(4, 5), nn.Linear(5, 3)
        optimizer = make(nn.ModuleList(layers), lr=0.5)
        x, y = torch.randn(6, 4), torch.randint(3, (6,))
        F.cross_entropy(layers[1](scaled(layers[0](x)).tanh()), y).backward()
        optimizer.step()
        return [p.detach() for layer in layers for p in layer.parameters()]

    def hooked(z: Tensor) -> Tensor:
        z.register_hook(lambda gradient: 10 * gradient)
        return z

    plain, by_hook, by_node = step(lambda z: z), step(hooked), step(_TenTimes.apply)
    assert all(map(torch.equal, by_hook, by_node))
    assert not torch.allclose(by_hook[0], plain[0])
