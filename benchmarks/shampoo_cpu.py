"""Shampoo on a CPU against its matrix products alone, LAPACK, and other implementations."""

from __future__ import annotations

import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torchium
from shared.common import (
    Report,
    interleaved,
    load_from_index,
    median_ratio,
    parse_arguments,
    result_file,
)
from torch import Tensor, nn

NEVER = 10**9  # as update_freq: after 128 steps roots are due only at 160, 192, ...
BATCHES = 8
OLD = "torchium 0.1.5"


class Workload:
    """The MLP 784-512-512-10 with gradients of a few batches of 128, used in turn."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
        )
        self.gradients = []
        for _ in range(BATCHES):
            x, y = torch.randn(128, 784), torch.randint(10, (128,))
            loss = nn.functional.cross_entropy(self.model(x), y)
            self.gradients.append(torch.autograd.grad(loss, list(self.model.parameters())))

    @property
    def weights(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.dim() == 2]

    def optimizer(
        self, make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
        """An optimizer with its own copy of the parameters, and a function that sets their gradients."""
        params = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        batches = itertools.cycle(self.gradients)

        def feed() -> None:
            for p, g in zip(params, next(batches), strict=True):
                p.grad = g.clone()  # some optimizers write into it

        return make_optimizer(params), feed


def blocks(shape: Iterable[int], block_size: int) -> Iterable[tuple[int, ...]]:
    """Shapes of all blocks of a matrix."""
    cut = [[min(block_size, n - a) for a in range(0, n, block_size)] for n in shape]
    return itertools.product(*cut)


def bare_products(weights: list[Tensor], block_size: int) -> dict[str, Callable[[], None]]:
    """The matrix products of one step alone, blocks of one shape as one batch.

    "statistics": G G^T and G^T G in full; "directions": L G and (L G) R.
    """
    shapes = Counter(s for w in weights for s in blocks(w.shape, block_size))
    batches = []
    for (m, n), count in shapes.items():
        G = torch.randn(count, m, n)
        outputs = [torch.empty(count, *s) for s in ((m, m), (n, n), (m, n), (m, n))]
        batches.append((G, torch.randn(count, m, m), torch.randn(count, n, n), *outputs))

    def statistics_products() -> None:
        for G, _, _, left, right, _, _ in batches:
            torch.bmm(G, G.mT, out=left)
            torch.bmm(G.mT, G, out=right)

    def direction_products() -> None:
        for G, L, R, _, _, half, direction in batches:
            torch.bmm(L, G, out=half)
            torch.bmm(half, R, out=direction)

    return {"statistics": statistics_products, "directions": direction_products}


def factors_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [
        value.clone()
        for state in optimizer.state.values()
        for key, value in state.items()
        if key.startswith("statistics")
    ]


def against_bare_products(report: Report, work: Workload, rounds: int) -> None:
    rows = []
    for block_size in (1024, 256):
        products = bare_products(work.weights, block_size)
        for product in products.values():
            product()

        def shampoo(update_freq: int, block_size: int = block_size):
            return work.optimizer(
                lambda ps: torchium.Shampoo(ps, update_freq=update_freq, block_size=block_size)
            )

        plain, feed = shampoo(NEVER)
        for _ in range(128):  # the next roots are not due within 31 rounds
            feed()
            plain.step()
        t = interleaved({"step": plain.step, **products}, min(rounds, 31), {"step": feed})
        bare = [s / 2 + d for s, d in zip(t["statistics"], t["directions"], strict=True)]
        no_roots = [block_size, *medians(t["step"], bare), median_ratio(t["step"], bare)]

        due, feed = shampoo(1)
        feed()
        due.step()
        factors = factors_of(plain)
        lapack = {"eigh": lambda factors=factors: [torch.linalg.eigh(f) for f in factors]}
        t = interleaved(
            {"step": due.step, **products, **lapack}, max(3, rounds // 3), {"step": feed}
        )
        bare = [
            s / 2 + d + e
            for s, d, e in zip(t["statistics"], t["directions"], t["eigh"], strict=True)
        ]
        with_roots = [*medians(t["step"], bare), median_ratio(t["step"], bare)]
        rows.append(no_roots + with_roots)
        if block_size == 1024:
            report.check("step without roots due / its bare products", no_roots[-1], 1.3)
            report.check("step with roots due / bare products + LAPACK eigh", with_roots[-1], 1.15)
    report.table(
        "One step of the MLP, ms",
        ["block_size", "no roots", "products", "ratio", "roots due", "products + eigh", "ratio"],
        rows,
    )


def medians(*seconds: list[float]) -> list[float]:
    """Medians in milliseconds."""
    return [1e3 * statistics.median(s) for s in seconds]


def step_times(work: Workload, makers: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step of each optimizer after its first."""
    steps, feeds = {}, {}
    for name, make in makers.items():
        optimizer, feeds[name] = work.optimizer(make)
        feeds[name]()
        optimizer.step()
        steps[name] = optimizer.step
    return interleaved(steps, rounds, feeds)


