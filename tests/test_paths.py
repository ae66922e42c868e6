import os
from pathlib import Path

import pytest

from raymm.errors import PlanError, SinkError
from raymm.paths import check_folder, free_nbytes, is_same_file, local_path


@pytest.mark.parametrize(
    "spelled", ["D.npy", b"D.npy", Path("D.npy"), "./D.npy", "sub/../D.npy"], ids=repr
)
def test_local_spellings(spelled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_path(spelled) == tmp_path / "D.npy"


def test_home_and_file_addresses(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_path("~/D.npy") == tmp_path / "D.npy"
    assert local_path(f"file://{tmp_path}/D.npy") == tmp_path / "D.npy"


@pytest.mark.parametrize("address", ["s3://bucket/D.npy", "memory://D.npy", "gs://b/D.npy"])
def test_remote_addresses_are_refused(address):
    with pytest.raises(PlanError, match=r"needs a local path.*Parquet works remotely"):
        local_path(address)


def test_same_file(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"1")
    second.write_bytes(b"1")
    link = tmp_path / "link"
    link.symlink_to(first)
    assert is_same_file(first, link)
    assert is_same_file(tmp_path / "." / "first", first)
    assert not is_same_file(first, second)


def test_same_file_before_it_exists(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "alias").symlink_to(folder)
    assert is_same_file(folder / "D.npy", tmp_path / "alias" / "D.npy")
    assert not is_same_file(folder / "D.npy", folder / "E.npy")


def test_check_folder(tmp_path):
    check_folder(tmp_path / "D.npy")
    with pytest.raises(SinkError, match="does not exist") as caught:
        check_folder(tmp_path / "missing" / "D.npy")
    assert caught.value.errno == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_check_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(SinkError, match="permission") as caught:
            check_folder(tmp_path / "D.npy")
    finally:
        tmp_path.chmod(0o700)
    assert caught.value.errno == 13


def test_free_space_is_that_of_the_nearest_folder(tmp_path):
    status = os.statvfs(tmp_path)
    found = free_nbytes(tmp_path / "not" / "there" / "D.npy")
    assert found == pytest.approx(status.f_bavail * status.f_frsize, rel=0.1)
