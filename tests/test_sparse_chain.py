"""Chains with sparse operands, from the operand to the output."""

import numpy as np
import pytest
import scipy.sparse as sp

import raymm
from raymm import order as chain_order
from raymm.errors import DTypeError, MemoryLimitError, VerificationError
from raymm.kernels import staging
from raymm.sinks import npy, runs
from tests.doubles import NullSink
from tests.measuring import PeakMemory
from tests.tolerances import assert_product, exact_integers

NAN = np.nan


def sparse(shape, density, dtype=np.float32, seed=0, form="csc"):
    """Return a sparse array of small numbers."""
    rng = np.random.default_rng(seed)
    made = sp.random_array(shape, density=density, rng=rng, format=form)
    made.data = (made.data * 9 - 4).round(2) if np.dtype(dtype).kind in "fc" else made.data * 9
    return made.astype(dtype)


def factors(dtype=np.float32, rows=30, inner=12):
    rng = np.random.default_rng(7)
    return [(rng.normal(size=shape) * 3).astype(dtype) for shape in ((rows, inner), (inner, inner))]


class Seen(NullSink):
    """Keeps the blocks as they come; for engines in this process."""

    def __init__(self):
        self.blocks = []

    def write(self, block):
        held = block.nonzero is not None
        self.blocks.append((block.bounds, block.nonzero, np.array(block.compact), held))


@pytest.mark.parametrize("density", [0, 0.001, 0.02, 0.5, 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.float16, np.int16])
def test_any_density_and_dtype(density, dtype, tmp_path):
    left, middle = factors(np.float32 if dtype == np.float16 else dtype)
    huge = sparse((12, 3000), density, np.float32 if dtype == np.float16 else dtype)
    options = {"dtype": np.float16} if dtype == np.float16 else {}
    chain = raymm.chain([left, middle, huge])
    every = [left, middle, huge.toarray()]
    for columns in (None, 700):
        for sink in (
            raymm.Npy(tmp_path / "C.npy"),
            raymm.Npy(tmp_path / "F.npy", order="F"),
            None,
            np.full((30, 3000), 9, np.float16 if options else chain.dtype, order="F"),
        ):
            computed = chain.write(sink, tile_columns=columns, overwrite=True, **options)
            if dtype == np.int16:
                np.testing.assert_array_equal(computed, exact_integers(every).astype(np.int64))
            else:
                assert_product(
                    computed, every, compute=np.complex64 if dtype == np.complex64 else np.float32
                )


def test_a_tall_product_is_its_transpose():
    left, middle = factors()
    huge = sparse((3000, 12), 0.02, form="csr")
    computed = raymm.multi_dot([huge, middle.T, left.T])
    assert_product(computed, [huge.toarray(), middle.T, left.T])


def test_sinks_see_the_columns_that_have_entries(local_engine):
    left = factors()[0]
    huge = sparse((12, 2000), 0.005)
    sink = Seen()
    raymm.chain([left, huge]).write(sink, engine=local_engine, tile_columns=300)
    wanted = np.flatnonzero(np.diff(huge.indptr))
    found = []
    for bounds, nonzero, compact, _ in sink.blocks:
        rows = left[bounds.row_start : bounds.row_stop]
        assert_product(compact, [rows, huge.toarray()[:, nonzero]])
        assert ((nonzero >= bounds.column_start) & (nonzero < bounds.column_stop)).all()
        if bounds.row_start == 0:
            found += nonzero.tolist()
    np.testing.assert_array_equal(np.sort(found), wanted)


def test_a_full_tile_takes_the_ordinary_path(local_engine):
    left, huge = factors()[0], sparse((12, 400), 0.5)
    sink = Seen()
    raymm.chain([left, huge]).write(sink, engine=local_engine)
    assert not any(is_compact for *_, is_compact in sink.blocks)


