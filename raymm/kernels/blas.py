"""One product on one thread, by the library that is fastest on this processor.

Which library that is follows from the processor's vendor alone, never from timing, so that the
same request gives the same bits on the same kind of device. Measured for a band of 3000x100 by
100x1024 in float32 on one core: AMD EPYC 9005: OpenBLAS (NumPy) 226 GFLOP/s with its AVX-512
kernels and 125 with AVX2 ones, MKL (torch) 105. On Intel's processors MKL is the faster.
"""

import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Multiply: TypeAlias = Callable[[Array, Array, Array], None]


@cache
def library() -> str:
    """Return ``"torch"`` (MKL) on an Intel processor under Linux, else ``"numpy"``."""
    if platform.machine() in ("x86_64", "AMD64") and "GenuineIntel" in _cpuinfo():
        import torch  # noqa: PLC0415  loaded only where it is the faster one: 2 s

        if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
            return "torch"
    return "numpy"


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return ""
    with path.open() as lines:
        return next((line for line in lines if line.startswith("vendor_id")), "")


def multiply(left_MK: Array, right_KN: Array, out_MN: Array) -> None:
    """Write ``left_MK @ right_KN`` into `out_MN`, all of one dtype, on the calling thread.

    `out_MN` is C-contiguous along its last axis; its rows may lie further apart than they are
    long.
    """
    if library() == "torch" and out_MN.dtype in (np.float32, np.float64) and out_MN.size:
        _torch_multiply(left_MK, right_KN, out_MN)
    else:
        np.matmul(left_MK, right_KN, out=out_MN)


def _torch_multiply(left_MK: Array, right_KN: Array, out_MN: Array) -> None:
    import torch  # noqa: PLC0415

    # Operands are writable copies or views of them: torch warns about read-only ones.
    left, right, out = map(torch.from_numpy, (left_MK, right_KN, out_MN))
    torch.mm(left, right, out=out)


def prepare_thread() -> None:
    """Give the calling thread one BLAS thread (for torch, whose setting is per thread)."""
    if library() == "torch":
        import torch  # noqa: PLC0415

        torch.set_num_threads(1)
