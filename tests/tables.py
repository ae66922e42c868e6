"""Tables of vectors in every form, made with pyarrow's own means."""

from typing import ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem


def fixed_lists(values):
    """Return rows as a fixed-size list array; of width 0 too, and of no rows."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    kind = pa.list_(flat.type, values.shape[1])
    return pa.Array.from_buffers(kind, len(values), [None], children=[flat])


def lists(values, kind=pa.ListArray):
    offsets = np.arange(len(values) + 1) * values.shape[1]
    offset_type = pa.int32() if kind is pa.ListArray else pa.int64()
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return kind.from_arrays(pa.array(offsets, offset_type), flat)


def tensors(values):
    storage = fixed_lists(values)
    kind = pa.fixed_shape_tensor(storage.type.value_type, [values.shape[1]])
    return pa.ExtensionArray.from_storage(kind, storage)


FORMS = {
    "fixed": fixed_lists,
    "list": lists,
    "large": lambda values: lists(values, pa.LargeListArray),
    "tensor": tensors,
}


def column_of(values, form="fixed"):
    """Return an array's rows as an Arrow array; a vector's entries as numbers."""
    if values.ndim == 1:
        return pa.array(values)
    # Without a row nothing says how long a list is.
    return FORMS[form if len(values) else "fixed"](values)


def table_of(values, form="fixed", name="v"):
    return pa.table({"index": np.arange(len(values)), name: column_of(values, form)})


def write_arrow(path, table, rows=3, compression=None):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_file(str(path), table.schema, options=options) as file:
        file.write_table(table, max_chunksize=rows)


def write_folder(folder, table, rows=3):
    """Write a folder of Parquet files; one of them has no rows."""
    folder.mkdir(exist_ok=True)
    for part, start in enumerate([0, 0, *range(rows, max(rows, len(table)), rows)]):
        piece = table.slice(start, rows if part else 0)
        pq.write_table(piece, folder / f"part-{part:03}.parquet", row_group_size=2)


class CountingFileSystem(MemoryFileSystem):
    """Memory as fsspec has it, in which the bytes that are read are counted, file by file."""

    protocol = "counting"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    read_nbytes: ClassVar = {}

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("counting://", "memory://", 1))

    def _open(self, path, mode="rb", **options):
        file = super()._open(path, mode, **options)
        return CountedFile(self, path, file) if mode == "rb" else file


class CountedFile(MemoryFile):
    def __init__(self, fs, path, file):
        super().__init__(fs, path, file.getvalue())
        self.seek(0)

    def read(self, *arguments):
        data = super().read(*arguments)
        counted = CountingFileSystem.read_nbytes
        counted[self.path] = counted.get(self.path, 0) + len(data)
        return data

    def close(self):
        pass


fsspec.register_implementation("counting", CountingFileSystem)
