"""Where D goes: one kind a file; `open_sink` chooses by suffix."""

from raymm.sinks.array import Array
from raymm.sinks.arrow import Arrow
from raymm.sinks.base import Block, OutputSpec, Sink
from raymm.sinks.choosing import as_sink
from raymm.sinks.npy import Npy
from raymm.sinks.parquet import Parquet
from raymm.sinks.zarr import Zarr

__all__ = ["Array", "Arrow", "Block", "Npy", "OutputSpec", "Parquet", "Sink", "Zarr", "as_sink"]
