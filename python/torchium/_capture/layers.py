"""The layers whose per-sample gradients follow from their input and output gradient.

Kinds, settings and layouts must agree with ``src/gradients/capture/layer_call.h``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from .norms import may_be_norm, norm_eps, norm_formula

_SETTINGS = 12  # integers that describe a layer to the core


class LayerKind(IntEnum):
    """``torchium::gradients::detail::LayerKind``, and those that are another in the core."""

    LINEAR = 0
    CONV2D = 1
    EMBEDDING = 2
    LAYER_NORM = 3
    GROUP_NORM = 4
    CONV3D = 5
    RMS_NORM = 6
    BATCH_NORM = 7  # recorded for K-FAC alone
    TRANSPOSED_LINEAR = 8  # Conv1D of transformers: a linear layer with a weight [in, out]
    CONV1D = 9  # a conv2d of height 1
    TRANSPOSED_CONV = 10  # of 1, 2 or 3 dimensions: a convolution with another setting
    SELF_ATTENTION = 11  # its projection of queries, keys and values, a linear layer


@dataclass(eq=False, slots=True)
class LayerCall:
    """One call of a layer in a forward pass, with the gradient of its output."""

    module: nn.Module
    params: dict[str, Tensor]  # "weight" and "bias", where ``.grad`` has what this call contributes
    input: Tensor
    output_gradient: Tensor
    has_changed: bool  # whether the input was changed in place since the backward pass


_CLASSES: dict[type[nn.Module], LayerKind] = {
    nn.Linear: LayerKind.LINEAR,
    nn.Conv1d: LayerKind.CONV1D,
    nn.Conv2d: LayerKind.CONV2D,
    nn.Conv3d: LayerKind.CONV3D,
    nn.ConvTranspose1d: LayerKind.TRANSPOSED_CONV,
    nn.ConvTranspose2d: LayerKind.TRANSPOSED_CONV,
    nn.ConvTranspose3d: LayerKind.TRANSPOSED_CONV,
    nn.Embedding: LayerKind.EMBEDDING,
    nn.LayerNorm: LayerKind.LAYER_NORM,
    nn.RMSNorm: LayerKind.RMS_NORM,
    nn.GroupNorm: LayerKind.GROUP_NORM,
    nn.BatchNorm1d: LayerKind.BATCH_NORM,
    nn.BatchNorm2d: LayerKind.BATCH_NORM,
    nn.BatchNorm3d: LayerKind.BATCH_NORM,
    nn.MultiheadAttention: LayerKind.SELF_ATTENTION,
}

# Those whose samples have gradients of their own, from calls of modules.
SAMPLE_KINDS = frozenset(LayerKind) - {LayerKind.BATCH_NORM, LayerKind.SELF_ATTENTION}
NORM_KINDS = frozenset(
    {
        LayerKind.LAYER_NORM,
        LayerKind.RMS_NORM,
        LayerKind.GROUP_NORM,
        LayerKind.BATCH_NORM,
    }
)
# Those that K-FAC preconditions.
FACTOR_KINDS = frozenset(LayerKind)


_NORM_FORMULAS = {"rms_norm": LayerKind.RMS_NORM, "layer_norm": LayerKind.LAYER_NORM}

# Of the classes seen so far: models ask for every call of a layer.
_KNOWN: WeakKeyDictionary[type[nn.Module], tuple[LayerKind, type[nn.Module]] | None] = (
    WeakKeyDictionary()
)


def _known_class(cls: type[nn.Module]) -> tuple[LayerKind, type[nn.Module]] | None:
    """The kind of the layers of a class, and the class that it inherits that from."""
    kind = _CLASSES.get(cls)
    if kind is not None:
        return kind, cls
    if cls not in _KNOWN:
        _KNOWN[cls] = _find_known_class(cls)
    return _KNOWN[cls]


def _find_known_class(cls: type[nn.Module]) -> tuple[LayerKind, type[nn.Module]] | None:
    for known, kind in _CLASSES.items():
        if issubclass(cls, known):
            return kind, known
    for base in cls.__mro__:  # by name: transformers need not be installed
        if base.__qualname__ == "Conv1D" and base.__module__.startswith("transformers."):
            return LayerKind.TRANSPOSED_LINEAR, base
    return None


def has_known_class(module: nn.Module) -> bool:
    """Whether the module has a class of known layers, perhaps with another forward."""
    return _known_class(type(module)) is not None


def may_be_layer(module: nn.Module) -> bool:
    """Whether calls of the module may be recorded."""
    return has_known_class(module) or may_be_norm(module)


def layer_kind(module: nn.Module) -> LayerKind | None:
    """The kind of a layer that computes what a known class does; None: of no known kind."""
    kind = _inherited_kind(module)
    if kind is not None:
        return kind
    formula = norm_formula(module)
    return None if formula is None else _NORM_FORMULAS[formula.name]


def is_compiled_by_jit(module: nn.Module) -> bool:
    """Whether the module comes from ``torch.jit``: its layers run no hooks."""
    return isinstance(module, torch.jit.ScriptModule)


def layer_params(module: nn.Module) -> tuple[nn.Parameter | None, nn.Parameter | None]:
    """The weight and the bias of a layer."""
    own = module._parameters
    if isinstance(module, nn.MultiheadAttention):
        return own.get("in_proj_weight"), own.get("in_proj_bias")
    if is_compiled_by_jit(module):
        return None, None
    return own.get("weight"), own.get("bias")


def moves_channels(module: nn.Module) -> bool:
    """Whether the layer is a norm of dimension 1, which is the last one in the core."""
    formula = norm_formula(module) if _inherited_kind(module) is None else None
    return formula is not None and formula.of_channels


def _inherited_kind(module: nn.Module) -> LayerKind | None:
    """The kind of a layer whose forward is that of a known class."""
    found = _known_class(type(module))
    if found is None or not _has_forward_of(module, found[1]):
        return None
    if isinstance(module, nn.MultiheadAttention) and not module._qkv_same_embed_dim:
        return None  # three weights
    return found[0]


def _has_forward_of(module: nn.Module, cls: type[nn.Module]) -> bool:
    own = module.__dict__
    if "forward" in own or "_conv_forward" in own:
        return False
    return type(module) is cls or all(
        getattr(type(module), name, None) is getattr(cls, name, None)
        for name in ("forward", "_conv_forward")
    )


def has_transposed_weight(module: nn.Module) -> bool:
    """Whether the weight of the layer is [in, out]."""
    return layer_kind(module) is LayerKind.TRANSPOSED_LINEAR


def is_transposed_convolution(module: nn.Module) -> bool:
    return layer_kind(module) is LayerKind.TRANSPOSED_CONV


def why_unsupported(module: nn.Module, kinds: frozenset[LayerKind] = SAMPLE_KINDS) -> str | None:
    """Why the parameters of the module have no per-sample gradients; None: they have."""
    if is_compiled_by_jit(module):
        return "is compiled by torch.jit and runs no hooks"
    kind = layer_kind(module)
    if isinstance(module, nn.MultiheadAttention) and not module._qkv_same_embed_dim:
        return "has kdim or vdim"
    if kind is None and has_known_class(module):
        return "has a forward of its own"
    if kind not in kinds:
        if may_mix_samples(module):
            return "is of an unsupported type, and in training normalises with the statistics of the batch"
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
    """The mechanism that computes the weight of a layer from other parameters; None: a parameter."""
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


def used_statistics(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """The running statistics that a batch norm, as it is now, normalises with; else None."""
    if not isinstance(module, _BatchNorm) or mixes_samples(module):
        return None, None
    return module.running_mean, module.running_var


def computed_output(output: Tensor) -> Tensor:
    """The tensor that the layer has computed, of which the output may be a view in another shape.

    An in-place change removes the view from the graph, but not its base.
    """
    base = output._base
    if base is None or base.numel() != output.numel() or not _has_order_of(output, base):
        return output
    return base


def _has_order_of(view: Tensor, base: Tensor) -> bool:
    """Whether both have their elements in one order, so that ``reshape`` takes one to the other."""
    dims = [
        [
            (size, stride)
            for size, stride in zip(each.shape, each.stride(), strict=True)
            if size != 1
        ]
        for each in (view, base)
    ]
    return (view.is_contiguous() and base.is_contiguous()) or dims[0] == dims[1]


def is_single(module: nn.Module, input: Tensor) -> bool:
    """Whether the input is one sample without a sample dimension."""
    if isinstance(module, _ConvNd):
        return input.dim() == len(module.kernel_size) + 1
    kind = layer_kind(module)
    if kind in (LayerKind.LINEAR, LayerKind.TRANSPOSED_LINEAR):
        return input.dim() == 1
    if moves_channels(module):
        return False
    if isinstance(module, nn.Embedding):
        return input.dim() == 0
    if kind in (LayerKind.LAYER_NORM, LayerKind.RMS_NORM):
        return input.dim() == _normalised_dims(module)
    return False


def _normalised_dims(module: nn.Module) -> int:
    """Of a LayerNorm or RMSNorm; those of other classes normalise one dimension."""
    return len(module.normalized_shape) if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) else 1


def core_tensors(
    module: nn.Module, input: Tensor, output_gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Input and output gradient as the core takes them: padded, of height 1, the sample first."""
    if moves_channels(module):
        return input.movedim(1, -1), output_gradient.movedim(1, -1)
    single = is_single(module, input)
    input = padded(module, input)
    if is_1d(module):
        input, output_gradient = input.unsqueeze(-2), output_gradient.unsqueeze(-2)
    if single:
        input, output_gradient = input.unsqueeze(0), output_gradient.unsqueeze(0)
    return input, output_gradient


