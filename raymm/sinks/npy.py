"""D in one memory-mappable `.npy` file, written in place by all workers at once."""

import io
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymm.errors import PlanError
from raymm.paths import local_path
from raymm.sinks.base import Block, OutputSpec, Piece, Values
from raymm.sinks.partial import PartialFile
from raymm.sinks.runs import DIRECT_NBYTES
from raymm.tiles import PAGE_NBYTES, Layout, Order, ceil_div

HEADER_NBYTES = PAGE_NBYTES
"""The header is padded to a page, so that the data can be written past the page cache."""
RUN_NBYTES = 2**19
GAP_NBYTES = 2**15
"""Zeros between non-zero columns that are written with them: a run of its own takes as long."""
SPARSE_SHARE = 0.5
"""Blocks of which more has to be written are written whole, past the page cache."""


class Npy:
    """A `.npy` file that appears under its name only when it is complete and synced.

    Parameters
    ----------
    path : path
        Exactly this name is used. Local: ``~`` and ``file://`` work.
    order : {"C", "F"}
        Order of D in the file.

    Notes
    -----
    Space is reserved before the first tile in ``<path>.partial``; workers write their blocks at
    fixed positions; ``commit`` syncs and renames. Large files are written with direct output
    (``O_DIRECT``) where the file system takes it: the processor is not spent on copying into the
    page cache, and the cache is left to others. Runs that are short or not aligned go through the
    cache; both kinds end in one ``fdatasync``.
    """

    def __init__(
        self, path: str | bytes | os.PathLike[str] | os.PathLike[bytes], order: Order = "C"
    ) -> None:
        if order not in ("C", "F"):
            raise PlanError(f'order={order!r}: choose "C" or "F"')
        self.path, self.order = local_path(path), order
        self._file = PartialFile(self.path)
        self._spec: OutputSpec | None = None
        self._layout: Layout | None = None
        self._has_halo = False

    @property
    def name(self) -> str:
        """The path, and the order if it is not the usual one."""
        return str(self.path) + (' (order="F")' if self.order == "F" else "")

    def layout(self, spec: OutputSpec) -> Layout:
        """Return where each entry of D lies in the file."""
        item = spec.dtype.itemsize
        is_c = (self.order == "C") != spec.is_transposed
        if is_c:
            pitch = spec.columns * item
            needs_halo = spec.nbytes >= DIRECT_NBYTES and pitch % PAGE_NBYTES
            halo = ceil_div(PAGE_NBYTES, item) if needs_halo else 0
            return Layout("C", RUN_NBYTES, HEADER_NBYTES, pitch, item, halo)
        return Layout("F", RUN_NBYTES, HEADER_NBYTES, item, spec.rows * item)

    def overwrites(self, path: str | None, array: Values | None) -> bool:
        """Whether that file is this one, through any spelling or link."""
        del array
        return path is not None and self._file.is_one_of(path)

    def open(self, spec: OutputSpec, overwrite: bool) -> None:
        """Check the path and reserve all space; an error leaves nothing behind."""
        self._spec, self._layout = spec, self.layout(spec)
        self._has_halo = spec.grid is not None and spec.grid.halo_columns > 0
        header = npy_header(spec.shape, spec.dtype, self.order == "F" and len(spec.shape) == 2)
        nbytes = HEADER_NBYTES + spec.nbytes
        self._file.open(header, nbytes, overwrite, spec.nbytes >= DIRECT_NBYTES)

    def attach(self) -> None:
        """Open the unfinished file in this process."""
        self._file.attach()

    def write(self, block: Block) -> Piece | None:
        """Write a block's runs at their positions."""
        layout = self._layout
        assert layout is not None  # open() came first
        if layout.order == "C":
            self._write_rows(block, layout)
        else:
            self._write_columns(block, layout)
        return None

    def _write_rows(self, block: Block, layout: Layout) -> None:
        """Write runs of rows, each from one page boundary to another if there is a halo."""
        bounds, rows = block.bounds, _with_runs(block.dense)
        item, pitch = rows.itemsize, layout.row_nbytes
        if bounds.shape[1] * item == pitch and rows.flags.c_contiguous:
            self._file.write_run(rows.reshape(-1), layout.position(bounds.row_start, 0))
            return
        for place, row in enumerate(rows):
            begin = layout.position(bounds.row_start + place, bounds.column_start)
            length = bounds.shape[1] * item
            skipped = 0
            if self._has_halo:
                end = begin + length
                skipped = -begin % PAGE_NBYTES if bounds.column_start else 0
                length += min(-end % PAGE_NBYTES, row.nbytes - length)
            run = row.view(np.uint8)[skipped:length]
            self._file.write_run(run, begin + skipped)

    def _write_columns(self, block: Block, layout: Layout) -> None:
        """Write runs of columns, all of them as one if the block has all rows."""
        if block.nonzero is not None and self._write_nonzero(block, layout):
            return
        bounds, columns = block.bounds, _with_runs(block.host.T)
        position = layout.position(bounds.row_start, bounds.column_start)
        if (
            columns.flags.c_contiguous
            and bounds.shape[0] * columns.itemsize == layout.column_nbytes
        ):
            self._file.write_run(columns.reshape(-1), position)
            return
        for place, column in enumerate(columns):
            self._file.write_run(column, position + place * layout.column_nbytes)

    def _write_nonzero(self, block: Block, layout: Layout) -> bool:
        """Write the non-zero columns, the others are zeros as reserved; False: it spares little."""
        assert block.nonzero is not None
        bounds, columns = block.bounds, _with_runs(block.compact.T)
        length = bounds.shape[0] * columns.itemsize
        begins = block.nonzero * layout.column_nbytes + layout.position(bounds.row_start, 0)
        if length != layout.column_nbytes:  # what lies between belongs to other blocks
            for column, begin in zip(columns, begins.tolist(), strict=True):
                self._file.write_run(column, begin)
            return True
        start = layout.position(0, bounds.column_start)
        stop = layout.position(0, bounds.column_stop)
        runs = padded_runs(begins, length, (start, stop))
        offsets = np.cumsum([0, *(last - first for first, last in runs)]).tolist()
        if offsets[-1] > SPARSE_SHARE * (stop - start):
            return False
        packed = np.zeros(offsets[-1], np.uint8)
        firsts = np.array([first for first, _ in runs])
        owners = np.searchsorted(firsts, begins, "right") - 1
        places = (begins - firsts[owners] + np.array(offsets)[owners]).tolist()
        for place, column in zip(places, columns.view(np.uint8), strict=True):
            packed[place : place + length] = column
        memory = packed.data
        for offset, (first, last) in zip(offsets, runs, strict=False):
            self._file.write(memory[offset : offset + last - first], first)
        self._file.hasten(start, stop - start)
        return True

    def detach(self, sync: bool) -> None:
        """Close the file in this process, with `sync` once all of it is on the disk."""
        self._file.detach(sync)

    def receive(self, piece: Piece) -> None:
        """Never called: blocks are written where they are computed."""
        raise AssertionError(piece)

    def view(self) -> Values:
        """Map the incomplete file, in canonical orientation."""
        spec, layout = self._spec, self._layout
        assert spec is not None  # open() came first
        assert layout is not None
        shape = (spec.rows, spec.columns)
        if spec.nbytes == 0:
            return np.empty(shape, spec.dtype)
        return np.memmap(self._file.partial, spec.dtype, "r", HEADER_NBYTES, shape, layout.order)

    def commit(self) -> Values:
        """Sync, rename, and return the result as a read-only memory map."""
        self._file.commit()
        result: Values = np.load(self.path, mmap_mode="r")
        return result

    def abort(self) -> None:
        """Remove the unfinished file."""
        self._file.abort()


