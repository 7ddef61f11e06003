"""A character Transformer on the King James Bible."""

from __future__ import annotations

import torch
from networks.transformer_model import Shape, Transformer
from torch import Tensor, nn

from learning.optimizers import ADAMW_OPTIONS, against_adamw
from learning.task import Settings, Targets, Task

VALIDATION_SHARE = 0.1
VALIDATION_BATCH = 256


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross entropy in nats per character; with bfloat16 products on a CUDA device."""
    # Without autocast's weight cache, which a captured graph could not refresh.
    with torch.autocast(x.device.type, torch.bfloat16, x.is_cuda, cache_enabled=False):
        logits = model(x)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())


class TransformerTask(Task):
    """The last tenth of a text is for validation, the rest for training.

    The index of an example is the start of its sequence.
    """

    name = "transformer"
    title = "A character Transformer"
    loss_unit = "nats per character"
    settings = Settings(batch=64)
    grids = against_adamw(5e-4, 1e-3, 2e-3, 4e-3)
    targets = (Targets("Shampoo-10", steps=0.6, seconds=0.85, optimizer_ms=3.0),)

    def __init__(self, text: bytes, shape: Shape, device: str) -> None:
        symbols, characters = torch.frombuffer(bytearray(text), dtype=torch.uint8).unique(
            return_inverse=True
        )
        self.symbols, self.shape = len(symbols), shape
        split = round((1 - VALIDATION_SHARE) * len(characters))
        characters = characters.to(device)
        self.device = characters.device
        self.training, self.validation = characters[:split], characters[split:]

    def model(self) -> Transformer:
        return Transformer(self.symbols, self.shape)

    def hidden(self, model: nn.Module) -> list[nn.Parameter]:
        assert isinstance(model, Transformer)
        return model.hidden_matrices()

    def draw(self, steps: int, batch: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        last = len(self.training) - self.shape.context - 1
        return torch.randint(last + 1, (steps, batch), generator=generator).to(self.device)

    def loss(self, model: nn.Module, places: Tensor) -> Tensor:
        """The loss of the characters that follow each character of the sequences."""
        offsets = torch.arange(self.shape.context + 1, device=places.device)
        sequences = self.training[places[:, None] + offsets]
        return loss_of(model, sequences[:, :-1], sequences[:, 1:])

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        """On the whole validation text, cut into sequences without overlap."""
        context = self.shape.context
        count = (len(self.validation) - 1) // context
        x = self.validation[: count * context].view(count, context)
        y = self.validation[1 : count * context + 1].view(count, context)
        parts = zip(x.split(VALIDATION_BATCH), y.split(VALIDATION_BATCH), strict=True)
        losses = torch.stack([loss_of(model, a, b) * len(a) for a, b in parts])
        return float(losses.sum() / count), None

    def describe(self, settings: Settings) -> str:
        shape = self.shape
        parameters = sum(p.numel() for p in self.model().parameters())
        precision = "bfloat16 autocast" if self.device.type == "cuda" else "no autocast"
        return (
            f"{shape.layers} layers, width {shape.width}, {parameters / 1e6:.3g} M parameters; "
            f"{settings.batch} sequences of {shape.context} characters per step; {precision}. "
            f"{len(self.training):,} characters to train on, {len(self.validation):,} to validate "
            f"on. Muon takes the matrices between the embeddings and the head. {ADAMW_OPTIONS}"
        )
