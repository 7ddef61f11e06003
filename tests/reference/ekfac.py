"""EKFAC (George et al. 2018, arXiv 1806.03884), with dense matrices.

The Fisher matrix of a layer is F = E[d d^T], where d is the gradient of a sample. With K-FAC's factors
G = U_G diag(l_G) U_G^T and A = U_A diag(l_A) U_A^T, K-FAC has U diag(l_G (x) l_A) U^T with
U = U_G (x) U_A. EKFAC has U diag(s) U^T with s = E[(U^T d)^2], the diagonal of U^T F U, which is the
closest to F in the Frobenius norm of all diagonals (section 3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .kfac import Layer, ReferenceKFAC, Sample, Solver

Basis = tuple[Tensor, Tensor]  # U_A and U_G of a group


class ReferenceEKFAC(ReferenceKFAC):
    """K-FAC with damping_split="exact" and the second moments s of each group in its eigenbasis.

    s is averaged where the factors are, in the eigenbasis from before the step. A new basis changes
    it to the diagonal of the same matrix there; until the first average it is that of K-FAC.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, damping_split="exact", **options)

    def _update_layer(self, layer: Layer, samples: list[Sample]) -> None:
        o, state = self.options[layer.weight], self.state[layer.weight]
        if state["step"] % o["TCov"] == 0 and samples and "bases" in state:
            state["updates"] = k = state.get("updates", 0) + 1
            d = min(1 - 1 / k, o["stat_decay"])
            fresh = [moments(samples, g, basis) for g, basis in enumerate(state["bases"])]
            state["s"] = [d * s + (1 - d) * new for s, new in zip(state["s"], fresh, strict=True)]
        super()._update_layer(layer, samples)

    def _solvers(self, state: dict[str, Any], o: dict[str, Any]) -> list[Solver]:
        systems = [
            (eigensystem(A, o["eps"]), eigensystem(G, o["eps"]))
            for A, G in zip(state["A"], state["G"], strict=True)
        ]
        bases = [(A.vectors, G.vectors) for A, G in systems]
        if state.get("updates", 0) == 0:
            state["s"] = [torch.outer(G.values, A.values) for A, G in systems]
        else:
            state["s"] = [
                torch.diagonal(joint(new).mT @ dense(s, old) @ joint(new)).view_as(s)
                for s, old, new in zip(state["s"], state["bases"], bases, strict=True)
            ]
        state["bases"] = bases
        return [self._solver(state, group, o) for group in range(len(bases))]

    def _solver(self, state: dict[str, Any], group: int, o: dict[str, Any]) -> Solver:
        """With the s of each step."""

        def solve(V: Tensor) -> Tensor:
            s, basis = state["s"][group], state["bases"][group]
            F = dense(s.clamp_min(o["eps"] ** 2) + o["damping"], basis)
            return torch.linalg.solve(F, V.flatten()).view(V.shape)

        return solve


class Eigensystem(NamedTuple):
    values: Tensor
    vectors: Tensor


def eigensystem(M: Tensor, eps: float) -> Eigensystem:
    values, vectors = torch.linalg.eigh(M)
    if torch.equal(M, torch.diag(M.diagonal())):  # only the diagonal is kept
        values, vectors = M.diagonal(), torch.eye(len(M), dtype=M.dtype)
    return Eigensystem(values.clamp_min(eps), vectors)


def joint(basis: Basis) -> Tensor:
    """U_G (x) U_A"""
    A, G = basis
    return torch.kron(G.contiguous(), A.contiguous())


def dense(s: Tensor, basis: Basis) -> Tensor:
    """U diag(s) U^T"""
    return joint(basis) @ torch.diag(s.flatten()) @ joint(basis).mT


def moments(samples: list[Sample], group: int, basis: Basis) -> Tensor:
    """E[(U^T d)^2], [o, a]."""
    total: Any = 0.0
    for sample in samples:
        for d in gradients(sample, group):
            total = total + (joint(basis).mT @ d.flatten()).square().view(d.shape)
    return total / len(samples)


def gradients(sample: Sample, group: int) -> list[Tensor]:
    """[o, a] of each call of the layer, summed over its positions; and of each lookup."""
    a, g = sample.a[group], sample.g[group]
    sizes = sample.calls or (len(a),)
    found = [g.mT @ a for a, g in zip(a.split(sizes), g.split(sizes), strict=True)]
    if sample.words is not None and sample.h is not None:
        for word, h in zip(sample.words, sample.h, strict=True):
            of_lookup = torch.zeros_like(found[0])
            of_lookup[word, : len(h)] = h
            found.append(of_lookup)
    return found
