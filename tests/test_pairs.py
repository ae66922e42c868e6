"""Every kind of operand into every kind of output, as the huge one and as a small one."""

import fsspec
import numpy as np
import pyarrow as pa
import pytest
import scipy.sparse
import torch
import zarr
from pyarrow import parquet as pq

import raymm

ROWS, INNER, COLUMNS = 6, 4, 40


@pytest.fixture(scope="module")
def matrices():
    rng = np.random.default_rng(3)
    left = rng.integers(-8, 8, (ROWS, INNER)).astype(np.float32)
    right = rng.integers(-8, 8, (INNER, COLUMNS)).astype(np.float32)
    right[:, ::3] = 0
    return left, right


def table_of(values):
    """Return a table whose rows are those of `values`."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.table({"D": pa.FixedSizeListArray.from_arrays(flat, values.shape[1])})


def npy(values, folder):
    np.save(folder / "C.npy", values)
    return folder / "C.npy"


def npy_turned(values, folder):
    np.save(folder / "C.npy", np.ascontiguousarray(values.T))
    return f"{folder / 'C.npy'}.T"


def npz(values, folder):
    np.savez(folder / "C.npz", other=values + 1, C=values)
    return f"{folder / 'C.npz'}::C"


def parquet_file(values, folder):
    pq.write_table(table_of(values.T), folder / "C.parquet", row_group_size=7)
    return f"{folder / 'C.parquet'}.T"


def parquet_folder(values, folder):
    (folder / "C").mkdir()
    for place in range(0, values.shape[1], 9):
        part = values.T[place : place + 9]
        pq.write_table(table_of(part), folder / "C" / f"{place:03d}.parquet")
    return f"{folder / 'C'}.T"


def parquet_address(values, folder):
    raymm.multi_dot([np.eye(len(values), dtype=np.float32), values], out=f"memory:/{folder}/C")
    return f"memory:/{folder}/C"


def arrow_file(values, folder):
    table = table_of(values.T)
    with pa.ipc.new_file(folder / "C.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=11)
    return f"{folder / 'C.arrow'}.T"


def zarr_array(values, folder):
    array = zarr.create_array(
        folder / "C.zarr", shape=values.shape, dtype=values.dtype, chunks=(3, 7)
    )
    array[...] = values
    return folder / "C.zarr"


class Exchanged:
    """An array of another library."""

    def __init__(self, values):
        self._values = values

    def __dlpack__(self, **options):
        return self._values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._values.__dlpack_device__()


SOURCES = {
    "array": lambda values, folder: values,
    "turned array": lambda values, folder: np.asfortranarray(values),
    "map": lambda values, folder: np.load(npy(values, folder), mmap_mode="r"),
    "npy": npy,
    "npy.T": npy_turned,
    "npz": npz,
    "list": lambda values, folder: values.astype(np.float32),
    "torch": lambda values, folder: torch.from_numpy(values.copy()),
    "dlpack": lambda values, folder: Exchanged(values),
    "scipy csr": lambda values, folder: scipy.sparse.csr_array(values),
    "scipy coo": lambda values, folder: scipy.sparse.coo_matrix(values),
    "torch coo": lambda values, folder: torch.from_numpy(values.copy()).to_sparse(),
    "arrow": lambda values, folder: raymm.transpose(table_of(values.T)),
    "parquet": parquet_file,
    "parquet folder": parquet_folder,
    "parquet address": parquet_address,
    "arrow file": arrow_file,
    "zarr": zarr_array,
}
SINKS = {
    "array": lambda folder: raymm.Array(),
    "npy C": lambda folder: raymm.Npy(folder / "D.npy"),
    "npy F": lambda folder: raymm.Npy(folder / "D.npy", order="F"),
    "parquet": lambda folder: raymm.Parquet(folder / "D.parquet"),
    "parquet zstd": lambda folder: raymm.Parquet(folder / "D.parquet", compression="zstd"),
    "parquet address": lambda folder: raymm.Parquet(f"memory:/{folder}/D"),
    "arrow": lambda folder: raymm.Arrow(folder / "D.arrow"),
    "arrow address": lambda folder: raymm.Arrow(f"memory:/{folder}/D"),
    "zarr": lambda folder: raymm.Zarr(folder / "D.zarr"),
}


@pytest.fixture
def scratch(tmp_path):
    yield tmp_path
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists(str(tmp_path)):
        filesystem.rm(str(tmp_path), recursive=True)


@pytest.mark.parametrize("sink", list(SINKS))
@pytest.mark.parametrize("source", list(SOURCES))
def test_pair(matrices, source, sink, scratch, local_engine):
    left, right = matrices
    operand = SOURCES[source](right, scratch)
    chain = raymm.chain([left, operand])
    found = chain.write(SINKS[sink](scratch), tile_columns=13, verify=True, engine=local_engine)
    np.testing.assert_array_equal(np.asarray(found), left @ right, strict=True)


@pytest.mark.parametrize("source", list(SOURCES))
def test_as_a_small_factor(matrices, source, scratch, local_engine):
    left, right = matrices
    operand = SOURCES[source](left, scratch)
    found = raymm.multi_dot([operand, right], tile_columns=13, engine=local_engine)
    np.testing.assert_array_equal(found, left @ right, strict=True)


@pytest.mark.parametrize("source", list(SOURCES))
def test_parts_tiles_and_products_with_vectors(matrices, source, scratch):
    left, right = matrices
    expected = left @ right
    chain = raymm.chain([left, SOURCES[source](right, scratch)])
    np.testing.assert_array_equal(chain[:, [7, 3, 3]], expected[:, [7, 3, 3]])
    np.testing.assert_array_equal(chain[2, ::-5], expected[2, ::-5])
    np.testing.assert_array_equal(chain.T[5:9], expected.T[5:9])
    np.testing.assert_array_equal(chain @ np.ones(COLUMNS, np.float32), expected.sum(axis=1))
    blocks = [block for _, block in chain.tiles(tile_columns=13)]
    np.testing.assert_array_equal(np.hstack(blocks), expected)
    np.testing.assert_array_equal(np.asarray(chain.map(torch.abs)), np.abs(expected))


@pytest.mark.parametrize("source", list(SOURCES))
def test_a_huge_inner_axis(matrices, source, scratch, local_engine, monkeypatch):
    monkeypatch.setattr("raymm.order.INNER_NBYTES", 0)
    _, right = matrices
    operand = SOURCES[source](right, scratch)
    found = raymm.multi_dot([operand, right.T], tile_columns=13, engine=local_engine)
    np.testing.assert_array_equal(found, right @ right.T)


# An address in memory is one process's own.
@pytest.mark.ray
@pytest.mark.parametrize("source", [name for name in SOURCES if "address" not in name])
def test_pair_on_ray(matrices, source, scratch, ray_engine):
    left, right = matrices
    operand = SOURCES[source](right, scratch)
    sinks = [SINKS[sink](scratch) for sink in ("array", "npy C", "parquet", "arrow", "zarr")]
    found = raymm.chain([left, operand]).run(*sinks, tile_columns=13, engine=ray_engine)
    for each in found:
        np.testing.assert_array_equal(np.asarray(each), left @ right, strict=True)
