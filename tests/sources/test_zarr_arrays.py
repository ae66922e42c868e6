"""Zarr arrays as operands."""

import pytest
import zarr

from raymm.errors import DTypeError, SourceError
from raymm.sources import open_source
from tests.contracts import FileSourceContract


@pytest.mark.filterwarnings("ignore:.*Zarr format 3 spec:UserWarning")
class TestZarrSource(FileSourceContract):
    @pytest.fixture(params=["v3", "v2", "sharded"])
    def source(self, request, tmp_path):
        def make(values):
            path = tmp_path / f"{request.param}-{values.shape}.zarr"
            chunks = tuple(max(1, -(-length // 3)) for length in values.shape)
            options = {"zarr_format": 2 if request.param == "v2" else 3}
            if request.param == "sharded":
                options["shards"] = tuple(2 * length for length in chunks)
            array = zarr.create_array(
                path,
                overwrite=True,
                shape=values.shape,
                dtype=values.dtype,
                chunks=chunks,
                **options,
            )
            array[...] = values
            return open_source(path, "C")

        return make


def test_a_damaged_array(tmp_path):
    (tmp_path / "zarr.json").write_text("{}")
    with pytest.raises(SourceError, match="as a Zarr array"):
        open_source(tmp_path, "C")


def test_what_is_no_number(tmp_path):
    zarr.create_array(tmp_path / "C.zarr", shape=(2, 2), dtype="M8[s]", chunks=(2, 2))
    with pytest.raises(DTypeError):
        open_source(tmp_path / "C.zarr", "C")
