"""SINGD (Lin, Dangel, Eschenhagen, Neklyudov, Kristiadi, Turner, Makhzani 2024, arXiv 2312.05705), with dense
matrices. Its dense case is INGD (Lin et al. 2023, arXiv 2302.09738).

Instead of the factors A = E[a a^T] and G = E[g g^T] of K-FAC there are K and C with
(A (x) G + damping I)^-1 near K K^T (x) C C^T. New factors correct them by Riemannian gradient steps on the
Kullback-Leibler divergence of the Gaussians with these covariances,

    m_K <- alpha1 m_K + (1 - alpha1) P(tr(C^T G C)/c K^T A K + damping tr(C^T C)/c K^T K - I) / 2
    K   <- K (I - b m_K)

and the same for C with the roles exchanged, c the order of C, and P the projection to the structure.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kfac import Layer, ReferenceKFAC, Sample, factors, reduced


class ReferenceSINGD(ReferenceKFAC):
    """K-FAC with solver="inverse_free"; structures of K and C, and block_size, as there.

    `structures_of_layers` replaces the structures of single layers, by index.
    """

    def __init__(
        self,
        *args: Any,
        structures: tuple[str, str] = ("dense", "dense"),
        block_size: int = 32,
        alpha1: float = 0.5,
        structures_of_layers: dict[int, tuple[str, str]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.block_size, self.alpha1 = block_size, alpha1
        special = structures_of_layers or {}
        self.structures = {
            layer.weight: special.get(i, structures) for i, layer in enumerate(self.layers)
        }

    def _update_layer(self, layer: Layer, samples: list[Sample]) -> None:
        if layer.norm:
            super()._update_layer(layer, samples)
            return
        o, state = self.options[layer.weight], self.state[layer.weight]
        if state["step"] % o["TCov"] != 0 or not samples:
            return
        samples = [reduced(s) if o["weight_sharing"] == "reduce" else s for s in samples]
        A, G = factors(samples)
        if "pairs" not in state:
            orders = [self._kinds(layer, M.shape[-1], side) for side, M in enumerate((A, G))]
            state["kinds"] = orders
            state["pairs"] = [
                {"K": eye(A), "C": eye(G), "m_K": 0 * eye(A), "m_C": 0 * eye(G)} for _ in A
            ]
        for group, pair in enumerate(state["pairs"]):
            if state["kinds"][0] == "toeplitz" and samples[0].words is not None:
                # A tied head weighs its two parts in the coordinates K^T a.
                K = pair["K"]
                h_K = K[:-1, :-1] if K.shape[-1] > samples[0].h.shape[-1] else K
                inner = [s._replace(a=s.a @ K, h=s.h @ h_K) for s in samples]
                A_in_K, G = factors(inner)
                A = torch.linalg.solve(K.mT, torch.linalg.solve(K.mT, A_in_K[0]).mT)[None]
            self._update_pair(pair, A[group], G[group], state["kinds"], o)

    def _kinds(self, layer: Layer, order: int, side: int) -> str:
        kind = self.structures[layer.weight][side]
        limit = self.options[layer.weight]["max_factor_size"]
        return "diagonal" if kind == "dense" and order > limit else kind

    def _update_pair(
        self, pair: dict[str, Tensor], A: Tensor, G: Tensor, kinds: list[str], o: dict[str, Any]
    ) -> None:
        K, C, damping = pair["K"], pair["C"], o["damping"]
        H_K, H_C = K.mT @ A @ K, C.mT @ G @ C
        m_K = mean_trace(H_C) * H_K + damping * mean_trace(C.mT @ C) * K.mT @ K - eye(K)
        m_C = mean_trace(H_K) * H_C + damping * mean_trace(K.mT @ K) * C.mT @ C - eye(C)
        for root, momentum, new, kind in (("K", "m_K", m_K, kinds[0]), ("C", "m_C", m_C, kinds[1])):
            new = project(new, kind, self.block_size) / 2
            m = pair[momentum] = self.alpha1 * pair[momentum] + (1 - self.alpha1) * new
            rate = min(1 - o["stat_decay"], 1 / (2 * row_sum(m)))
            pair[root] = pair[root] @ (eye(m) - rate * m)

    def _precondition(self, layer: Layer, V: dict, directions: dict) -> None:
        if layer.norm:
            super()._precondition(layer, V, directions)
            return
        pairs = self.state[layer.weight].get("pairs")
        if pairs is None:
            return
        matrices = layer.join(V[layer.weight], None if layer.bias is None else V[layer.bias])
        solved = [
            p["C"] @ p["C"].mT @ M @ p["K"] @ p["K"].mT
            for p, M in zip(pairs, matrices, strict=True)
        ]
        weight, bias = layer.split(torch.stack(solved))
        directions[layer.weight] = weight
        if layer.bias is not None:
            directions[layer.bias] = bias


def eye(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=like.dtype)


def mean_trace(M: Tensor) -> float:
    return M.diagonal().mean().item()


def row_sum(m: Tensor) -> float:
    """The largest sum of magnitudes in a row, which bounds the spectral norm of what `project` returns."""
    return m.abs().sum(1).max().item()


def project(S: Tensor, kind: str, block_size: int = 32) -> Tensor:
    """A symmetric matrix in the structure of K: the part of S that a change of K can follow."""
    n = len(S)
    if kind == "dense":
        return S
    if kind == "toeplitz":
        M = torch.zeros_like(S)
        for j in range(n):
            mean = S.diagonal(-j).mean() * (1 if j == 0 else 2)
            M += torch.diag(mean.expand(n - j), -j)
        return M
    size = 1 if kind == "diagonal" else block_size
    blocks = torch.arange(n) // size
    return torch.where(blocks[:, None] == blocks[None, :], S, torch.zeros_like(S))
