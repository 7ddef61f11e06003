"""Factors of convolutions whose patches are not formed."""

from __future__ import annotations

import pytest
import torch
from captured_layers import settings_of
from cuda_launches import kernels_of
from torch import Tensor, nn
from torchium._capture.layers import LayerKind, core_row

pytestmark = pytest.mark.cuda
ops = torch.ops.torchium

# Samples, height, width, channels. Tiles of four, of two and of one shift, one and several of
# them per row; channels that do not fill them; boxes of many pixels of a sample and of many
# samples, also beyond the last; parts that begin within a tile.
SIZES = [
    (8, 16, 14, 64),
    (64, 30, 31, 64),
    (128, 7, 4, 64),
    (16, 13, 29, 48),
    (16, 9, 7, 128),
    (33, 12, 10, 96),
    (130, 4, 2, 128),
    (8, 8, 8, 256),
    (257, 5, 3, 256),
    (130, 3, 4, 192),
    (16, 8, 8, 448),
    (6, 7, 9, 512),
]


def images_of(size: tuple[int, int, int, int], dtype: torch.dtype) -> Tensor:
    samples, height, width, channels = size
    torch.manual_seed(0)
    images = torch.randn(samples, height, width, channels, device="cuda")
    # Neither centred nor the same in every row, column and channel.
    images += torch.linspace(-1, 1, height, device="cuda").reshape(1, -1, 1, 1)
    images *= torch.linspace(0.5, 2, width, device="cuda").reshape(1, 1, -1, 1)
    images += torch.linspace(0, 0.5, channels, device="cuda")
    return images.to(dtype).permute(0, 3, 1, 2)


def factor(
    images: Tensor, with_bias: bool, accumulate: bool, conv: nn.Conv2d | None = None
) -> Tensor:
    """conv: the layer, by default 3 x 3 with padding 1."""
    channels = images.shape[1]
    conv = conv or nn.Conv2d(channels, 1, 3, padding=1, device="meta")
    order = conv.weight[0].numel() + with_bias
    A = torch.full((1, order, order), 0.5 if accumulate else torch.nan, device="cuda")
    G = torch.zeros(1, 1, 1, device="cuda")
    ops.kronecker_factors_update_(
        A,
        G,
        images,
        torch.ones_like(conv(images.to("meta", torch.float32)), device="cuda", dtype=images.dtype),
        call=core_row(LayerKind.CONV2D, -1, -1, 0, settings_of(conv)[:8]),
        weight_shape=list(conv.weight.shape),
        accumulate=accumulate,
    )
    return A[0]


def expected_factor(images: Tensor, with_bias: bool, conv: nn.Conv2d | None = None) -> Tensor:
    conv = conv or nn.Conv2d(images.shape[1], 1, 3, padding=1, device="meta")
    total = 0
    for some in images.split(16):
        columns = nn.functional.unfold(
            some.double(), conv.kernel_size, conv.dilation, conv.padding, conv.stride
        )
        patches = columns.transpose(0, 1).flatten(1)
        if with_bias:
            patches = torch.cat([patches, patches.new_ones(1, patches.shape[1])])
        total = total + patches @ patches.T
    return total


def assert_close(actual: Tensor, expected: Tensor, images: Tensor) -> None:
    # Tensor cores truncate sums as they add to them.
    count = images.numel() / images.shape[1]
    assert (actual - expected).norm() <= (1e-6 + 1e-8 * min(count, 30_000)) * expected.norm()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("dtype", "with_bias", "accumulate"),
    [
        (torch.bfloat16, False, False),
        (torch.float16, True, False),
        (torch.bfloat16, True, True),
    ],
)
def test_factors_of_patches(size, dtype, with_bias, accumulate) -> None:
    images = images_of(size, dtype)
    actual = factor(images, with_bias, accumulate)
    expected = expected_factor(images, with_bias) + (0.5 if accumulate else 0)
    assert torch.equal(actual, actual.T)
    assert_close(actual, expected, images)


def has_shifted_products() -> bool:
    properties = torch.cuda.get_device_properties(0)
    return (properties.major, properties.minor) == (9, 0)


