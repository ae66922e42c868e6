import numpy as np
import pytest

from raymm.errors import DTypeError, ShapeError
from raymm.operands import Operand, check_chain, check_dtype, format_shape, result_dtype


def operand(name, *shape, dtype=np.float64):
    return Operand(name, shape, np.dtype(dtype), (8,) * len(shape))


def test_transpose_turns_shape_and_strides():
    turned = Operand("A", (2, 3), np.dtype("f4"), (12, 4), "a.npy").T
    assert (turned.shape, turned.strides, turned.path) == ((3, 2), (4, 12), "a.npy")


def test_nbytes_is_a_python_int_of_any_size():
    assert operand("C", 100, 3_600_000, dtype=np.float32).nbytes == 1_440_000_000
    assert operand("C", 2**40, 2**40).nbytes == 2**83


@pytest.mark.parametrize(("shape", "text"), [((), "()"), ((3,), "(3,)"), ((3, 4), "(3, 4)")])
def test_format_shape(shape, text):
    assert format_shape(shape) == text


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 3), (4, 5), (5, 6)], r"A \(2, 3\) @ B \(4, 5\): 3 != 4"),
        ([(2, 3), (3, 4), (5, 6)], r"B \(3, 4\) @ C \(5, 6\): 4 != 5"),
        ([(2, 1), (3, 3)], r"A \(2, 1\) @ B \(3, 3\): 1 != 3"),
        ([(2, 3), (1, 3)], r"A \(2, 3\) @ B \(1, 3\): 3 != 1"),
        ([(3,), (4, 5)], r"A \(3,\) @ B \(4, 5\): 3 != 4"),
        ([(2, 3), (3,), (3, 2)], r"B \(3,\) has 1 axes, a matrix is needed"),
        ([(2, 3), (3, 2, 2)], r"B \(3, 2, 2\) has 3 axes"),
        ([(), (3, 2)], r"A \(\) has 0 axes"),
    ],
)
def test_chains_that_do_not_fit(shapes, message):
    operands = tuple(operand(name, *shape) for name, shape in zip("ABC", shapes, strict=False))
    with pytest.raises(ShapeError, match=message) as caught:
        check_chain(operands)
    for each in operands:
        assert str(each) in str(caught.value)


def test_chains_that_fit():
    for shapes in ([(2, 3), (3, 4)], [(3,), (3, 4)], [(3,), (3,)], [(2, 0), (0, 4)]):
        check_chain(tuple(operand("A", *shape) for shape in shapes))


@pytest.mark.parametrize("dtype", ["O", "U4", "S4", "M8[s]", "m8[s]", "V8", [("a", "f4")]])
def test_dtypes_without_a_product(dtype):
    with pytest.raises(DTypeError, match=r"^C has dtype"):
        check_dtype(np.dtype(dtype), "C")


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ("??", np.int64),
        ("?B", np.uint64),
        ("?b", np.int64),
        ("bb", np.int64),
        ("BB", np.uint64),
        ("Bb", np.int64),
        ("Ql", np.int64),
        ("ee", np.float16),
        ("ef", np.float32),
        ("eB", np.float16),
        ("eH", np.float32),
        ("fi", np.float64),
        ("f?", np.float32),
        ("fd", np.float64),
        ("fF", np.complex64),
        ("dF", np.complex128),
        (">f", np.float32),
    ],
)
def test_result_dtype(dtypes, expected):
    parts = ["f4", ">f4"] if dtypes == ">f" else list(dtypes)
    found = result_dtype(tuple(operand("A", 2, 2, dtype=part) for part in parts))
    assert found == np.dtype(expected)
    assert found.isnative
