"""Short runs of the examples, and every code block of README and the documentation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchium
from documentation import PAGES, ROOT, code_blocks, cpp_programs
from run_script import run_script

EXAMPLES = ROOT / "examples" / "python"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def run_example(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script(EXAMPLES / name, *arguments)


# One thread: the models are small, and two threads wait for each other on a busy machine.
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def in_a_process(name: str, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def checked_example(name: str, *arguments: str) -> str:
    run = run_example(name, *arguments)
    assert run.returncode == 0, run.stderr
    return run.stdout


def table_rows(output: str) -> dict[str, list[str]]:
    """The rows of the printed table: label -> its other cells."""
    rule = next(line for line in output.splitlines() if line.startswith("---"))
    rows = output.split(rule)[1].split("\n\n")[0].strip().splitlines()
    cells = [re.split(r"\s{2,}", row.strip()) for row in rows]
    return {label: rest for label, *rest in cells}


@pytest.mark.parametrize(("model", "budget", "batch"), [("mlp", 20, 128), ("convnet", 60, 64)])
def test_compare_trains_every_optimizer(
    model: str, budget: int, batch: int, tmp_path: Path
) -> None:
    output = checked_example(
        "train_classifier.py",
        *("--compare", "--data", "digits", "--device", "cpu", "--model", model),
        *("--steps", str(budget), "--batch-size", str(batch), "--target", "1.0"),
        *("--output", str(tmp_path)),
    )
    rows = table_rows(output)
    assert set(rows) == {*torchium.get_available_optimizers(), "sgd", "adamw"}
    for label, (loss, accuracy, steps, *_, steps_to_target, seconds_to_target) in rows.items():
        # An untrained network has loss log(10) = 2.3 and accuracy 10 %.
        assert float(loss) < 0.5, label
        assert float(accuracy.rstrip("%")) > 85, label
        assert int(steps) == budget
        assert 0 < int(steps_to_target) <= budget
        assert float(seconds_to_target) >= 0
    plot = tmp_path / f"{model}-digits.png"
    assert plot.read_bytes().startswith(PNG_SIGNATURE)


def test_natural_gradient_is_compared_with_adamw(tmp_path: Path) -> None:
    output = checked_example(
        "natural_gradient.py",
        *("--adam", "--data", "digits", "--device", "cpu", "--model", "mlp", "--steps", "40"),
        *("--damping", "10", "--output", str(tmp_path)),
    )
    rows = table_rows(output)
    assert list(rows) == ["naturalgradient", "adamw"]
    for loss, accuracy, steps, *_ in rows.values():
        assert float(loss) < 0.5
        assert float(accuracy.rstrip("%")) > 85
        assert int(steps) == 40
    plot = tmp_path / "natural-gradient-mlp-digits.png"
    assert plot.read_bytes().startswith(PNG_SIGNATURE)


def test_the_hessian_is_measured_during_training(tmp_path: Path) -> None:
    output = checked_example(
        "hessian_spectrum.py",
        *("--model", "convnet", "--data", "digits", "--device", "cpu", "--steps", "1"),
        *("--images", "40", "--eigenvalues", "10", "--output", str(tmp_path)),
    )
    rows = [line.split() for line in output.splitlines() if re.match(r"\s*\d+ ", line)]
    assert [row[0] for row in rows] == ["0", "1"]
    for _, loss, largest, tenth, smallest, *_ in rows:
        assert 0 < float(loss) < 4
        assert float(largest) >= float(tenth) > 0 > float(smallest)
    plot = tmp_path / "hessian-convnet-digits.png"
    assert plot.read_bytes().startswith(PNG_SIGNATURE)


def test_the_best_loss_of_sgd_is_reached_in_fewer_steps(tmp_path: Path) -> None:
    common = ("--data", "digits", "--device", "cpu", "--steps", "80", "--output", str(tmp_path))
    sgd = table_rows(checked_example("train_classifier.py", "--optimizer", "sgd", *common))
    best = sgd["sgd"][0]  # of a rate that decays to zero, the last loss
    for optimizer in ("kfac", "naturalgradient"):
        options = ("--optimizer", optimizer, "--target", best)
        rows = table_rows(checked_example("train_classifier.py", *options, *common))
        *_, steps_to_target, _ = rows[optimizer]
        assert int(steps_to_target) <= 64, optimizer


def test_settings_run_in_every_combination(tmp_path: Path) -> None:
    output = checked_example(
        "train_classifier.py",
        *("--optimizer", "Shampoo", "--set", "lr=0.01/0.02", "--set", "grafting=None/adam"),
        *("--set", "betas=(0.9,1.0)", "--data", "digits", "--device", "cpu", "--seconds", "0.2"),
        *("--output", str(tmp_path)),
    )
    assert list(table_rows(output)) == [
        "shampoo lr=0.01 grafting=None",
        "shampoo lr=0.01 grafting=adam",
        "shampoo lr=0.02 grafting=None",
        "shampoo lr=0.02 grafting=adam",
    ]


def test_same_seed_gives_the_same_losses(tmp_path: Path) -> None:
    arguments = ("--data", "digits", "--device", "cpu", "--steps", "6", "--output", str(tmp_path))
    elsewhere = table_rows(in_a_process("train_classifier.py", *arguments))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        here = table_rows(checked_example("train_classifier.py", *arguments))
    finally:
        torch.set_num_threads(threads)
    assert here["shampoo"][:2] == elsewhere["shampoo"][:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizer", "nosuch"], "invalid choice: 'nosuch'"),
        (["--compare", "--set", "lr=1"], "--set belongs to --optimizer"),
        (["--set", "lr"], "'lr' is not NAME=VALUE"),
        (["--steps", "0"], "0 is not positive"),
        (["--set", "block_size=0", "--data", "digits"], "block_size"),
        (["--data-dir", "/nowhere"], "--data-dir /nowhere lacks train-images-idx3-ubyte.gz"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str) -> None:
    run = run_example("train_classifier.py", *arguments)
    assert run.returncode != 0
    assert message in run.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--dtype", "bfloat16"],
        ["--dtype", "bfloat16", "--bf16-parameters"],
        ["--dtype", "float16", "--clip-norm", "5"],
        ["--dtype", "float16", "--clip-norm", "5", "--optimizer", "kfac", "--lr", "0.003"],
    ],
    ids=" ".join,
)
def test_amp_training_learns(arguments: list[str]) -> None:
    output = checked_example(
        "amp_training.py", "--data", "digits", "--device", "cpu", "--steps", "60", *arguments
    )
    accuracy = re.search(r"test accuracy ([\d.]+)%", output)
    assert accuracy is not None
    assert float(accuracy.group(1)) > 80


@pytest.mark.parametrize(("noise", "least"), [("0.5", 80), ("200", 0)])
def test_dp_sgd_learns_unless_noise_drowns_the_gradient(noise: str, least: float) -> None:
    output = checked_example(
        "dp_sgd.py",
        *("--data", "digits", "--device", "cpu", "--steps", "80", "--batch-size", "128"),
        *("--part-size", "48", "--noise-multiplier", noise),
    )
    accuracy, clipped = map(float, re.findall(r"([\d.]+)%", output))
    assert least <= accuracy <= (100 if least else 50)
    assert 0 < clipped <= 100


def test_a_physics_informed_network_beats_adam() -> None:
    """In float64: 1e-6 in some 50 steps, and Adam some 1e-2 in the same time, which is 15 times as many."""
    output = in_a_process(
        "poisson_pinn.py", "--width", "20", "--per-side", "20", "--target", "1e-6", "--seed", "0"
    )
    natural, adam = (float(error) for error in re.findall(r"relative error ([\d.e+-]+)", output))
    assert natural <= 1e-6
    assert adam > 1e-4


def test_poisson_in_cpp(programs: Path) -> None:
    run = subprocess.run(
        [programs, "poisson_pinn", "1e-6", "24", "30"],
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    natural, adam = map(float, re.findall(r"relative error (\S+)", run.stdout))
    assert natural <= 1e-6
    assert adam > 1e-4


def test_idx_files_are_read_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip

    monkeypatch.syspath_prepend(str(EXAMPLES))
    from image_data import read_idx

    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3]) + bytes(range(6))))
    assert torch.equal(read_idx(path), torch.arange(6, dtype=torch.uint8).view(2, 3))
    path.write_bytes(gzip.compress(bytes([0, 0, 13, 1, 0, 0, 0, 0])))
    with pytest.raises(ValueError, match="not an IDX file of unsigned bytes"):
        read_idx(path)


PAGES_WITH_PYTHON = [
    pytest.param(page, id=str(page.relative_to(ROOT)))
    for page in PAGES
    if code_blocks(page, "python")
]


# Some recipes need packages that the tests do not install.
OPTIONAL = {"accelerate", "lightning"}


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in code_blocks(page, "python"):
        for package in OPTIONAL & set(re.findall(r"^(?:from|import) (\w+)", block, re.MULTILINE)):
            pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(code_blocks(page, "python"), start=1):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("name", cpp_programs())
def test_cpp_blocks_run(name: str, programs: Path, tmp_path: Path) -> None:
    run = subprocess.run(
        [programs, name], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stdout + run.stderr
