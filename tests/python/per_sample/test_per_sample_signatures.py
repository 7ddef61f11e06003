"""torchium.gradients and torchium::gradients have the same functions, with the same defaults."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from torchium import gradients

HEADER = Path(__file__).parents[3] / "include" / "torchium" / "gradients.h"


@pytest.mark.parametrize(
    "name", ["per_sample_gradients", "per_sample_norms", "gram", "jvp_dots", "clip_and_accumulate"]
)
def test_max_workspace_bytes_has_one_default(name):
    python = inspect.signature(getattr(gradients, name)).parameters["max_workspace_bytes"].default
    declaration = re.search(rf"TORCHIUM_API [\w:<>, ]+ {name}\(([^;]*)\);", HEADER.read_text())
    assert declaration is not None
    found = re.search(r"max_workspace_bytes = int64_t\{1\} << (\d+)", declaration.group(1))
    assert found is not None
    assert 1 << int(found.group(1)) == python


def test_the_blocks_have_one_default():
    python = inspect.signature(gradients.per_sample).parameters["reduction"].default
    found = re.search(r'explicit PerSample\([^;]*reduction = "(\w+)"\);', HEADER.read_text())
    assert found is not None
    assert found.group(1) == python
