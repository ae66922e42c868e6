"""Combining the tiles' partial results in an order that nothing can change. Pure."""

from collections.abc import Callable
from typing import Generic, TypeVar

State = TypeVar("State")


class CombineTree(Generic[State]):
    """A fixed binary tree over tile numbers; each pair is combined as soon as both are there.

    The shape of the tree follows from the number of tiles alone, so the result has the same bits
    in whatever order they come. Memory: one state for each gap among the tiles that are there, and
    one for each level.
    """

    def __init__(self, count: int, combine: Callable[[State, State], State]) -> None:
        self._count, self._combine = count, combine
        self._nodes: dict[tuple[int, int], State] = {}
        """By level and place: the node covers tiles ``place << level`` and following."""

    def add(self, tile: int, state: State) -> None:
        """Take the state of a tile, once."""
        level, place = 0, tile
        while (length := -(-self._count >> level)) > 1:
            sibling = place ^ 1
            if sibling < length:
                other = self._nodes.pop((level, sibling), None)
                if other is None:
                    break
                pair = (other, state) if sibling < place else (state, other)
                state = self._combine(*pair)
            level, place = level + 1, place >> 1
        self._nodes[level, place] = state

    def __len__(self) -> int:
        """Return how many states are held."""
        return len(self._nodes)

    def root(self) -> State:
        """Return the state of all tiles together."""
        if len(self._nodes) != 1:
            raise ValueError(f"{len(self._nodes)} states are left: not all tiles are there")
        (state,) = self._nodes.values()
        return state
