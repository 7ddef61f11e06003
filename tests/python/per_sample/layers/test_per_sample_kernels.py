"""Rows, norms and inner products of layers with sizes that the kernels of GPUs treat differently."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torchium  # noqa: F401  registers the operators
from cuda_launches import kernels_of
from torch import Tensor
from torch.nn import functional as F

ops = torch.ops.torchium
WORKSPACE = 2**28


@dataclass(frozen=True)
class Layer:
    """A convolution, or a linear layer on sequences [samples, *size, inputs]."""

    samples: int
    inputs: int
    size: tuple[int, ...]
    outputs: int
    kernel: tuple[int, int] | None = None
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    bias: bool = True

    @property
    def weight_shape(self) -> list[int]:
        return [self.outputs, self.inputs // self.groups, *(self.kernel or ())]

    def tensors(self, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Input and output gradient."""
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        if self.kernel is None:
            leading = self.samples, *self.size
            return randn(*leading, self.inputs), randn(*leading, self.outputs)
        x = randn(self.samples, self.inputs, *self.size)
        sides = zip(self.size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides]
        return x, randn(self.samples, self.outputs, *out)

    def rows(self, x: Tensor, g: Tensor) -> Tensor:
        """[samples, elements] in float64."""
        x, g = x.double(), g.double()
        if self.kernel is None:
            x, g = (t.reshape(len(t), -1, t.shape[-1]) for t in (x, g))
            weight, bias = torch.einsum("nto,nti->noi", g, x), g.sum(1)
        else:
            options = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
            patches = F.unfold(x, self.kernel, **options).unflatten(1, (self.groups, -1))
            split = g.flatten(2).unflatten(1, (self.groups, -1))
            weight = torch.einsum("ngot,ngit->ngoi", split, patches)
            bias = g.flatten(2).sum(2)
        parts = [weight.flatten(1), *([bias] if self.bias else [])]
        return torch.cat(parts, 1)

    def arguments(self, x: Tensor, g: Tensor) -> tuple[object, ...]:
        params = [x.new_zeros(self.weight_shape)] + [x.new_zeros(self.outputs)] * self.bias
        settings = [0] * 12
        if self.kernel is not None:
            given = [*self.stride, *self.padding, *self.dilation, self.groups]
            settings[: len(given)] = given
        row = [int(self.kernel is not None), 0, 1 if self.bias else -1, 0, *settings]
        return params, [x], [g], row, [0.0]


LAYERS = {
    "first_of_convnet": Layer(5, 3, (32, 32), 64, (3, 3), padding=(1, 1)),
    "few_inputs": Layer(9, 2, (13, 12), 70, (3, 4), (2, 1), (2, 1), (2, 1)),
    "few_inputs_of_one_pixel": Layer(4, 31, (6, 6), 33, (1, 1), bias=False),
    "strided": Layer(7, 24, (9, 11), 40, (3, 3), (2, 2), (1, 1)),
    "wide": Layer(3, 72, (8, 8), 136, (3, 3), padding=(1, 1), bias=False),
    "dilated_many_samples": Layer(150, 16, (11, 11), 72, (3, 3), dilation=(2, 2)),
    "groups": Layer(4, 64, (6, 7), 96, (3, 3), padding=(1, 1), groups=2),
    "one_by_one": Layer(6, 40, (5, 5), 48, (1, 1)),
    "rectangular": Layer(4, 17, (12, 6), 33, (5, 2), (1, 3), (2, 0), bias=False),
    "large_images": Layer(2, 8, (70, 70), 16, (3, 3)),
    "two_positions": Layer(9, 33, (3, 3), 65, (2, 3)),
    "one_position": Layer(9, 33, (3, 3), 65, (3, 3)),
    "sequence": Layer(6, 48, (33,), 40),
    "two_dimensions": Layer(3, 33, (4, 7), 65, bias=False),
    "few_positions": Layer(5, 96, (3,), 130),
    "vectors": Layer(37, 70, (), 41),
    "vectors_without_bias": Layer(600, 130, (), 10, bias=False),
}


def assert_close(layer: Layer, x: Tensor, g: Tensor, **options: int) -> None:
    """Within float32's rounding errors, relative to the norms of the rows."""
    expected = layer.rows(x, g)
    norms = expected.norm(dim=1)
    scale = norms.clamp_min(torch.finfo(torch.float64).tiny)
    arguments = layer.arguments(x, g)

    found = ops.per_sample_norms(
        *arguments, max_workspace_bytes=options.get("workspace", WORKSPACE)
    )
    assert found.dtype == torch.float32
    assert ((found.double() - norms).abs() / scale).max() < 2e-6

    K = ops.per_sample_gram(*arguments)
    assert torch.equal(K, K.T)
    errors = (K - expected @ expected.T).abs() / scale.unsqueeze(1) / scale
    assert errors.max() < 2e-6

    rows = torch.cat([r.flatten(1) for r in ops.per_sample_gradients(*arguments)], 1)
    assert ((rows.double() - expected).norm(dim=1) / scale).max() < 1e-6


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, device):
    assert_close(LAYERS[name], *LAYERS[name].tensors(device))


