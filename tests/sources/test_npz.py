import pickle
import zipfile

import numpy as np
import pytest

import raymm
from raymm.errors import DTypeError, PlanError, SourceError
from raymm.kernels.buffers import Buffer
from raymm.sources import open_source
from raymm.sources.files import FileSource
from tests.contracts import FileSourceContract


class TestNpz(FileSourceContract):
    @pytest.fixture(params=["only", "named", "turned"])
    def source(self, request, tmp_path):
        def make(values):
            path = tmp_path / "c.npz"
            if request.param == "only":
                np.savez(path, C=values)
                return open_source(path, "C")
            if request.param == "turned":
                np.savez(path, A=np.ones(3), C=np.ascontiguousarray(values.T))
                return open_source(f"{path}::C.T", "C")
            np.savez(path, A=np.ones(3), C=values)
            return open_source(f"{path}::C", "C")

        return make


@pytest.fixture
def archive(tmp_path):
    arrays = {"A": np.arange(6.0).reshape(2, 3), "B": np.eye(3), "C": np.ones((3, 5), np.float32)}
    np.savez(tmp_path / "c.npz", **arrays)
    return tmp_path / "c.npz", arrays


def test_members_are_read_in_place(archive, local_engine):
    path, arrays = archive
    source = open_source(f"{path}::C", "C")
    assert isinstance(source, FileSource)
    assert source.operand.path == str(path)
    operands = [f"{path}::{name}" for name in arrays]
    product = raymm.multi_dot(operands, engine=local_engine, tile_columns=2)
    np.testing.assert_array_equal(product, arrays["A"] @ np.ones((3, 5)))


@pytest.mark.parametrize("suffix", ["", "::X"])
def test_no_or_a_missing_name_lists_the_members(archive, suffix):
    path, _ = archive
    with pytest.raises(SourceError) as caught:
        open_source(f"{path}{suffix}", "C")
    for part in ("A, B, C", "c.npz::A", str(path)):
        assert part in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


def test_a_compressed_member_is_refused_with_the_reason(tmp_path):
    np.savez_compressed(tmp_path / "c.npz", A=np.eye(2), B=np.eye(2))
    with pytest.raises(SourceError, match=r"'A\.npy' is compressed.*members: A, B.*numpy\.savez"):
        open_source(f"{tmp_path / 'c.npz'}::A", "A")


def test_members_with_the_suffix_and_with_a_dot_in_their_name(tmp_path):
    np.savez(tmp_path / "c.npz", **{"a.b": np.eye(2), "c": np.ones((2, 3))})
    assert open_source(f"{tmp_path / 'c.npz'}::a.b", "A").operand.shape == (2, 2)
    assert open_source(f"{tmp_path / 'c.npz'}::c.npy", "A").operand.shape == (2, 3)
    assert open_source(f"{tmp_path / 'c.npz'}::c.T", "A").operand.shape == (3, 2)


def test_other_members_are_no_arrays(tmp_path):
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
        archive.writestr("notes.txt", "x")
    with pytest.raises(SourceError, match="holds no arrays"):
        open_source(tmp_path / "c.npz", "A")
    with zipfile.ZipFile(tmp_path / "c.npz", "a") as archive:
        archive.writestr("A.npy", b"nonsense")
    with pytest.raises(SourceError, match=r"is not a \.npy file"):
        open_source(tmp_path / "c.npz", "A")


def test_objects_are_never_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (tmp_path / "sprung").touch, ()

    np.savez(tmp_path / "c.npz", A=np.array([Trap()], object))
    with pytest.raises(DTypeError, match="object"):
        open_source(tmp_path / "c.npz", "A")
    assert not (tmp_path / "sprung").exists()


def test_broken_archives(archive, tmp_path):
    path, _ = archive
    content = path.read_bytes()
    for name, broken in {
        "empty": b"",
        "text": b"text",
        "cut": content[: len(content) // 2],
        "no header": content.replace(b"PK\x03\x04", b"XX\x03\x04"),
    }.items():
        (tmp_path / f"{name}.npz").write_bytes(broken)
        with pytest.raises(SourceError, match=name):
            open_source(f"{tmp_path / name}.npz::B", "A")
    with pytest.raises(SourceError, match="No such file"):
        open_source(tmp_path / "missing.npz", "A")


def test_a_member_that_is_cut_short(tmp_path):
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive:
        np.save(tmp_path / "A.npy", np.ones((10, 10)))
        archive.writestr("A.npy", (tmp_path / "A.npy").read_bytes()[:-8])
        archive.writestr("B.npy", (tmp_path / "A.npy").read_bytes())
    with pytest.raises(SourceError, match="cut short"):
        open_source(f"{tmp_path / 'c.npz'}::A", "A")
    assert open_source(f"{tmp_path / 'c.npz'}::B", "A").load().sum() == 100


def test_an_output_over_the_archive_is_refused(archive):
    path, _ = archive
    with pytest.raises(PlanError, match="would overwrite the operand"):
        raymm.multi_dot([f"{path}::A", f"{path}::B"], out=raymm.Npy(path), overwrite=True)


class Exchanged:
    """Of another library: knows DLPack and nothing else."""

    def __init__(self, owner):
        self.owner = owner

    def __dlpack__(self, **options):
        return self.owner.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.owner.__dlpack_device__()


class Elsewhere(Exchanged):
    """On a device that neither NumPy nor torch can read."""

    def __dlpack_device__(self):
        return (7, 0)

    def __dlpack__(self, **options):
        raise BufferError("not on this device")


class TestDlpack:
    def test_arrays_stay_where_they_are(self):
        array = np.arange(12.0).reshape(3, 4).T
        source = open_source(Exchanged(array), "C")
        np.testing.assert_array_equal(source.load(), array)
        assert np.shares_memory(source.read(0, 2, Buffer()), array)

    def test_read_only_arrays(self):
        array = np.arange(12.0).reshape(3, 4)
        array.flags.writeable = False
        np.testing.assert_array_equal(open_source(Exchanged(array), "C").load(), array)

    def test_bfloat16(self):
        import torch  # noqa: PLC0415  two seconds, for this test only

        tensor = torch.tensor([[1.5, 2], [3, 4]], dtype=torch.bfloat16)
        source = open_source(Exchanged(tensor), "C")
        assert source.operand.bfloat16
        np.testing.assert_array_equal(source.load(), [[1.5, 2], [3, 4]])

    def test_the_reason_for_refusing_is_kept(self):
        with pytest.raises(PlanError, match="Elsewhere"):
            open_source(Elsewhere(np.eye(2)), "C")

    def test_a_product(self, local_engine):
        array = np.arange(6.0).reshape(2, 3)
        product = raymm.multi_dot([np.eye(2), np.eye(2), Exchanged(array)], engine=local_engine)
        np.testing.assert_array_equal(product, array)
