"""Ray: one actor per device, in a cluster of the caller's or one that this engine starts."""

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any, TypeAlias

import psutil
import ray
from numpy.typing import NDArray
from ray import exceptions as ray_errors

from raymm.engines import cluster
from raymm.engines.base import (
    DRAIN_SECONDS,
    Call,
    Engine,
    Handle,
    LostError,
    Outcome,
    WorkerId,
)
from raymm.engines.cluster import LOST, OBJECT_LOST, RAY, RAY_GONE, STORE_SHARE
from raymm.engines.remote import CONTROL, KEPT, WorkerActor
from raymm.errors import ExecutionError, PlanError, WorkerStartError
from raymm.kernels.threads import count_cores, count_threads
from raymm.request import Resources, check_count
from raymm.sinks.base import Piece
from raymm.tiles import Bounds, Tile, ceil_div
from raymm.worker import Job, Receipt

Actor: TypeAlias = Any
Ref: TypeAlias = Any
"""Ray's handles are untyped."""

MOST_CPU_WORKERS = 8
"""Per node, by default: more would only multiply the memory of buffers."""
SYNC_SECONDS = 600.0
"""How long a worker may take to get what it wrote onto the disk."""
FACTOR_SHARE = 0.1
"""Of the object store: what factors of earlier jobs may take up."""


