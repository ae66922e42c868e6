"""Time the ways in and out of D = A @ B @ C, A 3000x100, B 100x100: every sink, every source.

All contestants run in one process tree, alternating; see ``--help``. Figures are the medians of
seconds until the call returned and until ``fsync`` of the output returned; the rate of an output
counts D's values. What a source reads is what the kernel says that this process read.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _bench import (
    Contestant,
    Goal,
    Work,
    as_json,
    compare,
    describe_machine,
    goals_table,
    judge,
    machine_lines,
    times_table,
)
from numpy.lib.format import open_memmap
from rich.console import Console
from rich.table import Table

import raymm

ROWS, INNER = 3000, 100
COLUMNS, TOY_COLUMNS = 400_000, 8_000
BATCH_ROWS = 16_384
GROUP_ROWS = 65_536
LARGEST_READ = 1.2
GOALS = (
    Goal("Arrow / .npy in Fortran order", ("npy_f",), "arrow", 0.8),
    Goal("Parquet / .npy in Fortran order", ("npy_f",), "parquet", 0.35),
    Goal("the same, aimed for", ("npy_f",), "parquet", 0.6),
    Goal("Ray Data map_batches + write_parquet / Parquet", ("ray_data",), "parquet", 3.0),
    Goal("pyarrow's writer / our pages", ("parquet_pyarrow",), "parquet", 1.0),
    Goal("C stored 3,600,000 x 100 / C wide", ("wide",), "tall", 0.9),
)


# --- outputs


def write_with(make: Callable[[str], Any], engine: Any, work: Work) -> None:
    """Write D with raymm."""
    chain = raymm.chain([work.a, work.b, str(work.c_path)])
    chain.write(make(str(work.out)), engine=engine())


def write_tall(engine: Any, work: Work) -> None:
    """Write the seed's own form: C stored tall, D row-major 3,600,000 x 3000."""
    tall = raymm.transpose(str(work.c_path.with_suffix(".tall.npy")))
    raymm.chain([work.a, work.b, tall]).T.write(raymm.Npy(str(work.out)), engine=engine())


def keep_in_store(engine: Any, work: Work) -> None:
    """Leave D in the cluster's object store."""
    chain = raymm.chain([work.a, work.b, str(work.c_path)])
    chain.write(raymm.Refs(), engine=engine()).free()


def write_ray_data(work: Work) -> None:
    """Write D as users of Ray Data do: rows in batches, one product each, Parquet."""
    import ray  # noqa: PLC0415  only where Ray is wanted
    from ray import data  # noqa: PLC0415

    data.DataContext.get_current().enable_progress_bars = False
    c = np.load(work.c_path, mmap_mode="r")
    folded = ray.put((work.a @ work.b).T.copy())

    class Multiply:
        def __init__(self) -> None:
            self.factor = ray.get(folded)

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {"D": batch["data"] @ self.factor}

    rows = [
        np.ascontiguousarray(c[:, j : j + BATCH_ROWS].T) for j in range(0, work.columns, BATCH_ROWS)
    ]
    table = data.from_numpy(rows)
    table.map_batches(
        Multiply,
        batch_size=BATCH_ROWS,
        compute=data.ActorPoolStrategy(size=work.cores),
        num_cpus=0.5,
    ).write_parquet(str(work.out))


@dataclass
class Session:
    """What stays open over all rounds: the Ray engine, started on first use."""

    cores: int
    _engine: Any = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.free()

    def free(self, work: Work | None = None) -> None:
        """Give the cores back to Ray."""
        del work
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def make_room(self, work: Work) -> None:
        """Start the engine with an object store that has room for D."""
        self.free()
        keep_in_store(self.engine, work)

    def warm(self, work: Work) -> None:
        """Start the engine and let each of its workers multiply, before the clock starts."""
        small = np.ones((INNER, 64 * INNER), np.float32)
        for _ in range(2):
            raymm.multi_dot([work.b, small], engine=self.engine(), tile_columns=INNER)

    def engine(self) -> Any:
        """Return the engine."""
        if self._engine is None:
            self._engine = raymm.RayEngine(num_workers=self.cores)
        return self._engine


