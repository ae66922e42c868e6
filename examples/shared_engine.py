"""Several products on one set of Ray workers: the folded factors travel to each worker once.

Run: python examples/shared_engine.py
"""

import tempfile
from pathlib import Path

import numpy as np

import raymm
from raymm.events import Event, RunFinished, WorkerReady


def report(event: Event) -> None:
    if isinstance(event, WorkerReady):
        print(f"{event.worker} is ready on {event.device}, process {event.pid}")
    if isinstance(event, RunFinished):
        print(f"{event.shape} in {event.seconds:.2f} s, limited by: {event.limit}")


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    A = rng.standard_normal((300, 100), dtype=np.float32)
    B = rng.standard_normal((100, 100), dtype=np.float32)
    with raymm.RayEngine(num_workers=2) as engine:
        for day in range(3):
            C = rng.standard_normal((100, 20_000), dtype=np.float32)
            out = folder / f"day{day}.npy"
            raymm.multi_dot([A, B, C], out=out, engine=engine, progress=report)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(Path(scratch))
