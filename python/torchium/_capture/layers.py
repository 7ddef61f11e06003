"""The layers whose per-sample gradients follow from their input and output gradient.

Kinds, settings and layouts must agree with ``src/gradients/capture/layer_call.h``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any
from weakref import WeakKeyDictionary

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

_SETTINGS = 8  # integers that describe a layer to the core


class LayerKind(IntEnum):
    """``torchium::gradients::detail::LayerKind``, and one that is ``LINEAR`` in the core."""

    LINEAR = 0
    CONV2D = 1
    EMBEDDING = 2
    LAYER_NORM = 3
    GROUP_NORM = 4
    TRANSPOSED_LINEAR = 5  # Conv1D of transformers: a linear layer with a weight [in, out]


@dataclass(eq=False, slots=True)
class LayerCall:
    """One call of a layer in a forward pass, with the gradient of its output.

    ``root`` is the whole backward pass, ``task`` the part of it that reached the call: they differ
    under reentrant checkpointing. ``reached`` names the parameters whose ``.grad`` has the
    contribution of this call.
    """

    module: nn.Module
    params: dict[str, Tensor]  # "weight" and "bias", where they are trained by the optimizer
    input: Tensor
    output_gradient: Tensor
    root: int
    task: int
    reached: set[str] = field(default_factory=set)
    input_version: int = field(init=False)

    def __post_init__(self) -> None:
        self.input_version = self._version()

    def has_changed(self) -> bool:
        """Whether the input was changed in place since the backward pass."""
        return self._version() != self.input_version

    def _version(self) -> int:
        return 0 if self.input.is_inference() else self.input._version


_CLASSES: dict[LayerKind, type[nn.Module]] = {
    LayerKind.LINEAR: nn.Linear,
    LayerKind.CONV2D: nn.Conv2d,
    LayerKind.EMBEDDING: nn.Embedding,
    LayerKind.LAYER_NORM: nn.LayerNorm,
    LayerKind.GROUP_NORM: nn.GroupNorm,
}

ALL_KINDS = frozenset(_CLASSES)
MATRIX_KINDS = frozenset({LayerKind.LINEAR, LayerKind.CONV2D, LayerKind.TRANSPOSED_LINEAR})


# Those that K-FAC preconditions, and the one that a weight of them may be tied to.
TIED_KINDS = MATRIX_KINDS | {LayerKind.EMBEDDING}


# Of the classes seen so far: models ask for every call of a layer.
_KNOWN: WeakKeyDictionary[type[nn.Module], tuple[LayerKind, type[nn.Module]] | None] = (
    WeakKeyDictionary()
)


def _known_class(cls: type[nn.Module]) -> tuple[LayerKind, type[nn.Module]] | None:
    """The kind of the layers of a class, and the class that it inherits that from."""
    if cls not in _KNOWN:
        _KNOWN[cls] = _find_known_class(cls)
    return _KNOWN[cls]


def _find_known_class(cls: type[nn.Module]) -> tuple[LayerKind, type[nn.Module]] | None:
    for kind, known in _CLASSES.items():
        if issubclass(cls, known):
            return kind, known
    for base in cls.__mro__:  # by name: transformers need not be installed
        if base.__qualname__ == "Conv1D" and base.__module__.startswith("transformers."):
            return LayerKind.TRANSPOSED_LINEAR, base
    return None


def has_known_class(module: nn.Module) -> bool:
    """Whether the module may be a layer whose calls are recorded."""
    return _known_class(type(module)) is not None


def layer_kind(module: nn.Module) -> LayerKind | None:
    """The kind of a layer whose forward is that of a known class; None: of no known kind."""
    found = _known_class(type(module))
    if found is None:
        return None
    kind, cls = found
    methods = ("forward", "_conv_forward") if kind is LayerKind.CONV2D else ("forward",)
    for name in methods:
        if name in module.__dict__ or getattr(type(module), name) is not getattr(cls, name):
            return None
    return kind


def has_transposed_weight(module: nn.Module) -> bool:
    """Whether the weight of the layer is [in, out]."""
    return layer_kind(module) is LayerKind.TRANSPOSED_LINEAR


def why_unsupported(module: nn.Module, kinds: frozenset[LayerKind] = ALL_KINDS) -> str | None:
    """Why the parameters of the module have no per-sample gradients; None: they have."""
    kind = layer_kind(module)
    if kind is None:
        if _known_class(type(module)) is not None:
            return "has a forward of its own"
        if may_mix_samples(module):
            return (
                "is of an unsupported type, and normalises with the statistics of the batch unless "
                ".eval() is called on it"
            )
        return "is of an unsupported type"
    if kind not in kinds:
        return "is of an unsupported type"
    if isinstance(module, nn.Embedding):
        options = {
            "sparse": module.sparse,
            "max_norm": module.max_norm,
            "scale_grad_by_freq": module.scale_grad_by_freq,
        }
        for name, value in options.items():
            if value not in (None, False):
                return f"has {name}={value}"
    return None


def computed_weight(module: nn.Module) -> str | None:
    """What computes the weight of a layer from other parameters; None: it is a parameter."""
    if isinstance(module, ParametrizationList):
        return ", ".join(type(step).__name__.lstrip("_") for step in module)
    parametrized = getattr(module, "parametrizations", {})
    if isinstance(parametrized, nn.ModuleDict) and "weight" in parametrized:
        return computed_weight(parametrized["weight"])
    if "weight" in module._parameters or not isinstance(getattr(module, "weight", None), Tensor):
        return None
    hooks = module._forward_pre_hooks.values()
    names = [type(hook).__name__ for hook in hooks if getattr(hook, "name", None) == "weight"]
    return names[0] if names else "code of the model"


def mixes_samples(module: nn.Module) -> bool:
    """Whether the module, as it is now, normalises with the statistics of a batch."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def may_mix_samples(module: nn.Module) -> bool:
    """Whether the module mixes samples in one of its modes."""
    return isinstance(module, _BatchNorm)


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The input of a layer's call; all layers name the argument ``input``."""
    value: Tensor = args[0] if args else kwargs["input"]
    return value


