import pickle

import numpy as np
import pytest

import raymm
from raymm.errors import DTypeError, PlanError, ShapeError
from raymm.sinks import Array
from tests.contracts import SinkContract
from tests.doubles import make_spec

OUTS = {
    "new": lambda shape, dtype: None,
    "C": lambda shape, dtype: np.full(shape, 77, dtype),
    "F": lambda shape, dtype: np.full(shape, 77, dtype, order="F"),
    "strided": lambda shape, dtype: np.full([2 * each for each in shape], 77, dtype)[
        (*(slice(None, None, 2),) * len(shape), ...)
    ],
    "negative": lambda shape, dtype: np.full(shape, 77, dtype)[
        (*(slice(None, None, -1),) * len(shape), ...)
    ],
    "transposed": lambda shape, dtype: np.full(shape[::-1], 77, dtype).T,
}


@pytest.fixture
def folder(tmp_path):
    return tmp_path


class TestArray(SinkContract):
    @pytest.fixture(params=OUTS)
    def sink(self, request):
        def make(shape, dtype):
            self.out = OUTS[request.param](shape, dtype)
            return Array(self.out)

        return make

    @pytest.fixture
    def read_back(self):
        def read(sink, result):
            assert self.out is None or result is self.out
            return np.array(result)

        return read


def test_what_lies_between_the_entries_of_a_strided_out_is_left_alone(local_engine):
    whole = np.full((6, 10), 77.0)
    right = np.arange(15.0).reshape(3, 5)
    raymm.multi_dot([np.eye(3), right], out=whole[::2, ::2], engine=local_engine)
    np.testing.assert_array_equal(whole[::2, ::2], right)
    whole[::2, ::2] = 77
    assert (whole == 77).all()


@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (3, 5, 1), (15,), (), (3, 1)], ids=str)
def test_out_of_another_shape(shape, local_engine):
    with pytest.raises(ShapeError, match=r"out has shape .*\(3, 5\)"):
        raymm.multi_dot([np.eye(3), np.ones((3, 5))], out=np.empty(shape), engine=local_engine)


@pytest.mark.parametrize("shape", [(4,), (6,), (5, 1), (1, 5), ()], ids=str)
def test_out_of_another_shape_for_a_vector(shape, local_engine):
    with pytest.raises(ShapeError, match="out has shape"):
        raymm.multi_dot([np.ones(3), np.ones((3, 5))], out=np.empty(shape), engine=local_engine)


def test_out_of_another_dtype(local_engine):
    out = np.zeros((3, 5), np.float32)
    with pytest.raises(DTypeError, match="dtype='float32'"):
        raymm.multi_dot([np.eye(3), np.ones((3, 5))], out=out, engine=local_engine)
    assert not out.any()
    raymm.multi_dot([np.eye(3), np.ones((3, 5))], out=out, dtype=np.float32, engine=local_engine)
    assert (out == 1).all()


def test_out_that_cannot_be_written(local_engine):
    out = np.zeros((3, 5))
    out.flags.writeable = False
    with pytest.raises(DTypeError, match="read-only"):
        raymm.multi_dot([np.eye(3), np.ones((3, 5))], out=out, engine=local_engine)


def test_out_in_the_other_byte_order_is_refused_or_right(local_engine):
    out = np.zeros((3, 5), ">f8")
    try:
        raymm.multi_dot([np.eye(3), np.ones((3, 5))], out=out, engine=local_engine)
    except DTypeError:
        assert not out.any()
    else:
        assert (out == 1).all()


def test_overwrites_what_shares_its_memory():
    whole = np.zeros((4, 6))
    sink = Array(whole[:, :3])
    assert sink.overwrites(None, whole) is True
    assert sink.overwrites(None, whole.T[::-1]) is True
    assert sink.overwrites(None, np.zeros((4, 6))) is False
    assert Array().overwrites(None, whole) is False


def test_overwrites_the_file_that_it_maps(tmp_path):
    path = tmp_path / "D.npy"
    np.save(path, np.zeros((4, 6)))
    sink = Array(np.load(path, mmap_mode="r+"))
    assert sink.overwrites(str(path), None) is True
    assert sink.overwrites(str(tmp_path / "E.npy"), None) is False


def test_the_array_does_not_travel():
    sink = Array(np.zeros((1000, 1000)))
    sink.open(make_spec((1000, 1000)), False)
    assert len(pickle.dumps(sink)) < 10_000


def test_an_out_whose_entries_share_memory_is_refused():
    out = np.lib.stride_tricks.as_strided(np.zeros(5), (3, 3), (8, 8))
    with pytest.raises(PlanError, match="share memory"):
        raymm.multi_dot([np.eye(3), np.eye(3)], out=out)
    gaps = np.zeros((6, 9))[::-2, ::3]
    assert np.array_equal(raymm.multi_dot([np.eye(3), np.eye(3)], out=gaps), np.eye(3))
