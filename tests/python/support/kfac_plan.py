"""The plan of K-FAC behind the interface of reference.ReferenceKFAC, and problems for both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torchium  # noqa: F401  registers operators and plans
from reference import Layer
from reference.kfac import Sample
from torch import Tensor

# Names in the tests of what a layer keeps, whatever damping_split makes of its factors.
STATE = {
    "A": ("A",),
    "G": ("G",),
    "A_roots": ("A_inverse", "A_eigenvectors"),
    "G_roots": ("G_inverse", "G_eigenvectors"),
    "A_eigenvalues": ("A_eigenvalues",),
    "G_eigenvalues": ("G_eigenvalues",),
    "factor_updates": ("factor_updates",),
    "root_failures": ("root_failures",),
}
DEFAULTS = {"lr": 0.003, "momentum": 0.9, "weight_decay": 0.0, "maximize": False}
LAYER_DEFAULTS = {"damping": 0.01, "TCov": 5, "TInv": 10, "eps": 1e-8, "stat_decay": 0.95}


def first_state(layer: Layer, damping_split: str) -> dict[str, Tensor]:
    """State of a weight whose factors were never updated."""
    weight, groups = layer.weight, layer.groups
    orders = {"A": weight[0].numel() + (layer.bias is not None), "G": len(weight) // groups}
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    options = {"dtype": dtype, "device": weight.device}
    state = {
        "step": torch.zeros((), dtype=torch.float64, device=weight.device),
        "factor_updates": torch.zeros((), dtype=torch.float32, device=weight.device),
        "root_failures": torch.zeros(2, dtype=torch.int32, device=weight.device),
    }
    for key, n in orders.items():
        state[key] = torch.zeros(groups, n, n, **options)
        identities = torch.eye(n, **options).repeat(groups, 1, 1)
        if damping_split == "exact":
            state[f"{key}_eigenvectors"] = identities
            state[f"{key}_eigenvalues"] = torch.full((groups, n), -1.0, **options)
        else:
            state[f"{key}_inverse"] = identities
    return state


class PlanKFAC:
    """K-FAC on given samples: options and layers as those of ReferenceKFAC, any dtype.

    captured: as there, gradients of the loss of single samples. The plan gets those of the
    batch: of the mean over the samples (batch_averaged) or the sum.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        layers: Sequence[Layer],
        *,
        kl_clip: float | None = 1e-3,
        damping_split: str = "pi",
        batch_averaged: bool = True,
    ) -> None:
        self.groups = [
            DEFAULTS | LAYER_DEFAULTS | {k: v for k, v in group.items() if k != "params"}
            for group in param_groups
        ]
        self.params = [p for group in param_groups for p in group["params"]]
        self.group_of = [i for i, group in enumerate(param_groups) for _ in group["params"]]
        self.layers = list(layers)
        self.shared: dict[str, Any] = {"kl_clip": kl_clip, "damping_split": damping_split}
        self.shared |= {"batch_averaged": batch_averaged, "solver": "eigh"}
        self.plan = torch.classes.torchium.KfacPlan("KFAC", "")
        self.state: dict[Tensor, dict[str, Tensor]] = {p: {} for p in self.params}
        for layer in self.layers:
            self.state[layer.weight] = first_state(layer, damping_split)

    @property
    def states(self) -> list[dict[str, Tensor]]:
        """The state of each layer, under the names of STATE."""
        of_weights = [self.state[layer.weight] for layer in self.layers]
        return [
            {name: state[key] for name, keys in STATE.items() for key in keys if key in state}
            for state in of_weights
        ]

    @property
    def failures(self) -> list[int]:
        """Skips in a row, the parameter of the last, failures of roots in a row, their parameter."""
        self.plan.request_report()
        found = [0, -1, 0, -1]
        while (failure := self.plan.next_failure(True)) is not None:
            _, skips, skipped_by, roots, failed = failure
            found = [skips, self.position(skipped_by), roots, self.position(failed)]
            latest = [skips > 0, roots > 0]
            found[1] = found[1] if latest[0] else -1
            found[3] = found[3] if latest[1] else -1
        return found

    def position(self, param: Tensor | None) -> int:
        return next((i for i, p in enumerate(self.params) if p is param), -1)

    def bind(self) -> None:
        states = [self.state[p] for p in self.params]
        names = [str(i) for i in range(len(self.params))]
        self.plan.bind(self.params, states, self.group_of, names)

    def step(self, captured: dict[int, list], found_inf: bool = False) -> None:
        self.bind()
        options = [group | self.shared for group in self.groups]
        self.plan.set_options(tuple(tuple(chain.from_iterable(o.items())) for o in options))
        self.plan.due()
        for i, samples in captured.items():
            if samples and self.layers[i].weight.grad is not None:
                self.plan.record(*self.call(self.layers[i], samples))
        for i, key, value in self.plan.missing_state():
            self.state[self.params[i]][key] = value
        self.bind()
        assert self.plan.prepare()
        lrs = tuple(float(group["lr"]) for group in self.groups)
        self.plan.step(lrs, torch.tensor(1.0) if found_inf else None, None)
        self.plan.forget()

    def call(self, layer: Layer, samples: list) -> tuple[Tensor, Tensor, list[int]]:
        """A call of the layer that sees these inputs, as patches side by side for a convolution."""
        fan_in, device = layer.weight[0].numel(), layer.weight.device
        a = torch.stack([sample.a for sample in samples])[..., :fan_in].to(device)
        g = torch.stack([sample.g for sample in samples]).to(device)
        if self.shared["batch_averaged"]:
            g = g / len(samples)
        n, groups, positions = a.shape[:3]
        place = [self.position(layer.weight), self.position(layer.bias), 0]
        if layer.weight.dim() == 2:
            return a[:, 0], g[:, 0], [0, *place, *[0] * 12]
        channels, height, width = layer.weight.shape[1:]
        patches = a.reshape(n, groups, positions, channels, height, width)
        image = patches.permute(0, 1, 3, 2, 4, 5).reshape(n, groups * channels, -1, width)
        row = [1, *place, height, width, 0, 0, 1, 1, groups, *[0] * 5]
        return image, g.permute(0, 1, 3, 2).reshape(n, -1, positions, 1), row


