import pickle
import threading

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

import raymm
from raymm.errors import PlanError, SourceError
from raymm.filesystems import base_of, explicit, is_remote, redacted, resolve
from raymm.kernels.buffers import Buffer
from raymm.manifests import read_manifest, write_manifest
from raymm.sources import open_source
from tests.tables import table_of, write_arrow


@pytest.fixture
def dataset(tmp_path):
    """A folder with two parts and their manifest; what they hold."""
    values = np.arange(24.0).reshape(8, 3)
    root = tmp_path / "D"
    (root / "run").mkdir(parents=True)
    parts = []
    for place in range(2):
        name = f"run/part-{place:06}.parquet"
        pq.write_table(table_of(values[4 * place : 4 * place + 4]), root / name)
        size = (root / name).stat().st_size
        parts.append({"path": name, "rows": 4, "nbytes": size})
    manifest = {"raymm": 1, "parts": parts, "metadata": {}}
    write_manifest(fs.LocalFileSystem(), str(root), manifest)
    return root, values, manifest


class TestManifest:
    def test_what_is_written_is_read(self, dataset):
        root, _, manifest = dataset
        assert read_manifest(fs.LocalFileSystem(), str(root)) == manifest
        assert sorted(path.name for path in root.iterdir()) == ["_manifest.json", "run"]
        assert read_manifest(fs.LocalFileSystem(), str(root / "run")) is None

    def test_readers_see_only_what_it_lists(self, dataset):
        root, values, manifest = dataset
        pq.write_table(table_of(np.zeros((1, 3))), root / "run" / "part-000009.parquet")
        (root / "older").mkdir()
        pq.write_table(table_of(np.zeros((1, 3))), root / "older" / "part-000000.parquet")
        np.testing.assert_array_equal(open_source(root, "D").load(), values)
        manifest["parts"].reverse()
        write_manifest(fs.LocalFileSystem(), str(root), manifest)
        np.testing.assert_array_equal(
            open_source(root, "D").load(), np.concatenate([values[4:], values[:4]])
        )

    def test_a_part_that_is_missing(self, dataset):
        root, _, _ = dataset
        (root / "run" / "part-000001.parquet").unlink()
        with pytest.raises(SourceError, match=r"part-000001\.parquet is missing"):
            open_source(root, "D")

    @pytest.mark.parametrize("wrong", [{"nbytes": 7}, {"rows": 3}])
    def test_a_part_of_another_size(self, dataset, wrong):
        root, _, manifest = dataset
        manifest["parts"][1] |= wrong
        write_manifest(fs.LocalFileSystem(), str(root), manifest)
        with pytest.raises(
            SourceError, match=r"part-000001\.parquet has .* says [37]: write|, the"
        ):
            open_source(root, "D")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "no manifest"),
            ("[]", "no manifest"),
            ('{"raymm": 2, "parts": []}', "version 2"),
            ('{"raymm": 1, "parts": []}', "no parts"),
            ('{"raymm": 1, "parts": [{}]}', "no manifest"),
            ('{"raymm": 1, "parts": [{"path": "../x", "rows": 1, "nbytes": 1}]}', "outside"),
        ],
    )
    def test_damage(self, dataset, text, message):
        root, _, _ = dataset
        (root / "_manifest.json").write_text(text)
        with pytest.raises(SourceError, match=message):
            open_source(root, "D")


