"""Operations and bytes of inverse roots, counted as roots.py explains."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Per matrix."""

    operations: float
    bytes: float


def cost_of_ours(n: int, iterations: int, has_last_step: bool) -> Cost:
    """Quadratic steps X q, M q^4 with q = a I + b M + c M^2, and for some kernels a last step of degree 6 in
    three single fp16 products and a split one (docs/roots.md).
    """
    quadratic = iterations - has_last_step
    # The first X is q, and the last M is not needed.
    split = 5 * quadratic if has_last_step else max(0, 5 * quadratic - 4)
    coarse = 3 if has_last_step else 0
    operations = (3 * split + coarse) * n**3
    if n <= 128:
        return Cost(operations, 8 * n**2)
    ends = 20 * n**2  # A to M, then X and A to the root
    return Cost(operations, (12 * split + 6 * coarse) * n**2 + ends)


def cost_of_coupled_newton(n: int, steps: int, element: int) -> Cost:
    products = 4 * (steps - 1)
    return Cost(2 * products * n**3, (3 * products + 2 * steps) * element * n**2)
