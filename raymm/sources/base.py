"""The protocol of operands that can be read."""

from typing import Any, Protocol, TypeAlias, runtime_checkable

from numpy.typing import NDArray

from raymm.kernels.buffers import Buffer
from raymm.operands import Operand

Array: TypeAlias = NDArray[Any]


@runtime_checkable
class Source(Protocol):
    """One operand.

    1. ``operand`` (driver): its description, without reading it.
    2. ``T``, ``as_row()``, ``as_column()`` (driver): itself turned, without a copy.
    3. ``load()`` (driver): all of it, for a factor that stays resident.
    4. ``cut(start, stop)`` (driver, for workers in other processes): what they need to read these
       columns. A file's is its description; an array's is a copy of the columns.
    5. ``read(start, stop, buffer)`` (worker, any number of times): these columns, numbered as in
       the whole operand, possibly in the memory of `buffer`; nobody writes to them. A sparse
       operand gives a `raymm.kernels.sparse.SparseMatrix`.
    """

    @property
    def operand(self) -> Operand:
        """1. Its description."""
        ...

    @property
    def T(self) -> "Source":
        """2. The transpose."""
        ...

    def as_row(self) -> "Source":
        """2. A vector as a matrix of one row."""
        ...

    def as_column(self) -> "Source":
        """2. A vector as a matrix of one column."""
        ...

    def load(self) -> Array:
        """3. Read all of it."""
        ...

    def read(self, start: int, stop: int, buffer: Buffer) -> Any:
        """5. Read these columns: an array, or a `SparseMatrix`."""
        ...

    def cut(self, start: int, stop: int) -> "Source":
        """4. What another process needs to read these columns."""
        ...
