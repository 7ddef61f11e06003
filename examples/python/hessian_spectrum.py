"""Watch the Hessian of an image classifier while AdamW trains it.

    python hessian_spectrum.py
    python hessian_spectrum.py --model convnet --steps 500 --images 1000

At some steps: the largest and smallest eigenvalues by Lanczos' method, and the trace by Hutch++, of the Hessian of
the loss over some training images. Prints a table and writes a plot of the spectrum.
On a CPU the defaults take some minutes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from classifiers import MODELS, make_model
from image_data import ImageData, load_image_data
from report import BLUE, VERMILION, plt
from tabulate import tabulate
from torch import nn
from torch.nn import functional as F
from torchium.linalg import hutchpp, hvp_operator, lanczos
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parents[2]
SMALLEST = 3  # eigenvalues at the other end of the spectrum
MEASUREMENTS = 6
BATCH_SIZE = 128
LEARNING_RATE = 0.002
COLUMNS = ("step", "loss", "largest eigenvalue", "10th", "smallest", "trace", "products")


def measured(
    model: nn.Module, data: ImageData, images: int, eigenvalues: int
) -> tuple[list[float], list[float], tuple[float, ...]]:
    """The ends of the Hessian's spectrum; loss, trace and the number of products."""
    x, y = data.train_images[:images], data.train_labels[:images]
    with torch.no_grad():
        loss = F.cross_entropy(model(x), y).item()
    H = hvp_operator(lambda: F.cross_entropy(model(x), y), model.parameters())
    largest = lanczos(H, eigenvalues, tol=1e-3)
    smallest = lanczos(H, SMALLEST, which="SA", tol=1e-3)
    trace = hutchpp(H, num_products=60)
    products = largest.products + smallest.products + trace.products
    values = (loss, trace.value.item(), products)
    return largest.eigenvalues.tolist(), smallest.eigenvalues.tolist(), values


def run(model: nn.Module, data: ImageData, arguments: argparse.Namespace) -> dict[int, tuple]:
    """The measurements, step by step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    interval = max(1, arguments.steps // (MEASUREMENTS - 1))
    found = {}
    for step in tqdm(range(arguments.steps + 1)):
        if step % interval == 0 or step == arguments.steps:
            found[step] = measured(model, data, arguments.images, arguments.eigenvalues)
        chosen = torch.randint(len(data.train_images), (BATCH_SIZE,))
        optimizer.zero_grad()
        F.cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen]).backward()
        optimizer.step()
    return found


def save_plot(found: dict[int, tuple], title: str, path: Path) -> None:
    _, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for step, (largest, smallest, _) in found.items():
        axes.plot([step] * len(largest), largest, "_", color=BLUE, markersize=14)
        axes.plot([step] * len(smallest), smallest, "_", color=VERMILION, markersize=14)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.axhline(0, color="black", linewidth=0.5)
    axes.set(xlabel="step", ylabel="eigenvalue of the Hessian", title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.savefig(path, dpi=150)
    plt.close()


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--data", choices=("auto", "fashion-mnist", "digits"), default="auto")
    parser.add_argument("--data-dir", type=Path, help="folder of the .gz files of Fashion-MNIST")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--images", type=int, default=500, help="of which the Hessian is taken")
    parser.add_argument("--eigenvalues", type=int, default=12, help="at least 10")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "demo", help="default: demo/")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    torch.manual_seed(arguments.seed)
    data = load_image_data(
        arguments.data, arguments.data_dir, cache_dir=REPOSITORY / ".data" / "fashion-mnist"
    ).to(torch.device(arguments.device))
    model = make_model(arguments.model, data.image_shape).to(arguments.device)
    found = run(model, data, arguments)
    rows = []
    for step, (largest, smallest, (loss, trace, products)) in found.items():
        values = [f"{value:.3g}" for value in (largest[0], largest[9], smallest[0], trace)]
        rows.append([step, f"{loss:.3f}", *values, int(products)])
    print(tabulate(rows, COLUMNS))
    path = arguments.output / f"hessian-{arguments.model}-{data.name}.png"
    save_plot(found, f"{arguments.model} on {data.name}: ends of the spectrum", path)
    print(f"Plot: {path}")


if __name__ == "__main__":
    main()
