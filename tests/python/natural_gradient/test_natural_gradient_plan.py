"""The plan of natural gradient against dense float64 solves."""

from __future__ import annotations

import copy
from itertools import chain

import pytest
import torch
import torchium  # noqa: F401  registers operators and plans
from captured_layers import MODELS, Captured, capture, loss_fn, model_and_batch
from reference import ReferenceNaturalGradient
from torch import Tensor

ops = torch.ops.torchium
DAMPINGS = [1e-7, 1e-5, 1e-3, 1e-1, 1.0]


def spread(option: object, count: int) -> list:
    """An option of every parameter."""
    return option if isinstance(option, list) else [option] * count


class Step:
    """Natural gradient on captured layer calls, without hooks. Each parameter is a group."""

    def __init__(
        self,
        params: list[Tensor],
        lr: float | list[float] = 1.0,
        damping: float | list[float] = 1e-3,
        *,
        momentum: float | list[float] = 0.0,
        maximize: bool | list[bool] = False,
        **options,
    ) -> None:
        own = {"lr": lr, "damping": damping, "momentum": momentum, "maximize": maximize}
        values = zip(*(spread(option, len(params)) for option in own.values()), strict=True)
        shared = {"update_freq": 1, "eps": 1e-13, "max_norm": None, "solver": "gram", **options}
        self.groups = [dict(zip(own, value, strict=True)) | shared for value in values]
        self.params = params
        self.state: list[dict[str, Tensor]] = [{} for _ in params]
        self.plan = torch.classes.torchium.NaturalGradientPlan("NaturalGradient", "")

    @property
    def steps(self) -> list[Tensor]:
        return [state["step"] for state in self.state]

    @property
    def buffers(self) -> list[Tensor]:
        return [state["momentum_buffer"] for state in self.state if "momentum_buffer" in state]

    @property
    def failures(self) -> list[int]:
        """Skips in a row, the parameter of the last, failures in a row, their parameter."""
        self.plan.request_report()
        found = [0, -1, 0, -1]
        while (failure := self.plan.next_failure(True)) is not None:
            _, skips, skipped_by, failed, failed_by = failure
            found = [skips, self.position(skipped_by), failed, self.position(failed_by)]
        return found

    def position(self, param: Tensor | None) -> int:
        return next((i for i, p in enumerate(self.params) if p is param), -1)

    def __call__(
        self,
        captured: Captured,
        gradients: list[Tensor] | None = None,
        found_inf: Tensor | None = None,
        loss_scale: Tensor | None = None,
    ) -> tuple[str, int, int, int, float]:
        """A step, and its report. ``gradients``: those of the captured batch, unless given."""
        rows = torch.tensor(captured.calls).view(-1, 16).tolist()
        used = {i for row in rows for i in row[1:3]}
        gradients = captured.gradients if gradients is None else gradients
        for i, (p, g) in enumerate(zip(self.params, gradients, strict=True)):
            p.grad = g if i in used else None
        self.bind()
        self.plan.set_options(tuple(tuple(chain.from_iterable(g.items())) for g in self.groups))
        if self.plan.is_refresh():
            tensors = zip(captured.inputs, captured.output_gradients, strict=True)
            for call, row, eps in zip(tensors, rows, captured.call_eps, strict=True):
                self.plan.record(*call, row, eps)
        self.change_state(self.plan.missing_state())
        self.bind()
        assert self.plan.prepare()
        lrs = tuple(group["lr"] for group in self.groups)
        self.change_state(self.plan.step(lrs, found_inf, loss_scale))
        self.plan.forget()
        return self.plan.report()

    def bind(self) -> None:
        names = [str(i) for i in range(len(self.params))]
        self.plan.bind(self.params, self.state, list(range(len(self.params))), names)

    def change_state(self, changes: list[tuple[int, str, Tensor | None]]) -> None:
        for i, key, value in changes:
            if value is None:
                del self.state[i][key]
            else:
                self.state[i][key] = value


