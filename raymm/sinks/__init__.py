"""Where D goes: one kind a file; `open_sink` chooses by suffix."""

from raymm.sinks.array import Array
from raymm.sinks.base import Block, OutputSpec, Sink
from raymm.sinks.choosing import as_sink
from raymm.sinks.npy import Npy

__all__ = ["Array", "Block", "Npy", "OutputSpec", "Sink", "as_sink"]