@pytest.mark.parametrize("name", ["strided", "groups", "few_inputs", "sequence", "vectors"])
def test_samples_in_pieces(name, device):
    assert_close(LAYERS[name], *LAYERS[name].tensors(device), workspace=1)


@pytest.mark.parametrize("name", ["strided", "groups", "few_inputs"])
def test_channels_that_lie_side_by_side(name, device):
    x, g = (t.to(memory_format=torch.channels_last) for t in LAYERS[name].tensors(device))
    assert_close(LAYERS[name], x, g)


@pytest.mark.parametrize("name", ["strided", "few_inputs", "sequence", "vectors"])
def test_views(name, device):
    """Every other sample, and every other channel of a gradient that is no contiguous tensor."""
    layer = LAYERS[name]
    x, g = (torch.stack([t, -t], -1)[..., 0] for t in layer.tensors(device))
    assert_close(layer, x, g)
    x, g = (torch.cat([t, t])[: layer.samples] for t in layer.tensors(device))
    assert_close(layer, x, g)


@pytest.mark.parametrize("name", ["strided", "groups", "few_inputs", "sequence", "vectors"])
def test_samples_of_very_different_size(name, device):
    """Each sample has a scale of its own, and the smallest gradient is as accurate as the largest."""
    layer = LAYERS[name]
    x, g = layer.tensors(device)
    powers = 10.0 ** torch.linspace(-12, 8, layer.samples).to(device)
    shape = (-1, *[1] * (g.dim() - 1))
    g = g * powers.reshape(shape)
    x = x * powers.flip(0).sqrt().reshape(shape)
    assert_close(layer, x, g)
    g[1] = 0
    norms = ops.per_sample_norms(*layer.arguments(x, g), max_workspace_bytes=WORKSPACE)
    assert norms[1] == 0
    assert norms.isfinite().all()


