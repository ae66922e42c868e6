"""Multiply A @ B @ C with a huge C: tiles, on this machine or on Ray, into outputs beyond memory.

The public names are loaded when they are first used: ``import raymm`` loads neither Ray nor torch.
"""

import importlib
from typing import Any

_HOMES = {
    "Array": "raymm.sinks.array",
    "Arrow": "raymm.sinks.arrow",
    "Chain": "raymm.chains",
    "DTypeError": "raymm.errors",
    "ExecutionError": "raymm.errors",
    "LocalEngine": "raymm.engines.local",
    "MemoryLimitError": "raymm.errors",
    "Npy": "raymm.sinks.npy",
    "Parquet": "raymm.sinks.parquet",
    "PlanError": "raymm.errors",
    "RayEngine": "raymm.engines.actors",
    "RaymmError": "raymm.errors",
    "Refs": "raymm.sinks.refs",
    "ResultOverflowError": "raymm.errors",
    "ShapeError": "raymm.errors",
    "ShardedMatrix": "raymm.sharded",
    "SinkError": "raymm.errors",
    "SinkExistsError": "raymm.errors",
    "SourceError": "raymm.errors",
    "TileError": "raymm.errors",
    "VerificationError": "raymm.errors",
    "WorkerStartError": "raymm.errors",
    "Zarr": "raymm.sinks.zarr",
    "chain": "raymm.product",
    "multi_dot": "raymm.product",
    "open": "raymm.results:open_result",
    "transpose": "raymm.product",
}

__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raymm' has no attribute {name!r}")
    home, _, inside = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(home), inside or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
