"""Matrix, gradient and memory operations for tensors on any device.

Every function runs on the device of its tensors, GPU or CPU. The names are those of the original
torchium package.
"""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from .. import linalg
from .._memory import as_device
from .._per_sample.per_sample import per_sample_gradients
from .._per_sample.sample_loss import LossFunction
from ..linalg._arguments import check_tensors
from ..optimizers import Shampoo

__all__ = [
    "CUDAGradientOps",
    "CUDAMatrixOps",
    "CUDAMemoryOps",
    "CUDAShampoo",
    "cuda_memory_info",
    "get_cuda_device_count",
    "get_optimal_device",
    "is_cuda_available",
    "matrix_sqrt_cuda",
]


class CUDAMatrixOps:
    """Operations on matrices and batches of matrices."""

    @staticmethod
    def matrix_sqrt_inv_eigen(matrix: Tensor, power: float = -0.25, eps: float = 1e-8) -> Tensor:
        """Return ``(matrix + eps I)^power``: :func:`torchium.linalg.matrix_power`.

        Args:
            matrix: ``[..., n, n]``, symmetric positive semi-definite.
            power: any real number; a matrix power, not elementwise.
            eps: added to every eigenvalue.
        """
        return linalg.matrix_power(matrix, power, eps=eps)

    @staticmethod
    def kronecker_product_approx(A: Tensor, G: Tensor) -> Tensor:
        """Return the Kronecker product of ``A`` and ``G``: :func:`torchium.linalg.kron`.

        The product is exact and formed in full. To multiply or solve without forming it, use
        :func:`torchium.linalg.kron_matmul` and :func:`torchium.linalg.kron_solve`.
        """
        return linalg.kron(A, G)

    @staticmethod
    def batch_matrix_multiply(A_batch: Tensor, B_batch: Tensor) -> Tensor:
        """Return the products of ``[batch, m, k]`` and ``[batch, k, n]``: ``[batch, m, n]``."""
        check_tensors("batch_matrix_multiply", A_batch=A_batch, B_batch=B_batch)
        for name, batch in (("A_batch", A_batch), ("B_batch", B_batch)):
            if batch.dim() != 3:
                raise ValueError(
                    f"{name} has shape {tuple(batch.shape)}; it must have three dimensions "
                    "(unsqueeze(0) a single matrix)"
                )
        if A_batch.shape[0] != B_batch.shape[0]:
            raise ValueError(
                f"A_batch holds {A_batch.shape[0]} matrices and B_batch {B_batch.shape[0]}; there "
                "must be equally many"
            )
        return linalg.chunked_matmul(A_batch, B_batch)


class CUDAGradientOps:
    """Gradients beyond ``.grad``."""

    @staticmethod
    def per_sample_gradients(
        model: nn.Module, loss_fn: LossFunction, inputs: Any, targets: Any
    ) -> dict[str, Tensor]:
        """Return parameter name -> ``[batch, *shape]``, the gradient of each sample's loss.

        No ``.grad``, parameter, buffer or random state changes. ``loss_fn(output, target)`` is
        called with batches of one sample. A module that mixes samples or draws random numbers
        (BatchNorm, Dropout in training mode) raises a ValueError that names it.
        """
        return per_sample_gradients(model, loss_fn, inputs, targets)


class CUDAMemoryOps:
    """Operations with bounded memory."""

    @staticmethod
    def memory_efficient_matmul(
        A: Tensor,
        B: Tensor,
        *,
        max_workspace_bytes: int | None = None,
        precision: str | None = None,
    ) -> Tensor:
        """Return ``A @ B`` with a bounded workspace: :func:`torchium.linalg.chunked_matmul`."""
        return linalg.chunked_matmul(
            A, B, max_workspace_bytes=max_workspace_bytes, precision=precision
        )

    @staticmethod
    def efficient_tensor_creation(
        shape: Sequence[int],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return zeros of ``shape``, in memory that is kept and reused.

        The memory is an arena's: blocks that are reused as soon as all tensors of a block are gone.
        Meant for short-lived tensors of one stream. A block belongs to the current stream: work on
        another stream must have finished with its tensors before they are freed. A tensor that lives
        on keeps its whole block (2 MiB, or the size of the tensor). Beyond
        :func:`torchium.set_workspace_limit` and in a CUDA graph capture the memory is torch's.

        Args:
            shape: sizes, not negative.
            device: by default torch's default device.
            dtype: by default torch's default dtype.

        Raises:
            ValueError: a size that is negative or no integer, or a dtype that is not one of torch.
        """
        is_sequence = isinstance(shape, Sequence) and not isinstance(shape, str)
        if not is_sequence or not all(isinstance(size, Integral) for size in shape):
            raise ValueError(
                f"efficient_tensor_creation: shape is {shape!r}; it must be a sequence of integers"
            )
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"efficient_tensor_creation: dtype is {dtype!r}; it must be a torch.dtype"
            )
        chosen = torch.get_default_device() if device is None else torch.device(device)
        result: Tensor = torch.ops.torchium.efficient_tensor_creation(tuple(shape), chosen, dtype)
        return result

    @staticmethod
    def release_arenas() -> None:
        """Give the memory of :meth:`efficient_tensor_creation` without live tensors back."""
        torch.ops.torchium.release_arenas()


def is_cuda_available() -> bool:
    """Whether there is a CUDA device that torch can use."""
    return torch.cuda.is_available()


def get_cuda_device_count() -> int:
    """The number of CUDA devices; 0 without CUDA."""
    return torch.cuda.device_count()


def get_optimal_device() -> torch.device:
    """The current CUDA device if there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def cuda_memory_info(device: torch.device | str | int | None = None) -> dict[str, int | bool]:
    """Return the memory of a CUDA device, in bytes.

    Args:
        device: the current CUDA device by default.

    Returns:
        ``total_memory`` and ``free_memory`` as the driver counts them, ``allocated_memory`` in live
        tensors of this process, ``cached_memory`` reserved by torch's allocator (live tensors
        included), and ``available``: whether the device exists. For a CPU device, and without CUDA,
        all values are zero and ``available`` is False.

    Raises:
        ValueError: CUDA is available, but the device does not exist; or the device is neither CUDA
            nor CPU.
    """
    chosen = None if device is None else as_device("cuda_memory_info", device)
    total, free, allocated, cached, available = torch.ops.torchium.cuda_memory_info(chosen)
    return {
        "total_memory": total,
        "allocated_memory": allocated,
        "free_memory": free,
        "cached_memory": cached,
        "available": available,
    }


class CUDAShampoo(Shampoo):
    """:class:`torchium.Shampoo` with the three arguments of the original package's class."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.03,
        eps: float = 1e-4,
        update_freq: int = 100,
    ) -> None:
        super().__init__(params, lr=lr, eps=eps, update_freq=update_freq)


def matrix_sqrt_cuda(input: Tensor, power: float) -> Tensor:
    """Return ``input^power``, the matrix power of symmetric positive semi-definite matrices.

    Args:
        input: ``[..., n, n]``.
        power: any real number. Negative powers floor small eigenvalues as in
            :func:`torchium.linalg.matrix_power`.
    """
    return linalg.matrix_power(input, power)
