import json
import pickle
import sys
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raymm
from raymm.errors import DTypeError, PlanError, ShapeError, SourceError
from raymm.kernels.buffers import Buffer
from raymm.sources import formats, open_source, stored
from raymm.sources.memory import ArraySource
from tests.contracts import FileSourceContract, SourceContract
from tests.tables import (
    FORMS,
    CountingFileSystem,
    column_of,
    fixed_lists,
    lists,
    table_of,
    write_arrow,
    write_folder,
)


class TestHeld(SourceContract):
    @pytest.fixture(params=FORMS)
    def form(self, request):
        return request.param

    @pytest.fixture(params=["table", "batch", "array", "chunks", "turned"])
    def source(self, request, form):
        def make(values):
            array = column_of(values, form)
            if request.param == "array":
                return open_source(array, "C")
            if request.param == "batch":
                return open_source(pa.record_batch({"v": array}), "C")
            if request.param == "chunks":
                pieces = [array.slice(start, 2) for start in range(0, len(array), 2)]
                return open_source(pa.chunked_array(pieces, array.type), "C")
            if request.param == "turned":
                return raymm.transpose(pa.table({"v": column_of(values.T, form)}))
            return open_source(pa.table({"v": array, "s": ["x"] * len(array)}), "C")

        return make


class TestParquet(FileSourceContract):
    @pytest.fixture(params=["one group", "groups", "folder", "foreign", "turned", "glob"])
    def source(self, request, tmp_path):
        def make(values):
            path = tmp_path / "c.parquet"
            if request.param == "turned":
                pq.write_table(table_of(values.T), path, row_group_size=2)
                return open_source(f"{path}::v.T", "C")
            table = table_of(values, "list")
            if request.param in ("folder", "glob"):
                write_folder(tmp_path / "parts", table, rows=max(3, len(table) // 3))
                pattern = "/p*-*.parquet" if request.param == "glob" else ""
                return open_source(f"{tmp_path}/parts{pattern}::v", "C")
            rows = 1000 if request.param == "one group" else 2
            is_ours = request.param != "foreign" or not len(values)
            pq.write_table(
                table, path, row_group_size=rows, store_schema=is_ours, compression="zstd"
            )
            return open_source(path, "C", column="v")

        return make

    @pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
    def test_empty_axes(self, source, shape, request):
        is_turned = "turned" in request.node.name
        if shape[0 if is_turned else 1] == 0:
            return  # pyarrow writes lists of width 0 that it cannot read again
        opened = source(np.zeros(shape))
        assert opened.operand.shape == shape
        assert opened.load().shape == shape
        assert opened.read(0, shape[1], Buffer()).shape == shape


class TestArrow(FileSourceContract):
    @pytest.fixture(params=["plain", "lz4", "tensor", "list", "turned", "feather"])
    def source(self, request, tmp_path):
        def make(values):
            form = request.param if request.param in FORMS else "fixed"
            suffix = "feather" if request.param == "feather" else "arrow"
            path = tmp_path / f"c.{suffix}"
            is_turned = request.param == "turned"
            table = table_of(values.T if is_turned else values, form)
            write_arrow(path, table, compression="lz4" if request.param == "lz4" else None)
            opened = open_source(path, "C", column="v")
            return opened.T if is_turned else opened

        return make


@st.composite
def layouts(draw):
    """An array of rows, the same in Arrow with offsets and in chunks, as floats or integers."""
    rows, width = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from(["f2", "f4", "f8", "i1", "i8", "u8", "?"]))
    values = (np.arange(rows * width).reshape(rows, width) % 120).astype(dtype)
    padding = draw(st.integers(0, 3))
    padded = np.concatenate([values[:1]] * padding + [values] + [values[:1]] * 2)
    whole = FORMS[draw(st.sampled_from(sorted(FORMS)))](padded).slice(padding, rows)
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=3)))
    edges = [0, *cuts, rows]
    chunks = [whole.slice(start, stop - start) for start, stop in pairwise(edges)]
    return values, pa.chunked_array(chunks, whole.type)


@given(layouts(), st.data())
def test_chunks_and_slices_are_read_where_they_lie(layout, data):
    values, column = layout
    source = open_source(column, "C")
    assert source.operand.dtype == values.dtype
    np.testing.assert_array_equal(source.load(), values, strict=True)
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    read = source.T.read(start, stop, Buffer())
    np.testing.assert_array_equal(read, values[start:stop].T, strict=True)