def outputs(session: Session) -> list[Contestant]:
    """Return the ways to write D."""
    ways: dict[str, Callable[[str], Any]] = {
        "npy_f": partial(raymm.Npy, order="F"),
        "npy_c": raymm.Npy,
        "arrow": raymm.Arrow,
        "parquet": raymm.Parquet,
        "parquet_pyarrow": partial(raymm.Parquet, compression="none"),
        "parquet_zstd": partial(raymm.Parquet, compression="zstd"),
        "zarr": raymm.Zarr,
    }
    found = [
        Contestant(
            name,
            name,
            partial(write_with, make, session.engine),
            prepare=session.warm,
            **({} if name.startswith("npy") else {"opens": raymm.open}),
        )
        for name, make in ways.items()
    ]
    wide = partial(write_with, ways["npy_f"], session.engine)
    tall = partial(write_tall, session.engine)
    return [
        *found,
        Contestant("wide", "wide", wide, prepare=session.warm),
        Contestant("tall", "tall", tall, prepare=session.warm, opens=load_turned),
        Contestant(
            "refs",
            "refs",
            partial(keep_in_store, session.engine),
            checks=False,
            prepare=session.make_room,
        ),
        Contestant("ray_data", "ray_data", write_ray_data, checks=False, prepare=session.free),
    ]


def load_turned(path: Path) -> Any:
    """Return a tall D as the wide one."""
    return np.load(path, mmap_mode="r").T


# --- sources


def bytes_read() -> int:
    """Return the bytes that this process has asked the kernel to read, from cache or disk."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise RuntimeError("/proc/self/io has no rchar")


def make_sources(folder: Path, c: Any) -> dict[str, Any]:
    """Store C, (inner, columns), in every form of file; tables hold a column in each row."""
    import pyarrow as pa  # noqa: PLC0415  one part needs it
    import zarr  # noqa: PLC0415
    from pyarrow import parquet as pq  # noqa: PLC0415

    np.savez(folder / "C.npz", C=c)
    rows = np.ascontiguousarray(c.T)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
    table = pa.table({"D": vectors})
    pq.write_table(table, folder / "C.parquet", row_group_size=GROUP_ROWS, use_dictionary=False)
    pq.write_table(table, folder / "Czstd.parquet", row_group_size=GROUP_ROWS, compression="zstd")
    (folder / "Cparts").mkdir()
    for place in range(0, len(rows), GROUP_ROWS):
        part = table.slice(place, GROUP_ROWS)
        pq.write_table(part, folder / "Cparts" / f"{place:09d}.parquet", use_dictionary=False)
    with pa.ipc.new_file(folder / "C.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=GROUP_ROWS)
    array = zarr.create_array(
        folder / "C.zarr", shape=c.shape, dtype=c.dtype, chunks=(c.shape[0], 8192)
    )
    array[...] = c
    return {
        "npy": folder / "C.npy",
        "npz": f"{folder / 'C.npz'}::C",
        "parquet": f"{folder / 'C.parquet'}.T",
        "parquet_zstd": f"{folder / 'Czstd.parquet'}.T",
        "parquet_folder": f"{folder / 'Cparts'}.T",
        "arrow": f"{folder / 'C.arrow'}.T",
        "zarr": folder / "C.zarr",
    }


def size_of(path: str) -> int:
    """Return the bytes of a file or of a folder's files."""
    plain = Path(path.removesuffix(".T").partition("::")[0])
    files = [plain] if plain.is_file() else [each for each in plain.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files)


