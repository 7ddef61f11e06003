"""Per-sample gradients."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from .._capture.layers import mixes_samples
from .layers import LayerCalls, SampleLoss, layer_calls, leaves
from .random_numbers import DRAWN, NoRandomNumbers
from .sample_trees import SampleTree, count_samples

LossFunction = Callable[[Any, Any], Tensor]
# The gradients of samples [first, last): one tensor [last - first, *shape] per parameter.
Rows = Callable[[int, int], list[Tensor]]
T = TypeVar("T")

# Held while a model's parameters are replaced. One lock, because models may share layers.
one_call = threading.RLock()


def per_sample_gradients(
    model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any
) -> dict[str, Tensor]:
    """Return the gradient of each sample's loss, for every trainable parameter.

    Row i of an entry is the gradient of ``loss_fn(model(inputs[i:i+1]), targets[i:i+1])``: each
    sample is passed as a batch of one, so the mean of the rows is the gradient of a mean loss.
    No ``.grad``, parameter, buffer or random state changes. Works under ``torch.no_grad()``.
    A module that changes its buffers in every pass, such as spectral norm in training mode, starts
    each sample with their current values.
    Calls from several threads take turns. During a call, other threads must not use the model,
    because its parameters are replaced temporarily.

    Args:
        model: any module; frozen parameters are left out.
        loss_fn: ``loss_fn(output, target)`` -> one number. It may use parameters of the model, for
            example ``model.weight`` in a penalty.
        inputs: ``[batch, ...]``; a dict of these tensors is passed as keyword arguments
            (``model(**inputs)``), a tuple or list as positional ones. They may be nested, and hold
            None, bool and str, which are the same for all samples.
        targets: ``[batch, ...]``, or nested in the same way, for ``loss_fn``; None if it needs
            none.

    Returns:
        name -> ``[batch, *parameter.shape]``, in the parameter's dtype, without a graph; names as
        in ``model.named_parameters()``.

    Raises:
        ValueError: batch sizes that differ or are zero; a loss of more than one number; a loss that
            uses a parameter (named) by a kept reference, such as ``weight = model.weight`` before
            the call; a module (named) whose output for a sample depends on other samples or on
            random numbers, or that updates running statistics.

    Three methods give the same rows:

    - One pass over the batch and one product per layer, if Linear, Conv2d, Embedding, LayerNorm and
      GroupNorm layers own all trainable parameters (Goodfellow 2015, `arXiv:1510.01799
      <https://arxiv.org/abs/1510.01799>`_). The forward pass of a single sample runs under
      ``torch.func.vmap``, which tracks the sample dimension wherever the model moves it.
    - ``vmap(grad)`` of a single sample's pass for other layers, about 1.5 times as slow.
    - One backward pass per sample for models that ``vmap`` does not support: RNN, LSTM and GRU,
      checkpointed segments, data-dependent control flow, samples written into a buffer. It is slow,
      and a warning names the reason.

    Example:
        >>> model = torch.nn.Linear(10, 2)
        >>> inputs, targets = torch.randn(8, 10), torch.randint(2, (8,))
        >>> loss_fn = torch.nn.CrossEntropyLoss()
        >>> gradients = torchium.per_sample_gradients(model, loss_fn, inputs, targets)
        >>> gradients["weight"].shape
        torch.Size([8, 2, 10])
    """
    rows: list[Tensor] = evaluate(
        "per_sample_gradients",
        model,
        loss_fn,
        inputs,
        targets,
        from_calls=lambda calls: calls.run(torch.ops.torchium.per_sample_gradients),
        from_rows=lambda rows, samples: rows(0, samples),
    )
    return dict(zip(trainable(model), rows, strict=True))


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that have gradients, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def evaluate(
    function: str,
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    from_calls: Callable[[LayerCalls], T],
    from_rows: Callable[[Rows, int], T],
) -> T:
    """A quantity of the per-sample gradients, as the public ``function`` returns it.

    ``from_calls`` computes it from the layer calls. ``from_rows`` computes it from explicit
    gradients of as many samples at a time as it asks for, and is told the number of samples. It may
    be called again after an exception.
    """
    input_tree = SampleTree("inputs", inputs, shared=(bool, str, type(None)))
    target_tree = SampleTree("targets", targets, shared=(type(None),))
    samples = count_samples(input_tree, target_tree)
    tensors = input_tree.tensors + target_tree.tensors
    with one_call:
        _check_modules(model)
        parameters = trainable(model)
        sample_loss = _sample_loss(model, loss_fn, input_tree, target_tree)
        calls: LayerCalls | None = None
        reason = _why_not_vmap(model)
        if reason is None:
            try:
                with _attention_for_vmap(tensors[0].device):
                    calls = layer_calls(model, sample_loss, parameters, tensors)
                    if calls is None:
                        return from_rows(
                            _rows_of(_by_vmap, sample_loss, parameters, tensors), samples
                        )
            # Unsupported models raise many kinds of errors in vmap. An error of the model or the
            # loss itself is raised again below, in PyTorch's words.
            except Exception as error:
                if "called random operation" in str(error):  # and has drawn nothing
                    raise ValueError(DRAWN) from error
                reason = f"vmap refuses it ({str(error).strip().splitlines()[0]})"
        if calls is not None:
            return from_calls(calls)
        with _kept_flat_weights(model), NoRandomNumbers():
            result = from_rows(_rows_of(_one_by_one, sample_loss, parameters, tensors), samples)
    warnings.warn(
        f"{function} takes the samples one by one, which is slow for a batch: in "
        f"{type(model).__name__}, {reason}",
        stacklevel=3,
    )
    return result


def _rows_of(
    method: Callable[..., dict[str, Tensor]],
    sample_loss: SampleLoss,
    parameters: dict[str, Tensor],
    tensors: list[Tensor],
) -> Rows:
    def rows(first: int, last: int) -> list[Tensor]:
        chunk = [t[first:last] for t in tensors]
        return list(method(sample_loss, parameters, chunk).values())

    return rows


def _sample_loss(
    model: nn.Module, loss_fn: LossFunction, inputs: SampleTree, targets: SampleTree
) -> SampleLoss:
    """The loss of one sample, a function of parameters and tensors without a batch dimension."""
    frozen = {n: p.detach() for n, p in model.named_parameters() if not p.requires_grad}
    scope = _Scope(model)

    def sample_loss(parameters: dict[str, Tensor], tensors: tuple[Tensor, ...]) -> Tensor:
        batch = [t.unsqueeze(0) for t in tensors]
        arguments = inputs.with_tensors(batch[: len(inputs.tensors)])
        target = targets.with_tensors(batch[len(inputs.tensors) :])
        kwargs = arguments if isinstance(arguments, dict) else {}
        args = tuple(arguments) if isinstance(arguments, (tuple, list)) else (arguments,)
        # Copies: this pass must not change buffers, such as a counter of calls.
        buffers = {n: b.detach().clone() for n, b in model.named_buffers()}

        def loss() -> Tensor:
            return _one_number(loss_fn(model(*(() if kwargs else args), **kwargs), target))

        own = {f"model.{n}": t for n, t in {**parameters, **frozen, **buffers}.items()}
        result: Tensor = functional_call(scope, own, (loss,))
        return result

    return sample_loss


class _Scope(nn.Module):
    """Replaces a model's parameters for the loss too, which may use them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Tensor]) -> Tensor:
        return function()