@given(layouts(), st.integers(1, 5), st.booleans(), st.data())
def test_files_of_any_layout_read_as_what_was_written(
    tmp_path_factory, layout, group, is_parquet, data
):
    values, column = layout
    path = tmp_path_factory.getbasetemp() / f"any.{'parquet' if is_parquet else 'arrow'}"
    table = pa.table({"a": column, "b": np.arange(len(values))})
    if is_parquet:
        pq.write_table(table, path, row_group_size=group, use_dictionary=data.draw(st.booleans()))
    else:
        write_arrow(path, table, rows=group, compression=data.draw(st.sampled_from([None, "zstd"])))
    source = pickle.loads(pickle.dumps(open_source(path, "C")))
    np.testing.assert_array_equal(source.load(), values, strict=True)
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    cut = pickle.loads(pickle.dumps(source.T.cut(start, stop)))
    np.testing.assert_array_equal(cut.read(start, stop, Buffer()), values[start:stop].T)


def test_one_chunk_is_a_view(local_engine):
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    column = fixed_lists(values)
    source = open_source(column, "C")
    assert isinstance(source, ArraySource)
    address = column.values.buffers()[1].address
    assert source.array.__array_interface__["data"][0] == address


class TestU28ArrowColumns:
    """The part of the case that concerns Arrow: read-only memory, taken without copying."""

    def test_u28_a_transposed_column(self, engine):
        values = np.arange(30, dtype=np.float32).reshape(10, 3)
        column = fixed_lists(values)
        before = column.values.to_pylist()
        product = raymm.multi_dot(
            [np.eye(3, dtype=np.float32), np.eye(3, dtype=np.float32), raymm.transpose(column)],
            engine=engine,
            tile_columns=4,
        )
        np.testing.assert_array_equal(product, values.T)
        assert column.values.to_pylist() == before


NULL_ROWS = {
    "row": ([[1, 2], None, [3, 4]], 1, [[1, 2], [np.nan, np.nan], [3, 4]]),
    "value": ([[1, None], [3, 4]], 0, [[1, np.nan], [3, 4]]),
}


class TestU63NullsInFixedSizeLists:
    @pytest.fixture(params=["memory", "parquet", "arrow"])
    def given(self, request, tmp_path):
        def make(array):
            table = pa.table({"v": array})
            path = tmp_path / f"a.{request.param}"
            if request.param == "parquet":
                pq.write_table(table, path)
            if request.param == "arrow":
                write_arrow(path, table, rows=100)
            return table if request.param == "memory" else path

        return make

    @pytest.mark.parametrize("kind", [pa.list_(pa.float32(), 2), pa.list_(pa.float32())], ids=str)
    @pytest.mark.parametrize("case", NULL_ROWS)
    def test_u63_null_rows_and_values(self, given, case, kind, local_engine):
        rows, first, expected = NULL_ROWS[case]
        operand, identity = given(pa.array(rows, kind)), np.eye(2, dtype=np.float32)
        with pytest.raises(SourceError, match=rf"column 'v': 1 null, the first in row {first}: "):
            raymm.multi_dot([operand, identity], engine=local_engine)
        source = open_source(operand, "A", null="nan")
        np.testing.assert_array_equal(source.load(), np.array(expected, np.float32), strict=True)
        finite = np.array(rows[-1], np.float32)
        product = raymm.multi_dot([operand, identity], engine=local_engine, null="nan")
        np.testing.assert_array_equal(product[-1], finite)
        assert np.isnan(product[first]).any()

    def test_u63_count_and_place_of_several(self, given):
        rows = [[1, 2], [3, 4], [None, 1], None, [None, None]]
        with pytest.raises(SourceError, match=r"4 nulls, the first in row 2"):
            raymm.chain([given(pa.array(rows, pa.list_(pa.float64(), 2))), np.eye(2)]).compute()

    def test_u63_sliced_arrays(self):
        array = pa.array([None, [1, 2], [3, None], [5, 6]], pa.list_(pa.float32(), 2))
        np.testing.assert_array_equal(
            open_source(array.slice(1), "A", null="nan").load(), [[1, 2], [3, np.nan], [5, 6]]
        )
        np.testing.assert_array_equal(open_source(array.slice(3), "A").load(), [[5, 6]])


