"""Which worker gets which tile."""

import random
from itertools import pairwise

import pytest

from raymm.engines.shares import InOrder, Runs


def drive(shares, workers, order):
    """Let workers ask in some order until all is gone; return what each got."""
    got = {worker: [] for worker in range(workers)}
    asking = set(got)
    while asking:
        worker = order(sorted(asking))
        item = shares.take(f"worker-{worker}")
        if item is None:
            asking.discard(worker)
        else:
            got[worker].append(item)
    return got


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 100])
def test_each_item_once_whoever_asks(workers, count):
    for seed in range(10):
        got = drive(Runs(range(count), workers), workers, random.Random(seed).choice)
        assert sorted(item for items in got.values() for item in items) == list(range(count))


def test_workers_of_one_speed_get_one_run_each():
    turn = iter(range(10**6))
    got = drive(Runs(range(34), 2), 2, lambda asking: asking[next(turn) % len(asking)])
    assert got == {0: list(range(17)), 1: list(range(17, 34))}


def test_a_slow_worker_is_helped_in_few_runs():
    order = random.Random(1)
    got = drive(Runs(range(1000), 2), 2, lambda asking: order.choice([asking[-1]] * 4 + asking[:1]))
    assert len(got[0]) < 400
    for items in got.values():
        breaks = sum(second != first + 1 for first, second in pairwise(items))
        assert breaks < 12


def test_what_is_taken_for_nobody_leaves_the_runs_whole():
    shares = Runs(range(10), 2)
    assert [shares.take(None), shares.take("a"), shares.take("b"), shares.take("a")] == [0, 1, 5, 2]
    assert Runs([], 2).take(None) is None
    one = Runs([7], 2)
    assert (one.take(None), one.take(None), one.take("a")) == (7, None, None)


def test_in_order():
    shares = InOrder(iter("abc"))
    assert [shares.take("x"), shares.take(None), shares.take("y"), shares.take("x")] == [
        *"abc",
        None,
    ]


@pytest.mark.parametrize("left", range(6))
def test_what_a_worker_that_is_gone_has_left_goes_to_the_others(left):
    shares = Runs(range(12), 2)
    got = [shares.take("gone") for _ in range(6 - left)]
    shares.leave("gone")
    shares.leave("gone")
    while (item := shares.take("other")) is not None:
        got.append(item)
    assert sorted(got) == list(range(12))
    assert shares.take("new") is None
