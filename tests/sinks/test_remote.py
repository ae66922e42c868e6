"""Tables in object stores: parts under a run's id, and what the manifest makes of them."""

import json
import uuid

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

import raymm
from raymm.errors import PlanError, SinkError, SinkExistsError, SourceError
from raymm.sinks import Arrow, Parquet


@pytest.fixture
def store():
    """A file system in memory, empty; addresses of one test are no other's."""
    filesystem = fsspec.filesystem("memory")
    root = f"/{uuid.uuid4().hex}"
    filesystem.mkdir(root)
    yield filesystem, root
    filesystem.rm(root, recursive=True)


@pytest.fixture
def uri(store):
    return f"memory:/{store[1]}/D"


@pytest.fixture
def product():
    rng = np.random.default_rng(5)
    left = rng.integers(-8, 8, (7, 5)).astype(np.float32)
    right = rng.integers(-8, 8, (5, 1003)).astype(np.float32)
    return left, right, left @ right


@pytest.fixture(params=[Parquet, Arrow], ids=["parquet", "arrow"])
def kind(request):
    return request.param


def parts(store):
    filesystem, root = store
    return sorted(path.removeprefix(f"{root}/D/") for path in filesystem.find(root))


def manifest(store):
    filesystem, root = store
    return json.loads(filesystem.cat(f"{root}/D/_manifest.json"))


def test_written_and_opened(store, uri, kind, product, local_engine):
    left, right, expected = product
    found = raymm.multi_dot(
        [left, right], out=kind(uri), tile_columns=300, verify=True, engine=local_engine
    )
    assert found.shape == (7, 1003)
    np.testing.assert_array_equal(np.asarray(found), expected)
    np.testing.assert_array_equal(np.asarray(raymm.open(uri)), expected)
    listed = manifest(store)
    assert listed["metadata"]["shape"] == [7, 1003]
    assert [part["rows"] for part in listed["parts"]] == [300, 300, 300, 103]
    run = listed["parts"][0]["path"].partition("/")[0]
    suffix = kind(uri).suffix
    wanted = [f"{run}/part-{place:06d}{suffix}" for place in range(4)]
    assert parts(store) == sorted([*wanted, "_manifest.json"])
    for part in listed["parts"]:
        assert part["nbytes"] == store[0].size(f"{store[1]}/D/{part['path']}")


def test_any_client_reads_the_parts(store, uri, product, local_engine):
    left, right, expected = product
    raymm.multi_dot([left, right], out=uri, tile_columns=300, engine=local_engine)
    filesystem, root = store
    table = pq.read_table(
        [f"{root}/D/{part['path']}" for part in manifest(store)["parts"]],
        filesystem=pa.fs.PyFileSystem(pa.fs.FSSpecHandler(filesystem)),
    )
    flat = table["D"].combine_chunks().flatten().to_numpy()
    np.testing.assert_array_equal(flat.reshape(-1, 7), expected.T)


def test_an_existing_output_is_kept_and_replaced_when_asked(
    store, uri, kind, product, local_engine
):
    left, right, expected = product
    raymm.multi_dot([left, right], out=kind(uri), engine=local_engine)
    before = parts(store)
    with pytest.raises(SinkExistsError, match="overwrite=True"):
        raymm.multi_dot([-left, right], out=kind(uri), engine=local_engine)
    assert parts(store) == before
    raymm.multi_dot([-left, right], out=kind(uri), overwrite=True, engine=local_engine)
    np.testing.assert_array_equal(np.asarray(raymm.open(uri)), -expected)
    assert len(parts(store)) == len(before)  # the old parts are gone
    assert set(parts(store)) & set(before) == {"_manifest.json"}


def test_a_run_that_fails_changes_nothing(store, uri, kind, product, local_engine):
    left, right, expected = product
    raymm.multi_dot([left, right], out=kind(uri), engine=local_engine)
    before = parts(store)

    def fail(event):
        if type(event).__name__ == "TileFinished":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        raymm.multi_dot(
            [-left, right], out=kind(uri), tile_columns=100, overwrite=True, progress=fail,
            engine=local_engine,
        )  # fmt: skip
    assert parts(store) == before
    np.testing.assert_array_equal(np.asarray(raymm.open(uri)), expected)


def test_readers_see_only_what_the_manifest_lists(store, uri, product, local_engine):
    left, right, expected = product
    raymm.multi_dot([left, right], out=uri, tile_columns=300, engine=local_engine)
    filesystem, root = store
    first = manifest(store)["parts"][0]["path"]
    filesystem.copy(f"{root}/D/{first}", f"{root}/D/{'0' * 16}/part-000000.parquet")
    np.testing.assert_array_equal(np.asarray(raymm.open(uri)), expected)
    filesystem.rm(f"{root}/D/{first}")
    with pytest.raises(SourceError, match="part-000000"):
        raymm.open(uri)


def test_a_part_that_is_gone_is_no_output(store, uri, kind, product, local_engine):
    left, right, _ = product
    filesystem, root = store

    def remove(event):
        if type(event).__name__ == "TileFinished" and event.tile.index == 2:
            found = [path for path in filesystem.find(root) if "part-000001" in path]
            filesystem.rm(found[0])

    with pytest.raises(SinkError, match="part-000001"):
        raymm.multi_dot(
            [left, right], out=kind(uri), tile_columns=300, progress=remove, engine=local_engine
        )
    assert parts(store) == []


def test_files_of_somebody_else_are_kept(store, uri, kind, product, local_engine):
    left, right, _ = product
    filesystem, root = store
    for name in ("D/thesis.txt", "D/year=2026/a.parquet"):
        filesystem.pipe(f"{root}/{name}", b"precious")
        with pytest.raises(SinkExistsError):
            raymm.multi_dot([left, right], out=kind(uri), engine=local_engine)
        assert filesystem.cat(f"{root}/{name}") == b"precious"
        filesystem.rm(f"{root}/{name}")


def test_empty_results(store, uri, kind, local_engine):
    found = raymm.multi_dot([np.ones((3, 2)), np.ones((2, 0))], out=kind(uri), engine=local_engine)
    assert found.shape == (3, 0)
    assert np.asarray(found).shape == (3, 0)


def test_an_operand_there_is_not_overwritten(uri, kind, product, local_engine):
    left, right, _ = product
    raymm.multi_dot([left, right], out=kind(uri), engine=local_engine)
    with pytest.raises(PlanError, match="overwrite the operand"):
        raymm.multi_dot([np.eye(7), uri], out=kind(uri), overwrite=True, engine=local_engine)


def test_an_unknown_address(product, local_engine):
    left, right, _ = product
    with pytest.raises(PlanError, match="nowhere"):
        raymm.multi_dot([left, right], out="nowhere://bucket/D", engine=local_engine)
