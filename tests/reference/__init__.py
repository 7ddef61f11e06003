"""Slow, readable float64 versions of the optimizers, written from the papers.

They share no code with the library: plain torch float64 on the CPU, one parameter, one block and
one mode at a time, roots by `torch.linalg.eigh`. A formula here is meant to be read beside the
paper; nothing is batched, fused or done in place for speed.
"""

from .adagrad import ReferenceAdagrad
from .blocking import blocks_of, preconditioned_shape
from .roots import damped_power, root_is_due
from .shampoo import ReferenceShampoo

__all__ = [
    "ReferenceAdagrad",
    "ReferenceShampoo",
    "blocks_of",
    "damped_power",
    "preconditioned_shape",
    "root_is_due",
]
