"""Blocks handed to the caller, tile by tile."""

from raymm.sinks.base import Block, OutputSpec, Piece, Values
from raymm.tiles import Layout

_RUN_NBYTES = 2**15


class Stream:
    """An output that keeps nothing: every block is handed back."""

    name = "a stream of tiles"

    def layout(self, spec: OutputSpec) -> Layout:
        """Return how it wants D: as the caller would."""
        item = spec.dtype.itemsize
        order = "F" if spec.is_transposed else "C"
        return Layout("C" if order == "C" else "F", _RUN_NBYTES, 0, item, item, travels=True)

    def overwrites(self, path: str | None, array: Values | None) -> bool:
        """Return False: it writes nothing."""
        del path, array
        return False

    def open(self, spec: OutputSpec, overwrite: bool) -> None:
        """Do nothing."""

    def attach(self) -> None:
        """Do nothing."""

    def write(self, block: Block) -> Piece:
        """Hand back a copy."""
        return Piece(block.bounds, block.host.copy(order="K"))

    def detach(self, sync: bool) -> None:
        """Do nothing."""

    def receive(self, piece: Piece) -> None:
        """Never called: the caller takes the pieces."""
        raise AssertionError(piece)

    def view(self) -> Values | None:
        """Return None: D is gone."""
        return None

    def commit(self) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing."""
