"""The seed-shaped inputs of `raymm demo`."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from raymm.errors import SinkError
from raymm.memory import format_nbytes
from raymm.paths import free_nbytes
from raymm.sinks.npy import HEADER_NBYTES, npy_header

ROWS, INNER, COLUMNS, FULL_COLUMNS = 3000, 100, 400_000, 3_600_000
_STEP = 2**20
"""Numbers drawn at a time."""


@contextmanager
def demo_folder(folder: str | None, keep: bool) -> Iterator[Path]:
    """Yield a folder for the files of the demo; remove them, and a folder made here, at the end.

    Without a name it is a new one below the current folder: a temporary folder is often in memory.
    """
    path = Path(folder) if folder else Path(mkdtemp(prefix="raymm-demo-", dir="."))
    is_new = not folder or not path.exists()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SinkError(error.errno, f"{path} cannot be made: {error.strerror}") from error
    files = [path / name for name in ("A.npy", "B.npy", "C.npy", "D.npy")]
    taken = next((file for file in files if file.exists()), None)
    if taken is not None:
        raise SinkError(errno.EEXIST, f"{taken} exists: choose another --folder")
    try:
        yield path
    finally:
        if not keep:
            for file in files:
                file.unlink(missing_ok=True)
            if is_new:
                with suppress(OSError):  # something of the user's may be in it by now
                    path.rmdir()


def check_space(folder: Path, columns: int) -> None:
    """Raise `SinkError` if the files of the demo do not fit."""
    numbers = ROWS * INNER + INNER * INNER + (INNER + ROWS) * columns
    needed, free = 4 * (numbers + HEADER_NBYTES), free_nbytes(folder / "D.npy")
    if needed > free:
        raise SinkError(
            errno.ENOSPC,
            f"the demo needs {format_nbytes(needed)} in {folder.absolute()}, {format_nbytes(free)} "
            "are free: choose another --folder or fewer --columns",
        )


def make_inputs(folder: Path, columns: int) -> list[str]:
    """Write A (3000, 100), B (100, 100) and C (100, `columns`), float32, a few MB at a time."""
    shapes = {"A.npy": (ROWS, INNER), "B.npy": (INNER, INNER), "C.npy": (INNER, columns)}
    generator, dtype = np.random.default_rng(0), np.dtype(np.float32)
    for name, shape in shapes.items():
        path = folder / name
        try:
            with path.open("xb") as file:
                file.write(npy_header(shape, dtype, False))
                for done in range(0, shape[0] * shape[1], _STEP):
                    count = min(_STEP, shape[0] * shape[1] - done)
                    file.write(generator.standard_normal(count, np.float32).data)
        except OSError as error:
            raise SinkError(
                error.errno, f"{path} could not be written: {error.strerror}"
            ) from error
    return [str(folder / name) for name in shapes]