def _by_vmap(
    sample_loss: SampleLoss, parameters: dict[str, Tensor], tensors: list[Tensor]
) -> dict[str, Tensor]:
    """The gradients of any model that vmap supports."""
    # Copies: an embedding with max_norm changes its weight.
    copies = {n: p.detach().clone() for n, p in parameters.items()}
    function = vmap(grad_and_value(sample_loss), in_dims=(None, 0), randomness="error")
    # The graph of the losses holds no copies, only tensors kept by loss_fn and the model.
    with torch.enable_grad():
        gradients, losses = function(copies, tuple(tensors))
    _refuse_kept_references(losses, parameters)
    return {n: gradient.detach() for n, gradient in gradients.items()}


def _one_by_one(
    sample_loss: SampleLoss, parameters: dict[str, Tensor], tensors: list[Tensor]
) -> dict[str, Tensor]:
    """The gradients of any model, by one backward pass per sample."""
    own = {n: p.detach().clone().requires_grad_() for n, p in parameters.items()}
    samples = len(tensors[0])
    rows = {n: p.new_zeros(samples, *p.shape) for n, p in parameters.items()}
    for i in range(samples):
        with torch.enable_grad():
            loss = sample_loss(own, tuple(t[i] for t in tensors))
        _refuse_kept_references(loss, parameters)
        if not own or not loss.requires_grad:
            continue
        found = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
        for row, gradient in zip(rows.values(), found, strict=True):
            if gradient is not None:
                row[i] = gradient.to_dense() if gradient.is_sparse else gradient
    return rows