def copies(params: list[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def rows_of(captured: Captured) -> list[Tensor]:
    """The Jacobian, by an operator. Other tests compare it with single-sample backward passes."""
    params = [p.detach().double() for p in captured.params]
    return ops.per_sample_gradients(params, *captured.layers, scale=captured.samples)


def reference_step(
    reference: ReferenceNaturalGradient, captured: Captured, gradients: list[Tensor] | None = None
) -> None:
    gradients = captured.gradients if gradients is None else gradients
    for p, g in zip(reference.params, gradients, strict=True):
        p.grad = g.double().cpu()
    reference.step([r.cpu() for r in rows_of(captured)])


def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.double().cpu().flatten() for t in tensors])


def assert_updates_close(params, before, expected, tolerance: float) -> None:
    """Compare the changes of all parameters together."""
    exact = joined(expected) - joined(before)
    assert exact.norm() > 0
    assert (joined(params) - joined(expected)).norm() <= tolerance * exact.norm()


def case(name: str, device="cpu", dtype=torch.float64, **batch) -> Captured:
    model, data = model_and_batch(name, device=device, dtype=dtype, **batch)
    captured = capture(model, loss_fn, [data])
    captured.params = copies(captured.params)
    return captured


def with_noise(gradients: list[Tensor], relative: float) -> list[Tensor]:
    """Every element changed by up to `relative` of itself."""
    generator = torch.Generator().manual_seed(0)
    return [
        g * (1 + relative * (2 * torch.rand(g.shape, generator=generator, dtype=g.dtype) - 1))
        for g in gradients
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("damping", DAMPINGS)
@pytest.mark.parametrize("solver", ["gram", "explicit", "cg"])
def test_direction_is_the_dense_solve(name, damping, solver, device):
    captured = case(name, device)
    params = copies(captured.params)
    expected = [p.cpu() for p in copies(params)]
    reference_step(ReferenceNaturalGradient(expected, 1.0, damping), captured)
    report = Step(params, damping=damping, solver=solver)(captured)
    assert_updates_close(params, captured.params, expected, 1e-6)
    found, samples, rows, iterations, residual = report
    assert rows == samples
    assert (found, samples) == (solver, captured.samples)
    assert (iterations > 0) == (solver == "cg")
    assert residual <= 1e-13


@pytest.mark.parametrize("solver", ["gram", "explicit", "cg"])
def test_more_samples_than_parameters(solver, device):
    captured = case("mlp", device, samples=150)
    assert sum(p.numel() for p in captured.params) < 150
    params = copies(captured.params)
    expected = [p.cpu() for p in copies(params)]
    reference_step(ReferenceNaturalGradient(expected, 1.0, 1e-4), captured)
    Step(params, damping=1e-4, solver=solver)(captured)
    assert_updates_close(params, captured.params, expected, 1e-6)


# Parameters of the path from the batch's gradient to the step.
CHANGES = {
    "norm_clipping": lambda g, p: [0.1 * x for x in g],
    "value_clipping": lambda g, p: [x.clamp(-0.01, 0.01) for x in g],
    "weight_decay": lambda g, p: [x + 0.1 * y for x, y in zip(g, p, strict=True)],
    "one_element": lambda g, p: [x + 1e-3 * (torch.arange(x.numel()).view_as(x) == 1) for x in g],
    "opposite": lambda g, p: [-x for x in g],
    "zero": lambda g, p: [torch.zeros_like(x) for x in g],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("damping", [1e-6, 1e-2])
@pytest.mark.parametrize("solver", ["gram", "explicit", "cg"])
def test_gradients_that_are_not_the_mean_of_the_samples(change, damping, solver):
    captured = case("mlp")
    gradients = CHANGES[change](captured.gradients, captured.params)
    params, expected = copies(captured.params), copies(captured.params)
    reference_step(ReferenceNaturalGradient(expected, 1.0, damping), captured, gradients)
    Step(params, damping=damping, solver=solver)(captured, gradients)
    if change == "zero":
        torch.testing.assert_close(params, captured.params, rtol=0, atol=0)
    else:
        assert_updates_close(params, captured.params, expected, 1e-6)


OPTIONS = {
    "momentum": {"momentum": 0.9},
    "update_freq": {"update_freq": 3},
    "update_freq_and_momentum": {"update_freq": 2, "momentum": 0.7},
    "max_norm": {"max_norm": 0.5, "momentum": 0.5},
    "large_max_norm": {"max_norm": 1e6},
    "maximize": {"maximize": True, "momentum": 0.5},
    "groups": {
        "lr": [0.1, 0.2, 0.1, 0.3, 0.1, 0.1],
        "damping": [1e-3, 1e-1, 1e-2, 1e-3, 1e-3, 1.0],
        "momentum": [0.9, 0.0, 0.5, 0.9, 0.9, 0.0],
        "maximize": [False, True, False, False, False, False],
        "update_freq": 2,
    },
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("solver", ["gram", "explicit", "cg"])
def test_several_steps(name, solver, device):
    """Each on another batch, with gradients close to its mean: some are clipped."""
    options = {"lr": 0.1, "damping": 1e-3, "momentum": 0.0, **OPTIONS[name]}
    params = copies(case("mlp", device).params)
    expected = [p.cpu() for p in copies(params)]
    step = Step(params, solver=solver, **options)
    reference = ReferenceNaturalGradient(expected, **options)
    before = copies(params)
    for seed in range(5):
        captured = case("mlp", device, samples=4 + seed, seed=0)
        gradients = (
            captured.gradients if seed != 2 else [g.clamp(-0.1, 0.1) for g in captured.gradients]
        )
        reference_step(reference, captured, gradients)
        step(captured, gradients)
        assert_updates_close(params, before, expected, 1e-6)
    assert [s.item() for s in step.steps] == [5] * len(params)
    assert step.failures == [0, -1, 0, -1]


@pytest.mark.parametrize("name", ["sequence", "convolutions", "tied_embedding"])
@pytest.mark.parametrize("solver", ["gram", "explicit", "cg"])
def test_micro_batches_are_one_batch(name, solver):
    model, (inputs, targets) = model_and_batch(name, samples=7)
    whole = capture(model, loss_fn, [(inputs, targets)])
    pieces = [(inputs[i], targets[i]) for i in (slice(0, 2), slice(2, 3), slice(3, 7))]
    parts = capture(model, loss_fn, pieces)
    results = []
    for captured in (whole, parts):
        params = copies(captured.params)
        Step(params, solver=solver)(captured)
        results.append(params)
    assert_updates_close(results[1], whole.params, results[0], 1e-9)


@pytest.mark.parametrize("solver", ["gram", "explicit", "cg"])
def test_a_loss_scale_cancels(solver, device):
    captured = case("mlp", device)
    scaled = copy.deepcopy(captured)
    scaled.output_gradients = [1024 * g for g in captured.output_gradients]
    results = []
    for data, loss_scale in ((captured, None), (scaled, torch.tensor(1024.0, device=device))):
        params = copies(captured.params)
        Step(params, solver=solver)(data, captured.gradients, loss_scale=loss_scale)
        results.append(params)
    assert torch.equal(joined(results[0]), joined(results[1]))


@pytest.mark.parametrize("damping", DAMPINGS)
def test_float32_is_as_good_as_its_products(damping, device):
    """The bound of J^T w in float32, |computed - exact| <= (n + 4) u |J|^T |w|, and of v likewise; w itself
    comes from float64.
    """
    captured = case("mlp", device, torch.float32, samples=16)
    n, unit = captured.samples, 2.0**-24
    J = torch.cat([r.flatten(1) for r in rows_of(captured)], 1).cpu()
    S = J @ J.mT / (n * damping) + torch.eye(n, dtype=J.dtype)
    w = torch.linalg.solve(S, torch.full((n,), 1 / n, dtype=J.dtype)) / damping
    exact, v = J.mT @ w, J.mean(0)
    rounding = (J.abs().mT @ w.abs()).norm() + (J.abs().mean(0)).norm() / v.norm() * exact.norm()
    step = Step(copies(captured.params), damping=damping, momentum=0.5)
    step(captured)
    assert (joined(step.buffers) - exact).norm() <= 2 * (n + 4) * unit * rounding


@pytest.mark.parametrize("damping", [1e-6, 1e-3])
@pytest.mark.parametrize("where", ["parameters", "layers"])
def test_rounding_of_a_bfloat16_gradient_is_not_taken_for_a_signal(damping, where, device):
    """It would be divided by the damping. Only layers: float32 parameters under autocast."""
    dtype = torch.bfloat16 if where == "parameters" else torch.float32
    captured = case("mlp", device, dtype, samples=16)
    if where == "layers":
        captured.output_gradients = [g.bfloat16() for g in captured.output_gradients]
    exact = copies([p.double().cpu() for p in captured.params])
    rows = rows_of(captured)
    mean = [r.mean(0) for r in rows]
    reference = ReferenceNaturalGradient(exact, 1.0, damping)
    before = copies(exact)
    reference_step(reference, captured, mean)
    step = Step(copies(captured.params), damping=damping, momentum=0.5)
    step(captured, [g.to(device, dtype) for g in with_noise([m.cpu() for m in mean], 2.0**-9)])
    direction = joined(before) - joined(exact)
    error = (joined(step.buffers) - direction).norm() / direction.norm()
    assert error <= 2 * torch.finfo(torch.bfloat16).eps
    # The same rounding is a signal if everything is float64.
    captured.output_gradients = [g.double() for g in captured.output_gradients]
    captured.inputs = [x.double() for x in captured.inputs]
    captured.params = [p.double() for p in captured.params]
    step = Step(captured.params, damping=damping, momentum=0.5)
    step(captured, [g.to(device) for g in with_noise([m.cpu() for m in mean], 2.0**-9)])
    assert (joined(step.buffers) - direction).norm() / direction.norm() > error


def test_a_step_leaves_its_inputs_alone():
    captured = case("mlp")
    for update_freq in (1, 2):
        step = Step(copies(captured.params), momentum=0.5, update_freq=update_freq)
        tensors = [*captured.gradients, *captured.inputs, *captured.output_gradients]
        before = copies(tensors)
        step(captured)
        step(captured)
        assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


def state_of(step: Step) -> list[Tensor]:
    return copies([*step.params, *step.buffers])


@pytest.mark.parametrize("solver", ["gram", "explicit", "cg"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_the_step(solver, bad, device):
    captured = case("mlp", device)
    step = Step(copies(captured.params), solver=solver, momentum=0.5)
    step(captured)
    before = state_of(step)
    gradients = copies(captured.gradients)
    gradients[3].view(-1)[0] = bad
    for count in (1, 2):
        step(captured, gradients)
        assert step.failures == [count, 3, 0, -1]
    torch.testing.assert_close(state_of(step), before, rtol=0, atol=0)
    assert [s.item() for s in step.steps] == [1] * len(step.params)
    step(captured)
    assert step.failures == [0, -1, 0, -1]
    assert not torch.equal(joined(state_of(step)), joined(before))


def test_found_inf_skips_the_step_and_is_no_failure(device):
    captured = case("mlp", device)
    step = Step(copies(captured.params), momentum=0.5)
    step(captured)
    before = state_of(step)
    step(captured, found_inf=torch.tensor(1.0, device=device))
    assert step.failures == [0, -1, 0, -1]
    assert [s.item() for s in step.steps] == [1] * len(step.params)
    torch.testing.assert_close(state_of(step), before, rtol=0, atol=0)
    step(captured, found_inf=torch.tensor(0.0, device=device))
    assert not torch.equal(joined(state_of(step)), joined(before))


@pytest.mark.parametrize("solver", ["gram", "explicit", "cg"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_direction_that_is_not_finite_counts_as_failed(solver, momentum, device):
    """The gradient is finite, the captured tensors are not."""
    captured = case("mlp", device)
    step = Step(copies(captured.params), solver=solver, momentum=momentum)
    step(captured)
    before = state_of(step)
    broken = copy.deepcopy(captured)
    broken.output_gradients[0][1, 2] = float("nan")
    for count in (1, 2):
        step(broken)
        *skipped, failures, parameter = step.failures
        assert (skipped, failures) == ([0, -1], count)
        assert parameter >= 0
    torch.testing.assert_close(state_of(step), before, rtol=0, atol=0)
    step(captured)
    assert step.failures == [0, -1, 0, -1]
    assert not torch.equal(joined(state_of(step)), joined(before))


def test_parameters_of_any_strides(device):
    captured = case("mlp", device)
    params = [p.t().contiguous().t() if p.dim() == 2 else p.clone() for p in captured.params]
    assert not params[0].is_contiguous()
    expected = copies(captured.params)
    Step(params)(captured)
    Step(expected)(captured)
    assert_updates_close(params, captured.params, expected, 1e-12)


def test_an_update_does_not_change_what_later_ones_are_computed_from(device):
    """The second layer's input is the weight of the first one."""
    generator = torch.Generator().manual_seed(0)
    first, second, x, g, h = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(device)
        for shape in [(5, 4), (3, 4), (5, 4), (5, 5), (5, 3)]
    )
    uses = [0, 0, -1, 0, *[0] * 12, 0, 1, -1, 0, *[0] * 12]
    results = []
    for received in (first.clone(), first):
        captured = Captured([first, second], [x, received], [g, h], uses, [0.0, 0.0], samples=5)
        captured.gradients = [row.mean(0) for row in rows_of(captured)]
        step = Step([first, second.clone()])
        before = first.clone()
        step(captured)
        results.append(copies(step.params))
        first.copy_(before)
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_auto_solves_in_the_smaller_space():
    few, many = case("mlp", samples=5), case("mlp", samples=150)
    for captured, solver, expected in (
        (few, "auto", "gram"),
        (many, "auto", "explicit"),
        (few, "cg", "cg"),
        (many, "gram", "gram"),
    ):
        found, samples, *_ = Step(copies(captured.params), solver=solver)(captured)
        assert (found, samples) == (expected, captured.samples)


@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_has_its_damping(name, device):
    """Of 40 samples: rows of a table that many of them look up, and factors larger than rows."""
    captured = case(name, device, samples=40)
    dampings = [10.0 ** -(i % 4) for i in range(len(captured.params))]
    params = copies(captured.params)
    expected = [p.cpu() for p in copies(params)]
    reference_step(ReferenceNaturalGradient(expected, 1.0, dampings), captured)
    Step(params, damping=dampings)(captured)
    assert_updates_close(params, captured.params, expected, 1e-9)


@pytest.mark.parametrize(
    ("weight", "inputs", "gradients", "use"),
    [
        # Unfolded two samples at a time.
        (
            (2, 32, 3, 3),
            (5, 32, 80, 80),
            (5, 2, 78, 78),
            [1, 0, -1, 0, 1, 1, 0, 0, 1, 1, 1, *[0] * 5],
        ),
        # Rows of six of eight outputs at a time.
        (
            (8, 512, 3, 3),
            (300, 512, 3, 3),
            (300, 8, 3, 3),
            [1, 0, -1, 0, 1, 1, 1, 1, 1, 1, 1, *[0] * 5],
        ),
        # Pairs of 128 samples at a time.
        ((20, 30), (300, 2, 30), (300, 2, 20), [0, 0, -1, 0, *[0] * 12]),
    ],
)
def test_gram_matrices_and_products_in_pieces(weight, inputs, gradients, use, device):
    generator = torch.Generator().manual_seed(0)
    W, x, g = (
        torch.randn(shape, generator=generator).to(device) for shape in (weight, inputs, gradients)
    )
    n = len(x)
    g /= g[0].numel() * x[0].numel() ** 0.5
    captured = Captured([W], [x], [g], use, [0.0], samples=n)
    (rows,) = ops.per_sample_gradients([W], *captured.layers, scale=n)
    captured.gradients = [rows.mean(0)]
    step = Step([W.clone()], damping=1e-2, momentum=0.5)
    J, expected = rows.double().cpu().flatten(1), W.double().cpu().flatten()
    direction = torch.zeros_like(expected)
    for _ in range(2):
        step(captured)
        # The matrix inversion lemma, because F is too large for these weights.
        v = J.mean(0) - J.mT @ (J @ (0.5 * direction)) / n
        S = J @ J.mT + n * 1e-2 * torch.eye(n).double()
        direction = 0.5 * direction + (v - J.mT @ torch.linalg.solve(S, J @ v)) / 1e-2
        expected = expected - direction
    assert_updates_close(step.params, [W], [expected], 1e-5)


def test_conjugate_gradients_stop_at_the_tolerance():
    captured = case("mlp", samples=60)
    iterations = []
    for eps in (1e-1, 1e-4, 1e-12):
        step = Step(copies(captured.params), solver="cg", eps=eps, damping=1e-2)
        report = step(captured)
        iterations.append(report[3])
        assert 0 < report[4] <= eps
    assert iterations == sorted(set(iterations))


def test_autocast_does_not_reach_into_a_step():
    captured = case("mlp", dtype=torch.float32)
    results = []
    for enabled in (False, True):
        step = Step(copies(captured.params))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            step(captured)
        results.append(joined(step.params))
    assert torch.equal(*results)
