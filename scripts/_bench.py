"""Timing, tables and what the machine is: the part of a benchmark that knows no contestant."""

import os
import platform
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_info

USS_LIMIT_NBYTES = 1_500_000_000
USS_GROWTH_NBYTES = 100_000_000
"""Change of the peak from the narrowest to the widest run that still counts as none."""
PACKAGES = ("raymm", "ray", "torch", "numpy", "dask", "pyarrow", "zarr", "psutil", "threadpoolctl")


@dataclass(frozen=True)
class Work:
    """One size of the job: A @ B @ C with C in a file, and where D goes."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    c_path: Path
    out: Path
    cores: int

    @property
    def columns(self) -> int:
        """Number of columns of C and D."""
        return int(np.load(self.c_path, mmap_mode="r").shape[1])

    @property
    def output_nbytes(self) -> int:
        """Size of D's values, in bytes."""
        return self.a.shape[0] * self.columns * self.a.itemsize


def _nothing(work: Work) -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Contestant:
    """One way to do the work."""

    name: str
    group: str
    """Contestants of one group are variants of each other; the fastest counts."""
    run: Callable[[Work], float | None]
    """Do the work. Returns None, or when its last byte was written (`time.perf_counter`), for a
    call that does not come back before its output is synced."""
    needs: str = ""
    """The module it cannot run without."""
    checks: bool = True
    """Whether it leaves D behind, which is then compared with the product."""
    prepare: Callable[[Work], None] = _nothing
    """What is done before the clock starts."""
    opens: Callable[[Path], Any] = field(default=partial(np.load, mmap_mode="r"))
    """How the output is opened to be compared."""


@dataclass(frozen=True)
class Timing:
    """One timed run."""

    contestant: str
    group: str
    round: int
    returned_seconds: float
    """Until the call came back (or the last byte was written, see `Contestant.run`)."""
    synced_seconds: float
    """Until `fsync` of the output came back."""


@dataclass(frozen=True)
class Goal:
    """A ratio of two groups' times that is asked for: slower / faster."""

    name: str
    slower: tuple[str, ...]
    """Groups; the fastest of all their contestants counts."""
    faster: str
    wanted: float
    is_synced: bool = True
    columns: int = 400_000
    """The figure is asked for at this width; at a smaller one it is shown and not judged."""


@dataclass
class Figures:
    """Everything one comparison found."""

    columns: int
    output_nbytes: int
    timings: list[Timing] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def seconds(self, name: str, *, is_synced: bool) -> list[float]:
        """Return the times of one contestant, over the rounds."""
        return [
            timing.synced_seconds if is_synced else timing.returned_seconds
            for timing in self.timings
            if timing.contestant == name
        ]

    def best(self, groups: Sequence[str], *, is_synced: bool) -> tuple[str, float] | None:
        """Return the contestant of these groups with the lowest median, and that median."""
        names = {timing.contestant for timing in self.timings if timing.group in groups}
        medians = {name: median(self.seconds(name, is_synced=is_synced)) for name in names}
        return min(medians.items(), key=lambda item: item[1]) if medians else None


