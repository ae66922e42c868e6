"""Whether an output is the product of its operands.

All of D is compared by weighted sums of its columns, in one pass over D and C and without a
product; some columns, and those that the sums reject, entry by entry. `raymm.kernels.rounding` has
the bounds, and why a right result stays within them.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raymm.errors import ShapeError, VerificationError
from raymm.kernels.buffers import Buffer
from raymm.kernels.reference import SEED, Entries, Reference
from raymm.kernels.residuals import Sums
from raymm.kernels.structure import Structure
from raymm.kernels.threads import one_blas_thread
from raymm.order import Chained, output_dtype
from raymm.sources import Source, open_source
from raymm.sources.blocks import read_blocks
from raymm.sources.files import FileSource
from raymm.sources.sparse import load_factor

Values: TypeAlias = NDArray[Any]

LANES = 4
"""Threads at most, on few cores too: they wait for the disk. Measured on 2 cores for 1.44 GB of
float32: 5 GB/s from the page cache, 1.5 to 2 from the disk, which gives no more."""
RUN_NBYTES = 2**19
"""Longest row of a panel: what is read at once of a C-order output."""
BLOCK_NBYTES = 2**21
"""Read buffer of one lane; with its sums and chunks a lane takes 10 MB."""
CACHED_NBYTES = 2**28
"""Outputs from this size on are dropped from the page cache as they are read."""
SAMPLES, SUSPECTS, STRANGERS = 16, 32, 8
"""Columns compared entry by entry: in any case, if their sums differ, if they hold NaN or Inf."""
SAMPLE_ENTRIES = 2**19
"""Entries compared at once; of very long columns there are fewer samples."""


FAILING = "compute it again; if that repeats, the memory or the disk of a machine is failing"


@dataclass(frozen=True, slots=True)
class Findings:
    """What a check has seen of an output that passed."""

    residual: float
    """Largest error relative to its bound; at most 1. 0 for integers, which are exact."""
    columns: int
    """Length of D's longer axis."""
    sampled: int
    """Columns compared entry by entry."""
    unjudged: int
    """Columns whose NaN or Inf leave nothing to sum; `STRANGERS` of them were compared."""


def check_product(
    view: Any, sources: tuple[Source, ...], precision: str, is_transposed: bool = False
) -> float:
    """Check an output against its operands.

    Parameters
    ----------
    view : ndarray
        D in canonical orientation, rows by columns; a memory map is read, not paged in.
    sources : tuple of Source
        The canonical operands, the huge one last.
    precision : str
        Of the arithmetic that made D.
    is_transposed : bool
        Whether D as the user sees it is the transpose of `view`; for messages.

    Returns
    -------
    float
        The largest error relative to its bound, at most 1.

    Raises
    ------
    VerificationError
        An entry is further from the product than rounding explains.
    SourceError
        An operand or the output cannot be read.
    """
    return check_source(open_source(view, "D"), sources, precision, is_transposed).residual


def check_source(
    output: Source,
    sources: tuple[Source, ...],
    precision: str,
    is_transposed: bool = False,
    hint: str = FAILING,
) -> Findings:
    """Check an output given as a source of canonical shape; see `check_product`.

    Memory: the resident factors in float64, and 10 MB for each of up to 4 threads.
    """
    rows, columns = output.operand.shape
    if rows == 0 or columns == 0:
        return Findings(0.0, columns, 0, 0)
    operands = tuple(source.operand for source in sources)
    # BLAS threads would compete with the lanes, and OpenBLAS wants one each for its callers.
    with np.errstate(all="ignore"), one_blas_thread():
        loaded = [load_factor(source) for source in sources[:-1]]
        factors, structures = [each.values for each in loaded], [each.structure for each in loaded]
        reference = Reference(operands, factors, output.operand.dtype, precision, structures)
        scan = _Scan(_read_once(output), sources[-1], reference)
        scan.run()
        given = [each.T for each in reversed(operands)] if is_transposed else operands
        text = f"{output.operand.name} is not {' @ '.join(map(str, given))}"
        return _conclude(scan, reference, (text, hint), is_transposed)


