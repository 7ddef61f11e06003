"""One step of Shampoo on a CUDA device: time, memory, launches, and the cost of its parts.

Compared with AdamW, and with other implementations from PyPI if installed (pytorch-optimizer,
ista-daslab-optimizers). All optimizers step the same parameters with the same gradients: ours and AdamW in
turns, then the others one at a time. If roots are computed every tenth step, a row shows a step with roots,
one without, and the mean.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from shared.common import Report
from shared.device_clock import Clock
from step_parts.contestants import contestants
from step_parts.costs import Rates, iterations, needed
from step_parts.profile import SHARES
from step_parts.race import Entry, race
from step_parts.shapes import MODELS, TINY_MODELS, Gradients, Model
from step_parts.targets import check_targets

FAMILIES = ("ours", "adamw", "pytorch-optimizer", "dash")
EXPONENTS = (1.0, 2.0)  # of the gradients' spectra
GB = 1e9


def gigabytes(count: float | None) -> float | None:
    return None if count is None else count / GB


def times_table(report: Report, model: Model, entries: list[Entry]) -> None:
    rows = []
    for entry in entries:
        contestant = entry.contestant
        by_time = sorted(entry.profiles, key=lambda p: p.total_ms)  # the first has no roots
        row = [contestant.name, "yes" if contestant.tf32 else "no", f"i^-{contestant.exponent:g}"]
        row += [*entry.times(), gigabytes(entry.state), gigabytes(entry.peak)]
        row += [f"{p.calls} / {p.kernels}" if p.calls else None for p in by_time]
        row += [None] * (2 - len(by_time))
        rows.append([*row, len(entry.rounds), entry.note])
    headers = ["optimizer", "TF32", "spectrum", "ms per step", "with roots", "without roots"]
    headers += ["state GB", "peak GB", "calls / kernels", "with roots due"]
    report.table(
        f"{model.name}: {len(model.shapes)} parameters, {model.parameters / 1e6:.1f} M elements",
        [*headers, "rounds", "note"],
        rows,
    )


def shares_table(
    report: Report, model: Model, entries: list[Entry], rates: Rates, gradients: Gradients
) -> None:
    """For our eager steps: kernel time by range, and the least that the device needs for it."""
    rows = []
    for entry in entries:
        contestant = entry.contestant
        if not contestant.is_ours or "graphs" in contestant.name or not entry.profiles:
            continue
        with_roots = contestant.cycle == 1
        found = min(entry.profiles, key=lambda p: p.total_ms)
        if found.total_ms == 0.0:
            report.write(f"{contestant.name}: the profiler saw no kernels.")
            continue
        costs = needed(model, iterations(gradients, model, contestant.exponent))
        if not with_roots:
            del costs["roots"]
        setting = f"TF32 {'yes' if contestant.tf32 else 'no'}, i^-{contestant.exponent:g}, "
        setting += "roots due" if with_roots else "no roots due"
        for share in SHARES:
            ms = found.ms[share]
            row = [setting, share, ms, 100 * ms / found.total_ms, found.launched[share]]
            if cost := costs.get(share):
                # Roots have the same accuracy in either setting, by split fp16 products.
                tflops = rates.fp16 if share == "roots" else rates.products(contestant.tf32)
                roof = rates.milliseconds(cost.operations, cost.bytes, tflops)
                row += [cost.operations * 1e-9, cost.bytes / GB, roof]
                row += [100 * roof / ms if ms else None]
            rows.append(row)
        rows.append([setting, "all", found.total_ms, 100.0, found.kernels])
    if rows:
        headers = ["setting", "part", "ms", "%", "kernels"]
        headers += ["G operations", "GB", "ms at the roofline", "% of the roofline"]
        report.table(f"{model.name}: time of the kernels of a step, by its parts", headers, rows)


def measure(
    report: Report, key: str, model: Model, arguments: argparse.Namespace, rates: Rates
) -> None:
    clock = Clock(arguments.device, arguments.rounds)
    gradients = Gradients(model, EXPONENTS, arguments.device)
    families = arguments.families
    if key not in arguments.peer_models:
        families = [family for family in families if family in ("ours", "adamw")]
    entries = []
    for group in contestants(model, families):
        of_group = [Entry(contestant, gradients, clock) for contestant in group]
        race(of_group, arguments.rounds, arguments.seconds)
        entries += of_group
    times_table(report, model, entries)
    shares_table(report, model, entries, rates, gradients)
    check_targets(report, key, entries)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--peer-models", nargs="*", default=["llama-103m"], choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="of one optimizer on one model, about"
    )
    parser.add_argument("--save", type=Path, help="write the tables to this file")
    parser.add_argument("--tiny", action="store_true", help="small models: smoke test")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    is_cuda = arguments.device != "cpu"
    report = Report(f"Steps on {torch.cuda.get_device_name() if is_cuda else 'a CPU'}")
    rates = Rates.measure(Clock(arguments.device, arguments.rounds))
    report.write(
        f"Measured in this run: memory {rates.memory:.0f} GB/s (a copy); products of order 8192 in "
        f"fp16 {rates.fp16:.3g}, TF32 {rates.tf32:.3g}, float32 {rates.float32:.3g} TFLOP/s."
    )
    models = TINY_MODELS if arguments.tiny else MODELS
    for key in arguments.models:
        measure(report, key, models[key], arguments, rates)
    missed = report.finish(arguments.save)
    return 0 if arguments.tiny else missed


if __name__ == "__main__":
    sys.exit(main())