class TestU65IntegersWithNulls:
    LARGE = 9007199254740993

    @pytest.mark.parametrize("null", [None, "nan"])
    def test_u65_are_refused(self, null):
        chunks = pa.chunked_array([[self.LARGE, None], [1]], pa.int64())
        with pytest.raises(SourceError, match=r"A: 1 null, the first in row 1"):
            raymm.chain([chunks, np.eye(3, dtype=np.int64)], null=null)

    def test_u65_stay_integers(self, local_engine):
        chunks = pa.chunked_array([[self.LARGE], [1]], pa.int64())
        product = raymm.multi_dot([chunks, np.eye(2, dtype=np.int64)], engine=local_engine)
        assert product.tolist() == [self.LARGE, 1]
        assert product.dtype == np.int64

    def test_u65_nulls_of_other_columns_do_not_matter(self, tmp_path, local_engine):
        vectors = pa.array([[self.LARGE, 2], [3, 4]], pa.list_(pa.int64(), 2))
        table = pa.table({"id": pa.array([1, None], pa.int64()), "v": vectors})
        pq.write_table(table, tmp_path / "c.parquet")
        for operand in (table, tmp_path / "c.parquet"):
            product = raymm.multi_dot([operand, np.eye(2, dtype=np.int64)], engine=local_engine)
            assert product.tolist() == [[self.LARGE, 2], [3, 4]]


class TestU91UnequalRows:
    """Part (e) of the case, and (d)."""

    ROWS = ([1.0, 2], [3, 4], [5, 6, 7], [8])

    @pytest.mark.parametrize("kind", ["memory", "parquet", "arrow", "folder"])
    def test_u91_unequal_rows(self, tmp_path, kind):
        table = pa.table({"v": pa.array(self.ROWS, pa.list_(pa.float64()))})
        path = tmp_path / f"c.{kind}"
        if kind == "parquet":
            pq.write_table(table, path)
        elif kind == "arrow":
            write_arrow(path, table)
        elif kind == "folder":
            write_folder(path, table, rows=4)
        operand = table if kind == "memory" else path
        with pytest.raises(SourceError) as caught:
            raymm.multi_dot([operand, np.eye(2)], out=tmp_path / "D.npy", engine="local")
        message = str(caught.value)
        for part in ("column 'v'", "row 2", "3 values", "2 are expected"):
            assert part in message
        if kind != "memory":
            assert str(path) in message
        assert not (tmp_path / "D.npy").exists()

    def test_u91_rows_whose_lengths_even_out(self, tmp_path):
        rows = [[1.0, 2], [3], [5, 6, 7]]
        pq.write_table(pa.table({"v": pa.array(rows)}), tmp_path / "c.parquet")
        with pytest.raises(SourceError, match=r"row 1 has 1 values where 2 are expected"):
            raymm.chain([tmp_path / "c.parquet", np.eye(2)]).compute(engine="local")

    def test_u91_shapes_of_files(self, tmp_path):
        pq.write_table(table_of(np.ones((5, 99))), tmp_path / "c.parquet")
        with pytest.raises(ShapeError, match=r"c\.parquet \(99, 5\): 100 != 99"):
            raymm.chain([np.ones((3, 100)), np.eye(100), f"{tmp_path}/c.parquet.T"])


class TestU42SizesFromParquet:
    def test_u42_sizes_are_plain_integers(self, tmp_path, local_engine):
        pq.write_table(table_of(np.eye(100)), tmp_path / "c.parquet", row_group_size=30)
        source = open_source(tmp_path / "c.parquet", "C")
        assert all(type(length) is int for length in source.operand.shape)
        raymm.multi_dot(
            [np.eye(100), tmp_path / "c.parquet"], out=tmp_path / "D.npy", engine=local_engine
        )
        assert b"int64(" not in (tmp_path / "D.npy").read_bytes()[:128]
        np.testing.assert_array_equal(np.load(tmp_path / "D.npy", mmap_mode="r"), np.eye(100))


