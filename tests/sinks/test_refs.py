"""D kept in a cluster, as one matrix."""

import contextlib
import gc
import os
import pickle
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import raymm
from raymm import keeping
from raymm.errors import ExecutionError, MemoryLimitError, PlanError, ShapeError, SourceError
from raymm.events import RunFinished, WorkerReady
from raymm.sinks.base import Block
from raymm.sinks.refs import Refs
from raymm.tiles import Grid
from tests.contracts import block_of
from tests.doubles import CountingCallback, make_spec

LEFT = np.arange(12.0).reshape(3, 4)
RIGHT = np.arange(4 * 40.0).reshape(4, 40)[:, ::-1]
WHOLE = LEFT @ RIGHT
TILE = 7


class TestSink:
    """What a worker does, without Ray."""

    @pytest.mark.parametrize("on", ["store", "worker"])
    @pytest.mark.parametrize("is_transposed", [False, True])
    def test_blocks_in_any_order_become_tiles(self, on, is_transposed):
        values = np.random.default_rng(0).normal(size=(6, 8))
        grid = Grid(*(values.T if is_transposed else values).shape, 3, 2, 4)
        spec = make_spec((6, 8), is_transposed=is_transposed, grid=grid)
        canonical = values.T if is_transposed else values
        sink = Refs(on)
        sink.open(spec, False)
        worker = pickle.loads(pickle.dumps(sink))
        worker.attach()
        for tile in grid:
            for bounds in [*reversed(list(grid.blocks(tile))), *grid.blocks(tile)]:
                values = block_of(canonical, bounds, sink.layout(spec))
                assert worker.write(Block(tile, bounds, values)) is None
            sink.receive(worker.finish(tile))
        places = sink.commit().places
        assert sorted(places) == list(range(len(grid)))
        for tile in grid:
            place = places[tile.index]
            kept = keeping.find(place.key, tile.index) if on == "worker" else place.ref
            np.testing.assert_array_equal(kept, canonical[:, tile.start : tile.stop].T)
            assert kept.flags.c_contiguous
        worker.detach(True)
        assert (keeping.find(places[0].key, 0) is not None) == (on == "worker")
        keeping.drop(places[0].key)

    def test_a_pass_that_fails_leaves_nothing_with_the_worker(self):
        sink = Refs("worker")
        grid = Grid(2, 3, 3, 3, 2)
        sink.open(make_spec((2, 3), grid=grid), False)
        piece = sink.finish(grid[0])
        sink.receive(piece)
        key = sink.commit().places[0].key
        assert keeping.find(key, 0) is not None
        sink.detach(False)
        assert keeping.find(key, 0) is None

    def test_refused(self):
        with pytest.raises(PlanError, match="on='disk'"):
            Refs("disk")
        with pytest.raises(PlanError, match=r"keeps matrices in blocks, the result is \(3,\)"):
            Refs().layout(make_spec((3,)))


class TestWithoutACluster:
    @pytest.mark.parametrize("on", ["store", "worker"])
    @pytest.mark.parametrize("engine", ["auto", "local"])
    def test_there_is_nothing_to_keep_it(self, engine, on):
        with pytest.raises(PlanError, match=r"Refs\(\) needs a cluster .*RayEngine"):
            raymm.multi_dot([LEFT, RIGHT], out=Refs(on), engine=engine)

    def test_a_local_engine(self, local_engine):
        with pytest.raises(PlanError, match="needs a cluster"):
            raymm.chain([LEFT, RIGHT]).plan(Refs(), engine=local_engine)

    def test_an_engine_that_ends_with_the_call(self):
        with pytest.raises(PlanError, match="needs a cluster"):
            raymm.multi_dot([LEFT, RIGHT], out=Refs(), engine="ray")


@pytest.fixture(params=["store", "worker"])
def on(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["wide", "tall"])
def pair(request):
    """Two factors and their product, wide or tall."""
    factors = [RIGHT.T, LEFT.T] if request.param else [LEFT, RIGHT]
    return factors, factors[0] @ factors[1]


