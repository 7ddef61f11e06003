"""The convergence benchmark, on the CPU with little data, and the text of its Transformer."""

from __future__ import annotations

import io
import json
import lzma
import math
import random
import struct
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from run_script import run_script

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks"
ADAMW_AND = ("AdamW", "Muon", "Shampoo-1", "Shampoo-10", "Shampoo-100")
SGD_AND = ("SGD", "K-FAC", "NaturalGradient")
sys.path.insert(0, str(FOLDER))

from learning import bible_text  # noqa: E402


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_script(FOLDER / "convergence.py", "--device", "cpu", "--tiny", *arguments)


@pytest.mark.parametrize(
    ("task", "names", "classes", "grid", "target"),
    [
        ("transformer", ADAMW_AND, 256, "1e-4 1e-3", "Shampoo-10: seconds to AdamW's final loss"),
        ("convnet", ADAMW_AND, 10, "1e-4 1e-3", None),
        ("curvature-mlp", SGD_AND, 10, "1e-2 3e-2", "K-FAC: steps to SGD's lowest loss"),
        ("curvature-convnet", SGD_AND, 10, "1e-2 3e-2", "K-FAC: steps to SGD's lowest loss"),
    ],
)
def test_a_tiny_run_in_two_parts_writes_its_tables_and_its_plot(
    task: str, names: Sequence[str], classes: int, grid: str, target: str | None, tmp_path: Path
) -> None:
    pytest.importorskip("tabulate")
    pytest.importorskip("matplotlib")
    if task != "transformer":
        pytest.importorskip("sklearn")
    common = ["--task", task, "--runs", tmp_path / "runs"]
    common += ["--grid", *grid.split(), "--seeds", "1"]
    first = run(*common, "--optimizers", *names[:2])
    assert first.returncode == 0, first.stderr
    tables, plot = tmp_path / "tables.md", tmp_path / "curves.png"
    second = run(*common, "--save", tables, "--plot", plot)
    assert second.returncode == 0, second.stderr
    assert f"{names[0]}, lr" not in second.stdout  # known already
    parts = sorted((tmp_path / "runs").glob("*.json"))
    runs = [run for part in parts for run in json.loads(part.read_text())]
    assert len(parts) == 2
    # Two rates with one seed, the best one with another; and the other rate, if its mean is lower then.
    assert len(names) * 3 <= len(runs) <= len(names) * 4
    for values in runs:
        assert values["task"] == task
        assert values["steps"] == [4, 8, 12]
        assert len(values["optimizer_ms"]) == 12
        for key in ("seconds", "train_losses", "validation_losses", "optimizer_ms"):
            assert all(math.isfinite(value) and value > 0 for value in values[key])
        assert values["validation_losses"][-1] < 1.01 * math.log(classes)  # that of a constant
        assert len(values["accuracies"]) == (0 if task == "transformer" else 3)
    text = tables.read_text()
    for name in names:
        assert text.count(f"| {name} ") == 2  # the grid and the comparison
    assert ("final accuracy, %" in text) == (task != "transformer")
    assert ("## Targets" in text) == (target is not None)
    assert target is None or f"{target} / {names[0]}'s" in text
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_the_goal_of_training_is_the_lowest_training_loss() -> None:
    pytest.importorskip("tabulate")
    from learning.curvature_task import CurvatureMlpTask
    from learning.report import crossings
    from learning.runs import Run

    def made(name: str, losses: list[float]) -> Run:
        run = Run(name, 0.1, 1, 30, "CPU", [10, 20, 30], [1.0, 2.0, 3.0], losses, goal="training")
        run.validation_losses = [9.0, 8.0, 7.0]
        return run

    sgd, kfac = made("SGD", [4.0, 2.0, 3.0]), made("K-FAC", [3.0, 1.0, 1.0])
    assert sgd.reached == (2.0, 20, 2.0)
    assert crossings(CurvatureMlpTask, "SGD", [sgd], 2.0) == [(20, 2.0)]
    assert crossings(CurvatureMlpTask, "K-FAC", [kfac], 2.0) == [(15.0, 1.5)]
    assert crossings(CurvatureMlpTask, "K-FAC", [kfac, made("K-FAC", [4.0, 3.0, 2.5])], 2.0) is None
    diverged = made("K-FAC", [1.0, 5.0, math.nan])
    assert diverged.reached[0] == math.inf


def test_the_best_rate_has_the_lowest_mean_over_the_seeds() -> None:
    pytest.importorskip("tabulate")
    from learning.report import best_lr
    from learning.runs import Run

    def made(lr: float, seed: int, loss: float, name: str = "K-FAC") -> Run:
        run = Run(name, lr, seed, 10, "CPU", [10], [1.0], [loss])
        run.validation_losses = [loss]
        return run

    runs = [made(0.1, 0, 1.0), made(0.2, 0, 0.5), made(0.2, 1, 0.6), made(0.4, 0, math.nan)]
    assert best_lr(runs, "K-FAC") == 0.2
    assert best_lr([*runs, made(0.2, 2, 9.0)], "K-FAC") == 0.1
    assert best_lr([*runs, made(0.2, 2, math.nan)], "K-FAC") == 0.1
    assert best_lr([made(0.1, 0, math.nan)], "K-FAC") is None


