"""Parts of a product, a stream of its tiles, functions on it: D is never whole.

Run: python examples/lazy.py [columns]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import raymm


def main(columns: int, folder: Path) -> None:
    rng = np.random.default_rng(0)
    A = rng.standard_normal((300, 100), dtype=np.float32)
    np.savez(folder / "c.npz", C=rng.standard_normal((100, columns), dtype=np.float32))
    chain = raymm.chain([A, f"{folder / 'c.npz'}::C"])  # stored members are read in place
    print(chain)

    print("an entry:", chain[5, 3], "every 1000th column, from the end:", chain[0, ::-1000].shape)
    print("D @ x:", (chain @ np.ones(columns, np.float32))[:3])

    largest = -np.inf
    for tile, block in chain.tiles(tile_columns=5000):  # in order, a few tiles ahead
        largest = max(largest, block.max())
        if largest > 45:
            print(f"found {largest:.1f} before column {tile.stop:,}")
            break

    positive = chain.map(torch.relu).write(folder / "positive.npy")
    print("smallest after relu:", positive[:, :1000].min())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000, Path(scratch))