def test_both_paths_give_the_same(monkeypatch):
    left, middle = factors()
    huge = sparse((12, 2000), 0.03)
    chain = raymm.chain([left, middle, huge])
    results = []
    for share in (0.0, 1.0):
        monkeypatch.setattr(staging, "COMPACT_SHARE", share)
        results.append(chain.compute())
        assert_product(results[-1], [left, middle, huge.toarray()])
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_u33_structural_zeros_contribute_nothing(engine, request, tmp_path):
    engine = request.getfixturevalue(f"{engine}_engine")
    eye = sp.eye_array(4)
    lost = np.eye(4)
    lost[2, 2] = NAN
    column = np.eye(4)
    column[:, 2] = NAN
    first = sp.csc_array(np.array([[NAN, 1], [2, 3]]))
    second = sp.csc_array(np.array([[0, 0], [0, 1.0]]))
    cases = [
        ([first, second, sp.eye_array(2)], [[0, 1], [0, 3]]),
        ([eye, eye, lost], lost),
        ([eye, np.eye(4), lost], column),
    ]
    for operands, expected in cases:
        for columns in (None, 1, 3):
            chain = raymm.chain(operands)
            computed = chain.compute(engine=engine, tile_columns=columns, verify=True)
            np.testing.assert_array_equal(computed, expected)
            path = tmp_path / "D.npy"
            computed = chain.write(
                raymm.Npy(path, order="F"), engine=engine, tile_columns=columns, overwrite=True
            )
            np.testing.assert_array_equal(computed, expected)


def test_u33_a_tile_that_is_densified_inside():
    left = np.array([[NAN, 1.0], [2, np.inf]])
    huge = sp.csc_array(np.array([[5.0, 0, 1, 0], [0, 2, 1, 0]]))
    expected = [[NAN, 2, NAN, 0], [10, np.inf, np.inf, 0]]
    for columns in (None, 1, 2):
        for chain in (raymm.chain([left, huge]), raymm.chain([huge.T, left.T]).T):
            computed = chain.compute(tile_columns=columns, verify=True)
            np.testing.assert_array_equal(computed, expected)
    stored = sp.csc_array((np.array([0.0]), ([0], [1])), shape=(2, 4))  # a zero that is stored
    np.testing.assert_array_equal(raymm.multi_dot([left, stored]), [[0, NAN, 0, 0], [0, 0, 0, 0]])


def test_u31_zero_length_inner_dimension():
    left, huge = sp.csr_array((3, 0)), sp.csc_array((0, 50))
    for operands in ([left, huge], [np.ones((3, 0)), huge], [left, np.ones((0, 50))]):
        np.testing.assert_array_equal(raymm.multi_dot(operands), np.zeros((3, 50)), strict=True)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["csr", "coo", "tensor"])
def test_u19_boolean_products_count(kind):
    def make(values):
        values = np.array(values, bool)
        if kind == "tensor":
            import torch  # noqa: PLC0415  two seconds, for this test only

            return torch.from_numpy(values).to_sparse()
        return sp.coo_array(values).asformat(kind)

    first = [[1, 0, 1], [0, 0, 1]]
    counts = raymm.multi_dot([make(first), make(np.eye(3)), make(np.transpose(first))])
    np.testing.assert_array_equal(counts, np.array([[2, 1], [1, 1]]), strict=True)
    counts = raymm.multi_dot(
        [make([[1, 0, 1], [0, 1, 0], [1, 1, 0]]), make([[1, 0], [1, 1], [0, 1]])]
    )
    np.testing.assert_array_equal(counts, np.array([[1, 1], [1, 1], [2, 1]]), strict=True)


@pytest.mark.parametrize("form", ["csr", "csc", "coo", "dia", "bsr"])
@pytest.mark.parametrize("kind", [sp.coo_matrix, sp.coo_array])
def test_u36_dense_times_sparse_is_a_plain_array(form, kind):
    left = np.random.default_rng(0).normal(size=(4, 4))
    middle, huge = kind(np.eye(4)).asformat(form), sparse((4, 1000), 0.2, np.float64, form="csr")
    product = raymm.multi_dot([left, middle, huge])
    assert type(product) is np.ndarray
    assert product.dtype == np.float64
    np.testing.assert_allclose(product, left @ huge.toarray(), rtol=1e-12)
    with pytest.raises(DTypeError, match="object"):
        raymm.chain([left, middle, np.full((4, 3), None)])


