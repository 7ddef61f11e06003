"""The loss of one sample as a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .._sharded import is_dtensor, is_flat_shard
from .sample_trees import SampleTree

LossFunction = Callable[[Any, Any], Tensor]


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that have gradients, by name as in ``named_parameters()``."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    cls = type(model)
    found: dict[str, Tensor] = {}
    if (
        cls.named_parameters is not nn.Module.named_parameters
        or cls.named_modules is not nn.Module.named_modules
    ):
        found.update((name, p) for name, p in model.named_parameters() if p.requires_grad)
    else:
        _collect_trainable(model, "", found, {id(model)})
    for name, p in found.items():
        if is_dtensor(p) or is_flat_shard(p):
            raise ValueError(
                f"the parameter {name!r} is sharded, and a rank has no gradients of samples for it; take a "
                "model with full tensors on each rank, as it is before fully_shard() or under "
                "DistributedDataParallel"
            )
    return found


def _collect_trainable(
    module: nn.Module, prefix: str, found: dict[str, Tensor], seen: set[int]
) -> None:
    """What ``named_parameters()`` finds, in a fraction of its time. ``seen``: ids of what has been met."""
    for name, p in module._parameters.items():
        if p is not None and p.requires_grad and id(p) not in seen:
            seen.add(id(p))
            found[prefix + name] = p
    for name, child in module._modules.items():
        if child is not None and id(child) not in seen:
            seen.add(id(child))
            _collect_trainable(child, f"{prefix}{name}.", found, seen)


class SampleLoss:
    """``loss_fn(model(inputs), targets)`` for one sample, which is passed as a batch of one."""

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[str, Tensor],
        loss_fn: LossFunction,
        inputs: SampleTree,
        targets: SampleTree,
    ) -> None:
        if not callable(loss_fn):
            raise ValueError(
                f"loss_fn is a {type(loss_fn).__name__}; it must be a function of output and target"
            )
        self.model = model
        self.parameters = parameters  # the trainable ones, by name
        self.loss_fn = loss_fn
        self.inputs = inputs
        self.targets = targets
        self.tensors = inputs.tensors + targets.tensors  # dimension 0 is the sample
        self.have_gradients = inputs.have_gradients + targets.have_gradients

    def __call__(self, parameters: Sequence[Tensor], sample: tuple[Tensor, ...]) -> Tensor:
        """The loss with other values of the trainable parameters; ``sample`` has no dimension 0."""
        batch = [t.unsqueeze(0) for t in sample]
        # Copies, which the model may change in place.
        inputs = [t.clone() for t in batch[: len(self.inputs.tensors)]]
        arguments = self.inputs.with_tensors(inputs)
        with _replaced(self.model, dict(zip(self.parameters.values(), parameters, strict=True))):
            if isinstance(arguments, dict):
                output = self.model(**arguments)
            elif isinstance(arguments, (tuple, list)):
                output = self.model(*arguments)
            else:
                output = self.model(arguments)
            return self._of_output(output, batch[len(self.inputs.tensors) :])

    def of_output(self, output: Tensor, target: tuple[Tensor, ...]) -> Tensor:
        """The loss of an output; neither has a dimension 0."""
        return self._of_output(output.unsqueeze(0), [t.unsqueeze(0) for t in target])

    def _of_output(self, output: Any, target: list[Tensor]) -> Tensor:
        loss = self.loss_fn(output, self.targets.with_tensors(target))
        if not isinstance(loss, Tensor):
            raise ValueError(f"loss_fn returned a {type(loss).__name__}; it must return a tensor")
        if loss.numel() != 1:
            raise ValueError(
                f"loss_fn returned shape {tuple(loss.shape)} for one sample; it must return one "
                "number, e.g. with reduction='mean' or 'sum'"
            )
        return loss.reshape(())


@contextmanager
def _replaced(model: nn.Module, parameters: dict[Tensor, Tensor]) -> Iterator[None]:
    """Replaces parameters everywhere, for the loss too, which may use them; buffers by copies.

    The pass must not change buffers, such as a counter of calls, nor frozen tables that lookups
    renormalise.
    """
    values = dict(parameters)
    kept: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                if param not in values:  # frozen
                    is_changed = getattr(module, "max_norm", None) is not None
                    values[param] = param.detach().clone() if is_changed else param.detach()
                kept.append((module._parameters, name, param))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if buffer not in values:
                    values[buffer] = buffer.detach().clone()
                kept.append((module._buffers, name, buffer))
    try:
        for tensors, name, tensor in kept:
            tensors[name] = values[tensor]
        yield
    finally:
        for tensors, name, tensor in kept:
            tensors[name] = tensor