class RayEngine(Engine):
    """Workers that are Ray actors; used over many calls, resident factors stay loaded.

    Parameters
    ----------
    num_workers : int, optional
        Default: one per core, at most 8 per node; they share the node's cores.
    num_gpus_per_worker : float
        GPUs for each worker. This version has no kernel for GPUs: anything but 0 is refused.
    threads_per_worker : int, optional
        Blocks a worker multiplies at a time, one BLAS thread each. Default: ``OMP_NUM_THREADS``
        if set, else the node's cores divided by its workers.
    address : str, optional
        A cluster to join. Default: the Ray that this process is connected to, or
        ``RAY_ADDRESS``, else a private one on this machine, which ends with the engine.

    Notes
    -----
    A Ray that was up before is used and left up. Actors have no fixed names, are never restarted
    by Ray, and end with ``close()`` or with this process.
    """

    name = "ray"
    keeps_blocks = True

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        num_gpus_per_worker: float = 0,
        threads_per_worker: int | None = None,
        address: str | None = None,
    ) -> None:
        super().__init__()
        for name, value in {
            "num_workers": num_workers,
            "threads_per_worker": threads_per_worker,
        }.items():
            if value is not None:
                check_count(name, value)
        if num_gpus_per_worker < 0:
            raise PlanError(f"num_gpus_per_worker={num_gpus_per_worker:g} must not be negative")
        self._wanted_workers, self._wanted_threads = num_workers, threads_per_worker
        self._num_gpus, self._address = num_gpus_per_worker, address
        self._started_ray, self._session = False, ""
        self._actors: dict[WorkerId, Actor] = {}
        self._held: dict[WorkerId, set[str]] = {}
        """Content keys of the factors that each worker holds."""
        self._factors: dict[str, Ref] = {}
        self._factor_nbytes: dict[str, int] = {}
        self._sources: dict[int, Ref] = {}
        """Tiles put into the object store and not finished, by index."""
        self._pieces: dict[Ref, list[Ref]] = {}
        self._kept: dict[Ref, list[Piece]] = {}
        """Tiles that stay in the cluster, by the call that makes them."""
        self._flight: dict[Ref, WorkerId] = {}
        self._loading: dict[Ref, tuple[WorkerId, tuple[str, ...]]] = {}
        self._loaded: set[WorkerId] = set()
        """Workers that have the current job's sinks attached."""
        self._job_id = ""
        self._count = 0
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._forgotten: list[str] = []

    def resources(self) -> Resources:
        """Return what the workers will have.

        Ray is not started to find out; a cluster that was named is joined.
        """
        if cluster.given_address(self._address):
            self._connect(0)
        cores, gpus, memory = [count_cores()], 0, psutil.virtual_memory()
        free, store = memory.available, int(memory.total * STORE_SHARE)
        if ray.is_initialized():
            gpus = int(RAY.cluster_resources().get("GPU", 0))
            if usable := cluster.usable_nodes():
                cores = [int(node["CPU"]) for node in usable]
                store = int(min(node.get("object_store_memory", store) for node in usable))
                if len(usable) > 1:  # what Ray counts as memory is all that is known of others
                    free = int(min(node.get("memory", free) for node in usable))
        nodes = len(cores)
        workers = self._wanted_workers or sum(min(each, MOST_CPU_WORKERS) for each in cores)
        per_node = ceil_div(workers, nodes)
        threads = self._wanted_threads or count_threads(max(1, min(cores) // per_node))
        memory_nbytes, used = free // per_node, cluster.used_store_nbytes()
        return Resources(
            self.name, workers, threads, memory_nbytes, store, nodes, gpus, False, used
        )

    def open(self, in_flight_nbytes: int = 0) -> None:
        """Join or start Ray, and start the workers without waiting for them."""
        with self._lock:
            self._connect(in_flight_nbytes)
            resources = self.resources()
            if len(self._actors) < resources.workers:
                try:
                    self._check_feasible(resources)
                except WorkerStartError:
                    self.close()
                    raise
            while len(self._actors) < resources.workers:
                self._start(resources.threads)
            self.forget()

    def depth(self, max_in_flight: int, tile_nbytes: int) -> int:
        """Keep tiles in flight within a share of the object store."""
        if not tile_nbytes:
            return max_in_flight
        resources = self.resources()
        budget = int(resources.store_nbytes * STORE_SHARE)
        return max(1, min(max_in_flight, budget // (tile_nbytes * resources.workers)))

    def worker(self, worker: WorkerId) -> Actor | None:
        """Return a worker's handle; None if it is gone."""
        return self._actors.get(worker)

    def forget_later(self, keys: set[str]) -> None:
        """Have workers let go of matrices' blocks at the next occasion; safe in a finalizer."""
        self._forgotten.extend(keys)

    def forget(self, keys: Iterable[str] = ()) -> None:
        """Have workers let go of matrices' blocks, and of those that were to be forgotten later."""
        forgotten = [*keys, *self._forgotten]
        self._forgotten.clear()
        for actor in self._actors.values() if forgotten else ():
            actor.drop.remote(forgotten)

    @property
    def is_open(self) -> bool:
        """Whether there are workers."""
        return bool(self._actors) and ray.is_initialized()

    def close(self) -> None:
        """End the workers, and Ray if this engine started it."""
        with self._lock:
            actors, started_ray = list(self._actors.values()), self._started_ray
            self._forget_actors()
            self._started_ray = False
            cluster.end(actors, started_ray)

    def _unload(self, job_id: str, sync: bool) -> None:
        """Detach the job's sinks on all workers that have them.

        What a worker wrote that has died is in its node's page cache: if that is the driver's node,
        the sink's own sync covers it.
        """
        loaded = [self._actors[worker] for worker in self._loaded if worker in self._actors]
        self._loaded.clear()
        if not ray.is_initialized():
            return
        calls = [actor.unload.remote(job_id, sync) for actor in loaded]
        for call in calls:
            try:
                ray.get(call, timeout=SYNC_SECONDS if sync else DRAIN_SECONDS)
            except (*LOST, ray_errors.GetTimeoutError) as error:
                if isinstance(error, ray_errors.GetTimeoutError) and sync:
                    raise ExecutionError(
                        f"a worker did not sync its output within {SYNC_SECONDS:.0f} s"
                    ) from error
            except ray_errors.RayTaskError as error:
                raise cluster.cause(error) from None

    def _connect(self, in_flight_nbytes: int) -> None:
        """Make sure that Ray is up; actors of an earlier one are gone with it."""
        address = cluster.given_address(self._address)
        if self._address and ray.is_initialized():
            cluster.check_same(self._address)
        num_cpus = max(count_cores(), self._wanted_workers or 1)
        if cluster.connect(address, num_cpus, in_flight_nbytes):
            self._started_ray = True
            self._forget_actors()
        context = RAY.get_runtime_context()
        session = f"{context.gcs_address} {context.get_job_id()}"
        if session != self._session:  # the caller has shut down Ray and started it again
            self._forget_actors()
            self._session = session

    def _check_feasible(self, resources: Resources) -> None:
        if self._num_gpus:
            asked = f"asked {self._num_gpus:g} GPU per worker, the cluster has {resources.gpus}"
            if resources.gpus:
                asked += ", and this version of raymm has no kernel for them"
            raise WorkerStartError(f"{asked}: leave num_gpus_per_worker at 0 to use the CPUs")
        if not cluster.usable_nodes():
            raise WorkerStartError(
                f"asked {resources.threads} CPU per worker, no node of the cluster has any: "
                "give Ray CPUs (num_cpus=)"
            )

    def _start(self, threads: int) -> WorkerId:
        """Start a worker; it asks Ray for a CPU per thread."""
        name = f"worker-{self._count}"
        self._count += 1
        largest = max((node["CPU"] for node in cluster.usable_nodes()), default=1)
        actor_class = RAY.remote(concurrency_groups={CONTROL: 1, KEPT: 1})(WorkerActor).options(
            num_cpus=max(1, min(threads, int(largest))),
            num_gpus=0,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        self._actors[name] = actor_class.remote(name, threads)
        self._held[name] = set()
        if self._finalizer is not None:
            self._finalizer.detach()
        actors = list(self._actors.values())
        self._finalizer = weakref.finalize(self, cluster.end, actors, self._started_ray)
        return name

    def _forget_actors(self) -> None:
        for kept in (self._actors, self._held, self._factors, self._sources, self._pieces):
            kept.clear()
        self._kept.clear()
        self._flight.clear()
        self._loading.clear()
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None

    def _workers(self) -> list[WorkerId]:
        return list(self._actors)

    def _load(self, worker: WorkerId, job: Job, factors: dict[str, NDArray[Any]]) -> Handle:
        self._evict(job.factor_keys)
        held = self._held[worker]
        new = tuple(key for key in job.factor_keys if key not in held)
        for key in new:
            if key not in self._factors:
                self._factors[key] = cluster.put(factors[key], factors[key].nbytes)
                self._factor_nbytes[key] = factors[key].nbytes
        references = [self._factors[key] for key in new]
        handle: Handle = self._actors[worker].load.remote(job, new, *references)
        self._loading[handle] = worker, new
        self._job_id = job.id
        return handle

    def _evict(self, keys: tuple[str, ...]) -> None:
        """Drop factors of earlier jobs once they fill a good part of the object store."""
        if sum(self._factor_nbytes.values()) <= self._factor_limit():
            return
        for worker, held in self._held.items():
            if held - set(keys):
                self._actors[worker].retain.remote(keys)
                held.intersection_update(keys)
        self._factors = {key: self._factors[key] for key in keys if key in self._factors}
        self._factor_nbytes = {key: self._factor_nbytes[key] for key in self._factors}

    def _factor_limit(self) -> int:
        return int(self.resources().store_nbytes * FACTOR_SHARE)

    def _submit(self, worker: WorkerId, job: Job, call: Call) -> Handle:
        tile, source = call
        sent: Any = None if source.operand.is_held else source.cut(tile.start, job.read_stop(tile))
        if source.operand.is_held:
            if tile.index not in self._sources:
                piece = source.cut(tile.start, job.read_stop(tile))
                self._sources[tile.index] = cluster.put(piece, piece.operand.nbytes)
            sent = self._sources[tile.index]
        count = job.travelling * sum(1 for _ in job.grid.blocks(tile)) if job.travelling else 0
        returned = 1 + count + job.staying
        method = self._actors[worker].run.options(num_returns=returned, name=f"raymm:{tile.index}")
        receipt, *pieces = _as_list(method.remote(job.id, tile, sent, count, job.staying))
        self._flight[receipt] = worker
        if pieces:
            self._pieces[receipt] = pieces[:count]
            whole = Bounds(0, job.grid.rows, tile.start, tile.stop)
            self._kept[receipt] = [Piece(whole, ref, worker) for ref in pieces[count:]]
        handle: Handle = receipt
        return handle

    def _wait(self, handles: list[Handle], timeout: float) -> list[Handle]:
        try:
            ended, _ = ray.wait(handles, num_returns=1, timeout=timeout, fetch_local=False)
        except RAY_GONE as error:
            raise ExecutionError(f"Ray is gone: {error}") from error
        return list(ended)

    def _result(self, handle: Handle) -> Any:
        pieces, kept = self._pieces.pop(handle, []), self._kept.pop(handle, [])
        self._flight.pop(handle, None)
        loading = self._loading.pop(handle, None)
        try:
            result = RAY.get(handle)
            if isinstance(result, Receipt):
                return Outcome(result, [*RAY.get(pieces), *kept])
        except LOST as error:
            # An object can be lost and its worker live; all else (a killed process, a lost node)
            # means that the worker is gone.
            is_worker_gone = not isinstance(error, OBJECT_LOST)
            raise LostError(cluster.first_line(error), is_worker_gone) from error
        except ray_errors.RayTaskError as error:
            raise cluster.cause(error) from None
        except RAY_GONE as error:
            raise ExecutionError(f"Ray is gone: {error}") from error
        if loading is not None and loading[0] in self._held:
            self._held[loading[0]].update(loading[1])
            self._loaded.add(loading[0])
        return result

    def _replace(self, worker: WorkerId) -> WorkerId:
        actor = self._actors.pop(worker, None)
        self._held.pop(worker, None)
        if actor is not None:
            ray.kill(actor)
        return self._start(self.resources().threads)

    def _finish(self, tile: Tile) -> None:
        self._sources.pop(tile.index, None)

    def _drain(self, handles: list[Handle]) -> None:
        """Have workers skip their tiles, wait for those under way, kill workers that do not end.

        Calls are not cancelled: after ``ray.cancel`` of a queued call an actor may wait half a
        minute for it to come, in its turn, before it answers the next (Ray 2.60).
        """
        self._sources.clear()
        self._pieces.clear()
        self._kept.clear()
        if not handles or not ray.is_initialized():
            return
        tiles = [handle for handle in handles if handle in self._flight]
        with contextlib.suppress(*LOST, *RAY_GONE):
            for worker in {self._flight[handle] for handle in tiles} & self._actors.keys():
                self._actors[worker].interrupt.remote(self._job_id)
            running = _pending(tiles, DRAIN_SECONDS)
            for handle in set(tiles) - set(running):
                with contextlib.suppress(Exception):  # Ray prints errors that nobody looks at
                    RAY.get(handle)
            for worker in {self._flight[handle] for handle in running} & self._actors.keys():
                self._held.pop(worker, None)
                ray.kill(self._actors.pop(worker))
            loads = [handle for handle in handles if handle in self._loading]
            starting = _pending(loads, 0)
            for handle in loads:
                self._settle(handle, handle in starting)
        self._flight.clear()
        self._loading.clear()

    def _settle(self, load: Handle, is_starting: bool) -> None:
        """Note what a worker has loaded, or have it drop the job as soon as it has started."""
        worker, _ = self._loading[load]
        if is_starting and worker in self._actors:
            self._actors[worker].unload.remote(self._job_id, False)
        elif not is_starting:
            with contextlib.suppress(Exception):
                self._result(load)

    def _diagnosis(self) -> str:
        total, free = RAY.cluster_resources(), RAY.available_resources()
        threads = self.resources().threads
        return (
            f"no worker became ready: {len(self._actors)} workers of {threads} CPU each were "
            f"asked for; the cluster has {total.get('CPU', 0):g} CPUs, {free.get('CPU', 0):g} of "
            "them free. If the caller is an actor that holds them, give it fewer; if other jobs "
            "do, wait for them or lower num_workers"
        )


def _as_list(returned: Any) -> list[Ref]:
    return returned if isinstance(returned, list) else [returned]


def _pending(handles: list[Handle], timeout: float) -> list[Handle]:
    """Return the calls that do not end within `timeout` seconds."""
    if not handles:
        return []
    _, pending = ray.wait(handles, num_returns=len(handles), timeout=timeout, fetch_local=False)
    return list(pending)
