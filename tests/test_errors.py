import inspect
import pickle

import pytest

from raymm import errors
from raymm.tiles import Tile

CLASSES = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if issubclass(value, errors.RaymmError)
]
OTHER_BASES = {
    errors.PlanError: ValueError,
    errors.ShapeError: ValueError,
    errors.DTypeError: TypeError,
    errors.MemoryLimitError: MemoryError,
    errors.SourceError: OSError,
    errors.SinkError: OSError,
    errors.SinkExistsError: FileExistsError,
    errors.ExecutionError: RuntimeError,
    errors.WorkerStartError: RuntimeError,
    errors.TileError: RuntimeError,
    errors.ResultOverflowError: OverflowError,
}


@pytest.mark.parametrize(
    ("child", "parent"),
    [
        (errors.PlanError, errors.RaymmError),
        (errors.ShapeError, errors.PlanError),
        (errors.DTypeError, errors.PlanError),
        (errors.MemoryLimitError, errors.PlanError),
        (errors.SourceError, errors.RaymmError),
        (errors.SinkError, errors.RaymmError),
        (errors.SinkExistsError, errors.SinkError),
        (errors.ExecutionError, errors.RaymmError),
        (errors.WorkerStartError, errors.ExecutionError),
        (errors.TileError, errors.ExecutionError),
        (errors.ResultOverflowError, errors.ExecutionError),
        (errors.VerificationError, errors.RaymmError),
        *OTHER_BASES.items(),
    ],
)
def test_tree(child, parent):
    assert issubclass(child, parent)


@pytest.mark.parametrize("kind", CLASSES)
def test_pickle_keeps_type_message_and_attributes(kind):
    arguments = {
        errors.MemoryLimitError: ("too much", 43_200_000_000, 8_000_000_000),
        errors.TileError: ("tile 3 failed", Tile(3, 12, 16), "cpu", 4),
    }.get(kind, ("what was asked, what was found",))
    error = kind(*arguments)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error) == arguments[0]
    assert vars(copy) == vars(error)


@pytest.mark.parametrize("kind", CLASSES)
def test_pickle_of_an_error_without_arguments(kind):
    assert type(pickle.loads(pickle.dumps(kind()))) is kind


@pytest.mark.parametrize("kind", [errors.SourceError, errors.SinkError, errors.SinkExistsError])
def test_errno_is_kept(kind):
    error = pickle.loads(pickle.dumps(kind(28, "no space for D.npy")))
    assert (error.errno, error.strerror) == (28, "no space for D.npy")


def test_figures_of_a_memory_limit():
    error = pickle.loads(pickle.dumps(errors.MemoryLimitError("too much", 2, 1)))
    assert (error.projected_nbytes, error.memory_limit) == (2, 1)


def test_facts_of_a_tile():
    error = pickle.loads(pickle.dumps(errors.TileError("failed", Tile(3, 12, 16), "cpu", 4)))
    assert (error.tile, error.device, error.attempts) == (Tile(3, 12, 16), "cpu", 4)
