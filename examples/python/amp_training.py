"""Mixed precision with torchium: autocast, GradScaler and channels_last, on a GPU or a CPU.

    python amp_training.py                      # bfloat16 autocast
    python amp_training.py --dtype float16      # float16 autocast with a GradScaler
    python amp_training.py --bf16-parameters    # parameters in bfloat16, optimizer state in float32

The forward and backward pass run in 16 bits, the optimizer in float32. Trains the ConvNet of
train_classifier.py and prints the loss.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torchium
from classifiers import evaluate, make_model
from image_data import ImageData, load_image_data
from torch import nn
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parents[2]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def train(arguments: argparse.Namespace, data: ImageData) -> tuple[float, float]:
    """Train and return (loss, accuracy) on the test images."""
    device = torch.device(arguments.device)
    torch.manual_seed(arguments.seed)
    # channels_last: the channels of a pixel are contiguous for convolutions.
    model = make_model("convnet", data.image_shape).to(device, memory_format=torch.channels_last)
    if arguments.bf16_parameters:
        model.bfloat16()
    optimizer = torchium.create_optimizer(arguments.optimizer, model.parameters(), lr=arguments.lr)
    # float16 has a small range: the scaler multiplies the loss so that gradients do not underflow, and skips
    # steps whose gradients overflow. bfloat16 has float32's range and needs none.
    scaler = torch.amp.GradScaler(device.type, enabled=arguments.dtype == "float16")
    if arguments.optimizer in ("kfac", "naturalgradient"):
        optimizer.grad_scaler = scaler  # for unscale_(), which leaves the captured gradients scaled
    generator = torch.Generator().manual_seed(arguments.seed)

    def autocast() -> torch.autocast:
        return torch.autocast(device.type, dtype=DTYPES[arguments.dtype])

    bar = tqdm(range(arguments.steps), desc=f"{arguments.optimizer} {arguments.dtype}")
    for _ in bar:
        chosen = torch.randint(
            len(data.train_labels), (arguments.batch_size,), generator=generator
        ).to(device)
        images = data.train_images[chosen].contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with autocast():
            loss = nn.functional.cross_entropy(model(images), data.train_labels[chosen])
        scaler.scale(loss).backward()
        if arguments.clip_norm is not None:
            scaler.unscale_(optimizer)  # clip the true gradients, not the scaled ones
            nn.utils.clip_grad_norm_(model.parameters(), arguments.clip_norm)
        scaler.step(optimizer)
        scaler.update()
        bar.set_postfix(loss=f"{loss.item():.4f}", scale=scaler.get_scale())
    with autocast():
        return evaluate(model, data.test_images, data.test_labels)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of autocast")
    parser.add_argument("--bf16-parameters", action="store_true")
    parser.add_argument(
        "--optimizer", default="shampoo", choices=torchium.get_available_optimizers()
    )
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--clip-norm", type=float, help="clip gradients to this norm")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--data", choices=("auto", "fashion-mnist", "digits"), default="auto")
    parser.add_argument("--data-dir", type=Path, help="folder of the .gz files of Fashion-MNIST")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(argv)
    if arguments.bf16_parameters and arguments.dtype != "bfloat16":
        parser.error("--bf16-parameters goes with --dtype bfloat16")
    return arguments


def main(argv: list[str] | None = None) -> tuple[float, float]:
    arguments = parse_arguments(argv)
    data = load_image_data(
        arguments.data, arguments.data_dir, cache_dir=REPOSITORY / ".data" / "fashion-mnist"
    ).to(torch.device(arguments.device))
    loss, accuracy = train(arguments, data)
    print(f"{data.name}: test loss {loss:.4f}, test accuracy {accuracy:.2%}")
    return loss, accuracy


if __name__ == "__main__":
    main()