def _with_runs(lines: Values) -> Values:
    """Return lines with contiguous values: a copy if the pass was planned for another order."""
    return lines if lines.strides[1] == lines.itemsize else np.ascontiguousarray(lines)


def padded_runs(
    begins: NDArray[np.int64], length: int, within: tuple[int, int]
) -> list[tuple[int, int]]:
    """Return runs of bytes that hold pieces of a file, and zeros around them.

    Parameters
    ----------
    begins : ndarray
        Where each piece begins, ascending.
    length : int
        Of each piece.
    within : (int, int)
        Where runs may begin and end. They do so on pages where they can.
    """
    starts = np.maximum(begins // PAGE_NBYTES * PAGE_NBYTES, within[0])
    stops = np.minimum(-(-(begins + length) // PAGE_NBYTES) * PAGE_NBYTES, within[1])
    is_far = starts[1:] - stops[:-1] > GAP_NBYTES
    firsts = np.flatnonzero(np.concatenate([[len(begins) > 0], is_far]))
    lasts = np.flatnonzero(np.concatenate([is_far, [len(begins) > 0]]))
    return list(zip(starts[firsts].tolist(), stops[lasts].tolist(), strict=True))


def npy_header(shape: tuple[int, ...], dtype: np.dtype[Any], is_fortran: bool) -> bytes:
    """Return a `.npy` header, padded to `HEADER_NBYTES`; sizes are written as plain ints."""
    text = repr(
        {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": is_fortran,
            "shape": tuple(int(length) for length in shape),
        }
    )
    stream = io.BytesIO()
    stream.write(np.lib.format.magic(1, 0))
    length = HEADER_NBYTES - stream.tell() - 2
    stream.write(length.to_bytes(2, "little"))
    stream.write(text.encode("latin1").ljust(length - 1) + b"\n")
    return stream.getvalue()