def test_u63_arrow_vectors_times_a_sparse_matrix():
    left = np.array([[1, 2], [3, 4]], np.float32)
    np.testing.assert_array_equal(raymm.multi_dot([left, sp.eye_array(2)]), left)


def test_parts_streams_and_vectors():
    left, middle = factors(np.float64)
    huge = sparse((12, 1000), 0.05, np.float64)
    chain = raymm.chain([left, middle, huge])
    whole = left @ middle @ huge.toarray()
    close = {"rtol": 1e-9, "atol": 1e-9}
    np.testing.assert_allclose(chain[3:9, ::-7], whole[3:9, ::-7], **close)
    np.testing.assert_allclose(chain[[4, 4, 0]][:, :5], whole[[4, 4, 0]][:, :5], **close)
    np.testing.assert_allclose(chain[:, [999, 4, 4]], whole[:, [999, 4, 4]], **close)
    np.testing.assert_allclose(chain.T[[5, 6], 2], whole.T[[5, 6], 2], **close)
    np.testing.assert_allclose(chain @ np.ones(1000), whole @ np.ones(1000), **close)
    np.testing.assert_allclose(chain @ huge.T, whole @ huge.T.toarray(), **close)
    np.testing.assert_allclose(sp.csr_array(np.eye(30)) @ chain.compute(), whole, **close)
    blocks = [block for _, block in chain.tiles(tile_columns=333)]
    np.testing.assert_allclose(np.hstack(blocks), whole, **close)
    vector = sp.coo_array(np.arange(12.0) % 3)
    np.testing.assert_allclose(raymm.multi_dot([vector, huge]), vector.toarray() @ huge.toarray())


def test_a_function_is_applied_to_zeros_too():
    left, huge = factors()[0], sparse((12, 500), 0.02)
    chain = raymm.chain([left, huge]).map(_plus_one)
    np.testing.assert_allclose(
        chain.compute(tile_columns=100), left @ huge.toarray() + 1, rtol=1e-4, atol=1e-4
    )


def _plus_one(block):
    return block + 1


@pytest.mark.parametrize("density", [0.003, 0.5])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_a_huge_inner_axis(density, dtype, monkeypatch):
    monkeypatch.setattr(chain_order, "INNER_NBYTES", 1000)
    left, right = sparse((6, 20_000), density, dtype, 1), sparse((20_000, 9), density, dtype, 2)
    dense = np.random.default_rng(0).integers(-3, 4, (20_000, 9)).astype(dtype)
    for pair in ((left, right), (left, dense), (dense.T, right)):
        chain = raymm.chain(list(pair))
        assert "is formed first" in str(chain.plan())
        plain = [side.toarray() if sp.issparse(side) else side for side in pair]
        for columns in (None, 4999):
            computed = chain.compute(tile_columns=columns)
            if dtype == np.int32:
                np.testing.assert_array_equal(computed, exact_integers(plain).astype(np.int64))
            else:
                assert_product(computed, plain)


def test_a_huge_inner_axis_that_is_not_finite(monkeypatch):
    monkeypatch.setattr(chain_order, "INNER_NBYTES", 1000)
    values = sparse((5, 3000), 0.3, np.float64).toarray()
    values[2, 7], values[:, 8] = NAN, 0
    values[2, 8] = np.inf
    finite = np.where(np.isfinite(values), values, 0)
    for side in (values, sp.csr_array(values)):
        square = raymm.multi_dot([side, side.T])
        is_lost = np.zeros((5, 5), bool)
        is_lost[2], is_lost[:, 2] = True, True
        if side is values:
            np.testing.assert_array_equal(~np.isfinite(square), is_lost)
        else:  # the entries of row 2 meet none in most other rows
            met = values[:, 7] != 0
            np.testing.assert_array_equal(np.isnan(square[2]), met)
            np.testing.assert_array_equal(np.isinf(square[2]), False)
        np.testing.assert_allclose(square[~is_lost], (finite @ finite.T)[~is_lost])


