"""Other libraries' optimizers by their own constructors, computed by torchium."""

from .distributed_shampoo import DistributedShampoo

__all__ = ["DistributedShampoo"]
