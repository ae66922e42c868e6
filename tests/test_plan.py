import dataclasses
import json
import sys

import numpy as np
import pytest

import raymm
from raymm.errors import DTypeError, MemoryLimitError, PlanError
from raymm.request import Request, Resources
from raymm.sinks import Array
from tests.doubles import RaisingEngine
from tests.planning import LOCAL, MAIN_JOB, plan_of

RAY = Resources("ray", 4, 2, 2**34, 2**32, 1, 0, False)


def test_sizes_of_the_main_job():
    plan = plan_of(MAIN_JOB)
    assert plan.output_nbytes == 43_200_000_000
    assert plan.input_nbytes == 4 * (3000 * 100 + 100 * 100 + 100 * 3_600_000)
    assert plan.flop == 2 * 3000 * 100 * 100 + 2 * 3000 * 100 * 3_600_000
    assert plan.flop_per_column == 600_000
    assert plan.tiles == len(plan.grid)
    assert plan.cost.resident_nbytes == 3000 * 100 * 4


def test_the_table_names_what_will_happen():
    text = str(plan_of(MAIN_JOB))
    for part in (
        "A (3000, 100) @ B (100, 100) @ C (100, 3600000)",
        "(3000, 3600000) float32",
        "43.2 GB",
        "D.npy",
        "(A @ B) @ C",
        "1 TB free",
        "local",
    ):
        assert part in text, text
    labels = [line.split()[0] for line in text.splitlines()]
    for label in ("product", "result", "output", "order", "tiles", "engine", "memory", "limit"):
        assert label in labels


def test_the_order_in_which_a_tile_is_multiplied():
    assert dict(plan_of(((3000, 5), (5, 100), (100, 3_600_000))).rows())["order"] == "A @ (B @ C)"
    tall = plan_of(((3_600_000, 100), (100, 100), (100, 3000)))
    assert "tall" in str(tall)
    assert tall.output_nbytes == 43_200_000_000


def test_to_dict_is_json_and_plain():
    plan = plan_of(MAIN_JOB, dtype=np.float16, memory_limit=10**9)
    found = json.loads(json.dumps(plan.to_dict()))
    assert found == plan.to_dict()
    assert found["shape"] == [3000, 3_600_000]
    assert found["dtype"] == "float16"
    assert found["compute_dtype"] == "float32"
    assert found["output_nbytes"] == 21_600_000_000
    assert found["grid"]["tile_columns"] == plan.grid.tile_columns
    assert found["operands"][2] == {"name": "C", "shape": [100, 3_600_000], "dtype": "float16"}


def test_planning_costs_nothing_whatever_the_number_of_tiles():
    plan = plan_of(((2, 2), (2, 10**15)), tile_columns=1)
    assert plan.tiles == 10**15
    assert len(str(plan)) < 3000
    assert len(json.dumps(plan.to_dict())) < 3000


def test_a_plan_reads_nothing_and_starts_nothing(tmp_path):
    huge = np.broadcast_to(np.float32(1), (100, 3_600_000))
    out = tmp_path / "D.npy"
    plan = raymm.chain([huge[:, :3000].T, huge[:, :100], huge]).plan(out, engine=RaisingEngine())
    assert plan.output_nbytes == 43_200_000_000
    assert list(tmp_path.iterdir()) == []


def test_planning_loads_no_heavy_module(run_python):
    run_python(
        "import sys, numpy as np, raymm\n"
        "a = np.ones((3, 3))\n"
        "print(raymm.chain([a, a, a]).plan('D.npy', engine='local'))\n"
        "assert not {'ray', 'torch', 'pyarrow'} & set(sys.modules)\n"
    )
    assert "numpy" in sys.modules


def test_memory_of_the_driver():
    local = plan_of(((100, 10), (10, 10_000)), Array())
    assert local.driver_nbytes >= 100 * 10_000 * 4 + local.worker_nbytes
    ray = plan_of(((100, 10), (10, 10_000)), Array(), resources=RAY)
    assert 100 * 10_000 * 4 <= ray.driver_nbytes < local.driver_nbytes
    file = plan_of(((100, 10), (10, 10_000)), resources=RAY)
    assert file.driver_nbytes < 100 * 10_000 * 4


