"""Train an image classifier with one optimizer, or compare all of them with one budget.

    python train_classifier.py --optimizer shampoo --model mlp --steps 500
    python train_classifier.py --compare
    python train_classifier.py --optimizer shampoo --set lr=0.01/0.03/0.1 --set update_freq=10/100

Prints a table and writes a plot of the training loss against steps and time.
"""

from __future__ import annotations

import argparse
import ast
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchium
from classifiers import MODELS
from image_data import load_image_data
from report import result_table, save_loss_plot
from training import Budget, Result, train

REPOSITORY = Path(__file__).resolve().parents[2]
TORCH_OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}

# The best learning rates of a small grid on Fashion-MNIST (docs/choosing_and_tuning.md) and the other
# options. An optimizer that is not listed runs with its defaults.
LEARNING_RATES: dict[str, dict[str, float]] = {
    "mlp": {
        "adagrad": 0.02,
        "adahessian": 0.05,
        "adamw": 0.002,
        "sgd": 0.1,
        "kfac": 0.01,
        "naturalgradient": 6.0,
        "shampoo": 0.003,
        "shampoow": 0.004,
    },
    "convnet": {
        "adagrad": 0.04,
        "adahessian": 0.05,
        "adamw": 0.008,
        "sgd": 0.1,
        "kfac": 0.01,
        "naturalgradient": 6.0,
        "shampoo": 0.01,
        "shampoow": 0.008,
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "kfac": {"damping": 0.01, "TCov": 5, "TInv": 20},
    "naturalgradient": {"damping": 30.0, "momentum": 0.9},
    "shampoo": {"betas": (0.9, 1.0), "grafting": "adam", "update_freq": 20, "block_size": 256},
}

# In titles.
NAMES = {"mlp": "MLP", "convnet": "ConvNet", "fashion-mnist": "Fashion-MNIST", "digits": "digits"}

# Training seconds per run and the target loss, for each data set.
DEFAULT_SECONDS = {"fashion-mnist": 25.0, "digits": 5.0}
DEFAULT_TARGET = {"fashion-mnist": 0.25, "digits": 0.05}


def make_optimizer(name: str, options: dict[str, Any], params: Any) -> torch.optim.Optimizer:
    """An optimizer of torchium, or SGD or AdamW of torch.optim."""
    if name in TORCH_OPTIMIZERS:
        return TORCH_OPTIMIZERS[name](params, **options)
    return torchium.create_optimizer(name, params, **options)


def tuned_options(name: str, model: str) -> dict[str, Any]:
    """The optimizer's options unless the command line sets them."""
    rates = LEARNING_RATES[model]
    return {"lr": rates[name], **OPTIONS.get(name, {})} if name in rates else {}


def parse_setting(text: str) -> tuple[str, list[Any]]:
    """Parse "lr=0.1/0.3" to ("lr", [0.1, 0.3]). Values that are not Python literals are strings."""
    name, separator, values = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE or NAME=VALUE/VALUE/...")

    def literal(value: str) -> Any:
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value

    return name.strip(), [literal(value.strip()) for value in values.split("/")]


def planned_runs(arguments: argparse.Namespace) -> list[tuple[str, str, dict[str, Any]]]:
    """(label, optimizer, options) of each run on the command line."""
    if arguments.compare:
        names = [*torchium.get_available_optimizers(), *TORCH_OPTIMIZERS]
        return [(name, name, tuned_options(name, arguments.model)) for name in names]
    name = arguments.optimizer.lower()
    settings = dict(arguments.settings)
    runs = []
    for values in itertools.product(*settings.values()):
        chosen = dict(zip(settings, values, strict=True))
        varied = [f"{key}={value}" for key, value in chosen.items() if len(settings[key]) > 1]
        label = " ".join([name, *varied])
        runs.append((label, name, tuned_options(name, arguments.model) | chosen))
    return runs


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    known = sorted({*torchium.get_available_optimizers(), *TORCH_OPTIMIZERS})
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--optimizer", default="shampoo", type=str.lower, choices=known, help="default: shampoo"
    )
    what.add_argument(
        "--compare", action="store_true", help="run torchium's optimizers, SGD and AdamW"
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        type=parse_setting,
        metavar="NAME=VALUE[/VALUE...]",
        help="an option of --optimizer; every combination of several values is a run",
    )
    parser.add_argument("--model", choices=MODELS, default="convnet", help="default: convnet")
    parser.add_argument("--data", choices=("auto", "fashion-mnist", "digits"), default="auto")
    parser.add_argument("--data-dir", type=Path, help="folder of the .gz files of Fashion-MNIST")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--steps", type=positive(int), help="budget of a run in steps")
    budget.add_argument(
        "--seconds",
        type=positive(float),
        help="budget of a run in seconds of training (default: 25, digits: 5)",
    )
    parser.add_argument("--batch-size", type=positive(int), default=128)
    parser.add_argument("--target", type=positive(float), help="training loss to reach")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "demo", help="default: demo/")
    arguments = parser.parse_args(argv)
    if arguments.compare and arguments.settings:
        parser.error("--set belongs to --optimizer, not to --compare")
    return arguments


def positive(kind: type) -> Any:
    """A parser of positive numbers for argparse."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not positive")
        return value

    parse.__name__ = kind.__name__  # argparse's message names it
    return parse


def main(argv: list[str] | None = None) -> list[Result]:
    arguments = parse_arguments(argv)
    data = load_image_data(
        arguments.data, arguments.data_dir, cache_dir=REPOSITORY / ".data" / "fashion-mnist"
    ).to(torch.device(arguments.device))
    if arguments.steps is not None:
        budget = Budget(steps=arguments.steps)
    else:
        budget = Budget(seconds=arguments.seconds or DEFAULT_SECONDS[data.name])
    target = arguments.target or DEFAULT_TARGET[data.name]

    results = [
        train(
            label,
            arguments.model,
            data,
            partial(make_optimizer, name, options),
            budget,
            arguments.batch_size,
            arguments.seed,
        )
        for label, name, options in planned_runs(arguments)
    ]
    title = f"{NAMES[arguments.model]} on {NAMES[data.name]}, batch {arguments.batch_size}"
    plot = arguments.output / f"{arguments.model}-{data.name}.png"
    save_loss_plot(results, target, title, plot)
    print(f"\n{title}, {arguments.device}, {torch.get_num_threads()} threads")
    print(result_table(results, target))
    print(f"\nPlot: {plot}")
    return results


if __name__ == "__main__":
    main()
