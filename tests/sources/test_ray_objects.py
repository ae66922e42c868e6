"""Operands in a Ray cluster."""

import hashlib
import itertools
import time
import warnings

import numpy as np
import pytest

import raymm
from raymm.errors import DTypeError, PlanError, ShapeError, SourceError
from raymm.kernels.buffers import Buffer
from raymm.sources import open_source
from tests.contracts import SourceContract

pytestmark = pytest.mark.ray

VALUES = np.arange(5 * 23, dtype=np.float64).reshape(5, 23) - 40
EDGES = (0, 4, 4, 9, 10, 23)


def blocks(values, axis=1):
    """Return runs of different lengths along an axis, one of them empty."""
    cuts = [slice(*each) for each in itertools.pairwise(EDGES)]
    return [values[:, cut] if axis == 1 else values[cut] for cut in cuts]


class RayContract(SourceContract):
    """Beside the contract: it travels in a call, and only the references with it."""

    @pytest.fixture(autouse=True)
    def _cluster(self, ray_cluster):
        self.ray = ray_cluster

    def test_a_cut_reads_the_same_in_another_process(self, source, values):
        def read(cut, start, stop):
            return np.array(cut.read(start, stop, Buffer()))

        task = self.ray.remote(read).options(num_cpus=0)
        for opened, whole in ((source(values), values), (source(values).T, values.T)):
            for start, stop in ((2, 4), (3, 4)):
                part = self.ray.get(task.remote(opened.cut(2, 4), start, stop))
                np.testing.assert_array_equal(part, whole[:, start:stop])

    def test_the_driver_holds_no_values(self, source, values):
        assert source(values).operand.is_held is False


class TestReference(RayContract):
    @pytest.fixture(params=["C", "F"])
    def source(self, request):
        return lambda values: open_source(self.ray.put(np.array(values, order=request.param)), "C")


class TestBlocks(RayContract):
    @pytest.fixture
    def source(self):
        def make(values):
            cuts = [values[..., :3], values[..., 3:3], values[..., 3:4], values[..., 4:]]
            return open_source([self.ray.put(np.array(cut)) for cut in cuts], "C")

        return make


class TestBlocksBeneath(RayContract):
    @pytest.fixture
    def source(self):
        def make(values):
            cuts = [values[:1], values[1:1], values[1:]]
            refs = [self.ray.put(np.array(cut)) for cut in cuts]
            return open_source(refs if values.ndim == 1 else [[ref] for ref in refs], "C")

        return make


@pytest.fixture
def put(ray_cluster):
    return ray_cluster.put


class TestProducts:
    LEFT = np.arange(10.0).reshape(2, 5)

    @pytest.mark.parametrize("tile_columns", [None, 1, 7])
    def test_of_blocks_of_columns(self, engine, put, tile_columns):
        refs = [put(block) for block in blocks(VALUES)]
        product = raymm.multi_dot([self.LEFT, refs], tile_columns=tile_columns, engine=engine)
        np.testing.assert_array_equal(product, self.LEFT @ VALUES)

    def test_of_blocks_of_rows(self, engine, put):
        refs = [[put(block)] for block in blocks(VALUES.T, axis=0)]
        product = raymm.multi_dot([refs, self.LEFT.T], tile_columns=7, engine=engine)
        np.testing.assert_array_equal(product, VALUES.T @ self.LEFT.T)
        product = raymm.multi_dot([self.LEFT, raymm.transpose(refs)], engine=engine)
        np.testing.assert_array_equal(product, self.LEFT @ VALUES)

    def test_all_operands_in_the_cluster(self, engine, put):
        middle = np.eye(5)[::-1]
        refs = [put(self.LEFT), [put(middle[:, :2]), put(middle[:, 2:])], put(VALUES)]
        chain = raymm.chain(refs)
        assert chain.shape == (2, 23)
        product = chain.compute(tile_columns=6, engine=engine)
        np.testing.assert_array_equal(product, self.LEFT @ middle @ VALUES)
        np.testing.assert_array_equal(chain[1, 3:9:2], (self.LEFT @ middle @ VALUES)[1, 3:9:2])

    def test_a_huge_axis_inside(self, engine, put):
        refs = [put(VALUES[:, :20]), put(VALUES[:, 20:])]
        whole = np.tile(VALUES, 400)
        product = raymm.multi_dot(
            [refs * 400, raymm.transpose(refs * 400)], engine=engine, memory_limit="300kB"
        )
        np.testing.assert_array_equal(product, whole @ whole.T)

    def test_of_tensors_and_tables(self, engine, put):
        import pyarrow as pa  # noqa: PLC0415  for this test only
        import torch  # noqa: PLC0415  as above

        tensors = [put(torch.from_numpy(block.copy())) for block in blocks(VALUES)]
        product = raymm.multi_dot([self.LEFT, tensors], engine=engine)
        np.testing.assert_array_equal(product, self.LEFT @ VALUES)
        tables = [
            put(pa.table({"v": pa.FixedSizeListArray.from_arrays(block.reshape(-1), 5)}))
            for block in blocks(VALUES.T, axis=0)
        ]
        product = raymm.multi_dot([tables, self.LEFT.T], tile_columns=4, engine=engine)
        np.testing.assert_array_equal(product, VALUES.T @ self.LEFT.T)

    def test_of_bfloat16_tensors(self, engine, put):
        import torch  # noqa: PLC0415  two seconds, for this test only

        ref = put(torch.from_numpy(VALUES).to(torch.bfloat16))
        product = raymm.multi_dot([self.LEFT, ref], engine=engine)
        assert product.dtype == np.float64
        np.testing.assert_array_equal(product, self.LEFT @ VALUES)

    def test_of_what_tasks_return(self, ray_engine, ray_cluster):
        make = ray_cluster.remote(lambda place: np.full((5, place + 1), float(place)))
        refs = [make.options(num_cpus=0).remote(place) for place in range(4)]
        whole = np.concatenate([np.full((5, place + 1), float(place)) for place in range(4)], 1)
        product = raymm.multi_dot([self.LEFT, refs], tile_columns=3, engine=ray_engine)
        np.testing.assert_array_equal(product, self.LEFT @ whole)


