"""kronecker_factors_update_ and per_sample_gradients against one backward pass per sample."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torchium  # noqa: F401  registers the operators
from captured_layers import MODELS, Batch, capture, loss_fn, model_and_batch
from reference import per_sample_gradients, tied_factors
from torch import Tensor, nn
from torch.library import opcheck

ops = torch.ops.torchium


def rows_of(model: nn.Module, batches: list[Batch]) -> list[Tensor]:
    """The Jacobian in float64, one tensor per parameter."""
    model = copy.deepcopy(model).double()
    blocks = []
    for inputs, targets in batches:
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        blocks.append(per_sample_gradients(model, loss_fn, inputs, targets))
    return [torch.cat([b[name] for b in blocks]) for name in blocks[0]]


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_gradients_of_single_samples(name, device):
    model, batch = model_and_batch(name, device=device)
    captured = capture(model, loss_fn, [batch])
    rows = ops.per_sample_gradients(*captured.arguments, scale=captured.samples)
    torch.testing.assert_close(rows, rows_of(model, [batch]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["sequence", "convolutions", "tied_embedding", "two_tables"])
def test_micro_batches_are_more_samples(name, device):
    """With different numbers of positions per sample, and one without some parameters."""
    model, batch = model_and_batch(name, device=device)
    _, other = model_and_batch(name, samples=3, device=device, seed=1)
    if name in ("tied_embedding", "two_tables"):
        other = other[0][:, :4], other[1]
    captured = capture(model, loss_fn, [batch, other])
    rows = ops.per_sample_gradients(*captured.arguments, scale=captured.samples)
    torch.testing.assert_close(rows, rows_of(model, [batch, other]), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close([r.mean(0) for r in rows], captured.gradients)


def test_a_parameter_has_zero_rows_where_a_micro_batch_does_not_use_it():
    x, g = torch.randn(2, 3), torch.randn(2, 4)
    params = [torch.zeros(4, 3), torch.zeros(4), torch.zeros(4, 3)]
    calls = [[0, 0, 1, 0, *[0] * 12], [0, 2, -1, 7, *[0] * 12]]
    first, bias, second = ops.per_sample_gradients(
        params, [x, x], [g, g], [*calls[0], *calls[1]], [0.0, 0.0]
    )
    outer = g.unsqueeze(2) * x.unsqueeze(1)
    zero = torch.zeros(2, 4, 3)
    torch.testing.assert_close(first, torch.cat([outer, zero]))
    torch.testing.assert_close(second, torch.cat([zero, outer]))
    torch.testing.assert_close(bias, torch.cat([g, torch.zeros(2, 4)]))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_rows_of_many_megabytes(micro_batches, device):
    generator = torch.Generator().manual_seed(0)
    weight = torch.zeros(1200, 1100, device=device)
    x, g = (torch.randn(8, size, generator=generator).to(device) for size in (1100, 1200))
    calls = [number for i in range(micro_batches) for number in [0, 0, -1, i, *[0] * 12]]
    pieces = [list(t.chunk(micro_batches)) for t in (x, g)]
    (rows,) = ops.per_sample_gradients([weight], *pieces, calls, [0.0] * micro_batches)
    assert rows.nbytes > 32 << 20
    assert torch.equal(rows, g.unsqueeze(2) * x.unsqueeze(1))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(3, 2), (3,)),
        (nn.Conv2d(2, 4, 2, groups=2), (2, 4, 3)),
        (nn.LayerNorm((4, 3)), (4, 3)),
    ],
)
def test_an_input_without_a_batch_is_one_sample(layer, shape):
    layer = layer.double()
    x = torch.randn(shape, dtype=torch.float64)
    output = layer(x)
    weights = torch.randn_like(output)
    gradients = torch.autograd.grad((output * weights).sum(), list(layer.parameters()))
    kind = {nn.Linear: 0, nn.Conv2d: 1, nn.LayerNorm: 3}[type(layer)]
    settings = {0: [0] * 12, 1: [1, 1, 0, 0, 1, 1, 2, *[0] * 5], 3: [2, *[0] * 11]}[kind]
    rows = ops.per_sample_gradients(
        list(layer.parameters()), [x], [weights], [kind, 0, 1, 0, *settings], [1e-5]
    )
    for row, expected in zip(rows, gradients, strict=True):
        torch.testing.assert_close(row, expected.unsqueeze(0))


@pytest.mark.parametrize("name", ["mlp", "convolutions", "tied_embedding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_precision_of_the_parameters(name, dtype, device):
    """Captured tensors are exact here, so all error is that of the sums over positions."""
    model, batch = model_and_batch(name, dtype=dtype, device=device)
    captured = capture(model, loss_fn, [batch])
    rows = ops.per_sample_gradients(*captured.arguments, scale=captured.samples)
    captured64 = copy.deepcopy(captured)
    captured64.params = [p.double() for p in captured.params]
    expected = ops.per_sample_gradients(*captured64.arguments, scale=captured.samples)
    for row, reference in zip(rows, expected, strict=True):
        assert row.dtype == dtype
        # At most two roundings to the parameter's dtype: of the sum and of the result.
        tolerance = 2 * torch.finfo(dtype).eps + 40 * torch.finfo(torch.float32).eps
        assert (row - reference).norm() <= tolerance * reference.norm()


def test_rows_under_autocast_are_those_without_it():
    model, batch = model_and_batch("mlp", dtype=torch.float32)
    captured = capture(model, loss_fn, [batch])
    expected = ops.per_sample_gradients(*captured.arguments)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = ops.per_sample_gradients(*captured.arguments)
    torch.testing.assert_close(rows, expected, rtol=0, atol=0)


# name -> weight shape, input shape, output gradient shape, settings
FACTOR_CASES = {
    "linear": ((4, 3), (6, 3), (6, 4), []),
    "linear_vector": ((4, 3), (3,), (4,), []),
    "linear_sequence": ((4, 3), (6, 5, 2, 3), (6, 5, 2, 4), []),
    "linear_wide": ((300, 260), (40, 260), (40, 300), []),
    "conv": ((4, 3, 2, 3), (5, 3, 6, 7), (5, 4, 5, 5), [1, 1, 0, 0, 1, 1, 1, *[0] * 5]),
    "conv_image": ((4, 3, 2, 3), (3, 6, 7), (4, 5, 5), [1, 1, 0, 0, 1, 1, 1, *[0] * 5]),
    "conv_groups": ((4, 2, 3, 3), (5, 4, 7, 7), (5, 4, 4, 5), [2, 1, 1, 1, 1, 2, 2, 0]),
    "conv_depthwise": ((6, 1, 3, 3), (5, 3, 5, 5), (5, 6, 5, 5), [1, 1, 1, 1, 1, 1, 3, 0]),
    "conv_wide": ((8, 16, 3, 3), (5, 16, 9, 8), (5, 8, 6, 3), [2, 2, 2, 1, 1, 2, 1, 0]),
    "conv_pixel_strided": ((4, 3, 1, 1), (5, 3, 5, 4), (5, 4, 3, 2), [2, 2, 0, 0, 1, 1, 1, 0]),
    "conv_pixel": ((4, 3, 1, 1), (5, 3, 5, 4), (5, 4, 5, 4), [1, 1, 0, 0, 1, 1, 1, *[0] * 5]),
}


def factor_case(name: str, with_bias: bool, device, dtype=torch.float64, state=torch.float64):
    """Nonzero sums, an input and an output gradient."""
    shape, input_shape, gradient_shape, settings = FACTOR_CASES[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(input_shape, generator=generator).to(device, dtype)
    g = torch.randn(gradient_shape, generator=generator).to(device, dtype)
    groups = settings[6] if settings else 1
    a = math.prod(shape[1:])
    sums = [
        torch.eye(k, device=device, dtype=state).expand(groups, k, k).contiguous()
        for k in (a + with_bias, shape[0] // groups)
    ]
    row = [int(bool(settings)), -1, -1, 0, *settings, *[0] * (12 - len(settings))]
    return sums, x, g, {"call": row, "weight_shape": list(shape)}


def expected_factors(sums, x: Tensor, g: Tensor, options) -> list[Tensor]:
    """The definition, one position at a time, with torch's unfold for convolutions."""
    A, G = (s.double().clone() for s in sums)
    x, g = x.double(), g.double()
    s = options["call"][4:]
    if options["call"][0] == 0:
        pairs = zip(x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1]), strict=True)
        vectors = [(0, a, b) for a, b in pairs]
    else:
        x, g = (t if t.dim() == 4 else t.unsqueeze(0) for t in (x, g))
        kernel = options["weight_shape"][2:]
        columns = nn.functional.unfold(x, kernel, s[4:6], s[2:4], s[:2])
        groups = s[6]
        a = columns.unflatten(1, (groups, -1))
        b = g.flatten(2).unflatten(1, (groups, -1))
        vectors = [
            (k, a[n, k, :, t], b[n, k, :, t])
            for n in range(a.shape[0])
            for k in range(groups)
            for t in range(a.shape[3])
        ]
    for group, a, b in vectors:
        if A.shape[1] == len(a) + 1:
            a = torch.cat([a, a.new_ones(1)])
        A[group] += torch.outer(a, a)
        G[group] += torch.outer(b, b)
    return [A, G]


