import pickle
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.sparse as sp

from raymm.errors import PlanError, ShapeError, SourceError
from raymm.kernels.buffers import Buffer
from raymm.kernels.sparse import SparseMatrix
from raymm.sources import Source, open_source
from raymm.sources.blocks import read_blocks
from raymm.sources.selection import select
from raymm.sources.sparse import load_factor
from tests.contracts import SourceContract

FORMATS = ["bsr", "coo", "csc", "csr", "dia", "dok", "lil"]


@dataclass(frozen=True)
class Dense:
    """A sparse source whose tiles are compared as arrays."""

    source: Source

    def __getattr__(self, name):
        value = getattr(self.source, name)
        return Dense(value) if isinstance(value, Source) else value

    def __getstate__(self):
        return {"source": self.source}

    def __setstate__(self, state):
        object.__setattr__(self, "source", state["source"])

    def read(self, start, stop, buffer):
        read = self.source.read(start, stop, buffer)
        assert isinstance(read, SparseMatrix)
        return read.dense()

    def cut(self, start, stop):
        return Dense(self.source.cut(start, stop))

    def as_row(self):
        return Dense(self.source.as_row())

    def as_column(self):
        return Dense(self.source.as_column())


def entries(values):
    """Return an array as a sparse one that stores about half of it."""
    kept = np.array(values)
    kept[np.arange(kept.size).reshape(kept.shape) % 3 == 1] = 0
    return kept


class SparseContract(SourceContract):
    @pytest.fixture
    def values(self):
        return entries(np.arange(5 * 7, dtype=np.float64).reshape(5, 7) - 11)


@pytest.mark.parametrize("form", FORMATS)
class TestArrays(SparseContract):
    @pytest.fixture
    def source(self, form):
        def make(values):
            array = sp.coo_array(values)
            if form != "coo" and values.ndim == 2 and 0 not in values.shape:
                array = array.asformat(form)
            return Dense(open_source(array, "A"))

        return make


@pytest.mark.parametrize("form", FORMATS)
def test_matrices_and_arrays_of_every_format(form):
    values = entries(np.arange(12.0).reshape(3, 4) - 5)
    for kind in (sp.coo_matrix, sp.coo_array):
        given = kind(values).asformat(form)
        source = open_source(given, "A")
        assert source.operand.nonzeros == given.nnz
        assert source.operand.is_held
        np.testing.assert_array_equal(source.load(), values)
        np.testing.assert_array_equal(source.T.load(), values.T)
        np.testing.assert_array_equal(given.toarray(), values)  # as it was


class TestTensors(SparseContract):
    @pytest.fixture(params=["coo", "uncoalesced", "csr", "csc"])
    def source(self, request):
        import torch  # noqa: PLC0415  two seconds, for these tests only

        def make(values):
            tensor = torch.from_numpy(np.array(values))
            if request.param == "uncoalesced":
                halves = tensor.to_sparse() * 0.5
                places = torch.cat([halves.coalesce().indices()] * 2, 1)
                stored = torch.cat([halves.coalesce().values()] * 2)
                tensor = torch.sparse_coo_tensor(
                    places, stored, tensor.shape, check_invariants=True
                )
                assert tensor._nnz() == 2 * halves._nnz()
            elif request.param == "coo" or values.ndim == 1 or 0 in values.shape:
                tensor = tensor.to_sparse()
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch calls these a beta
                    layout = getattr(torch, f"sparse_{request.param}")
                    tensor = tensor.to_sparse(layout=layout)
            return Dense(open_source(tensor, "A"))

        return make


class TestTorchKinds:
    @pytest.fixture(autouse=True)
    def _torch(self):
        import torch  # noqa: PLC0415  two seconds, for these tests only

        self.torch = torch

    @pytest.mark.filterwarnings("ignore:Sparse")
    @pytest.mark.parametrize("layout", ["sparse_bsr", "sparse_bsc"])
    def test_blocks_of_values(self, layout):
        values = self.torch.arange(24.0).reshape(4, 6)
        tensor = values.to_sparse(layout=getattr(self.torch, layout), blocksize=(2, 3))
        np.testing.assert_array_equal(open_source(tensor, "A").load(), values.numpy())

    def test_bfloat16_gradients_and_conjugates(self):
        half = self.torch.tensor([[0, 1.5], [-2, 0]], dtype=self.torch.bfloat16).to_sparse()
        source = open_source(half, "A")
        assert source.operand.bfloat16 is True
        np.testing.assert_array_equal(
            source.load(), np.array([[0, 1.5], [-2, 0]], np.float32), strict=True
        )
        tensor = self.torch.eye(2).to_sparse().requires_grad_()
        np.testing.assert_array_equal(open_source(tensor, "A").load(), np.eye(2))
        assert tensor.requires_grad
        turned = self.torch.tensor([[0, 1 + 2j]]).to_sparse().conj()
        np.testing.assert_array_equal(open_source(turned, "A").load(), [[0, 1 - 2j]])

    def test_what_is_no_matrix_of_numbers_is_refused(self):
        hybrid = self.torch.ones(2, 3, 4).to_sparse(2)
        with pytest.raises(ShapeError, match="3 axes"):
            open_source(hybrid, "A")
        hybrid = self.torch.ones(2, 3).to_sparse(1)
        with pytest.raises(PlanError, match="to_dense"):
            open_source(hybrid, "A")
        with pytest.raises(PlanError, match="meta"):
            open_source(self.torch.eye(2).to_sparse().to("meta"), "A")


