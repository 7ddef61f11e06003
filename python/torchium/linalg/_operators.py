"""Square matrices that are known by their products and their structure."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch
from torch import Tensor

from ._arguments import (
    check_constant,
    check_integer,
    check_numbers,
    check_string,
    check_tensors,
    short,
)

_ops = torch.ops.torchium

Self = TypeVar("Self", bound="LinearOperator")
_Origin: TypeAlias = "tuple[Callable[..., LinearOperator], tuple[Any, ...]]"


class _Products:
    """The functions of a matrix that the compiled core multiplies by: it knows their number."""

    _numbers = itertools.count()
    _by_number: ClassVar[weakref.WeakValueDictionary[int, _Products]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(
        self,
        product: Callable[[Tensor], Tensor],
        transpose_product: Callable[[Tensor], Tensor] | None,
    ) -> None:
        self.functions = (product, transpose_product)
        self.number = next(_Products._numbers)
        _Products._by_number[self.number] = self

    @staticmethod
    def multiply(number: int, transposed: bool, X: Tensor) -> Tensor:
        function = _Products._by_number[number].functions[transposed]
        assert function is not None
        Y = function(X)
        if not isinstance(Y, Tensor):
            raise ValueError(f"LinearOperator: product returns {type(Y).__name__}, not a tensor")
        # The caller may change the result in place, and an operator must not return its operand.
        return Y.clone() if Y is X else Y


# The core calls it as an operator, because it is not linked with Python.
_library = torch.library.Library("torchium", "IMPL")
_library.impl("operator_product", _Products.multiply, "CompositeImplicitAutograd")


class LinearOperator:
    """A square matrix that is known by its products and its structure.

    This class is a matrix that is known by its products alone; the others, as :class:`Kronecker`,
    also by their structure. ``A @ X`` takes ``[n]`` or ``[..., n, columns]``, ``X @ A`` ``[n]`` or
    ``[..., rows, n]``. ``A @ B``, ``A + B``, ``A - B``, ``c * A``, ``A / c``, ``A ** p`` and ``A.T``
    are operators again. All are immutable and share the tensors that they are made of, which must
    not change in place.

    Every function uses the structure. Where there is none, a matrix of an order up to 1000 is formed
    and solved densely; larger ones by conjugate gradients (if positive definite, see
    :meth:`assume`), GMRES, Lanczos' (if symmetric) or Arnoldi's method. Products with a tensor are
    differentiable, as is what follows from structure or dense matrices; iterative methods raise an
    error if their operand, or a tensor that the operator is made of, requires grad or has a tangent
    (:func:`cg` and :func:`gmres` only if it has a tangent).
    Autocast has no effect, also not on ``product``.

    What a constructor, :meth:`assume` or :meth:`transpose` made can be pickled and deep-copied, with its
    tensors and functions. Results of other operations cannot.

    Args:
        n: the order.
        product: maps ``X``, ``[n, columns]``, to ``A X``, of the same shape, dtype and device.
        dtype: float32 or float64.
        device: of ``X`` and ``A X``.
        transpose_product: maps ``X`` to ``A^T X``; by default the derivative of ``product``.

    Raises:
        ValueError: an order, dtype or product that does not fit.

    Example:
        >>> D = torch.arange(1.0, 1001.0)
        >>> A = torchium.linalg.LinearOperator(1000, lambda X: D[:, None] * X)
        >>> float(torchium.linalg.hutchinson_trace(A).value)
        500500.0
    """

    __array_ufunc__ = None  # numpy's arrays leave X @ A to this class, which names X

    shape: torch.Size  #: ``[..., n, n]``
    dtype: torch.dtype
    device: torch.device
    _handle: Any  # the operator of the core
    _products: frozenset[_Products]  # which it refers to by their numbers
    # The function and arguments that made it. Only where the core holds the same tensors, so that no
    # intermediate result lives on.
    _origin: _Origin | None = None

    def __init__(
        self,
        n: int,
        product: Callable[[Tensor], Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        transpose_product: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"LinearOperator: n is {short(n)}; it must be a positive integer")
        if not callable(product):
            remedy = "; torchium.linalg.Dense takes a matrix" if isinstance(product, Tensor) else ""
            raise ValueError(
                f"LinearOperator: product is {short(product)}; it must be a function of X{remedy}"
            )
        if transpose_product is not None and not callable(transpose_product):
            raise ValueError(
                f"LinearOperator: transpose_product is {short(transpose_product)}; it must be a "
                "function"
            )
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"LinearOperator: dtype is {short(dtype)}; it must be float32 or float64"
            )
        # The device of tensors: "cuda" is the current one.
        device = torch.empty(0, device=device).device
        products = _Products(product, transpose_product)
        handle = _ops.callable_operator(
            n, products.number, transpose_product is not None, dtype, device
        )
        make = functools.partial(
            LinearOperator, dtype=dtype, device=device, transpose_product=transpose_product
        )
        self._set(handle, frozenset([products]), (make, (n, product)))

    def _set(
        self,
        handle: Any,
        products: frozenset[_Products] = frozenset(),
        origin: _Origin | None = None,
    ) -> None:
        self._handle, self._products, self._origin = handle, products, origin
        self._multiply = handle.matmul  # looked up once: it costs as much as a small product
        self.shape = torch.Size(handle.sizes())
        like = handle.empty()
        self.dtype, self.device = like.dtype, like.device

    def _made(
        self, handle: Any, *others: LinearOperator, origin: _Origin | None = None
    ) -> LinearOperator:
        """The operator of a handle that was made of this operator and others."""
        kind = handle.kind()
        A = object.__new__(_classes.get(kind, LinearOperator))
        A._set(handle, self._products.union(*(other._products for other in others)), origin)
        return A

    def __copy__(self: Self) -> Self:
        return self  # immutable

    def __getstate__(self) -> dict[str, Any]:
        if self._origin is None:
            raise TypeError(
                f"{self.kind}: only operators that a constructor, assume() or transpose() made can be "
                "pickled or deep-copied. Copy those that it is made of, write Sum(A, B) for A + B, "
                "Product(A, B) for A @ B and Product(Identity(n, c), A) for c * A, or copy A.to_dense()."
            )
        return {name: value for name, value in vars(self).items() if name not in _OF_HANDLE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        assert self._origin is not None
        make, arguments = self._origin
        again = make(*arguments)
        self._set(again._handle, again._products, self._origin)

    @property
    def kind(self) -> str:
        """The name of its class, also of those without one of their own, as ``"Inverse"``."""
        kind: str = self._handle.kind()
        return kind

    @property
    def is_dense(self) -> bool:
        """Whether it is of class ``Dense``, and no batch."""
        return len(self.shape) == 2 and self.kind == "Dense"

    @property
    def is_symmetric(self) -> bool:
        """Whether it is known to be symmetric, by its structure or by :meth:`assume`."""
        symmetric: bool = self._handle.is_symmetric()
        return symmetric

    def __len__(self) -> int:
        return self.shape[-1]

    def __repr__(self) -> str:
        batch = f"batch={list(self.shape[:-2])}, " if len(self.shape) > 2 else ""
        kind = self.kind
        return f"{kind}({batch}n={len(self)}, dtype={self.dtype}, device='{self.device}')"

    # Products and sums.

    def __matmul__(self, X: Any) -> Any:
        if isinstance(X, LinearOperator):
            handle = _ops.product_operator([self._handle, X._handle])
            return self._made(handle, X)
        if not isinstance(X, Tensor):
            check_tensors(self.kind, X=X)
        return self._multiply(X)

    def __rmatmul__(self, X: Any) -> Tensor:
        if not isinstance(X, Tensor):
            check_tensors(self.kind, X=X)
        product: Tensor = self._handle.rmatmul(X)
        return product

    def __add__(self, other: LinearOperator) -> LinearOperator:
        if not isinstance(other, LinearOperator):
            return NotImplemented
        return self._made(self._handle.add(other._handle), other)

    def __radd__(self, other: Any) -> LinearOperator:
        # Python's sum() begins with 0.
        return self if isinstance(other, int) and other == 0 else NotImplemented

    def __sub__(self, other: LinearOperator) -> LinearOperator:
        if not isinstance(other, LinearOperator):
            return NotImplemented
        return self + -other

    def __mul__(self, c: float) -> LinearOperator:
        if isinstance(c, LinearOperator):
            raise ValueError(f"{self.kind}: products of operators are written A @ B")
        check_constant(
            self.kind,
            "c",
            c,
            "Diagonal(c.expand(n)) @ A has one, and Diagonal(c.expand(n)) is c I.",
        )
        return self._made(self._handle.scale(float(c)))

    __rmul__ = __mul__

    def __truediv__(self, c: float) -> LinearOperator:
        if c == 0:
            raise ValueError(f"{self.kind}: c is 0; A / c needs another divisor")
        return self * (1 / c)

    def __neg__(self) -> LinearOperator:
        return self * -1.0

    def __pow__(self, exponent: float) -> LinearOperator:
        return self.pow(exponent)

    @property
    def T(self) -> LinearOperator:
        """The transposed matrix."""
        return self.transpose()

    def transpose(self) -> LinearOperator:
        """Return the transposed matrix."""
        return self._made(self._handle.transpose(), origin=(LinearOperator.transpose, (self,)))

    def to_dense(self) -> Tensor:
        """Return the matrix, ``[..., n, n]``."""
        A: Tensor = self._handle.to_dense()
        return A

    def assume(self, property: str) -> LinearOperator:
        """Return the operator with a property that it is known to have, which is not tested.

        Cholesky, conjugate gradients, Lanczos' method and eigh then replace LU, GMRES, Arnoldi's
        method and eig.

        Args:
            property: ``"symmetric"``, ``"positive_semidefinite"`` or ``"positive_definite"``.
        """
        check_string(
            "assume",
            "property",
            property,
            'it must be "symmetric", "positive_semidefinite" or "positive_definite".',
        )
        origin = (LinearOperator.assume, (self, property))
        return self._made(self._handle.assume(property), origin=origin)

    # Functions.

    def inverse(self, *, tol: float | None = None, max_iterations: int = 1000) -> LinearOperator:
        """Return ``A^-1``, as an operator.

        Kronecker product of inverses, inverse of each block, Woodbury's formula, transposed
        permutation, Fourier transform, substitution, or a factorisation, once. Without structure and
        above order 1000 each product is an iteration, whose failure warns.

        Args:
            tol: of iterations: ``|b - A x| <= tol |b|``; by default ``finfo(dtype).eps ** (2 / 3)``.
            max_iterations: of iterations.

        Raises:
            ValueError: a singular matrix, where the factorisation shows it.
        """
        _check_iteration("inverse", tol, max_iterations)
        return self._made(self._handle.inverse(tol, max_iterations))

    def solve(self, X: Tensor, *, tol: float | None = None, max_iterations: int = 1000) -> Tensor:
        """Return ``A^-1 X``, as ``A.inverse() @ X``."""
        check_tensors(f"{self.kind}.solve", X=X)
        _check_iteration("solve", tol, max_iterations)
        solution: Tensor = self._handle.solve(X, tol, max_iterations)
        return solution

    def exp(self, *, tol: float | None = None, max_iterations: int = 1000) -> LinearOperator:
        """Return the matrix exponential, as an operator.

        Args:
            tol: of iterations: relative change of a product in ten iterations.
            max_iterations: of iterations, at most 200.
        """
        _check_iteration("exp", tol, max_iterations)
        return self._made(self._handle.exp(tol, max_iterations))

    def sqrt(self, *, tol: float | None = None, max_iterations: int = 1000) -> LinearOperator:
        """Return the principal square root, as an operator.

        Raises:
            ValueError: a negative eigenvalue; or, of a dense matrix that is not known to be
                symmetric, no well-conditioned basis of eigenvectors.
        """
        _check_iteration("sqrt", tol, max_iterations)
        return self._made(self._handle.sqrt(tol, max_iterations))

    def pow(
        self, exponent: float, *, tol: float | None = None, max_iterations: int = 1000
    ) -> LinearOperator:
        """Return the power, as an operator.

        Integer exponents are defined for all matrices, negative ones for regular matrices; for other
        exponents see :meth:`sqrt`.
        """
        check_constant("pow", "exponent", exponent, "Use exponent.detach().")
        _check_iteration("pow", tol, max_iterations)
        return self._made(self._handle.pow(float(exponent), tol, max_iterations))

    # Numbers.

    def diag(self, *, num_samples: int | None = None, seed: int = 0) -> Tensor:
        """Return the diagonal, ``[..., n]``.

        Args:
            num_samples: estimates what the structure does not give by :func:`hutchinson_diagonal`;
                by default it takes n products.
            seed: of the estimate.
        """
        _check_estimate("diag", num_samples, seed)
        d: Tensor = self._handle.diag(num_samples, seed)
        return d

    def trace(self, *, num_samples: int | None = None, seed: int = 0) -> Tensor:
        """Return the trace, ``[...]``; estimates by :func:`hutchpp`, else as :meth:`diag`."""
        _check_estimate("trace", num_samples, seed)
        trace: Tensor = self._handle.trace(num_samples, seed)
        return trace

    def slogdet(self, *, num_samples: int | None = None, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return sign and ``log |det A|``, both ``[...]``.

        Args:
            num_samples: estimates what the structure does not give by :func:`logdet`, which needs
                positive definite matrices; by default that is computed from the dense matrix.
            seed: of the estimate.
        """
        _check_estimate("slogdet", num_samples, seed)
        sign, logabsdet = self._handle.slogdet(num_samples, seed)
        return sign, logabsdet

    def logdet(self, *, num_samples: int | None = None, seed: int = 0) -> Tensor:
        """Return ``log det A``, as :meth:`slogdet`; NaN for a negative determinant."""
        _check_estimate("logdet", num_samples, seed)
        value: Tensor = self._handle.logdet(num_samples, seed)
        return value

    def det(self, *, num_samples: int | None = None, seed: int = 0) -> Tensor:
        """Return the determinant, as :meth:`slogdet`."""
        _check_estimate("det", num_samples, seed)
        value: Tensor = self._handle.det(num_samples, seed)
        return value

    def eigs(self, k: int | None = None, which: str = "LM") -> tuple[Tensor, Tensor]:
        """Return ``k`` eigenvalues, ``[k]``, and eigenvectors of norm 1, ``[n, k]``.

        Real for operators that are known to be symmetric, else complex. Exact where structure or a
        dense matrix give them, else by :func:`lanczos` or :func:`arnoldi`.

        Args:
            k: by default all.
            which: the most wanted first, as for :func:`lanczos` and :func:`arnoldi`.
        """
        if k is not None:
            check_integer("eigs", "k", k, "it must be from 1 to n.")
        check_string("eigs", "which", which, 'it must be a string, as "LM".')
        values, vectors = self._handle.eigs(k, which)
        return values, vectors