def compare(
    contestants: Sequence[Contestant], work: Work, repeats: int, console: Console
) -> Figures:
    """Time every contestant `repeats` times, alternating, each round from another start."""
    figures = Figures(work.columns, work.output_nbytes)
    step = max(1, len(contestants) // max(1, repeats))
    for number in range(repeats):
        turn = number * step % max(1, len(contestants))
        for contestant in (*contestants[turn:], *contestants[:turn]):
            if contestant.name in figures.failures:
                continue
            try:
                timing = time_once(contestant, work, number)
            except Exception as error:  # the others' figures are worth keeping
                figures.failures[contestant.name] = f"{type(error).__name__}: {error}"
                console.print(f"  {contestant.name}: [red]{figures.failures[contestant.name]}[/]")
                continue
            figures.timings.append(timing)
            console.print(
                f"  round {number + 1} {contestant.name}: {timing.returned_seconds:.2f} s, "
                f"{timing.synced_seconds:.2f} s synced"
            )
    drop_output(work)
    return figures


def time_once(contestant: Contestant, work: Work, number: int) -> Timing:
    """Time one run from a clean state: no old output, no dirty pages, C in the page cache."""
    drop_output(work)
    read_through(work.c_path)
    contestant.prepare(work)
    start = time.perf_counter()
    written = contestant.run(work)
    returned = time.perf_counter()
    if work.out.exists():
        fsync(work.out)
    synced = time.perf_counter()
    if contestant.checks:
        check_output(work, contestant.opens(work.out))
    return Timing(
        contestant.name,
        contestant.group,
        number,
        (returned if written is None else written) - start,
        synced - start,
    )


def drop_output(work: Work) -> None:
    """Remove the output and what lies beside it, and wait until the disk is idle."""
    for path in work.out.parent.glob(f"{work.out.name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()


def read_through(path: Path) -> None:
    """Bring a file into the page cache."""
    buffer = bytearray(1 << 22)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def fsync(path: Path) -> None:
    """Wait until a file, or a folder's files, are on the disk, pages of memory maps included."""
    if path.is_dir():
        for part in path.rglob("*"):
            if part.is_file():
                fsync(part)
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output(work: Work, d: Any) -> None:
    """Raise `ValueError` unless sampled columns of the output are those of the product."""
    c = np.load(work.c_path, mmap_mode="r")
    if d.shape != (work.a.shape[0], work.columns):
        raise ValueError(f"{work.out.name} has shape {d.shape}")
    columns = np.linspace(0, work.columns - 1, 5).astype(int)
    exact = work.a.astype(float) @ (work.b.astype(float) @ c[:, columns].astype(float))
    if not np.allclose(d[:, columns], exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max()):
        raise ValueError(f"{work.out.name} does not hold A @ B @ C")


class PeakSampler:
    """Sample this process and its Ray workers in a thread, and keep the largest sums."""

    def __init__(self, store_used: Callable[[], float], seconds: float = 0.1) -> None:
        self.peak_nbytes = 0
        """Largest sum of private memory (USS) of this process and the workers."""
        self.first_nbytes = 0
        """That sum at the start."""
        self.store_nbytes = 0
        """Most bytes seen in the object store."""
        self._store_used, self._seconds = store_used, seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakSampler":
        self.first_nbytes = private_nbytes()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(self._seconds):
            self.peak_nbytes = max(self.peak_nbytes, private_nbytes())
            self.store_nbytes = max(self.store_nbytes, int(self._store_used()))


def ray_workers() -> list[psutil.Process]:
    """Return the processes below this one that hold a Ray actor."""
    workers = []
    for process in psutil.Process().children(recursive=True):
        try:
            title = process.cmdline()[:1]
        except psutil.Error:  # gone since
            continue
        # Titles are ray::Class or ray::Class.method; an idle process and two of Ray's own differ.
        if re.match(r"ray::(?!IDLE|DashboardAgent|RuntimeEnvAgent)", "".join(title)):
            workers.append(process)
    return workers


def private_nbytes() -> int:
    """Return the private memory (USS) of this process and the Ray workers below it, in bytes."""
    total = 0
    for process in (psutil.Process(), *ray_workers()):
        try:
            total += process.memory_full_info().uss
        except psutil.Error:  # gone since
            continue
    return total


def file_system(folder: Path) -> tuple[str, str]:
    """Return device and kind of the file system that holds a folder."""
    parents = {str(folder), *map(str, folder.parents)}
    mounts = [part for part in psutil.disk_partitions(all=True) if part.mountpoint in parents]
    best = max(mounts, key=lambda part: len(part.mountpoint), default=None)
    return (best.device, best.fstype) if best else ("unknown", "unknown")


def describe_machine(folder: Path) -> dict[str, Any]:
    """Return what figures depend on: processor, memory, disk, versions, BLAS, niceness."""
    device, kind = file_system(folder.resolve())
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "ram_nbytes": psutil.virtual_memory().total,
        "disk": {
            "device": device,
            "file_system": kind,
            "free_nbytes": psutil.disk_usage(str(folder)).free,
        },
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "blas": [
            f"{pool['prefix']} {pool['version'] or ''} "
            f"{pool.get('architecture', '')} x{pool['num_threads']}".replace("  ", " ")
            for pool in threadpool_info()
        ],
        "niceness": {
            "driver": os.nice(0),
            "workers": sorted({process.nice() for process in ray_workers()}),
        },
    }


def machine_lines(machine: dict[str, Any]) -> list[str]:
    """Return the machine in words."""
    disk, versions, niceness = machine["disk"], machine["versions"], machine["niceness"]
    workers = ", ".join(map(str, niceness["workers"])) or "none started"
    return [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_nbytes'] / 2**30:.0f} GiB; "
        f"{disk['device']} ({disk['file_system']}), {disk['free_nbytes'] / 1e9:.0f} GB free",
        f"Linux {machine['kernel']}, Python {machine['python']}, "
        + ", ".join(f"{name} {number}" for name, number in versions.items() if number),
        f"BLAS and OpenMP: {'; '.join(machine['blas'])}",
        f"niceness: this process {niceness['driver']}, Ray workers {workers} "
        "(RAY_worker_niceness=0 is set here; Ray's default is 15)",
    ]


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def judge(goals: Sequence[Goal], figures: Figures) -> list[dict[str, Any]]:
    """Return every goal whose two sides were timed, with its ratio; `ok` is None if not judged."""
    found = []
    for goal in goals:
        slower = figures.best(goal.slower, is_synced=goal.is_synced)
        faster = figures.best((goal.faster,), is_synced=goal.is_synced)
        if slower is None or faster is None:
            continue
        ratio = slower[1] / faster[1]
        is_judged = figures.columns >= goal.columns
        found.append(
            {
                "goal": goal.name,
                "is_synced": goal.is_synced,
                "of": slower[0],
                "to": faster[0],
                "ratio": ratio,
                "wanted": goal.wanted,
                "ok": ratio >= goal.wanted if is_judged else None,
            }
        )
    return found


def times_table(figures: Figures) -> Table:
    """Return the contestants' medians as a table, fastest synced first."""
    gigabytes = figures.output_nbytes / 1e9
    table = Table(title=f"{figures.columns:,} columns, D {gigabytes:.2f} GB; medians (range)")
    table.add_column("contestant", no_wrap=True, min_width=18)
    for name in ("returned, s", "synced, s", "GB/s synced", "runs"):
        table.add_column(name, justify="right")
    rows = []
    for name in dict.fromkeys(timing.contestant for timing in figures.timings):
        synced = figures.seconds(name, is_synced=True)
        cells = (_spread(figures.seconds(name, is_synced=False)), _spread(synced))
        rate = f"{gigabytes / median(synced):.2f}"
        rows.append((median(synced), (name, *cells, rate, str(len(synced)))))
    for _, row in sorted(rows):
        table.add_row(*row)
    return table


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def goals_table(judged: Sequence[dict[str, Any]]) -> Table:
    """Return the ratios as a table, each with the figure asked for."""
    table = Table(title="ratios of medians (higher is better)")
    for name in ("goal", "timed", "of / to", "ratio", "wanted", ""):
        table.add_column(name, justify="right" if name in ("ratio", "wanted") else "left")
    for row in judged:
        table.add_row(
            row["goal"],
            "synced" if row["is_synced"] else "returned",
            f"{row['of']} / {row['to']}",
            f"{row['ratio']:.2f}",
            f"{row['wanted']:.2f}",
            verdict(row["ok"]),
        )
    return table


def verdict(ok: bool | None) -> str:
    """Return a verdict as it is printed."""
    return {True: "[green]ok[/]", False: "[red]miss[/]", None: "-"}[ok]


def as_json(figures: Figures, judged: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one comparison for programs: every run, the medians, the ratios."""
    names = dict.fromkeys(timing.contestant for timing in figures.timings)
    return {
        "columns": figures.columns,
        "output_nbytes": figures.output_nbytes,
        "medians": {
            name: {
                "returned_seconds": median(figures.seconds(name, is_synced=False)),
                "synced_seconds": median(figures.seconds(name, is_synced=True)),
            }
            for name in names
        },
        "ratios": list(judged),
        "runs": [asdict(timing) for timing in figures.timings],
        "failures": figures.failures,
    }


def judge_memory(rows: Sequence[dict[str, Any]], *, is_judged: bool) -> list[dict[str, Any]]:
    """Return what is asked of memory, with what was found."""
    widths = sorted({row["columns"] for row in rows})

    def peak(columns: int) -> int:
        return max(row["peak_nbytes"] for row in rows if row["columns"] == columns)

    found = (
        ("peak of private memory", max(map(peak, widths)), USS_LIMIT_NBYTES),
        ("its growth with the width", peak(widths[-1]) - peak(widths[0]), USS_GROWTH_NBYTES),
        (
            "object store, against 3 tiles of C per worker",
            max(row["store_nbytes"] for row in rows),
            min(row["store_limit_nbytes"] for row in rows),
        ),
        ("spilled", max(row["spilled_nbytes"] for row in rows), 0),
    )
    return [
        {
            "goal": name,
            "nbytes": nbytes,
            "at_most_nbytes": limit,
            "ok": nbytes <= limit if is_judged else None,
        }
        for name, nbytes, limit in found
    ]


def store_used() -> float:
    """Return bytes in the object store, as far as Ray has reported."""
    import ray  # noqa: PLC0415  slow, and read only after RAY_worker_niceness is set

    total, free = ray.cluster_resources(), ray.available_resources()
    return total.get("object_store_memory", 0) - free.get("object_store_memory", 0)


def memory_table(memory: dict[str, Any]) -> Table:
    """Return peaks and times as a table."""
    table = Table(title="memory: private bytes (USS) of driver and workers, summed")
    names = ("columns", "order", "s", "us/column", "before, MB", "peak, MB", "store, MB", "spilled")
    for name in names:
        table.add_column(name, justify="right")
    for row in memory["runs"]:
        sizes = (row["before_nbytes"], row["peak_nbytes"], row["store_nbytes"])
        table.add_row(
            f"{row['columns']:,}",
            row["order"],
            f"{row['seconds']:.2f}",
            f"{row['microseconds_per_column']:.2f}",
            *(f"{nbytes / 1e6:.0f}" for nbytes in sizes),
            str(row["spilled_nbytes"]),
        )
    lines = [
        f"{goal['goal']}: {goal['nbytes'] / 1e6:.0f} MB, at most "
        f"{goal['at_most_nbytes'] / 1e6:.0f} {verdict(goal['ok'])}"
        for goal in memory["goals"]
    ]
    table.caption = "\n".join(lines)
    return table


def spilled_nbytes() -> int:
    """Return the size of what the Ray below this process has spilled to disk, in bytes."""
    sessions = set()
    for process in psutil.Process().children(recursive=True):
        try:
            options = process.cmdline()
        except psutil.Error:  # gone since
            continue
        starts = ("--session-dir=", "--session_dir=")
        sessions |= {Path(each.partition("=")[2]) for each in options if each.startswith(starts)}
    files = (path for session in sessions for path in session.glob("ray_spilled_objects*/**/*"))
    return sum(path.stat().st_size for path in files if path.is_file())
