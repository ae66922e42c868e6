"""What a reference holds, as a source: an array, a torch tensor, a table of vectors."""

from typing import Any

import numpy as np

from raymm.errors import DTypeError
from raymm.sources.base import Source
from raymm.sources.columns import Null
from raymm.sources.memory import from_array, from_tensor
from raymm.sources.tables import from_arrow


def open_value(value: Any, name: str, column: str | None, null: Null) -> Source:
    """Return a block's values; they stay where they are where NumPy can hold them so."""
    library = type(value).__module__.partition(".")[0]
    if isinstance(value, np.ndarray):
        return from_array(value, name)
    if library == "torch" and hasattr(value, "detach"):
        return from_tensor(value, name)
    if library == "pyarrow":
        # Blocks of a table have a vector per row, whatever whole they were once a part of.
        if hasattr(value, "replace_schema_metadata"):
            value = value.replace_schema_metadata(None)
        return from_arrow(value, name, column, null)
    raise DTypeError(
        f"{name} refers to a {type(value).__module__}.{type(value).__qualname__}: put an array, a "
        "torch tensor or an Arrow table into the object store"
    )
