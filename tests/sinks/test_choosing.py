from pathlib import Path

import numpy as np
import pytest

from raymm.errors import PlanError
from raymm.sinks import Array, Arrow, Npy, Parquet, as_sink
from tests.doubles import NullSink


def test_nothing_and_arrays_are_memory():
    out = np.zeros((2, 2))
    assert isinstance(as_sink(None), Array)
    assert as_sink(out).out is out


@pytest.mark.parametrize("out", ["D.npy", b"D.npy", Path("D.npy"), "~/D.npy"], ids=repr)
def test_paths_of_npy_files(out):
    assert isinstance(as_sink(out), Npy)


def test_sinks_are_themselves():
    sink = NullSink()
    assert as_sink(sink) is sink


@pytest.mark.parametrize("out", ["D.parquet", "folder/", "s3://bucket/D", "gs://b/a.parquet/"])
def test_parquet(out):
    assert isinstance(as_sink(out), Parquet)


def test_a_folder_is_a_parquet_dataset(tmp_path):
    assert isinstance(as_sink(tmp_path), Parquet)


@pytest.mark.parametrize("out", ["D.arrow", "D.feather", "s3://bucket/D.arrow?region=eu-west-1"])
def test_arrow(out):
    assert isinstance(as_sink(out), Arrow)


@pytest.mark.parametrize("out", ["s3://bucket/D.npy", "memory://D.npy"])
def test_npy_at_an_address(out):
    with pytest.raises(PlanError, match="Parquet works remotely"):
        as_sink(out)


@pytest.mark.parametrize("out", ["D.dat", "D", "D.npz", "s3://bucket/D.csv"])
def test_suffixes_without_a_format(out):
    with pytest.raises(PlanError, match=r"raymm\.Npy\(path\)"):
        as_sink(out)


@pytest.mark.parametrize("out", [3, [1, 2], object(), 1.5], ids=["int", "list", "object", "float"])
def test_what_is_no_output(out):
    with pytest.raises(PlanError, match="give a path"):
        as_sink(out)
