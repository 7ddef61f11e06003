"""The benchmark of inverse roots, as a dry run without a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_script import run_script

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "roots.py"


def test_a_dry_run_writes_its_tables_and_its_plot(tmp_path: Path) -> None:
    pytest.importorskip("tabulate")
    pytest.importorskip("matplotlib")
    tables, plot = tmp_path / "roots.md", tmp_path / "roofline.png"
    arguments = ["--dry-run", "--rounds", "1", "--save", tables, "--plot", plot]
    done = run_script(SCRIPT, *arguments)
    assert done.returncode == 0, done.stderr
    text = tables.read_text()
    for column in ("share of fp16 peak", "MB moved", "error with float32 products"):
        assert column in text
    for what in ("error / that with float32 products", "error / that of float32 eigh"):
        assert text.count(what) == 12  # three orders, two families, two dampings
    assert plot.read_bytes().startswith(b"\x89PNG")
