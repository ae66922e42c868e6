"""The blocks of a matrix in a cluster: where they are, calls on them; lost ones computed again."""

import uuid
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import ray
from numpy.typing import NDArray
from ray import exceptions as ray_errors

from raymm.engines import cluster
from raymm.engines.cluster import LOST, RAY
from raymm.errors import ExecutionError, ShapeError
from raymm.keeping import Kept
from raymm.run import Pass, placed_source, repeat
from raymm.sinks.base import OutputSpec
from raymm.sinks.refs import Place, Placed, Refs
from raymm.sources.ray_objects import LostBlockError, RaySource, is_lost
from raymm.sources.ray_opening import calls_at_once, check_free_cpu
from raymm.tiles import Grid, Stays

Values: TypeAlias = NDArray[Any]
Again: TypeAlias = Callable[[list[int]], dict[int, Place]]
"""Computes some tiles again; returns where they are."""

ATTEMPTS = 4
"""How often in a row a block may be lost before that is an error."""
HINT = "take a part of it (matrix[...]), which computes it again, and give the matrix anew"


class Shards:
    """The blocks of one matrix; all views of it share them.

    A block is an array whose rows are a tile's columns.
    """

    def __init__(self, placed: Placed, engine: Any, again: Again | None) -> None:
        self.on: Stays = placed.on
        self.spec: OutputSpec = placed.spec
        self._places = dict(placed.places)
        self.engine = engine
        """The engine whose workers keep the blocks or can compute them again, if it stays open."""
        self._again = again
        self._session = _session()
        self._keys = {place.key for place in self._places.values()}
        if self.on == "worker":
            finalizer = weakref.finalize(self, _forget, weakref.ref(engine), self._keys)
            finalizer.atexit = False

    @property
    def grid(self) -> Grid:
        """How the matrix is cut."""
        return Placed(self.spec, self.on, self._places).grid

    def check(self) -> None:
        """Raise `ExecutionError` if the blocks cannot be there any more."""
        if len(self._places) < len(self.grid):
            raise ExecutionError("this matrix was freed: compute it again")
        if not ray.is_initialized() or _session() != self._session:
            raise ExecutionError(
                "the Ray that held this matrix has ended: keep the engine open, or start Ray "
                "yourself (ray.init()), for as long as the matrix is used"
            )
        if self.on == "worker" and not self.engine.is_open:
            raise ExecutionError(
                "the engine whose workers held this matrix is closed: keep it open for as long as "
                'the matrix is used, or keep the blocks in the object store, Refs(on="store")'
            )

    def source(self, tiles: range | None = None) -> RaySource:
        """Return runs of the blocks' rows as an operand; default: all of them."""
        self.check()
        tiles = range(len(self.grid)) if tiles is None else tiles
        self._restore_gone(tiles)
        source = placed_source(Placed(self.spec, self.on, self._places), self.engine, tiles)
        return replace(source, name=f"D in {Refs(self.on).name}", hint=HINT, holder=self)

    def operand(self) -> RaySource:
        """Return all of the blocks' rows as an operand; workers are asked whether they live."""
        self.check()
        if self.on == "worker":
            self._restore_gone(range(len(self.grid)))
            calls = {
                place.worker: self.engine.worker(place.worker).drop.remote([])
                for place in {place.worker: place for place in self._places.values()}.values()
            }
            dead = {worker for worker, call in calls.items() if _is_dead(call)}
            lost = [tile for tile, place in self._places.items() if place.worker in dead]
            if lost:
                self._restore(lost, None)
        return self.source()

    def read(self, function: Callable[[], Any]) -> Any:
        """Return what a function that reads blocks returns; lost blocks are computed again."""
        for _ in range(ATTEMPTS * max(1, len(self._places))):
            try:
                return function()
            except LostBlockError as error:
                self._restore([error.place], error)
        raise ExecutionError("blocks of this matrix are lost as fast as they are computed again")

    def map(self, function: Callable[[Values], Any], key: str = "") -> Iterator[list[Any]]:
        """Yield what a function returns for each block, in order; it runs where the block is.

        With `key`, the second of two values it returns stays there under that key: its `Place`
        takes its place.
        """
        self.check()
        calls: deque[tuple[int, list[Any]]] = deque()
        at_once = calls_at_once()
        for tile in range(len(self.grid)):
            calls.append((tile, self.call(tile, function, key)))
            if len(calls) >= at_once:
                yield self._result(*calls.popleft(), function, key)
        while calls:
            yield self._result(*calls.popleft(), function, key)

    def mapped(self, function: Callable[[Values], tuple[Any, Values]]) -> "Shards":
        """Return the matrix of what a function makes of each block: ((shape, dtype), array)."""
        key = uuid.uuid4().hex
        shapes, places = [], {}
        for tile, (kind, place) in enumerate(self.map(function, key)):
            shapes.append(kind)
            places[tile] = place
        for tile, ((_, width), dtype) in enumerate(shapes):
            (_, first), wanted = shapes[0]
            if (width, dtype) != (first, wanted):
                raise ShapeError(
                    f"the function makes blocks that do not fit together: block {tile} has "
                    f"vectors of {width} {dtype}, block 0 of {first} {wanted}"
                )
        spec = self.spec
        if shapes:
            (_, rows), dtype = shapes[0]
            spec = replace(spec, rows=rows, dtype=dtype, grid=replace(self.grid, rows=rows))

        def again(tiles: list[int]) -> dict[int, Place]:
            calls = [(tile, self.call(tile, function, key)) for tile in tiles]
            return {tile: self._result(tile, call, function, key)[1] for tile, call in calls}

        return Shards(Placed(spec, self.on, places), self.engine, again)

    def call(self, tile: int, function: Callable[[Values], Any], key: str = "") -> list[Any]:
        """Call a function on a block, where it is; return references to what it returns."""
        self._restore_gone((tile,))
        returned = 2 if key else 1
        place = self._ref(tile)
        if isinstance(place, Kept):
            method = place.actor.map_kept.options(num_returns=returned)
            refs = method.remote(place.key, tile, function, key)
        else:
            # No CPU is asked for: workers of an open engine may hold them all.
            task = RAY.remote(_apply).options(num_cpus=0, num_returns=returned, name="raymm:map")
            refs = task.remote(place, function)
        return refs if isinstance(refs, list) else [refs]

    def dataset(self, tabler: Callable[[int], Callable[[Values], Any]]) -> Any:
        """Return a dataset of the tables that ``tabler(start)`` makes of each block."""
        self.source()  # what is known to be lost is computed again
        check_free_cpu("a dataset")
        calls = (self.call(tile.index, tabler(tile.start)) for tile in self.grid)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray Data's, of its own settings
            import ray.data as ray_data  # noqa: PLC0415  two seconds

            return ray_data.from_arrow_refs([ref for (ref,) in calls])

    def free(self) -> None:
        """Let go of all blocks."""
        self._places.clear()
        self._again = None
        if self.on == "worker" and self.engine.is_open:
            self.engine.forget(self._keys)

    def _result(
        self, tile: int, refs: list[Any], function: Callable[[Values], Any], key: str
    ) -> list[Any]:
        """Return the value of a call on a block, repeated if the block is lost meanwhile."""
        for _ in range(ATTEMPTS):
            try:
                value = RAY.get(refs[0])
            except (*LOST, ray_errors.RayTaskError) as error:
                if not is_lost(error):
                    raise cluster.cause(error) from None
                self._restore([tile], error)
                refs = self.call(tile, function, key)
            else:
                return [value, Place(refs[1], self._places[tile].worker, key)] if key else [value]
        raise ExecutionError(f"block {tile} was lost {ATTEMPTS} times in a row")

    def _ref(self, tile: int) -> Any:
        place = self._places[tile]
        if self.on == "store":
            return place.ref
        return Kept(self.engine.worker(place.worker), place.key, tile)

    def _restore_gone(self, tiles: Iterable[int]) -> None:
        """Compute blocks again if the worker of one of these is known to be gone."""
        if self.on == "worker" and any(map(self._is_gone, tiles)):
            self._restore([tile for tile in self._places if self._is_gone(tile)], None)

    def _is_gone(self, tile: int) -> bool:
        return self.engine.worker(self._places[tile].worker) is None

    def _restore(self, tiles: list[int], error: Exception | None) -> None:
        """Compute blocks again."""
        if self._again is None:
            raise _gone_for_good(tiles) from error
        self._places.update(self._again(tiles))
        self._keys.update(self._places[tile].key for tile in tiles)


