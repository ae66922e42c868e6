"""Time D = A @ B @ C, A 3000x100, B 100x100, C wide, D into a file: raymm and what people write.

All contestants run in one process tree, alternating; see ``--help``. Figures are the medians of
seconds until the call returned and until ``fsync`` of the output returned.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from multiprocessing.pool import Pool
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _bench import (
    Contestant,
    Figures,
    Goal,
    PeakSampler,
    Work,
    as_json,
    compare,
    describe_machine,
    drop_output,
    file_system,
    goals_table,
    judge,
    judge_memory,
    machine_lines,
    memory_table,
    read_through,
    spilled_nbytes,
    store_used,
    times_table,
    verdict,
)
from numpy.lib.format import open_memmap
from rich.console import Console
from threadpoolctl import threadpool_limits

import raymm
from raymm.events import Event, TileFinished
from raymm.sinks.base import Block, OutputSpec, Sink
from raymm.tiles import Layout, Order

ROWS, INNER = 3000, 100
COLUMNS, FULL_COLUMNS, TOY_COLUMNS, COLD_COLUMNS = 400_000, 3_600_000, 8_000, 20_000
MEMORY_COLUMNS = (100_000, 400_000)
TILE = 8192
LONG_ROWS = 188
CHUNK_NBYTES = 1 << 20
"""What one `pwrite` of the raw writers takes."""
COLD_LIMIT = 1.5

WARM_COLUMNS = 2 * TILE

FULL_NAMES = ("raw_pwrite", "raymm_c", "raymm_f")
RAY_NAMES = ("raymm_c", "raymm_f", "raymm_null_c", "raymm_null_f")
ORDERS: tuple[tuple[Order, str], ...] = (("C", "c"), ("F", "f"))
GOALS = (
    Goal("usual NumPy loop / raymm, C", ("numpy_loop_c",), "raymm_c", 2.2),
    Goal("usual NumPy loop / raymm, C", ("numpy_loop_c",), "raymm_c", 3.0, is_synced=False),
    Goal("best hand loop / raymm, C", ("numpy_loop_c", "hand_c"), "raymm_c", 0.97),
    Goal("best hand loop / raymm, F", ("hand_f",), "raymm_f", 0.97),
    Goal("best of all hand loops / raymm, C", ("hand_c", "hand_f"), "raymm_c", 0.97),
    Goal("best of all hand loops / raymm, F", ("hand_c", "hand_f"), "raymm_f", 0.97),
    Goal("Dask as usually written / raymm, C", ("dask_usual_c",), "raymm_c", 2.0),
    Goal("Dask as usually written / raymm, F", ("dask_usual_f",), "raymm_f", 1.3),
    Goal("Dask, best form / raymm, C", ("dask_usual_c", "dask_c"), "raymm_c", 2.0),
    Goal("Dask, best form / raymm, F", ("dask_usual_f", "dask_f"), "raymm_f", 1.3),
    Goal("rate of raymm / raw pwrite, C", ("raw_pwrite",), "raymm_c", 0.75, columns=FULL_COLUMNS),
    Goal("rate of raymm / raw pwrite, F", ("raw_pwrite",), "raymm_f", 0.85, columns=FULL_COLUMNS),
    Goal("rate of raymm, null sink C / product alone", ("product",), "raymm_null_c", 0.93),
    Goal("rate of raymm, null sink F / product alone", ("product",), "raymm_null_f", 0.93),
    Goal("rate of raymm, C / raymm, F", ("raymm_f",), "raymm_c", 0.9, is_synced=False),
    Goal("rate of raymm, C / raymm, F", ("raymm_f",), "raymm_c", 0.8),
)


# --- by hand


def numpy_loop_c(work: Work) -> None:
    """Write what people write today."""
    w, c = work.a @ work.b, np.load(work.c_path, mmap_mode="r")
    d = open_memmap(work.out, "w+", c.dtype, (ROWS, work.columns))
    for j in range(0, work.columns, TILE):
        d[:, j : j + TILE] = w @ c[:, j : j + TILE]


def numpy_rows_c(work: Work) -> None:
    """Multiply long row blocks into a C-order map."""
    w, c = work.a @ work.b, np.load(work.c_path, mmap_mode="r")
    d = open_memmap(work.out, "w+", c.dtype, (ROWS, work.columns))
    for r in range(0, ROWS, LONG_ROWS):
        np.matmul(w[r : r + LONG_ROWS], c, out=d[r : r + LONG_ROWS])


def numpy_columns_f(work: Work) -> None:
    """Multiply columns into a Fortran-order map."""
    w, c = work.a @ work.b, np.load(work.c_path, mmap_mode="r")
    d = open_memmap(work.out, "w+", c.dtype, (ROWS, work.columns), fortran_order=True)
    for j in range(0, work.columns, TILE):
        np.matmul(w, c[:, j : j + TILE], out=d[:, j : j + TILE])


def torch_columns_f(work: Work) -> None:
    """Multiply columns into a Fortran-order map, with torch."""
    torch, w, c = torch_operands(work)
    d = open_memmap(work.out, "w+", np.float32, (ROWS, work.columns), fortran_order=True)
    d_t = torch.from_numpy(d.T)
    for j in range(0, work.columns, TILE):
        torch.mm(c[:, j : j + TILE].T, w.T, out=d_t[j : j + TILE])


def torch_pwrite_f(work: Work) -> None:
    """Multiply columns into one buffer and write it into a preallocated Fortran-order file."""
    torch, w, c = torch_operands(work)
    d = open_memmap(work.out, "w+", np.float32, (ROWS, work.columns), fortran_order=True)
    offset = d.offset
    del d
    buffer = torch.empty((TILE, ROWS))
    descriptor = os.open(work.out, os.O_WRONLY)
    try:
        os.posix_fallocate(descriptor, 0, offset + work.output_nbytes)
        for j in range(0, work.columns, TILE):
            tile = buffer[: min(TILE, work.columns - j)]
            torch.mm(c[:, j : j + TILE].T, w.T, out=tile)
            write_all(descriptor, memoryview(tile.numpy()).cast("B"), offset + j * ROWS * 4)
    finally:
        os.close(descriptor)


def torch_operands(work: Work) -> tuple[Any, Any, Any]:
    """Return torch, with all cores, and A @ B and C as tensors."""
    import torch  # noqa: PLC0415  the memory part measures a driver that has not loaded it

    torch.set_num_threads(work.cores)
    c = np.load(work.c_path, mmap_mode="c")  # torch warns of a map that cannot be written
    return torch, torch.from_numpy(work.a @ work.b), torch.from_numpy(c)


def write_all(descriptor: int, data: memoryview, position: int) -> None:
    """Write all of the data; one `pwrite` may write less."""
    while data:
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


# --- the product alone


def product_numpy(tile: int, work: Work) -> None:
    """Multiply into a reused buffer with NumPy; nothing is kept."""
    w, c = work.a @ work.b, np.load(work.c_path, mmap_mode="r")
    buffer = np.empty(ROWS * tile, np.float32)
    for j in range(0, work.columns, tile):
        width = min(tile, work.columns - j)
        out = buffer[: ROWS * width].reshape(ROWS, width)
        np.matmul(w, c[:, j : j + width], out=out)


def product_torch(tile: int, work: Work) -> None:
    """Multiply into a reused buffer with torch; nothing is kept."""
    torch, w, c = torch_operands(work)
    buffer = torch.empty(ROWS * tile)
    for j in range(0, work.columns, tile):
        width = min(tile, work.columns - j)
        out = buffer[: ROWS * width].view(ROWS, width)
        torch.mm(w, c[:, j : j + width], out=out)


# --- Dask


def dask_usual(order: str, work: Work) -> None:
    """Store the product as Dask's users write it: chunks of columns."""
    da = dask_array()
    c = da.from_array(np.load(work.c_path, mmap_mode="r"), chunks=(INNER, TILE))
    d = open_d(work, order)
    da.store(da.from_array(work.a) @ da.from_array(work.b) @ c, d, lock=False)


