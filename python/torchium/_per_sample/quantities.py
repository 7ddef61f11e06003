"""Norms, inner products and clipped sums of per-sample gradients, without the gradients."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .layers import LayerCalls
from .per_sample import Rows, check_workspace, chunks_of, evaluate, one_call
from .sample_loss import LossFunction, trainable

_ops = torch.ops.torchium

# Model, parameters, loss function, inputs and targets.
Batch = tuple[nn.Module, dict[str, Tensor], LossFunction, Any, Any]


def per_sample_norms(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    *,
    max_workspace_bytes: int = 2**28,
) -> Tensor:
    """Return the l2 norm of each sample's gradient, over all trainable parameters.

    ``norms[i] = |g_i|``, where ``g_i`` is row i of :func:`per_sample_gradients`. The gradients are
    not formed where a layer has one position per sample (``|a|^2 |g|^2`` for an input ``a`` and an
    output gradient ``g``), or few: for T positions with ``2 T^2 < in out``, the sum over positions t
    and s of ``(a_t . a_s) (g_t . g_s)``. Otherwise they are formed for some samples at a time.

    Models, losses, batches and errors are those of :func:`per_sample_gradients`. Nothing is changed.

    Args:
        model, loss_fn, inputs, targets: as for :func:`per_sample_gradients`.
        max_workspace_bytes: bounds the gradients that exist at a time, of at least one sample.
            Inputs and output gradients of the layers, for the whole batch, are not counted, nor are
            the gradients of Conv1d, Conv3d, transposed convolutions, RMSNorm and registered layers.

    Returns:
        ``[batch]``; float64 if a parameter is, otherwise float32.

    Raises:
        ValueError: as :func:`per_sample_gradients`, no trainable parameter, or
            ``max_workspace_bytes`` below 1.
    """
    check_workspace(max_workspace_bytes)
    with one_call:
        parameters = _trainable(model)
        return _of_each_sample(
            "per_sample_norms",
            (model, parameters, loss_fn, inputs, targets),
            max_workspace_bytes,
            lambda calls: calls.run(_ops.per_sample_norms, max_workspace_bytes=max_workspace_bytes),
        )


def gram(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    *,
    max_workspace_bytes: int = 2**28,
) -> Tensor:
    """Return the inner products of the samples' gradients, ``K = J J^T``.

    ``K[i, j] = g_i . g_j``, where ``g_i`` is row i of :func:`per_sample_gradients`, over all trainable
    parameters. Layer by layer without J: for linear layers ``(A A^T) * (G G^T)``, elementwise, with
    their inputs A and output gradients G; for convolutions and sequences this, or products of some
    rows of J at a time, whichever takes fewer operations. Sums are float64; Hopper GPUs add up those of
    convolutions and sequences in float32.

    Models, losses, batches and errors are those of :func:`per_sample_gradients`. Nothing is changed.

    Args:
        model, loss_fn, inputs, targets: as for :func:`per_sample_gradients`.
        max_workspace_bytes: bounds the gradients that exist at a time for models that need explicit
            gradients. If it is too small for all, those of each pair of chunks are computed again.
            The workspace of layers that do not need them is at most 100 MB, on a GPU 1 GB.

    Returns:
        ``[batch, batch]``, float64, symmetric.

    Raises:
        ValueError: as :func:`per_sample_gradients`, no trainable parameter, or
            ``max_workspace_bytes`` below 1.
    """
    check_workspace(max_workspace_bytes)
    with one_call:
        parameters = _trainable(model)
        params = list(parameters.values())

        def from_rows(rows: Rows, samples: int) -> Tensor:
            chunks = chunks_of(params, samples, max_workspace_bytes)
            if len(chunks) > 1:
                chunks = chunks_of(params, samples, max_workspace_bytes // 2)  # two at a time
            K = params[0].new_empty(samples, samples, dtype=torch.float64, requires_grad=False)
            for i, chunk in enumerate(chunks):
                left = rows(*chunk)
                K[slice(*chunk), slice(*chunk)] = _of_rows(params, left).run(_ops.per_sample_gram)
                for other in chunks[:i]:
                    block = _products(left, rows(*other))
                    K[slice(*chunk), slice(*other)] = block
                    K[slice(*other), slice(*chunk)] = block.T
            return K

        K: Tensor = evaluate(
            "gram",
            model,
            parameters,
            loss_fn,
            inputs,
            targets,
            lambda calls: calls.run(_ops.per_sample_gram),
            from_rows,
        )
    return K


def jvp_dots(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    vectors: Mapping[str, Tensor],
    *,
    max_workspace_bytes: int = 2**28,
) -> Tensor:
    """Return the inner product of each sample's gradient with given vectors, ``J v``.

    ``result[i]`` is the sum over the trainable parameters of ``(g_i * v).sum()``, where ``g_i`` is row
    i of :func:`per_sample_gradients`: the derivative of sample i's loss in the direction v. For
    linear layers it is ``sum_t g_t . (V a_t)``, one product per layer.

    Models, losses, batches and errors are those of :func:`per_sample_gradients`. Nothing is changed.

    Args:
        model, loss_fn, inputs, targets: as for :func:`per_sample_gradients`.
        vectors: name -> tensor of the parameter's shape, for each trainable parameter.
        max_workspace_bytes: bounds the gradients that exist at a time, for models that need explicit
            gradients.

    Returns:
        ``[batch]``; float64 if a parameter is, otherwise float32.

    Raises:
        ValueError: as :func:`per_sample_gradients`, no trainable parameter, ``max_workspace_bytes``
            below 1, or vectors that do not fit the parameters.
    """
    check_workspace(max_workspace_bytes)
    with one_call:
        parameters = _trainable(model)
        v = [x.to(p.device, _dtype([p])) for p, x in _fitting(parameters, vectors)]
        return _of_each_sample(
            "jvp_dots",
            (model, parameters, loss_fn, inputs, targets),
            max_workspace_bytes,
            lambda calls: calls.run(_ops.per_sample_products, vectors=v),
        )


def clip_and_accumulate(
    model: nn.Module,
    loss_fn: LossFunction,
    inputs: Any,
    targets: Any,
    max_norm: float,
    *,
    max_workspace_bytes: int = 2**28,
) -> Tensor:
    """Add the sum of the clipped gradients of all samples to ``.grad``, and return the norms.

    ``p.grad += sum_i min(1, max_norm / |g_i|) g_i``, where ``g_i`` is row i of
    :func:`per_sample_gradients` and the norm that over all trainable parameters. It is the sum, not
    the mean, so that calls for parts of a large batch add up. Every trainable parameter gets a
    ``.grad``, zero if no sample reaches it, because the noise of differentially private training
    belongs to all of them; also of an empty batch, such as Poisson sampling draws.

    The sum is one product per layer, ``(diag(c) G)^T A``, without the gradients. For the norms see
    :func:`per_sample_norms`. A gradient that is not finite makes the sum NaN.

    Args:
        model, loss_fn, inputs, targets: as for :func:`per_sample_gradients`.
        max_norm: the largest norm of a sample's gradient in the sum.
        max_workspace_bytes: as for :func:`per_sample_norms`.

    Returns:
        The norms before clipping, ``[batch]``; float64 if a parameter is, otherwise float32.

    Raises:
        ValueError: as :func:`per_sample_gradients`, no trainable parameter, ``max_norm`` that is not a
            positive number, or ``max_workspace_bytes`` below 1. No ``.grad`` has changed then.

    Example:
        One step of DP-SGD (Abadi et al. 2016, `arXiv:1607.00133 <https://arxiv.org/abs/1607.00133>`_)
        with noise multiplier 1:

        >>> model = torch.nn.Linear(10, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> inputs, targets = torch.randn(8, 10), torch.randint(2, (8,))
        >>> loss_fn = torch.nn.CrossEntropyLoss()
        >>> optimizer.zero_grad()
        >>> norms = torchium.gradients.clip_and_accumulate(
        ...     model, loss_fn, inputs, targets, max_norm=1.0
        ... )
        >>> for p in model.parameters():
        ...     p.grad = (p.grad + torch.randn_like(p)) / len(inputs)
        >>> optimizer.step()
    """
    check_workspace(max_workspace_bytes)
    if not isinstance(max_norm, (numbers.Real, Tensor)):
        raise ValueError(f"max_norm is {max_norm!r}; it must be a number")
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be positive")
    with one_call:
        parameters = _trainable(model)
        params = list(parameters.values())
        options = {"max_norm": max_norm, "max_workspace_bytes": max_workspace_bytes}

        def from_rows(rows: Rows, samples: int) -> tuple[list[Tensor], Tensor]:
            sums = [torch.zeros_like(p, dtype=_dtype([p]), requires_grad=False) for p in params]
            norms = [sums[0].new_zeros(0, dtype=_dtype(params))]  # of an empty batch
            for chunk in chunks_of(params, samples, max_workspace_bytes):
                calls = _of_rows(params, rows(*chunk))
                of_chunk, found = calls.run(_ops.clipped_gradient_sums, **options)
                norms.append(found)
                for total, more in zip(sums, of_chunk, strict=True):
                    total += more
            return sums, torch.cat(norms)

        sums, norms = evaluate(
            "clip_and_accumulate",
            model,
            parameters,
            loss_fn,
            inputs,
            targets,
            lambda calls: calls.run(_ops.clipped_gradient_sums, **options),
            from_rows,
            least=0,
        )
        for p, total in zip(params, sums, strict=True):
            _accumulate(p, total)
    result: Tensor = norms
    return result


def _of_each_sample(
    function: str, batch: Batch, max_bytes: int, run: Callable[[LayerCalls], Tensor]
) -> Tensor:
    """One number per sample, which ``run`` computes from layer calls; ``batch`` as for evaluate()."""
    params = list(batch[1].values())

    def from_rows(rows: Rows, samples: int) -> Tensor:
        chunks = chunks_of(params, samples, max_bytes)
        return torch.cat([run(_of_rows(params, rows(*chunk))) for chunk in chunks])

    return evaluate(function, *batch, run, from_rows)


@torch.no_grad()
def _accumulate(param: Tensor, total: Tensor) -> None:
    """Adds to ``.grad`` as a backward pass does."""
    if param.grad is None:
        param.grad = torch.empty_like(param, requires_grad=False).copy_(total)
    elif param.grad.is_sparse:
        param.grad = total.to(param.dtype) + param.grad
    else:
        param.grad += total


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    params = trainable(model)
    if not params:
        raise ValueError(f"no parameter of {type(model).__name__} requires a gradient")
    for name, param in params.items():
        if param.is_complex():
            raise ValueError(
                f"the parameter {name!r} is {param.dtype}; only per_sample_gradients() takes complex "
                "parameters"
            )
    return params


def _fitting(
    params: dict[str, Tensor], vectors: Mapping[str, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Parameters with their vectors."""
    if not isinstance(vectors, Mapping):
        raise ValueError(
            f"vectors is of type {type(vectors).__name__}; it must be a dict of one tensor per "
            "trainable parameter, by its name in model.named_parameters()"
        )
    unknown = sorted(vectors.keys() - params.keys())
    if unknown:
        raise ValueError(
            f"vectors has an entry {unknown[0]!r}, which is no trainable parameter of the model"
        )
    for name, param in params.items():
        if name not in vectors:
            raise ValueError(f"vectors has no entry {name!r}; pass zeros to leave it out")
        vector = vectors[name]
        if not isinstance(vector, Tensor) or vector.shape != param.shape:
            found = tuple(vector.shape) if isinstance(vector, Tensor) else type(vector).__name__
            raise ValueError(
                f"vectors[{name!r}] is {found}; it must be a tensor of shape {tuple(param.shape)}"
            )
        yield param, vector.detach()


def _dtype(params: list[Tensor]) -> torch.dtype:
    """The dtype of results: float64 if a parameter is, otherwise float32."""
    return torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32


def _of_rows(params: list[Tensor], rows: list[Tensor]) -> LayerCalls:
    """Explicit gradients of some samples, for the operators of the core."""
    calls = LayerCalls(params)
    for position, row in enumerate(rows):
        calls.add_rows(position, row)
    return calls


def _flat(rows: Tensor) -> Tensor:
    """[samples, *shape] -> [samples, elements], also for the shape []."""
    return rows.unsqueeze(-1).flatten(1)


def _products(left: list[Tensor], right: list[Tensor]) -> Tensor:
    """The inner products of the gradients of some samples with those of others, float64."""
    pairs = zip(left, right, strict=True)
    products = [_flat(a).double() @ _flat(b).double().T for a, b in pairs]
    return torch.stack(products).sum(0)
