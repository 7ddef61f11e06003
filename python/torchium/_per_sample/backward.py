"""Per-sample gradients from ordinary backward passes."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from .._capture.attention import is_attention
from .._capture.capture import CallCapture, check_inputs
from .._capture.compiled import run_uncompiled
from .._capture.layers import (
    SAMPLE_KINDS,
    LayerCall,
    LayerKind,
    computed_weight,
    is_single,
    mixes_samples,
    why_unsupported,
)
from .formulas import formula_of
from .layers import LayerCall as CoreCall
from .layers import LayerCalls
from .sample_loss import trainable

_KINDS = SAMPLE_KINDS | {LayerKind.SELF_ATTENTION}
_MOST_PARAMETERS = 2  # of a call in the core


class _Capture(CallCapture):
    """Takes registered layers too, whose parameters have names of their own."""

    def calls(self) -> list[list[LayerCall]]:
        passes = super().calls()
        for call in itertools.chain(*passes):
            if formula_of(call.module) is not None:
                recorded = set(call.params.values())
                own = call.module._parameters.items()
                call.params = {name: p for name, p in own if p is not None and p in recorded}
        return passes

    def _description(self, module: nn.Module) -> tuple[Any, ...]:
        given = super()._description(module)
        if formula_of(module) is None:
            return given
        own = [p for p in module._parameters.values() if p is not None]
        first, second, *_ = (*own, None, None)
        return *given[:-4], first, second, *given[-2:]

    def _why_unsupported(self, module: nn.Module) -> str | None:
        return _why_unknown(module)


def _why_unknown(module: nn.Module) -> str | None:
    """Why a block cannot take a layer."""
    if formula_of(module) is None:
        own = module._parameters
        if is_attention(module) and any(
            p is not None and p.requires_grad for p in (own.get("bias_k"), own.get("bias_v"))
        ):
            return "has bias_k and bias_v, which belong to no linear layer"
        return why_unsupported(module, _KINDS)
    registered = {n: p for n, p in module._parameters.items() if p is not None}
    scalars = [n for n, p in registered.items() if not p.dim()]
    if len(registered) > _MOST_PARAMETERS:
        return (
            f"has {len(registered)} parameters, and a block takes at most two of a registered layer; "
            "split it into layers of at most two"
        )
    if scalars:
        return (
            f"has a parameter {scalars[0]!r} without dimensions; give it the shape [1], and its rows "
            "in the formula [samples, 1]"
        )
    return None


class per_sample:
    """Adds ``p.grad_sample`` to the trainable parameters, from the backward passes of a block.

    ::

        with torchium.per_sample(model):
            loss = loss_fn(model(inputs), targets)
            loss.backward()
        norms = torch.stack(
            [p.grad_sample.flatten(1).norm(dim=1) for p in model.parameters()]
        ).norm(dim=0)

    Row i of ``p.grad_sample`` is the gradient of sample i's loss. Forward and backward passes are
    those of the program: any inputs, any loss, dropout, autocast. ``.grad`` is written as always.
    ``grad_sample`` is removed when the block begins, and set when it ends without an exception.
    Several backward passes in one block are more samples, in the order of the passes, unless they
    reach the same call, as with ``retain_graph=True``: then their gradients are added.
    ``zero_grad()`` discards those before it.

    Dimension 0 of the input of every layer must be the sample, dimension 1 in the attention and
    transformer layers of ``torch.nn`` without ``batch_first``. :func:`per_sample_gradients` needs no
    such agreement, and checks it; here only the sizes are compared. A model that has time in
    dimension 0, sorts its samples, or mixes them other than by batch normalisation gets wrong rows
    without an error. Calls of a layer in one backward pass are positions of the same samples: a
    batch that goes through the model in parts needs a backward pass for each part.

    Args:
        model: the layers of the first of the methods of :func:`per_sample_gradients`, and
            ``nn.MultiheadAttention`` of equal queries, keys and values, must own all trainable
            parameters.
        reduction: ``"mean"`` if the loss is the mean over the samples of a backward pass, ``"sum"`` if
            it is the sum.

    Raises:
        ValueError: at the beginning, a layer (named) that is not supported, or normalises with the
            statistics of the batch; no trainable parameter, or a sharded one (named); another
            ``reduction``. At the end, no backward pass, a parameter (named) that was also used
            outside of its layer, a normalisation with batch statistics, or layers with different
            numbers of samples.
    """

    def __init__(self, model: nn.Module, *, reduction: str = "mean") -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
        self._model = model
        self._is_mean = reduction == "mean"
        self._capture: CallCapture | None = None
        self._watched: set[Tensor] = set()
        self._uncompiled: AbstractContextManager[object] = nullcontext()

    @_disable_dynamo
    def __enter__(self) -> per_sample:
        if self._capture is not None:
            raise ValueError("this per_sample block is running already; make another one")
        params = trainable(self._model)
        if not params:
            raise ValueError(f"no parameter of {type(self._model).__name__} requires a gradient")
        for name, module in self._model.named_modules():
            self._check(name, module)
        self._capture = _Capture(_KINDS, self._wants)
        self._capture.watch(params.values())
        for name, module in self._model.named_modules():
            self._capture.adopt(module, name)
        self._capture.settle()
        for param in self._model.parameters():  # so that old and new rows do not exist at a time
            if hasattr(param, "grad_sample"):
                del param.grad_sample
        self._watched = set(params.values())
        self._uncompiled = run_uncompiled()  # compiled code does not look for hooks of this block
        self._uncompiled.__enter__()
        return self

    @_disable_dynamo
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        capture, self._capture = self._capture, None  # without an owner it removes its hooks
        watched, self._watched = self._watched, set()
        self._uncompiled.__exit__(kind, error, traceback)
        if kind is None and capture is not None:
            self._set_rows(capture, watched)

    def _wants(self) -> bool:
        return True

    def _check(self, name: str, module: nn.Module) -> None:
        where = f"model.{name}" if name else "model"
        if mixes_samples(module):
            raise ValueError(
                f"{where} ({type(module).__name__}) normalises with the statistics of the batch, so "
                "a sample has no gradient of its own; call .eval() on it (with running statistics) "
                "or use GroupNorm"
            )
        own = [p for p in module._parameters.values() if p is not None and p.requires_grad]
        how = computed_weight(module)
        computed = None if how is None else f"has a weight computed by {how}"
        reason = computed or _why_unknown(module)
        if own and reason is not None and computed is None and formula_of(module) is not None:
            raise ValueError(
                f"{where} ({type(module).__name__}) {reason}, freeze all of its parameters "
                "(requires_grad_(False)), or call per_sample_gradients(), which takes all layers"
            )
        bare = [repr(n) for n, p in module._parameters.items() if p is not None and p.requires_grad]
        # A class of the user can be split.
        can_move = next(module.children(), None) and not isinstance(module, nn.MultiheadAttention)
        if own and reason is not None and computed is None and can_move:
            raise ValueError(
                f"{where} ({type(module).__name__}) has the parameter{'s' * (len(bare) > 1)} "
                f"{', '.join(bare)} beside its layers, "
                "and only the calls of layers are recorded; move it to a module without children and give "
                "its class a formula with register_layer(), freeze it (requires_grad_(False)), or call "
                "per_sample_gradients(), which takes all models"
            )
        if own and reason is not None:
            raise ValueError(
                f"{where} ({type(module).__name__}) {reason}; freeze its parameters "
                "(requires_grad_(False)), call per_sample_gradients(), which takes all layers, or give a "
                "class of your own a formula with register_layer()"
            )

    def _set_rows(self, capture: CallCapture, watched: set[Tensor]) -> None:
        params = trainable(self._model)
        for name, param in params.items():
            if param not in watched:
                raise ValueError(
                    f"the parameter {name!r} has become trainable inside the per_sample block; "
                    "begin the block after that"
                )
        passes = capture.calls()
        if not passes:
            raise ValueError(
                "no backward pass of a batch that is not empty has reached a parameter; run the "
                "forward and the backward pass inside the per_sample block"
            )
        check_inputs(passes, "the per_sample block has ended")
        for calls in passes:
            self._check_lookups(calls)
        mixing = capture.mixing()
        if mixing is not None:
            what = mixing if isinstance(mixing, str) else type(mixing).__name__
            raise ValueError(
                f"{what} normalised with the statistics of the batch, so a sample has no gradient "
                "of its own; call it with training=False and running statistics"
            )
        used_outside = capture.used_outside
        for name, param in params.items():
            if param in used_outside:
                raise ValueError(
                    f"the loss depends on the parameter {name!r} outside of its layer, or in a call of "
                    "it with other inputs than one tensor; call per_sample_gradients()"
                )
        rows = [self._rows(list(params.values()), calls) for calls in passes]
        for param, of_passes in zip(params.values(), zip(*rows, strict=True), strict=True):
            param.grad_sample = (  # type: ignore[attr-defined]
                of_passes[0] if len(of_passes) == 1 else torch.cat(of_passes)
            )

    def _check_lookups(self, calls: list[LayerCall]) -> None:
        """Refuses indices [T] together with [samples, T] for T samples: they may be positions."""
        inputs = [call.input for call in calls if isinstance(call.module, nn.Embedding)]
        for single in (x for x in inputs if x.dim() == 1):
            for tokens in (x for x in inputs if x.dim() > 1 and x.shape[1] == len(single)):
                raise ValueError(
                    f"an embedding has looked up {len(single)} indices, which may be samples or "
                    f"positions: another one has seen {list(tokens.shape)}; expand positions to that "
                    "shape"
                )

    def _check_counts(self, first_with: dict[int, nn.Module]) -> None:
        if len(first_with) == 1:
            return
        names = {
            module: f"model.{name}" if name else "model"
            for name, module in self._model.named_modules()
        }
        few, many = min(first_with), max(first_with)
        layers = [
            f"{names.get(m, 'a layer')} ({type(m).__name__})"
            for m in (first_with[few], first_with[many])
        ]
        raise ValueError(
            f"{layers[0]} has seen {few} samples and {layers[1]} {many} in one backward pass; dimension "
            "0 of the input of every layer must be the sample. Expand what all samples share: "
            f"positions, for example, to [{many}, ...]"
        )

    def _rows(self, params: list[Tensor], calls: list[LayerCall]) -> list[Tensor]:
        """The gradients of the samples of one backward pass."""
        positions = {p: i for i, p in enumerate(params)}
        arguments = LayerCalls(params)
        first_with: dict[int, nn.Module] = {}  # this number of samples
        for call in calls:
            own = {n: positions[p] for n, p in call.params.items() if p in positions}  # not frozen
            input, output_gradient = call.input, call.output_gradient
            if is_single(call.module, input):
                input, output_gradient = input.unsqueeze(0), output_gradient.unsqueeze(0)
            arguments.add(CoreCall(call.module, own, input, output_gradient))
            samples = len(input)
            first_with.setdefault(samples, call.module)
        self._check_counts(first_with)
        result: list[Tensor] = arguments.run(
            torch.ops.torchium.per_sample_gradients, scale=float(samples if self._is_mean else 1)
        )
        return result