def check_file(
    path: str,
    chained: Chained,
    sources: tuple[Source, ...],
    precision: str,
    hint: str = "check the names and the order of the files, and the precision",
) -> Findings:
    """Check a file or table in the user's orientation; see `check_product`.

    Raises
    ------
    ShapeError, DTypeError
        The file has not the shape of the product, or a dtype that cannot follow from it.
    """
    output = open_source(path, "D")
    if output.operand.shape != chained.shape:
        raise ShapeError(f"{output.operand} is not of the product's shape {chained.shape}")
    output_dtype(chained.dtype, output.operand.dtype)
    if len(chained.shape) == 2:
        output = output.T if chained.is_transposed else output
    else:  # vectors are rows in canonical orientation
        output = output.as_row() if chained.shape else _scalar(output)
    return check_source(output, sources, precision, chained.is_transposed, hint)


def _scalar(output: Source) -> Source:
    """Return the product of two vectors as a matrix of one entry."""
    return open_source(output.load().reshape(1, 1), "D")


def _read_once(output: Source) -> Source:
    """Return a large file as one that is not kept in the page cache."""
    if isinstance(output, FileSource) and output.operand.nbytes >= CACHED_NBYTES:
        return replace(output, is_read_once=True)
    return output


def _conclude(
    scan: "_Scan", reference: Reference, texts: tuple[str, str], is_transposed: bool
) -> Findings:
    """Compare entries of the samples and of what the sums reject; raise if one is wrong."""
    seen, residual = scan.seen, scan.seen.residual
    for columns, found, huge in scan.entries():
        entries = reference.compare(found, huge, scan.structure(columns))
        worst = np.unravel_index(int(np.argmax(entries.ratio)), entries.ratio.shape)
        if entries.ratio[worst] > 1:
            place = int(worst[0]), int(columns[worst[1]])
            described = _describe(entries, worst, place[::-1] if is_transposed else place)
            suspected = seen.text("row" if is_transposed else "column", scan.columns)
            raise VerificationError(f"{texts[0]}: {described}{suspected}; {texts[1]}")
        residual = max(residual, float(entries.ratio[worst]))
    if reference.is_exact and seen.suspected:
        raise VerificationError(f"{texts[0]}: it changed while it was read")
    return Findings(residual, scan.columns, scan.compared, seen.unjudged)


def _describe(entries: Entries, worst: Any, place: tuple[int, int]) -> str:
    found, expected, bound = entries.found[worst], entries.expected[worst], entries.bound[worst]
    style = "d" if expected.dtype.kind in "iu" else ".9g"
    within = f" within {bound:.2g}" if bound and np.isfinite(bound) else ""
    return f"D[{place[0]}, {place[1]}] is {found:{style}}, expected {expected:{style}}{within}"


