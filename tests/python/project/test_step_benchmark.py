"""The step benchmark, on the CPU with tiny models, and how it attributes kernels."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from run_script import run_script

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
MODELS = {"llama-103m": "two Llama layers of width 24", "mlp": "MLP 12-8-8-3"}
sys.path.insert(0, str(FOLDER))

pytest.importorskip("tabulate")

from step_parts import profile, shapes  # noqa: E402


def table(text: str, title: str) -> list[list[str]]:
    """The rows of the table below a title."""
    lines = text[text.index(f"\n## {title}") :].split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_tiny_run_writes_all_rows(tmp_path: Path) -> None:
    tables = tmp_path / "step.md"
    arguments = ["--device", "cpu", "--tiny", "--rounds", "1", "--save", tables]
    arguments += ["--models", *MODELS, "--peer-models", "mlp"]
    done = run_script(FOLDER / "step.py", *arguments)
    assert done.returncode == 0, done.stderr
    text = tables.read_text()
    for key, name in MODELS.items():
        rows = {tuple(row[:3]): row for row in table(text, f"{name}:")}
        peers = [row for row in rows.values() if "pytorch-optimizer" in row[0] or "DASH" in row[0]]
        assert len(peers) == (12 if key == "mlp" else 0)
        for row in peers:  # measured, or with a reason
            assert (row[3] != "") != (row[-1] != "")
        for tf32 in ("no", "yes"):
            every_step = rows["torchium Shampoo, every 1", tf32, "i^-2"]
            mean, with_roots, without = map(
                float, rows["torchium Shampoo, every 10", tf32, "i^-1"][3:6]
            )
            assert float(every_step[3]) > 0
            assert min(mean, without) > 0
            assert max(mean, without) <= with_roots < math.inf
            captured = rows["torchium Shampoo, every 10, CUDA graphs", tf32, "i^-1"]
            assert captured[-1] == "RuntimeError: CUDA graphs need a CUDA device"
        assert float(rows["AdamW foreach", "no", "i^-1"][3]) > 0
        parts = table(text, f"{name}: time of the kernels of a step, by its parts")
        each = len(profile.SHARES) + 1
        assert len(parts) == 6 * each
        for i in range(0, len(parts), each):
            assert sum(float(row[3]) for row in parts[i : i + each - 1]) == pytest.approx(
                100, abs=1
            )
            assert parts[i + each - 1][1] == "all"
    assert len(table(text, "The model of 103 M against its targets")) == 16


def event(name: str, category: str, start: float, length: float, **arguments: object) -> dict:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": length, "args": arguments}


def test_kernels_count_for_the_range_that_launched_them() -> None:
    """Kernels run long after the range in which the host launched them has ended."""
    found = profile.parse(
        [
            event(profile.STEP, "user_annotation", 0, 100),
            event("torchium::step", "cpu_op", 1, 90),
            event("torchium::statistics", "cpu_op", 10, 20),
            event("torchium::elementwise", "cpu_op", 15, 5),
            event("cudaLaunchKernel", "cuda_runtime", 12, 1, correlation=1),
            event("cuLaunchKernelEx", "cuda_driver", 16, 1, correlation=2),
            event("cudaMemsetAsync", "cuda_runtime", 40, 1, correlation=3),
            event("cudaEventRecord", "cuda_runtime", 41, 1, correlation=4),
            event("cudaLaunchKernel", "cuda_runtime", 110, 1, correlation=5),
            event("product", "kernel", 500, 3000, correlation=1),
            event("pass", "kernel", 4000, 1000, correlation=2),
            event("Memset", "gpu_memset", 5000, 10, correlation=3),
            event("late", "kernel", 6000, 10, correlation=5),
            {"ph": "M", "name": "process_name"},
        ]
    )
    assert (found.calls, found.kernels) == (3, 3)
    assert found.ms == pytest.approx({"statistics": 3.0, "elementwise": 1.0, "other": 0.01})
    assert found.launched == {"statistics": 1, "elementwise": 1, "other": 1}


def test_shapes_are_those_of_the_models() -> None:
    count = {key: (len(m.shapes), m.parameters) for key, m in shapes.MODELS.items()}
    assert count["resnet-50"] == (161, 25_557_032)
    assert count["mlp"] == (6, 669_706)
    assert count["llama-103m"] == (18, 102_768_640)
    assert count["llama-308m"] == (24 * 9, 308_330_496)


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_spectra_of_gradients_decay(exponent: float) -> None:
    import torch

    torch.manual_seed(0)
    gradient = shapes.decaying((512, 16, 4, 8), exponent, "cpu", rank=64)
    values = torch.linalg.svdvals(gradient.flatten(1))
    for i in (4, 16, 64):
        assert values[0] / values[i - 1] == pytest.approx(i**exponent, rel=0.5)
