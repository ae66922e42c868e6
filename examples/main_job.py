"""The main job at a small size: three files in, one memory-mappable file out, then verified.

Run: python examples/main_job.py [columns] [folder]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import raymm


def main(columns: int, folder: Path) -> None:
    rng = np.random.default_rng(0)
    for name, shape in {"A": (300, 100), "B": (100, 100), "C": (100, columns)}.items():
        np.save(folder / f"{name}.npy", rng.standard_normal(shape, dtype=np.float32))

    chain = raymm.chain([folder / "A.npy", folder / "B.npy", folder / "C.npy"])
    print(chain.plan(folder / "D.npy"))
    D = chain.write(folder / "D.npy", verify=True)

    # D is a memory map: rows and columns are read when they are asked for.
    print("one row:", D[7, :3], "one column:", D[:3, columns - 1])


if __name__ == "__main__":
    width = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    if len(sys.argv) > 2:
        main(width, Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(width, Path(scratch))
