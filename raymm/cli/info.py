"""What `raymm info` tells about this machine."""

import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

import psutil
import threadpoolctl

from raymm.cli.reports import table
from raymm.engines.choosing import RAY_SECONDS, is_ray_up
from raymm.kernels import blas
from raymm.kernels.threads import count_cores, count_threads
from raymm.memory import format_nbytes

PACKAGES = ("numpy", "ray", "torch", "pyarrow", "threadpoolctl", "click", "rich", "psutil")


def machine_facts(version: str) -> dict[str, Any]:
    """Return versions, cores, memory, BLAS, Ray, GPUs and what ``"auto"`` would choose."""
    memory = psutil.virtual_memory()
    engine, reason = _auto()
    return {
        "raymm": version,
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cores": count_cores(),
        "threads": count_threads(count_cores()),
        "memory_nbytes": memory.total,
        "free_memory_nbytes": memory.available,
        "blas": {"multiplies_with": blas.library(), "loaded": _loaded_blas()},
        "ray_address": os.environ.get("RAY_ADDRESS"),
        "gpus": _gpus(),
        "auto": {"engine": engine, "reason": reason},
    }


def machine_table(facts: dict[str, Any]) -> str:
    """Return the facts for people."""
    packages = facts["packages"]
    versions = [f"{name} {version or 'not installed'}" for name, version in packages.items()]
    loaded = ", ".join(
        f"{each['name']} {each['version']} ({each['threads']} threads)"
        for each in facts["blas"]["loaded"]
    )
    address = facts["ray_address"]
    return table(
        [
            ("raymm", f"{facts['raymm']}, Python {facts['python']}, {facts['platform']}"),
            ("packages", ", ".join(versions)),
            ("cores", f"{facts['cores']}, {facts['threads']} threads used"),
            (
                "memory",
                f"{format_nbytes(facts['memory_nbytes'])}, "
                f"{format_nbytes(facts['free_memory_nbytes'])} free",
            ),
            ("blas", f"multiplies with {facts['blas']['multiplies_with']}; {loaded}"),
            (
                "ray",
                f"RAY_ADDRESS={address}" if address else "none is up; one is started if needed",
            ),
            ("gpus", ", ".join(facts["gpus"]) or "none found"),
            ("auto", f"{facts['auto']['engine']}: {facts['auto']['reason']}"),
        ]
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _loaded_blas() -> list[dict[str, Any]]:
    return [
        {"name": each["internal_api"], "version": each["version"], "threads": each["num_threads"]}
        for each in threadpoolctl.threadpool_info()
        if each["user_api"] == "blas"
    ]


def _gpus() -> list[str]:
    """Ask the driver's own tool: importing torch to find out takes seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]


def _auto() -> tuple[str, str]:
    if is_ray_up():
        return "ray", "Ray is up in this process"
    if os.environ.get("RAY_ADDRESS"):
        return "ray", "RAY_ADDRESS names a cluster"
    if _version("ray") is None:
        return "local", "Ray is not installed"
    return "local", f"for runs predicted to take up to {RAY_SECONDS:.0f} s, ray for longer ones"