class _Scan:
    """One pass over D and C in panels of columns, on several threads."""

    def __init__(self, output: Source, huge: Source, reference: Reference) -> None:
        self._output, self._huge, self._reference = output, huge, reference
        rows, self.columns = output.operand.shape
        operand = output.operand
        self._width = min(RUN_NBYTES // operand.dtype.itemsize, -(-self.columns // LANES))
        self._count = max(3, min(SAMPLES, SAMPLE_ENTRIES // max(rows, huge.operand.shape[0])))
        self._picks = _spread(self.columns, self._count)
        self._found = np.empty((rows, len(self._picks)), operand.dtype)
        self._factor = np.empty((huge.operand.shape[0], len(self._picks)), huge.operand.dtype)
        self.seen, self.compared = _Seen(), 0
        self._lock, self._is_stopped = threading.Lock(), False

    def run(self) -> None:
        """Scan everything; an error in one thread, or an interrupt, stops all."""
        panels = -(-self.columns // self._width)
        lanes = min(LANES, panels)
        with ThreadPoolExecutor(lanes) as pool:
            shares = [range(lane, panels, lanes) for lane in range(lanes)]
            try:
                list(pool.map(self._lane, shares))
            except BaseException:
                self._is_stopped = True
                raise

    def _lane(self, panels: range) -> None:
        buffer = Buffer()
        try:
            with np.errstate(all="ignore"):  # a setting of each thread
                for panel in panels:
                    start = panel * self._width
                    self._panel(start, min(start + self._width, self.columns), buffer)
        except BaseException:
            self._is_stopped = True
            raise

    def _panel(self, start: int, stop: int, buffer: Buffer) -> None:
        reference, sums = self._reference, []
        for source, weights, samples in (
            (self._output, reference.output_weights, self._found),
            (self._huge, reference.huge_weights, self._factor),
        ):
            total = Sums(stop - start, reference.dtype, weights)
            sums.append(total)
            if source.operand.nonzeros is not None:
                matrix = source.read(start, stop, buffer)
                total.add_entries(0, matrix)
                first, last = np.searchsorted(self._picks, (start, stop))
                samples[:, first:last] = matrix.take(self._picks[first:last] - start).dense()
                continue
            for row, column, values in read_blocks(source, start, stop, BLOCK_NBYTES, buffer):
                if self._is_stopped:
                    return
                total.add(row, column - start, values)
                first, last = np.searchsorted(self._picks, (column, column + values.shape[1]))
                wanted = values[:, self._picks[first:last] - column]
                samples[row : row + len(values), first:last] = wanted
        seen = _Seen.of(start, reference.difference(*sums))
        with self._lock:
            self.seen = self.seen + seen

    def entries(self) -> Iterator[tuple[NDArray[np.int64], Values, Values]]:
        """Yield (numbers, columns of D, columns of C): suspects first, then the samples."""
        wanted = [column for _, column in self.seen.suspects] + list(self.seen.strangers)
        for first in range(0, len(wanted), self._count):
            numbers = wanted[first : first + self._count]
            pairs = [self._column(number) for number in numbers]
            self.compared += len(numbers)
            output, huge = (np.hstack(part) for part in zip(*pairs, strict=True))
            yield np.array(numbers), output, huge
        self.compared += len(self._picks)
        yield self._picks, self._found, self._factor

    def structure(self, numbers: NDArray[np.int64]) -> Structure:
        """Return where columns of a sparse C have entries."""
        if self._huge.operand.nonzeros is None:
            return None
        reads = [self._huge.read(number, number + 1, Buffer()) for number in numbers.tolist()]
        return np.hstack([matrix.structure() for matrix in reads])

    def _column(self, number: int) -> tuple[Values, Values]:
        """Read one column of D and of C."""
        parts = []
        for source in (self._output, self._huge):
            blocks = read_blocks(source, number, number + 1, BLOCK_NBYTES, Buffer())
            held = [values.copy() for _, _, values in blocks]
            parts.append(np.concatenate(held or [np.empty((0, 1), source.operand.dtype)]))
        return parts[0], parts[1]


def _spread(columns: int, count: int) -> NDArray[np.int64]:
    """Return the first column, the last, and one of each of equal parts between."""
    if columns <= count:
        return np.arange(columns)
    edges = np.linspace(0, columns, count - 1, dtype=np.int64)
    between = np.random.default_rng(SEED).integers(edges[:-1], edges[1:])
    return np.unique(np.concatenate([[0], between, [columns - 1]]).astype(np.int64))


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the weights said: the worst columns, and how many there are."""

    residual: float = 0.0
    """Of the columns within their bounds."""
    suspects: tuple[tuple[float, int], ...] = ()
    """(ratio, column), the worst first, a limited number of them."""
    strangers: tuple[int, ...] = ()
    """Columns that are not finite, likewise."""
    suspected: int = 0
    unjudged: int = 0
    first: int = 2**63
    last: int = -1

    def text(self, word: str, columns: int) -> str:
        """Say how many columns are suspected."""
        if not self.suspected:
            return ""
        return (
            f"; the weighted sums of {self.suspected:,} of {columns:,} {word}s are off, "
            f"from {word} {self.first} to {self.last}"
        )

    @classmethod
    def of(cls, start: int, ratio: NDArray[np.float64]) -> "_Seen":
        """Sort the columns of a panel."""
        over, strange = np.flatnonzero(ratio > 1), np.flatnonzero(np.isnan(ratio))
        worst = over[np.argsort(-ratio[over], kind="stable")[:SUSPECTS]]
        some = strange[:: max(1, len(strange) // STRANGERS)][:STRANGERS]
        return cls(
            float(ratio[ratio <= 1].max(initial=0.0)),
            tuple((float(ratio[place]), start + int(place)) for place in worst),
            tuple(start + int(place) for place in some),
            len(over),
            len(strange),
            start + int(over[0]) if len(over) else 2**63,
            start + int(over[-1]) if len(over) else -1,
        )

    def __add__(self, other: "_Seen") -> "_Seen":
        suspects = sorted(self.suspects + other.suspects, key=lambda pair: (-pair[0], pair[1]))
        strangers = sorted(self.strangers + other.strangers)
        return _Seen(
            max(self.residual, other.residual),
            tuple(suspects[:SUSPECTS]),
            tuple(strangers[:: max(1, len(strangers) // STRANGERS)][:STRANGERS]),
            self.suspected + other.suspected,
            self.unjudged + other.unjudged,
            min(self.first, other.first),
            max(self.last, other.last),
        )
