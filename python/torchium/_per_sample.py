"""Gradients of the loss of each sample of a batch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_map

from ._layers import mixes_samples
from ._per_sample_layers import layer_gradients

LossFunction = Callable[[Tensor, Tensor], Tensor]


def per_sample_gradients(
    model: nn.Module, loss_fn: LossFunction, inputs: Tensor, targets: Tensor
) -> dict[str, Tensor]:
    """Return the gradient of the loss of every single sample, for every trainable parameter.

    Row i of an entry is the gradient of ``loss_fn(model(inputs[i:i+1]), targets[i:i+1])``: each
    sample is passed as a batch of one, so that the mean of the rows is the gradient of a mean loss.
    Pure: no ``.grad``, parameter, buffer or random state changes. Works under ``torch.no_grad()``.

    Args:
        model: any module that treats samples apart; frozen parameters are left out.
        loss_fn: ``loss_fn(output, target)`` -> one number.
        inputs: ``[batch, ...]``.
        targets: ``[batch, ...]``.

    Returns:
        name -> ``[batch, *parameter.shape]``, in the parameter's dtype; names as in
        ``model.named_parameters()``.

    Raises:
        ValueError: batch sizes that differ or are zero; a loss of more than one number; a module
            (named) whose output for a sample depends on other samples, on random numbers or on
            statistics that it changes.

    One pass over the batch and one product a layer, where Linear, Conv2d, Embedding, LayerNorm and
    GroupNorm layers have all trainable parameters and dimension 0 of what they receive is the sample
    (Goodfellow 2015, `arXiv:1510.01799 <https://arxiv.org/abs/1510.01799>`_). For other models
    ``vmap(grad)`` of the pass of a single sample, which is slower.

    Example:
        >>> model = torch.nn.Linear(10, 2)
        >>> inputs, targets = torch.randn(8, 10), torch.randint(2, (8,))
        >>> loss_fn = torch.nn.CrossEntropyLoss()
        >>> gradients = torchium.per_sample_gradients(model, loss_fn, inputs, targets)
        >>> gradients["weight"].shape
        torch.Size([8, 2, 10])
    """
    _check_batch(inputs, targets)
    _check_modules(model)
    parameters: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    inputs, targets = inputs.detach(), targets.detach()

    def sample_loss(output: Any, target: Tensor) -> Tensor:
        loss = loss_fn(tree_map(lambda t: t.unsqueeze(0), output), target.unsqueeze(0))
        return _one_number(loss)

    with _without_random_numbers(inputs.device):
        gradients = layer_gradients(model, sample_loss, parameters, inputs, targets)
        if gradients is None:
            gradients = _by_vmap(model, loss_fn, parameters, inputs, targets)
    return gradients


def _by_vmap(
    model: nn.Module,
    loss_fn: LossFunction,
    parameters: dict[str, Tensor],
    inputs: Tensor,
    targets: Tensor,
) -> dict[str, Tensor]:
    """The gradients by torch.func, for any model."""
    frozen = {n: p.detach() for n, p in model.named_parameters() if n not in parameters}

    def sample_loss(params: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
        # Copies: a module that counts its calls in a buffer must not count this one.
        buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
        output = functional_call(model, {**params, **frozen, **buffers}, (sample.unsqueeze(0),))
        return _one_number(loss_fn(output, target.unsqueeze(0)))

    gradients = vmap(grad(sample_loss), in_dims=(None, 0, 0), randomness="error")
    detached = {n: p.detach() for n, p in parameters.items()}
    result: dict[str, Tensor] = gradients(detached, inputs, targets)
    return result


def _one_number(loss: Tensor) -> Tensor:
    if loss.numel() != 1:
        raise ValueError(
            f"loss_fn returned shape {tuple(loss.shape)} for one sample; it must return one "
            "number, e.g. with reduction='mean' or 'sum'"
        )
    return loss.reshape(())


@contextmanager
def _without_random_numbers(device: torch.device) -> Iterator[None]:
    """Refuses a body that draws random numbers, and leaves their state as it was."""
    before = _random_states(device)
    drawn: Exception | None = None
    try:
        yield
    except RuntimeError as error:
        if "random" not in str(error):
            raise
        drawn = error
    finally:
        after = _random_states(device)
        changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
        if changed:
            torch.set_rng_state(before[0])
            if device.type == "cuda":
                torch.cuda.set_rng_state(before[1], device)
    if drawn is not None or changed:
        raise ValueError(
            "the model or loss_fn draws random numbers, so the gradient of a sample is not defined; "
            "call model.eval() or set the dropout probabilities to 0"
        ) from drawn


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _check_batch(inputs: Tensor, targets: Tensor) -> None:
    for name, value in (("inputs", inputs), ("targets", targets)):
        if not isinstance(value, Tensor) or value.dim() == 0:
            raise ValueError(f"{name} must be a tensor with a batch dimension, not {value!r}")
    if inputs.shape[0] != targets.shape[0] or inputs.shape[0] == 0:
        raise ValueError(
            f"inputs hold {inputs.shape[0]} samples and targets {targets.shape[0]}; there must be "
            "equally many, at least one"
        )


def _check_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        reason = _why_not_per_sample(module)
        if reason:
            where = f"model.{name}" if name else "model"
            raise ValueError(f"{where} ({type(module).__name__}) {reason}")


def _why_not_per_sample(module: nn.Module) -> str | None:
    """What keeps the module's output for a sample from being a function of that sample alone."""
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