@pytest.mark.parametrize("name", FACTOR_CASES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_kronecker_factors_are_sums_of_outer_products(name, with_bias, device):
    sums, x, g, options = factor_case(name, with_bias, device)
    expected = expected_factors(sums, x, g, options)
    ops.kronecker_factors_update_(*sums, x, g, **options)
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-12)
    for factor in sums:
        assert torch.equal(factor, factor.mT)


@pytest.mark.parametrize("name", FACTOR_CASES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_kronecker_factors_overwrite_memory_that_was_never_set(name, with_bias, device):
    sums, x, g, options = factor_case(name, with_bias, device)
    expected = expected_factors([torch.zeros_like(s) for s in sums], x, g, options)
    for factor in sums:
        factor.fill_(float("nan"))
    ops.kronecker_factors_update_(*sums, x, g, **options, accumulate=False)
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "linear_sequence", "conv_groups"])
def test_kronecker_factors_of_no_samples_are_zero(name, device):
    sums, x, g, options = factor_case(name, True, device)
    before = [factor.clone() for factor in sums]
    ops.kronecker_factors_update_(*sums, x[:0], g[:0], **options)
    torch.testing.assert_close(sums, before, rtol=0, atol=0)
    ops.kronecker_factors_update_(*sums, x[:0], g[:0], **options, accumulate=False)
    assert sum(factor.count_nonzero() for factor in sums) == 0