def is_1d(module: nn.Module) -> bool:
    """Whether the layer is a convolution that is one of height 1 in the core."""
    return isinstance(module, _ConvNd) and len(module.kernel_size) == 1


def convolution_padding(module: _ConvNd) -> list[int]:
    """The padding of a convolution, as for ``F.pad``: the last dimension first.

    For zeros from the attributes that its forward pass reads, which may have been set since.
    """
    if module.padding_mode != "zeros":
        return list(module._reversed_padding_repeated_twice)
    zeros: Any = 0 if module.padding == "valid" else module.padding
    if zeros == "same":
        sides: list[int] = []
        dilations = _of_each_dim(module, module.dilation)
        for dilation, size in zip(reversed(dilations), reversed(module.kernel_size), strict=True):
            total = dilation * (size - 1)
            sides += [total // 2, total - total // 2]
        return sides
    each = _of_each_dim(module, zeros)
    return [side for of_dim in reversed(each) for side in (of_dim, of_dim)]


def _of_each_dim(module: _ConvNd, value: Any) -> list[int]:
    """As PyTorch's operators take it: one number stands for all dimensions."""
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * len(module.kernel_size) if len(sizes) == 1 else sizes


def input_padding(module: nn.Module) -> tuple[list[int], str]:
    """The padding that the core does not add (other modes, more zeros behind), and its mode, for ``F.pad``."""
    if not isinstance(module, _ConvNd):
        return [], "constant"
    if module.padding_mode != "zeros":
        return convolution_padding(module), module.padding_mode
    if module.padding != "same":
        return [], "constant"
    sides = convolution_padding(module)
    pairs = zip(sides[::2], sides[1::2], strict=True)
    more = [zeros for before, behind in pairs for zeros in (0, behind - before)]
    return more if any(more) else [], "constant"


def padded(module: nn.Module, input: Tensor) -> Tensor:
    """The input with the padding that the core does not add itself."""
    padding, mode = input_padding(module)
    return F.pad(input, padding, mode=mode) if padding else input


def _convolution_settings(module: _ConvNd) -> list[int]:
    """Those of ``ConvolutionSettings`` of the core."""
    zeros = [0] * len(module.kernel_size)
    if module.padding_mode == "zeros":
        zeros = convolution_padding(module)[-2::-2]
    stride, dilation = (_of_each_dim(module, x) for x in (module.stride, module.dilation))
    others = [module.groups, int(module.transposed)]
    if is_1d(module):
        return [1, *stride, 0, *zeros, 1, *dilation, *others]
    return [*stride, *zeros, *dilation, *others]


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
    if kind is LayerKind.SELF_ATTENTION:
        kind = LayerKind.LINEAR
    if isinstance(module, _ConvNd):
        kind = LayerKind.CONV3D if len(module.kernel_size) == 3 else LayerKind.CONV2D
        settings = _convolution_settings(module)
    elif isinstance(module, nn.Embedding):
        settings = [-1 if module.padding_idx is None else module.padding_idx]
    elif kind in (LayerKind.LAYER_NORM, LayerKind.RMS_NORM):
        is_known = isinstance(module, (nn.LayerNorm, nn.RMSNorm))
        own_eps: Any = module.eps if is_known else norm_eps(module)
        settings, eps = [_normalised_dims(module)], -1.0 if own_eps is None else own_eps
    elif isinstance(module, nn.GroupNorm):
        settings, eps = [module.num_groups], module.eps
    elif isinstance(module, _BatchNorm):
        eps = module.eps
    return core_row(kind, weight, bias, micro_batch, settings), eps


def core_row(
    kind: LayerKind, weight: int, bias: int, micro_batch: int, settings: list[int]
) -> list[int]:
    """The integers of a call in the core."""
    return [int(kind), weight, bias, micro_batch, *settings, *[0] * (_SETTINGS - len(settings))]