class TestU43ChunkedTables:
    """The part of the case that concerns operands."""

    def test_u43_the_chunks_of_a_table_are_never_joined(self, engine):
        values = np.arange(6000.0).reshape(200, 30)
        chunks = [fixed_lists(values[start : start + 33]) for start in range(0, 200, 33)]
        table = pa.table({"D": pa.chunked_array(chunks)})
        source = open_source(table, "C").T
        assert len(source.rows.chunks) == 7
        piece = source.read(40, 60, Buffer())
        address = chunks[1].values.buffers()[1].address + 7 * 30 * 8
        assert piece.__array_interface__["data"][0] == address
        product = raymm.multi_dot([np.eye(30), source], engine=engine, tile_columns=45)
        np.testing.assert_array_equal(product, values.T)


class TestChoosing:
    @pytest.fixture
    def table(self):
        ones = np.ones((3, 2))
        columns = {"id": [1, 2, 3], "name": ["a", "b", "c"], "v": lists(ones), "w": lists(2 * ones)}
        return pa.table(columns)

    def test_several_candidates_are_listed(self, table):
        with pytest.raises(PlanError, match=r"2 columns that could be meant, 'v', 'w'.*column="):
            open_source(table, "C")

    def test_column_chooses(self, table, tmp_path):
        pq.write_table(table, tmp_path / "c.parquet")
        assert open_source(table, "C", column="w").load().sum() == 12
        assert open_source(tmp_path / "c.parquet", "C", column="w").load().sum() == 12
        assert open_source(f"{tmp_path}/c.parquet::w", "C").load().sum() == 12
        assert open_source(f"{tmp_path}/c.parquet::w", "C", column="v").load().sum() == 12
        assert open_source(f"{tmp_path}/c.parquet::w.T", "C").operand.shape == (2, 3)

    def test_one_column_of_vectors_needs_no_choosing(self, table):
        assert open_source(table.select(["id", "name", "v"]), "C").operand.shape == (3, 2)

    def test_a_column_of_numbers_is_a_vector(self, table):
        source = open_source(table, "C", column="id")
        assert source.operand.shape == (3,)
        assert source.load().tolist() == [1, 2, 3]
        assert open_source(table.select(["id", "name"]), "C").operand.shape == (3,)

    def test_an_unknown_column(self, table):
        with pytest.raises(PlanError, match=r"no column 'x'.*'id' \(int64\), 'name' \(string\)"):
            open_source(table, "C", column="x")

    def test_columns_of_one_name(self):
        table = pa.table([lists(np.ones((3, 2))), lists(np.ones((3, 2)))], ["v", "v"])
        with pytest.raises(PlanError, match="several columns called 'v'"):
            open_source(table, "C", column="v")

    def test_names_with_dots(self, tmp_path):
        table = pa.table({"a": [1, 2, 3], "a.b": lists(np.ones((3, 2)))})
        pq.write_table(table, tmp_path / "c.parquet")
        assert open_source(tmp_path / "c.parquet", "C").load().tolist() == [[1, 1]] * 3
        assert open_source(f"{tmp_path}/c.parquet::a", "C").load().tolist() == [1, 2, 3]

    @pytest.mark.parametrize(
        "array",
        [
            pa.array(["a"]),
            pa.array([1], pa.decimal128(5, 2)),
            pa.array([["a"]]),
            pa.array([[[1.0]]]),
            pa.array([0], pa.timestamp("s")),
            pa.array([{"x": 1}]),
            pa.array([None], pa.null()),
        ],
        ids=lambda array: str(array.type),
    )
    def test_no_numbers(self, array):
        with pytest.raises(DTypeError, match=r"column 'v' has the type "):
            open_source(pa.table({"v": array}), "C", column="v")
        with pytest.raises(DTypeError, match="no column of numbers"):
            open_source(pa.table({"v": array}), "C")

    def test_null_is_checked(self, table):
        with pytest.raises(PlanError, match="null='zero'"):
            open_source(table, "C", column="v", null="zero")

    def test_streams_are_refused(self, table):
        with pytest.raises(PlanError, match="stream of record batches"):
            open_source(pa.RecordBatchReader.from_batches(table.schema, table.to_batches()), "C")
        with pytest.raises(PlanError, match="pyarrow Schema"):
            open_source(table.schema, "C")