# Layers of every kind, and a vector and a tensor that belong to no layer.
SHAPES = [
    (((6, 5), (6,), 1), "linear with bias"),
    (((3, 6), None, 1), "linear"),
    (((4, 2, 3, 2), (4,), 2), "grouped convolution with bias"),
    (((3, 1, 2, 2), None, 3), "depthwise convolution"),
]


class Problem:
    """Parameters of all kinds, and random samples and gradients for any number of steps."""

    def __init__(self, dtype: torch.dtype = torch.float64, device: Any = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

        self.layers = []
        for (weight, bias, groups), _ in SHAPES:
            bias = None if bias is None else random(*bias)
            self.layers.append(Layer(random(*weight), bias, groups))
        self.others = [random(7), random(2, 3, 2)]
        self.generator = generator

    @property
    def params(self) -> list[Tensor]:
        of_layers = [p for layer in self.layers for p in (layer.weight, layer.bias)]
        return [p for p in of_layers if p is not None] + self.others

    def batch(self, samples: int = 4, positions: int = 3) -> dict[int, list]:
        """New gradients for all parameters; new samples for every layer, in float64."""

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=self.generator, dtype=torch.float64)

        for p in self.params:
            p.grad = random(*p.shape).to(p.device, p.dtype)
        captured = {}
        for i, layer in enumerate(self.layers):
            groups, bias = layer.groups, layer.bias is not None
            n_out, fan_in = len(layer.weight) // groups, layer.weight[0].numel()
            captured[i] = []
            for _ in range(samples):
                a, g = random(groups, positions, fan_in), random(groups, positions, n_out)
                a = torch.cat([a, torch.ones_like(a[..., :1])], -1) if bias else a
                captured[i].append(Sample(a, g))
        return captured
