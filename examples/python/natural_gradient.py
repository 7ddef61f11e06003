"""Train an image classifier with natural gradient, and with --adam by AdamW on the same batches too.

    python natural_gradient.py --adam
    python natural_gradient.py --model mlp --batch-size 512 --lr 12 --adam

A step solves with the Fisher matrix F of its batch: (F + damping I) d = g. The damping has the unit of F, a squared
gradient of the loss of one image. Prints a table and writes a plot of the training loss against steps and time.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from classifiers import MODELS
from image_data import load_image_data
from report import result_table, save_loss_plot
from train_classifier import DEFAULT_TARGET, make_optimizer, tuned_options
from training import Budget, Result, train

REPOSITORY = Path(__file__).resolve().parents[2]


def options_of(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """The options of a small grid on Fashion-MNIST, and those of the command line."""
    options = tuned_options(name, arguments.model)
    if name == "naturalgradient":
        given = {key: getattr(arguments, key) for key in ("lr", "damping", "momentum")}
        options |= {key: value for key, value in given.items() if value is not None}
    return options


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="convnet")
    parser.add_argument("--data", choices=("auto", "fashion-mnist", "digits"), default="auto")
    parser.add_argument("--data-dir", type=Path, help="folder of the .gz files of Fashion-MNIST")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, help="default: 6")
    parser.add_argument("--damping", type=float, help="default: 30")
    parser.add_argument("--momentum", type=float, help="default: 0.9")
    parser.add_argument("--adam", action="store_true", help="train with AdamW too")
    parser.add_argument("--target", type=float, help="training loss to reach")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "demo", help="default: demo/")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> list[Result]:
    arguments = parse_arguments(argv)
    data = load_image_data(
        arguments.data, arguments.data_dir, cache_dir=REPOSITORY / ".data" / "fashion-mnist"
    ).to(torch.device(arguments.device))
    target = arguments.target or DEFAULT_TARGET[data.name]
    results = [
        train(
            name,
            arguments.model,
            data,
            partial(make_optimizer, name, options_of(name, arguments)),
            Budget(steps=arguments.steps),
            arguments.batch_size,
            arguments.seed,
        )
        for name in ("naturalgradient", *["adamw"] * arguments.adam)
    ]
    title = f"{arguments.model} on {data.name}, batch {arguments.batch_size}"
    plot = arguments.output / f"natural-gradient-{arguments.model}-{data.name}.png"
    save_loss_plot(results, target, title, plot)
    print(f"\n{title}\n{result_table(results, target)}\n\nPlot: {plot}")
    return results


if __name__ == "__main__":
    main()