class TestTensors:
    def test_more_than_one_axis_is_refused(self):
        kind = pa.fixed_shape_tensor(pa.float32(), [2, 3])
        array = pa.ExtensionArray.from_storage(kind, pa.array([[1.0] * 6], kind.storage_type))
        with pytest.raises(ShapeError, match=r"tensors of shape \(2, 3\)"):
            open_source(array, "C")

    @pytest.mark.parametrize("version", ["", "_v2"])
    def test_those_of_ray_are_known_by_name(self, tmp_path, version, run_python):
        """Files are written as Ray writes them; without Ray only their metadata tells."""
        storage = lists(np.arange(6.0).reshape(2, 3), pa.LargeListArray)
        for shape in ("[3]", "[1, 3]"):
            metadata = {
                "ARROW:extension:name": f"ray.data.arrow_tensor{version}",
                "ARROW:extension:metadata": shape,
            }
            field = pa.field("v", storage.type, metadata=metadata)
            pq.write_table(pa.table([storage], pa.schema([field])), tmp_path / f"{shape}.parquet")
        code = """
import sys, raymm
from raymm.sources import open_source
print(open_source("[3].parquet::v", "C").load().tolist())
try:
    open_source("[1, 3].parquet::v", "C")
except raymm.ShapeError as error:
    print(error)
assert "ray" not in sys.modules
"""
        printed = run_python(code)
        assert "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]" in printed
        assert "tensors of shape (1, 3)" in printed

    def test_those_of_ray_in_memory(self, run_python):
        code = """
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from ray.data.extensions import ArrowTensorArray, ArrowTensorType, ArrowTensorTypeV2
from raymm.sources import open_source
values = np.arange(12.0).reshape(4, 3)
tables = [pa.table({"v": ArrowTensorArray.from_numpy(values)})]
for kind in (ArrowTensorType((3,), pa.float64()), ArrowTensorTypeV2((3,), pa.float64())):
    storage = pa.array(values.tolist(), kind.storage_type)
    tables.append(pa.table({"v": pa.ExtensionArray.from_storage(kind, storage)}))
for table in tables:
    pq.write_table(table, "c.parquet")
    for operand, rows in ((table, ...), (table.slice(1, 2), slice(1, 3)), ("c.parquet", ...)):
        np.testing.assert_array_equal(open_source(operand, "C").load(), values[rows])
print(tables[0]["v"].type)
"""
        assert "ArrowTensorTypeV2" in run_python(code)

    def test_other_extension_types_are_refused(self):
        with pytest.raises(DTypeError, match=r"extension type arrow\.uuid"):
            open_source(pa.array([b"0" * 16], pa.uuid()), "C")


def result_table(values, shape, is_transposed, **more):
    metadata = {"shape": shape, "dtype": str(values.dtype), "is_transposed": is_transposed, **more}
    table = table_of(values, name="D")
    return table.replace_schema_metadata({"raymm": json.dumps(metadata)})


class TestResults:
    """Tables that say how D was turned."""

    def test_both_orientations(self, tmp_path):
        values = np.arange(12.0).reshape(4, 3)
        for is_transposed, expected in ((False, values.T), (True, values)):
            table = result_table(values, expected.shape, is_transposed)
            pq.write_table(table, tmp_path / "D.parquet")
            write_arrow(tmp_path / "D.arrow", table)
            for operand in (table, tmp_path / "D.parquet", tmp_path / "D.arrow"):
                source = open_source(operand, "D")
                np.testing.assert_array_equal(source.load(), expected, strict=True)
                np.testing.assert_array_equal(source.T.load(), expected.T, strict=True)
            np.testing.assert_array_equal(
                raymm.open(tmp_path / "D.parquet")[1:, 2], expected[1:, 2]
            )

    @pytest.mark.parametrize(
        ("table_shape", "shape"), [((4, 1), (4,)), ((1, 4), (4,)), ((1, 1), ()), ((0, 1), (0,))]
    )
    def test_vectors_and_scalars(self, table_shape, shape):
        values = np.arange(float(np.prod(table_shape))).reshape(table_shape)
        source = open_source(result_table(values, shape, False), "D")
        assert source.operand.shape == shape
        np.testing.assert_array_equal(source.load(), values.reshape(shape))
        row = source.as_row()
        np.testing.assert_array_equal(row.load(), values.reshape(1, -1))
        np.testing.assert_array_equal(source.as_column().load(), values.reshape(-1, 1))

    def test_other_columns_of_it_are_plain(self):
        table = result_table(np.ones((4, 3)), (3, 4), False)
        assert open_source(table, "D", column="index").operand.shape == (4,)

    def test_a_folder_that_is_incomplete(self, tmp_path):
        values = np.arange(12.0).reshape(4, 3)
        write_folder(tmp_path / "D", result_table(values, (3, 4), False), rows=2)
        assert open_source(tmp_path / "D", "D").operand.shape == (3, 4)
        (tmp_path / "D" / "part-002.parquet").unlink()
        with pytest.raises(SourceError, match=r"2 rows of 3 values.*incomplete"):
            open_source(tmp_path / "D", "D")
        part = open_source(tmp_path / "D" / "part-001.parquet", "D")
        np.testing.assert_array_equal(part.load(), values[:2].T)

    @pytest.mark.parametrize("text", ["x", "{}", '{"shape": "x", "is_transposed": 1}', "[]"])
    def test_damaged_metadata(self, text):
        table = table_of(np.ones((4, 3)), name="D").replace_schema_metadata({"raymm": text})
        with pytest.raises(SourceError, match="metadata 'raymm' is damaged"):
            open_source(table, "D")


