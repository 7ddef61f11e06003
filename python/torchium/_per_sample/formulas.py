"""Per-sample gradients of layers by formulas of their own, explicit for the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

# (layer, input [samples, ...], output gradient [samples, ...]) -> name -> [samples, *shape]
Formula = Callable[[Any, Tensor, Tensor], dict[str, Tensor]]
FormulaT = TypeVar("FormulaT", bound=Formula)

_registered: dict[type[nn.Module], Formula] = {}


def register_layer(
    module_class: type[nn.Module], formula: FormulaT | None = None
) -> FormulaT | Callable[[FormulaT], FormulaT]:
    """Give the layers of a class a formula for their per-sample gradients.

    The per-sample functions then record the calls of such layers and apply the formula, instead of
    running ``vmap(grad)``. The rows of these layers are formed for the whole batch, whatever
    ``max_workspace_bytes`` is. Subclasses are included unless they have a forward of their own. A
    second formula for a class replaces the first; those of torchium cannot be replaced.

    Args:
        module_class: a subclass of ``nn.Module``, whose ``forward`` takes one tensor and returns one,
            both with the sample (or a batch that belongs to one sample) in dimension 0. It owns its
            parameters itself.
        formula: ``formula(layer, input, output_gradient)`` -> for each trainable parameter of the
            layer by name, the gradient of each sample, ``[len(input), *parameter.shape]``. ``input``
            is what the layer received, ``output_gradient`` the gradient of the sum of all losses by
            what it returned. Runs under ``torch.no_grad()``. None: returns a decorator.

    Returns:
        ``formula``.

    Raises:
        ValueError: ``module_class`` is no class of modules or has a formula in torchium, or
            ``formula`` cannot be called. Later, from the functions: a result that has no entry for a
            parameter (named), or one of another shape.

    Example:
        >>> class Scale(torch.nn.Module):
        ...     def __init__(self, features):
        ...         super().__init__()
        ...         self.factor = torch.nn.Parameter(torch.ones(features))
        ...
        ...     def forward(self, x):
        ...         return self.factor * x
        >>> @torchium.gradients.register_layer(Scale)
        ... def scale_formula(layer, input, output_gradient):
        ...     return {"factor": input * output_gradient}
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), Scale(3))
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> norms = torchium.gradients.per_sample_norms(
        ...     model, torch.nn.functional.cross_entropy, x, y
        ... )
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise ValueError(f"module_class is {module_class!r}; it must be a subclass of nn.Module")
    if module_class.__module__.startswith("torch.nn."):
        raise ValueError(
            f"module_class is {module_class.__name__} of PyTorch; register a subclass with a forward "
            "of its own"
        )
    if formula is None:
        return lambda function: _register(module_class, function)
    return _register(module_class, formula)


def _register(module_class: type[nn.Module], formula: FormulaT) -> FormulaT:
    if not callable(formula):
        raise ValueError(
            f"formula is {formula!r}; it must be a function of layer, input and output gradient"
        )
    _registered[module_class] = formula
    return formula


def formula_of(module: nn.Module) -> Formula | None:
    """The formula for a layer, if it has one."""
    if not _registered:
        return None
    for base in type(module).__mro__:
        found = _registered.get(base)
        if found is not None:
            methods = [n for n in ("forward", "_conv_forward") if hasattr(base, n)]
            is_same = all(
                name not in module.__dict__ and getattr(type(module), name) is getattr(base, name)
                for name in methods
            )
            return found if is_same else None
    return None


def rows_by_formula(
    module: nn.Module,
    names: Iterable[str],
    input: Tensor,
    output_gradient: Tensor,
    has_batches: bool,
) -> dict[str, Tensor]:
    """The gradients of each sample for these parameters: ``[samples, *shape]``.

    ``has_batches``: what the layer received from a sample had a batch dimension, which is dimension 1
    here.
    """
    formula = formula_of(module)
    assert formula is not None
    samples = len(input)
    if has_batches:
        input, output_gradient = input.flatten(0, 1), output_gradient.flatten(0, 1)
    found = formula(module, input, output_gradient)
    rows = {name: _checked(module, name, found, len(input)) for name in names}
    if has_batches and len(input) != samples:
        rows = {name: row.unflatten(0, (samples, -1)).sum(1) for name, row in rows.items()}
    return rows


def _checked(module: nn.Module, name: str, found: Any, samples: int) -> Tensor:
    param = module._parameters[name]
    assert param is not None
    row = found.get(name) if isinstance(found, dict) else None
    expected = (samples, *param.shape)
    if not isinstance(row, Tensor):
        what = f"no tensor {name!r}"
    elif not row.is_floating_point():
        what = f"type {row.dtype}"
    elif row.shape != expected:
        what = f"shape {tuple(row.shape)}"
    else:
        return row
    raise ValueError(
        f"the formula registered for {type(module).__name__} returned {what}; it must return a "
        f"dict with the gradients of {name!r} of all samples, of shape {expected}"
    )
