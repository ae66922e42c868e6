"""Which worker multiplies which tile next."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from raymm.tiles import ceil_div

Item = TypeVar("Item")

WORTH_HELPING = 3
"""Shorter runs are left to their worker: another one would read for them once more."""


class InOrder(Generic[Item]):
    """Whoever asks gets the next one."""

    def __init__(self, items: Iterator[Item]) -> None:
        self._items = items

    def take(self, worker: str | None) -> Item | None:
        """Return the next one for a worker, or for whoever is ready first; None: none is left."""
        del worker
        return next(self._items, None)

    def leave(self, worker: str) -> None:
        """Do nothing: nobody has anything to leave."""


class Runs(Generic[Item]):
    """Each worker gets neighbours, one after another, and in the end helps the others.

    For operands of which a worker keeps what it has read for the next tile. A worker without a run
    takes one that nobody has, then the second half of the longest that is left.
    """

    def __init__(self, items: Sequence[Item], workers: int) -> None:
        self._items = items
        length = max(1, ceil_div(len(items), max(1, workers)))
        starts = range(0, len(items), length)
        self._free = deque(range(start, min(start + length, len(items))) for start in starts)
        self._taken: dict[str, range] = {}

    def take(self, worker: str | None) -> Item | None:
        """Return the next one for a worker, or for whoever is ready first; None: none is left."""
        if worker is None:
            run = self._free.popleft() if self._free else range(0)
            if run[1:]:
                self._free.appendleft(run[1:])
            return self._items[run[0]] if run else None
        run = self._taken.get(worker) or self._begin(worker)
        if not run:
            return None
        self._taken[worker] = run[1:]
        return self._items[run[0]]

    def leave(self, worker: str) -> None:
        """Give what is left of a worker's run to the others: it is gone."""
        run = self._taken.pop(worker, None)
        if run:
            self._free.append(run)

    def _begin(self, worker: str) -> range:
        if self._free:
            return self._free.popleft()
        other = max(self._taken, key=lambda each: len(self._taken[each]), default=worker)
        run = self._taken.get(other, range(0))
        if len(run) < WORTH_HELPING:
            return range(0)
        kept = len(run) // 2
        self._taken[other] = run[:kept]
        return run[kept:]
