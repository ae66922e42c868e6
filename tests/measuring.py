"""Private memory of processes while something runs."""

import os
import threading

import psutil

from raymm.events import WorkerReady


class PeakMemory:
    """Samples the private memory (USS) of processes; `growth` is the most any has added.

    Private: what would be given back if the process ended. Pages of a shared file map that were
    written count, the page cache does not.
    """

    def __init__(self, *pids):
        self._processes = [psutil.Process(pid) for pid in pids or (os.getpid(),)]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self):
        self._before = [private_nbytes(process) for process in self._processes]
        self.peaks = list(self._before)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _sample(self):
        while True:
            is_last = self._stop.wait(0.005)
            now = map(private_nbytes, self._processes)
            self.peaks = list(map(max, self.peaks, now))
            if is_last:
                return

    @property
    def growth(self):
        """The most that one process has added, in bytes."""
        return max(peak - before for peak, before in zip(self.peaks, self._before, strict=True))


def private_nbytes(process):
    return process.memory_full_info().uss


class PidCallback:
    """Collects the processes of the workers that became ready."""

    def __init__(self):
        self.pids = set()

    def __call__(self, event):
        if isinstance(event, WorkerReady):
            self.pids.add(event.pid)