@pytest.fixture
def matrix(pair, on, ray_engine):
    """The product in the cluster."""
    factors, _ = pair
    made = raymm.multi_dot(factors, out=Refs(on), tile_columns=TILE, engine=ray_engine)
    yield made
    made.free()


@pytest.mark.ray
class TestShardedMatrix:
    def test_it_looks_like_an_array(self, matrix, pair, on):
        _, whole = pair
        assert isinstance(matrix, raymm.ShardedMatrix)
        assert (matrix.shape, matrix.dtype, matrix.ndim) == (whole.shape, whole.dtype, 2)
        assert (matrix.nbytes, len(matrix), matrix.on) == (whole.nbytes, len(whole), on)
        assert matrix.num_blocks == 6
        assert str(matrix.shape) in repr(matrix)
        found = matrix.to_numpy()
        np.testing.assert_array_equal(found, whole, strict=True)
        assert found.flags.writeable
        np.testing.assert_array_equal(np.asarray(matrix), whole)
        np.testing.assert_array_equal(np.asarray(matrix, np.float32), whole.astype(np.float32))
        np.testing.assert_array_equal(list(matrix.T), list(whole.T))
        with pytest.raises(TypeError, match="belongs to the process that made it"):
            pickle.dumps(matrix)

    @pytest.mark.parametrize(
        "key",
        [
            (1, 2),
            2,
            (slice(None), slice(3, 20, 4)),
            (slice(None, None, -1), [2, 0, 2]),
            ([0, 2], [1, 1]),
            slice(1, 1),
            (Ellipsis, -1),
        ],
        ids=str,
    )
    def test_parts(self, matrix, pair, key):
        _, whole = pair
        np.testing.assert_array_equal(matrix[key], whole[key], strict=True)
        np.testing.assert_array_equal(matrix.T[key], whole.T[key], strict=True)

    def test_blocks_in_order(self, matrix, pair):
        _, whole = pair
        blocks = list(matrix.blocks())
        assert [(tile.start, tile.stop) for tile, _ in blocks] == [
            (start, min(start + TILE, 40)) for start in range(0, 40, TILE)
        ]
        axis = 0 if len(whole) == 40 else 1
        np.testing.assert_array_equal(np.concatenate([block for _, block in blocks], axis), whole)
        assert all(block.flags.writeable for _, block in blocks)
        turned = [block for _, block in matrix.T.blocks()]
        np.testing.assert_array_equal(np.concatenate(turned, 1 - axis), whole.T)

    def test_map_blocks(self, matrix, pair):
        _, whole = pair
        assert sum(matrix.map_blocks(np.sum)) == whole.sum()
        shapes = matrix.map_blocks(lambda block: (block.shape, block.flags.writeable))
        assert shapes == [(block.shape, False) for _, block in matrix.blocks()]
        doubled = matrix.map_blocks(lambda block: (2 * block).astype("f4"), keep=True)
        assert (doubled.shape, doubled.dtype, doubled.on) == (whole.shape, "f4", matrix.on)
        np.testing.assert_array_equal(doubled.to_numpy(), (2 * whole).astype("f4"))
        axis = 0 if len(whole) == 3 else 1
        total = matrix.map_blocks(lambda block: block.sum(axis, keepdims=True), keep=True)
        np.testing.assert_array_equal(total.to_numpy(), whole.sum(axis, keepdims=True))
        np.testing.assert_array_equal(total.T[...], whole.sum(axis, keepdims=True).T)

    def test_functions_that_fail(self, matrix):
        with pytest.raises(ZeroDivisionError):
            matrix.map_blocks(lambda block: 1 // 0)
        with pytest.raises(ShapeError, match="to stay in the cluster it must be a matrix with 7"):
            matrix.map_blocks(np.sum, keep=True)

    @pytest.mark.parametrize("form", ["as it is", "turned"])
    def test_an_operand_of_a_further_chain(self, matrix, pair, engine, form):
        _, whole = pair
        rows, columns = np.eye(3, len(whole)), np.ones((whole.shape[1], 2))
        if form == "turned":
            product = raymm.multi_dot(
                [columns.T, raymm.transpose(matrix), rows.T], tile_columns=5, engine=engine
            )
            np.testing.assert_array_equal(product.T, rows @ whole @ columns)
        else:
            product = raymm.multi_dot([rows, matrix, columns], tile_columns=5, engine=engine)
            np.testing.assert_array_equal(product, rows @ whole @ columns)

    def test_an_operand_that_nobody_else_holds(self, on, ray_engine):
        kept = raymm.multi_dot([LEFT, RIGHT], out=Refs(on), tile_columns=TILE, engine=ray_engine)
        chain = raymm.chain([np.eye(3), kept])
        del kept
        gc.collect()
        product = chain.compute(engine=ray_engine, tile_columns=5)
        np.testing.assert_array_equal(product, WHOLE)

    def test_several_outputs(self, on, ray_engine, tmp_path):
        file, kept, memory = raymm.chain([LEFT, RIGHT]).run(
            tmp_path / "D.npy", Refs(on), raymm.Array(), tile_columns=TILE, engine=ray_engine
        )
        for found in (file, kept, memory):
            np.testing.assert_array_equal(found, WHOLE)
        with pytest.raises(PlanError, match="once"):
            raymm.chain([LEFT, RIGHT]).run(Refs(on), Refs(on), engine=ray_engine)

    def test_verified(self, pair, on, ray_engine):
        callback = CountingCallback()
        raymm.multi_dot(
            pair[0],
            out=Refs(on),
            tile_columns=TILE,
            engine=ray_engine,
            verify=True,
            progress=callback,
        ).free()
        assert 0 <= callback.of(RunFinished)[0].residual <= 1

    def test_empty_products(self, on, ray_engine):
        for factors in ([LEFT, RIGHT[:, :0]], [LEFT[:0], RIGHT]):
            kept = raymm.multi_dot(factors, out=Refs(on), engine=ray_engine)
            assert kept.shape == (factors[0] @ factors[1]).shape
            np.testing.assert_array_equal(kept.to_numpy(), factors[0] @ factors[1])
            assert kept[:, :0].shape == (kept.shape[0], 0)

    def test_too_large_for_memory(self, matrix, monkeypatch):
        class Little:
            available = 100

        monkeypatch.setattr(psutil, "virtual_memory", Little)
        with pytest.raises(MemoryLimitError, match=r"takes 960 B, and 100 B of memory"):
            matrix.to_numpy()

    def test_freed(self, pair, on, ray_engine):
        made = raymm.multi_dot(pair[0], out=Refs(on), tile_columns=TILE, engine=ray_engine)
        turned = made.T
        made.free()
        made.free()
        for use in (turned.to_numpy, lambda: made[0, 0], lambda: made.map_blocks(np.sum)):
            with pytest.raises(ExecutionError, match="freed"):
                use()


def worker_pids(engine):
    """Return the process of each worker."""
    callback = CountingCallback()
    raymm.multi_dot([LEFT, RIGHT], engine=engine, tile_columns=1, progress=callback)
    return [event.pid for event in callback.of(WorkerReady)]


def end_process(pid):
    """Kill a process and wait until it is gone."""
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)
    process.wait(30)


