"""The K-FAC step operator with the interface of reference.ReferenceKFAC, and problems for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torchium  # noqa: F401  registers the operators
from reference import Layer
from reference.kfac import Sample
from torch import Tensor

ops = torch.ops.torchium
# The operator's arguments with one entry per layer, in the order of kfac_init_state.
STATE = ["A", "G", "A_roots", "G_roots", "A_eigenvalues", "G_eigenvalues"]
STATE += ["factor_updates", "root_failures"]
DEFAULTS = {"lr": 0.003, "momentum": 0.9, "weight_decay": 0.0, "maximize": False}
LAYER_DEFAULTS = {"damping": 0.01, "TCov": 5, "TInv": 10, "eps": 1e-8, "stat_decay": 0.95}


class OperatorKFAC:
    """K-FAC on given samples: options and layers as in ReferenceKFAC, any dtype.

    captured: per-sample gradients, as in ReferenceKFAC. The operator gets those of the batch: of the mean
    over the samples (batch_averaged) or the sum.
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
        self.options = {
            p: DEFAULTS | LAYER_DEFAULTS | {k: v for k, v in group.items() if k != "params"}
            for group in param_groups
            for p in group["params"]
        }
        self.layers = list(layers)
        self.shared = {"kl_clip": kl_clip, "damping_split": damping_split}
        self.shared["batch_averaged"] = batch_averaged
        params = list(self.options)
        self.device = params[0].device
        self.status = torch.tensor([0, 0, -1, 0, -1], device=self.device)
        steps = torch.zeros(len(params), dtype=torch.float64, device=self.device)
        self.steps = dict(zip(params, steps.unbind(), strict=True))
        dtypes = {p: torch.promote_types(p.dtype, torch.float32) for p in params}
        self.buffers = {p: torch.zeros_like(p, dtype=dtypes[p]) for p in params}
        self.states = [
            dict(
                zip(
                    STATE,
                    ops.kfac_init_state(
                        layer.weight,
                        has_bias=layer.bias is not None,
                        groups=layer.groups,
                        damping_split=damping_split,
                    ),
                    strict=True,
                )
            )
            for layer in self.layers
        ]

    def arguments(self, captured: dict[int, list], found_inf: bool = False) -> tuple[list, dict]:
        """Positional and keyword arguments of the operator for the next step."""
        params = [p for p in self.options if p.grad is not None]
        index = {p: i for i, p in enumerate(params)}
        active = [i for i, layer in enumerate(self.layers) if layer.weight in index]
        rows, sums = [], []
        for i in active:
            layer, o = self.layers[i], self.options[self.layers[i].weight]
            step = int(self.steps[layer.weight].item())
            samples = captured.get(i, []) if step % o["TCov"] == 0 else []
            updates = self.states[i]["factor_updates"].item() + bool(samples)
            due = updates > 0 and (step % o["TInv"] == 0 or updates == bool(samples))
            positions = sum(sample.a.shape[1] for sample in samples)
            bias = index.get(layer.bias, -1)
            rows += [index[layer.weight], bias, len(samples), positions, int(due), 0]
            sums.append(self.sums(i, samples))
        lr = {o["lr"]: torch.tensor(o["lr"], dtype=torch.float64) for o in self.options.values()}
        state = [[self.states[i][key] for i in active] for key in STATE]
        positional = [params, [p.grad for p in params], [self.steps[p] for p in params]]
        positional += [[self.buffers[p] for p in params], self.status, *state]
        positional += [[A for A, _ in sums], [G for _, G in sums], rows]
        of_params = {"momentums": "momentum", "weight_decays": "weight_decay"}
        of_params["maximize"] = "maximize"
        options = {k: [self.options[p][v] for p in params] for k, v in of_params.items()}
        options["lrs"] = [lr[self.options[p]["lr"]] for p in params]
        of_layers = {"dampings": "damping", "stat_decays": "stat_decay", "floors": "eps"}
        options |= {
            k: [self.options[self.layers[i].weight][v] for i in active]
            for k, v in of_layers.items()
        }
        options["found_inf"] = torch.tensor(1.0) if found_inf else None
        return positional, {**options, **self.shared}

    def sums(self, i: int, samples: list) -> tuple[Tensor, Tensor]:
        """Sums of a a^T and g g^T over all samples of the layer, as after a backward pass."""
        like = self.states[i]["A"]
        if not samples:
            return like.new_empty(0), like.new_empty(0)
        a, g = (
            torch.cat([getattr(sample, side) for sample in samples], dim=1).to(torch.float64)
            for side in "ag"
        )
        if self.shared["batch_averaged"]:
            g = g / len(samples)
        return (a.mT @ a).to(like), (g.mT @ g).to(like)

    def step(self, captured: dict[int, list], **more: Any) -> None:
        positional, options = self.arguments(captured, **more)
        ops.kfac_step_(*positional, **options)


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