def _refuse_kept_references(losses: Tensor, parameters: dict[str, Tensor]) -> None:
    """Raises if the loss uses a parameter itself: only its replacement has gradients."""
    found = set() if losses.grad_fn is None else leaves(losses.grad_fn, {})
    for name, parameter in parameters.items():
        if parameter in found:
            raise ValueError(
                f"the loss depends on a reference to the parameter {name!r} that loss_fn or the "
                "model has kept, by which it has no gradient of a sample; read the parameter from "
                "its module whenever the loss is computed, as in model.weight"
            )


@contextmanager
def _kept_flat_weights(model: nn.Module) -> Iterator[None]:
    """Restores the weight lists of recurrent layers, which functional_call changes."""
    layers = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    kept = [(list(m._flat_weights), list(m._flat_weight_refs)) for m in layers]
    try:
        yield
    finally:
        for layer, (weights, references) in zip(layers, kept, strict=True):
            layer._flat_weights, layer._flat_weight_refs = weights, references


def _why_not_vmap(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            where = f"model.{name}" if name else "model"
            return f"vmap does not support {where} ({type(module).__name__})"
    return None


def _attention_for_vmap(device: torch.device) -> AbstractContextManager[None]:
    """On a CPU vmap batches one implementation of scaled_dot_product_attention and loops over others."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()


def _one_number(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn returned shape {tuple(loss.shape)} for one sample; it must return one "
            "number, e.g. with reduction='mean' or 'sum'"
        )
    return loss.reshape(())


def _check_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        reason = _why_not_per_sample(module)
        if reason:
            where = f"model.{name}" if name else "model"
            raise ValueError(f"{where} ({type(module).__name__}) {reason}")


def _why_not_per_sample(module: nn.Module) -> str | None:
    """Why the module's output for a sample is not a function of that sample alone; None: it is."""
    if isinstance(module, torch.jit.ScriptModule):
        return (
            "is scripted, and its parameters cannot be replaced; pass the module it was made from"
        )
    if mixes_samples(module):
        return (
            "normalises with the statistics of the batch, so a sample has no gradient of its own; "
            "call .eval() on it (with running statistics) or use GroupNorm"
        )
    if isinstance(module, _NormBase) and module.training and module.track_running_stats:
        return "changes its running statistics; call .eval() on it"
    if module.training and _dropout_probability(module) > 0:
        return "drops out at random; call model.eval() or set its probability to 0"
    if module.training and isinstance(module, nn.RReLU):
        return "draws random slopes; call model.eval()"
    return None


def _dropout_probability(module: nn.Module) -> float:
    if isinstance(module, _DropoutNd):
        return module.p
    # Recurrent layers and MultiheadAttention.
    dropout = getattr(module, "dropout", 0.0)
    return dropout if isinstance(dropout, float) else 0.0
