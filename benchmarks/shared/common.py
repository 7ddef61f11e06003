"""Timing, tables and checks shared by all benchmarks."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[2]

clock: Callable[[], float] = time.perf_counter


def waits(device: str, function: Callable[[], object]) -> Callable[[], object]:
    """The function, and the end of its work on the device."""

    def call() -> object:
        result = function()
        if device == "cuda":
            torch.cuda.synchronize()
        return result

    return call


def repeated(function: Callable[[], object], times: int) -> Callable[[], None]:
    def call() -> None:
        for _ in range(times):
            function()

    return call


def interleaved(
    functions: dict[str, Callable[[], object]],
    rounds: int,
    prepare: dict[str, Callable[[], object]] | None = None,
) -> dict[str, list[float]]:
    """Seconds of every function in every round, by the clock that --cpu-time selects.

    Each round runs all functions once, so a slow or fast phase of the machine affects all of them, in a
    different order, because the previous function determines the state of memory and caches. `prepare[name]`
    runs before its function, untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    shuffle = random.Random(0).sample
    for _ in range(rounds):
        for name in shuffle(list(functions), len(functions)):
            if prepare and name in prepare:
                prepare[name]()
            start = clock()
            functions[name]()
            seconds[name].append(clock() - start)
    return seconds


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over rounds of the ratio within a round."""
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(a / b for a, b in pairs)


@dataclass
class Report:
    """Tables and checks of one benchmark, printed immediately and saved on request."""

    title: str
    lines: list[str] = field(default_factory=list)
    checks: list[list[str]] = field(default_factory=list)
    missed: int = 0
    is_quiet: bool = False  # prints nothing

    def __post_init__(self) -> None:
        self.write(f"# {self.title}\n\n{machine()}\n")

    def write(self, text: str) -> None:
        if not self.is_quiet:
            print(text, flush=True)
        self.lines.append(text)

    def table(
        self,
        title: str,
        headers: Sequence[str],
        rows: Sequence[Sequence[object]],
        floatfmt: str = ".3g",
    ) -> None:
        body = tabulate(rows, headers, tablefmt="github", floatfmt=floatfmt)
        self.write(f"\n## {title}\n\n{body}\n")

    def check(self, what: str, ratio: float, at_most: float) -> None:
        passed = ratio <= at_most
        self.missed += not passed
        verdict = "pass" if passed else "MISS"
        self.checks.append([what, f"{ratio:.3f}", f"<= {at_most:g}", verdict])

    def skip(self, what: str, why: str) -> None:
        self.checks.append([what, "-", "-", f"not measured: {why}"])

    def finish(self, save_as: Path | None) -> int:
        """Print the checks; return the number of missed targets."""
        if self.checks:
            self.table("Targets", ["what", "ratio", "target", "result"], self.checks)
        if save_as is not None:
            save_as.parent.mkdir(parents=True, exist_ok=True)
            save_as.write_text("\n".join(self.lines))
        return self.missed


def machine() -> str:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        names = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    blas = "MKL" if torch.backends.mkl.is_available() else "OpenBLAS or other"
    return (
        f"{cpu}, {torch.get_num_threads()} threads, torch {torch.__version__}, {blas}, "
        f"{'CPU' if clock is time.thread_time else 'wall'} time, {time.strftime('%Y-%m-%d')}"
    )


def parse_arguments(description: str, *, device: bool = False) -> argparse.Namespace:
    """The arguments of all benchmarks; with `device` also --device and --tiny."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--save", action="store_true", help="write the tables to benchmarks/results/*.md"
    )
    parser.add_argument("--threads", type=int, help="threads of torch (default: torch's own)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each timing")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread and its CPU seconds instead of wall time, for a machine that is busy",
    )
    if device:
        parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        parser.add_argument("--tiny", action="store_true", help="small sizes, to try it out")
    arguments = parser.parse_args()
    if arguments.cpu_time:
        global clock
        clock, arguments.threads = time.thread_time, 1
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    return arguments


def result_file(name: str, arguments: argparse.Namespace) -> Path | None:
    return ROOT / "benchmarks" / "results" / f"{name}.md" if arguments.save else None


def load_from_index(requirement: str, package: str, alias: str) -> ModuleType:
    """Install `requirement` into a separate folder and import its `package` as `alias`.

    The alias allows timing an older package of the same name in one process. Raises RuntimeError if it cannot
    be installed.
    """
    folder = ROOT / ".cache" / "benchmarks" / requirement
    if not (folder / package).is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        done = subprocess.run(
            [*command, "--target", str(folder), requirement], capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"pip could not install {requirement}: {done.stderr.strip()}")
    spec = importlib.util.spec_from_file_location(
        alias,
        folder / package / "__init__.py",
        submodule_search_locations=[str(folder / package)],
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    with contextlib.redirect_stdout(io.StringIO()):  # it prints a greeting on import
        spec.loader.exec_module(module)
    return module
