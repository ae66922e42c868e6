"""D in a cluster, block by block, as one matrix."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import psutil
from numpy.typing import NDArray

from raymm.errors import DTypeError, MemoryLimitError, ShapeError
from raymm.memory import format_nbytes
from raymm.operands import format_shape
from raymm.results import Matrix
from raymm.run import Pass
from raymm.sinks.refs import Placed, Refs
from raymm.sources.base import Source
from raymm.tiles import Tile

if TYPE_CHECKING:
    from raymm.shards import Shards

Values: TypeAlias = NDArray[Any]


class ShardedMatrix:
    """A matrix whose blocks are in a Ray cluster; `Refs` makes it, and it is an operand like any.

    A block is a run of the longer axis, as in `Chain.tiles`: columns of a wide matrix, rows of a
    tall one. Indexing, ``len`` and iterating (over rows) are NumPy's; only the blocks that are
    touched are fetched.

    Notes
    -----
    With ``Refs(on="store")`` it lives as long as this process and its Ray, with ``on="worker"`` as
    long as the engine is open. A block that is lost with its node or worker is computed again
    while the engine that was given is open; the operands are kept for that.
    """

    def __init__(self, shards: "Shards", is_transposed: bool) -> None:
        self._shards, self._is_transposed = shards, is_transposed

    @property
    def shape(self) -> tuple[int, int]:
        """Shape."""
        lengths = self._shards.spec.rows, self._shards.spec.columns
        return lengths[::-1] if self._is_transposed else lengths

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self._shards.spec.dtype

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return 2

    @property
    def nbytes(self) -> int:
        """Size of the values, in bytes."""
        return self._shards.spec.nbytes

    @property
    def on(self) -> str:
        """Where the blocks are: ``"store"`` or ``"worker"``."""
        return self._shards.on

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self._shards.grid)

    @property
    def T(self) -> "ShardedMatrix":
        """The transpose: the same blocks."""
        return ShardedMatrix(self._shards, not self._is_transposed)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return (
            f"<raymm.ShardedMatrix {format_shape(self.shape)} {self.dtype}, {self.num_blocks} "
            f"blocks in {Refs(self._shards.on).name}>"
        )

    def __getitem__(self, key: Any) -> Any:
        """Return a part in memory, as NumPy does; only the blocks that it touches are fetched.

        Parameters
        ----------
        key : int, slice, array of int, mask, or a tuple of two of them
        """
        return self._shards.read(lambda: Matrix(self._oriented(self._shards.source()))[key])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Values:
        """Return all of it in memory; see `to_numpy`."""
        if copy is False:
            raise ValueError("a matrix in a cluster cannot be had in memory without a copy")
        return self.to_numpy().astype(self.dtype if dtype is None else dtype, copy=False)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ShardedMatrix belongs to the process that made it, whose end is the blocks' end: "
            "send parts of it (matrix[...]), or write D to a file that others open"
        )

    def __raymm_source__(self) -> Source:
        """Return it as an operand."""
        return self._oriented(self._shards.operand())

    def _oriented(self, source: Source) -> Source:
        return source if self._is_transposed else source.T

    def to_numpy(self) -> Values:
        """Return all of it in memory, fetched block by block.

        Raises
        ------
        MemoryLimitError
            It needs more than is free.
        """
        free = psutil.virtual_memory().available
        if self.nbytes > free:
            raise MemoryLimitError(
                f"{self!r} takes {format_nbytes(self.nbytes)}, and {format_nbytes(free)} of "
                "memory are free: take parts of it, or use map_blocks()",
                self.nbytes,
                free,
            )
        self._shards.check()
        values = np.empty(self.shape, self.dtype)
        for tile, block in self._fetched():
            where = slice(tile.start, tile.stop)
            values[where if self._is_transposed else (slice(None), where)] = block
        return values

    def blocks(self) -> Iterator[tuple[Tile, Values]]:
        """Yield the blocks in order, each fetched when it is its turn.

        Yields
        ------
        tile : Tile
            ``tile.start:tile.stop`` of the axis that is cut: columns of a wide matrix, rows of a
            tall one.
        block : ndarray
            That part of the matrix, yours to keep.
        """
        for tile, block in self._fetched():
            yield tile, np.array(block, order="C")

    def map_blocks(self, function: Callable[[Values], Any], *, keep: bool = False) -> Any:
        """Apply a function to each block, where the block is.

        Parameters
        ----------
        function : callable
            Takes a block, read-only, as `blocks` yields it. It travels to the workers.
        keep : bool
            Leave what it returns in the cluster, as another matrix: arrays of one dtype, as long
            as the block along the axis that is cut.

        Returns
        -------
        list or ShardedMatrix
            What it returned for each block, in order; with `keep` the matrix.
        """
        mapper = _Mapper(function, self._is_transposed, keep)
        if keep:
            return ShardedMatrix(self._shards.mapped(mapper), self._is_transposed)
        return [value for (value,) in self._shards.map(mapper)]

    def to_ray_dataset(self) -> Any:
        """Return a ``ray.data.Dataset``: a row for each index of the axis that is cut, in order.

        Returns
        -------
        ray.data.Dataset
            Columns ``index`` (int64) and ``D`` (a tensor: that column of a wide matrix, that row
            of a tall one). Its blocks are copies, made where the blocks are.
        """
        if self.dtype.kind not in "biuf":
            raise DTypeError(f"Arrow has no {self.dtype}: use map_blocks(..., keep=True) first")
        return self._shards.dataset(_Tabler)

    def free(self) -> None:
        """Let go of all blocks; the matrix and its transpose cannot be used afterwards."""
        self._shards.free()

    def _fetched(self) -> Iterator[tuple[Tile, Values]]:
        for tile in self._shards.grid:
            block = self._shards.read(partial(self._block, tile.index))
            yield tile, block if self._is_transposed else block.T

    def _block(self, place: int) -> Values:
        return self._shards.source(range(place, place + 1)).load()


@dataclass(frozen=True)
class _Mapper:
    """A user's function, as it is called where the blocks are."""

    function: Callable[[Values], Any]
    is_transposed: bool
    keeps: bool

    def __call__(self, block: Values) -> Any:
        given = block.view()
        given.flags.writeable = False
        value = self.function(given if self.is_transposed else given.T)
        if not self.keeps:
            return value
        values = np.asarray(value)
        turned = values if self.is_transposed else values.T
        if turned.ndim != 2 or len(turned) != len(block):
            shape = block.shape if self.is_transposed else block.shape[::-1]
            raise ShapeError(
                f"the function makes {format_shape(values.shape)} of a block {format_shape(shape)}"
                f": to stay in the cluster it must be a matrix with {len(block)} "
                + ("rows" if self.is_transposed else "columns")
            )
        return (turned.shape, turned.dtype), np.ascontiguousarray(turned)


@dataclass(frozen=True)
class _Tabler:
    """Makes an Arrow table of a block."""

    start: int

    def __call__(self, block: Values) -> Any:
        import pyarrow as pa  # noqa: PLC0415  in the worker

        flat = pa.array(np.ascontiguousarray(block).reshape(-1))
        kind = pa.fixed_shape_tensor(flat.type, [block.shape[1]])
        vectors = pa.FixedSizeListArray.from_arrays(flat, block.shape[1])
        index = pa.array(np.arange(self.start, self.start + len(block)))
        return pa.table({"index": index, "D": pa.ExtensionArray.from_storage(kind, vectors)})


def open_placed(result: Any, work: Pass, is_open: bool) -> Any:
    """Return what stays in the cluster as one matrix; pass on anything else.

    Parameters
    ----------
    result : object
        What a sink's ``commit`` returned.
    work : Pass
        How to compute blocks again.
    is_open : bool
        Whether its engine stays open.
    """
    if not isinstance(result, Placed):
        return result
    from raymm.shards import gather  # noqa: PLC0415  Ray takes a second to import

    return ShardedMatrix(gather(result, work, is_open), result.spec.is_transposed)
