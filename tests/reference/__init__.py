"""Slow, readable float64 versions of the optimizers, written from the papers.

They share no code with the library: plain torch float64 on the CPU, one parameter, one block and
one mode at a time, roots by `torch.linalg.eigh`. A formula here is meant to be read beside the
paper; nothing is batched, fused or done in place for speed.
"""

from .adagrad import ReferenceAdagrad
from .adahessian import ReferenceAdaHessian
from .blocking import blocks_of, preconditioned_shape
from .ekfac import ReferenceEKFAC
from .kfac import Layer, ReferenceKFAC, capture, layers_of, tied_factors
from .natural_gradient import (
    ReferenceNaturalGradient,
    fisher,
    gauss_newton,
    natural_gradient,
)
from .per_sample import per_sample_gradients
from .roots import damped_power, root_is_due
from .shampoo import ReferenceShampoo
from .singd import ReferenceSINGD

__all__ = [
    "Layer",
    "ReferenceAdaHessian",
    "ReferenceAdagrad",
    "ReferenceEKFAC",
    "ReferenceKFAC",
    "ReferenceNaturalGradient",
    "ReferenceSINGD",
    "ReferenceShampoo",
    "blocks_of",
    "capture",
    "damped_power",
    "fisher",
    "gauss_newton",
    "layers_of",
    "natural_gradient",
    "per_sample_gradients",
    "preconditioned_shape",
    "root_is_due",
    "tied_factors",
]