def test_a_run_whose_optimizer_gives_up_ends_with_an_infinite_loss() -> None:
    pytest.importorskip("tabulate")
    pytest.importorskip("sklearn")
    from learning.convnet_task import load_images
    from learning.curvature_task import CurvatureMlpTask
    from learning.runs import train
    from learning.task import Settings

    task = CurvatureMlpTask(load_images("digits", None), "cpu")
    run = train(task, Settings(batch=4, steps=20, warm_up=1, evaluate_every=20), "K-FAC", 1e12, 0)
    assert run.reached[0] == math.inf
    assert len(run.optimizer_ms) == run.steps[-1] < 20


def test_an_optimizer_of_another_task_is_refused() -> None:
    pytest.importorskip("tabulate")
    pytest.importorskip("sklearn")
    refused = run("--task", "curvature-mlp", "--optimizers", "Muon", "SGD")
    assert refused.returncode == 2
    assert "--task curvature-mlp has no Muon, only SGD, K-FAC, NaturalGradient" in refused.stderr


def test_stored_runs_that_name_no_task_are_those_of_the_transformer(tmp_path: Path) -> None:
    pytest.importorskip("tabulate")
    from convergence import Runs

    stored = {"optimizer": "Muon", "lr": 0.1, "seed": 1, "length": 2, "conditions": "CPU"}
    (tmp_path / "runs.json").write_text(json.dumps([stored, {**stored, "task": "convnet"}]))
    keys = [("Muon", 0.1, 1, task, 2, "CPU") for task in ("transformer", "convnet")]
    assert list(Runs(tmp_path).known) == keys


def test_muon_steps_a_convolution_as_a_matrix() -> None:
    pytest.importorskip("tabulate")
    from learning.optimizers import MatrixMuon

    torch.manual_seed(0)
    convolution = torch.nn.Parameter(torch.randn(4, 2, 3, 3))
    matrix = torch.nn.Parameter(convolution.detach().flatten(1).clone())
    ours, theirs = MatrixMuon([convolution], lr=0.1), torch.optim.Muon([matrix], lr=0.1)
    for _ in range(2):
        convolution.grad = torch.randn(4, 2, 3, 3)
        matrix.grad = convolution.grad.flatten(1).clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(convolution.flatten(1), matrix, rtol=0, atol=0)


def compressed(text: bytes) -> bytes:
    """The output of Unix's compress for a text, without its header; the table is cleared once."""
    bits: list[int] = []

    def emit(code: int, width: int) -> None:
        bits.extend(code >> i & 1 for i in range(width))

    def restarted() -> tuple[dict[bytes, int], int]:
        return {bytes([i]): i for i in range(256)}, 257

    table, free = restarted()
    width, start, string, cleared = 9, 0, b"", False
    for position in range(len(text)):
        character = text[position : position + 1]
        if string + character in table:
            string += character
            continue
        emit(table[string], width)
        table[string + character] = free
        free += 1
        string = character
        if free > 1 << width:  # the reader is one entry behind
            width += 1
            start = len(bits)
        if not cleared and position > len(text) // 2:
            emit(bible_text.CLEAR, width)
            bits.extend([0] * (-(len(bits) - start) % (8 * width)))
            (table, free), width, start, cleared = restarted(), 9, len(bits), True
    emit(table[string], width)
    bits.extend([0] * (-len(bits) % 8))
    octets = (bits[i : i + 8] for i in range(0, len(bits), 8))
    return bytes(sum(bit << i for i, bit in enumerate(octet)) for octet in octets)


def package_of(text: bytes, window: int) -> bytes:
    """A .deb that holds `text` like bible-kjv-text, in windows of that many bytes."""
    windows = [compressed(text[i : i + window]) for i in range(0, len(text), window)]
    starts = [0x5C + 4 * (len(windows) + 1)]
    for part in windows:
        starts.append(starts[-1] + len(part))
    header = bytes(0x58) + struct.pack(f">{len(starts) + 1}I", len(windows), *starts)
    data = header + b"".join(windows)
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        member = tarfile.TarInfo(bible_text.MEMBER)
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    package = b"!<arch>\n"
    for name, content in (
        ("debian-binary", b"2.0"),
        ("data.tar.xz", lzma.compress(tar.getvalue())),
    ):
        package += f"{name:16}{0:12}{0:6}{0:6}{'100644':8}{len(content):10}`\n".encode()
        package += content + b"\n" * (len(content) % 2)
    return package


def test_the_text_is_read_from_a_package() -> None:
    generator = random.Random(0)
    words = [bytes(generator.choices(b"abcdefgh", k=generator.randint(1, 9))) for _ in range(500)]
    verses = b" ".join(generator.choices(words, k=20_000))
    data = bible_text.unpacked(package_of(b"An edition.\n" + verses, 1 << 15))
    assert bible_text.decoded(data) == verses


def test_another_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / bible_text.TEXT_NAME).write_bytes(b"Ge1:1 In the beginning")
    with pytest.raises(FileNotFoundError, match=r"bible-kjv\.txt holds another text"):
        bible_text.load_bible(tmp_path)
