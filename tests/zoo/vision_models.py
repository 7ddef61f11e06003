"""Convolutional networks of stock layers, and networks of timm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from learnable_data import CLASSES, clusters, images
from task import Size, Task, cross_entropy, squared_error
from torch import Tensor, nn


def convnet(size: Size) -> Task:
    width, side = size.of(4, 32), size.of(8, 32)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding="same", padding_mode="reflect", groups=2),
        nn.GroupNorm(2, 2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, CLASSES),
    )
    return Task(model, images(3, side, size.of(16, 64)), cross_entropy)


def conv3d(size: Size) -> Task:
    width, side = size.of(4, 16), size.of(4, 12)
    model = nn.Sequential(
        nn.Conv3d(2, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv3d(width, 2 * width, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(CLASSES),
    )
    batches = clusters((2, side, side, side), 16)
    model(batches[0][0])  # makes the lazy layer
    return Task(model, batches, cross_entropy)


class UNet(nn.Module):
    """Two levels: down by strides, up by transposed convolutions, with a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        y = self.middle(self.down(x).relu()).relu()
        return self.last(torch.cat([x, self.up(y).relu()], 1))


def unet(size: Size) -> Task:
    """Takes the noise away from images of half planes."""
    side = size.of(8, 32)
    grid = torch.linspace(-1, 1, side)
    batches = []
    for _ in range(4):
        angle = 6.28 * torch.rand(size.of(8, 16), 1, 1, 1)
        clean = (angle.cos() * grid + angle.sin() * grid[:, None] > 0).float()
        batches.append((clean + 0.3 * torch.randn_like(clean), clean))
    return Task(UNet(size.of(4, 32)), batches, squared_error)


def resnet(size: Size) -> Task:
    models = pytest.importorskip("timm.models.resnet")
    width = size.of(4, 32)
    model = models.ResNet(
        models.BasicBlock,
        layers=(size.of(1, 2),) * 4,
        channels=(width, width, 2 * width, 2 * width),
        num_classes=CLASSES,
    )
    return Task(model, images(3, size.of(16, 64), 8), cross_entropy)


def convnext(size: Size) -> Task:
    models = pytest.importorskip("timm.models.convnext")
    width = size.of(4, 32)
    model = models.ConvNeXt(
        num_classes=CLASSES,
        depths=(1, 1, size.of(1, 3), 1),
        dims=(width, width, 2 * width, 4 * width),
        patch_size=4,
    )
    return Task(model, images(3, size.of(32, 64), 8), cross_entropy)


def vision_transformer(size: Size) -> Task:
    models = pytest.importorskip("timm.models.vision_transformer")
    side = size.of(8, 32)
    model = models.VisionTransformer(
        img_size=side,
        patch_size=4,
        num_classes=CLASSES,
        embed_dim=size.of(8, 64),
        depth=size.of(1, 2),
        num_heads=2,
    )
    return Task(model, images(3, side, 8), cross_entropy)


def efficientnet(size: Size) -> Task:
    """Depthwise convolutions, squeeze and excitation, SiLU."""
    models = pytest.importorskip("timm.models.efficientnet")
    builder = pytest.importorskip("timm.models._efficientnet_builder")
    width = size.of(4, 16)
    model = models.EfficientNet(
        builder.decode_arch_def(
            [[f"ds_r1_k3_s1_e1_c{width}_se0.25"], [f"ir_r1_k3_s2_e2_c{2 * width}_se0.25"]]
        ),
        num_classes=CLASSES,
        num_features=4 * width,
        stem_size=width,
        act_layer=nn.SiLU,
    )
    return Task(model, images(3, size.of(16, 32), 8), cross_entropy)


KINDS: dict[str, Callable[[Size], Task]] = {
    "convnet": convnet,
    "conv3d": conv3d,
    "unet": unet,
    "resnet": resnet,
    "convnext": convnext,
    "vision_transformer": vision_transformer,
    "efficientnet": efficientnet,
}
