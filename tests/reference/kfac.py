"""K-FAC (Martens and Grosse 2015, arXiv 1503.05671; convolutions: Grosse and Martens 2016, arXiv
1602.01407) with the empirical Fisher or the generalized Gauss-Newton matrix, sample by sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVOLUTIONS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *BATCH_NORMS)
Solver = Callable[[Tensor], Tensor]


class Sample(NamedTuple):
    """Inputs and gradients of a layer for one sample at T positions, also as an embedding."""

    a: Tensor  # inputs [groups, T, a], 1 appended for a bias; normalised inputs of a norm [1, T, C]
    g: Tensor  # gradients of the loss of the sample [groups, T, o/groups]
    words: Tensor | None = None  # looked up, without padding [L]
    h: Tensor | None = None  # gradients by what was looked up [L, a]
    calls: tuple[int, ...] | None = None  # positions of each call of the layer; None: one call
    exchanged: bool = (
        False  # of a transposed convolution: a is of output gradients, and g of inputs
    )


@dataclass
class Layer:
    """Parameters of one preconditioned layer; weight [o, c/groups, ...], or [a, o] if transposed."""

    weight: Tensor
    bias: Tensor | None = None
    groups: int = 1
    transposed: bool = False
    table: bool = False  # of an embedding: a linear layer [in, out] on one-hot vectors
    norm: bool = False  # with a group for each channel

    def join(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """V [groups, o/groups, a] from a tensor of the weight's shape and one of the bias'."""
        if self.transposed:
            weight = weight.mT
        rows = 1 if self.norm else len(weight) // self.groups
        V = weight.reshape(self.groups, rows, -1)
        return V if bias is None else torch.cat([V, bias.reshape(self.groups, -1, 1)], dim=-1)

    def split(self, V: Tensor) -> tuple[Tensor, Tensor | None]:
        """The inverse of join."""
        weight = V if self.bias is None else V[..., :-1]
        if self.transposed:
            weight = weight[0].mT
        bias = None if self.bias is None else V[..., -1].reshape(self.bias.shape)
        return weight.reshape(self.weight.shape), bias


class ReferenceKFAC:
    """Changes float64 parameters in place by their `.grad`; options as those of torchium.KFAC.

    A parameter whose gradient is None is left out of the step, and its step count stays.
    """

    def __init__(
        self,
        param_groups: Sequence[dict[str, Any]],
        layers: Sequence[Layer],
        *,
        kl_clip: float | None = 1e-3,
        damping_split: str = "pi",
    ) -> None:
        defaults = {"lr": 0.003, "momentum": 0.9, "weight_decay": 0.0, "damping": 0.01}
        defaults |= {"TCov": 5, "TInv": 10, "eps": 1e-8, "stat_decay": 0.95, "maximize": False}
        defaults |= {"max_factor_size": 5000, "weight_sharing": "expand"}
        self.options = {
            p: defaults | {k: v for k, v in group.items() if k != "params"}
            for group in param_groups
            for p in group["params"]
        }
        self.layers = list(layers)
        self.kl_clip = kl_clip
        self.damping_split = damping_split
        self.state: dict[Tensor, dict[str, Any]] = {p: {"step": 0} for p in self.options}

    @torch.no_grad()
    def step(self, captured: dict[int, list[Sample]]) -> None:
        """One step. captured: the samples of each layer (by its index) since the last one."""
        active = [p for p in self.options if p.grad is not None]
        if not all(p.grad.isfinite().all() for p in active):
            return
        V = {p: self._gradient(p) for p in active}
        directions = dict(V)
        preconditioned = []
        for i, layer in enumerate(self.layers):
            if layer.weight in V:
                self._update_layer(layer, captured.get(i, []))
                self._precondition(layer, V, directions)
                preconditioned += [p for p in (layer.weight, layer.bias) if p in V]
        for p in active:
            self.state[p]["step"] += 1

        scale = 1.0
        if self.kl_clip is not None and preconditioned:
            kl = sum(
                (directions[p] * V[p]).sum().item() * self.options[p]["lr"] ** 2
                for p in preconditioned
            )
            scale = min(1.0, math.sqrt(self.kl_clip / abs(kl))) if kl else 1.0
        for p in preconditioned:
            directions[p] = scale * directions[p]
        for p in active:
            o, state = self.options[p], self.state[p]
            previous = state.get("momentum_buffer", torch.zeros_like(p))
            state["momentum_buffer"] = o["momentum"] * previous + directions[p]
            p.sub_(o["lr"] * state["momentum_buffer"])

    def _gradient(self, p: Tensor) -> Tensor:
        o = self.options[p]
        return (-p.grad if o["maximize"] else p.grad) + o["weight_decay"] * p

    def _update_layer(self, layer: Layer, samples: list[Sample]) -> None:
        """Factors and inverses, where due."""
        o, state = self.options[layer.weight], self.state[layer.weight]
        t = state["step"]
        if layer.norm:
            self._update_norm(layer, samples if t % o["TCov"] == 0 else [])
            return
        if t % o["TCov"] == 0 and samples:
            samples = [reduced(s) if o["weight_sharing"] == "reduce" else s for s in samples]
            A, G = (kept(F, o["max_factor_size"]) for F in factors(samples))
            state["k"] = k = state.get("k", 0) + 1
            d = min(1 - 1 / k, o["stat_decay"])
            state["A"] = d * state.get("A", torch.zeros_like(A)) + (1 - d) * A
            state["G"] = d * state.get("G", torch.zeros_like(G)) + (1 - d) * G
        if "A" in state and (t % o["TInv"] == 0 or "solve" not in state):
            state["solve"] = self._solvers(state, o)

    def _update_norm(self, layer: Layer, samples: list[Sample]) -> None:
        """Fisher blocks, and their damped inverses in every step."""
        o, state = self.options[layer.weight], self.state[layer.weight]
        if samples:
            F = fisher_blocks(samples, o["weight_sharing"], layer.bias is not None)
            state["k"] = k = state.get("k", 0) + 1
            d = min(1 - 1 / k, o["stat_decay"])
            state["F"] = d * state.get("F", torch.zeros_like(F)) + (1 - d) * F
        if "F" in state:
            damping = max(o["damping"], o["eps"])
            eye = torch.eye(state["F"].shape[-1], dtype=state["F"].dtype)
            state["solve"] = [
                lambda V, D=block + damping * eye: torch.linalg.solve(D, V.mT).mT
                for block in state["F"]
            ]

    def _solvers(self, state: dict[str, Any], o: dict[str, Any]) -> list[Solver]:
        """The map V -> (..)^-1 V of each group."""
        return [
            damped_solver(A, G, o["damping"], o["eps"], self.damping_split)
            for A, G in zip(state["A"], state["G"], strict=True)
        ]

    def _precondition(self, layer: Layer, V: dict, directions: dict) -> None:
        solvers = self.state[layer.weight].get("solve")
        if solvers is None:
            return
        matrices = layer.join(V[layer.weight], None if layer.bias is None else V[layer.bias])
        solved = torch.stack([solve(M) for solve, M in zip(solvers, matrices, strict=True)])
        weight, bias = layer.split(solved)
        directions[layer.weight] = weight
        if layer.bias is not None:
            directions[layer.bias] = bias


def reduced(sample: Sample) -> Sample:
    """One position for each call: the mean of a and the sum of g (Eschenhagen et al. 2023)."""
    sizes = sample.calls or (sample.a.shape[1],)
    of_inputs, of_gradients = (
        (torch.sum, torch.mean) if sample.exchanged else (torch.mean, torch.sum)
    )
    a = torch.stack([of_inputs(part, 1) for part in sample.a.split(sizes, dim=1)], dim=1)
    g = torch.stack([of_gradients(part, 1) for part in sample.g.split(sizes, dim=1)], dim=1)
    return sample._replace(a=a, g=g, calls=(1,) * len(sizes))


def fisher_blocks(samples: list[Sample], weight_sharing: str, with_bias: bool) -> Tensor:
    """The mean over samples of (u, v) (u, v)^T, [C, 2, 2], with the gradients u of scale and v of shift.

    "expand": each position is a sample. [C, 1, 1] of the scale alone (Osawa et al. 2019, section 4.2).
    """
    F = 0.0
    for sample in samples:
        sizes = sample.calls or (sample.a.shape[1],)
        for a, g in zip(sample.a[0].split(sizes), sample.g[0].split(sizes), strict=True):
            rows = torch.stack([a * g, g][: 1 + with_bias], dim=-1)  # [T, C, 1 or 2]
            if weight_sharing == "reduce":
                rows = rows.sum(0, keepdim=True)
            F = F + torch.einsum("tci,tcj->cij", rows, rows)
    return F / len(samples)


def factors(samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """A = sum a a^T / (N T) and G = sum g g^T / N; with lookups as in tied_factors, G a diagonal.

    Exchanged: A = sum a a^T / N, because it is of gradients, and G = sum g g^T / (N T).
    """
    A, G, rows = 0.0, 0.0, 0
    for a, g, *_ in samples:
        A = A + torch.einsum("gti,gtj->gij", a, a)
        G = G + torch.einsum("gti,gtj->gij", g, g)
        rows += a.shape[1]
    if samples[0].exchanged:
        return A / len(samples), G / rows
    A, G = A / rows, G / len(samples)
    lookups = [(s.words, s.h) for s in samples if s.words is not None]
    if not lookups:
        return A, G
    words, h = (torch.cat(parts) for parts in zip(*lookups, strict=True))
    h = nn.functional.pad(h, (0, A.shape[-1] - h.shape[-1]))  # a bias is not looked up
    frequencies = torch.bincount(words, minlength=G.shape[-1]).to(h.dtype) / max(len(words), 1)
    A, G = tied_factors(A[0], G[0], h.mT @ h / len(samples), torch.diag(frequencies))
    return A[None], torch.diag(G.diagonal())[None]


def tied_factors(A1: Tensor, G1: Tensor, A2: Tensor, G2: Tensor) -> tuple[Tensor, Tensor]:
    """A and G instead of G1 (x) A1 + G2 (x) A2, for a head that is an embedding too.

    (G1 / s1 + G2 / s2) (x) (s1 A1 + s2 A2) bounds the sum for any scales s. Its trace is least where
    the two pairs have one ratio of the traces of their factors (the rule of pi in section 6.3 of
    Martens and Grosse). It is then scaled to the trace of the sum, and A to that of A1.
    """
    s1, s2 = (
        torch.sqrt(G.trace() / A.trace()) if A.trace() > 0 else 0 for A, G in ((A1, G1), (A2, G2))
    )
    if not s2:
        return A1, G1
    A, G = s1 * A1 + s2 * A2, (G1 / s1 if s1 else 0) + G2 / s2
    total = G1.trace() * A1.trace() + G2.trace() * A2.trace()
    A = A * ((A1.trace() or 1) / A.trace())
    return A, G * (total / (A.trace() * G.trace()))


def kept(F: Tensor, max_factor_size: int) -> Tensor:
    """The stored form of a factor [groups, n, n]: above the limit its diagonal."""
    if F.shape[-1] <= max_factor_size:
        return F
    return torch.diag_embed(F.diagonal(dim1=-2, dim2=-1))


def damped_solver(A: Tensor, G: Tensor, damping: float, eps: float, split: str) -> Solver:
    """The map V -> (damped Kronecker product of G and A)^-1 V for one pair of factors."""
    pi = 1.0
    if split == "pi":
        pi = math.sqrt(max(mean_diagonal(A), eps) / max(mean_diagonal(G), eps))
    if split == "exact":
        A, G = floored(A, eps), floored(G, eps)
        F = torch.kron(G, A) + damping * torch.eye(len(A) * len(G), dtype=A.dtype)
        return lambda V: torch.linalg.solve(F, V.flatten()).view(V.shape)
    A = A + max(pi * math.sqrt(damping), eps) * torch.eye(len(A), dtype=A.dtype)
    G = G + max(math.sqrt(damping) / pi, eps) * torch.eye(len(G), dtype=A.dtype)
    return lambda V: torch.linalg.solve(G, V) @ torch.linalg.inv(A)


def mean_diagonal(M: Tensor) -> float:
    return M.diagonal().mean().item()


def floored(M: Tensor, eps: float) -> Tensor:
    """M with its eigenvalues raised to at least eps."""
    values, vectors = torch.linalg.eigh(M)
    return vectors @ torch.diag(values.clamp_min(eps)) @ vectors.T


# From a model to samples


def layers_of(model: nn.Module) -> list[Layer]:
    """The layer of each trained weight of Linear, Conv1d to Conv3d, their transposed forms, Embedding and
    Conv1D of transformers.

    A bias shares the factors of its weight if the same modules have both, it is trained, and the layer is
    no transposed convolution.
    """
    owners: dict[Tensor, list[nn.Module]] = {}
    kinds = (nn.Linear, nn.Embedding, *CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS, *NORMS)
    for module in model.modules():
        if isinstance(module, kinds) or is_transposed(module):
            for param in module.parameters():
                owners.setdefault(param, []).append(module)
    layers = []
    for weight, users in owners.items():
        modules = [module for module in users if not isinstance(module, nn.Embedding)]
        if not modules:
            layers.append(Layer(weight, transposed=True, table=True))
        elif weight is modules[0].weight and weight.requires_grad:
            bias = getattr(modules[0], "bias", None)
            joint = bias is not None and bias.requires_grad and owners[bias] == modules
            joint = joint and not isinstance(modules[0], TRANSPOSED_CONVOLUTIONS)
            norm = isinstance(modules[0], NORMS)
            groups = weight.numel() if norm else getattr(modules[0], "groups", 1)
            transposed = is_transposed(modules[0])
            layers.append(Layer(weight, bias if joint else None, groups, transposed, norm=norm))
    return layers


def is_transposed(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def capture(
    model: nn.Module,
    layers: Sequence[Layer],
    batch: Iterable[tuple[Tensor, Tensor]],
    loss_fn,
    fisher: str = "empirical",
) -> dict[int, list[Sample]]:
    """Samples of every layer: one forward and backward pass of loss_fn(model(x), y) per sample.

    batch: pairs (x, y) of single samples with a batch dimension of one. "ggn": instead a pass for each
    column of a root of the Hessian of the loss with respect to the outputs, as if the layers were called again.
    """
    index = {layer.weight: i for i, layer in enumerate(layers)}
    captured: dict[int, list[Sample]] = {i: [] for i in range(len(layers))}
    weights = [m.weight for m in model.modules() if isinstance(m, TRANSPOSED_CONVOLUTIONS)]
    exchanged = {index[weight] for weight in weights}
    for x, y in batch:
        uses: list[tuple[nn.Module, Tensor, Tensor]] = []  # module, its input and its output

        def remember(module, inputs, output, uses=uses):
            uses.append((module, inputs[0].detach().clone(), output))

        hooks = [m.register_forward_hook(remember) for m in model.modules()]
        outputs = model(x)
        for hook in hooks:
            hook.remove()
        loss = loss_fn(outputs, y)
        uses = [use for use in uses if getattr(use[0], "weight", None) in index]
        of_uses = [output for *_, output in uses]
        if fisher == "ggn":
            root = hessian_root(outputs, y, loss_fn)
            passes = [torch.autograd.grad(outputs, of_uses, v, retain_graph=True) for v in root]
        else:
            passes = [torch.autograd.grad(loss, of_uses)]
        rows: dict[int, list[tuple[Tensor, Tensor]]] = {}
        lookups: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for (module, a, _), g in [use for found in passes for use in zip(uses, found, strict=True)]:
            i = index[module.weight]
            if isinstance(module, nn.Embedding):
                counts = a != (-1 if module.padding_idx is None else module.padding_idx)
                if layers[i].table:
                    words = nn.functional.one_hot(a[counts], len(module.weight)).to(g)
                    rows.setdefault(i, []).append((words[None], g[counts][None]))
                    continue
                lookups.setdefault(i, []).append((a[counts], g[counts]))
                continue
            if layers[i].norm:
                rows.setdefault(i, []).append(norm_rows(module, a, g))
                continue
            rows.setdefault(i, []).append(position_rows(module, a, g, layers[i].bias is not None))
        for i, pairs in rows.items():  # several uses are more positions
            sides = [torch.cat(side, dim=1) for side in zip(*pairs, strict=True)]
            found = [torch.cat(side) for side in zip(*lookups.get(i, []), strict=True)]
            calls = tuple(a.shape[1] for a, _ in pairs)
            calls = (1,) * sum(calls) if layers[i].table else calls  # lookups are never reduced
            sample = Sample(*sides, *found)._replace(calls=calls, exchanged=i in exchanged)
            captured[i].append(sample)
    return captured


def hessian_root(outputs: Tensor, y: Tensor, loss_fn) -> list[Tensor]:
    """Tensors v, shaped as the outputs of one sample, with sum v v^T the Hessian of the loss."""
    f = outputs.detach()
    H = torch.autograd.functional.hessian(lambda f: loss_fn(f, y), f).reshape(f.numel(), f.numel())
    values, vectors = torch.linalg.eigh((H + H.mT) / 2)
    return [v.view_as(f) for v in (vectors * values.clamp_min(0).sqrt()).mT]


def position_rows(
    module: nn.Module, a: Tensor, g: Tensor, with_bias: bool
) -> tuple[Tensor, Tensor]:
    """Input and output gradient of one use for one sample, as rows of positions."""
    if isinstance(module, TRANSPOSED_CONVOLUTIONS):
        return convolution_rows(module, g, a)
    if isinstance(module, CONVOLUTIONS):
        a, g = convolution_rows(module, a, g)
    else:
        a, g = a.reshape(1, -1, a.shape[-1]), g.reshape(1, -1, g.shape[-1])
    if with_bias:
        a = torch.cat([a, torch.ones_like(a[..., :1])], dim=-1)
    return a, g


def norm_rows(module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised input and output gradient of a norm for one sample, [1, T, C]."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        C = module.weight.numel()
        rows, g = a.reshape(-1, C), g.reshape(1, -1, C)
        if isinstance(module, nn.RMSNorm):
            eps = torch.finfo(a.dtype).eps if module.eps is None else module.eps
            return (rows / torch.sqrt(rows.square().mean(1, keepdim=True) + eps))[None], g
        rows = rows - rows.mean(1, keepdim=True)
        return (rows / torch.sqrt(rows.square().mean(1, keepdim=True) + module.eps))[None], g
    if isinstance(module, nn.GroupNorm):
        rows = a.reshape(module.num_groups, -1)
        rows = rows - rows.mean(1, keepdim=True)
        rows = rows / torch.sqrt(rows.square().mean(1, keepdim=True) + module.eps)
    else:
        assert not module.training, "the statistics of a batch are not those of one sample"
        mean, var = module.running_mean[:, None], module.running_var[:, None]
        rows = (a.reshape(len(mean), -1) - mean) / torch.sqrt(var + module.eps)
    C = module.weight.numel()
    return rows.reshape(C, -1).mT[None], g.reshape(C, -1).mT[None]


def convolution_rows(module: nn.Module, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Patches [groups, T, c/groups * kernel] and gradients [groups, T, o/groups], T output pixels.

    Of a transposed convolution, from its output gradient a and its input g: T pixels of the input. Output
    padding makes room for more windows, which no pixel has spread to.
    """
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    a = nn.functional.pad(a, module._reversed_padding_repeated_twice, mode=mode)
    sizes = zip(module.stride, module.dilation, module.kernel_size, strict=True)
    for i, (stride, dilation, kernel) in enumerate(sizes, start=2):
        a = a.unfold(i, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        a = a.narrow(i, 0, g.shape[i])
    dims = g.dim() - 2
    patches = a[0].unflatten(0, (module.groups, -1)).movedim(1, dims + 1)  # channels behind pixels
    patches = patches.flatten(1, dims).flatten(2)
    return patches, g[0].flatten(1).unflatten(0, (module.groups, -1)).mT
