"""Parquet and Arrow outputs, read back with the libraries that users read them with."""

import json
import warnings

import duckdb
import hypothesis
import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse
from hypothesis import strategies as st
from pyarrow import parquet as pq

import raymm
from raymm.errors import DTypeError, PlanError, ShapeError, SinkError, SinkExistsError
from raymm.fingerprints import describe_operand
from raymm.sinks import Arrow, Parquet, groups, runs
from raymm.sinks.arrow_format import ArrowFile
from raymm.sinks.groups import write_image
from raymm.sinks.parquet_format import PHYSICAL, ParquetPart
from raymm.sinks.tables import arrow_schema
from raymm.tiles import PAGE_NBYTES
from tests.contracts import FileSinkContract, names_in
from tests.doubles import make_spec
from tests.measuring import PeakMemory

WAYS = {
    "parquet": lambda path: Parquet(path),
    "parquet-zstd": lambda path: Parquet(path, compression="zstd"),
    "parquet-pyarrow": lambda path: Parquet(path, compression="none"),
    "arrow": lambda path: Arrow(path),
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture(params=["cached", "direct"])
def writing(request, monkeypatch):
    """Both ways to write: through the page cache, and past it wherever a run allows."""
    if request.param == "direct":
        for module in ("parquet", "arrow"):
            monkeypatch.setattr(f"raymm.sinks.{module}.DIRECT_NBYTES", 0)
        monkeypatch.setattr(runs, "SMALLEST_DIRECT_RUN", PAGE_NBYTES)
    return request.param


def read_table(path):
    if path.is_dir():
        return pa.concat_tables([pq.read_table(part) for part in sorted(path.iterdir())])
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def as_result(table):
    """Return D in its own orientation, as the metadata say."""
    table.validate(full=True)
    said = json.loads(table.schema.metadata[b"raymm"])
    count = table.num_rows
    np.testing.assert_array_equal(table["index"].to_numpy(), np.arange(count))
    flat = [np.array(chunk.flatten()) for chunk in table["D"].chunks if len(chunk.flatten())]
    values = np.concatenate(flat) if flat else np.empty(0, said["dtype"])
    assert values.dtype == said["dtype"]
    rows = values.reshape(count, -1) if values.size else np.empty((count, 0), values.dtype)
    wide = rows if said["is_transposed"] else rows.T
    return wide.reshape(said["shape"])


class TestTables(FileSinkContract):
    @pytest.fixture(params=list(WAYS))
    def way(self, request):
        return request.param

    @pytest.fixture
    def path(self, folder, way):
        return folder / f"D.{way.partition('-')[0]}"

    @pytest.fixture
    def sink(self, path, way, writing):
        return lambda shape, dtype: WAYS[way](path)

    @pytest.fixture
    def read_back(self, path):
        def read(sink, result):
            assert result.path == str(path)
            assert names_in(path.parent) == [path.name]
            found = as_result(read_table(path))
            for part in sorted(path.iterdir()) if path.is_dir() else []:
                part.unlink()
            path.rmdir() if path.is_dir() else path.unlink()
            return found

        return read

    @pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
    def test_empty_results(self, sink, read_back, shape, way):
        if way == "arrow" or shape[0]:
            super().test_empty_results(sink, read_back, shape)
        else:
            with pytest.raises(ShapeError, match="no values"):
                sink(shape, np.float64).layout(self.spec(shape))

    @pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", "<i8", "<u8", "|u1", "|i1", "<i2"])
    def test_dtypes(self, sink, read_back, dtype):
        super().test_dtypes(sink, read_back, dtype)

    def test_view_is_the_product_in_canonical_orientation(self, sink, path):
        spec = self.spec((6, 8))
        one = sink((6, 8), np.float64)
        one.open(spec, False)
        self.send(one, spec, np.ones((6, 8)))
        unfinished = path.with_name(path.name + ".partial")
        assert one.view().path == str(unfinished)
        assert as_result(read_table_parts(unfinished)).shape == (6, 8)
        one.abort()

    def test_the_name_of_a_folder(self, sink, path):
        path.mkdir()
        with pytest.raises(SinkError, match=r"folder|exists"):
            sink((6, 8), np.float64).open(self.spec((6, 8)), False)
        assert names_in(path.parent) == [path.name]


def read_table_parts(path):
    if path.is_dir():
        parts = [part for part in sorted(path.iterdir()) if part.suffix == ".parquet"]
        return pa.concat_tables([pq.read_table(part) for part in parts])
    return read_table(path)


@pytest.fixture
def product():
    rng = np.random.default_rng(5)
    left = rng.integers(-8, 8, (7, 5)).astype(np.float32)
    right = rng.integers(-8, 8, (5, 1003)).astype(np.float32)
    return left, right, left @ right


@pytest.fixture(params=["whole", "small groups"])
def grouping(request, monkeypatch):
    if request.param != "whole":
        monkeypatch.setattr(groups, "GROUP_NBYTES", 3000)


def ray_rows(path):
    import ray.data  # noqa: PLC0415  only where Ray is

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own making
        rows = ray.data.read_parquet(str(path)).sort("index").to_pandas()
    return rows["index"].to_numpy(), np.stack(rows["D"].to_numpy())


def duckdb_rows(path):
    found = duckdb.sql(f"select index, D from '{path}/*.parquet' order by index").fetchall()
    return np.array([row[0] for row in found]), np.array([row[1] for row in found])


def polars_rows(path):
    table = pl.read_parquet(path) if path.is_dir() else pl.read_ipc(path)
    return table["index"].to_numpy(), table["D"].to_numpy()


def pyarrow_rows(path):
    table = pq.read_table(path) if path.is_dir() else pa.ipc.open_file(path).read_all()
    flat = table["D"].combine_chunks().flatten().to_numpy()
    return table["index"].to_numpy(), flat.reshape(table.num_rows, -1)


CLIENTS = {"pyarrow": pyarrow_rows, "Polars": polars_rows, "DuckDB": duckdb_rows}


READERS = [
    (way, client)
    for way in WAYS
    for client in CLIENTS
    if (way, client) != ("arrow", "DuckDB")  # which reads no Arrow files by itself
]


@pytest.mark.parametrize("reader", READERS, ids="-".join)
@pytest.mark.parametrize("is_tall", [False, True])
def test_clients_read_every_row(folder, product, grouping, reader, is_tall, local_engine):
    way, client = reader
    left, right, expected = product
    chain = raymm.chain([left, right])
    path = folder / f"D.{way.partition('-')[0]}"
    (chain.T if is_tall else chain).write(WAYS[way](path), tile_columns=300, engine=local_engine)
    index, rows = CLIENTS[client](path)
    np.testing.assert_array_equal(index, np.arange(1003))
    assert rows.dtype in (np.float32, np.float64)  # DuckDB gives Python floats
    np.testing.assert_array_equal(rows, expected.T)


@pytest.mark.ray
@pytest.mark.parametrize("way", ["parquet", "parquet-zstd"])
def test_ray_data_reads_every_row(folder, product, way, ray_room, local_engine):
    left, right, expected = product
    path = folder / "D.parquet"
    raymm.chain([left, right]).write(WAYS[way](path), tile_columns=300, engine=local_engine)
    index, rows = ray_rows(path)
    np.testing.assert_array_equal(index, np.arange(1003))
    np.testing.assert_array_equal(rows, expected.T)


def test_an_arrow_file_is_read_without_a_copy(folder, product, local_engine):
    left, right, expected = product
    path = folder / "D.arrow"
    raymm.multi_dot([left, right], out=path, engine=local_engine)
    with pa.memory_map(str(path)) as file:
        before = pa.total_allocated_bytes()
        table = pa.ipc.open_file(file).read_all()
        values = table["D"].chunk(0).flatten().to_numpy(zero_copy_only=True)
        assert pa.total_allocated_bytes() == before
        np.testing.assert_array_equal(values.reshape(-1, 7), expected.T[: len(values) // 7])


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize(
    ("left", "right"),
    [((7, 5), (5, 1003)), ((1003, 5), (5, 7)), ((5,), (5, 90)), ((90, 5), (5,)), ((5,), (5,)),
     ((9, 5), (5, 0)), ((1, 5), (5, 1))],
)  # fmt: skip
def test_opened_again_in_its_own_orientation(folder, way, left, right, local_engine):
    rng = np.random.default_rng(6)
    operands = [rng.integers(-8, 8, shape).astype(np.float64) for shape in (left, right)]
    expected = operands[0] @ operands[1]
    path = folder / f"D.{way.partition('-')[0]}"
    found = raymm.multi_dot(operands, out=WAYS[way](path), engine=local_engine, verify=True)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(np.asarray(found), expected)
    again = raymm.open(path)
    np.testing.assert_array_equal(np.asarray(again), expected)
    if expected.ndim == 2 and expected.size:
        np.testing.assert_array_equal(again[-1, ::-1], expected[-1, ::-1])
        np.testing.assert_array_equal(again[:, 0], expected[:, 0])


def test_a_result_is_an_operand(folder, product, local_engine):
    left, right, expected = product
    path = folder / "D.parquet"
    raymm.multi_dot([left, right], out=path, tile_columns=100, engine=local_engine)
    again = raymm.multi_dot([expected.T, path], engine=local_engine)
    np.testing.assert_array_equal(again, expected.T @ expected)


def test_verification_sees_what_was_written(folder, product, local_engine, monkeypatch):
    left, right, _ = product

    def wrong(block, *arguments):
        for run, position in original(block, *arguments):
            run = run.copy()
            run[len(run) // 2] += 1
            yield run, position

    original = groups.runs
    monkeypatch.setattr("raymm.sinks.parts.runs", wrong)
    for name in ("D.parquet", "D.arrow"):
        with pytest.raises(raymm.VerificationError):
            raymm.multi_dot([left, right], out=folder / name, engine=local_engine, verify=True)
    assert names_in(folder) == []


def fingerprints(*operands):
    """Return what a table says of its operands' values."""
    chain = raymm.chain(list(operands))
    return [describe_operand(source)["fingerprint"] for source in chain._sources]


def test_metadata_tell_where_it_comes_from(folder, product, local_engine):
    left, right, _ = product
    np.save(folder / "left.npy", left)
    operands = folder / "left.npy", right
    raymm.multi_dot(operands, out=folder / "D.arrow", engine=local_engine)
    said = json.loads(pa.ipc.open_file(folder / "D.arrow").schema.metadata[b"raymm"])
    assert said["shape"] == [7, 1003]
    assert said["dtype"] == "float32"
    assert said["precision"] == "strict"
    assert [each["shape"] for each in said["operands"]] == [[7, 5], [5, 1003]]
    assert [each["fingerprint"] for each in said["operands"]] == fingerprints(*operands)


HELD = {
    "array": lambda values: values,
    "turned": lambda values: np.asfortranarray(values),
    "sparse": lambda values: scipy.sparse.csr_array(values),
    "chunked table": lambda values: raymm.transpose(
        pa.table({"D": pa.chunked_array([vectors(values.T[:400]), vectors(values.T[400:])])})
    ),
}


def vectors(rows):
    flat = pa.array(np.ascontiguousarray(rows).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])


@pytest.mark.parametrize("form", list(HELD))
def test_fingerprints_of_values_in_memory(product, form):
    left, right, _ = product
    right = np.where(right > 0, right, 0)
    changed = np.where(right > 0, right + 1, 0)  # as many entries, at the same places
    first, again, other = (
        fingerprints(left, HELD[form](values))[1] for values in (right, right.copy(), changed)
    )
    assert first == again != other


@pytest.mark.parametrize("suffix", ["npy", "parquet", "arrow", "zarr"])
def test_fingerprints_of_files_tell_that_they_were_written_again(folder, suffix, local_engine):
    path = folder / f"C.{suffix}"
    operands = [np.eye(5), np.ones((5, 40))]
    seen = set()
    for _ in range(2):
        raymm.multi_dot(operands, out=path, overwrite=True, engine=local_engine)
        seen |= {fingerprints(np.eye(5), path)[1], fingerprints(np.eye(5), path)[1]}
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["D.parquet", "D.arrow"])
def test_what_a_table_cannot_hold(folder, name, local_engine):
    values = np.ones((3, 3), np.complex128)
    with pytest.raises(DTypeError, match="real and imaginary"):
        raymm.multi_dot([values, values], out=folder / name, engine=local_engine)
    assert names_in(folder) == []


def test_unknown_compression(folder):
    with pytest.raises(PlanError, match="zstd"):
        Parquet(folder / "D.parquet", compression="rar")


def test_an_existing_folder_is_replaced_once_the_new_one_is_complete(folder, product, local_engine):
    left, right, expected = product
    path = folder / "D.parquet"
    raymm.multi_dot([left, right], out=path, tile_columns=100, engine=local_engine)
    with pytest.raises(SinkExistsError, match="overwrite=True"):
        raymm.multi_dot([left, right], out=path, engine=local_engine)
    assert len(list(path.iterdir())) == 11
    raymm.multi_dot([-left, right], out=path, overwrite=True, engine=local_engine)
    assert names_in(folder) == ["D.parquet"]
    np.testing.assert_array_equal(np.asarray(raymm.open(path)), -expected)


def test_what_a_killed_run_has_left_is_replaced(folder, product, run_python, local_engine):
    left, right, expected = product
    path = folder / "D.parquet"
    code = (
        "import os, sys; from raymm.sinks import Parquet; from tests.doubles import make_spec\n"
        "from raymm.tiles import Grid\n"
        "Parquet(sys.argv[1]).open(make_spec((6, 8), grid=Grid(6, 8, 3, 3, 6)), False)\n"
        "os._exit(0)"
    )
    run_python(code, path)
    assert names_in(folder) == ["D.parquet.partial"]
    raymm.multi_dot([left, right], out=path, engine=local_engine)
    assert names_in(folder) == ["D.parquet"]
    np.testing.assert_array_equal(np.asarray(raymm.open(path)), expected)


def test_a_folder_of_somebody_else_is_kept(folder):
    partial = folder / "D.parquet.partial"
    partial.mkdir()
    (partial / "thesis.txt").write_text("precious")
    with pytest.raises(SinkError, match=r"thesis\.txt"):
        Parquet(folder / "D.parquet").open(TestTables().spec((6, 8)), False)
    assert (partial / "thesis.txt").read_text() == "precious"


def test_an_operand_in_the_output_folder_is_kept(folder, product, local_engine):
    left, right, _ = product
    path = folder / "D.parquet"
    raymm.multi_dot([left, right], out=path, engine=local_engine)
    for operand in (path, path / "part-000000.parquet", f"{path}/*.parquet"):
        with pytest.raises(PlanError, match="overwrite the operand"):
            raymm.multi_dot([np.eye(7), operand], out=path, overwrite=True, engine=local_engine)


def test_a_disk_without_room(folder, monkeypatch):
    monkeypatch.setattr("raymm.sinks.folder.free_nbytes", lambda path: 1000)
    with pytest.raises(SinkError, match="1,000 are free") as caught:
        Parquet(folder / "D.parquet").open(TestTables().spec((600, 800)), False)
    assert caught.value.errno == 28
    assert names_in(folder) == []


def files():
    return st.tuples(
        st.sampled_from([1, 2, 7, 8, 63, 130]),
        st.sampled_from(sorted(PHYSICAL)),
        st.integers(0, 3000),
        st.integers(0, 200),
        st.sampled_from([64, 4096, 2**27]),
    )


@hypothesis.given(described=files())
def test_any_file_is_read_by_pyarrow(described):
    length, name, start, width, most = described
    dtype = np.dtype(name)
    values = (np.arange(width * length) % 119).astype(dtype).reshape(width, length)
    spec = make_spec((length, start + width), dtype)
    schema = arrow_schema(spec)
    packed = schema.serialize().to_pybytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "GROUP_NBYTES", most)
        images = [
            ParquetPart(length, dtype, start, start + width, packed, b"{}"),
            ArrowFile(length, dtype, [(start, start + width)], packed),
        ]
        for image, read in zip(images, (pq.read_table, _read_arrow), strict=True):
            out = pa.BufferOutputStream()
            write_image(out, image, values, start)
            table = read(pa.BufferReader(out.getvalue()))
            assert len(out.getvalue()) == image.nbytes
            table.validate(full=True)
            assert table.schema.equals(schema)
            np.testing.assert_array_equal(table["index"], np.arange(start, start + width))
            flat = table["D"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            np.testing.assert_array_equal(flat.reshape(-1, length), values, strict=True)
            for group in image.groups:
                stored = np.dtype(image.stored).itemsize * length
                is_aligned = image is images[0] or group.start * stored % 8 == 0
                if is_aligned:  # computed in memory congruent with the file
                    assert (group.position - group.start * stored) % PAGE_NBYTES == 0
                assert group.width * stored <= max(most, stored)


def _read_arrow(file):
    return pa.ipc.open_file(file).read_all()


def test_statistics_of_the_index_help_and_there_are_no_others(folder, product, local_engine):
    left, right, expected = product
    path = folder / "D.parquet"
    raymm.multi_dot([left, right], out=path, tile_columns=100, engine=local_engine)
    index, values = (
        pq.read_metadata(path / "part-000003.parquet").row_group(0).column(place)
        for place in range(2)
    )
    assert (index.statistics.min, index.statistics.max) == (300, 399)
    assert index.statistics.null_count == 0
    assert values.statistics is None
    found = pq.read_table(path, filters=[("index", "==", 717)])
    np.testing.assert_array_equal(found["D"][0].values, expected[:, 717])


@pytest.mark.parametrize("is_tall", [False, True])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_line_across_a_table_is_had_without_the_rest(folder, suffix, is_tall, local_engine):
    left, right = np.ones((100, 2), np.float32), np.ones((2, 500_000), np.float32)
    left[5] = 3
    chain = raymm.chain([left, right])
    path = folder / f"D.{suffix}"
    found = (chain.T if is_tall else chain).write(path, engine=local_engine)
    small = found[:2, :2]
    with PeakMemory() as memory:
        line = found[:, 5] if is_tall else found[5]
    # Pages of a mapped Arrow file count as this process's; the system takes them back.
    assert memory.growth - (found.nbytes if suffix == "arrow" else 0) < 120_000_000 < found.nbytes
    np.testing.assert_array_equal(line, np.full(500_000, 6, np.float32))
    assert small.shape == (2, 2)
