"""Time D = A @ B @ C with a sparse C of few non-zero columns: as it is, and densified beforehand.

A is 3000x100, B 100x100, C 100 columns high with random entries; D is reduced to nothing, or goes
into a Fortran-order `.npy`. Figures are medians of seconds until the call returned, which includes
the sync of the output. See ``--help``.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from _bench import (
    Contestant,
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
    machine_lines,
    times_table,
)
from numpy.lib.format import open_memmap
from rich.console import Console

import raymm
from raymm.sinks.base import Block, OutputSpec, Sink
from raymm.tiles import Layout

ROWS, INNER = 3000, 100
COLUMNS, TOY_COLUMNS, WARM_COLUMNS = 2_000_000, 20_000, 40_000
DENSITY = 0.001
TILE = 8192
ENTRY_NBYTES = 16
"""Of a value and its place, at most."""
MEMORY_SLACK_NBYTES = 300_000_000
"""Buffers for tiles and blocks, whatever the width."""
GOALS = (
    Goal("dense / sparse, reduced", ("dense_null",), "sparse_null", 5.0, columns=COLUMNS),
    Goal("dense / sparse, Npy(order='F')", ("dense_f",), "sparse_f", 5.0, columns=COLUMNS),
    Goal("SciPy by hand / sparse, Npy(order='F')", ("scipy_f",), "sparse_f", 2.0, columns=COLUMNS),
)


class RowMaxima(Sink):
    """A reduction at its cheapest: the largest entry of each block; zero columns count once."""

    name = "maxima"

    def layout(self, spec: OutputSpec) -> Layout:
        """Return the layout of a Fortran-order file."""
        return raymm.Npy("D.npy", order="F").layout(spec)

    def write(self, block: Block) -> None:
        """Look at the columns that are not zero."""
        block.compact.max(initial=0)


@dataclass
class Session:
    """The engine and the sparse operand, kept over all rounds."""

    engine: Any = field(default_factory=raymm.LocalEngine)
    sparse: dict[Path, sp.csc_array] = field(default_factory=dict)

    def operand(self, is_sparse: bool, work: Work) -> Any:
        """Return C: entries in memory, or a dense file."""
        return self.sparse[work.c_path] if is_sparse else str(work.c_path)

    def reduce(self, is_sparse: bool, work: Work) -> None:
        """Multiply with raymm, and keep nothing."""
        chain = raymm.chain([work.a, work.b, self.operand(is_sparse, work)])
        chain.write(RowMaxima(), engine=self.engine)

    def write(self, is_sparse: bool, work: Work) -> None:
        """Write D with raymm."""
        chain = raymm.chain([work.a, work.b, self.operand(is_sparse, work)])
        chain.write(raymm.Npy(work.out, order="F"), engine=self.engine, overwrite=True)

    def scipy_columns_f(self, work: Work) -> None:
        """Multiply the sparse columns with SciPy into a Fortran-order map."""
        w, c = work.a @ work.b, self.sparse[work.c_path]
        d = open_memmap(work.out, "w+", np.float32, (ROWS, work.columns), fortran_order=True)
        for j in range(0, work.columns, TILE):
            part = c[:, j : j + TILE]
            held = np.flatnonzero(np.diff(part.indptr))
            d[:, j + held] = w @ part[:, held]
        d.flush()


def contestants(session: Session) -> list[Contestant]:
    """Return every contestant."""
    return [
        Contestant("sparse_null", "sparse_null", partial(session.reduce, True), checks=False),
        Contestant("dense_null", "dense_null", partial(session.reduce, False), checks=False),
        Contestant("sparse_f", "sparse_f", partial(session.write, True)),
        Contestant("dense_f", "dense_f", partial(session.write, False)),
        Contestant("scipy_f", "scipy_f", session.scipy_columns_f),
    ]


def make_work(session: Session, folder: Path, columns: int, cores: int) -> Work:
    """Make C of this width, sparse in memory and dense in a file."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((ROWS, INNER), np.float32)
    b = rng.standard_normal((INNER, INNER), np.float32)
    c = sp.random_array((INNER, columns), density=DENSITY, rng=rng, format="csc", dtype=np.float32)
    path = folder / f"C{columns}.npy"
    dense = open_memmap(path, "w+", np.float32, (INNER, columns))
    rows = c.tocsr()
    for row in range(INNER):
        dense[row] = rows[[row]].toarray()[0]
    session.sparse[path] = c
    return Work(a, b, path, folder / "D.npy", cores)