def computed_output(output: Tensor) -> Tensor:
    """The tensor that the layer has computed, of which the output may be a view in another shape.

    An in-place change removes the view from the graph, but not its base.
    """
    base = output._base
    return output if base is None or base.numel() != output.numel() else base


def is_single(module: nn.Module, input: Tensor) -> bool:
    """Whether the input is one sample without a sample dimension."""
    if layer_kind(module) in (LayerKind.LINEAR, LayerKind.TRANSPOSED_LINEAR):
        return input.dim() == 1
    if isinstance(module, nn.Conv2d):
        return input.dim() == 3
    if isinstance(module, nn.Embedding):
        return input.dim() == 0
    return isinstance(module, nn.LayerNorm) and input.dim() == len(module.normalized_shape)


def core_tensors(
    module: nn.Module, input: Tensor, output_gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Input and output gradient as the core takes them: padded, with the sample in dimension 0."""
    input = padded(module, input)
    if is_single(module, input):
        return input.unsqueeze(0), output_gradient.unsqueeze(0)
    return input, output_gradient


def convolution_padding(module: _ConvNd) -> list[int]:
    """What a convolution adds to its input, as for ``F.pad``: the last dimension first.

    For zeros from the attributes that its forward pass reads, which may have been set since.
    """
    if module.padding_mode != "zeros":
        return list(module._reversed_padding_repeated_twice)
    sides: list[int] = []
    for i in reversed(range(len(module.kernel_size))):
        if module.padding == "same":
            total = module.dilation[i] * (module.kernel_size[i] - 1)
            sides += [total // 2, total - total // 2]
        elif module.padding == "valid":
            sides += [0, 0]
        else:
            zeros: Any = module.padding
            sides += [zeros if isinstance(zeros, int) else zeros[i]] * 2
    return sides


def _needs_padded_input(module: nn.Conv2d) -> bool:
    left, right, top, bottom = convolution_padding(module)
    return module.padding_mode != "zeros" or left != right or top != bottom


def padded(module: nn.Module, input: Tensor) -> Tensor:
    """The input with padding that the core does not support: other modes, uneven sides."""
    if not isinstance(module, nn.Conv2d) or not _needs_padded_input(module):
        return input
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(input, convolution_padding(module), mode=mode)


def _padding(module: nn.Conv2d) -> tuple[int, int]:
    """Zeros on each side of what :func:`padded` returns."""
    if _needs_padded_input(module):
        return 0, 0
    left, _, top, _ = convolution_padding(module)
    return top, left


def call_row(
    module: nn.Module, weight: int, bias: int, micro_batch: int
) -> tuple[list[int], float]:
    """A call as the core takes it, and the eps of a norm.

    ``weight`` and ``bias`` are positions in the parameters, -1 for none.
    """
    kind, eps, settings = layer_kind(module), 0.0, list[int]()
    assert kind is not None
    if kind is LayerKind.TRANSPOSED_LINEAR:
        kind, settings = LayerKind.LINEAR, [1]
    if isinstance(module, nn.Conv2d):
        settings = [*module.stride, *_padding(module), *module.dilation, module.groups]
    elif isinstance(module, nn.Embedding):
        settings = [-1 if module.padding_idx is None else module.padding_idx]
    elif isinstance(module, nn.LayerNorm):
        settings, eps = [len(module.normalized_shape)], module.eps
    elif isinstance(module, nn.GroupNorm):
        settings, eps = [module.num_groups], module.eps
    settings += [0] * (_SETTINGS - len(settings))
    return [int(kind), weight, bias, micro_batch, *settings], eps
