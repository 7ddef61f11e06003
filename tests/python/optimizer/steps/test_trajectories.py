"""Steps of every optimizer and option agree with the float64 reference, in float32 and float64."""

from __future__ import annotations

import pytest
import torch
import torchium
from reference import ReferenceAdagrad, ReferenceShampoo
from trajectory_cases import ALL_SHAPES, BASE, OPTIONS, cases_and_problems
from trajectory_problems import train

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}

# float64 shows the formulas, on `intermittent` alone, whose parameters have all shapes; float32 that its own kernels
# compute them, on the other problems too. The late parameters of `intermittent` come in at the 10th step. Roots are
# due less often from the 16th on; the 18th shows it, and the exponent after its warm-up.
STEPS = {torch.float32: 12, torch.float64: 18}
REFERENCE = {"Shampoo": ReferenceShampoo, "Adagrad": ReferenceAdagrad}


def assert_agree(history, expected, dtype: torch.dtype) -> None:
    """Every parameter after every step, relative to how far it has come from its start."""
    assert 1 < len(history) <= len(expected)
    start = expected[0]
    for step, (now, reference) in enumerate(zip(history, expected, strict=False)):
        found = [p.double() for p in now]
        travelled, errors, norms = (
            torch.stack(torch._foreach_norm(vectors))
            for vectors in (
                torch._foreach_sub(reference, start),
                torch._foreach_sub(found, reference),
                reference,
            )
        )
        rounding = 4 * torch.finfo(dtype).eps * max(1, step) ** 0.5 * norms
        for i in (~(errors <= TOLERANCE[dtype] * travelled + rounding)).nonzero().flatten():
            pytest.fail(
                f"{dtype}: parameter {i} of shape {tuple(now[i].shape)} after step {step}: "
                f"error {errors[i]:.2e}, travelled {travelled[i]:.2e}"
            )


@pytest.mark.parametrize(("optimizer", "case", "problem"), cases_and_problems())
def test_trajectory(optimizer, case, problem):
    options = OPTIONS[optimizer][case]
    of_reference = {k: v for k, v in options.items() if k != "root_method"}
    maximize = options.get("maximize", False)
    dtypes = STEPS if problem == ALL_SHAPES else [torch.float32]
    expected = train(
        problem,
        torch.float64,
        lambda params: REFERENCE[optimizer](params, **of_reference),
        maximize=maximize,
        steps=max(STEPS[dtype] for dtype in dtypes),
    )
    for dtype in dtypes:
        history = train(
            problem,
            dtype,
            lambda params: getattr(torchium, optimizer)(params, **options),
            maximize=maximize,
            steps=STEPS[dtype],
        )
        assert_agree(history, expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
def test_learning_rate_schedule(dtype):
    def reference_lr(optimizer, step):
        optimizer.lr = 0.05 / (1 + step)

    def library_lr(optimizer, step):
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + step)

    options = {**BASE, "momentum": 0.9, "weight_decay": 0.1, "decoupled_weight_decay": True}
    expected = train(
        "mlp",
        torch.float64,
        lambda params: ReferenceShampoo(params, **options),
        before_step=reference_lr,
    )
    history = train(
        "mlp",
        dtype,
        lambda params: torchium.Shampoo(params, **options),
        before_step=library_lr,
    )
    assert_agree(history, expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "float64"])
def test_groups_with_their_own_options_and_a_late_group(dtype):
    """Three groups, the third added before step 10; the reference is three optimizers."""
    groups = [
        dict(lr=0.02, eps=1e-2, update_freq=1, block_size=8),
        dict(lr=0.01, eps=1e-2, update_freq=3, block_size=16, betas=(0.9, 0.95)),
        dict(lr=0.03, eps=1e-2, update_freq=10, block_size=1024, grafting="adagrad"),
    ]

    class Separate:
        def __init__(self, params):
            self.optimizers = [
                ReferenceShampoo(params[i::3], **options) for i, options in enumerate(groups)
            ]
            self.steps = 0

        def step(self):
            for optimizer in self.optimizers[: 2 if self.steps < 10 else 3]:
                optimizer.step()
            self.steps += 1

    def in_two_groups(params):
        optimizer = torchium.Shampoo(
            [{"params": params[i::3], **groups[i]} for i in range(2)],
        )
        optimizer.late_group = {"params": params[2::3], **groups[2]}
        return optimizer

    def add_late_group(optimizer, step):
        if step == 10:
            optimizer.add_param_group(optimizer.late_group)

    history = train("mlp", dtype, in_two_groups, before_step=add_late_group)
    assert_agree(history, train("mlp", torch.float64, Separate), dtype)
