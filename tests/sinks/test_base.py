import numpy as np

from raymm.sinks import Array, Block, Npy, Sink
from raymm.tiles import Bounds, Tile
from tests.doubles import NullSink


def test_what_is_a_sink():
    assert isinstance(Array(), Sink)
    assert isinstance(Npy("D.npy"), Sink)
    assert isinstance(NullSink(), Sink)
    assert not isinstance(object(), Sink)


def test_host_leaves_the_halo_out():
    widened = np.arange(12.0).reshape(2, 6)
    block = Block(Tile(0, 0, 4), Bounds(0, 2, 0, 4), widened)
    np.testing.assert_array_equal(block.host, widened[:, :4])
    assert np.shares_memory(block.host, widened)


def test_device_is_the_same_memory_as_a_tensor():
    import torch  # noqa: PLC0415  two seconds, for this test only

    block = Block(Tile(0, 0, 3), Bounds(0, 2, 0, 3), np.arange(6.0).reshape(2, 3))
    assert isinstance(block.device, torch.Tensor)
    block.host[0, 0] = 9
    assert block.device[0, 0] == 9