class TestFolders:
    def test_hidden_files_and_others_are_left_out(self, tmp_path):
        values = np.arange(12.0).reshape(6, 2)
        write_folder(tmp_path / "c", table_of(values))
        junk = table_of(np.zeros((1, 2)))
        for name in ("_x.parquet", ".x.parquet", "_tmp/y.parquet", ".tmp/y.parquet"):
            (tmp_path / "c" / name).parent.mkdir(exist_ok=True)
            pq.write_table(junk, tmp_path / "c" / name)
        (tmp_path / "c" / "_SUCCESS").touch()
        (tmp_path / "c" / "notes.txt").write_text("x")
        np.testing.assert_array_equal(open_source(tmp_path / "c", "C").load(), values)

    def test_folders_in_folders_in_the_order_of_their_names(self, tmp_path):
        values = np.arange(12.0).reshape(6, 2)
        for name, part in (("b/0", values[4:]), ("a/1", values[2:4]), ("a/0", values[:2])):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            pq.write_table(table_of(part), tmp_path / f"{name}.parquet")
        np.testing.assert_array_equal(open_source(tmp_path, "C").load(), values)
        globbed = open_source(f"{tmp_path}/**/*.parquet", "C")
        np.testing.assert_array_equal(globbed.load(), values)
        globbed = open_source(f"{tmp_path}/[!b]/?.parquet", "C")
        np.testing.assert_array_equal(globbed.load(), values[:4])

    def test_arrow_files_one_after_another(self, tmp_path):
        values = np.arange(80.0).reshape(40, 2)
        for part in range(4):
            write_arrow(tmp_path / f"{part}.arrow", table_of(values[10 * part : 10 * part + 10]))
        source, buffer = open_source(tmp_path, "C").T, Buffer()
        views = [source.read(start, start + 2, Buffer()) for start in range(0, 40, 2)]
        np.testing.assert_array_equal(np.concatenate(views, axis=1), values.T)
        np.testing.assert_array_equal(source.read(5, 35, buffer), values[5:35].T)

    def test_files_without_a_suffix(self, tmp_path):
        pq.write_table(table_of(np.ones((3, 2))), tmp_path / "part-0")
        assert open_source(tmp_path, "C").operand.shape == (3, 2)
        assert open_source(tmp_path / "part-0", "C").operand.shape == (3, 2)

    def test_nothing_and_both_kinds(self, tmp_path):
        with pytest.raises(SourceError, match="no Parquet or Arrow"):
            open_source(tmp_path, "C")
        with pytest.raises(SourceError, match="no Parquet or Arrow"):
            open_source(f"{tmp_path}/*.parquet", "C")
        with pytest.raises(SourceError, match="no such file"):
            open_source(tmp_path / "missing.parquet", "C")
        with pytest.raises(SourceError, match="no such file"):
            open_source(tmp_path / "missing" / "*.parquet", "C")
        pq.write_table(table_of(np.ones((3, 2))), tmp_path / "c.parquet")
        write_arrow(tmp_path / "c.arrow", table_of(np.ones((3, 2))))
        with pytest.raises(SourceError, match="Parquet and Arrow files"):
            open_source(tmp_path, "C")
        assert open_source(f"{tmp_path}/*.arrow", "C").operand.shape == (3, 2)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            (table_of(np.ones((3, 4))), "rows have 4 values, in the first file they have 2"),
            (table_of(np.ones((3, 2), np.float32)), "the first file has float64"),
            (table_of(np.ones((3, 2)), name="w"), "has no column 'v'"),
        ],
    )
    def test_files_that_do_not_go_together(self, tmp_path, other, message):
        pq.write_table(table_of(np.ones((3, 2))), tmp_path / "a.parquet")
        pq.write_table(other, tmp_path / "b.parquet")
        with pytest.raises(SourceError, match=f"b.parquet.*{message}"):
            open_source(tmp_path, "C")

    def test_a_description_of_many_files_is_cut_to_those_it_needs(self, tmp_path):
        values = np.arange(1000.0).reshape(500, 2)
        write_folder(tmp_path / "c", table_of(values), rows=2)
        source = open_source(tmp_path / "c", "C").T
        cut = source.cut(100, 120)
        assert len(pickle.dumps(cut)) < len(pickle.dumps(source)) / 5
        read = pickle.loads(pickle.dumps(cut)).read(100, 120, Buffer())
        np.testing.assert_array_equal(read, values[100:120].T)


