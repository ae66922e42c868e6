"""The one loop: open, dispatch, commit or abort."""

import numpy as np
import pytest

import raymm
from raymm.errors import (
    DTypeError,
    MemoryLimitError,
    PlanError,
    ResultOverflowError,
    ShapeError,
    SinkError,
    SinkExistsError,
    SourceError,
    TileError,
    VerificationError,
)
from raymm.events import RunFinished, RunStarted, TileFinished, WorkerReady
from raymm.sources.memory import ArraySource
from tests.contracts import names_in
from tests.doubles import (
    CountingCallback,
    CountingSource,
    FlakySink,
    FlakySource,
    InterruptingCallback,
    RaisingEngine,
    RecordingSink,
)

LEFT, RIGHT = np.arange(6.0).reshape(3, 2), np.arange(40.0).reshape(2, 20)


@pytest.fixture
def chain():
    return raymm.chain([LEFT, RIGHT])


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "D.npy"


class TestEvents:
    def test_a_run_from_beginning_to_end(self, chain, out, local_engine):
        callback = CountingCallback()
        chain.write(out, tile_columns=6, engine=local_engine, progress=callback)
        (started,) = callback.of(RunStarted)
        assert (started.tiles, started.nbytes, started.engine) == (4, 3 * 20 * 8, "local")
        (ready,) = callback.of(WorkerReady)
        assert (ready.worker, ready.device) == ("local", "cpu")
        tiles = callback.of(TileFinished)
        assert [event.done for event in tiles] == [1, 2, 3, 4]
        assert sorted(event.tile.start for event in tiles) == [0, 6, 12, 18]
        assert sum(event.nbytes for event in tiles) == started.nbytes
        finished = callback.events[-1]
        assert isinstance(finished, RunFinished)
        assert finished.shape == (3, 20)
        assert finished.nbytes == started.nbytes
        assert (finished.engine, finished.workers, finished.retries) == ("local", 1, 0)
        assert finished.threads == local_engine.threads
        assert finished.limit in ("read", "multiply", "write")
        assert finished.residual is None
        assert finished.bytes_per_second > 0

    def test_the_output_is_complete_when_the_run_has_finished(self, chain, out, local_engine):
        seen = []

        def callback(event):
            seen.append((type(event), out.exists()))

        chain.write(out, engine=local_engine, progress=callback)
        assert [exists for kind, exists in seen if kind is not RunFinished] == [False] * (
            len(seen) - 1
        )
        assert seen[-1] == (RunFinished, True)

    def test_the_residual_of_a_verified_run(self, chain, out, local_engine):
        callback = CountingCallback()
        chain.write(out, engine=local_engine, progress=callback, verify=True)
        (finished,) = callback.of(RunFinished)
        assert 0 <= finished.residual <= 1


class TestOutputs:
    def test_several_in_one_pass(self, chain, out, local_engine):
        memory, file, committed = chain.run(
            raymm.Array(), out, RecordingSink(), tile_columns=7, engine=local_engine
        )
        np.testing.assert_array_equal(memory, LEFT @ RIGHT)
        np.testing.assert_array_equal(file, LEFT @ RIGHT)
        assert committed == "committed"

    def test_none_is_refused(self, chain):
        with pytest.raises(PlanError, match="run\\(\\) needs an output"):
            chain.run()

    def test_c_is_read_once_for_several(self, out, local_engine):
        source = CountingSource(RIGHT, "C")
        raymm.chain([LEFT, source]).run(
            raymm.Array(), out, RecordingSink(), tile_columns=5, engine=local_engine
        )
        assert source.reads == [(0, 5), (5, 10), (10, 15), (15, 20)]

    def test_the_same_twice_is_refused(self, chain, out):
        with pytest.raises(PlanError, match="two outputs are the same"):
            chain.run(out, out, engine=RaisingEngine())
        array = np.zeros((3, 20))
        with pytest.raises(PlanError, match="two outputs are the same"):
            chain.run(array, array.T[::-1].T, engine=RaisingEngine())
        assert names_in(out.parent) == []


