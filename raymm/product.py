"""The public verbs for a chain of matrices."""

import os
from collections.abc import Sequence
from typing import Any, Literal

from numpy.typing import DTypeLike

from raymm.chains import Chain, Progress, chain_of
from raymm.engines.base import Engine
from raymm.errors import PlanError
from raymm.request import Precision
from raymm.sinks import Array
from raymm.sources import Source, open_source


def chain(
    operands: Sequence[Any], *, column: str | None = None, null: Literal["nan"] | None = None
) -> Chain:
    """Return the product of matrices, not yet computed.

    Parameters
    ----------
    operands : sequence of array, tensor, memory map, table, or path
        At least two matrices of shape (m, j), (j, k), ..., (k, n); the first and last may be
        vectors (rules: `numpy.linalg.multi_dot`). A path names a ``.npy`` file, a member of a
        ``.npz`` archive (``c.npz::C``), or Parquet or Arrow files: one, a folder, a glob, a URI.
        A path may end in ``.T`` for the transpose. A table holds one vector a row. In a Ray
        cluster: an ``ObjectRef``, a list of them (blocks side by side, ``[[first], [second]]``
        beneath each other; tables and vectors follow each other), a ``ray.data.Dataset`` (a vector
        a row, in order), a `ShardedMatrix`.
    column : str, optional
        The column of tables in which several could be meant; so does ``c.parquet::name``.
    null : {None, "nan"}
        Nulls in tables are refused, or become NaN (columns of floats only).

    Returns
    -------
    Chain

    Raises
    ------
    ShapeError, DTypeError, SourceError, PlanError

    Examples
    --------
    >>> import numpy as np
    >>> chain([np.ones((3, 2)), np.ones((2, 2)), np.ones((2, 5))]).shape
    (3, 5)
    """
    if isinstance(operands, (str, bytes, os.PathLike)) or not isinstance(operands, (list, tuple)):
        raise PlanError(
            f"the operands are a {type(operands).__qualname__}: give a list of matrices, "
            "chain([A, B, C])"
        )
    sources = (open_source(each, _letter(i), column, null) for i, each in enumerate(operands))
    return chain_of(tuple(sources))


def multi_dot(  # noqa: PLR0913  the common keywords
    operands: Sequence[Any],
    *,
    column: str | None = None,
    null: Literal["nan"] | None = None,
    out: Any = None,
    dtype: DTypeLike | None = None,
    precision: Precision = "strict",
    engine: str | Engine = "auto",
    memory_limit: int | str | None = None,
    tile_columns: int | None = None,
    max_in_flight: int = 2,
    overwrite: bool = False,
    verify: bool = False,
    progress: Progress = False,
) -> Any:
    """Multiply a chain of matrices, one of which may be too large for memory.

    Parameters
    ----------
    operands : sequence of array, tensor, memory map, table, or path
    column : str, optional
    null : {None, "nan"}
        See `chain`.
    out : path, ndarray or Sink, optional
        Where D goes. Default: an array in memory, refused up front if it cannot fit.

    Returns
    -------
    ndarray
        D, of shape (m, n); with `out`, what it gives (``.npy``: a read-only memory map).

    See Also
    --------
    Chain.write : the other parameters and the errors.

    Examples
    --------
    >>> import numpy as np
    >>> multi_dot([np.ones((3, 2)), np.ones((2, 2)), np.ones((2, 5))])[0]
    array([4., 4., 4., 4., 4.])
    """
    return chain(operands, column=column, null=null).write(
        Array() if out is None else out,
        dtype=dtype,
        precision=precision,
        engine=engine,
        memory_limit=memory_limit,
        tile_columns=tile_columns,
        max_in_flight=max_in_flight,
        overwrite=overwrite,
        verify=verify,
        progress=progress,
    )


def transpose(
    operand: Any, *, column: str | None = None, null: Literal["nan"] | None = None
) -> Source:
    """Return the transpose of any operand, without a copy and without reading it.

    The parameters are those of `chain`.
    """
    return open_source(operand, "operand", column, null).T


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else f"operand {place}"
