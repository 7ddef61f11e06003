"""Per-sample gradients."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from .._callers import users_stacklevel
from .._capture.layers import mixes_samples
from .._reentrant import refuse_reentrant_checkpoints
from .layers import LayerCalls, WriteRows, attention_for_vmap, layer_calls, leaves
from .random_numbers import DRAWN, NoRandomNumbers
from .sample_loss import LossFunction, SampleLoss, trainable
from .sample_trees import SampleTree, count_samples

# The gradients of samples [first, last): one tensor [last - first, *shape] per parameter.
Rows = Callable[[int, int], list[Tensor]]
T = TypeVar("T")

# Of these classes, not of subclasses, no module mixes samples, draws or resists vmap.
_HARMLESS = frozenset(
    {
        *(nn.Sequential, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.Flatten),
        *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
        *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Identity, nn.ModuleList),
    }
)

# Held while a model's parameters are replaced. One lock, because models may share layers.
one_call = threading.RLock()


def per_sample_gradients(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    *,
    max_workspace_bytes: int = 2**28,
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
        max_workspace_bytes: bounds what exists at a time beside the result, of at least one sample:
            patches of convolutions, and gradients by ``vmap`` if they do not all fit. Inputs and output
            gradients of the layers, for the whole batch, are not counted.

    Returns:
        name -> ``[batch, *parameter.shape]``, in the parameter's dtype, without a graph; names as
        in ``model.named_parameters()``.

    Raises:
        ValueError: batch sizes that differ or are zero; a loss of more than one number; a loss that
            uses a parameter (named) by a kept reference, such as ``weight = model.weight`` before
            the call; a reentrant checkpoint (``use_reentrant=False`` works); a module (named) whose
            output for a sample depends on other samples or on random numbers, or that updates running
            statistics; a sharded parameter (named), as of FSDP; ``max_workspace_bytes`` below 1.

    Three methods give the same rows:

    - One pass over the batch and one product per layer, if these own all trainable parameters:
      Linear, transformers' Conv1D, convolutions and transposed convolutions of any dimension,
      Embedding, LayerNorm, RMSNorm, GroupNorm, and layers of :func:`register_layer` (Goodfellow 2015,
      `arXiv:1510.01799 <https://arxiv.org/abs/1510.01799>`_). The forward pass of a single sample runs under
      ``torch.func.vmap``, which tracks the sample dimension wherever the model moves it. An
      ``nn.Sequential`` of common layers, without hooks, is called with the whole batch instead, which
      is fastest; so is ``cross_entropy``, ``mse_loss`` or ``binary_cross_entropy_with_logits``.
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
    check_workspace(max_workspace_bytes)
    with one_call:
        parameters = trainable(model)
        params = list(parameters.values())

        def from_rows(rows: Rows, samples: int) -> list[Tensor]:
            chunks = chunks_of(params, samples, max_workspace_bytes)
            if len(chunks) == 1:
                return rows(0, samples)
            result = [p.new_empty(samples, *p.shape, requires_grad=False) for p in params]
            for first, last in chunks:
                for whole, part in zip(result, rows(first, last), strict=True):
                    whole[first:last] = part
            return result

        def from_calls(calls: LayerCalls) -> list[Tensor]:
            operator = torch.ops.torchium.per_sample_gradients
            rows: list[Tensor] = calls.run(operator, max_workspace_bytes=max_workspace_bytes)
            for position in sorted(calls.early_rows):
                rows.insert(position, calls.early_rows[position])
            return rows

        rows: list[Tensor] = evaluate(
            "per_sample_gradients",
            model,
            parameters,
            loss_fn,
            inputs,
            targets,
            from_calls,
            from_rows,
            write_rows=from_calls,
        )
    return dict(zip(parameters, rows, strict=True))


def check_workspace(max_workspace_bytes: int) -> None:
    if not isinstance(max_workspace_bytes, int) or max_workspace_bytes < 1:
        raise ValueError(
            f"max_workspace_bytes is {max_workspace_bytes!r}; it must be a positive integer"
        )


def chunks_of(params: list[Tensor], samples: int, max_bytes: int) -> list[tuple[int, int]]:
    """The samples [first, last) whose gradients exist at a time."""
    of_sample = sum(p.nbytes for p in params)
    size = max(1, max_bytes // max(1, of_sample))
    return [(first, min(first + size, samples)) for first in range(0, samples, size)]


def evaluate(
    function: str,
    model: nn.Module,
    parameters: dict[str, Tensor],
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    from_calls: Callable[[LayerCalls], T],
    from_rows: Callable[[Rows, int], T],
    least: int = 1,
    write_rows: WriteRows | None = None,
) -> T:
    """A quantity of the per-sample gradients, as the public ``function`` returns it.

    ``one_call`` must be held since ``parameters``, the trainable ones, were read from the model.

    ``from_calls`` computes it from the layer calls. ``from_rows`` computes it from explicit
    gradients of as many samples at a time as it asks for, and gets the number of samples. It may
    be called again after an exception. ``least``: the smallest number of samples, 0 or 1; without any,
    ``from_rows`` must not ask for gradients. ``write_rows``: as for ``layer_calls()``.
    """
    input_tree = SampleTree("inputs", inputs, shared=(bool, str, type(None)))
    target_tree = SampleTree("targets", targets, shared=(type(None),))
    samples = count_samples(input_tree, target_tree, least)
    reason = _check_modules(model)
    loss = SampleLoss(model, parameters, loss_fn, input_tree, target_tree)
    calls: LayerCalls | None = None
    if samples == 0:
        return from_rows(_rows_of(_one_by_one, loss), 0)
    if reason is None:
        try:
            calls = layer_calls(loss, write_rows)
            if calls is None:
                return from_rows(_rows_of(_by_vmap, loss), samples)
        # Unsupported models raise many kinds of errors in vmap. An error of the model or the
        # loss itself is raised again below, in PyTorch's words.
        except Exception as error:
            if "called random operation" in str(error):  # and has drawn nothing
                raise ValueError(DRAWN) from error
            reason = f"vmap refuses it ({str(error).strip().splitlines()[0]})"
    if calls is not None:
        return from_calls(calls)
    with _kept_flat_weights(model), NoRandomNumbers():
        result = from_rows(_rows_of(_one_by_one, loss), samples)
    warnings.warn(
        f"{function} takes the samples one by one, which is slow for a batch: in "
        f"{type(model).__name__}, {reason}",
        stacklevel=users_stacklevel(),
    )
    return result


def _rows_of(method: Callable[[SampleLoss, list[Tensor]], list[Tensor]], loss: SampleLoss) -> Rows:
    def rows(first: int, last: int) -> list[Tensor]:
        return method(loss, [t[first:last] for t in loss.tensors])

    return rows


def _by_vmap(loss: SampleLoss, tensors: list[Tensor]) -> list[Tensor]:
    """The gradients of any model that vmap supports."""
    # Copies: an embedding with max_norm changes its weight.
    copies = tuple(p.detach().clone() for p in loss.parameters.values())
    function = vmap(grad_and_value(loss), in_dims=(None, 0), randomness="error")
    # The graph of the losses holds no copies, only tensors kept by loss_fn and the model.
    with torch.enable_grad(), attention_for_vmap(tensors[0].device):
        gradients, losses = function(copies, tuple(tensors))
    _refuse_kept_references(losses, loss.parameters)
    return [gradient.detach() for gradient in gradients]


def _one_by_one(loss: SampleLoss, tensors: list[Tensor]) -> list[Tensor]:
    """The gradients of any model, by one backward pass per sample."""
    params = loss.parameters
    own = [p.detach().clone().requires_grad_() for p in params.values()]
    samples = len(tensors[0])
    rows = [p.new_zeros(samples, *p.shape) for p in params.values()]
    for i in range(samples):
        with torch.enable_grad():
            sample = [t[i] for t in tensors]
            # A reentrant checkpoint has a node in the graph only if an input of it has gradients.
            for t, has_gradient in zip(sample, loss.have_gradients, strict=True):
                t.requires_grad_(has_gradient)
            value = loss(own, tuple(sample))
        _refuse_kept_references(value, params)
        refuse_reentrant_checkpoints("per-sample gradients", value)
        if not own or not value.requires_grad:
            continue
        found = torch.autograd.grad(value, own, allow_unused=True)
        for row, gradient in zip(rows, found, strict=True):
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


def _check_modules(model: nn.Module) -> str | None:
    """ValueError for a module that mixes samples or draws. Returns why vmap refuses the model."""
    why_not_vmap = None
    if _is_harmless(model):
        return None
    for name, module in model.named_modules():
        where = f"model.{name}" if name else "model"
        reason = _why_not_per_sample(module)
        if reason:
            raise ValueError(f"{where} ({type(module).__name__}) {reason}")
        if isinstance(module, nn.RNNBase) and why_not_vmap is None:
            why_not_vmap = f"vmap does not support {where} ({type(module).__name__})"
    return why_not_vmap


def _is_harmless(model: nn.Module) -> bool:
    """Whether all modules are, in a third of the time of ``model.modules()``."""
    waiting: list[nn.Module | None] = [model]
    seen = set(map(id, waiting))
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        if type(module) not in _HARMLESS:
            return False
        for child in module._modules.values():
            if id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return True


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
    dropout = module.__dict__.get("dropout", 0.0)
    return dropout if isinstance(dropout, float) else 0.0