def test_exact_integers_look_at_the_entries():
    left = np.full((2, 3), 2**40)
    huge = sp.csc_array((np.array([2**15, -(2**15)]), ([0, 2], [1, 4])), shape=(3, 6))
    expected = exact_integers([left, huge.toarray()]).astype(np.int64)
    np.testing.assert_array_equal(raymm.multi_dot([left, huge]), expected)
    huge = sp.csc_array((np.array([2**40]), ([0], [1])), shape=(3, 6))
    with pytest.raises(DTypeError, match="64 bits"):
        raymm.multi_dot([left, huge])


def test_a_wrong_column_is_found(tmp_path):
    left, huge = factors()[0], sparse((12, 900), 0.05)
    chain = raymm.chain([left, huge])
    chain.write(tmp_path / "D.npy")
    assert chain.verify(tmp_path / "D.npy").residual <= 1
    empty = int(np.flatnonzero(np.diff(huge.indptr) == 0)[3])
    for column in (empty, int(huge.indices[0])):
        wrong = np.load(tmp_path / "D.npy")
        wrong[5, column] += 1
        np.save(tmp_path / "wrong.npy", wrong)
        with pytest.raises(VerificationError, match=rf"D\[5, {column}\]"):
            chain.verify(tmp_path / "wrong.npy")