class TestOutputThatIsAnOperand:
    @pytest.fixture
    def operand(self, out):
        np.save(out, np.eye(20))
        return out

    @pytest.mark.parametrize("link", ["same", "soft", "hard", "spelled", "folder", "transposed"])
    def test_file(self, operand, tmp_path, link):
        target = operand
        if link == "soft":
            target = tmp_path / "link.npy"
            target.symlink_to(operand)
        if link == "hard":
            target = tmp_path / "link.npy"
            target.hardlink_to(operand)
        if link == "spelled":
            target = operand.parent / ".." / "out" / "D.npy"
        if link == "folder":
            (tmp_path / "alias").symlink_to(operand.parent)
            target = tmp_path / "alias" / "D.npy"
        given = f"{operand}.T" if link == "transposed" else operand
        before = operand.read_bytes()
        with pytest.raises(PlanError, match="would overwrite the operand"):
            raymm.multi_dot([RIGHT, given], out=target, overwrite=True, engine=RaisingEngine())
        assert operand.read_bytes() == before

    def test_map_of_the_file(self, operand):
        whole = np.load(operand, mmap_mode="r")
        with pytest.raises(PlanError, match="would overwrite"):
            raymm.multi_dot(
                [RIGHT[:, :10], whole[::2]], out=operand, overwrite=True, engine=RaisingEngine()
            )

    def test_array_into_the_map_of_an_operand(self, operand):
        whole = np.load(operand, mmap_mode="r+")
        with pytest.raises(PlanError, match="would overwrite"):
            raymm.multi_dot([np.ones((2, 20)), operand], out=whole[:2], engine=RaisingEngine())

    def test_array(self):
        square = np.eye(4)
        for alias in (square, square.T, square[::-1], square.view()):
            with pytest.raises(PlanError, match="would overwrite"):
                raymm.multi_dot([np.ones((4, 4)), square], out=alias, engine=RaisingEngine())
        np.testing.assert_array_equal(square, np.eye(4))

    def test_tensor(self):
        import torch  # noqa: PLC0415  two seconds, for this test only

        square = torch.eye(4)
        with pytest.raises(PlanError, match="would overwrite"):
            raymm.multi_dot([torch.ones(4, 4), square], out=square.numpy(), engine=RaisingEngine())


class TestNothingStarts:
    """What can be known before is refused before: no engine, no file."""

    @pytest.fixture(autouse=True)
    def nothing(self, out):
        yield
        assert names_in(out.parent) == []

    def refused(self, error, operands, out, **options):
        callback = CountingCallback()
        with pytest.raises(error) as caught:
            raymm.multi_dot(operands, out=out, engine=RaisingEngine(), progress=callback, **options)
        assert callback.events == []
        return caught.value

    def test_shapes(self, out):
        self.refused(ShapeError, [LEFT, LEFT], out)

    def test_dtypes(self, out):
        self.refused(DTypeError, [LEFT, RIGHT.astype(object)], out)
        self.refused(DTypeError, [LEFT, RIGHT], out, dtype=np.int32)

    def test_integers_that_might_overflow(self, out):
        huge = np.full((2, 2), 2**62)
        self.refused(DTypeError, [huge, huge], out)

    def test_memory(self, out):
        self.refused(MemoryLimitError, [LEFT, RIGHT], None, memory_limit=100)
        self.refused(MemoryLimitError, [LEFT, RIGHT], out, memory_limit=10)

    def test_missing_inputs(self, out, tmp_path):
        self.refused(SourceError, [LEFT, tmp_path / "missing.npy"], out)

    def test_missing_folder(self, out):
        self.refused(SinkError, [LEFT, RIGHT], out.parent / "missing" / "D.npy")

    def test_outputs_that_do_not_fit(self, out):
        self.refused(ShapeError, [LEFT, RIGHT], np.zeros((3, 21)))
        self.refused(DTypeError, [LEFT, RIGHT], np.zeros((3, 20), np.float32))

    def test_requests(self, out):
        self.refused(PlanError, [LEFT, RIGHT], out, tile_columns=0)
        self.refused(PlanError, [LEFT, RIGHT], out, precision="fast")
        self.refused(PlanError, [LEFT, RIGHT], out, memory_limit="much")
        self.refused(PlanError, [LEFT, RIGHT], out, max_in_flight=0)
        self.refused(PlanError, [LEFT, RIGHT], out.with_suffix(".dat"))
        self.refused(PlanError, [LEFT, RIGHT], "s3://bucket/D.npy")

    def test_no_list_of_operands(self, out):
        for operands in (LEFT, "A.npy", iter([LEFT, RIGHT]), {0: LEFT}, None):
            self.refused(PlanError, operands, out)
        for operands in ([], [LEFT], ()):
            self.refused(PlanError, operands, out)


