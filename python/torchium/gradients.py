"""Gradients of single samples, and what can be computed from them without forming them.

With J the matrix of all per-sample gradients, one row per sample:

- :func:`per_sample_gradients`: J
- :func:`per_sample_norms`: the norms of its rows
- :func:`gram`: J J^T
- :func:`jvp_dots`: J v
- :func:`clip_and_accumulate`: J^T c with c = min(1, max_norm / norms), into ``.grad``
- :class:`per_sample`: J from an ordinary backward pass, into ``.grad_sample``

:func:`register_layer` gives layers of other classes a formula.
"""

from ._per_sample.backward import per_sample
from ._per_sample.formulas import register_layer
from ._per_sample.per_sample import per_sample_gradients
from ._per_sample.quantities import clip_and_accumulate, gram, jvp_dots, per_sample_norms

__all__ = [
    "clip_and_accumulate",
    "gram",
    "jvp_dots",
    "per_sample",
    "per_sample_gradients",
    "per_sample_norms",
    "register_layer",
]
