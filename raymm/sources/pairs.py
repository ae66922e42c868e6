"""Two operands with a huge axis in common, read together."""

from dataclasses import dataclass
from typing import Any

from raymm.kernels.buffers import Buffer
from raymm.operands import Operand
from raymm.sources.base import Source


@dataclass(frozen=True)
class Pair:
    """The columns of both sides of ``left @ right.T``, whose inner axis is the huge one."""

    left: Source
    right: Source

    @property
    def operand(self) -> Operand:
        """What both are, one above the other."""
        left, right = self.left.operand, self.right.operand
        return Operand(
            f"{left.name} @ {right.name}",
            (left.shape[0] + right.shape[0], left.shape[1]),
            left.dtype,
            left.strides,
            is_held=left.is_held or right.is_held,
            reading_nbytes=left.reading_nbytes + right.reading_nbytes,
        )

    def cut(self, start: int, stop: int) -> "Pair":
        """Return what another process needs to read these columns."""
        return Pair(self.left.cut(start, stop), self.right.cut(start, stop))

    def read(self, start: int, stop: int, buffer: Buffer) -> tuple[Any, Any]:
        """Return these columns of both; `buffer` serves the left one."""
        return self.left.read(start, stop, buffer), self.right.read(start, stop, Buffer())
