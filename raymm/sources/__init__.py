"""Where operands come from: one kind a file; `open_source` finds the right one."""

from raymm.sources.base import Source
from raymm.sources.opening import open_source

__all__ = ["Source", "open_source"]