def test_memory_in_the_object_store():
    shapes = ((100, 10), (10, 1_000_000))
    assert plan_of(shapes).store_nbytes == 0
    factors = 100 * 10 * 4
    from_memory = plan_of(shapes, resources=RAY, tile_columns=1000)
    assert from_memory.store_nbytes == pytest.approx(10 * 1000 * 4 * 8 + factors, rel=0.05)
    from_file = plan_of(shapes, resources=RAY, path="C.npy", tile_columns=1000)
    assert from_file.store_nbytes == factors
    back = plan_of(shapes, Array(), resources=RAY, path="C.npy", tile_columns=1000)
    assert back.store_nbytes == pytest.approx(100 * 1000 * 4 * 8 + factors, rel=0.05)
    deeper = plan_of(shapes, resources=RAY, tile_columns=1000, max_in_flight=4)
    assert deeper.store_nbytes > from_memory.store_nbytes


def test_a_result_that_memory_cannot_hold():
    plan = plan_of(MAIN_JOB, Array(), memory_limit=8_000_000_000)
    with pytest.raises(MemoryLimitError) as caught:
        plan.check_memory()
    assert caught.value.projected_nbytes >= 43_200_000_000
    assert caught.value.memory_limit == 8_000_000_000
    for part in ("43,200,000,000 bytes", "43.2 GB", "8,000,000,000 bytes", "out="):
        assert part in str(caught.value)


def test_a_result_that_the_machine_cannot_hold():
    plan = plan_of(MAIN_JOB, Array())
    with pytest.raises(MemoryLimitError, match="are free") as caught:
        plan.check_memory()
    assert caught.value.memory_limit == LOCAL.memory_nbytes


def test_a_file_needs_no_memory_for_the_result():
    plan_of(MAIN_JOB).check_memory()
    plan_of(MAIN_JOB, memory_limit=500_000_000).check_memory()


def test_a_worker_that_the_machine_cannot_hold():
    small = dataclasses.replace(LOCAL, memory_nbytes=10_000_000)
    with pytest.raises(MemoryLimitError, match="one worker needs") as caught:
        plan_of(MAIN_JOB, resources=small).check_memory()
    assert caught.value.projected_nbytes > 10_000_000


def test_fewer_blocks_are_under_way_where_memory_is_short():
    plenty = plan_of(MAIN_JOB)
    short = plan_of(MAIN_JOB, memory_limit=plenty.cost.worker_nbytes(1))
    assert short.grid == plenty.grid
    assert short.lanes == 1 < plenty.lanes


@pytest.mark.parametrize("name", ["read", "multiply", "write", "dispatch"])
def test_the_limit_is_the_slowest_stage(name):
    shapes, sink, options = {
        "read": (((1, 100), (100, 1_000_000)), None, {}),
        "multiply": (((10_000, 5000), (5000, 10_000)), None, {}),
        "write": (MAIN_JOB, None, {}),
        "dispatch": (((2, 2), (2, 100_000)), None, {"resources": RAY, "tile_columns": 1}),
    }[name]
    plan = plan_of(shapes, sink, **options)
    assert plan.limit == name
    assert plan.predicted_seconds >= plan.seconds[name]


def test_workers_shorten_what_they_share():
    few = plan_of(MAIN_JOB, resources=dataclasses.replace(RAY, workers=1, threads=1))
    many = plan_of(MAIN_JOB, resources=dataclasses.replace(RAY, workers=16, threads=1))
    assert many.seconds["multiply"] < few.seconds["multiply"]


def test_notes():
    assert "exact" in str(plan_of(((2, 2), (2, 9)), dtype=np.int32))
    assert "TF32" in str(plan_of(((2, 2), (2, 9)), precision="tf32"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fast"}, "precision='fast'"),
        ({"tile_columns": 0}, "tile_columns=0"),
        ({"tile_columns": -3}, "tile_columns=-3"),
        ({"max_in_flight": 0}, "max_in_flight=0"),
    ],
    ids=["precision", "none", "negative", "in flight"],
)
def test_requests_that_make_no_sense(options, message):
    with pytest.raises(PlanError, match=message):
        Request(**options)


def test_a_dtype_that_cannot_follow():
    with pytest.raises(DTypeError, match="complex cannot become real"):
        raymm.chain([np.ones((2, 2), np.complex64)] * 2).plan(dtype=np.float32)