def test_more_axes_are_refused():
    with pytest.raises(ShapeError, match="3 axes"):
        open_source(sp.coo_array(np.ones((2, 2, 2))), "A")


def test_a_cut_is_as_large_as_its_entries():
    matrix = sp.random_array((50, 100_000), density=0.001, rng=0, format="csc")
    source = open_source(matrix, "C")
    cut = source.cut(40_000, 50_000)
    entries_nbytes = matrix[:, 40_000:50_000].nnz * 12 + 10_001 * 8
    assert len(pickle.dumps(cut)) < entries_nbytes + 2000
    read = cut.read(40_500, 41_000, Buffer())
    np.testing.assert_array_equal(read.dense(), matrix[:, 40_500:41_000].toarray())


def test_reading_a_csc_array_copies_no_entries():
    matrix = sp.random_array((5, 1000), density=0.1, rng=0, format="csc")
    read = open_source(matrix, "C").read(10, 900, Buffer())
    assert np.shares_memory(read.data, matrix.data)
    turned = open_source(matrix.T, "C").T.read(10, 900, Buffer())
    assert np.shares_memory(turned.data, matrix.data)


@pytest.mark.parametrize("axis", [0, 1])
def test_selections_stay_sparse(axis):
    values = entries(np.arange(60.0).reshape(5, 12))
    source = open_source(sp.csr_array(values), "C")
    index = np.array([3, 0, 3, 4])
    for wanted in (index, slice(4, None, -2)):
        chosen = select(source, axis, wanted)
        expected = values[wanted] if axis == 0 else values[:, wanted]
        read = chosen.read(1, expected.shape[1], Buffer())
        assert isinstance(read, SparseMatrix)
        np.testing.assert_array_equal(read.dense(), expected[:, 1:])
        np.testing.assert_array_equal(chosen.load(), expected)
        cut = pickle.loads(pickle.dumps(chosen.cut(1, 3)))
        np.testing.assert_array_equal(cut.read(1, 3, Buffer()).dense(), expected[:, 1:3])
        np.testing.assert_array_equal(chosen.T.load(), expected.T)


def test_blocks_of_a_sparse_source_are_dense_and_small():
    values = entries(np.arange(200.0).reshape(5, 40))
    source, seen = open_source(sp.coo_array(values), "C"), np.zeros((5, 40))
    for row, column, block in read_blocks(source, 3, 31, 200, Buffer()):
        assert block.nbytes <= 200
        seen[row : row + block.shape[0], column : column + block.shape[1]] += block
    np.testing.assert_array_equal(seen[:, 3:31], values[:, 3:31])


def test_a_factor_knows_where_it_has_entries():
    values = np.array([[0, np.nan], [2.0, 0]])
    factor = load_factor(open_source(sp.csr_array(values), "A"))
    np.testing.assert_array_equal(factor.values, values)
    np.testing.assert_array_equal(factor.structure, [[False, True], [True, False]])
    assert load_factor(open_source(sp.csr_array(np.ones((2, 2))), "A")).structure is None
    assert load_factor(open_source(values, "A")).structure is None


@pytest.mark.parametrize("form", ["csr", "csc", "bsr", "lil"])
@pytest.mark.parametrize("is_turned", [False, True])
def test_damaged_indices_never_reach_a_conversion_of_scipy(form, is_turned):
    matrix = sp.csr_array(np.eye(3)).asformat(form)
    if form == "lil":
        matrix.rows[1] = [7]
    else:
        matrix.indices[0] = 7  # SciPy would write beyond the end of its arrays
    source = open_source(matrix, "C")
    with pytest.raises(SourceError, match=r"C: .* index 7 along an axis of length 3"):
        (source.T if is_turned else source).read(0, 3, Buffer())


def test_pointers_beyond_the_entries_never_reach_a_conversion_of_scipy():
    matrix = sp.csr_array(np.eye(3))
    matrix.indptr[1] = 900
    with pytest.raises(SourceError, match="C: the pointers"):
        open_source(matrix, "C").read(0, 3, Buffer())
