"""Models of the benchmarks of curvature: a perceptron, small and large convolutions, Transformer blocks."""

from __future__ import annotations

from torch import Tensor, nn


def mlp(tiny: bool = False, width: int = 1024) -> nn.Module:
    width = 32 if tiny else width
    return nn.Sequential(
        *(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
        nn.Linear(width, 10),
    )


def convnet(tiny: bool = False) -> nn.Module:
    a, b, c = (4, 8, 8) if tiny else (64, 128, 256)
    return nn.Sequential(
        *(nn.Conv2d(3, a, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(a, b, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.Conv2d(b, c, 3, padding=1, stride=2), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10)),
    )


def normalized(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    """The residual block of ResNet-50 (He et al. 2016), with the stride in its 3 x 3 convolution."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.first = normalized(inputs, width, 1)
        self.second = normalized(width, width, 3, stride)
        self.third = normalized(width, outputs, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else normalized(inputs, outputs, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.second(self.relu(self.first(x))))
        return self.relu(self.third(y) + self.shortcut(x))


def resnet50() -> nn.Module:
    """25.6 million parameters, 53 convolutions and one linear layer; images of 224 x 224."""
    layers = [normalized(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    inputs = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, width, 2 if block == 0 and stage > 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class TransformerBlock(nn.Module):
    """A block of GPT-2 (Radford et al. 2019): attention and a perceptron, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.attention(self.first_norm(x)).chunk(3, dim=-1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).flatten(-2))
        return x + self.perceptron(self.second_norm(x))


def gpt2_blocks(depth: int = 12, width: int = 768, heads: int = 12) -> nn.Module:
    """The blocks of GPT-2 small, between vectors: 85 million parameters in 48 linear layers."""
    return nn.Sequential(*(TransformerBlock(width, heads) for _ in range(depth)))
