"""Differentially private training: clipped gradients of single samples, and Gaussian noise (DP-SGD).

    python dp_sgd.py --noise-multiplier 1.0 --max-norm 1.0

Abadi et al. 2016, arXiv 1607.00133. Each step draws every training image with probability q = batch-size / N
and sets the gradient to (sum_i min(1, C / |g_i|) g_i + sigma C noise) / (q N). The privacy that this gives
follows from sigma, q and the number of steps; accountants such as opacus' compute it. The noise is PyTorch's
own generator, which is not cryptographically secure.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from classifiers import MODELS, evaluate, make_model
from image_data import ImageData, load_image_data
from torch import nn
from torchium import gradients
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parents[2]


def train(arguments: argparse.Namespace, data: ImageData) -> tuple[float, float, float]:
    """Train; return (loss, accuracy) on the test images, and the fraction of clipped gradients."""
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    model = make_model(arguments.model, data.image_shape).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    rate = arguments.batch_size / len(data.train_labels)
    clipped = samples = 0
    for _ in tqdm(range(arguments.steps), desc="DP-SGD"):
        (batch,) = (torch.rand(len(data.train_labels), device=device) < rate).nonzero(as_tuple=True)
        optimizer.zero_grad(set_to_none=False)
        # The sums of parts add up in .grad, so the memory does not depend on the size of the batch.
        for part in batch.split(arguments.part_size) if len(batch) else ():
            norms = gradients.clip_and_accumulate(
                model,
                nn.functional.cross_entropy,
                data.train_images[part],
                data.train_labels[part],
                arguments.max_norm,
            )
            clipped += int((norms > arguments.max_norm).sum())
            samples += len(part)
        add_noise(model, arguments.noise_multiplier * arguments.max_norm, arguments.batch_size)
        optimizer.step()
    return *evaluate(model, data.test_images, data.test_labels), clipped / max(1, samples)


def add_noise(model: nn.Module, deviation: float, batch_size: int) -> None:
    """Turns the sums in .grad into noisy means. An empty batch has noise too."""
    for p in model.parameters():
        total = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad = total.add(torch.randn_like(p), alpha=deviation).div_(batch_size)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="convnet")
    parser.add_argument("--data", choices=("auto", "fashion-mnist", "digits"), default="auto")
    parser.add_argument("--data-dir", type=Path, help="folder with the files of Fashion-MNIST")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=256, help="expected size of a batch")
    parser.add_argument("--part-size", type=int, default=256, help="samples at a time")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--max-norm", type=float, default=1.0, help="C")
    parser.add_argument("--noise-multiplier", type=float, default=1.0, help="sigma")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    data = load_image_data(
        arguments.data, arguments.data_dir, cache_dir=REPOSITORY / ".data" / "fashion-mnist"
    ).to(torch.device(arguments.device))
    loss, accuracy, clipped = train(arguments, data)
    print(
        f"{data.name}: test loss {loss:.4f}, accuracy {accuracy:.2%}, "
        f"{clipped:.1%} of the gradients clipped"
    )


if __name__ == "__main__":
    main()