@pytest.mark.ray
class TestLosses:
    def test_blocks_of_a_worker_that_died_are_computed_again(self, matrix, pair, on, ray_engine):
        _, whole = pair
        for pid in worker_pids(ray_engine):
            end_process(pid)
        np.testing.assert_array_equal(matrix[1], whole[1])
        assert matrix.map_blocks(np.sum) == [block.sum() for _, block in matrix.blocks()]
        np.testing.assert_array_equal(matrix.to_numpy(), whole)

    def test_while_blocks_are_mapped_and_after(self, pair, ray_engine):
        made = raymm.multi_dot(pair[0], out=Refs("worker"), tile_columns=TILE, engine=ray_engine)
        mapped = made.map_blocks(lambda block: -block, keep=True)
        end_process(worker_pids(ray_engine)[0])
        assert sum(made.map_blocks(np.sum)) == pair[1].sum()
        np.testing.assert_array_equal(mapped.to_numpy(), -pair[1])

    @pytest.mark.parametrize("is_known", [False, True])
    def test_an_operand_whose_worker_is_gone(self, pair, ray_engine, is_known):
        made = raymm.multi_dot(pair[0], out=Refs("worker"), tile_columns=TILE, engine=ray_engine)
        end_process(worker_pids(ray_engine)[0])
        if is_known:
            raymm.multi_dot([LEFT, RIGHT], engine=ray_engine, tile_columns=1)
        product = raymm.multi_dot([made, np.ones(made.shape[1])], engine=ray_engine)
        np.testing.assert_array_equal(product, pair[1].sum(axis=1))

    def test_a_chain_that_finds_a_block_lost_says_what_to_do(self, pair, ray_engine):
        made = raymm.multi_dot(pair[0], out=Refs("worker"), tile_columns=TILE, engine=ray_engine)
        operands = [made, np.ones(made.shape[1])]
        chain = raymm.chain(operands)
        for pid in worker_pids(ray_engine):
            end_process(pid)
        with pytest.raises(SourceError, match=r"D in the workers' memory: block \d is lost .*anew"):
            chain.compute(engine=ray_engine)
        product = raymm.multi_dot(operands, engine=ray_engine)
        np.testing.assert_array_equal(product, pair[1].sum(axis=1))

    def test_an_object_that_is_lost(self, ray_engine, ray_cluster):
        made = raymm.multi_dot([LEFT, RIGHT], out=Refs(), tile_columns=TILE, engine=ray_engine)
        shards = made._shards
        shards._places[2] = shards._places[2]._replace(ref=lost_object(ray_cluster))
        np.testing.assert_array_equal(made.to_numpy(), WHOLE)
        shards._places[2] = shards._places[2]._replace(ref=lost_object(ray_cluster))
        assert sum(made.map_blocks(np.sum)) == WHOLE.sum()

    def test_nobody_to_compute_it_again(self, ray_room):
        made = raymm.multi_dot([LEFT, RIGHT], out=Refs(), tile_columns=TILE)
        np.testing.assert_array_equal(made.to_numpy(), WHOLE)  # the driver owns it
        shards = made._shards
        shards._places[2] = shards._places[2]._replace(ref=lost_object(ray_room))
        with pytest.raises(ExecutionError, match="block 2 is lost, and no engine is open"):
            made.to_numpy()

    def test_a_mapped_block_is_mapped_again_without_an_engine(self, ray_room):
        made = raymm.multi_dot([LEFT, RIGHT], out=Refs(), tile_columns=TILE)
        mapped = made.map_blocks(np.negative, keep=True)
        shards = mapped._shards
        shards._places[2] = shards._places[2]._replace(ref=lost_object(ray_room))
        np.testing.assert_array_equal(mapped.to_numpy(), -WHOLE)

    @pytest.mark.slow
    def test_blocks_of_a_node_that_is_lost(self, run_python):
        """Beyond a worker's death: a node goes, and the driver's node has never held a block."""
        with tempfile.TemporaryDirectory(prefix="r") as folder:  # short: sockets lie in it
            Path(folder, "ray").mkdir()
            printed = run_python(LOSE_A_NODE, TMPDIR=folder)
        lines = [line for line in printed.splitlines() if line.startswith("found")]
        assert lines == [
            "found on the driver's node: 0 of 15",
            "found 600000.0 and 600000.0",
            "found 600000000.0 and 600000000.0",
        ]