def gather(placed: Placed, work: Pass, is_open: bool) -> Shards:
    """Return the blocks that a pass has left in the cluster; `is_open`: its engine stays open."""
    engine: Any = work.engine  # one that keeps blocks

    def again(tiles: list[int]) -> dict[int, Place]:
        if not engine.is_open:
            raise _gone_for_good(tiles)
        sink = Refs(placed.on)
        sink.open(placed.spec, False)
        repeat(work, sink, [placed.grid[tile] for tile in tiles])
        return dict(sink.commit().places)

    return Shards(placed, engine if is_open else None, again if is_open else None)


def _gone_for_good(tiles: list[int]) -> ExecutionError:
    return ExecutionError(
        f"block {', '.join(map(str, tiles[:8]))} is lost, and no engine is open to compute it "
        "again: give an engine of yours, engine=raymm.RayEngine(...), and keep it open"
    )


def _is_dead(call: Any) -> bool:
    try:
        RAY.get(call)
    except LOST:
        return True
    return False


def _apply(block: Values, function: Callable[[Values], Any]) -> Any:
    return function(block)


def _forget(engine: Any, keys: set[str]) -> None:
    if (found := engine()) is not None:
        found.forget_later(keys)


def _session() -> str:
    """Return which Ray this process is connected to."""
    context = RAY.get_runtime_context()
    return f"{context.gcs_address} {context.get_job_id()}"
