"""Fisher blocks of norms by kernels that read input and output gradient once, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchium
from cuda_launches import launches_of
from cuda_waits import no_waits
from kfac_problems import batch_of
from optimizer_cases import values
from test_kfac_norms import MODELS, OPTIONS, make_model
from torch import Tensor, nn

SHARINGS = ["expand", "reduce"]


def normalized(norm: nn.Module, x: Tensor) -> Tensor:
    """x^, from x in float64."""
    if isinstance(norm, nn.LayerNorm):
        return F.layer_norm(x, norm.normalized_shape, eps=norm.eps)
    if isinstance(norm, nn.RMSNorm):
        eps = torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
        return F.rms_norm(x, norm.normalized_shape, eps=eps)
    if isinstance(norm, nn.GroupNorm):
        return F.group_norm(x, norm.num_groups, eps=norm.eps)
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    if norm.training:
        return F.batch_norm(x, None, None, training=True, eps=norm.eps)
    return F.batch_norm(x, norm.running_mean.cpu().double(), norm.running_var.cpu().double(),
                        eps=norm.eps)  # fmt: skip


def expected_blocks(norm: nn.Module, x: Tensor, g: Tensor, sharing: str) -> Tensor:
    x, g = x.detach().cpu().double(), g.cpu().double()
    C = norm.weight.numel()
    if isinstance(norm, (nn.LayerNorm, nn.RMSNorm)):
        rows = [t.reshape(len(x), -1, C) for t in (normalized(norm, x) * g, g)]
    else:
        rows = [t.reshape(len(x), C, -1).mT for t in (normalized(norm, x) * g, g)]
    j = torch.stack(rows[: 1 if getattr(norm, "bias", None) is None else 2], dim=-1)
    j = j.sum(1) if sharing == "reduce" else j.flatten(0, 1)
    return torch.einsum("rci,rcj->cij", j, j) / len(x)


def blocks_of(
    norm: nn.Module, x: Tensor, g: Tensor, sharing: str, autocast: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The blocks, and the output gradient as the layer got it."""
    model = nn.Sequential(norm)
    optimizer = torchium.KFAC(model, weight_sharing=sharing, batch_averaged=False, lr=1e-3)
    with torch.autocast(x.device.type, autocast or torch.float16, enabled=autocast is not None):
        output = model(x)
    g = g.to(output.dtype)
    output.backward(g)
    optimizer.step()
    optimizer.check_errors()
    return optimizer.state[norm.weight]["fisher_blocks"], g


def assert_blocks(
    norm: nn.Module, x: Tensor, g: Tensor, sharing: str, *, tolerance: float = 2e-6, **options: Any
) -> None:
    actual, g = blocks_of(norm, x, g, sharing, **options)
    expected = expected_blocks(norm, x, g, sharing)
    assert torch.equal(actual, actual.mT)
    error = (actual.cpu().double() - expected).norm() / expected.norm()
    assert error <= tolerance, error


def operands(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, mean: float = 0.5
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(shape) + shape[-1])
    x, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    x = (x * torch.linspace(0.5, 2, shape[1], dtype=x.dtype).reshape(-1, *[1] * (x.dim() - 2))
         if x.dim() > 1 else x)  # fmt: skip
    return (x + mean).to(device, dtype), (g + 0.1).to(device, torch.float32)