LOSE_A_NODE = """
import numpy as np, ray, raymm
from ray.cluster_utils import Cluster
health = {"initial_delay_ms": 0, "period_ms": 1000, "timeout_ms": 5000, "failure_threshold": 3}
config = {f"health_check_{name}": value for name, value in health.items()}
head = {"num_cpus": 0, "object_store_memory": 80_000_000, "_system_config": config}
cluster = Cluster(initialize_head=True, head_node_args=head)
nodes = [cluster.add_node(num_cpus=1, object_store_memory=200_000_000) for _ in range(2)]
cluster.wait_for_nodes()
ray.init(address=cluster.address, log_to_driver=False)
A, C = np.ones((100, 20), np.float32), np.ones((20, 300_000), np.float32)
with raymm.RayEngine(num_workers=2) as engine:
    chain = raymm.chain([A, C])
    stored = chain.write(raymm.Refs(), tile_columns=20_000, engine=engine)
    kept = chain.write(raymm.Refs("worker"), tile_columns=20_000, engine=engine)
    refs = [place.ref for place in stored._shards._places.values()]
    where = [each["node_ids"] for each in ray.experimental.get_object_locations(refs).values()]
    here = ray.get_runtime_context().get_node_id()
    count = sum(here in each for each in where)
    print(f"found on the driver's node: {count} of 15")
    lost = next(node for node in nodes if node.node_id == where[0][0])
    cluster.remove_node(lost, allow_graceful=False)
    print("found", stored[:, ::1000].sum(), "and", kept[:, ::1000].sum())
    total = sum(map(float, stored.map_blocks(np.sum)))
    print("found", total, "and", kept.to_numpy().sum(dtype="f8"))
ray.shutdown()
cluster.shutdown()
"""


