"""What a run takes is at most what its plan says."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raymm
from tests.measuring import PeakMemory
from tests.tables import lists

SLACK_NBYTES = 24_000_000
"""Not part of the model: huge pages (up to 2 MB at the end of each buffer), what BLAS holds for
each thread, threads, Python's own allocations."""

TABLE = pa.schema({"v": pa.list_(pa.float32())})
CASES = {
    "C order": (np.float32, {}, "C"),
    "F order": (np.float32, {}, "F"),
    "half precision": (np.float16, {}, "C"),
    "narrowed": (np.float64, {"dtype": np.float32}, "C"),
    "integers": (np.int32, {}, "F"),
    "limited": (np.float32, {"memory_limit": 60_000_000}, "C"),
    "wide tiles": (np.float32, {"tile_columns": 60_000}, "C"),
}


@pytest.fixture
def engine():
    """One whose buffers are not there yet."""
    with raymm.LocalEngine(threads=2) as engine:
        raymm.multi_dot([np.ones((9, 9)), np.ones((9, 99))], engine=engine)
        yield engine


@pytest.mark.parametrize("case", CASES)
def test_measured_is_at_most_projected(engine, tmp_path, case):
    dtype, options, order = CASES[case]
    rng = np.random.default_rng(0)
    np.save(tmp_path / "C.npy", rng.integers(-3, 4, (200, 60_000)).astype(dtype))
    left = rng.integers(-3, 4, (700, 200)).astype(dtype)
    chain = raymm.chain([left, tmp_path / "C.npy"])
    out = raymm.Npy(tmp_path / "D.npy", order=order)
    plan = chain.plan(out, engine=engine, **options)
    with PeakMemory() as memory:
        chain.write(out, engine=engine, **options)
    assert memory.growth <= plan.driver_nbytes + SLACK_NBYTES
    assert plan.driver_nbytes <= options.get("memory_limit", 2**40) * 1.1


@pytest.mark.parametrize("group_rows", [20_000, 200_000])
def test_measured_is_at_most_projected_of_a_table(engine, tmp_path, group_rows):
    """Its row groups are decoded in batches; those that are large are not even read at once."""
    rng = np.random.default_rng(0)
    with pq.ParquetWriter(tmp_path / "C.parquet", TABLE, use_dictionary=False) as file:
        for _ in range(200_000 // group_rows):
            values = rng.integers(-3, 4, (group_rows, 200)).astype(np.float32)
            file.write_table(pa.table({"v": lists(values)}, TABLE))
    del values
    left = rng.integers(-3, 4, (300, 200)).astype(np.float32)
    chain = raymm.chain([left, f"{tmp_path / 'C.parquet'}.T"])
    out = raymm.Npy(tmp_path / "D.npy")
    plan = chain.plan(out, engine=engine)
    pa.default_memory_pool().release_unused()
    with PeakMemory() as memory:
        chain.write(out, engine=engine)
    assert memory.growth <= plan.driver_nbytes + SLACK_NBYTES
    assert plan.driver_nbytes < 200_000_000


def test_a_result_in_memory_is_there_once(engine):
    left, right = np.ones((700, 8), np.float32), np.ones((8, 60_000), np.float32)
    chain = raymm.chain([left, right])
    plan = chain.plan(engine=engine)
    with PeakMemory() as memory:
        product = chain.compute(engine=engine)
    assert product.nbytes == 168_000_000
    assert product.nbytes <= plan.driver_nbytes
    assert memory.growth <= plan.driver_nbytes + SLACK_NBYTES
    assert memory.growth < 2 * product.nbytes
