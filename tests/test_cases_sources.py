"""Cases from public reports about operands, each named after its id."""

import hashlib
import os
import pickle
import warnings

import numpy as np
import pytest

import raymm
from raymm.errors import SourceError
from raymm.events import TileFinished
from raymm.sources import open_source
from tests.contracts import LARGEST_DESCRIPTION, names_in
from tests.doubles import CountingCallback


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("with_gradient", [False, True])
def test_u22_bfloat16_tensors_and_tensors_that_require_grad(engine, tmp_path, dtype, with_gradient):
    import torch  # noqa: PLC0415  two seconds, for this test only

    dtype = getattr(torch, dtype)
    operands = [
        torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=dtype),
        torch.eye(3, dtype=dtype),
        torch.ones(3, 4, dtype=dtype),
    ]
    for operand in operands:
        operand.requires_grad_(with_gradient)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memory = raymm.multi_dot(operands, engine=engine)
        file = raymm.multi_dot(operands, out=tmp_path / "D.npy", engine=engine)
    for product in (memory, file, np.load(tmp_path / "D.npy")):
        assert product.dtype == np.float32
        assert product.tolist() == [[6] * 4, [15] * 4]
    for operand in operands:
        assert operand.requires_grad is with_gradient
        assert operand.grad is None


@pytest.mark.parametrize("tile_columns", [None, 1])
def test_u23_negative_strides(engine, tile_columns):
    view = np.arange(100.0).reshape(10, 10)[::-2, ::-2]
    product = raymm.multi_dot([view, np.eye(5), view], tile_columns=tile_columns, engine=engine)
    assert product[0].tolist() == [28425, 27475, 26525, 25575, 24625]
    assert product[-1].tolist() == [4825, 4675, 4525, 4375, 4225]
    turned = np.arange(20).reshape(2, 10)[:, ::-3]
    product = raymm.multi_dot(
        [np.ones((1, 2)), np.eye(2), turned], tile_columns=tile_columns, engine=engine
    )
    assert product.tolist() == [[28, 22, 16, 10]]


LEFT = np.array([[1.0, 2, 3], [4, 5, 6]])
MIDDLE = np.array([[1.0, 2], [3, 4], [5, 6]])


def as_fortran(values, path):
    return np.asfortranarray(values)


def as_view(values, path):
    return np.ascontiguousarray(values.T).T


def as_tensor(values, path):
    import torch  # noqa: PLC0415  two seconds, for this test only

    return torch.from_numpy(np.ascontiguousarray(values.T)).t()


def as_fortran_file(values, path):
    np.save(path, np.asfortranarray(values))
    return path


def as_turned_file(values, path):
    np.save(path, np.ascontiguousarray(values.T))
    return f"{path}.T"


FORMS = (as_fortran, as_view, as_tensor, as_fortran_file, as_turned_file)


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_u24_fortran_order_and_transposed_operands(tmp_path, first, second, local_engine):
    for last in FORMS:
        operands = [
            first(LEFT, tmp_path / "A.npy"),
            second(MIDDLE, tmp_path / "B.npy"),
            last(np.eye(2), tmp_path / "C.npy"),
        ]
        product = raymm.multi_dot(operands, engine=local_engine)
        assert product.tolist() == [[22, 28], [49, 64]]
        out = np.empty((2, 2), order="F")
        raymm.multi_dot(operands, out=out, engine=local_engine)
        assert out.tolist() == [[22, 28], [49, 64]]


@pytest.mark.ray
@pytest.mark.parametrize("form", FORMS)
def test_u24_on_workers(tmp_path, form, ray_engine):
    huge = form(np.arange(20.0).reshape(2, 10), tmp_path / "C.npy")
    product = raymm.multi_dot(
        [LEFT, MIDDLE, huge], tile_columns=3, out=np.empty((2, 10), order="F"), engine=ray_engine
    )
    np.testing.assert_array_equal(product, LEFT @ MIDDLE @ np.arange(20.0).reshape(2, 10))