class TestDamage:
    def test_files_of_other_kinds(self, tmp_path):
        for name in ("c.parquet", "c.arrow"):
            (tmp_path / name).write_bytes(b"nothing of the kind, but long enough")
            with pytest.raises(SourceError, match=f"{name}"):
                open_source(tmp_path / name, "C")

    def test_files_cut_short(self, tmp_path):
        pq.write_table(table_of(np.ones((30, 20))), tmp_path / "c.parquet")
        write_arrow(tmp_path / "c.arrow", table_of(np.ones((30, 20))))
        for name in ("c.parquet", "c.arrow"):
            content = (tmp_path / name).read_bytes()
            (tmp_path / name).write_bytes(content[: len(content) // 2])
            with pytest.raises(SourceError, match=name):
                open_source(tmp_path / name, "C")

    def test_streams_and_old_feather(self, tmp_path):
        table = table_of(np.ones((3, 2)))
        with pa.ipc.new_stream(str(tmp_path / "c.arrow"), table.schema) as stream:
            stream.write_table(table)
        with pytest.raises(SourceError, match=r"Arrow stream.*pyarrow\.ipc\.new_file"):
            open_source(tmp_path / "c.arrow", "C")
        (tmp_path / "c.feather").write_bytes(b"FEA1" + b"\0" * 100)
        with pytest.raises(SourceError, match="Feather's first version"):
            open_source(tmp_path / "c.feather", "C")

    def test_a_file_that_changes(self, tmp_path):
        path = tmp_path / "c.parquet"
        pq.write_table(table_of(np.ones((30, 2))), path)
        source = pickle.loads(pickle.dumps(open_source(path, "C").T))
        pq.write_table(table_of(np.ones((20, 2))), path)
        with pytest.raises(SourceError, match="has changed since"):
            source.read(0, 10, Buffer())
        path.unlink()
        with pytest.raises(SourceError, match="no such file"):
            source.read(0, 10, Buffer())


class TestReadVolume:
    """Bytes read in a pass over tiles in order, of a filesystem that counts them."""

    @pytest.fixture
    def counted(self):
        CountingFileSystem.read_nbytes.clear()
        yield CountingFileSystem
        CountingFileSystem.store.clear()

    @pytest.mark.parametrize("tile_columns", [100, 1000, 3333, 100_000])
    @pytest.mark.parametrize("suffix", ["parquet", "large groups", "arrow"])
    def test_little_more_than_the_column_is_read(
        self, counted, suffix, tile_columns, tmp_path, monkeypatch
    ):
        """Tiles overlap a little, as those of a file in rows do."""
        if suffix == "large groups":
            suffix = "parquet"
            monkeypatch.setattr(stored, "GROUP_NBYTES", 200_000)
            monkeypatch.setattr(stored, "BATCH_NBYTES", 50_000)
            monkeypatch.setattr(formats, "READ_AHEAD_NBYTES", 50_000)
        rows, width = 80_000, 8
        values = np.random.default_rng(0).normal(size=(rows, width))
        other = np.random.default_rng(1).normal(size=(rows, 3 * width))
        files = {f"counting://{suffix}/{name}.{suffix}": name for name in "ab"}
        column_nbytes = 0
        for uri, part in zip(files, (values[:50_000], values[50_000:]), strict=True):
            table = table_of(part).append_column("other", fixed_lists(other[: len(part)]))
            path = tmp_path / f"part.{suffix}"
            if suffix == "parquet":
                pq.write_table(table, path, row_group_size=6700, use_dictionary=False)
            else:
                write_arrow(path, table, rows=6700)
            counted().pipe(uri, path.read_bytes())
            column_nbytes += part.nbytes
        source = open_source(f"counting://{suffix}::v", "C").T
        buffer = Buffer()
        for start in range(0, rows, tile_columns):
            stop = min(start + tile_columns + 64, rows)
            sent = pickle.loads(pickle.dumps(source.cut(start, stop)))
            np.testing.assert_array_equal(sent.read(start, stop, buffer), values[start:stop].T)
        assert column_nbytes <= sum(counted.read_nbytes.values()) <= 1.2 * column_nbytes


def test_end_to_end_from_files_into_files(tmp_path, engine):
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(500, 6)).astype(np.float32)
    left = generator.normal(size=(4, 6)).astype(np.float32)
    write_folder(tmp_path / "C", table_of(vectors, "list"), rows=120)
    write_arrow(tmp_path / "A.arrow", table_of(left))
    operands = [tmp_path / "A.arrow", np.eye(6, dtype=np.float32), f"{tmp_path}/C::v.T"]
    result = raymm.multi_dot(
        operands, out=tmp_path / "D.npy", engine=engine, tile_columns=77, verify=True
    )
    expected = left.astype(np.float64) @ vectors.T.astype(np.float64)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    tall = raymm.multi_dot(
        [f"{tmp_path}/C::v", np.eye(6, dtype=np.float32), raymm.transpose(tmp_path / "A.arrow")],
        engine=engine,
        tile_columns=77,
    )
    np.testing.assert_allclose(tall, expected.T, rtol=1e-5, atol=1e-5)


def test_parts_of_a_product_read_only_what_they_need(tmp_path):
    vectors = np.arange(600.0).reshape(200, 3)
    write_folder(tmp_path / "C", table_of(vectors), rows=50)
    chain = raymm.chain([np.eye(3), np.eye(3), f"{tmp_path}/C.T"])
    np.testing.assert_array_equal(chain[1, 5:9], vectors[5:9, 1])
    np.testing.assert_array_equal(chain[:, [199, 0]], vectors[[199, 0]].T)
    np.testing.assert_array_equal(chain[::-1, ::60], vectors[::60].T[::-1])


@pytest.mark.parametrize("place", ["C", "C/part-001.parquet", "C/x/../part-001.parquet"])
def test_outputs_over_the_files_of_an_operand_are_refused(tmp_path, place):
    write_folder(tmp_path / "C", table_of(np.ones((9, 3))))
    (tmp_path / "C" / "x").mkdir()
    for operand in ("C", "C/*.parquet", "C/part-001.parquet"):
        if (operand, place) == ("C/part-001.parquet", "C"):
            continue  # a folder that is not empty is no file to replace
        chain = raymm.chain([f"{tmp_path}/{operand}", np.eye(3)])
        with pytest.raises(PlanError, match="would overwrite the operand"):
            chain.write(raymm.Npy(tmp_path / place), overwrite=True, engine="local")


def test_opening_an_array_loads_no_arrow(run_python):
    code = """
import sys, numpy as np, raymm
raymm.multi_dot([np.eye(2), np.eye(2)], engine="local")
assert "pyarrow" not in sys.modules
"""
    run_python(code)
    assert "pyarrow" in sys.modules


@pytest.mark.parametrize("path", ["", ".T", "::column"])
def test_an_empty_path_is_not_the_working_directory(path):
    with pytest.raises(PlanError, match="names no file"):
        open_source(path, "A")
