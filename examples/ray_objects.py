"""Operands and results that stay in a Ray cluster: the driver never holds C or D.

Run: python examples/ray_objects.py
"""

import numpy as np
import ray

import raymm


@ray.remote(num_cpus=0)
def make_block(place: int) -> np.ndarray:
    """Stands for whatever makes your data: it may run on any node."""
    return np.random.default_rng(place).standard_normal((100, 5_000), dtype=np.float32)


def main() -> None:
    rng = np.random.default_rng(0)
    A = rng.standard_normal((300, 100), dtype=np.float32)
    B = rng.standard_normal((100, 100), dtype=np.float32)
    C = [make_block.remote(place) for place in range(8)]  # blocks side by side: (100, 40000)

    with raymm.RayEngine(num_workers=2) as engine:
        # Tiles are read by the workers, from the blocks they touch.
        D = raymm.multi_dot([A, B, C], out=raymm.Refs(), tile_columns=10_000, engine=engine)
        print(D)
        print("one row:", D[7, :3], "one column:", D[:3, -1])
        print("largest of each block:", [f"{each:.0f}" for each in D.map_blocks(np.max)])

        # It is an operand like any other: here D @ x, and |D| with D's own blocks kept in place.
        x = np.ones(D.shape[1], np.float32)
        print("D @ x:", raymm.multi_dot([D, x], engine=engine)[:3])
        absolute = D.map_blocks(np.abs, keep=True)
        print("smallest of |D|:", min(absolute.map_blocks(np.min)))
        D.free()


if __name__ == "__main__":
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    main()