@pytest.mark.parametrize("tile_columns", [None, 1])
@pytest.mark.parametrize("form", ["array", "file", "map"])
@pytest.mark.parametrize(
    ("dtype", "result"), [(">f4", "f4"), (">f8", "f8"), (">i2", "i8"), (">c8", "c8")]
)
def test_u27_big_endian_input(engine, tmp_path, dtype, result, form, tile_columns):
    values = np.array([[1, 2, 3], [4, 5, 6]], dtype)
    before = values.tobytes()
    np.save(tmp_path / "X.npy", values)
    operand = {
        "array": values,
        "file": tmp_path / "X.npy",
        "map": np.load(tmp_path / "X.npy", mmap_mode="r"),
    }[form]
    turned = f"{operand}.T" if form == "file" else operand.T
    middle = np.eye(3, dtype=dtype)
    product = raymm.multi_dot([operand, middle, turned], tile_columns=tile_columns, engine=engine)
    assert product.tolist() == [[14, 32], [32, 77]]
    assert product.dtype == np.dtype(result)
    assert product.dtype.isnative
    assert values.tobytes() == before
    assert values.dtype == np.dtype(dtype)
    file = raymm.multi_dot([operand, middle, turned], out=tmp_path / "D.npy", engine=engine)
    assert file.dtype.isnative
    assert file.tolist() == [[14, 32], [32, 77]]


@pytest.mark.parametrize("order", ["C", "F"])
def test_u28_read_only_inputs_stay_untouched_without_warnings(engine, order):
    import torch  # noqa: PLC0415  two seconds, for this test only

    rng = np.random.default_rng(0)
    operands = [
        np.asarray(rng.normal(size=shape).astype(np.float32), order=order)
        for shape in ((5, 3), (3, 3), (3, 50))
    ]
    for operand in operands:
        operand.flags.writeable = False
    digest = [hashlib.sha256(operand.tobytes()).digest() for operand in operands]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        product = raymm.multi_dot(operands, tile_columns=20, engine=engine)
        torch.from_numpy(product)  # the result may be written to
    left, middle, right = (operand.astype(np.float64) for operand in operands)
    np.testing.assert_allclose(product, left @ middle @ right, rtol=1e-4, atol=1e-5)
    assert [hashlib.sha256(operand.tobytes()).digest() for operand in operands] == digest
    assert not any(operand.flags.writeable for operand in operands)


VIEWS = {
    "turned": lambda array: array.T,
    "offset": lambda array: array[3:, 5:],
    "every other": lambda array: array[:, ::2],
    "reversed": lambda array: array[::-1],
    "mixed": lambda array: array[::-3, 7::5].T,
}


class TestU56MemmapViewsShippedToWorkers:
    @pytest.fixture
    def whole(self, tmp_path):
        values = 1000.0 * np.arange(1000)[:, None] + np.arange(1000)
        np.save(tmp_path / "C.npy", values)
        return values, np.load(tmp_path / "C.npy", mmap_mode="r")

    @pytest.mark.ray
    @pytest.mark.parametrize("view", VIEWS)
    def test_u56_rows_of_a_view_on_workers(self, whole, view, ray_engine, ray_cluster, monkeypatch):
        values, mapped = (VIEWS[view](each) for each in whole)
        put, plain = [], ray_cluster.put

        def counted(value, *arguments, **options):
            put.append(len(pickle.dumps(value)))
            return plain(value, *arguments, **options)

        monkeypatch.setattr(ray_cluster, "put", counted)
        length = values.shape[0]
        picks = np.zeros((3, length))
        picks[[0, 1, 2], [0, 1, length - 1]] = 1
        middle = np.eye(length)
        callback = CountingCallback()
        product = raymm.multi_dot(
            [picks, middle, mapped], tile_columns=100, engine=ray_engine, progress=callback
        )
        np.testing.assert_array_equal(product, values[[0, 1, length - 1]])
        assert len(callback.of(TileFinished)) > 1
        # What is put is the folded factor, 3 rows of it; no tile of the operand is.
        assert sum(put) <= picks.nbytes + LARGEST_DESCRIPTION

    @pytest.mark.parametrize("view", VIEWS)
    def test_u56_descriptions_are_small(self, whole, view):
        _, mapped = whole
        source = open_source(VIEWS[view](mapped), "C")
        assert len(pickle.dumps(source)) < LARGEST_DESCRIPTION
        assert len(pickle.dumps(source.cut(0, 100))) < LARGEST_DESCRIPTION
        assert len(pickle.dumps(np.asarray(mapped))) >= 8_000_000