def never_after_the_first(make: Callable, attribute: str) -> Callable:
    """An optimizer that computes roots only in its first step."""

    def made(params):
        optimizer = make(params)
        optimizer.register_step_post_hook(lambda *_: setattr(optimizer, attribute, NEVER))
        return optimizer

    return made


def competitors(report: Report) -> dict[str, tuple[Callable, Callable, dict[str, object]]]:
    """name -> (optimizer without roots due, optimizer with roots due, our equivalent options)."""
    found = {}
    try:
        old = load_from_index("torchium==0.1.5", "torchium", "torchium_0_1_5")
        found[OLD] = (
            lambda ps: old.Shampoo(ps, update_freq=NEVER),
            lambda ps: old.Shampoo(ps, update_freq=1),
            {},
        )
    except RuntimeError as error:
        report.skip(f"faster than {OLD}", str(error).splitlines()[0])
    try:
        import pytorch_optimizer
    except ImportError:
        report.skip("faster than pytorch-optimizer", "pip install pytorch-optimizer")
        return found
    found["pytorch-optimizer Shampoo"] = (
        never_after_the_first(pytorch_optimizer.Shampoo, "preconditioning_compute_steps"),
        pytorch_optimizer.Shampoo,
        {"preconditioner_1d": "full"},
    )

    def scalable(ps):
        return pytorch_optimizer.ScalableShampoo(
            ps, block_size=1024, start_preconditioning_step=1, preconditioning_compute_steps=1
        )

    found["pytorch-optimizer ScalableShampoo"] = (
        never_after_the_first(scalable, "preconditioning_compute_steps"),
        scalable,
        {"preconditioner_1d": "full", "grafting": "sgd", "momentum": 0.9, "nesterov": True},
    )
    return found