def lost_object(ray):
    """Return a reference to an object that is lost with its owner."""

    @ray.remote(num_cpus=0)
    class Owner:
        def make(self):
            return [ray.put(np.ones(100_000))]

    owner = Owner.remote()
    (ref,) = ray.get(owner.make.remote())
    ray.kill(owner)
    while True:
        try:
            ray.get(ref, timeout=30)
        except ray.exceptions.ObjectLostError:
            return ref


@pytest.mark.ray
class TestLife:
    def test_the_store_outlives_the_engine_in_a_cluster_of_the_caller(self, ray_room):
        with raymm.RayEngine(num_workers=2) as engine:
            made = raymm.multi_dot([LEFT, RIGHT], out=Refs(), tile_columns=TILE, engine=engine)
        np.testing.assert_array_equal(made.to_numpy(), WHOLE)
        assert sum(made.map_blocks(np.sum)) == WHOLE.sum()

    def test_workers_keep_blocks_until_the_engine_is_closed(self, ray_room):
        with raymm.RayEngine(num_workers=2) as engine:
            made = raymm.multi_dot([LEFT, RIGHT], out=Refs("worker"), engine=engine)
            np.testing.assert_array_equal(made.to_numpy(), WHOLE)
        for use in (made.to_numpy, lambda: made[0], lambda: made.map_blocks(np.sum)):
            with pytest.raises(ExecutionError, match=r"engine whose workers held .* is closed"):
                use()
        with pytest.raises(PlanError, match='on="worker"'):
            raymm.multi_dot([LEFT, RIGHT], out=Refs("worker"))

    def test_workers_forget_what_nobody_holds(self, ray_engine, ray_cluster):
        made = raymm.multi_dot([LEFT, RIGHT], out=Refs("worker"), engine=ray_engine)
        key = made._shards._places[0].key
        made.free()
        assert held(ray_engine, ray_cluster, key) == 0
        made = raymm.multi_dot([LEFT, RIGHT], out=Refs("worker"), engine=ray_engine)
        key = made._shards._places[0].key
        assert held(ray_engine, ray_cluster, key) >= 1
        del made
        gc.collect()
        raymm.multi_dot([LEFT, RIGHT], engine=ray_engine)
        assert held(ray_engine, ray_cluster, key) == 0

    def test_a_ray_that_has_ended(self, run_python):
        printed = run_python(
            """
import numpy as np, raymm
with raymm.RayEngine(num_workers=1) as engine:
    made = raymm.multi_dot([np.eye(3), np.ones((3, 50))], out=raymm.Refs(), engine=engine)
    print(made.to_numpy().sum())
for use in (made.to_numpy, lambda: made[0]):
    try:
        use()
    except raymm.ExecutionError as error:
        print(error)
import ray
print(ray.is_initialized())
"""
        )
        assert printed.count("has ended") == 2
        assert printed.startswith("150.0")
        assert printed.endswith("False\n")


