"""Vectors in Parquet, scored against a few queries, into a Parquet dataset that others read.

Run: python examples/tables.py [vectors]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

import raymm


def main(count: int, folder: Path) -> None:
    rng = np.random.default_rng(0)
    for part in range(4):  # as another program may have left them
        values = rng.standard_normal(count // 4 * 64, dtype=np.float32)
        vectors = pa.FixedSizeListArray.from_arrays(values, 64)
        table = pa.table({"id": np.arange(count // 4), "embedding": vectors})
        (folder / "items").mkdir(exist_ok=True)
        parquet.write_table(table, folder / "items" / f"{part}.parquet", row_group_size=5000)
    queries = rng.standard_normal((20, 64), dtype=np.float32)

    # (count, 64) @ (64, 20): the workers read the row groups; one column of lists needs no naming.
    scores = raymm.multi_dot([folder / "items", queries.T], out=folder / "scores.parquet")
    print(scores)
    print("one item:", scores[7, :3], "one query:", scores[:3, 0])

    # A row for each item: its number and its scores. Any reader of Parquet takes it.
    read = parquet.read_table(folder / "scores.parquet", filters=[("index", "==", 7)])
    print("read by pyarrow:", read["D"][0].as_py()[:3])

    # A result is an operand: here scores.T @ scores, whose huge axis is the inner one.
    gram = raymm.multi_dot([f"{folder / 'scores.parquet'}.T", folder / "scores.parquet"])
    print("gram:", gram.shape)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 40_000, Path(scratch))