@pytest.mark.parametrize("rows", [3, 700, 5000])
def test_zero_columns_of_a_file_are_reserved_zeros(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(npy, "DIRECT_NBYTES", 0)
    monkeypatch.setattr(runs, "DIRECT_NBYTES", 0)
    left = np.random.default_rng(0).normal(size=(rows, 8))
    huge = sparse((8, 3000), 0.002, np.float64)
    (tmp_path / "D.npy.partial").write_bytes(b"\1" * 200_000_000)  # what another run left
    product = raymm.chain([left, huge]).write(raymm.Npy(tmp_path / "D.npy", order="F"))
    assert_product(product, [left, huge.toarray()])
    assert product.flags.f_contiguous


def test_most_of_a_sparse_file_is_not_written(tmp_path, monkeypatch):
    written = []
    plain = runs.RunFile.write

    def count(file, memory, position):
        written.append(len(memory))
        plain(file, memory, position)

    monkeypatch.setattr(runs.RunFile, "write", count)
    left, places = np.ones((2000, 4), np.float32), np.arange(10) * 397
    entries = np.ones(10, np.float32), (np.zeros(10, int), places)
    huge = sp.csc_array(entries, shape=(4, 4000))
    product = raymm.chain([left, huge]).write(raymm.Npy(tmp_path / "D.npy", order="F"))
    assert sum(written) < 10 * (2000 * 4 + 2 * 4096) + 10_000
    np.testing.assert_array_equal(np.flatnonzero(product[0]), places)
    assert product.sum() == 20_000


def test_memory_follows_the_entries(tmp_path):
    left, huge = np.ones((100, 100), np.float32), sparse((100, 2_000_000), 0.0005, form="csr")
    with raymm.LocalEngine(threads=2) as engine:
        raymm.multi_dot([np.ones((9, 9)), np.ones((9, 99))], engine=engine)
        chain = raymm.chain([left, huge])
        sink = raymm.Npy(tmp_path / "D.npy", order="F")
        plan = chain.plan(sink, engine=engine, memory_limit="200MB")
        with PeakMemory() as memory:
            chain.write(sink, engine=engine, memory_limit="200MB")
    assert plan.chained.operands[1].dense_nbytes == 800_000_000
    assert memory.growth <= plan.driver_nbytes + 24_000_000
    assert memory.growth < 250_000_000


def test_a_sparse_factor_that_does_not_fit_dense_is_refused():
    factor = sp.eye_array(50_000, format="csr")
    huge = np.broadcast_to(np.float32(1), (50_000, 60_000))
    with pytest.raises(MemoryLimitError, match="factors"):
        raymm.chain([factor, huge]).write("D.npy", memory_limit="1GB")


def test_scipy_is_not_needed(run_python):
    printed = run_python(
        "import sys; sys.modules['scipy'] = None; import numpy as np; import raymm;"
        "from raymm.kernels.sparse import from_entries; from raymm.sources.sparse import held;"
        "m = from_entries((2, 3), np.array([1]), np.array([2]), np.ones(1));"
        "print(raymm.multi_dot([np.eye(2), held(m, 'C')]).tolist())"
    )
    assert printed.strip() == "[[0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]"


@pytest.mark.ray
def test_a_ray_worker_gets_the_entries_of_its_tiles(ray_engine, tmp_path):
    left, middle = factors()
    huge = sparse((12, 3000), 0.02, form="csr")
    chain = raymm.chain([left, middle, huge])
    every = [left, middle, huge.toarray()]
    options = {"engine": ray_engine, "tile_columns": 400, "verify": True}
    assert_product(chain.compute(**options), every)
    for order in ("C", "F"):
        path = tmp_path / f"{order}.npy"
        assert_product(chain.write(raymm.Npy(path, order=order), **options), every)
    part = raymm.chain([left, middle, huge]).T
    assert_product(part.compute(**options), [huge.toarray().T, middle.T, left.T])


class TestHighAndThin:
    """Few entries in many rows, as of a graph: multiplied entry by entry, never densified."""

    @pytest.fixture(params=["C", "F"])
    def sink(self, request, tmp_path):
        return raymm.Npy(tmp_path / "D.npy", order=request.param)

    @pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.int32])
    def test_any_number_of_factors(self, dtype, sink, local_engine):
        rng = np.random.default_rng(0)
        graph = sparse((6000, 1500), 0.0005, dtype)
        left = rng.integers(-3, 4, (7, 6000)).astype(dtype)
        for others in ([left], [rng.integers(-3, 4, (9, 7)).astype(dtype), left]):
            chain = raymm.chain([*others, graph])
            for columns in (None, 700):
                options = {"engine": local_engine, "overwrite": True, "verify": True}
                product = chain.write(sink, tile_columns=columns, **options)
                every = [*others, graph.toarray()]
                if dtype == np.int32:
                    whole = [each.astype(np.int64) for each in every]
                    np.testing.assert_array_equal(product, np.linalg.multi_dot(whole))
                else:
                    assert_product(product, every)

    def test_as_a_tall_product(self):
        graph = sparse((5000, 6000), 0.001, np.float64, form="coo")
        right = np.random.default_rng(0).normal(size=(6000, 4))
        assert_product(raymm.multi_dot([graph, right]), [graph.toarray(), right])

    def test_structural_zeros(self):
        graph = sparse((5000, 4000), 0.0005, np.float64)
        graph.data[5], graph.data[90] = NAN, np.inf
        left = sp.csr_array((np.array([1.0, NAN, 2]), ([0, 1, 2], [9, 700, 4999])), shape=(3, 5000))
        expected = np.zeros((3, 4000))
        for row, place, value in ((0, 9, 1.0), (1, 700, NAN), (2, 4999, 2.0)):
            part = graph[[place]].tocoo()
            expected[row, part.coords[1]] = value * part.data
        product = raymm.chain([left, graph]).compute(verify=True)
        np.testing.assert_array_equal(product, expected)
        twice = raymm.chain([sp.eye_array(3), left, graph]).compute(verify=True)
        np.testing.assert_array_equal(twice, expected)

    def test_memory_is_that_of_the_entries(self):
        n = 200_000
        rng = np.random.default_rng(0)
        places = rng.integers(0, n, (2, 5 * n))
        graph = sp.csr_array((np.ones(5 * n, np.float32), tuple(places)), shape=(n, n))
        vectors = rng.normal(size=(n, 8)).astype(np.float32)
        with raymm.LocalEngine(threads=2) as engine:
            raymm.multi_dot([np.ones((9, 9)), np.ones((9, 99))], engine=engine)
            chain = raymm.chain([graph, vectors])
            plan = chain.plan(engine=engine)
            with PeakMemory() as memory:
                product = chain.compute(engine=engine)
        np.testing.assert_allclose(product, graph @ vectors, rtol=1e-4, atol=1e-4)
        assert plan.tiles < 100
        assert memory.growth <= plan.driver_nbytes + 24_000_000
