"""A column of an Arrow table as vectors of numbers: which one, of which width, free of nulls."""

import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from raymm.errors import DTypeError, PlanError, ShapeError, SourceError

Null = Literal["nan"] | None
Values = NDArray[Any]

TENSOR_NAMES = frozenset(
    {"arrow.fixed_shape_tensor", "ray.data.arrow_tensor", "ray.data.arrow_tensor_v2"}
)
"""Extension types whose storage is a list of the tensor's values, in row-major order."""


@dataclass(frozen=True)
class Column:
    """One column of a table, each row of which is a vector or a number."""

    name: str
    dtype: np.dtype[Any]
    is_plain: bool
    """Whether its rows are numbers, so that the column is one vector."""
    width: int | None
    """Values of a row; None where only the values tell: lists."""
    is_fixed: bool = False
    """Whether it holds fixed-size lists, or tensors kept as such."""


def choose_column(schema: Any, wanted: str | None, where: str) -> Column:
    """Return the column to read: `wanted`, or the only one that can be meant.

    Raises
    ------
    PlanError
        There is no such column, or several come into question.
    DTypeError
        It holds no numbers.
    """
    names = list(schema.names)
    if wanted is None:
        wanted = _only_candidate(schema, where)
    if names.count(wanted) != 1:
        is_missing = wanted not in names
        raise PlanError(
            f"{where} has {'no column' if is_missing else 'several columns called'} {wanted!r}: "
            f"its columns are {_listed(schema)}"
        )
    return _described(schema.field(wanted), where)


def _only_candidate(schema: Any, where: str) -> str:
    """Return the only column of vectors; without any, the only column of numbers."""
    described = []
    for field in schema:
        try:
            described.append(_described(field, where))
        except PlanError:
            continue
    vectors = [column for column in described if not column.is_plain]
    candidates = vectors or described
    if len(candidates) == 1:
        return candidates[0].name
    if not candidates:
        raise DTypeError(f"{where} has no column of numbers: its columns are {_listed(schema)}")
    listed = ", ".join(repr(column.name) for column in candidates)
    raise PlanError(
        f"{where} has {len(candidates)} columns that could be meant, {listed}: choose one with "
        'column="..." or by ending the path in ::name'
    )


def _listed(schema: Any) -> str:
    return ", ".join(f"{field.name!r} ({field.type})" for field in schema) or "none"


def _described(field: Any, where: str) -> Column:
    import pyarrow as pa  # noqa: PLC0415  only loaded if the caller has a table

    place = f"{where}, column {field.name!r}"
    kind, extension, shape = field.type, None, None
    if isinstance(kind, pa.BaseExtensionType):
        extension, kind = kind.extension_name, kind.storage_type
        shape = getattr(field.type, "shape", None)
    elif field.metadata and b"ARROW:extension:name" in field.metadata:
        extension = field.metadata[b"ARROW:extension:name"].decode()
        shape = _written_shape(field.metadata.get(b"ARROW:extension:metadata", b""))
    if extension is not None and extension not in TENSOR_NAMES:
        raise DTypeError(f"{place} has the extension type {extension}: give a column of numbers")
    if shape is not None and len(shape) != 1:
        raise ShapeError(
            f"{place} holds tensors of shape {tuple(shape)}, one vector per row is needed: "
            "flatten them"
        )
    width: int | None = 1
    is_plain, is_fixed = not _is_list(kind), False
    if not is_plain:
        is_fixed = pa.types.is_fixed_size_list(kind)
        width = kind.list_size if is_fixed else None
        if width is None and shape is not None:
            width = int(shape[0])
        kind = kind.value_type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return Column(field.name, _number_dtype(kind, place, field.type), is_plain, width, is_fixed)


def _written_shape(metadata: bytes) -> tuple[int, ...] | None:
    """Return a tensor's shape where it is written in plain text: never unpickled."""
    try:
        found = json.loads(metadata)
    except ValueError:
        return None
    shape = found.get("shape") if isinstance(found, dict) else found
    if isinstance(shape, list) and all(isinstance(length, int) for length in shape):
        return tuple(shape)
    return None


