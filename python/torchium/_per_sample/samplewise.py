"""Models that compute each row of their output from the same row of their input.

Such a model may be called with the whole batch; any other runs under ``vmap``. What a module does
follows from its class and from the number of dimensions of its input, never from values. Therefore
only classes of ``torch.nn`` are known here, not subclasses of them, and modules with hooks are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as nn_module

# Whether row i of the output depends on row i of the input alone, for a number of dimensions.
Rule = Callable[[Any, int], bool]


def _has_dims(least: int) -> Rule:
    return lambda module, dims: dims >= least


def _leaves_out_rows(module: nn.Flatten, dims: int) -> bool:
    return module.start_dim >= 1


def _normalises_rows(module: nn.LayerNorm | nn.RMSNorm, dims: int) -> bool:
    return dims > len(module.normalized_shape)


_elementwise: tuple[type[nn.Module], ...] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Softplus, nn.Identity),
)
_RULES: dict[type[nn.Module], Rule] = {
    **dict.fromkeys(_elementwise, _has_dims(1)),
    nn.Dropout: lambda module, dims: not module.training,
    nn.Flatten: _leaves_out_rows,
    nn.Linear: _has_dims(2),
    nn.Embedding: lambda module, dims: module.max_norm is None,
    nn.LayerNorm: _normalises_rows,
    nn.RMSNorm: _normalises_rows,
    nn.GroupNorm: _has_dims(2),
}
for _dims, _layers in enumerate(
    [
        (nn.Conv1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
        (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
        (nn.Conv3d, nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
    ],
    start=3,
):
    # With a dimension less, the rows would be the channels of a single sample.
    _RULES |= dict.fromkeys(_layers, _has_dims(_dims))


def samplewise_layers(model: nn.Module) -> list[nn.Module] | None:
    """The layers that the model calls, each with the output of the one before.

    None if it is not a known layer or an ``nn.Sequential`` of them, or if a hook is called.
    """
    layers: list[nn.Module] = []
    if nn_module._has_any_global_hook() or not _collect(model, layers):
        return None
    return layers


def _collect(module: nn.Module, layers: list[nn.Module]) -> bool:
    if "forward" in module.__dict__ or _has_hooks(module) or _computes_parameters(module):
        return False
    if type(module) is nn.Sequential:
        return all(_collect(child, layers) for child in module._modules.values())
    layers.append(module)
    return type(module) in _RULES


def _computes_parameters(module: nn.Module) -> bool:
    """Whether weight or bias is a tensor that code of the model has computed, perhaps from others.

    Looks for no attribute, because those of parametrized layers are computed when they are read.
    """
    return "weight" in module.__dict__ or "bias" in module.__dict__


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def is_samplewise(module: nn.Module, input: Tensor) -> bool:
    """Whether a layer of :func:`samplewise_layers` does not mix the rows of this input."""
    return _RULES[type(module)](module, input.dim())


_LOSSES: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.CrossEntropyLoss: F.cross_entropy,
    nn.MSELoss: F.mse_loss,
    nn.BCEWithLogitsLoss: F.binary_cross_entropy_with_logits,
}


def summed_losses(loss_fn: Any, output: Tensor, target: Tensor) -> Tensor | None:
    """The sum of the losses of all samples; None if ``loss_fn`` is not a known loss of PyTorch."""
    reduction, options = "mean", {}
    function = loss_fn
    if type(loss_fn) in _LOSSES and _has_plain_options(loss_fn):
        function, reduction = _LOSSES[type(loss_fn)], loss_fn.reduction
        if isinstance(loss_fn, nn.CrossEntropyLoss):
            options = {"ignore_index": loss_fn.ignore_index}
    if reduction == "none" or not any(function is known for known in _LOSSES.values()):
        return None
    if function is F.cross_entropy:
        # The mean over the positions of a sample leaves out those to be ignored.
        if output.dim() != 2 or target.dim() != 1:
            return None
        total: Tensor = F.cross_entropy(output, target, reduction="sum", **options)
        return total
    if output.shape != target.shape or output.numel() == 0:
        return None
    total = function(output, target, reduction="sum")
    return total if reduction == "sum" else total * (len(output) / output.numel())


def _has_plain_options(loss_fn: Any) -> bool:
    """Whether a loss weights neither classes nor samples, and calls no hook."""
    return (
        "forward" not in loss_fn.__dict__
        and not _has_hooks(loss_fn)
        and all(buffer is None for buffer in loss_fn._buffers.values())
        and getattr(loss_fn, "label_smoothing", 0.0) == 0.0
    )
