"""Ray itself: joining or starting it, its nodes, what its errors mean."""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import ray
from ray import exceptions as ray_errors

from raymm.errors import ExecutionError, PlanError, RaymmError, WorkerStartError

RAY: Any = ray
"""Ray, whose handles and half of whose functions are untyped."""

STORE_NBYTES = 2**28
"""Least object store of a Ray that raymm starts."""
STORE_SHARE = 0.3
"""Of memory, or of the store itself: what raymm fills at most."""

LOST = (
    ray_errors.RayActorError,
    ray_errors.ObjectLostError,
    ray_errors.OutOfMemoryError,
    ray_errors.WorkerCrashedError,
    ray_errors.NodeDiedError,
    ray_errors.ActorUnschedulableError,
    ray_errors.TaskCancelledError,
)
"""A worker or an object is lost, and nothing is wrong with the work."""
OBJECT_LOST = (ray_errors.ObjectLostError, ray_errors.TaskCancelledError)
RAY_GONE = (ray_errors.LocalRayletDiedError, ray_errors.RaySystemError)


def connect(address: str | None, num_cpus: int, in_flight_nbytes: int) -> bool:
    """Use the Ray that is up, else join `address` or start one; return whether this did it.

    Raises
    ------
    PlanError
        The connection is Ray Client's.
    WorkerStartError
        Ray does not start, or cannot be joined; Ray's own advice is kept.
    """
    if RAY.util.client.ray.is_connected() or (address or "").startswith("ray://"):
        raise PlanError(
            "a connection through Ray Client (ray://) sends every byte through a proxy: "
            "run the script on the cluster with `ray job submit`"
        )
    if ray.is_initialized():
        return False
    try:
        with _signal_handlers_kept():
            if address:
                ray.init(address=address, log_to_driver=False)
            else:
                _start(num_cpus, in_flight_nbytes)
    except (ConnectionError, RuntimeError, ValueError, OSError, ray_errors.RayError) as error:
        verb = "join" if address else "start"
        raise WorkerStartError(f"could not {verb} Ray: {error}") from error
    return True


def _start(num_cpus: int, in_flight_nbytes: int) -> None:
    store = max(4 * in_flight_nbytes, STORE_NBYTES)
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        num_cpus=num_cpus,
        logging_level=logging.ERROR,  # a library does not print where its Ray runs
        object_store_memory=min(store, int(psutil.virtual_memory().total * STORE_SHARE)),
    )


def check_same(address: str) -> None:
    """Raise `PlanError` if the Ray that is up is not the one that was named."""
    current = RAY.get_runtime_context().gcs_address
    host, _, port = address.rpartition(":")
    if port.isdigit() and _resolved(host, port) != _resolved(*current.rsplit(":", 1)):
        raise PlanError(
            f"address={address!r} was asked for, and this process is connected to {current}: "
            "leave address out, or disconnect first (ray.shutdown())"
        )


def _resolved(host: str, port: str) -> tuple[str, str]:
    """Return an address with its host as a number, if it has one."""
    try:
        return socket.gethostbyname(host), port
    except OSError:
        return host, port


def put(value: Any, nbytes: int) -> Any:
    """Put a value into the object store; a full one is an `ExecutionError`."""
    try:
        return RAY.put(value)
    except (ray_errors.ObjectStoreFullError, ray_errors.OutOfDiskError) as error:
        free = RAY.available_resources().get("object_store_memory", 0)
        raise ExecutionError(
            f"the object store has no room for {nbytes:,} bytes ({free:,.0f} are free): lower "
            "tile_columns or max_in_flight, or give Ray a larger object_store_memory"
        ) from error
    except RAY_GONE as error:
        raise ExecutionError(f"Ray is gone: {first_line(error)}") from error


def given_address(address: str | None) -> str | None:
    """Return the cluster that the user named."""
    return address or os.environ.get("RAY_ADDRESS")


def usable_nodes() -> list[dict[str, float]]:
    """Return the resources of the nodes that a CPU worker can be placed on."""
    alive = [node["Resources"] for node in RAY.nodes() if node["Alive"]]
    return [node for node in alive if node.get("CPU", 0) >= 1]


def used_store_nbytes() -> int:
    """Return what is taken of all object stores; what was freed may count for another second."""
    if not ray.is_initialized():
        return 0
    name = "object_store_memory"
    total, free = RAY.cluster_resources().get(name, 0), RAY.available_resources().get(name, 0)
    return max(0, int(total - free))


def end(actors: list[Any], started_ray: bool) -> None:
    """Kill workers, and shut down a Ray of our own."""
    if not ray.is_initialized():
        return
    for actor in actors:
        with contextlib.suppress(*LOST, *RAY_GONE, ValueError):
            ray.kill(actor)
    if started_ray:
        ray.shutdown()


def cause(error: Any) -> Exception:
    """Return what was raised in a worker, with the worker's traceback as a note."""
    original = getattr(error.cause, "client_exc", None) or error.cause
    if not isinstance(original, Exception):
        return ExecutionError(str(error))
    if not isinstance(original, RaymmError):
        original.add_note(f"In a worker:\n{getattr(error, 'traceback_str', error)}")
    return original


def first_line(error: Exception) -> str:
    """Return the gist of one of Ray's long messages."""
    text = str(error).strip()
    return text.splitlines()[0].rstrip(". ") if text else type(error).__name__


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Put the SIGTERM handler back that `ray.init` replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