def _is_list(kind: Any) -> bool:
    import pyarrow as pa  # noqa: PLC0415  only loaded if the caller has a table

    is_fixed = pa.types.is_fixed_size_list(kind)
    return bool(is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _number_dtype(kind: Any, place: str, whole: Any) -> np.dtype[Any]:
    import pyarrow as pa  # noqa: PLC0415  only loaded if the caller has a table

    types = pa.types
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return dtype
    hint = "cast it to float64" if types.is_decimal(kind) else "give a column of numbers"
    raise DTypeError(f"{place} has the type {whole}, which has no matrix product here: {hint}")


def list_width(lists: Any) -> int | None:
    """Return the length of the first list of an Arrow array that is not null, if there is one."""
    for chunk in getattr(lists, "chunks", [lists]):
        lengths = getattr(chunk, "storage", chunk).value_lengths().drop_null()
        if len(lengths):
            return int(lengths[0].as_py())
    return None


def check_null(null: Null) -> None:
    """Raise `PlanError` unless `null` says something known."""
    if null not in (None, "nan"):
        raise PlanError(f'null={null!r} is unknown: give null="nan", or leave it out to refuse')


@dataclass(frozen=True)
class Reading:
    """How a column's Arrow arrays become NumPy rows, and what to call it when they cannot."""

    column: Column
    width: int
    null: Null
    where: str

    def rows(self, chunked: Any, first: int) -> Values:
        """Return an Arrow array, or all chunks of one, as rows of numbers.

        A view of its memory where there is one chunk, without nulls or booleans.

        Parameters
        ----------
        chunked : pyarrow.Array or pyarrow.ChunkedArray
        first : int
            Row of the table that it begins with, for messages.
        """
        parts = []
        for chunk in getattr(chunked, "chunks", [chunked]):
            parts.append(self._rows_of(chunk, first))
            first += len(chunk)
        if len(parts) == 1:
            return parts[0]
        empty = np.empty((0, self.width), self.column.dtype)
        return np.concatenate([empty, *parts]) if parts else empty

    def check(self, array: Any, first: int) -> None:
        """Raise `SourceError` for nulls and for lists of other lengths; copies no values."""
        listed = _Listed(array, self.width, self.column.is_plain)
        self._check_lengths(listed, first)
        self._check_nulls(listed, first)

    def _rows_of(self, array: Any, first: int) -> Values:
        listed = _Listed(array, self.width, self.column.is_plain)
        self._check_lengths(listed, first)
        if self._check_nulls(listed, first):
            rows = np.full((len(listed), self.width), np.nan, self.column.dtype)
            rows[listed.is_valid] = listed.numbers()
            return rows
        return listed.numbers()

    def _check_lengths(self, listed: "_Listed", first: int) -> None:
        wrong = np.flatnonzero((listed.lengths != self.width) & listed.is_valid)
        if len(wrong):
            row = int(wrong[0])
            raise SourceError(
                f"{self.where}: row {first + row} has {int(listed.lengths[row])} values where "
                f"{self.width} are expected: all rows must be equally long"
            )

    def _check_nulls(self, listed: "_Listed", first: int) -> bool:
        """Return whether there are nulls that are to become NaN."""
        count = listed.count_nulls()
        if not count:
            return False
        is_float = self.column.dtype.kind == "f"
        if self.null == "nan" and is_float:
            return True
        hint = (
            'fill or drop them, or give null="nan"'
            if is_float
            else f"fill or drop them: {self.column.dtype} has no NaN"
        )
        what = "1 null" if count == 1 else f"{count:,} nulls"
        raise SourceError(
            f"{self.where}: {what}, the first in row {first + listed.first_null()}: {hint}"
        )


class _Listed:
    """One Arrow array of lists or numbers, taken apart; offsets of slices are respected."""

    def __init__(self, array: Any, width: int, is_plain: bool) -> None:
        import pyarrow as pa  # noqa: PLC0415  only loaded if the caller has a table

        array = array.storage if isinstance(array, pa.ExtensionArray) else array
        self._array, self._width = array, width
        length = len(array)
        self.is_valid = np.ones(length, bool)
        if array.null_count:
            self.is_valid = array.is_valid().to_numpy(zero_copy_only=False)
        if is_plain:
            self._starts, self.lengths = np.arange(length), np.ones(length, np.int64)
            self._values = array
        elif pa.types.is_fixed_size_list(array.type):
            size = array.type.list_size
            self._starts, self.lengths = np.arange(length) * size, np.full(length, size)
            self._values = array.values.slice(array.offset * size, length * size)
        else:
            offsets = array.offsets.to_numpy() if length else np.zeros(1, np.int64)
            self._starts, self.lengths = offsets[:-1] - offsets[0], np.diff(offsets)
            self._values = array.values.slice(offsets[0], offsets[-1] - offsets[0])

    def __len__(self) -> int:
        return len(self._array)

    def count_nulls(self) -> int:
        """Return how many rows are null, and how many values of the others."""
        if not self._array.null_count and not self._values.null_count:
            return 0
        lacking = self._lacking()
        return int(np.count_nonzero(~self.is_valid) + np.count_nonzero(lacking[self.is_valid]))

    def first_null(self) -> int:
        """Return the first row that is null or holds one."""
        return int(np.flatnonzero(~self.is_valid | self._lacking().any(axis=1))[0])

    def _lacking(self) -> Values:
        """Return for each value whether it is null; of rows that are null: False."""
        lacking = np.zeros((len(self), self._width), bool)
        is_null = self._values.is_null().to_numpy(zero_copy_only=False)
        if self._values is not self._array:
            lacking[self.is_valid] = self._gathered(is_null)
        return lacking

    def numbers(self) -> Values:
        """Return the valid rows; nulls among their values are NaN."""
        values = self._values
        if hasattr(values, "dictionary_decode"):
            values = values.dictionary_decode()
        return self._gathered(values.to_numpy(zero_copy_only=False))

    def _gathered(self, values: Values) -> Values:
        """Return the values of valid rows: a view where the rows lie one after another."""
        if self.is_valid.all():
            return values.reshape(len(self), self._width)
        places = self._starts[self.is_valid][:, np.newaxis] + np.arange(self._width)
        taken: Values = values[places]
        return taken
