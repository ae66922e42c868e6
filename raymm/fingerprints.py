"""By what operands can be recognised later: descriptions and samples, never all of the values."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from raymm.kernels.buffers import Buffer
from raymm.sources.base import Source
from raymm.sources.files import FileSource
from raymm.sources.memory import ArraySource
from raymm.sources.selection import select

SAMPLES = 64
"""Rows and columns of the grid of entries that are looked at ..."""
RUNS = 8
"""... and of sparse operands and tables so many runs of columns: single ones cost as much."""


def describe_operand(source: Source) -> dict[str, Any]:
    """Return name, shape, dtype and fingerprint of an operand, for JSON."""
    operand = source.operand
    return {
        "name": operand.name,
        "shape": list(operand.shape),
        "dtype": operand.dtype.name,
        "fingerprint": fingerprint(source),
    }


def fingerprint(source: Source) -> str:
    """Return a digest of an operand's shape, dtype, files and some of its values.

    Files go in by size and time: one that was written again gives another digest. Values in this
    process go in by samples: two operands may still differ where none was taken. Objects in a
    cluster and at addresses go in by what they are called.
    """
    operand = source.operand
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((operand.shape, operand.dtype.str, operand.nonzeros)).encode())
    digest.update(repr(_files(source)).encode())
    if operand.is_held or isinstance(source, FileSource):
        digest.update(_samples(source))
    elif not _files(source):
        digest.update(operand.name.encode())
    return digest.hexdigest()


def _files(source: Source) -> list[tuple[int, int]]:
    """Return size and time of the files that an operand is in."""
    path = Path(source.operand.path or "")
    found = getattr(source, "paths", ()) or (sorted(path.rglob("*")) if path.is_dir() else [path])
    return [
        (status.st_size, status.st_mtime_ns)
        for each in map(Path, found if source.operand.path else ())
        if each.is_file() and (status := each.stat())
    ]


def _samples(source: Source) -> bytes:
    """Return entries at the crossings of evenly spread rows and columns."""
    matrix = source if len(source.operand.shape) == 2 else source.as_row()
    rows, columns = matrix.operand.shape
    if rows == 0 or columns == 0:
        return b""
    if isinstance(matrix, (FileSource, ArraySource)):
        few = select(matrix, 0, slice(None, None, -(-rows // SAMPLES)))
        few = select(few, 1, slice(None, None, -(-columns // SAMPLES)))
        return np.ascontiguousarray(few.read(0, few.operand.shape[1], Buffer())).tobytes()
    found = []
    for first in np.unique(np.linspace(0, columns - 1, RUNS, dtype=np.int64)):
        values = matrix.read(int(first), int(min(first + SAMPLES, columns)), Buffer())
        dense = values if isinstance(values, np.ndarray) else values.dense()
        found.append(np.ascontiguousarray(dense[:: -(-rows // SAMPLES)]).tobytes())
    return b"".join(found)
