r"""Shampoo follows the trajectories of Distributed Shampoo, an independent public implementation.

golden_distributed_shampoo.json holds the parameters that its code, at the commit named there, reached on this
file's problem, and its settings. Gradients come from a formula, so both see the same ones.

The settings are a subset in which both define the same step. Distributed Shampoo differs from torchium where
the cases do not test:

- it adds decoupled weight decay to the direction before momentum; torchium does not. No case has both;
- with ``precondition_frequency=k`` it computes roots only at multiples of k; in torchium they are due more
  often in the first steps. The case "rmsprop" starts at step 16 with ``update_freq=4``, where both schedules
  agree;
- it adds 1e-16 to the norm of a direction before grafting, far below the rounding of the norms here;
- by default it turns small matrices into vectors and keeps full matrices for vectors.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torchium
from distributed_shampoo_cases import sines

GOLDEN = json.loads(Path(__file__).with_name("golden_distributed_shampoo.json").read_text())[
    "cases"
]
# In blocks of 4: [4, 3] and [1, 3]; [3, 3]; [3, 4]; [4] and [2].
SHAPES = ((5, 3), (3, 3), (3, 2, 2), (6,))
COMMON = {"lr": 0.03125, "block_size": 4, "preconditioner_1d": "full"}
OPTIONS = {
    "adam": {
        "betas": (0.9, 0.99),
        "eps": 1e-3,
        "update_freq": 1,
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
        "grafting": "adam",
        "grafting_beta2": 0.95,
        "grafting_eps": 1e-3,
    },
    "adagrad": {
        "betas": (0.0, 1.0),
        "eps": 1e-2,
        "update_freq": 1,
        "weight_decay": 0.05,
        "momentum": 0.75,
        "nesterov": True,
        "exponent": -0.4,
        "grafting": "adagrad",
        "grafting_eps": 1e-2,
    },
    "rmsprop": {
        "betas": (0.8, 0.95),
        "eps": 1e-3,
        "update_freq": 4,
        "start_preconditioning_step": 16,
        "momentum": 0.5,
        "grafting": "rmsprop",
        "grafting_beta2": 0.9,
        "grafting_eps": 1e-3,
    },
    "sgd": {
        "betas": (0.5, 0.9),
        "eps": 1e-3,
        "update_freq": 1,
        "weight_decay": 0.1,
        "grafting": "sgd",
    },
    "none": {
        "betas": (0.9, 1.0),
        "eps": 1e-2,
        "update_freq": 1,
        "weight_decay": 0.1,
        "decoupled_weight_decay": True,
    },
}
# Parameters are of order one. The float64 runs agree to 2e-15, the float32 ones to 5e-7, on a CPU. A GPU adds
# in a different order, and multiplies float32 as sums of fp16 numbers with 22 bits together. A change of eps
# by 0.1 % moves every case by 2e-8 or more, other options by 4e-5 or more.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def trajectory_end(options, steps, dtype, device) -> list[torch.Tensor]:
    params = [
        torch.nn.Parameter(sines(shape, 0.7, k).to(device, dtype)) for k, shape in enumerate(SHAPES)
    ]
    optimizer = torchium.Shampoo(params, **COMMON, **options)
    for step in range(1, steps + 1):
        for k, p in enumerate(params):
            p.grad = 0.5 * p.detach() + sines(p.shape, 0.3, 1.1 * step + k).to(device, dtype)
        optimizer.step()
    return [p.detach().double().cpu().flatten() for p in params]


def largest_error(options, case, dtype, device) -> float:
    ends = trajectory_end(options, GOLDEN[case]["steps"], dtype, device)
    expected = [torch.tensor(p, dtype=torch.float64) for p in GOLDEN[case]["parameters"]]
    return max((p - q).abs().max().item() for p, q in zip(ends, expected, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float64", "float32"])
@pytest.mark.parametrize("case", GOLDEN)
def test_reaches_the_parameters_of_distributed_shampoo(case, dtype, device):
    assert largest_error(OPTIONS[case], case, dtype, device) <= TOLERANCE[dtype]


@pytest.mark.parametrize("case", GOLDEN)
def test_the_numbers_notice_a_thousandth_of_eps(case):
    options = OPTIONS[case] | {"eps": 1.001 * OPTIONS[case]["eps"]}
    cpu = torch.device("cpu")
    assert largest_error(options, case, torch.float64, cpu) > 1000 * TOLERANCE[torch.float64]