_classes: dict[str, type[LinearOperator]] = {}  # by kind
_OF_HANDLE = {"_handle", "_multiply", "_products", "shape", "dtype", "device"}  # see _set

Operand: TypeAlias = "Tensor | LinearOperator"


def of_kind(cls: type[Self]) -> type[Self]:
    """Class decorator: results of this kind are instances of ``cls``."""
    _classes[cls.__name__] = cls
    return cls


def _check_iteration(function: str, tol: float | None, max_iterations: int) -> None:
    if tol is not None:
        check_numbers(function, tol=tol)
    check_integer(function, "max_iterations", max_iterations, "it must be a positive integer.")


def _check_estimate(function: str, num_samples: int | None, seed: int) -> None:
    if num_samples is not None:
        check_integer(function, "num_samples", num_samples, "it must be a positive integer.")
    check_integer(function, "seed", seed, "it must be an integer.")


def as_operator(function: str, A: Any, name: str = "A") -> LinearOperator:
    """The argument ``name``, a tensor or an operator, as an operator."""
    if isinstance(A, LinearOperator):
        return A
    if not isinstance(A, Tensor):
        raise ValueError(
            f"{function}: {name} is of type {type(A).__name__}; it must be a tensor "
            "(torch.as_tensor converts arrays) or a torchium.linalg.LinearOperator, which is made from "
            "the order n and a function"
        )
    if A.dim() != 2 or A.shape[0] != A.shape[1]:
        raise ValueError(f"{function}: {name} is {tuple(A.shape)}; it must be a square matrix")
    if A.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{function}: {name} is {A.dtype}; it must be float32 or float64")
    kind = "dense_operator" if A.layout is torch.strided else "sparse_operator"
    return of_handle(getattr(_ops, kind)(A))


def of_handle(handle: Any) -> LinearOperator:
    operator = object.__new__(LinearOperator)
    operator._set(handle)
    return operator


def run(process: Any, A: LinearOperator) -> list[Tensor]:
    """The result of an algorithm that multiplies by an operator."""
    result: list[Tensor] = process.run(A._handle)
    return result
