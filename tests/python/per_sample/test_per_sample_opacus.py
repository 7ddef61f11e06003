"""Opacus' tests for per-sample gradients, with torchium's in place of its own."""

from __future__ import annotations

import importlib
import pkgutil
import unittest
import warnings
from typing import Any

import pytest
import torch
import torchium
from hypothesis import HealthCheck, settings
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pad_packed_sequence,
    pad_sequence,
)

pytest.importorskip("opacus")
from opacus.utils import per_sample_gradients_utils as opacus_utils

# The tests use the profile that is loaded when they are imported.
former = settings.get_current_profile_name()
settings.register_profile(
    "opacus", max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("opacus")
package = importlib.import_module("opacus.tests.grad_samples")
common = importlib.import_module("opacus.tests.grad_samples.common")


def names_in(test: Any) -> tuple[str, ...]:
    test = test.hypothesis.inner_test if hasattr(test, "hypothesis") else test
    return test.__code__.co_names


def find_cases() -> list[tuple[type[unittest.TestCase], str]]:
    """The tests that compare gradients: classes and method names."""
    found = []
    for entry in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if not entry.name.endswith("_test"):
            continue
        for case in vars(importlib.import_module(entry.name)).values():
            if getattr(case, "__module__", "") == entry.name and isinstance(case, type):
                for name, test in vars(case).items():
                    if name.startswith("test") and "run_test" in names_in(test):
                        found.append((case, name))
    return found


CASES = find_cases()
settings.load_profile(former)


class SamplesSecond(nn.Module):
    """Adapts a module whose second dimension is the sample."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.transpose(0, 1))


class Bags(nn.Module):
    """An EmbeddingBag for bags padded to one length."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, bags: Tensor, lengths: Tensor) -> Tensor:
        return self.module(bags[0, : lengths[0]], torch.zeros(1, dtype=torch.int64))


class Packed(nn.Module):
    """A recurrent module for sequences padded to one length."""

    def __init__(self, module: nn.Module, batch_first: bool) -> None:
        super().__init__()
        self.module, self.batch_first = module, batch_first

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        return self.module(pack_padded_sequence(x, lengths, self.batch_first)).data


def as_ours(x: Any, module: nn.Module, batch_first: bool) -> tuple[nn.Module, Any]:
    """A model and inputs whose dimension 0 is the sample."""
    if isinstance(x, PackedSequence):
        padded, lengths = pad_packed_sequence(x, batch_first=True)
        return Packed(module, batch_first), (padded, lengths)
    if isinstance(x, tuple):
        values, offsets = x
        bags = values.tensor_split(offsets[1:])
        return Bags(module), (pad_sequence(bags, True), torch.tensor([len(b) for b in bags]))
    return (module, x) if batch_first else (SamplesSecond(module), x.transpose(0, 1))


class Compared:
    """Replaces opacus' comparison, and counts the comparisons."""

    def __init__(self) -> None:
        self.count = 0

    def run_test(
        self, x: Any, module: nn.Module, batch_first: bool = True, *args: Any, **options: Any
    ) -> None:
        model, inputs = as_ours(x, module, batch_first)
        samples = len(inputs[0] if isinstance(inputs, tuple) else inputs)
        for reduction in ("sum", "mean"):
            loss = nn.L1Loss(reduction=reduction)

            def loss_fn(output: Tensor, target: None, loss: nn.Module = loss) -> Tensor:
                return loss(output, torch.zeros_like(output))

            def gradients(loss_fn=loss_fn) -> dict[str, Tensor]:
                return torchium.per_sample_gradients(model, loss_fn, inputs, None)

            if samples == 0:
                with pytest.raises(ValueError, match="0 samples"):
                    gradients()
                continue
            found = {name.removeprefix("module."): g for name, g in gradients().items()}
            expected = self.expected(x, module, batch_first, reduction, options)
            assert found.keys() == expected.keys()
            for name, gradient in found.items():
                torch.testing.assert_close(
                    gradient, expected[name], rtol=1e-4, atol=1e-5, msg=f"{name}, {reduction}"
                )
            self.count += 1

    def expected(
        self, x: Any, module: nn.Module, batch_first: bool, reduction: str, options: dict[str, Any]
    ) -> dict[str, Tensor]:
        if isinstance(x, PackedSequence):
            return opacus_utils.compute_microbatch_grad_sample_tensor_or_seq(
                x, module, batch_first, reduction
            )
        return opacus_utils.compute_microbatch_grad_sample(
            x, module, batch_first, reduction, options.get("chunk_method", iter)
        )


@pytest.mark.parametrize(
    ("case", "name"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_opacus_finds_nothing_wrong(case, name, monkeypatch):
    compared = Compared()
    monkeypatch.setattr(
        common.GradSampleHooks_test, "run_test", lambda self, *a, **k: compared.run_test(*a, **k)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        getattr(case(name), name)()
    assert compared.count >= 1


def test_all_of_opacus_tests_were_found():
    assert len({case for case, _ in CASES}) >= 14
