"""`engine="auto"`: which engine, and why."""

import os
import sys
from collections.abc import Callable
from typing import Any

from raymm.engines.base import Engine
from raymm.engines.local import LocalEngine
from raymm.errors import PlanError
from raymm.tiles import Stays

RAY_SECONDS = 20.0
"""Predicted run from which Ray's start-up is noise, and a dead worker costs a tile, not the run."""


def make_engine(engine: Any, predicted_seconds: Callable[[Engine], float]) -> tuple[Engine, str]:
    """Return an engine and the reason for it; one given by the user is returned as it is.

    Parameters
    ----------
    engine : {"auto", "local", "ray"} or Engine
    predicted_seconds : callable
        The predicted run on an engine; only asked for ``"auto"``.
    """
    if isinstance(engine, Engine):
        return engine, "as given"
    if engine == "local":
        return LocalEngine(), "as asked"
    if engine == "ray":
        return _ray_engine(), "as asked"
    if engine != "auto":
        raise PlanError(f'engine={engine!r}: choose "auto", "local", "ray" or give an engine')
    if is_ray_up():
        return _ray_engine(), "Ray is up in this process"
    if os.environ.get("RAY_ADDRESS"):
        return _ray_engine(), "RAY_ADDRESS names a cluster"
    local = LocalEngine()
    seconds = predicted_seconds(local)
    if seconds > RAY_SECONDS:
        return _ray_engine(), f"predicted {seconds:.0f} s are over {RAY_SECONDS:.0f} s"
    return local, f"predicted {seconds:.2g} s are not worth starting Ray"


def check_keeps(stays: Stays, engine: Engine, is_given: bool, was_up: bool) -> None:
    """Raise `PlanError` if nothing would hold D after the run.

    Parameters
    ----------
    stays : {"store", "worker"}
    engine : Engine
        Where the tiles are made.
    is_given : bool
        Whether it is the caller's, and stays open.
    was_up : bool
        Whether the caller had Ray up before.
    """
    if not engine.keeps_blocks or not (is_given or was_up):
        raise PlanError(
            "Refs() needs a cluster that is there after the run: give engine=raymm.RayEngine(...) "
            "and use the result while it is open, or start or join Ray first (ray.init())"
        )
    if stays == "worker" and not is_given:
        raise PlanError(
            'Refs(on="worker") needs workers that are there after the run: give '
            "engine=raymm.RayEngine(...) and use the result while it is open"
        )


def is_ray_up() -> bool:
    """Whether the caller has started or joined Ray; Ray is not imported to find out."""
    ray = sys.modules.get("ray")
    return ray is not None and hasattr(ray, "is_initialized") and bool(ray.is_initialized())


def _ray_engine() -> Engine:
    from raymm.engines.actors import RayEngine  # noqa: PLC0415  Ray takes a second to import

    return RayEngine()