def test_u69_a_truncated_file_as_operand(tmp_path):
    # Case (d): the file is shorter than its header says.
    path = tmp_path / "C.npy"
    np.save(path, np.ones((10, 1000)))
    actual = path.stat().st_size - 5000
    with path.open("r+b") as file:
        file.truncate(actual)
    with pytest.raises(SourceError) as caught:
        raymm.multi_dot([np.ones((2, 10)), path], out=tmp_path / "D.npy", engine="local")
    assert f"{actual + 5000:,}" in str(caught.value)
    assert f"{actual:,}" in str(caught.value)
    assert str(path) in str(caught.value)
    assert names_in(tmp_path) == ["C.npy"]


class TestU36DenseTimesObject:
    """The part of the case that concerns dense operands."""

    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_u36_object_operands_are_refused(self, place, tmp_path):
        operands = [np.eye(4), np.eye(4), np.ones((4, 10))]
        operands[place] = operands[place].astype(object)
        with pytest.raises(raymm.DTypeError) as caught:
            raymm.multi_dot(operands, out=tmp_path / "D.npy")
        assert isinstance(caught.value, TypeError)
        assert "object" in str(caught.value)
        assert names_in(tmp_path) == []


class TestU57ColumnSlicesOfARowMajorFile:
    columns = 1_000_000

    @pytest.fixture(scope="class")
    @classmethod
    def paths(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("u57")
        rng = np.random.default_rng(57)
        wide = np.lib.format.open_memmap(folder / "wide.npy", "w+", np.float32, (100, cls.columns))
        for row in wide:
            row[:] = rng.integers(-4, 4, cls.columns)
        tall = np.lib.format.open_memmap(folder / "tall.npy", "w+", np.float32, (cls.columns, 100))
        for start in range(0, cls.columns, 50_000):
            tall[start : start + 50_000] = wide[:, start : start + 50_000].T
        expected = wide.sum(axis=1, dtype=np.float64)
        del wide, tall
        yield folder / "wide.npy", f"{folder / 'tall.npy'}.T", expected
        for path in folder.iterdir():
            path.unlink()

    @pytest.mark.parametrize("tile_columns", [None, 8192])
    def test_u57_every_byte_is_read_about_once(self, paths, local_engine, tile_columns):
        wide, tall, expected = paths
        reads = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", counting(os.preadv, reads))
            found = []
            for path in (wide, tall):
                reads.clear()
                chain = raymm.chain([np.eye(100, dtype=np.float32)[:4], path])
                total = np.zeros(4)
                for _, block in chain.tiles(tile_columns=tile_columns, engine=local_engine):
                    total += block.sum(axis=1, dtype=np.float64)
                found.append(total)
                assert sum(reads) <= 1.2 * 400_000_000
                if path == wide:  # whole tiles, each row of which is one run
                    assert np.median(reads) >= 32_000
        np.testing.assert_array_equal(found[0], expected[:4])
        np.testing.assert_array_equal(found[1], expected[:4])


def counting(read, reads):
    def counted(*arguments):
        got = read(*arguments)
        reads.append(got)
        return got

    return counted