def against_others(report: Report, work: Workload, rounds: int) -> None:
    rows = []
    for name, (without_roots, with_roots, options) in competitors(report).items():
        ours = {"": {}, ", block_size=256": {"block_size": 256}}

        def makers(update_freq, theirs, options=options, ours=ours):
            return {"theirs": theirs} | {
                label: lambda ps, o=o: torchium.Shampoo(ps, update_freq=update_freq, **options, **o)
                for label, o in ours.items()
            }

        plain = step_times(work, makers(NEVER, without_roots), 30)
        regular = [i for i in range(30) if (i + 2) & (i + 1)]  # steps 2, 4, 8, ... are due
        plain = {k: [v[i] for i in regular] for k, v in plain.items()}
        due = step_times(work, makers(1, with_roots), max(3, rounds // 3))
        ms = {k: medians(plain[k], due[k]) for k in plain}

        def mean(label, update_freq, ms=ms):
            without, with_roots = ms[label]
            return (with_roots + (update_freq - 1) * without) / update_freq

        for label, target in zip(ours, (1.0, 0.5), strict=True):
            ratio = median_ratio(due[label], due["theirs"])
            report.check(f"step with roots due{label} / {name}", ratio, target)
            if name == OLD:
                continue  # its other steps are plain SGD
            ratio = median_ratio(plain[label], plain["theirs"])
            report.check(f"step without roots due{label} / {name}", ratio, target)
        for label in ms:
            shown = name if label == "theirs" else f"torchium{label}"
            rows.append([shown, *ms[label], mean(label, 10), mean(label, 100)])
    report.table(
        "Others on the same MLP, ms (torchium rows: options equal to those of the row above them)",
        ["optimizer", "no roots", "roots due", "mean, every 10", "mean, every 100"],
        rows,
    )
    report.write(
        f"A step of {OLD} without roots due is plain SGD with statistics: it applies no "
        "preconditioner, so only its steps with roots due are compared."
    )


# Distributed Shampoo's times where the targets were set, and the targets: ms of a step with roots due and of
# one without.
DISTRIBUTED_SHAMPOO_MS = (156.0, 15.6)
TARGET_MS = (95.0, 12.0)


def against_distributed_shampoo(report: Report, work: Workload, rounds: int) -> None:
    """Blocks of 256, Adam grafting, averaged gradients, one thread.

    Distributed Shampoo has full matrices for biases too; ours are diagonal by default.
    """
    options = {"lr": 1e-3, "betas": (0.9, 0.999)}
    ours = {"block_size": 256, "grafting": "adam", "eps": 1e-12}

    def shampoo(update_freq: int) -> dict[str, Callable]:
        return {
            label: lambda ps, rule=rule: torchium.Shampoo(
                ps, update_freq=update_freq, preconditioner_1d=rule, **options, **ours
            )
            for label, rule in (("torchium", "full"), ("torchium, diagonal rule", "diagonal"))
        }

    with_roots, without = shampoo(1), shampoo(NEVER)
    try:
        from distributed_shampoo import AdamPreconditionerConfig, DistributedShampoo
    except ImportError:
        report.skip(
            "faster than Distributed Shampoo",
            "put a copy of github.com/facebookresearch/optimizers on PYTHONPATH",
        )
    else:

        def theirs(ps):
            return DistributedShampoo(
                ps,
                **options,
                epsilon=1e-12,
                max_preconditioner_dim=256,
                precondition_frequency=1,
                start_preconditioning_step=1,
                grafting_config=AdamPreconditionerConfig(beta2=0.999, epsilon=1e-8),
            )

        def theirs_without(ps):
            optimizer = theirs(ps)
            (group,) = optimizer.param_groups
            optimizer.register_step_post_hook(
                lambda *_: group.__setitem__("precondition_frequency", NEVER)
            )
            return optimizer

        with_roots["Distributed Shampoo"] = theirs
        without["Distributed Shampoo"] = theirs_without
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    due = step_times(work, with_roots, max(3, rounds // 3))
    plain = step_times(work, without, 30)
    torch.set_num_threads(threads)
    regular = [i for i in range(30) if (i + 2) & (i + 1)]  # steps 2, 4, 8, ... are due
    plain = {name: [seconds[i] for i in regular] for name, seconds in plain.items()}
    report.table(
        "MLP 784-512-512-10, blocks of 256, Adam grafting, one thread, ms",
        ["optimizer", "roots due", "no roots"],
        [[name, *medians(due[name], plain[name])] for name in due],
    )
    if "Distributed Shampoo" in due:
        for what, t, theirs_ms, target_ms in zip(
            ("with", "without"), (due, plain), DISTRIBUTED_SHAMPOO_MS, TARGET_MS, strict=True
        ):
            ratio = median_ratio(t["torchium"], t["Distributed Shampoo"])
            target = round(target_ms / theirs_ms, 2)
            report.check(f"step {what} roots due, one thread / Distributed Shampoo", ratio, target)


def large_embedding(report: Report, rounds: int) -> None:
    """Embedding(50000, 768), which is not preconditioned."""
    makers = {
        "Shampoo.from_adamw": torchium.Shampoo.from_adamw,
        "AdamW fused": partial(torch.optim.AdamW, fused=True),
        "AdamW foreach": partial(torch.optim.AdamW, foreach=True),
    }
    steps = {}
    for name, make in makers.items():
        p = nn.Parameter(torch.randn(50000, 768))
        p.grad = torch.randn_like(p)
        optimizer = make([p])
        optimizer.step()
        steps[name] = optimizer.step
        if name == "Shampoo.from_adamw":
            state = sum(value.nbytes for value in optimizer.state[p].values()) / p.nbytes
    t = interleaved(steps, min(rounds, 15))
    for name in list(makers)[1:]:
        ratio = median_ratio(t["Shampoo.from_adamw"], t[name])
        report.check(f"Embedding(50000, 768): from_adamw / {name}", ratio, 2.0)
    report.check("Embedding(50000, 768): state / parameter", state, 3.2)
    report.table("Embedding(50000, 768), ms per step", list(makers), [medians(*t.values())])


def main() -> int:
    arguments = parse_arguments(__doc__)
    report = Report("Shampoo on a CPU")
    work = Workload()
    against_bare_products(report, work, arguments.rounds)
    large_embedding(report, arguments.rounds)
    against_others(report, work, arguments.rounds)
    against_distributed_shampoo(report, work, arguments.rounds)
    return report.finish(result_file("shampoo_cpu", arguments))


if __name__ == "__main__":
    sys.exit(main())