def assert_float32(factors: list[Tensor], expected: list[Tensor]) -> None:
    for factor, reference in zip(factors, expected, strict=True):
        assert factor.dtype == torch.float32
        assert (factor - reference).norm() <= 1e-6 * reference.norm()
        assert torch.equal(factor, factor.mT)


@pytest.mark.parametrize("name", FACTOR_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kronecker_factors_are_float32_for_any_input(name, dtype, device):
    sums, x, g, options = factor_case(name, True, device, dtype, torch.float32)
    expected = expected_factors(sums, x, g, options)
    ops.kronecker_factors_update_(*sums, x, g, **options)
    assert_float32(sums, expected)


@pytest.mark.parametrize("name", ["linear_sequence", "conv_wide"])
def test_an_input_counts_in_the_precision_in_which_autocast_multiplied_it(name, device):
    """A layer captures the float32 output of a norm, and an output gradient in bfloat16."""
    sums, x, g, options = factor_case(name, False, device, torch.float32, torch.float32)
    multiplied = x.bfloat16() if torch.device(device).type == "cuda" else x
    expected = expected_factors(sums, multiplied, g.bfloat16(), options)
    ops.kronecker_factors_update_(*sums, x, g.bfloat16(), **options)
    assert_float32(sums, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["linear", "conv_groups", "conv", "conv_wide"])
def test_layout_of_the_captured_tensors_does_not_matter(name, dtype, device):
    sums, x, g, options = factor_case(name, True, device, dtype, dtype)
    expected = expected_factors(sums, x, g, options)
    x, g = (torch.stack([t, -t], -1)[..., 0] for t in (x, g))
    if x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    ops.kronecker_factors_update_(*sums, x, g, **options)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    expected = [factor.to(dtype) for factor in expected]
    torch.testing.assert_close(sums, expected, rtol=tolerance, atol=tolerance)


def test_a_long_convolution_is_unfolded_in_pieces(device):
    """More patches than are held at a time, which are more on a GPU."""
    generator = torch.Generator().manual_seed(0)
    samples = 90 if torch.device(device).type == "cuda" else 3
    x = torch.randn(samples, 32, 80, 80, generator=generator).to(device)
    g = torch.randn(samples, 2, 78, 78, generator=generator).to(device)
    sums = [torch.zeros(1, k, k, device=device) for k in (32 * 9, 2)]
    row = [1, -1, -1, 0, 1, 1, 0, 0, 1, 1, 1, *[0] * 5]
    ops.kronecker_factors_update_(*sums, x, g, call=row, weight_shape=[2, 32, 3, 3])
    columns = nn.functional.unfold(x, 3).transpose(0, 1).flatten(1).double()
    expected = columns @ columns.mT
    tolerance = 1e-5 if samples > 3 else 1e-6  # of a sum of 550,000 terms in float32
    assert (sums[0][0] - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("name", ["linear_sequence", "conv_groups"])
def test_opcheck_of_factors(name, device):
    sums, x, g, options = factor_case(name, True, device)
    opcheck(ops.kronecker_factors_update_.default, (*sums, x, g), options)


def lookup_case(device, diagonal: bool, words: int = 5, width: int = 3):
    """Nonzero sums of an embedding, indices with padding index 2, and a gradient."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(words, (4, 6), generator=generator).to(device)
    h = torch.randn(4, 6, width, generator=generator, dtype=torch.float64).to(device)
    A = torch.eye(width, dtype=torch.float64, device=device)[None]
    counts = torch.ones(1, words, dtype=torch.float64, device=device)
    options = {"call": [2, -1, -1, 0, 2, *[0] * 11], "weight_shape": [words, width]}
    return [A.diagonal(0, -2, -1).clone() if diagonal else A, counts], indices, h, options


@pytest.mark.parametrize("accumulate", [True, False])
@pytest.mark.parametrize("diagonal", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_factors_of_an_embedding_are_counts_and_a_second_moment(
    diagonal, accumulate, dtype, device
):
    sums, indices, h, options = lookup_case(device, diagonal)
    A = torch.eye(3, dtype=h.dtype, device=device) * accumulate
    counts = torch.ones(5, dtype=h.dtype, device=device) * accumulate
    for index, row in zip(indices.flatten().tolist(), h.flatten(0, 1), strict=True):
        if index != 2:
            counts[index] += 1
            A = A + torch.outer(row, row)
    h[indices == 2] = math.nan  # what reaches padding has no effect
    ops.kronecker_factors_update_(*sums, indices.to(dtype), h, **options, accumulate=accumulate)
    torch.testing.assert_close(sums[1][0], counts, rtol=0, atol=0)
    torch.testing.assert_close(sums[0][0], A.diagonal() if diagonal else A)


def spd(n: int, seed: int) -> Tensor:
    X = torch.randn(n, n + 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return X @ X.mT


@pytest.mark.parametrize("kept", ["matrices", "diagonal_A", "diagonal_G", "diagonals"])
@pytest.mark.parametrize("bias", [0, 1])
@pytest.mark.parametrize("scale", [0.0, 1e-6, 1.0, 1e6])
def test_products_and_lookups_become_one_pair_of_factors(kept, bias, scale, device):
    rows, words, width = 10, 5, 3
    A1, G1, A2 = spd(width + bias, 0), spd(words, 1), scale * spd(width, 2)
    counts = torch.tensor([3.0, 0.0, 1.0, 0.0, 8.0], dtype=torch.float64)
    padded = nn.functional.pad(A2, (0, bias, 0, bias))
    A, G = tied_factors(A1 / rows, G1, padded, torch.diag(counts / counts.sum()))

    torch.testing.assert_close(A.trace(), A1.trace() / rows)
    fisher = torch.kron(G1, A1 / rows) + torch.kron(torch.diag(counts / counts.sum()), padded)
    torch.testing.assert_close(A.trace() * G.trace(), fisher.trace())
    assert torch.linalg.eigvalsh(2 * torch.kron(G, A) - fisher)[0] > -1e-9 * fisher.trace()

    diagonal_A, diagonal_G = (
        kept in ("diagonal_A", "diagonals"),
        kept in ("diagonal_G", "diagonals"),
    )
    A_sum, G_sum, lookup_A = (
        (M.diagonal() if diagonal else M).clone()[None].to(device)
        for M, diagonal in ((A1, diagonal_A), (G1, diagonal_G), (A2, diagonal_A))
    )
    ops.kronecker_factors_add_lookups_(A_sum, G_sum, lookup_A, counts[None].to(device), rows=rows)
    torch.testing.assert_close(A_sum[0].cpu(), rows * (A.diagonal() if diagonal_A else A))
    torch.testing.assert_close(G_sum[0].cpu(), G.diagonal() if diagonal_G else G)


def test_lookups_like_the_products_double_the_fisher_matrix():
    """As two linear layers with a shared weight and the same inputs do."""
    A, G = spd(3, 0)[None], torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    A_sum, G_sum = 10 * A, G.clone()
    ops.kronecker_factors_add_lookups_(A_sum, G_sum, A * G.sum(), 7 * G, rows=10)
    torch.testing.assert_close(A_sum, 10 * A)
    torch.testing.assert_close(G_sum, 2 * G)


@pytest.mark.parametrize("zero", ["inputs", "output_gradients", "lookups", "all"])
def test_factors_of_layers_without_a_signal_are_finite(zero):
    A, G, lookups = spd(3, 0)[None], torch.ones(1, 4).double(), spd(3, 1)[None]
    counts = torch.ones(1, 4).double()
    A = A * (zero not in ("inputs", "all"))
    G = G * (zero not in ("output_gradients", "all"))
    lookups, counts = (t * (zero not in ("lookups", "all")) for t in (lookups, counts))
    ops.kronecker_factors_add_lookups_(A, G, lookups, counts, rows=2)
    assert A.isfinite().all()
    assert G.isfinite().all()
    assert bool(A.any()) == bool(G.any()) == (zero != "all")


@pytest.mark.parametrize("diagonal", [True, False])
def test_opcheck_of_lookups(diagonal, device):
    sums, indices, h, options = lookup_case(device, diagonal)
    opcheck(ops.kronecker_factors_update_.default, (*sums, indices, h), options)
    heads = [torch.ones(1, 4, 4), torch.ones(1, 5)]
    arguments = (*(t.to(device, h.dtype) for t in heads), *sums)
    opcheck(ops.kronecker_factors_add_lookups_.default, arguments, {"rows": 3})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"A_sum": torch.zeros(1, 4, 4).double()}, r"A_sum has shape \[1, 4, 4\]"),
        ({"G_sum": torch.zeros(1, 5, 5).double()}, r"a diagonal, \[1, 5\], got shape"),
        ({"output_gradient": torch.zeros(4, 5, 3)}, "they must be .* and .*width"),
    ],
)
def test_wrong_lookups_are_refused(change, message):
    sums, indices, h, options = lookup_case("cpu", diagonal=False)
    arguments = {"A_sum": sums[0], "G_sum": sums[1], "input": indices, "output_gradient": h}
    with pytest.raises(ValueError, match=message):
        ops.kronecker_factors_update_(**{**arguments, **options, **change})
    with pytest.raises(ValueError, match="do not fit"):
        ops.kronecker_factors_add_lookups_(*sums, *sums[:1], sums[1][:, :4], rows=3)


@pytest.mark.parametrize("name", ["mlp", "convolutions", "tied_embedding"])
def test_opcheck_of_rows(name, device):
    model, batch = model_and_batch(name, device=device)
    captured = capture(model, loss_fn, [batch])
    captured.params = [p.detach() for p in captured.params]
    opcheck(ops.per_sample_gradients.default, captured.arguments, {"scale": 2.0})


@pytest.mark.parametrize("name", ["mlp", "convolutions", "tied_embedding"])
def test_opcheck_of_what_needs_no_rows(name, device):
    model, batch = model_and_batch(name, device=device)
    captured = capture(model, loss_fn, [batch])
    captured.params = [p.detach() for p in captured.params]
    workspace = {"max_workspace_bytes": 2**20}
    vectors = [torch.ones_like(p) for p in captured.params]
    for operator, options in (
        (ops.per_sample_norms, workspace),
        (ops.per_sample_gram, {}),
        (ops.per_sample_products, {"vectors": vectors}),
        (ops.clipped_gradient_sums, {"max_norm": 0.1, **workspace}),
    ):
        opcheck(operator.default, captured.arguments, options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("workspace", [1, 2**28])
def test_norms_of_micro_batches(name, workspace, device):
    """With different numbers of positions per sample."""
    model, batch = model_and_batch(name, device=device)
    _, other = model_and_batch(name, samples=3, device=device, seed=1)
    if name in ("tied_embedding", "two_tables"):
        other = other[0][:, :4], other[1]
    captured = capture(model, loss_fn, [batch, other])
    rows = rows_of(model, [batch, other])
    norms = ops.per_sample_norms(*captured.arguments, max_workspace_bytes=workspace)
    expected = torch.cat([row.flatten(1) for row in rows], 1).norm(dim=1) / captured.samples
    torch.testing.assert_close(norms, expected, rtol=1e-10, atol=1e-12)


def wrong_factors(change: dict):
    sums, x, g, options = factor_case("conv_groups", True, "cpu")
    arguments = {"A_sum": sums[0], "G_sum": sums[1], "input": x, "output_gradient": g, **options}
    return {**arguments, **change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"A_sum": torch.zeros(2, 17, 17).double()}, r"A_sum has shape \[2, 17, 17\]; it must be"),
        ({"A_sum": torch.zeros(2, 19, 19).int()}, "A_sum has dtype Int"),
        ({"A_sum": torch.zeros(2, 19, 19)}, "A_sum has dtype Float and G_sum Double"),
        ({"G_sum": torch.zeros(1, 2, 2).double()}, r"G_sum has shape \[1, 2, 2\]"),
        ({"input": torch.zeros(5, 4, 7, 7, dtype=torch.int64)}, "inputs.0. of a conv2d layer is"),
        ({"input": torch.zeros(5, 4, 9, 7)}, r"inputs of shape \[5, 4, 9, 7\]"),
        ({"output_gradient": torch.zeros(5, 4, 4)}, "output gradient"),
        ({"weight_shape": [4, 2, 3]}, r"weight of shape \[4, 2, 1, 3\]"),
        ({"call": [2, -1, -1, 0, *[0] * 12]}, "embedding layer is"),
        ({"call": [9, -1, -1, 0, *[0] * 12]}, "has kind 9"),
        ({"call": [1, -1, -1, 0, 0, 1, 1, 1, 1, 2, 2, *[0] * 5]}, "stride, dilation and groups"),
        ({"call": [1, -1]}, "16 integers"),
    ],
)
def test_wrong_factors_are_refused_and_nothing_changes(change, message):
    arguments = wrong_factors(change)
    before = [arguments["A_sum"].clone(), arguments["G_sum"].clone()]
    with pytest.raises(ValueError, match=message):
        ops.kronecker_factors_update_(**arguments)
    torch.testing.assert_close([arguments["A_sum"], arguments["G_sum"]], before)


def one_call(**change) -> dict:
    x, g = torch.randn(2, 3), torch.randn(2, 4)
    arguments = {
        "params": [torch.zeros(4, 3), torch.zeros(4)],
        "inputs": [x],
        "output_gradients": [g],
        "calls": [0, 0, 1, 0, *[0] * 12],
        "call_eps": [0.0],
    }
    return {**arguments, **change}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"call_eps": []}, "0 call_eps"),
        ({"calls": [0, 2, 1, 0, *[0] * 12]}, "weight is parameter 2 of 2"),
        ({"calls": [0, 0, -2, 0, *[0] * 12]}, "bias is parameter -2 of 2"),
        ({"calls": [0, 1, -1, 0, *[0] * 12]}, r"weight of shape \[4\]"),
        ({"calls": [0, -1, 0, 0, *[0] * 12]}, r"the bias of a linear layer has shape \[4, 3\]"),
        ({"calls": [3, 1, -1, 0, 1, *[0] * 11]}, r"layer_norm layer got inputs of shape \[2, 3\]"),
        ({"inputs": [torch.zeros(2, 3).to_sparse()]}, "it must be a dense"),
        ({"output_gradients": [torch.randn(3, 4)]}, "same leading dimensions"),
        ({"inputs": [torch.zeros(0, 3)], "output_gradients": [torch.zeros(0, 4)]}, "no samples"),
        ({"inputs": [], "output_gradients": [], "calls": [], "call_eps": []}, "no samples"),
        (
            {
                "inputs": [torch.randn(2, 3), torch.randn(3, 3)],
                "output_gradients": [torch.randn(2, 4), torch.randn(3, 4)],
                "calls": [0, 0, 1, 0, *[0] * 12, 0, 0, 1, 0, *[0] * 12],
                "call_eps": [0.0, 0.0],
            },
            r"calls\[1\] \(linear\) has seen 3 samples but calls\[0\]",
        ),
    ],
)
def test_wrong_calls_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ops.per_sample_gradients(**one_call(**change))