@pytest.mark.parametrize("name", ["strided", "few_inputs", "sequence", "vectors"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_that_are_not_finite_stay_in_their_sample(name, value, device):
    layer = LAYERS[name]
    x, g = layer.tensors(device)
    x[2].view(-1)[-1] = value
    expected = [i != 2 for i in range(layer.samples)]
    norms = ops.per_sample_norms(*layer.arguments(x, g), max_workspace_bytes=WORKSPACE)
    assert norms.isfinite().tolist() == expected
    K = ops.per_sample_gram(*layer.arguments(x, g))
    assert K.diag().isfinite().tolist() == expected
    keep = torch.tensor(expected, device=device)
    assert K[keep][:, keep].isfinite().all()


@pytest.mark.parametrize("name", ["strided", "few_inputs", "sequence", "vectors"])
def test_a_bias_before_its_weight_counts_once(name, device):
    layer = LAYERS[name]
    x, g = layer.tensors(device)
    rows = layer.rows(x, g)
    (weight, bias), inputs, output_gradients, row, eps = layer.arguments(x, g)
    arguments = [bias, weight], inputs, output_gradients, [row[0], 1, 0, *row[3:]], eps
    norms = ops.per_sample_norms(*arguments, max_workspace_bytes=WORKSPACE)
    torch.testing.assert_close(norms.double(), rows.norm(dim=1), rtol=2e-6, atol=0)
    K = ops.per_sample_gram(*arguments)
    torch.testing.assert_close(K, rows @ rows.T, rtol=0, atol=2e-6 * float(K.max()))


@pytest.mark.parametrize("trained", ["weight", "bias"])
@pytest.mark.parametrize("name", ["strided", "first_of_convnet", "sequence", "vectors"])
def test_one_of_weight_and_bias_is_trained(name, trained, device):
    layer = LAYERS[name]
    x, g = layer.tensors(device)
    rows = layer.rows(x, g)
    params, inputs, output_gradients, row, eps = layer.arguments(x, g)
    split = params[0].numel()
    rows = rows[:, :split] if trained == "weight" else rows[:, split:]
    given = [0, -1] if trained == "weight" else [-1, 0]
    own = params[:1] if trained == "weight" else params[1:]
    arguments = own, inputs, output_gradients, [row[0], *given, *row[3:]], eps
    norms = ops.per_sample_norms(*arguments, max_workspace_bytes=WORKSPACE)
    torch.testing.assert_close(norms.double(), rows.norm(dim=1), rtol=2e-6, atol=0)
    K = ops.per_sample_gram(*arguments)
    torch.testing.assert_close(K, rows @ rows.T, rtol=0, atol=2e-6 * float(K.max()))


@pytest.mark.parametrize("name", ["strided", "few_inputs"])
def test_micro_batches_of_one_layer(name, device):
    """Samples of several backward passes, and two calls of the layer in one."""
    layer = LAYERS[name]
    batches = [layer.tensors(device, seed) for seed in (0, 1)]
    rows = [layer.rows(*batch) for batch in batches]
    params, _, _, row, _ = layer.arguments(*batches[0])
    inputs, output_gradients = zip(*batches, strict=True)
    for second, expected in ((1, torch.cat(rows)), (0, rows[0] + rows[1])):
        calls = [*row, *row[:3], second, *row[4:]]
        arguments = params, list(inputs), list(output_gradients), calls, [0.0, 0.0]
        norms = ops.per_sample_norms(*arguments, max_workspace_bytes=WORKSPACE)
        torch.testing.assert_close(norms.double(), expected.norm(dim=1), rtol=2e-6, atol=0)
        K = ops.per_sample_gram(*arguments)
        torch.testing.assert_close(K, expected @ expected.T, rtol=0, atol=2e-6 * float(K.max()))


def test_many_layers(device):
    """More than one launch takes."""
    layer = LAYERS["vectors"]
    batches = [layer.tensors(device, seed) for seed in range(40)]
    expected = torch.cat([layer.rows(*batch) for batch in batches], 1)
    params, row = [], []
    for i, batch in enumerate(batches):
        own, _, _, single, _ = layer.arguments(*batch)
        params += own
        row += [single[0], 2 * i, 2 * i + 1, *single[3:]]
    inputs, output_gradients = (list(t) for t in zip(*batches, strict=True))
    arguments = params, inputs, output_gradients, row, [0.0] * len(batches)
    norms = ops.per_sample_norms(*arguments, max_workspace_bytes=WORKSPACE)
    torch.testing.assert_close(norms.double(), expected.norm(dim=1), rtol=1e-6, atol=0)
    K = ops.per_sample_gram(*arguments)
    torch.testing.assert_close(K, expected @ expected.T, rtol=1e-9, atol=1e-9 * float(K.max()))


@pytest.mark.cuda
class TestOnDevice:
    device = torch.device("cuda")

    def has_tensor_cores(self) -> bool:
        return torch.cuda.get_device_capability() == (9, 0)

    def kernels(self, run) -> list[str]:
        run()
        torch.cuda.synchronize()
        return kernels_of(run)

    @pytest.mark.parametrize(
        ("name", "kernel"),
        [
            ("first_of_convnet", "narrow_rows_kernel"),
            ("strided", "sample_product_kernel"),
            ("groups", "sample_product_kernel"),
            ("sequence", "sample_product_kernel"),
        ],
    )
    def test_rows_are_formed_by_kernels(self, name, kernel):
        if kernel == "sample_product_kernel" and not self.has_tensor_cores():
            pytest.skip("no Hopper GPU")
        layer = LAYERS[name]
        arguments = layer.arguments(*layer.tensors(self.device))
        for run in (
            lambda: ops.per_sample_norms(*arguments, max_workspace_bytes=WORKSPACE),
            lambda: ops.per_sample_gram(*arguments),
            lambda: ops.per_sample_gradients(*arguments),
        ):
            names = self.kernels(run)
            assert any(kernel in name for name in names), names
            assert not any("gemm" in name for name in names), names

    @pytest.mark.parametrize("operator", ["per_sample_norms", "per_sample_gram"])
    def test_one_kernel_for_vectors(self, operator):
        layer = LAYERS["vectors"]
        arguments = layer.arguments(*layer.tensors(self.device))
        options = {"max_workspace_bytes": WORKSPACE} if operator == "per_sample_norms" else {}
        names = self.kernels(lambda: getattr(ops, operator)(*arguments, **options))
        names = [
            name
            for name in names
            if "sample_norms" in name or "pair_gram" in name or "at::" in name
        ]
        assert len(names) == 1, names

    @pytest.mark.parametrize("name", ["strided", "few_inputs", "vectors"])
    def test_capture(self, name):
        layer = LAYERS[name]
        x, g = layer.tensors(self.device)
        arguments = layer.arguments(x, g)

        def run() -> tuple[Tensor, Tensor]:
            norms = ops.per_sample_norms(*arguments, max_workspace_bytes=WORKSPACE)
            return norms, ops.per_sample_gram(*arguments)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        other = layer.tensors(self.device, seed=5)
        x.copy_(other[0])
        g.copy_(other[1])
        graph.replay()
        for found, expected in zip(captured, run(), strict=True):
            assert torch.equal(found, expected)

    def test_operands_stay_within_the_workspace(self):
        layer = Layer(64, 64, (32, 32), 64, (3, 3), padding=(1, 1), bias=False)
        arguments = layer.arguments(*layer.tensors(self.device))
        of_sample = 4 * (64 + 576) * 1024
        for samples in (1, 8):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            ops.per_sample_norms(*arguments, max_workspace_bytes=samples * of_sample)
            more = torch.cuda.max_memory_allocated() - before
            assert more < (samples + 1) * of_sample