def spread(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, t in enumerate([*norm.parameters(), *norm.buffers()]):
            if t.is_floating_point():
                t += 0.1 * (number + 1) * torch.linspace(0, 1, t.numel()).reshape(t.shape)
    return norm


# The layers with the shape of their input: sizes that are multiples of eight and others, of fewer and
# more channels than a warp reads at a time, positions of one part and of several.
CHANNELS = {
    "batch_2d": (lambda: nn.BatchNorm2d(24), (6, 24, 9, 7)),
    "batch_of_256": (lambda: nn.BatchNorm2d(264), (5, 264, 7, 7)),
    "batch_of_few": (lambda: nn.BatchNorm2d(3), (4, 3, 60, 50)),
    "batch_of_one": (lambda: nn.BatchNorm2d(1), (2, 1, 90, 90)),
    "batch_3d": (lambda: nn.BatchNorm3d(20), (3, 20, 3, 5, 8)),
    "batch_1d": (lambda: nn.BatchNorm1d(40), (300, 40)),
    "batch_of_sequences": (lambda: nn.BatchNorm1d(40), (9, 40, 33)),
    "batch_of_many_samples": (lambda: nn.BatchNorm1d(16), (3000, 16, 5)),
    "evaluated": (lambda: nn.BatchNorm2d(24).eval(), (6, 24, 9, 7)),
    "group": (lambda: nn.GroupNorm(4, 24), (6, 24, 9, 7)),
    "one_group": (lambda: nn.GroupNorm(1, 40, eps=1e-3), (6, 40, 31, 80)),
    "instances": (lambda: nn.GroupNorm(24, 24), (3, 24, 17, 16)),
    "group_without_positions": (lambda: nn.GroupNorm(4, 24), (30, 24)),
}
ROWS = {
    f"layer_{size}": (lambda size=size: nn.LayerNorm(size), (5, 21, size))
    for size in (1, 3, 8, 10, 24, 64, 100, 128, 256, 264, 300, 768, 1000, 2048)
} | {
    "layer_8192": (lambda: nn.LayerNorm(8192), (2, 3, 8192)),
    "layer_too_large": (lambda: nn.LayerNorm(8200), (2, 3, 8200)),
    "layer_of_planes": (lambda: nn.LayerNorm((3, 8), eps=0.1), (5, 2, 3, 8)),
    "layer_of_vectors": (lambda: nn.LayerNorm(96), (700, 96)),
    "layer_without_shift": (lambda: nn.LayerNorm(96, bias=False), (6, 11, 96)),
    "rms_768": (lambda: nn.RMSNorm(768), (4, 40, 768)),
    "rms_80": (lambda: nn.RMSNorm(80, eps=1e-4), (4, 40, 80)),
}
LAYERS = CHANNELS | ROWS


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("name", LAYERS)
def test_blocks_of_float32(name: str, sharing: str, device: torch.device) -> None:
    make, shape = LAYERS[name]
    x, g = operands(shape, torch.float32, device)
    assert_blocks(spread(make()).to(device), x, g, sharing)


@pytest.mark.cuda
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LAYERS)
def test_blocks_of_16_bits(name: str, dtype: torch.dtype, sharing: str) -> None:
    """Under autocast: some layers return 16 bits, others float32."""
    make, shape = LAYERS[name]
    x, g = operands(shape, dtype, "cuda")
    assert_blocks(spread(make()).cuda(), x, g, sharing, autocast=dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["batch_2d", "group", "layer_100", "rms_80"])
def test_blocks_of_parameters_in_16_bits(name: str, dtype: torch.dtype) -> None:
    make, shape = LAYERS[name]
    x, g = operands(shape, dtype, "cuda")
    assert_blocks(spread(make()).to("cuda", dtype), x, g.to(dtype), "expand", tolerance=2e-5)