class TestResolving:
    def test_local_paths(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        for text in ("x", "~/x", f"file://{tmp_path}/x", str(tmp_path / "x")):
            filesystem, path = resolve(text)
            assert isinstance(filesystem, fs.LocalFileSystem)
            assert path == str(tmp_path / "x")
            assert not is_remote(text)
        assert explicit("x") == str(tmp_path / "x")

    def test_memory(self):
        filesystem, path = resolve("memory://a/b")
        assert path == "/a/b"
        assert filesystem.type_name.startswith("py::fsspec")
        pickle.loads(pickle.dumps(filesystem))

    def test_unknown_schemes(self):
        with pytest.raises(PlanError, match=r"nosuch:// is no address that pyarrow or fsspec"):
            resolve("nosuch://x/y")
        with pytest.raises(PlanError, match=r"nosuch://"):
            raymm.chain(["nosuch://x/y", np.eye(2)])

    def test_s3_options(self, monkeypatch):
        for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
            monkeypatch.delenv(name, raising=False)
        filesystem, path = resolve("s3://b/c/d/?region=eu-west-1&anonymous=1")
        assert (filesystem.region, path) == ("eu-west-1", "b/c/d")
        assert explicit("s3://b/c?region=x") == "s3://b/c?region=x"
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        assert resolve("s3://b/c")[0].region == "us-east-1"
        there = explicit("s3://b/c")
        monkeypatch.delenv("AWS_ENDPOINT_URL")
        assert explicit(there) == there
        assert "endpoint_override=http" in there
        with pytest.raises(PlanError, match="unknown options frobnicate; known are"):
            resolve("s3://b/c?frobnicate=1")
        with pytest.raises(PlanError, match="names no bucket"):
            resolve("s3:///c?region=x")

    def test_secrets_stay_out_of_messages(self):
        uri = "s3://id:hidden@bucket/key?secret_key=hidden&region=x"
        assert redacted(uri) == "s3://bucket/key?secret_key=...&region=x"
        assert base_of(uri) == "s3://bucket/key"
        with pytest.raises(PlanError) as caught:
            raymm.chain([uri, np.eye(2)])
        assert "hidden" not in str(caught.value)


@pytest.fixture(scope="session")
def object_store():
    """The address of an object store on loopback, ended at the end."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415  a second, where it is needed

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        yield "http://{}:{}".format(*server.get_host_and_port())
    finally:
        server.stop()


@pytest.fixture
def bucket(object_store, monkeypatch):
    """The address of an empty bucket that the environment leads to."""
    for name, value in {
        "AWS_ENDPOINT_URL": object_store,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    name = f"bucket-{threading.get_native_id()}-{np.random.default_rng().integers(10**9)}"
    filesystem, _ = resolve(f"s3://{name}")
    _store(filesystem).create_dir(name)
    return f"s3://{name}"


def _store(filesystem):
    """Return the same store, where buckets may be made."""
    _, arguments = filesystem.__reduce__()
    options = dict(arguments[0])
    return fs.S3FileSystem(**options | {"allow_bucket_creation": True})


class TestObjectStore:
    def test_files_folders_and_globs(self, bucket, tmp_path, local_engine):
        values = np.arange(600.0).reshape(200, 3)
        filesystem, root = resolve(bucket)
        for place in range(2):
            pq.write_table(
                table_of(values[100 * place : 100 * place + 100]),
                f"{root}/C/part-{place}.parquet",
                filesystem=filesystem,
                row_group_size=30,
            )
        write_arrow(tmp_path / "c.arrow", table_of(values), rows=70)
        with filesystem.open_output_stream(f"{root}/c.arrow") as file:
            file.write((tmp_path / "c.arrow").read_bytes())
        for uri in (f"{bucket}/C", f"{bucket}/C/", f"{bucket}/C/*.parquet", f"{bucket}/c.arrow"):
            source = open_source(f"{uri}::v.T", "C")
            assert source.operand.shape == (3, 200)
            assert not source.operand.is_held
            product = raymm.multi_dot(
                [np.eye(3), np.eye(3), source], engine=local_engine, tile_columns=64
            )
            np.testing.assert_array_equal(product, values.T)

    def test_a_description_needs_no_environment_but_credentials(
        self, bucket, object_store, monkeypatch
    ):
        values = np.arange(12.0).reshape(4, 3)
        filesystem, root = resolve(bucket)
        pq.write_table(table_of(values), f"{root}/c.parquet", filesystem=filesystem)
        with_secrets = open_source(f"{bucket}/c.parquet".replace("://", "://testing:testing@"), "C")
        assert "testing" not in repr(with_secrets)
        sent = pickle.dumps(open_source(f"{bucket}/c.parquet", "C"))
        assert b"testing" not in sent
        monkeypatch.delenv("AWS_ENDPOINT_URL")
        np.testing.assert_array_equal(pickle.loads(sent).load(), values)
        given = f"{bucket}/c.parquet?endpoint_override={object_store}"
        np.testing.assert_array_equal(open_source(given, "C").load(), values)
        scheme, _, host = object_store.partition("://")
        given = f"{bucket}/c.parquet?scheme={scheme}&endpoint_override={host}"
        np.testing.assert_array_equal(open_source(f"{given}::v.T", "C").load(), values.T)

    @pytest.mark.ray
    def test_workers_read_it(self, bucket, object_store, ray_engine):
        """They have another environment: credentials are theirs, or in the address."""
        values = np.arange(1500.0).reshape(500, 3)
        filesystem, root = resolve(f"{bucket}/C")
        for place in range(5):
            part = table_of(values[100 * place : 100 * place + 100])
            path = f"{root}/part-{place}.parquet"
            pq.write_table(part, path, filesystem=filesystem, row_group_size=40)
        uri = f"{bucket}/C".replace("://", "://testing:testing@")
        product = raymm.multi_dot(
            [np.eye(3), np.eye(3), f"{uri}?endpoint_override={object_store}::v.T"],
            engine=ray_engine,
            tile_columns=70,
        )
        np.testing.assert_array_equal(product, values.T)

    def test_a_manifest(self, bucket, tmp_path):
        values = np.arange(12.0).reshape(4, 3)
        filesystem, root = resolve(f"{bucket}/D")
        assert read_manifest(filesystem, root) is None
        for run in ("one", "two"):
            path = f"{root}/{run}/part-000000.parquet"
            pq.write_table(table_of(values), path, filesystem=filesystem)
        size = filesystem.get_file_info(path).size
        parts = [{"path": "two/part-000000.parquet", "rows": 4, "nbytes": size}]
        write_manifest(filesystem, root, {"raymm": 1, "parts": parts, "metadata": {}})
        np.testing.assert_array_equal(open_source(f"{bucket}/D", "D").load(), values)
        filesystem.delete_file(path)
        with pytest.raises(SourceError, match=f"{bucket}/D/two/part-000000.parquet is missing"):
            open_source(f"{bucket}/D", "D")

    def test_what_is_not_there(self, bucket):
        with pytest.raises(SourceError, match="no such file"):
            open_source(f"{bucket}/missing.parquet", "C")
        with pytest.raises(SourceError, match=r"s3://no-such-bucket"):
            open_source("s3://no-such-bucket/c.parquet", "C")
        with pytest.raises(PlanError, match="local path only"):
            open_source(f"{bucket}/C.npy", "C")


def test_memory_by_fsspec(local_engine):
    values = np.arange(12.0).reshape(4, 3)
    filesystem, root = resolve("memory://tables/c.parquet")
    pq.write_table(table_of(values), root, filesystem=filesystem)
    try:
        product = raymm.multi_dot(
            [np.eye(3), "memory://tables/c.parquet.T"], engine=local_engine, tile_columns=3
        )
        np.testing.assert_array_equal(product, values.T)
        read = open_source("memory://tables/*.parquet", "C").T.read(1, 3, Buffer())
        np.testing.assert_array_equal(read, values[1:3].T)
    finally:
        filesystem.delete_file(root)
