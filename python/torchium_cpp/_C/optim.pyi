"""The C++ optimizers, torchium::optim.

Options are keyword arguments with the names and defaults of the optimizers of `torchium`; all, also
the first ones, are passed by name. `KFAC` and `NaturalGradient` see the layers of Python models too,
but have no `grad_scaler`.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Generator, Tensor

class SecondOrderOptimizer:
    """torchium::optim::SecondOrderOptimizer."""

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One step; `closure` computes the gradients and returns the loss."""

    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def check_errors(self) -> None:
        """Waits for the device and raises RuntimeError for what went wrong so far."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a dict with 'params' and, if wanted, options."""

    def memory_report(self) -> dict[str, Any]:
        """Bytes by kind, of each group, of what they have in common and of each parameter; and the table
        that C++ programs print."""

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all groups."""

    def options(self, group: int = 0) -> dict[str, Any]:
        """The options of a parameter group."""

    def state(self, param: Tensor) -> dict[str, Tensor]:
        """The state tensors of a parameter by name; they share memory with the optimizer."""

    def save(self, path: str) -> None:
        """Writes options and state to a file that C++ programs read by torch::load."""

    def load(self, path: str) -> None:
        """Reads what `save` wrote; ValueError, and nothing is loaded, if it does not fit."""

    def save_bytes(self) -> bytes: ...
    def load_bytes(self, data: bytes) -> None: ...

class Shampoo(SecondOrderOptimizer):
    """torchium::optim::Shampoo."""

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], **options: Any
    ) -> None: ...
    def update_preconditioners(self) -> None:
        """Computes all roots from the statistics at once."""

    def sync_lr(self) -> None:
        """Writes the learning rate to the tensor that captured steps read."""

    @staticmethod
    def from_adamw(
        params: Iterable[Tensor] | Iterable[dict[str, Any]], **hyperparameters: Any
    ) -> Shampoo:
        """Takes the options of AdamW (alone, in dicts of groups) and those of Shampoo except eps."""

    def report(self) -> list[dict[str, Any]]:
        """The rule of each parameter, a dict for each."""

    def report_table(self) -> str:
        """The same as C++ programs print it."""

class Adagrad(SecondOrderOptimizer):
    """torchium::optim::Adagrad."""

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], **options: Any
    ) -> None: ...

class AdaHessian(SecondOrderOptimizer):
    """torchium::optim::AdaHessian."""

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], **options: Any
    ) -> None: ...

class _CapturingOptimizer(SecondOrderOptimizer):
    """What KFAC and NaturalGradient have both."""

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], **options: Any
    ) -> None: ...
    def update_curvature(
        self,
        outputs: Tensor,
        loss: str,
        *,
        reduction: str = "mean",
        class_dim: int | None = None,
        mask: Tensor | None = None,
        samples: int = 1,
        generator: Generator | None = None,
    ) -> None:
        """The curvature of the next step, for fisher 'mc' and 'ggn'."""

    def update_damping(self, loss_before: float, loss_after: float) -> float:
        """Adapts the damping by the losses before and after the last step."""

    def report(self) -> dict[str, Any]:
        """What the optimizer has done."""

    def report_table(self) -> str:
        """The same as C++ programs print it."""

class KFAC(_CapturingOptimizer):
    """torchium::optim::KFAC."""

class KFACPreconditioner(KFAC):
    """torchium::optim::KFACPreconditioner."""

class NaturalGradient(_CapturingOptimizer):
    """torchium::optim::NaturalGradient."""

    def update_jacobian(self, rows: list[Tensor], residuals: Tensor) -> None:
        """The Jacobian and residuals of the next step, from the caller."""