def test_a_default_eps_is_that_of_float32_for_16_bits(device: torch.device) -> None:
    """As in PyTorch, which computes in float32."""
    x, g = operands((4, 9, 32), torch.bfloat16, device)
    assert_blocks(nn.RMSNorm(32).to(device), x / 16, g, "expand", autocast=torch.bfloat16)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers."""
    if layout == "channels_last":
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "reversed":
        return (
            x.permute(*range(x.dim() - 1, -1, -1)).contiguous().permute(*range(x.dim() - 1, -1, -1))
        )
    if layout == "strided":
        return torch.stack([x, x], dim=-1)[..., 0]
    if layout == "offset":  # not aligned to 16 bytes
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    return x


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize(
    ("layout", "of_gradient"),
    [
        *((layout, layout) for layout in ("channels_last", "reversed", "strided", "offset")),
        ("channels_last", ""),
        ("", "channels_last"),
        ("offset", ""),
    ],
)
@pytest.mark.parametrize(
    "name", ["batch_2d", "batch_of_256", "batch_of_few", "batch_3d", "batch_of_sequences",
             "evaluated", "group", "one_group", "layer_264", "layer_of_planes"]
)  # fmt: skip
def test_layouts(
    name: str, layout: str, of_gradient: str, sharing: str, device: torch.device
) -> None:
    if device.type == "cpu" and "group" in name:
        pytest.skip("PyTorch's backward pass of group norms crashes on a CPU in other layouts")
    make, shape = LAYERS[name]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x, g = operands(shape, dtype, device)
    autocast = None if device.type == "cpu" else dtype
    norm = spread(make()).to(device)
    x, g = laid_out(x, layout), laid_out(g, of_gradient)
    assert_blocks(norm, x, g, sharing, autocast=autocast)


@pytest.mark.cuda
@pytest.mark.parametrize("outlier", [False, True])
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("layout", ["", "channels_last"])
@pytest.mark.parametrize("name", ["batch_2d", "batch_of_few", "batch_1d", "group", "layer_300"])
def test_a_mean_far_above_the_deviation(
    name: str, layout: str, sharing: str, outlier: bool
) -> None:
    make, shape = LAYERS[name]
    x, g = operands(shape, torch.float32, "cuda", mean=1000.0)
    if outlier:  # where the sums of the channels begin
        x.view(-1)[0] = 0.0
    assert_blocks(make().cuda(), laid_out(x, layout), g, sharing, tolerance=1e-4)


@pytest.mark.parametrize("name", ["batch_2d", "group", "layer_100"])
def test_several_calls_add_up(name: str, device: torch.device) -> None:
    make, shape = LAYERS[name]
    norm = spread(make()).to(device)
    x, g = operands(shape, torch.float32, device)
    blocks = [blocks_of(norm, part, g, "expand")[0] for part in (x, 3 * x)]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x) + self.norm(3 * x)

    norm = spread(make()).to(device)
    model = Twice()
    optimizer = torchium.KFAC(model, batch_averaged=False)
    model(x).backward(g)
    optimizer.step()
    both = optimizer.state[norm.weight]["fisher_blocks"]
    torch.testing.assert_close(both, blocks[0] + blocks[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("of_gradient", [False, True])
@pytest.mark.parametrize(
    "name", ["batch_2d", "evaluated", "group", "layer_without_shift", "rms_80"]
)
def test_what_is_not_finite_skips_the_step(
    name: str, of_gradient: bool, bad: float, device: torch.device
) -> None:
    make, shape = LAYERS[name]
    norm = make().to(device)
    optimizer = torchium.KFAC(nn.Sequential(norm))
    x, g = operands(shape, torch.float32, device)
    (g if of_gradient else x).view(-1)[7] = bad
    norm(x).backward(g)
    for p in norm.parameters():
        p.grad.fill_(1.0)  # only the blocks can tell
    before = values(norm)
    optimizer.step()
    for p, q in zip(values(norm), before, strict=True):
        assert torch.equal(p, q)
    assert not optimizer.state[norm.weight]["fisher_blocks"].any()


@pytest.mark.cuda
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("name", ["batch_of_256", "group", "layer_768"])
def test_two_runs_agree_bit_for_bit(name: str, sharing: str) -> None:
    make, shape = LAYERS[name]
    x, g = operands(shape, torch.bfloat16, "cuda")
    norm = make().cuda()
    first, *others = (blocks_of(norm, x, g, sharing, torch.bfloat16)[0] for _ in range(5))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.cuda
@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize(
    ("name", "layout", "most"),
    [("batch_2d", "", 2), ("batch_of_256", "channels_last", 2), ("batch_1d", "", 2),
     ("evaluated", "", 2), ("group", "", 3), ("layer_768", "", 2), ("rms_768", "", 2)],
)  # fmt: skip
def test_launches_of_a_layer(name: str, layout: str, most: int, sharing: str) -> None:
    make, shape = LAYERS[name]
    x, g = operands(shape, torch.float32, "cuda")
    x, g = laid_out(x, layout), laid_out(g, layout)
    counts = []
    for captures in (False, True):
        norm = make().cuda()
        optimizer = torchium.KFAC(nn.Sequential(norm), TCov=1 if captures else 1000,
                                  weight_sharing=sharing)  # fmt: skip
        for _ in range(2):  # the first step is due
            output = norm(x)
            counts.append(launches_of(lambda output=output: output.backward(g)))
            optimizer.step()
            optimizer.zero_grad()
    assert counts[3] - counts[1] <= most


@pytest.mark.cuda
def test_blocks_and_step_do_not_wait() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Flatten(2),
                          nn.LayerNorm(36), nn.Flatten(), nn.Linear(288, 3)).cuda()  # fmt: skip
    optimizer = torchium.KFAC(model, TCov=1, TInv=100)
    x = torch.randn(5, 3, 8, 8, device="cuda")
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    with no_waits():
        model(x).square().mean().backward()
        optimizer.step()


def train(
    name: str, device: str, dtype: torch.dtype, frozen: bool = False, **options: Any
) -> list[Tensor]:
    """The changes of the parameters. `frozen`: in every second step no bias has a gradient."""
    model, shape = make_model(name)
    model.to(device, dtype)
    start = values(model)
    optimizer = torchium.KFAC(model, **options)
    for step in range(4):
        x, y = batch_of(shape, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(device, dtype)), y.to(device)).backward()
        for key, p in model.named_parameters():
            if frozen and step % 2 == 1 and key.endswith("bias"):
                p.grad = None
        optimizer.step()
    optimizer.check_errors()
    return [p - s for p, s in zip(values(model), start, strict=True)]


@pytest.mark.cuda
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_training_follows_the_cpu(name: str, options: str, frozen: bool) -> None:
    expected = train(name, "cpu", torch.float64, frozen, **OPTIONS[options])
    actual = train(name, "cuda", torch.float32, frozen, **OPTIONS[options])
    for p, q in zip(actual, expected, strict=True):
        assert (p.cpu().double() - q).norm() <= 1e-3 * q.norm()