def held(engine, ray, key):
    """Return how many workers keep the first block of a matrix."""
    calls = [
        actor.map_kept.remote(key, 0, lambda block: 1, "") for actor in engine._actors.values()
    ]
    count = 0
    for call in calls:
        with contextlib.suppress(raymm.SourceError):
            count += ray.get(call)
    return count


@pytest.mark.ray
class TestRoom:
    def test_d_must_fit_into_the_object_store(self, ray_engine):
        C = np.broadcast_to(np.float32(1), (4, 10_000_000))
        chain = raymm.chain([np.ones((3, 4), np.float32), C])
        with pytest.raises(MemoryLimitError, match=r"120 MB in the object store") as caught:
            chain.write(Refs(), engine=ray_engine, tile_columns=100_000)
        assert caught.value.projected_nbytes > 120_000_000 > caught.value.memory_limit
        table = str(chain.plan(Refs("worker"), engine=ray_engine))
        assert "the workers' memory: 120 MB in the cluster" in table
        assert "D lives as long as the engine is open" in table

    def test_other_matrices_count(self, ray_engine):
        C = np.ones((1, 5_000_000), np.float32)
        chain = raymm.chain([np.ones((2, 1), np.float32), C])
        first = chain.write(Refs(), engine=ray_engine, tile_columns=250_000)
        deadline = time.monotonic() + 30  # Ray counts with a delay
        while ray_engine.resources().used_store_nbytes < first.nbytes:
            assert time.monotonic() < deadline
        with pytest.raises(MemoryLimitError, match="free other matrices"):
            chain.write(Refs(), engine=ray_engine, tile_columns=250_000)
        first.free()
        second = chain.write(Refs(), engine=ray_engine, tile_columns=250_000)
        assert second.map_blocks(np.sum) == [2 * 250_000] * 20

    def test_workers_must_have_the_memory(self, ray_engine):
        C = np.broadcast_to(np.float32(1), (4, 20_000_000))
        chain = raymm.chain([np.ones((3, 4), np.float32), C])
        with pytest.raises(MemoryLimitError, match="one worker needs"):
            chain.write(
                Refs("worker"), engine=ray_engine, memory_limit="60MB", tile_columns=100_000
            )

    def test_the_driver_fetches_nothing(self, ray_engine, ray_cluster, monkeypatch):
        fetched = []
        get = ray_cluster.get

        def counted(refs, **options):
            found = get(refs, **options)
            fetched.append(len(pickle.dumps(found)))
            return found

        monkeypatch.setattr(ray_cluster, "get", counted)
        C = np.ones((4, 1_000_000), np.float32)
        kept = raymm.multi_dot(
            [np.ones((3, 4), np.float32), C], out=Refs(), tile_columns=50_000, engine=ray_engine
        )
        assert fetched
        assert sum(fetched) < 100_000
        assert kept.map_blocks(np.sum) == [4 * 3 * 50_000] * 20
        assert sum(fetched) < 200_000


@pytest.mark.ray
class TestDataset:
    @pytest.mark.parametrize("is_tall", [False, True])
    def test_a_row_for_each_index_of_the_cut_axis(self, ray_room, on, is_tall):
        factors = [RIGHT.T, LEFT.T] if is_tall else [LEFT, RIGHT]
        with raymm.RayEngine(num_workers=1, threads_per_worker=1) as engine:
            made = raymm.multi_dot(factors, out=Refs(on), tile_columns=TILE, engine=engine)
            dataset = made.to_ray_dataset()
            assert dataset.columns() == ["index", "D"]
            rows = dataset.take_all()
            assert [row["index"] for row in rows] == list(range(40))
            np.testing.assert_array_equal(np.stack([row["D"] for row in rows]), WHOLE.T)
            again = raymm.multi_dot([dataset, np.eye(3)], engine="local")
            np.testing.assert_array_equal(again, WHOLE.T)

    def test_no_numbers_of_arrow(self, ray_engine):
        made = raymm.multi_dot([LEFT * 1j, RIGHT], out=Refs(), engine=ray_engine)
        with pytest.raises(raymm.DTypeError, match="complex128"):
            made.to_ray_dataset()
