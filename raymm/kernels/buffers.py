"""Page-aligned memory that is allocated once and used again for every tile."""

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raymm.tiles import PAGE_NBYTES, round_up


class Buffer:
    """A piece of anonymous memory handed out as arrays; the next `array` reuses it.

    Memory: as much as the largest array asked for, plus a page, touched when first written.
    """

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def array(
        self, shape: tuple[int, int], dtype: np.dtype[Any], position: int = 0, pitch: int = 0
    ) -> NDArray[Any]:
        """Return an uninitialised array of `shape`, rows contiguous, congruent with a file.

        Parameters
        ----------
        shape : (int, int)
        dtype : dtype
        position : int
            Where the first entry lies in the output, in bytes: the array's address is equal to it
            modulo a page, so that direct output needs no copy.
        pitch : int
            Distance of neighbouring rows in the output, in bytes. Rows of the array are as far
            apart modulo a page, and exactly as far if they fill the pitch.
        """
        rows, columns = shape
        length = columns * dtype.itemsize
        row_nbytes = length + (pitch - length) % PAGE_NBYTES if pitch > length else length
        phase = position % PAGE_NBYTES
        memory = self._reserve(phase + max(rows, 1) * row_nbytes)
        return np.ndarray(shape, dtype, memory.data, phase, (row_nbytes, dtype.itemsize))

    def _reserve(self, nbytes: int) -> NDArray[np.uint8]:
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(0, np.uint8)  # give the old one back before asking for more
            region = mmap.mmap(-1, round_up(nbytes, PAGE_NBYTES))
            if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= 2**22:
                region.madvise(mmap.MADV_HUGEPAGE)
            self._memory = np.frombuffer(region, np.uint8)
        return self._memory
