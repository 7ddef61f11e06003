"""Targets for steps of Shampoo on one H200, with the times of other implementations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shared.common import Report

from step_parts.race import Entry

EVERY_STEP, EVERY_TENTH = "torchium Shampoo, every 1", "torchium Shampoo, every 10"
# The settings of the targets, and those of Shampoo.from_adamw, which has more state.
SETTINGS = {
    "no averages": (
        "torchium Shampoo, no averages, every 1",
        "torchium Shampoo, no averages, every 10",
    ),
    "from_adamw": (EVERY_STEP, EVERY_TENTH),
}
GRAPHS = "torchium Shampoo, every 10, CUDA graphs"
FUSED = "AdamW fused"
MOST_OVER_ADAMW = 5.0  # a captured step without roots, on models dominated by launches


@dataclass(frozen=True)
class Target:
    """For the model of 103 M elements, blocks of 1024."""

    what: str
    others: str  # measured on an H200 too, but not in this run
    value: float
    stretch: float


TARGETS = (
    Target(
        "ms, roots every step",
        "DASH fp16 66.8 (root error 1e-2 to 1e-1), DASH TF32 85.9, pytorch_optimizer 1120, "
        "Distributed Shampoo eigh 2459",
        33,
        26,
    ),
    Target("ms, mean with roots every 10 steps", "Distributed Shampoo about 260", 8, 6),
    Target("ms, no roots due", "Distributed Shampoo 17.7", 5, 3.5),
    Target("GB of state", "Distributed Shampoo 1.72, DASH 3.46", 1.70, 1.25),
    Target("GB at the peak", "Distributed Shampoo 3.37, DASH 9.35", 2.5, 1.8),
)


def find(entries: Sequence[Entry], name: str, tf32: bool) -> Entry | None:
    """The result with this name and the slowest decay of gradients."""
    found = [e for e in entries if (e.contestant.name, e.contestant.tf32) == (name, tf32)]
    return min(found, key=lambda e: e.contestant.exponent) if found else None


def check_targets(report: Report, key: str, entries: Sequence[Entry]) -> None:
    if key == "llama-103m":
        against_table(report, entries)
    if key in ("resnet-50", "mlp"):
        against_adamw(report, key, entries)


def against_table(report: Report, entries: Sequence[Entry]) -> None:
    rows = []
    for (settings, names), tf32 in itertools.product(SETTINGS.items(), (False, True)):
        every_step, tenth = (find(entries, name, tf32) for name in names)
        if every_step is None or tenth is None:
            continue
        mean, _, without = tenth.times()
        values = [every_step.times()[0], mean, without]
        if settings == "no averages":
            values += [None if b is None else b * 1e-9 for b in (tenth.state, tenth.peak)]
        for target, value in zip(TARGETS, values, strict=False):
            products = "TF32" if tf32 else "every product float32-accurate"
            what = f"103 M, {settings}, {products}: {target.what}"
            verdict = None
            if value is None:
                report.skip(what, "no value")
            else:
                report.check(f"{what} / {target.value:g}", value / target.value, 1.0)
                verdict = "met" if value <= target.value else "missed"
                verdict = "stretch target met" if value <= target.stretch else verdict
            row = [target.what, settings, products, target.others, value]
            rows.append([*row, target.value, target.stretch, verdict])
    headers = [
        "what",
        "settings",
        "products",
        "others",
        "ours",
        "target",
        "stretch target",
        "result",
    ]
    report.table("The model of 103 M against its targets", headers, rows)


def against_adamw(report: Report, key: str, entries: Sequence[Entry]) -> None:
    for tf32 in (False, True):
        setting = "TF32" if tf32 else "float32"
        what = f"{key}, {setting}: captured step without roots / fused AdamW"
        ours, adamw = find(entries, GRAPHS, tf32), find(entries, FUSED, False)
        without = ours.times()[2] if ours else None
        base = adamw.times()[0] if adamw else None
        if without is None or base is None:
            report.skip(what, (ours.note if ours else "") or "no value")
        else:
            report.check(what, without / base, MOST_OVER_ADAMW)