class TestFailures:
    """After an error or an interrupt all outputs are given up, and the first error is told."""

    def assert_given_up(self, sink, out):
        assert sink.calls[0] == "open"
        assert sink.calls[-1] == "abort"
        assert sink.calls.count("abort") == 1
        assert "commit" not in sink.calls
        assert "detach True" not in sink.calls
        assert names_in(out.parent) == []

    @pytest.mark.parametrize("kind", [RunStarted, WorkerReady, TileFinished])
    @pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
    def test_interrupted_at_an_event(self, chain, out, local_engine, kind, error):
        sink = RecordingSink()
        callback = InterruptingCallback(kind, 1, error)
        with pytest.raises(error):
            chain.run(out, sink, tile_columns=2, engine=local_engine, progress=callback)
        self.assert_given_up(sink, out)
        assert sum(sink.tiles.values()) <= 5

    def test_a_tile_that_fails(self, out, local_engine):
        source = FlakySource(RIGHT, "C", broken=7)
        sink = RecordingSink()
        with pytest.raises(TileError, match="columns 6:8") as caught:
            raymm.chain([LEFT, source]).run(out, sink, tile_columns=2, engine=local_engine)
        assert caught.value.tile.index == 3
        assert isinstance(caught.value.__cause__, OSError)
        self.assert_given_up(sink, out)

    def test_a_sink_that_fails(self, chain, out, local_engine):
        sink = FlakySink(3, SinkError(5, "the disk is gone"))
        with pytest.raises(SinkError, match="the disk is gone"):
            chain.run(out, sink, tile_columns=2, engine=local_engine)
        self.assert_given_up(sink, out)

    def test_a_value_that_does_not_fit(self, out, local_engine):
        with pytest.raises(ResultOverflowError):
            raymm.multi_dot(
                [np.array([[100]]), np.array([[1, 1, 5]])],
                out=out,
                dtype=np.int8,
                tile_columns=1,
                engine=local_engine,
            )
        assert names_in(out.parent) == []

    def test_a_second_output_that_cannot_be_opened(self, chain, out, local_engine):
        first = RecordingSink()
        with pytest.raises(SinkError):
            chain.run(first, out, out.parent / "missing" / "E.npy", engine=RaisingEngine())
        assert first.calls == ["open", "abort"]
        assert names_in(out.parent) == []

    def test_a_commit_that_fails(self, chain, out, local_engine):
        class Uncommitted(RecordingSink):
            def commit(self):
                raise SinkError(5, "cannot commit")

        sink = Uncommitted()
        with pytest.raises(SinkError, match="cannot commit"):
            chain.run(sink, out, engine=local_engine)
        assert sink.calls[-1] == "abort"
        assert names_in(out.parent) == []

    def test_a_verification_that_fails(self, chain, out, local_engine, monkeypatch):
        def check(*_, **__):
            raise VerificationError("not the product")

        monkeypatch.setattr("raymm.run.check_product", check)
        with pytest.raises(VerificationError):
            chain.write(out, engine=local_engine, verify=True)
        assert names_in(out.parent) == []

    def test_an_output_that_is_damaged_is_found_before_it_appears(self, out, local_engine):
        class Damaging(raymm.Array):
            def view(self):
                view = super().view()
                view[1, 3] += 1
                return view

        with pytest.raises(VerificationError):
            raymm.chain([LEFT, RIGHT]).run(out, Damaging(), engine=local_engine, verify=True)
        assert names_in(out.parent) == []

    def test_an_old_output_survives(self, out, local_engine):
        np.save(out, np.eye(3))
        source = FlakySource(RIGHT, "C", broken=7)
        with pytest.raises(TileError):
            raymm.chain([LEFT, source]).write(out, overwrite=True, engine=local_engine)
        np.testing.assert_array_equal(np.load(out), np.eye(3))
        assert names_in(out.parent) == ["D.npy"]

    def test_the_engine_works_on(self, chain, out, local_engine):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                chain.write(
                    out,
                    tile_columns=1,
                    engine=local_engine,
                    progress=InterruptingCallback(TileFinished, 2),
                )
            np.testing.assert_array_equal(chain.compute(engine=local_engine), LEFT @ RIGHT)


def test_what_the_driver_receives_is_not_asked_of_sinks_in_this_process(chain, local_engine):
    # Blocks of a memory output are written where they are: RecordingSink.receive would raise.
    memory, _ = chain.run(raymm.Array(), RecordingSink(), engine=local_engine)
    np.testing.assert_array_equal(memory, LEFT @ RIGHT)


def test_small_factors_are_read_once(local_engine):
    left, middle = CountingSource(LEFT, "A"), CountingSource(np.eye(2), "B")
    raymm.chain([left, middle, RIGHT]).compute(tile_columns=1, engine=local_engine)
    assert left.reads == [(0, 2)]
    assert middle.reads == [(0, 2)]


def test_integers_read_c_a_second_time_only_if_its_dtype_proves_nothing(local_engine):
    proven = CountingSource(np.ones((2, 4), np.int16), "C")
    raymm.chain([np.ones((1, 2), np.int16), proven]).compute(engine=local_engine)
    assert len(proven.reads) == 1
    scanned = CountingSource(np.ones((2, 4), np.int64), "C")
    raymm.chain([np.ones((1, 2), np.int64), scanned]).compute(engine=local_engine)
    assert len(scanned.reads) == 2


def test_a_source_may_be_used_in_several_places(local_engine):
    square = ArraySource(np.array([[0.0, 1.0], [2.0, 0.0]]), "A")
    product = raymm.chain([square, square, square]).compute(engine=local_engine)
    np.testing.assert_array_equal(product, np.linalg.matrix_power(square.array, 3))


def test_an_existing_output_is_refused_before_an_operand_is_read(tmp_path):
    (tmp_path / "D.npy").write_bytes(b"precious")
    broken = FlakySource(np.ones((2, 3)), "A", broken=0, error=AssertionError("it was read"))
    with pytest.raises(SinkExistsError):
        raymm.chain([broken, np.ones((3, 4))]).write(tmp_path / "D.npy", engine="local")
    assert (tmp_path / "D.npy").read_bytes() == b"precious"