def measure_memory(session: Session, work: Work) -> dict[str, Any]:
    """Return what writing the sparse product adds to this process, beside the entries' size."""
    drop_output(work)
    chain = raymm.chain([work.a, work.b, session.sparse[work.c_path]])
    with raymm.LocalEngine() as engine, PeakSampler(lambda: 0) as sampler:
        start = time.perf_counter()
        chain.write(raymm.Npy(work.out, order="F"), engine=engine, overwrite=True)
        seconds = time.perf_counter() - start
    drop_output(work)
    added = sampler.peak_nbytes - sampler.first_nbytes
    limit = session.sparse[work.c_path].nnz * ENTRY_NBYTES + MEMORY_SLACK_NBYTES
    return {
        "seconds": seconds,
        "added_nbytes": added,
        "at_most_nbytes": limit,
        "dense_nbytes": INNER * work.columns * 4,
        "ok": added <= limit,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--columns", type=int, default=COLUMNS, help="of C")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--only", default="", help="names of contestants, with commas")
    parser.add_argument("--toy", action="store_true", help="seconds only; figures mean nothing")
    parser.add_argument("--json", metavar="PATH", help="write the figures as JSON; -: to stdout")
    options = parser.parse_args(arguments)
    if options.toy:
        options.columns, options.repeats = TOY_COLUMNS, 1
    if options.columns < 1 or options.repeats < 1:
        parser.error("--columns and --repeats must be at least 1")
    known = [each.name for each in contestants(Session(None))]
    options.names = [name.strip() for name in options.only.split(",") if name.strip()] or known
    if unknown := set(options.names) - set(known):
        parser.error(f"no contestant {', '.join(unknown)}; there are {', '.join(known)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status is 1 if a contestant failed, 2 if nothing could run."""
    options = parse(arguments)
    log = Console(stderr=True)
    parent = options.folder or Path.cwd()
    needed = options.columns * (ROWS + INNER) * 4 * 105 // 100
    if needed > (free := shutil.disk_usage(parent).free):
        log.print(f"{parent}: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free")
        return 2
    if (kind := file_system(parent.resolve())[1]) in ("tmpfs", "ramfs"):
        log.print(f"[yellow]{parent} is in memory ({kind}): the figures are not a disk's[/]")
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="raymm-bench-", dir=parent) as folder:
        session = Session()
        chosen = [each for each in contestants(session) if each.name in options.names]
        warm = make_work(session, Path(folder), WARM_COLUMNS, cores)
        compare(chosen, warm, 1, Console(quiet=True))
        work = make_work(session, Path(folder), options.columns, cores)
        figures = compare(chosen, work, options.repeats, log)
        memory = measure_memory(session, work)
        machine = describe_machine(Path(folder))
    judged = judge(GOALS, figures)
    result = as_json(figures, judged) | {"memory": memory, "machine": machine}
    out = log if options.json == "-" else Console(width=None if sys.stdout.isatty() else 110)
    for line in machine_lines(machine):
        out.print(line, highlight=False)
    out.print(times_table(figures))
    out.print(goals_table(judged))
    out.print(
        f"memory added: {memory['added_nbytes'] / 1e6:.0f} MB, at most "
        f"{memory['at_most_nbytes'] / 1e6:.0f}; C dense: {memory['dense_nbytes'] / 1e6:.0f} MB"
    )
    if options.json == "-":
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
    elif options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 1 if figures.failures else 0


if __name__ == "__main__":
    sys.exit(main())
