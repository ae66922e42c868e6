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
"""Rows and columns of the grid of entries that are looked at."""


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
    """Return a digest of an operand's shape, dtype, file and some of its values.

    Two operands of one fingerprint may still differ where no sample was taken; a file that was
    written again has another one, by its size and time.
    """
    operand = source.operand
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((operand.shape, operand.dtype.str, operand.nonzeros)).encode())
    path = None if operand.path is None else Path(operand.path)
    if path is not None and path.is_file():
        status = path.stat()
        digest.update(repr((status.st_size, status.st_mtime_ns)).encode())
    if isinstance(source, (FileSource, ArraySource)):
        digest.update(_samples(source).tobytes())
    return digest.hexdigest()


def _samples(source: FileSource | ArraySource) -> np.ndarray[Any, Any]:
    """Return entries at the crossings of evenly spread rows and columns."""
    matrix = source if len(source.operand.shape) == 2 else source.as_row()
    rows, columns = matrix.operand.shape
    if rows == 0 or columns == 0:
        return np.empty(0)
    few = select(matrix, 0, slice(None, None, -(-rows // SAMPLES)))
    few = select(few, 1, slice(None, None, -(-columns // SAMPLES)))
    return np.ascontiguousarray(few.read(0, few.operand.shape[1], Buffer()))