def dask_tuned(order: str, chunks: tuple[int, int], work: Work) -> None:
    """Store the product in chunks of (rows, columns) of D, one BLAS thread each."""
    da = dask_array()
    rows, columns = chunks
    w, c = work.a @ work.b, np.load(work.c_path, mmap_mode="r")
    d = open_d(work, order)
    with threadpool_limits(1):  # the scheduler's threads are one per core already
        if order == "C":
            left, right, out = (w, (rows, INNER)), (c, (INNER, columns)), d
        else:  # the transpose, so that chunks are contiguous in the file
            left, right, out = (c.T, (columns, INNER)), (w.T, (INNER, rows)), d.T
        product = da.from_array(left[0], chunks=left[1]) @ da.from_array(right[0], chunks=right[1])
        da.store(product, out, lock=False)


def dask_array() -> Any:
    """Return `dask.array`."""
    import dask.array as da  # noqa: PLC0415  optional

    return da


def open_d(work: Work, order: str) -> np.memmap[Any, Any]:
    """Create the output as a memory map."""
    shape = (ROWS, work.columns)
    return open_memmap(work.out, "w+", np.float32, shape, fortran_order=order == "F")


# --- writing without a product


def preallocate(work: Work) -> None:
    """Reserve the space of D."""
    descriptor = os.open(work.out, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.posix_fallocate(descriptor, 0, work.output_nbytes)
    finally:
        os.close(descriptor)


def write_part(path: Path, start: int, stop: int) -> None:
    """Write `start:stop` of a file from one reused buffer; runs in a process of its own."""
    data = memoryview(np.full(CHUNK_NBYTES, 7, np.uint8))
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for position in range(start, stop, CHUNK_NBYTES):
            write_all(descriptor, data[: min(CHUNK_NBYTES, stop - position)], position)
    finally:
        os.close(descriptor)


# --- raymm


class NullSink(Sink):
    """A sink that drops every block; what the protocol's own methods do, nothing, is enough."""

    name = "nowhere"

    def __init__(self, order: Order) -> None:
        self._order = order

    def layout(self, spec: OutputSpec) -> Layout:
        """Return the layout of a `.npy` file, so that the blocks are the same."""
        return raymm.Npy("D.npy", order=self._order).layout(spec)

    def write(self, block: Block) -> None:
        """Drop a block."""


class LastTile:
    """A callback that remembers when the last tile was done, before the commit."""

    def __init__(self) -> None:
        self.when: float | None = None

    def __call__(self, event: Event) -> None:
        """Note the time of a finished tile."""
        if isinstance(event, TileFinished):
            self.when = time.perf_counter()


@dataclass
class Session:
    """What stays open over all rounds: the Ray engine and the two raw writers."""

    cores: int
    stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stack.close()

    @cached_property
    def engine(self) -> Any:
        """The Ray engine, one worker per core, started on first use."""
        return self.stack.enter_context(raymm.RayEngine(num_workers=self.cores))

    @cached_property
    def writers(self) -> Pool:
        """Two writing processes, started on first use."""
        return self.stack.enter_context(multiprocessing.get_context("spawn").Pool(2))

    def raw_pwrite(self, work: Work) -> None:
        """Let two processes write halves of as many bytes."""
        half = work.output_nbytes // 2
        parts = [(work.out, 0, half), (work.out, half, work.output_nbytes)]
        self.writers.starmap(write_part, parts, chunksize=1)

    def raymm_npy(self, order: Order, engine: str, work: Work) -> float | None:
        """Write D with raymm."""
        last = LastTile()
        raymm.chain([work.a, work.b, str(work.c_path)]).write(
            raymm.Npy(str(work.out), order=order),
            engine=self.engine if engine == "ray" else engine,
            overwrite=True,
            progress=last,
        )
        return last.when

    def tile_nbytes(self, order: Order, work: Work) -> int:
        """Return the size of one tile of C."""
        chain = raymm.chain([work.a, work.b, str(work.c_path)])
        plan = chain.plan(raymm.Npy(str(work.out), order=order), engine=self.engine)
        return plan.grid.tile_columns * INNER * 4

    def raymm_null(self, order: Order, work: Work) -> None:
        """Multiply with raymm and drop D."""
        operands = [work.a, work.b, str(work.c_path)]
        raymm.chain(operands).write(NullSink(order), engine=self.engine)


def all_contestants(session: Session) -> list[Contestant]:
    """Return every contestant, the ones on Ray included."""
    by_hand = [
        Contestant("numpy_loop_c", "numpy_loop_c", numpy_loop_c),
        Contestant("numpy_rows_c", "hand_c", numpy_rows_c),
        Contestant("numpy_columns_f", "hand_f", numpy_columns_f),
        Contestant("torch_columns_f", "hand_f", torch_columns_f),
        Contestant("torch_pwrite_f", "hand_f", torch_pwrite_f),
    ]
    dask = [
        Contestant("dask_usual_c", "dask_usual_c", partial(dask_usual, "C"), "dask"),
        Contestant("dask_usual_f", "dask_usual_f", partial(dask_usual, "F"), "dask"),
        *(
            Contestant(
                f"dask_{order.lower()}_{rows}x{columns}",
                f"dask_{order.lower()}",
                partial(dask_tuned, order, (rows, columns)),
                "dask",
            )
            for order, rows, columns in (
                ("C", LONG_ROWS, 131_072),
                ("C", 750, 20_000),
                ("F", ROWS, 2048),
            )
        ),
    ]
    alone = [
        Contestant(f"{run.__name__}_{tile}", "product", partial(run, tile), checks=False)
        for run in (product_numpy, product_torch)
        for tile in (8192, 1024)
    ]
    raw = Contestant(
        "raw_pwrite", "raw_pwrite", session.raw_pwrite, checks=False, prepare=preallocate
    )
    with_raymm = []
    for order, letter in ORDERS:
        on_ray, here = (partial(session.raymm_npy, order, engine) for engine in ("ray", "local"))
        null = partial(session.raymm_null, order)
        with_raymm += [
            Contestant(f"raymm_{letter}", f"raymm_{letter}", on_ray),
            Contestant(f"raymm_local_{letter}", f"raymm_local_{letter}", here),
            Contestant(f"raymm_null_{letter}", f"raymm_null_{letter}", null, checks=False),
        ]
    return [*by_hand, *dask, raw, *alone, *with_raymm]


def choose(
    session: Session, options: argparse.Namespace
) -> tuple[list[Contestant], dict[str, str]]:
    """Return the contestants to run, and why the others do not."""
    only, skip = split_names(options.only), split_names(options.skip)
    chosen, skipped = [], {}
    for contestant in all_contestants(session):
        names = {contestant.name, contestant.group}
        if skip & names or (only and not only & names):
            continue
        if options.toy and not (options.ray or only) and contestant.name in RAY_NAMES:
            skipped[contestant.name] = "a toy run starts Ray only with --ray, or if --only names it"
        elif contestant.needs and find_spec(contestant.needs) is None:
            skipped[contestant.name] = f"{contestant.needs} is not installed"
        else:
            chosen.append(contestant)
    return chosen, skipped


def split_names(text: str) -> set[str]:
    """Return comma-separated names as a set."""
    return {name.strip() for name in text.split(",") if name.strip()}


# --- memory and linearity


def measure_memory(
    session: Session, folder: Path, widths: Sequence[int], console: Console
) -> dict[str, Any]:
    """Return peaks of private memory, and times, of raymm on Ray at several widths."""
    rows = []
    session.raymm_npy("C", "ray", make_work(folder, WARM_COLUMNS, session.cores))
    for columns in widths:
        work = make_work(folder, columns, session.cores)
        for order, _ in ORDERS:
            drop_output(work)
            read_through(work.c_path)
            with PeakSampler(store_used) as sampler:
                start = time.perf_counter()
                session.raymm_npy(order, "ray", work)
                seconds = time.perf_counter() - start
            drop_output(work)
            rows.append(
                {
                    "columns": columns,
                    "order": order,
                    "seconds": seconds,
                    "microseconds_per_column": 1e6 * seconds / columns,
                    "before_nbytes": sampler.first_nbytes,
                    "peak_nbytes": sampler.peak_nbytes,
                    "store_nbytes": sampler.store_nbytes,
                    "store_limit_nbytes": 3 * session.cores * session.tile_nbytes(order, work),
                    "spilled_nbytes": spilled_nbytes(),
                }
            )
            console.print(f"  memory, {columns:,} columns, {order}: {seconds:.2f} s")
        work.c_path.unlink()
    return {"runs": rows, "goals": judge_memory(rows, is_judged=max(widths) >= COLUMNS)}


# --- a cold start

BARE_START = """
import sys
import ray

ray.init()

@ray.remote(num_cpus=1)
class Worker:
    def load(self):
        import torch
        return torch.__version__

workers = [Worker.remote() for _ in range(int(sys.argv[1]))]
ray.get([worker.load.remote() for worker in workers])
ray.shutdown()
"""


def measure_cold(
    folder: Path, options: argparse.Namespace, cores: int, console: Console
) -> dict[str, Any]:
    """Return seconds of ``raymm run`` from a cold shell, and of a script that only starts Ray."""
    work = make_work(folder, TOY_COLUMNS if options.toy else COLD_COLUMNS, cores)
    factors = folder / "A.npy", folder / "B.npy"
    for path, factor in zip(factors, (work.a, work.b), strict=True):
        np.save(path, factor)
    inputs = [*map(str, factors), str(work.c_path)]
    commands = {
        "raymm_run": ["-m", "raymm", "run", *inputs, "--out", str(work.out), "--engine", "ray"],
        "bare_ray": ["-c", BARE_START, str(min(cores, 8))],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(options.repeats):
        for name in sorted(commands, reverse=bool(number % 2)):
            drop_output(work)
            start = time.perf_counter()
            done = subprocess.run([sys.executable, *commands[name]], capture_output=True, text=True)
            seconds[name].append(time.perf_counter() - start)
            if done.returncode:
                raise RuntimeError(f"{name} ended with {done.returncode}:\n{done.stderr}")
            console.print(f"  cold, {name}: {seconds[name][-1]:.2f} s")
    drop_output(work)
    ratio = median(seconds["raymm_run"]) / median(seconds["bare_ray"])
    return {
        "columns": work.columns,
        "seconds": seconds,
        "ratio": ratio,
        "at_most": COLD_LIMIT,
        "ok": None if options.toy else ratio <= COLD_LIMIT,
    }


# --- the command


def make_work(folder: Path, columns: int, cores: int) -> Work:
    """Write C of this width, unless it is there, and return the job."""
    rng = np.random.default_rng(0)  # A and B are the same at every width
    a = rng.standard_normal((ROWS, INNER), np.float32)
    b = rng.standard_normal((INNER, INNER), np.float32)
    path = folder / f"C{columns}.npy"
    if not path.exists():
        c = open_memmap(path, "w+", np.float32, (INNER, columns))
        for row in c:
            rng.standard_normal(columns, np.float32, out=row)
    return Work(a, b, path, folder / "D.npy", cores)


def run_all(folder: Path, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run what was asked for and return the figures."""
    cores = len(os.sched_getaffinity(0))
    result: dict[str, Any] = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "comparisons": []}
    if options.cold:  # first: no other Ray is running yet
        result["cold"] = measure_cold(folder, options, cores, console)
    with Session(cores) as session:
        contestants, result["skipped"] = choose(session, options)
        if options.memory:  # before the contestants, which load libraries into this process
            widths = memory_widths(options)
            result["memory"] = measure_memory(session, folder, widths, console)
        widths = comparison_widths(options)
        if widths and not options.toy:
            compare(contestants, make_work(folder, WARM_COLUMNS, cores), 1, Console(quiet=True))
        for columns in widths:
            result["comparisons"].append(
                compare_at(columns, contestants, folder, options.repeats, console)
            )
        result["machine"] = describe_machine(folder)
    return result


def compare_at(
    columns: int, contestants: Sequence[Contestant], folder: Path, repeats: int, console: Console
) -> Figures:
    """Compare the contestants at one width; at the full one only those asked for there."""
    if columns == FULL_COLUMNS:
        contestants = [each for each in contestants if each.name in FULL_NAMES]
    work = make_work(folder, columns, len(os.sched_getaffinity(0)))
    figures = compare(contestants, work, repeats, console)
    work.c_path.unlink()
    return figures


def memory_widths(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the widths at which memory is measured."""
    if options.toy:
        return TOY_COLUMNS, 2 * TOY_COLUMNS
    return (*MEMORY_COLUMNS, FULL_COLUMNS) if options.full else MEMORY_COLUMNS


def comparison_widths(options: argparse.Namespace) -> tuple[int, ...]:
    """Return the widths at which the contestants are compared."""
    widths = (options.columns, FULL_COLUMNS if options.full else 0)
    return tuple(width for width in widths if width)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--columns", type=int, default=COLUMNS, help="of C; 0: no comparison")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument(
        "--folder", type=Path, help="on the disk to measure; default: beside the current folder"
    )
    parser.add_argument("--only", default="", help="names or groups of contestants, with commas")
    parser.add_argument("--skip", default="", help="names or groups of contestants, with commas")
    parser.add_argument(
        "--full", action="store_true", help=f"also {FULL_COLUMNS:,} columns, against raw writing"
    )
    parser.add_argument("--memory", action="store_true", help="peaks of private memory, linearity")
    parser.add_argument("--cold", action="store_true", help="`raymm run` from a cold shell")
    parser.add_argument("--toy", action="store_true", help="seconds only; figures mean nothing")
    parser.add_argument("--ray", action="store_true", help="Ray in a toy run as well")
    parser.add_argument("--json", metavar="PATH", help="write the figures as JSON; -: to stdout")
    options = parser.parse_args(arguments)
    if options.columns < 0 or options.repeats < 1:
        parser.error("--columns must be at least 0, --repeats at least 1")
    known = {name for each in all_contestants(Session(0)) for name in (each.name, each.group)}
    if unknown := split_names(f"{options.only},{options.skip}") - known:
        parser.error(f"no contestant {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    if options.toy:
        options.columns, options.repeats, options.full = TOY_COLUMNS, 1, False
    return options


def find_parent(options: argparse.Namespace, log: Console) -> Path | None:
    """Return the folder to make the temporary one in, or None if its disk is too small."""
    parent = options.folder or Path.cwd().parent
    if options.folder is None and not os.access(parent, os.W_OK):
        parent = Path.cwd()
    parent.mkdir(parents=True, exist_ok=True)
    kind = file_system(parent.resolve())[1]
    if kind in ("tmpfs", "ramfs"):
        log.print(f"[yellow]{parent} is in memory ({kind}): the figures are not a disk's[/]")
    widths = (*comparison_widths(options), *(memory_widths(options) if options.memory else ()))
    needed = max(widths, default=COLD_COLUMNS) * (ROWS + INNER) * 4 * 105 // 100
    free = shutil.disk_usage(parent).free
    if needed > free:
        log.print(f"{parent}: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free")
        return None
    return parent


def report(result: dict[str, Any], options: argparse.Namespace, log: Console) -> None:
    """Print tables and write JSON; with ``--json -`` stdout is for the JSON alone."""
    judged = [judge(GOALS, figures) for figures in result["comparisons"]]
    width = None if sys.stdout.isatty() else 110
    show(result, judged, log if options.json == "-" else Console(width=width))
    comparisons = map(as_json, result["comparisons"], judged)
    text = json.dumps(result | {"comparisons": list(comparisons)}, indent=2) + "\n"
    if options.json == "-":
        sys.stdout.write(text)
    elif options.json:
        Path(options.json).write_text(text)


def show(result: dict[str, Any], judged: Sequence[list[dict[str, Any]]], out: Console) -> None:
    """Print everything that was found."""
    for line in machine_lines(result["machine"]):
        out.print(line, highlight=False)
    for name, reason in result["skipped"].items():
        out.print(f"{name} left out: {reason}", highlight=False)
    for figures, rows in zip(result["comparisons"], judged, strict=True):
        out.print(times_table(figures))
        if rows:
            out.print(goals_table(rows))
        if figures.columns < COLUMNS:
            out.print(f"narrower than {COLUMNS:,} columns: ratios are shown, not judged")
    if "memory" in result:
        out.print(memory_table(result["memory"]))
    if "cold" in result:
        cold = result["cold"]
        out.print(
            f"cold `raymm run`, {cold['columns']:,} columns: {cold['ratio']:.2f} times a script "
            f"that starts Ray and its workers, at most {COLD_LIMIT} {verdict(cold['ok'])}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if a contestant failed, 2 if nothing could run."""
    options = parse(arguments)
    # This process is the benchmark's own: its Ray workers get its niceness, as all others have.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  Ray spells it so
    log = Console(stderr=True)
    parent = find_parent(options, log)
    if parent is None:
        return 2
    with tempfile.TemporaryDirectory(prefix="raymm-bench-", dir=parent) as folder:
        result = run_all(Path(folder), options, log)
    report(result, options, log)
    return 1 if any(figures.failures for figures in result["comparisons"]) else 0


if __name__ == "__main__":
    sys.exit(main())
