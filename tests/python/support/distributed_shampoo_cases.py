"""Runs of Distributed Shampoo and of torchium.compat's on one problem, with the arguments of the first.

``python distributed_shampoo_cases.py`` writes golden_compat_distributed_shampoo.json with its package, at the
commit below, which must be importable.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

GOLDEN = Path(__file__).with_name("golden_compat_distributed_shampoo.json")
STEPS = 20
# In blocks of 4: [4, 3] and [1, 3]; [3, 3]; [3, 4]; [4] and [2]; [1].
SHAPES = ((5, 3), (3, 3), (3, 2, 2), (6,), ())
SMALL = ((3, 2), (4, 4), (2, 3), (2, 2, 2), (6,), (), (3, 2, 3))


class Case(NamedTuple):
    arguments: Callable[[Any], dict[str, Any]]  # of the configuration classes
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    target: float = 2  # target_parameter_dimensionality
    steps: int = STEPS


def matrices(configs: Any, **attributes: Any) -> Any:
    """Their default, with float64 state."""
    dtypes = {"factor_matrix_dtype": torch.float64, "inv_factor_matrix_dtype": torch.float64}
    return configs.RootInvShampooPreconditionerConfig(**dtypes, **attributes)


def eigendecomposed(configs: Any) -> Any:
    names = ("factor_matrix", "factor_matrix_eigenvectors", "factor_matrix_eigenvalues")
    return configs.EigendecomposedShampooPreconditionerConfig(
        **{f"{name}_dtype": torch.float64 for name in names}
    )


CASES: dict[str, Case] = {
    "defaults": Case(lambda c: {"epsilon": 1e-3}),
    "default epsilon": Case(lambda c: {}, ((3, 3), (4, 4))),
    "no average": Case(lambda c: {"betas": (0.0, 1.0), "epsilon": 1e-2}),
    "no bias correction": Case(
        lambda c: {"betas": (0.0, 1.0), "epsilon": 1e-2, "use_bias_correction": False}
    ),
    "averages": Case(lambda c: {"betas": (0.9, 0.99), "epsilon": 1e-4}),
    "beta3": Case(lambda c: {"betas": (0.75, 0.9), "beta3": 0.75, "epsilon": 1e-3}),
    "L2": Case(
        lambda c: {"epsilon": 1e-2, "weight_decay": 0.1, "weight_decay_type": c.WeightDecayType.L2}
    ),
    "decoupled": Case(lambda c: {"epsilon": 1e-2, "weight_decay": 0.1}),
    "independent": Case(
        lambda c: {
            "epsilon": 1e-2,
            "weight_decay": 0.01,
            "weight_decay_type": c.WeightDecayType.INDEPENDENT,
        }
    ),
    "momentum": Case(
        lambda c: {
            "epsilon": 1e-2,
            "iterate_averaging_config": c.ClassicMomentumConfig(momentum=0.75),
            "weight_decay": 0.1,
            "weight_decay_type": c.WeightDecayType.L2,
        }
    ),
    "nesterov": Case(
        lambda c: {
            "betas": (0.5, 0.95),
            "epsilon": 1e-2,
            "iterate_averaging_config": c.ClassicMomentumConfig(momentum=0.5, use_nesterov=True),
        }
    ),
    "sgd": Case(
        lambda c: {
            "betas": (0.5, 0.9),
            "epsilon": 1e-3,
            "grafting_config": c.SGDPreconditionerConfig(),
        }
    ),
    "adagrad": Case(
        lambda c: {
            "betas": (0.0, 1.0),
            "epsilon": 1e-2,
            "grafting_config": c.AdaGradPreconditionerConfig(epsilon=1e-2),
        }
    ),
    "rmsprop": Case(
        lambda c: {
            "betas": (0.8, 0.95),
            "epsilon": 1e-3,
            "grafting_config": c.RMSpropPreconditionerConfig(beta2=0.9, epsilon=1e-3),
        }
    ),
    "adam": Case(
        lambda c: {
            "betas": (0.9, 0.99),
            "epsilon": 1e-3,
            "weight_decay": 0.1,
            "grafting_config": c.AdamPreconditionerConfig(),
        }
    ),
    "late start": Case(
        lambda c: {
            "betas": (0.9, 0.99),
            "epsilon": 1e-3,
            "start_preconditioning_step": 8,
            "grafting_config": c.AdamPreconditionerConfig(beta2=0.95, epsilon=1e-3),
        }
    ),
    "late start without grafting": Case(
        lambda c: {"betas": (0.5, 0.99), "epsilon": 1e-2, "start_preconditioning_step": 5}
    ),
    # From step 16 on torchium computes roots every fourth step too.
    "rare roots": Case(
        lambda c: {
            "epsilon": 1e-3,
            "precondition_frequency": 4,
            "start_preconditioning_step": 16,
            "grafting_config": c.SGDPreconditionerConfig(),
        },
        steps=40,
    ),
    "exponent": Case(
        lambda c: {
            "epsilon": 1e-2,
            "preconditioner_config": matrices(c, inverse_exponent_override={1: 0.4, 2: 0.4}),
        }
    ),
    "exponent of matrices as of vectors": Case(
        lambda c: {
            "epsilon": 1e-2,
            "preconditioner_config": matrices(c, inverse_exponent_override={2: {0: 0.5, 1: 0.5}}),
        }
    ),
    "newton": Case(
        lambda c: {
            "epsilon": 1e-1,
            "preconditioner_config": matrices(
                c,
                amortized_computation_config=c.CoupledNewtonConfig(
                    tolerance=1e-13, max_iterations=200
                ),
            ),
        }
    ),
    "perturbation afterwards": Case(
        lambda c: {
            "epsilon": 1e-2,
            "preconditioner_config": matrices(
                c,
                amortized_computation_config=c.EigenConfig(
                    rank_deficient_stability_config=c.PerturbationConfig(
                        perturb_before_computation=False
                    )
                ),
            ),
        }
    ),
    "eigendecomposed": Case(
        lambda c: {
            "betas": (0.9, 0.99),
            "epsilon": 1e-3,
            "preconditioner_config": eigendecomposed(c),
            "grafting_config": c.RMSpropPreconditionerConfig(epsilon=1e-3),
        }
    ),
    "only adam": Case(
        lambda c: {
            "betas": (0.8, 0.99),
            "weight_decay": 0.1,
            "preconditioner_config": c.AdamPreconditionerConfig(beta2=0.95, epsilon=1e-3),
        }
    ),
    "only adagrad": Case(
        lambda c: {"preconditioner_config": c.AdaGradPreconditionerConfig(epsilon=1e-2)}
    ),
    "only rmsprop": Case(
        lambda c: {
            "precondition_frequency": 3,
            "preconditioner_config": c.RMSpropPreconditionerConfig(epsilon=1e-2),
        }
    ),
    "only sgd": Case(
        lambda c: {
            "betas": (0.8, 0.9),
            "preconditioner_config": c.SGDPreconditionerConfig(),
            "iterate_averaging_config": c.ClassicMomentumConfig(momentum=0.75),
        }
    ),
    "never": Case(
        lambda c: {
            "betas": (0.8, 0.99),
            "start_preconditioning_step": math.inf,
            "grafting_config": c.AdamPreconditionerConfig(epsilon=1e-3),
        }
    ),
    "never, without bias correction": Case(
        lambda c: {
            "betas": (0.0, 0.99),
            "use_bias_correction": False,
            "start_preconditioning_step": math.inf,
            "grafting_config": c.RMSpropPreconditionerConfig(epsilon=1e-2),
        }
    ),
    "one block": Case(lambda c: {"epsilon": 1e-2, "max_preconditioner_dim": math.inf}),
    # [4, 12] and [2, 6]
    "convolutions": Case(
        lambda c: {"epsilon": 1e-2, "max_preconditioner_dim": 12},
        ((4, 3, 2, 2), (2, 3, 2, 1), (4,)),
    ),
    "tensors of order three": Case(
        lambda c: {"epsilon": 1e-2, "max_preconditioner_dim": 6}, ((3, 2, 7), (7, 4, 2))
    ),
    "no merging": Case(
        lambda c: {"epsilon": 1e-2}, ((3, 2, 2), (2, 2, 2, 2), (5, 3)), target=math.inf
    ),
    # [6], [4, 4], [6], [2, 4], [6], [1], [3, 6] in blocks of 6
    "flattened": Case(lambda c: {"epsilon": 1e-3, "max_preconditioner_dim": 6}, SMALL, target=1),
    "flattened and grafted": Case(
        lambda c: {
            "betas": (0.9, 0.99),
            "epsilon": 1e-3,
            "max_preconditioner_dim": 6,
            "grafting_config": c.AdamPreconditionerConfig(epsilon=1e-3),
        },
        SMALL,
        target=1,
    ),
    "exponent of vectors": Case(
        lambda c: {
            "epsilon": 1e-2,
            "max_preconditioner_dim": 6,
            "preconditioner_config": matrices(c, inverse_exponent_override={1: 0.4}),
        },
        ((3, 2), (2, 1, 3), (5,)),
        target=1,
    ),
    # [4, 2, 6]; [3, 4]; [2, 3, 4]
    "not below three": Case(
        lambda c: {"epsilon": 1e-2, "max_preconditioner_dim": 8},
        ((4, 2, 3, 2), (3, 4), (2, 1, 3, 2, 2)),
        target=3,
    ),
    "shapes as they are": Case(
        lambda c: {"epsilon": 1e-2}, ((3, 1, 2), (1, 5), (), (1, 1), (2, 1, 3, 1)), target=math.inf
    ),
    "shapes as they are and grafted": Case(
        lambda c: {
            "betas": (0.9, 0.99),
            "epsilon": 1e-2,
            "grafting_config": c.AdamPreconditionerConfig(epsilon=1e-3),
        },
        ((3, 1, 2), (), (2, 1, 3, 1)),
        target=math.inf,
    ),
    "merging as far as possible": Case(
        lambda c: {"epsilon": 1e-2}, ((5, 3), (3, 3), (2, 1, 4), (6,)), target=1
    ),
}


def sines(shape: tuple[int, ...], a: float, b: float) -> torch.Tensor:
    values = [math.sin(a * i**2 + b * i) for i in range(1, math.prod(shape) + 1)]
    return torch.tensor(values, dtype=torch.float64).view(shape)


def trajectory_end(optimizer_class: Any, configs: Any, case: Case) -> list[list[float]]:
    """The float64 parameters after the steps of the case, flattened."""
    params = [torch.nn.Parameter(sines(shape, 0.7, k)) for k, shape in enumerate(case.shapes)]
    distributed = configs.SingleDeviceDistributedConfig(target_parameter_dimensionality=case.target)
    given = {
        "lr": 0.03125,
        "max_preconditioner_dim": 4,
        "preconditioner_config": matrices(configs),
        "distributed_config": distributed,
        **case.arguments(configs),
    }
    optimizer = optimizer_class(params, **given)
    for step in range(1, case.steps + 1):
        for k, p in enumerate(params):
            p.grad = 0.5 * p.detach() + sines(p.shape, 0.3, 1.1 * step + k)
        optimizer.step()
    return [p.detach().flatten().tolist() for p in params]


def distributed_shampoo() -> SimpleNamespace:
    """Names of their package, whose bias corrections have the default dtype."""
    torch.set_default_dtype(torch.float64)
    package = importlib.import_module("distributed_shampoo")
    types = importlib.import_module("distributed_shampoo.shampoo_types")
    return SimpleNamespace(**{**vars(types), **vars(package)})


def constructor(optimizer_class: Any) -> dict[str, str]:
    """Names of the arguments, and their defaults as text."""
    arguments = inspect.signature(optimizer_class.__init__).parameters
    return {name: str(a.default) for name, a in arguments.items() if name not in ("self", "params")}


if __name__ == "__main__":
    theirs = distributed_shampoo()
    ends = {name: trajectory_end(theirs.DistributedShampoo, theirs, c) for name, c in CASES.items()}
    golden = {
        "source": "https://github.com/facebookresearch/optimizers",
        "commit": "f60660661194de26d3ee78bae6d15820ff8e583d",
        "constructor": constructor(theirs.DistributedShampoo),
        "parameters": ends,
    }
    # A line per parameter.
    text = re.sub(r"(?<=[\[,])\n *(?=-?\d)|(?<=\d)\n *(?=\])", "", json.dumps(golden, indent=1))
    GOLDEN.write_text(text + "\n")