def measure_sources(folder: Path, columns: int, repeats: int) -> list[dict[str, Any]]:
    """Return seconds and bytes read of a pass over C in each form, into a sink that drops D."""
    from bench_multi_dot import NullSink  # noqa: PLC0415  beside this script

    rng = np.random.default_rng(0)
    c = rng.standard_normal((INNER, columns), np.float32)
    np.save(folder / "C.npy", c)
    factor = rng.standard_normal((64, INNER), np.float32)  # reading is what is timed
    sources = make_sources(folder, c)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in sources}
    with raymm.LocalEngine() as engine:
        for _ in range(repeats):
            for name, source in sources.items():
                chain = raymm.chain([factor, source])
                before, start = bytes_read(), time.perf_counter()
                chain.write(NullSink("F"), engine=engine)
                found[name].append((time.perf_counter() - start, bytes_read() - before))
    rows = []
    for name, runs in found.items():
        size = size_of(str(sources[name]))
        read = max(nbytes for _, nbytes in runs) / size
        seconds = sorted(seconds for seconds, _ in runs)[len(runs) // 2]
        is_mapped = read < 0.5  # pages of a memory map are no read() calls
        rows.append(
            {
                "source": name, "file_nbytes": size, "seconds": seconds,
                "read_ratio": None if is_mapped else read, "ok": read <= LARGEST_READ,
            }
        )  # fmt: skip
    return rows


def sources_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return what sources read as a table."""
    table = Table(title=f"reading C once; bytes read at most {LARGEST_READ} of the file")
    for name in ("source", "file, MB", "s", "MB/s", "read / size", ""):
        table.add_column(name, justify="left" if name == "source" else "right")
    for row in rows:
        ratio = row["read_ratio"]
        table.add_row(
            row["source"],
            f"{row['file_nbytes'] / 1e6:.0f}",
            f"{row['seconds']:.2f}",
            f"{row['file_nbytes'] / 1e6 / row['seconds']:.0f}",
            "mapped" if ratio is None else f"{ratio:.2f}",
            "[green]ok[/]" if row["ok"] else "[red]miss[/]",
        )
    return table


# --- the command


def make_work(folder: Path, columns: int, cores: int, has_tall: bool) -> Work:
    """Write C, and C tall, and return the job."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((ROWS, INNER), np.float32)
    b = rng.standard_normal((INNER, INNER), np.float32)
    path = folder / f"C{columns}.npy"
    c = open_memmap(path, "w+", np.float32, (INNER, columns))
    for row in c:
        rng.standard_normal(columns, np.float32, out=row)
    if has_tall:
        np.save(path.with_suffix(".tall.npy"), np.ascontiguousarray(c.T))
    return Work(a, b, path, folder / "D", cores)


def run_all(folder: Path, options: argparse.Namespace, log: Console) -> dict[str, Any]:
    """Run what was asked for and return the figures."""
    cores = len(os.sched_getaffinity(0))
    result: dict[str, Any] = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    only = {name for name in options.only.split(",") if name}
    if not only or "sources" in only:
        place = folder / "sources"
        place.mkdir()
        result["sources"] = measure_sources(place, options.columns, options.repeats)
        shutil.rmtree(place)
    with Session(cores) as session:
        chosen = [each for each in outputs(session) if not only or each.name in only]
        if chosen:
            work = make_work(folder, options.columns, cores, any(c.name == "tall" for c in chosen))
            result["figures"] = compare(chosen, work, options.repeats, log)
        result["machine"] = describe_machine(folder)
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--columns", type=int, default=COLUMNS, help="of C (default: 400,000)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: beside here")
    parser.add_argument("--only", default="", help="contestants, or sources, with commas")
    parser.add_argument("--toy", action="store_true", help="seconds only; figures mean nothing")
    parser.add_argument("--json", metavar="PATH", help="write the figures as JSON")
    options = parser.parse_args(arguments)
    if options.toy:
        options.columns, options.repeats = TOY_COLUMNS, 1
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parse(arguments)
    os.environ.setdefault("RAY_worker_niceness", "0")
    log = Console(stderr=True)
    parent = options.folder or Path.cwd().parent
    with tempfile.TemporaryDirectory(prefix="raymm-bench-", dir=parent) as folder:
        result = run_all(Path(folder), options, log)
    out = Console(width=None if sys.stdout.isatty() else 110)
    for line in machine_lines(result["machine"]):
        out.print(line, highlight=False)
    if "sources" in result:
        out.print(sources_table(result["sources"]))
    if "figures" in result:
        figures = result.pop("figures")
        judged = judge(GOALS, figures)
        out.print(times_table(figures))
        out.print(goals_table(judged))
        result["outputs"] = as_json(figures, judged)
        for name, reason in figures.failures.items():
            out.print(f"{name}: {reason}", highlight=False)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
