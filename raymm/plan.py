"""The plan: the order of multiplication, the grid, what it needs, what limits it. Pure.

Nothing here reads an operand, asks the machine or starts anything: what the plan needs to know
comes in as `Operand`, `Layout`, `Request` and `Resources`.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from raymm.errors import MemoryLimitError
from raymm.grids import CostOf, choose_grid
from raymm.memory import LANES_PER_THREAD, RATES, TileCost, format_nbytes, inner_work
from raymm.operands import INDEX_NBYTES, Operand, format_shape
from raymm.order import Chained, Fold, compute_dtype, multiplication_order, output_dtype
from raymm.request import Request, Resources
from raymm.tiles import Grid, Layout, ceil_div

STORE_SHARE, KEPT_SHARE = 0.6, 0.75
"""Of the object store, for tiles in flight, and with a D that stays: Ray starts to spill at 80 %.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """What the plan must know of the outputs of a pass."""

    name: str
    layout: Layout
    is_resident: bool = False
    free_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What would happen, what it needs, what limits it; ``print(plan)`` is the table."""

    chained: Chained
    groups: tuple[Fold, ...]
    """What stays resident, outermost first."""
    grid: Grid
    layout: Layout
    request: Request
    resources: Resources
    reason: str
    """Why this engine."""
    output: str
    """Where D goes, in words."""
    dtype: np.dtype[Any]
    """D's dtype."""
    compute_dtype: np.dtype[Any]
    """Of the arithmetic; integers take float32 or float64 where that is exact."""
    cost: TileCost
    lanes: int
    """Blocks under way on one worker."""
    is_resident_output: bool
    """Whether D is held in the driver's memory."""
    free_disk_nbytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return len(self.grid)

    @property
    def output_nbytes(self) -> int:
        """Size of D, in bytes."""
        return self.chained.rows * self.chained.columns * self.dtype.itemsize

    @property
    def input_nbytes(self) -> int:
        """Size of the operands, in bytes."""
        return sum(operand.nbytes for operand in self.chained.operands)

    @property
    def flop(self) -> int:
        """Multiplications and additions, folding included."""
        nonzeros = self.chained.canonical[-1].nonzeros
        # Empty columns of a sparse operand are left out.
        columns = self.grid.columns if nonzeros is None else min(self.grid.columns, nonzeros)
        return sum(group.flop for group in self.groups) + self.flop_per_column * columns

    @property
    def flop_per_column(self) -> int:
        """Multiplications and additions for each column of D."""
        return _flop_per_column(self.groups, self.chained.canonical[-1])

    @property
    def worker_nbytes(self) -> int:
        """Private bytes of one worker."""
        handed_back = not self.resources.shares_memory and self.layout.travels
        held = int(handed_back) + int(self.layout.holds_tile)
        working = self.cost.worker_nbytes(self.lanes) + held * self.tile_nbytes
        working += self.chained.canonical[-1].reading_nbytes
        return working + (self._kept_nbytes if self.layout.stays == "worker" else 0)

    @property
    def _kept_nbytes(self) -> int:
        """The tiles of D that one worker makes, if they stay there; about an equal share."""
        tiles = ceil_div(self.tiles, max(1, self.resources.workers))
        return min(self.output_nbytes, tiles * self.tile_nbytes)

    @property
    def tile_nbytes(self) -> int:
        """D of one tile, in bytes."""
        return self.chained.rows * self.grid.tile_columns * self.dtype.itemsize

    @property
    def store_tile_nbytes(self) -> int:
        """Bytes in the object store for each tile in flight."""
        if self.resources.shares_memory:
            return 0
        return self._cut_nbytes + (self.tile_nbytes if self.layout.travels else 0)

    @property
    def _cut_nbytes(self) -> int:
        """One tile of an array, which the driver copies to send it."""
        huge = self.chained.canonical[-1]
        width = min(self.grid.tile_columns + self.grid.halo_columns, self.grid.columns)
        if not huge.is_held:
            return 0
        share = ceil_div(huge.nbytes * width, max(1, huge.shape[1]))
        return share if huge.nonzeros is None else share + (width + 1) * INDEX_NBYTES

    @property
    def store_nbytes(self) -> int:
        """Bytes in the object store at most, if it is large enough for `max_in_flight`."""
        if self.resources.shares_memory:
            return 0
        in_flight = min(self.resources.workers * self.request.max_in_flight, self.tiles)
        kept = self.output_nbytes if self.layout.stays == "store" else 0
        return self.store_tile_nbytes * in_flight + self.cost.resident_nbytes + kept

    @property
    def driver_nbytes(self) -> int:
        """Private bytes of the driver; where workers are threads, theirs as well."""
        held = self.output_nbytes if self.is_resident_output else 0
        working = self.worker_nbytes if self.resources.shares_memory else self._cut_nbytes
        huge = self.chained.canonical[-1]
        if huge.nonzeros is not None:  # sorted by columns, if it was not
            held += huge.nbytes + (huge.shape[1] + 1) * INDEX_NBYTES
        return held + max(self.prepare_nbytes, self.cost.resident_nbytes + working)

    @property
    def prepare_nbytes(self) -> int:
        """Private bytes of the driver while it reads and folds the small factors."""
        item = self.compute_dtype.itemsize * (3 if self.compute_dtype.kind in "iu" else 1)
        total = 0
        for operand in self.chained.canonical[:-1]:
            entries = operand.shape[0] * operand.shape[1]
            total += 0 if operand.is_held else operand.nbytes
            if operand.nonzeros is not None:  # compressed, dense, and where it has entries
                total += operand.nbytes + entries * (operand.dtype.itemsize + 1)
            is_copied = operand.dtype != self.compute_dtype or not operand.is_c_ordered
            total += entries * item if is_copied else 0
        return total + sum(group.entries for group in self.groups) * item

    @property
    def seconds(self) -> dict[str, float]:
        """Predicted time of each stage if it ran alone."""
        cores = max(1, self.resources.workers * self.resources.threads)
        slow = max(1, self.compute_dtype.itemsize // 4)
        calls = 0.0 if self.resources.shares_memory else RATES.call_seconds * self.tiles
        through_store = 0 if self.resources.shares_memory else self.output_nbytes
        if self.is_resident_output:
            write = self.output_nbytes / RATES.memory_bytes_per_second
            write += through_store / RATES.store_bytes_per_second
        else:
            write = self.output_nbytes / RATES.write_bytes_per_second
        return {
            "read": self.input_nbytes / RATES.read_bytes_per_second,
            "multiply": self.flop * slow / RATES.flop_per_second / cores,
            "write": write,
            "dispatch": calls / max(1, self.resources.workers),
        }

    @property
    def predicted_seconds(self) -> float:
        """Predicted time of the run: reading comes on top, the rest overlaps."""
        seconds = self.seconds
        return seconds["read"] / max(1, self.resources.workers) + max(seconds.values())

    @property
    def limit(self) -> str:
        """The stage that takes longest."""
        seconds = self.seconds
        return max(seconds, key=lambda stage: seconds[stage])

    def check_memory(self) -> None:
        """Raise `MemoryLimitError` for what the driver or a worker cannot hold."""
        limit = self.request.memory_limit or self.resources.memory_nbytes
        if self.is_resident_output and self.driver_nbytes > limit:
            raise MemoryLimitError(
                f"D {format_shape(self.chained.shape)} {self.dtype} takes "
                f"{self.output_nbytes:,} bytes ({format_nbytes(self.output_nbytes)}) in memory, "
                f"{self.driver_nbytes:,} with what computes it; "
                + (
                    f"memory_limit is {limit:,} bytes"
                    if self.request.memory_limit
                    else f"{limit:,} bytes are free"
                )
                + ': write it to a file with out="D.npy"',
                self.driver_nbytes,
                limit,
            )
        per_worker = self.store_tile_nbytes * self.resources.workers
        if per_worker > self.resources.store_nbytes * STORE_SHARE and self.store_tile_nbytes:
            raise MemoryLimitError(
                f"tiles of {self.grid.tile_columns} columns take {format_nbytes(per_worker)} of "
                f"the object store, one for each of {self.resources.workers} workers; it has "
                f"{format_nbytes(self.resources.store_nbytes)}: lower tile_columns or num_workers",
                per_worker,
                int(self.resources.store_nbytes * STORE_SHARE),
            )
        self._check_store()
        if self.worker_nbytes > limit:
            raise MemoryLimitError(
                f"one worker needs {self.worker_nbytes:,} bytes "
                f"({format_nbytes(self.cost.resident_nbytes)} of resident factors, "
                f"{format_nbytes(self.cost.staged_nbytes)} for a tile of "
                f"{self.grid.tile_columns} columns); {limit:,} bytes may be used: "
                "lower tile_columns, use fewer workers or give memory_limit=",
                self.worker_nbytes,
                limit,
            )
        if not self.is_resident_output and self.driver_nbytes > limit:
            raise MemoryLimitError(
                f"reading and folding the small factors takes {self.driver_nbytes:,} bytes "
                f"({format_nbytes(self.driver_nbytes)}) in this process, {limit:,} may be used: "
                "raise memory_limit, or multiply the small factors beforehand",
                self.driver_nbytes,
                limit,
            )

    @property
    def lacks_store(self) -> bool:
        """Whether D is to stay in the object store and does not fit."""
        return self.layout.stays == "store" and self.store_nbytes > self._store_room

    @property
    def _store_room(self) -> int:
        usable = int(self.resources.store_nbytes * self.resources.nodes * KEPT_SHARE)
        return max(0, usable - self.resources.used_store_nbytes)

    def _check_store(self) -> None:
        """Raise `MemoryLimitError` if D is to stay in the object store and does not fit."""
        needed, room = self.store_nbytes, self._store_room
        if self.lacks_store:
            raise MemoryLimitError(
                f"D {format_shape(self.chained.shape)} {self.dtype} takes "
                f"{format_nbytes(self.output_nbytes)} in the object store, "
                f"{format_nbytes(needed)} with the tiles under way; {format_nbytes(room)} of it "
                "are free before Ray spills to disk: free other matrices, write to a file, use "
                'Refs(on="worker"), or give Ray a larger object_store_memory',
                needed,
                room,
            )

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines of the table, label and text."""
        turned = ".T" if self.chained.is_transposed else ""
        names = tuple(operand.name + turned for operand in self.chained.canonical)
        kept = [group.text(names) for group in self.groups]
        grid, resources = self.grid, self.resources
        each = f"{resources.workers} x {resources.threads} threads"
        disk = (
            ""
            if self.free_disk_nbytes is None
            else (f", {format_nbytes(self.free_disk_nbytes)} free")
        )
        where = "in memory" if self.is_resident_output else f"on disk{disk}"
        where = "in the cluster" if self.layout.stays else where
        seconds = self.seconds
        lines = [
            ("product", f"{' @ '.join(map(str, self.chained.operands))}"),
            ("result", f"{format_shape(self.chained.shape)} {self.dtype}, {self._arithmetic()}"),
            ("output", f"{self.output}: {format_nbytes(self.output_nbytes)} {where}"),
            ("order", _nested([*kept, names[-1]])),
            ("work", f"{self.flop:.3g} flop, {self.flop_per_column:,} for each column"),
            (
                "tiles",
                f"{self.tiles} of {grid.tile_columns} columns ({format_nbytes(self.tile_nbytes)}), "
                f"in blocks of {grid.block_rows} x {grid.panel_columns}",
            ),
            ("engine", f"{resources.engine}, {each}: {self.reason}"),
            (
                "memory",
                f"{format_nbytes(self.worker_nbytes)} per worker "
                f"({format_nbytes(self.cost.resident_nbytes)} resident, {self.lanes} blocks), "
                f"{format_nbytes(self.driver_nbytes)} driver, "
                f"{format_nbytes(self.store_nbytes)} object store",
            ),
            (
                "predicted",
                f"{self.predicted_seconds:.2g} s: "
                + ", ".join(f"{stage} {value:.2g} s" for stage, value in seconds.items()),
            ),
            ("limit", self.limit),
        ]
        return lines + [("note", note) for note in self.notes]

    def _arithmetic(self) -> str:
        if self.compute_dtype.kind in "iu":
            return "exact integers"
        return f"accumulated in {self.compute_dtype}, precision {self.request.precision}"

    def __str__(self) -> str:
        return "\n".join(f"{label:<10} {text}" for label, text in self.rows())

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON."""
        return {
            "operands": [
                {"name": each.name, "shape": list(each.shape), "dtype": str(each.dtype)}
                for each in self.chained.operands
            ],
            "shape": list(self.chained.shape),
            "dtype": str(self.dtype),
            "compute_dtype": str(self.compute_dtype),
            "precision": self.request.precision,
            "output": self.output,
            "output_nbytes": self.output_nbytes,
            "order": dict(self.rows())["order"],
            "flop": self.flop,
            "grid": asdict(self.grid),
            "tiles": self.tiles,
            "engine": self.resources.engine,
            "reason": self.reason,
            "workers": self.resources.workers,
            "threads": self.resources.threads,
            "worker_nbytes": self.worker_nbytes,
            "driver_nbytes": self.driver_nbytes,
            "store_nbytes": self.store_nbytes,
            "free_disk_nbytes": self.free_disk_nbytes,
            "seconds": self.seconds,
            "predicted_seconds": self.predicted_seconds,
            "limit": self.limit,
            "notes": list(self.notes),
        }


def make_plan(
    chained: Chained,
    target: Target,
    request: Request,
    resources: Resources,
    reason: str = "as asked",
) -> Plan:
    """Plan a chain for one output; raises for what can never run."""
    groups = multiplication_order(chained.shapes)
    dtype = output_dtype(chained.result_dtype, request.dtype)
    widest = dtype if chained.mapped_dtype is None else chained.dtype
    computed = compute_dtype(chained.dtype, widest, request.precision)
    cost_of = CostOf(
        tuple(group.shape for group in groups),
        chained.canonical[-1].dtype.itemsize,
        computed.itemsize,
        dtype.itemsize,
        _is_converted(chained.canonical[-1], computed, request),
        target.layout.is_mixed,
        chained.mapped_dtype is not None,
        chained.canonical[-1].column_entries,
    )
    layout = target.layout
    flop_per_column = _flop_per_column(groups, chained.canonical[-1])
    grid = choose_grid(chained, cost_of, layout, request, flop_per_column)
    cost = cost_of(grid)
    return Plan(
        chained, groups, grid, layout, request, resources, reason, target.name, dtype, computed,
        cost, _lanes(cost, request, resources), target.is_resident, target.free_nbytes,
        _notes(chained, request, resources, layout),
    )  # fmt: skip


def _flop_per_column(groups: tuple[Fold, ...], huge: Operand) -> int:
    """Return the work for one column; few entries in a very long one count as what they take."""
    *outer, last = [group.shape for group in groups]
    work = last[0] * inner_work(last[1], huge.column_entries)
    return 2 * (work + sum(rows * columns for rows, columns in outer))


def _is_converted(huge: Operand, computed: np.dtype[Any], request: Request) -> bool:
    """Whether tiles of the huge operand are not as the arithmetic needs them when they are read."""
    is_exact = computed.kind in "iu"  # multiplied as floats where that is exact
    rounds = request.precision == "bf16"
    is_sparse = huge.nonzeros is not None
    return huge.dtype != computed or is_exact or rounds or huge.bfloat16 or is_sparse


def _lanes(cost: TileCost, request: Request, resources: Resources) -> int:
    """Return how many blocks a worker has under way: fewer where memory is short."""
    wanted = LANES_PER_THREAD * resources.threads
    limit = request.memory_limit or resources.memory_nbytes // 4
    spare = limit - cost.worker_nbytes(0)
    return max(1, min(wanted, spare // max(1, cost.block_nbytes)))


def _notes(
    chained: Chained, request: Request, resources: Resources, layout: Layout
) -> tuple[str, ...]:
    notes = []
    if chained.is_transposed:
        notes.append("D is tall: computed as its transpose, tile by tile of its rows")
    if chained.dtype.kind in "iu":
        notes.append(
            "integers are exact: if the factors' values and the huge operand's dtype do not "
            "rule out an overflow of 64 bits, that operand is read once beforehand"
        )
    if resources.gpus:
        notes.append(
            f"the cluster's {resources.gpus} GPUs are not used: this version multiplies on CPUs"
        )
    if layout.stays == "store":
        notes.append("D lives as long as this process, and the Ray that holds it, are up")
    if layout.stays == "worker":
        notes.append("D lives as long as the engine is open")
    if request.precision in ("bf16", "tf32") and chained.dtype in (np.float64, np.complex128):
        notes.append(f"precision={request.precision!r} concerns float32: {chained.dtype} stays")
    if request.precision == "tf32":
        notes.append("CPU workers have no TF32: they compute in float32")
    return tuple(notes)


def _nested(names: list[str]) -> str:
    """Return ``a @ (b @ c)``, the order in which each tile is multiplied."""
    text = " @ (".join(names[:-1])
    return f"{text} @ {names[-1]}" + ")" * (len(names) - 2)