def test_u28_objects_stay_untouched_without_warnings(engine, put, ray_cluster):
    C = np.random.default_rng(0).normal(size=(3, 50)).astype(np.float32)
    A, B = np.ones((5, 3), np.float32), np.eye(3, dtype=np.float32)
    ref = put(C)
    digest = hashlib.sha256(C.tobytes()).digest()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        product = raymm.multi_dot([A, B, ref], tile_columns=20, engine=engine)
        turned = raymm.multi_dot([raymm.transpose(ref), A.T], tile_columns=20, engine=engine)
    np.testing.assert_allclose(product, A.astype("f8") @ C, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(turned, (A.astype("f8") @ C).T, rtol=1e-5, atol=1e-6)
    kept = ray_cluster.get(ref)
    assert hashlib.sha256(kept.tobytes()).digest() == digest
    assert not kept.flags.writeable


class TestRefused:
    def test_blocks_of_different_heights(self, put):
        refs = [put(np.ones((5, 2))), put(np.ones((5, 3))), put(np.ones((4, 3)))]
        with pytest.raises(ShapeError, match=r"C: block 2 \(4, 3\) does not fit to block 0 \(5, 2"):
            open_source(refs, "C")
        with pytest.raises(ShapeError, match=r"block 1 \(5, 3\) .*beneath each other need one w"):
            open_source([[ref] for ref in refs], "C")

    def test_vectors_among_matrices_and_other_axes(self, put):
        with pytest.raises(ShapeError, match=r"block 1 \(5,\) does not fit"):
            open_source([put(np.ones((5, 2))), put(np.ones(5))], "C")
        with pytest.raises(ShapeError, match=r"\(2, 3, 4\)"):
            open_source(put(np.ones((2, 3, 4))), "C")
        with pytest.raises(ShapeError, match="grid of blocks"):
            open_source([[put(np.ones(1)), put(np.ones(1))], [put(np.ones(1))]], "C")

    def test_blocks_of_different_dtypes(self, put):
        with pytest.raises(DTypeError, match="block 1 is float32, block 0 float64"):
            open_source([put(np.ones((5, 2))), put(np.ones((5, 2), np.float32))], "C")

    def test_no_numbers(self, put):
        for value in ({"a": 1}, "text", np.array(["a"]), np.array([object()])):
            with pytest.raises(DTypeError, match="C"):
                open_source(put(value), "C")
        with pytest.raises(PlanError, match="mixes references with a float"):
            open_source([put(np.ones((5, 2))), 1.0], "C")

    def test_missing_values_of_tables(self, put, ray_cluster, local_engine):
        import pyarrow as pa  # noqa: PLC0415  for this test only

        whole = pa.table({"v": pa.array([[1.0, 2.0], [3.0, 4.0]], pa.list_(pa.float64(), 2))})
        broken = pa.table({"v": pa.array([[1.0, None], None], pa.list_(pa.float64(), 2))})
        refs = [put(whole), put(broken)]
        with pytest.raises(SourceError, match=r"C, block 1, column 'v': 2 nulls, the first in ro"):
            open_source(refs, "C")
        product = raymm.multi_dot([refs, np.eye(2)], null="nan", engine=local_engine)
        assert np.isnan(product).tolist() == [[False] * 2] * 2 + [[True] * 2] * 2

    def test_a_column_that_must_be_chosen(self, put, local_engine):
        import pyarrow as pa  # noqa: PLC0415  for this test only

        table = pa.table({name: pa.array([[1.0, 2.0]], pa.list_(pa.float64(), 2)) for name in "ab"})
        with pytest.raises(PlanError, match=r"choose one with column="):
            open_source(put(table), "C")
        product = raymm.multi_dot([put(table), np.eye(2)], column="b", engine=local_engine)
        np.testing.assert_array_equal(product, [[1, 2]])
        with pytest.raises(PlanError, match=r"no column 'c'"):
            open_source(put(table), "C", column="c")

    def test_a_task_that_fails(self, ray_cluster):
        ref = ray_cluster.remote(lambda: 1 // 0).options(num_cpus=0).remote()
        with pytest.raises(SourceError, match=r"C: the task that was to make block 0 failed: Zero"):
            open_source(ref, "C")

    def test_a_lost_object(self, ray_cluster, engine):
        @ray_cluster.remote(num_cpus=0)
        class Maker:
            def make(self):
                return [ray_cluster.put(np.ones((5, 30_000)))]

        maker = Maker.remote()
        (ref,) = ray_cluster.get(maker.make.remote())
        chain = raymm.chain([np.ones((2, 5)), [ref, ray_cluster.put(np.ones((5, 3)))]])
        ray_cluster.kill(maker)
        deadline = time.monotonic() + 60
        while is_there(ray_cluster, ref):
            assert time.monotonic() < deadline
        with pytest.raises(SourceError, match=r"block 0 is lost .*put it into the cluster again"):
            chain.compute(engine=engine, tile_columns=20_000)


def is_there(ray, ref):
    try:
        ray.get(ref)
    except ray.exceptions.ObjectLostError:
        return False
    return True


def shuffled_later(row):
    """Make the first rows take longest: whoever does not keep the order yields them last."""
    time.sleep(0.3 if row["id"] < 2 else 0)
    return {"v": np.arange(3.0) + 10 * row["id"], "id": row["id"]}


def every_seventh(batch):
    return {name: values[batch["id"] % 7 == 3] for name, values in batch.items()}


class TestDatasets:
    """A vector per row, (n, d), in the dataset's order."""

    WHOLE = np.arange(3.0) + 10 * np.arange(40.0)[:, None]
    RIGHT = np.arange(6.0).reshape(3, 2)

    @pytest.fixture
    def data(self, ray_room):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Ray's own making
            import ray.data  # noqa: PLC0415  two seconds, for these tests only

            context = ray.data.DataContext.get_current()
        before = context.enable_progress_bars, context.execution_options.preserve_order
        yield ray.data
        assert ray.data.DataContext.get_current() is context
        assert before == (context.enable_progress_bars, context.execution_options.preserve_order)

    @pytest.fixture
    def dataset(self, data):
        return data.range(40, override_num_blocks=20).map(shuffled_later)

    @pytest.mark.parametrize("is_executed", [False, True])
    def test_order_is_kept(self, dataset, is_executed, local_engine, capfd):
        if is_executed:
            dataset.count()
            dataset.schema()
        chain = raymm.chain([dataset.select_columns("v"), self.RIGHT])
        assert chain.shape == (40, 2)
        product = chain.compute(engine=local_engine)
        np.testing.assert_array_equal(product, self.WHOLE @ self.RIGHT)
        turned = raymm.multi_dot(
            [self.RIGHT.T, raymm.transpose(dataset)], tile_columns=7, engine=local_engine
        )
        np.testing.assert_array_equal(turned, self.RIGHT.T @ self.WHOLE.T)

    def test_on_workers(self, dataset, ray_engine):
        chain = raymm.chain([dataset, self.RIGHT])
        product = chain.compute(engine=ray_engine, tile_columns=7)
        np.testing.assert_array_equal(product, self.WHOLE @ self.RIGHT)

    def test_of_arrays_and_tables(self, data, local_engine):
        import pyarrow as pa  # noqa: PLC0415  for this test only

        table = pa.table({"v": pa.array(self.WHOLE.tolist(), pa.list_(pa.float64(), 3))})
        for dataset in (data.from_numpy(self.WHOLE), data.from_arrow(table)):
            product = raymm.multi_dot([dataset, self.RIGHT], engine=local_engine)
            np.testing.assert_array_equal(product, self.WHOLE @ self.RIGHT)

    def test_filtered_to_empty_blocks(self, dataset, local_engine):
        some = dataset.map_batches(every_seventh, batch_size=None)
        product = raymm.multi_dot([some, self.RIGHT], engine=local_engine)
        np.testing.assert_array_equal(product, self.WHOLE[3::7] @ self.RIGHT)

    def test_rows_of_a_result_that_are_no_longer_in_order(self, data):
        import pyarrow as pa  # noqa: PLC0415  for this test only

        rows = pa.array(self.WHOLE.tolist(), pa.list_(pa.float64(), 3))
        tables = [
            pa.table({"index": range(start, start + 20), "D": rows[start : start + 20]})
            for start in (20, 0)
        ]
        with pytest.raises(PlanError, match=r"'index' does not ascend.*use .sort\('index'\)"):
            open_source(data.from_arrow(tables), "C")
        opened = open_source(data.from_arrow(tables[::-1]), "C")
        np.testing.assert_array_equal(opened.load(), self.WHOLE)

    def test_no_cpu_left(self, data, dataset, monkeypatch):
        monkeypatch.setattr("raymm.sources.ray_opening.FREE_CPU_SECONDS", 0.3)
        with raymm.RayEngine(num_workers=2) as engine:
            raymm.multi_dot([np.eye(3), np.eye(3)], engine=engine)
            with pytest.raises(PlanError, match=r"needs a CPU .* open it before the engine"):
                raymm.chain([dataset, self.RIGHT])
