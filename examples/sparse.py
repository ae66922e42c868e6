"""A sparse C: only its non-empty columns are multiplied and written.

Run: python examples/sparse.py [columns]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import scipy.sparse
import torch

import raymm


def main(columns: int, folder: Path) -> None:
    rng = np.random.default_rng(0)
    A = rng.standard_normal((300, 100), dtype=np.float32)
    C = scipy.sparse.random_array((100, columns), density=0.001, dtype=np.float32, rng=rng)

    # Zero columns stay as reserved zeros of the file: in Fortran order they are not even written.
    D = raymm.multi_dot([A, C], out=raymm.Npy(folder / "D.npy", order="F"))
    print(f"{C.nnz:,} entries, D {D.shape}, {np.count_nonzero(D.any(axis=0)):,} columns not zero")

    # torch's sparse tensors, and sparse small factors, work as well.
    mask = torch.eye(300).to_sparse()
    masked = raymm.chain([mask, A, C])[:5, :8]
    print("the same:", np.allclose(masked, D[:5, :8], atol=1e-4))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000, Path(scratch))