@pytest.mark.skipif(torch.cuda.is_available() and not has_shifted_products(), reason="needs Hopper")
@pytest.mark.parametrize("size", SIZES)
def test_no_patches_are_formed(size) -> None:
    images = images_of(size, torch.bfloat16)
    kernels = kernels_of(lambda: factor(images, False, False))
    assert any("moment_product_kernel" in name for name in kernels)
    assert not any("unfold" in name for name in kernels)


# Samples, height, width, channels; kernel, stride, padding, dilation. Few channels, of which folded
# pixels are full or not, with and without a folded pixel before the image; and many, read in place.
LAYERS = [
    ((4, 32, 48, 3), (7, 2, 3, 1)),
    ((5, 31, 25, 3), (7, 2, 3, 1)),
    ((3, 40, 36, 4), (5, 2, 0, 1)),
    ((3, 28, 30, 1), ((12, 11), (4, 4), (2, 5), 1)),
    ((70, 9, 8, 16), ((3, 4), 1, (0, 2), 1)),
    ((2, 224, 224, 3), (7, 2, 3, 1)),
    ((64, 16, 12, 128), (3, 2, 1, 1)),
    ((64, 15, 11, 256), (1, 2, 0, 1)),
    ((64, 14, 14, 64), (5, 1, 2, 1)),
    ((64, 13, 9, 192), ((3, 2), (2, 3), (1, 0), 1)),
    ((65, 8, 8, 128), (3, 1, 2, 2)),
    ((128, 14, 14, 512), (3, 2, 1, 1)),
]
WIDE_STRIDE = ((64, 20, 20, 64), (3, 5, 1, 1))  # patches are formed


def layer_of(images: Tensor, settings) -> nn.Conv2d:
    kernel, stride, padding, dilation = settings
    return nn.Conv2d(images.shape[1], 1, kernel, stride, padding, dilation, device="meta")


@pytest.mark.parametrize(("size", "settings"), [*LAYERS, WIDE_STRIDE])
@pytest.mark.parametrize(
    ("dtype", "with_bias", "accumulate"),
    [(torch.bfloat16, False, False), (torch.float16, True, False), (torch.bfloat16, True, True)],
)
def test_factors_of_other_patches(size, settings, dtype, with_bias, accumulate) -> None:
    images = images_of(size, dtype)
    conv = layer_of(images, settings)
    actual = factor(images, with_bias, accumulate, conv)
    expected = expected_factor(images, with_bias, conv) + (0.5 if accumulate else 0)
    assert torch.equal(actual, actual.T)
    assert_close(actual, expected, images)


@pytest.mark.skipif(torch.cuda.is_available() and not has_shifted_products(), reason="needs Hopper")
@pytest.mark.parametrize(("size", "settings"), LAYERS)
def test_no_other_patches_are_formed(size, settings) -> None:
    images = images_of(size, torch.bfloat16)
    kernels = kernels_of(lambda: factor(images, False, False, layer_of(images, settings)))
    assert any("moment_product_kernel" in name for name in kernels)
    assert not any("unfold" in name for name in kernels)


def test_few_positions_are_unfolded() -> None:
    """A product of shifted images fills its tiles badly."""
    images = images_of((1, 4, 4, 64), torch.bfloat16)
    kernels = kernels_of(lambda: factor(images, False, False))
    assert any("unfold" in name for name in kernels)


def test_images_of_any_layout() -> None:
    images = images_of((16, 9, 7, 128), torch.bfloat16)
    expected = factor(images, False, False)
    assert torch.equal(factor(images.contiguous(), False, False), expected)
    one_at_a_time = sum(factor(images[i : i + 8], False, False).double() for i in range(0, 16, 8))
    assert (one_at_a_time - expected).norm() <= 1e-5 * expected.norm()


def test_factors_are_the_same_in_every_run() -> None:
    images = images_of((64, 30, 31, 64), torch.bfloat16)
    first = factor(images, False, False)
    for _ in range(20):
        assert torch.equal(factor(images, False, False), first)
