"""Operations and bytes of a Shampoo step, and their time at the device's rates.

A block of m x n needs m n (m + n) operations for its statistics, which are symmetric, and twice that for the
products with its roots. Bytes count every operand read once and every result written once: half of a
symmetric matrix, the gradient once, and the intermediate product of the two roots. The rest of a step reads
the gradient and the direction, and reads and writes the average of the gradient, the second moment and the
parameter. Roots are counted as in roots.py, with the number of iterations for statistics of the same
gradients.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass

import torch
from matrices.costs import Cost, cost_of_ours
from matrices.inverse_roots import ROOT, scaled
from shared.device_clock import Clock, Roofs
from torch import Tensor
from torchium.linalg import matrix_inverse_root

from step_parts.shapes import Gradients, Model, matrix_shape

FLOAT = 4
SPLIT = 3  # fp16 products per float32-accurate product
RELATIVE_EPS = 1e-5  # that of Shampoo.from_adamw


@dataclass(frozen=True)
class Rates:
    """Measured in this run."""

    memory: float  # GB/s of a copy
    fp16: float  # TFLOP/s of a large product
    tf32: float
    float32: float

    @classmethod
    def measure(cls, clock: Clock) -> Rates:
        roofs = Roofs.measure(clock)
        return cls(roofs.memory, roofs.peak, product(clock, True), product(clock, False))

    def products(self, tf32: bool) -> float:
        """Attainable TFLOP/s of products: in TF32, or float32-accurate, which uses the matrix units with
        split operands if that is faster than float32 arithmetic.
        """
        return self.tf32 if tf32 else max(self.float32, self.fp16 / SPLIT)

    def milliseconds(self, operations: float, bytes_moved: float, tflops: float) -> float:
        """On the roofline: the slower of the two."""
        return max(operations / tflops * 1e-9, bytes_moved / self.memory * 1e-6)


def product(clock: Clock, tf32: bool) -> float:
    """TFLOP/s of a large float32 product."""
    n = 8192 if clock.device != "cpu" else 256
    A, B, C = (torch.randn(n, n, device=clock.device) for _ in range(3))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        return 2 * n**3 / clock.seconds(lambda: torch.mm(A, B, out=C)) * 1e-12
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def cut(length: int, block_size: int) -> list[int]:
    return [min(block_size, length - start) for start in range(0, length, block_size)]


def blocks(model: Model) -> Counter[tuple[int, int]]:
    """The number of blocks of each shape."""
    found: Counter[tuple[int, int]] = Counter()
    for shape in model.shapes:
        if len(shape) > 1:
            found.update(
                itertools.product(*(cut(n, model.block_size) for n in matrix_shape(shape)))
            )
    return found


def iterations(gradients: Gradients, model: Model, exponent: float) -> dict[int, int]:
    """Steps of the root of a statistic of each order, for one block; 0 if the iteration fails and eigh
    computes the root.
    """
    found: dict[int, int] = {}
    for index, shape in enumerate(model.shapes):
        if len(shape) < 2:
            continue
        for side, size in enumerate(matrix_shape(shape)):
            for order in set(cut(size, model.block_size)) - found.keys():
                sets = [g.flatten(1) for g in gradients.of(exponent, index)]
                rows = [g if side == 0 else g.mT for g in sets]
                found[order] = steps_of_root([r[-order:, : model.block_size] for r in rows])
    return found


def steps_of_root(gradients: list[Tensor]) -> int:
    statistic = torch.stack([G @ G.mT for G in gradients]).mean(0)
    A = scaled(statistic[None])
    _, info = matrix_inverse_root(A, ROOT, eps=RELATIVE_EPS, method="newton", return_info=True)
    return int(info.iterations.max())


def needed(model: Model, steps: dict[int, int]) -> dict[str, Cost]:
    """For each part of a step with roots due."""
    totals = {share: [0.0, 0.0] for share in ("statistics", "roots", "precondition")}

    def add(share: str, operations: float, bytes_moved: float) -> None:
        totals[share][0] += operations
        totals[share][1] += bytes_moved

    for (m, n), count in blocks(model).items():
        squares = m**2 + n**2
        products = m * n * (m + n)
        add("statistics", count * products, count * FLOAT * (m * n + squares))
        add("precondition", 2 * count * products, count * FLOAT * (squares + 4 * m * n))
        for order in (m, n):
            root = cost_of_ours(order, steps[order], False)
            add("roots", count * root.operations, count * root.bytes)
    elements = sum(math.prod(shape) for shape in model.shapes)
    result = {share: Cost(*total) for share, total in totals.items()}
    return result | {"elementwise": Cost(0.0, 8 * FLOAT * elements)}
