import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import DTypeError, PlanError
from raymm.kernels.buffers import Buffer
from raymm.sources import open_source
from raymm.sources.memory import from_array, from_tensor
from tests.contracts import SourceContract


class TestArray(SourceContract):
    @pytest.fixture(params=["C", "F", "negative", "strided", "readonly", "unaligned"])
    def source(self, request):
        def make(values):
            return from_array(LAYOUTS[request.param](values), "C")

        return make


class TestTensor(SourceContract):
    @pytest.fixture(params=["plain", "transposed", "with gradient"])
    def source(self, request):
        import torch  # noqa: PLC0415  two seconds, for this test only

        def make(values):
            tensor = torch.from_numpy(values.copy())
            if request.param == "transposed" and values.ndim == 2:
                tensor = torch.from_numpy(values.T.copy()).t()
            if request.param == "with gradient":
                tensor.requires_grad_()
            return from_tensor(tensor, "C")

        return make


class TestBfloat16(SourceContract):
    @pytest.fixture
    def values(self):
        return (np.arange(5 * 7, dtype=np.float32).reshape(5, 7) - 11) / 4

    @pytest.fixture
    def source(self):
        import torch  # noqa: PLC0415  two seconds, for this test only

        def make(values):
            return from_tensor(torch.from_numpy(values).to(torch.bfloat16), "C")

        return make


def readonly(values):
    values = values.copy()
    values.flags.writeable = False
    return values


def unaligned(values):
    memory = np.empty(values.nbytes + 3, np.uint8)
    view = np.ndarray(values.shape, values.dtype, memory.data, 3)
    view[...] = values
    return view


LAYOUTS = {
    "C": np.ascontiguousarray,
    "F": np.asfortranarray,
    "negative": lambda values: np.flip(np.flip(values).copy()),
    "strided": lambda values: np.repeat(values, 2, axis=-1)[..., ::2],
    "readonly": readonly,
    "unaligned": unaligned,
}


def test_an_array_is_read_as_a_view():
    values = np.arange(12.0).reshape(3, 4)
    assert np.shares_memory(from_array(values, "C").read(1, 3, Buffer()), values)


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_cut_holds_only_its_columns_in_the_order_they_lie_in(order):
    values = np.asarray(np.arange(5 * 1000.0).reshape(5, 1000), order=order)
    cut = from_array(values, "C").cut(300, 310)
    assert cut.array.shape == (5, 10)
    assert cut.array.base is None
    assert cut.array.flags.c_contiguous == (order == "C")
    assert cut.array.flags.f_contiguous == (order == "F")


def test_big_endian_values_keep_their_dtype_and_meaning():
    values = np.array([[1, 2], [3, 4]], ">i2")
    source = from_array(values, "C")
    assert source.operand.dtype == np.dtype(">i2")
    np.testing.assert_array_equal(source.read(1, 2, Buffer()), [[2], [4]])


def test_masked_arrays_are_refused():
    with pytest.raises(DTypeError, match="masked array"):
        open_source(np.ma.masked_array([[1.0]], [[True]]), "A")


@pytest.mark.parametrize("values", [np.array([[None]]), np.array([["a"]]), [[object()]]], ids=repr)
def test_arrays_that_hold_no_numbers_are_refused(values):
    with pytest.raises(DTypeError, match="A has dtype"):
        open_source(values, "A")


class WithArray:
    """What offers `__array__`, with lengths that are NumPy's integers."""

    shape = (np.int64(2), np.int64(3))

    def __array__(self, dtype=None, copy=None):
        return np.arange(6.0).reshape(self.shape)


@pytest.mark.parametrize("value", [[[0, 1, 2], [3, 4, 5]], ((0, 1, 2), (3, 4, 5)), WithArray()])
def test_what_becomes_an_array(value):
    np.testing.assert_array_equal(open_source(value, "A").load(), [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (iter([1, 2]), "iterator"),
        (map(abs, [1]), "iterator"),
        ((each for each in [1]), "iterator"),
        (object(), "object"),
        (None, "NoneType"),
        ({1: 2}, "dict"),
    ],
    ids=["iterator", "map", "generator", "object", "none", "dict"],
)
def test_what_is_no_operand(value, message):
    with pytest.raises(PlanError, match=message):
        open_source(value, "A")


def test_a_source_is_itself():
    source = from_array(np.ones((2, 2)), "A")
    assert open_source(source, "B") is source


class TestTorchKinds:
    @pytest.fixture(autouse=True)
    def torch(self):
        import torch  # noqa: PLC0415  two seconds, for these tests only

        self.torch = torch

    def test_conjugated_and_negated_views(self):
        values = self.torch.tensor([[1 + 2j, 3 - 1j]])
        np.testing.assert_array_equal(open_source(values.conj(), "A").load(), [[1 - 2j, 3 + 1j]])
        imaginary = values.conj().imag
        assert imaginary.is_neg()
        np.testing.assert_array_equal(open_source(imaginary, "A").load(), [[-2, 1]])

    def test_bfloat16_is_float32_to_the_plan(self):
        source = open_source(self.torch.ones(2, 3, dtype=self.torch.bfloat16), "A")
        assert source.operand.dtype == np.float32
        assert source.operand.bfloat16 is True
        assert source.load().dtype == np.float32

    def test_bfloat16_values_that_are_no_numbers(self):
        values = self.torch.tensor([[np.nan, np.inf, -np.inf, -0.0]], dtype=self.torch.bfloat16)
        loaded = open_source(values, "A").load()
        np.testing.assert_array_equal(loaded, [[np.nan, np.inf, -np.inf, 0.0]])
        assert np.signbit(loaded[0, 3])

    def test_gradients_are_left_alone(self):
        tensor = self.torch.ones(2, 2, requires_grad=True)
        open_source(tensor, "A").load()
        assert tensor.requires_grad
        assert tensor.grad is None

    @pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
    def test_eight_bit_floats_are_refused(self, name):
        tensor = self.torch.ones(2, 2).to(getattr(self.torch, name))
        with pytest.raises(DTypeError, match="float8"):
            open_source(tensor, "A")

    def test_quantized_tensors_are_refused(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch is about to drop them
            quantized = self.torch.quantize_per_tensor(
                self.torch.ones(2, 2), 0.1, 0, self.torch.qint8
            )
        with pytest.raises(DTypeError, match="quantized"):
            open_source(quantized, "A")

    def test_parameters_are_tensors(self):
        parameter = self.torch.nn.Parameter(self.torch.ones(2, 2))
        np.testing.assert_array_equal(open_source(parameter, "A").load(), np.ones((2, 2)))


@given(st.data())
def test_any_view_of_an_array_reads_as_itself(data):
    values = np.arange(6 * 8.0).reshape(6, 8)
    rows, columns = data.draw(slices(6)), data.draw(slices(8))
    view = values[rows, columns]
    view = view.T if data.draw(st.booleans()) else view
    start = data.draw(st.integers(0, view.shape[1]))
    stop = data.draw(st.integers(start, view.shape[1]))
    source = from_array(view, "C")
    np.testing.assert_array_equal(source.read(start, stop, Buffer()), view[:, start:stop])
    cut = source.cut(start, stop)
    np.testing.assert_array_equal(cut.read(start, stop, Buffer()), view[:, start:stop])


def slices(length):
    place = st.integers(-length - 1, length + 1) | st.none()
    return st.builds(slice, place, place, st.sampled_from([None, 1, 2, 3, -1, -2]))
