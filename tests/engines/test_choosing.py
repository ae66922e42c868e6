import numpy as np
import pytest

import raymm
from raymm.engines import choosing
from raymm.engines.choosing import RAY_SECONDS, is_ray_up, make_engine
from raymm.errors import PlanError


@pytest.fixture
def no_ray(monkeypatch):
    """A process in which nobody has started Ray."""
    monkeypatch.setattr(choosing, "is_ray_up", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_by_name():
    engine, reason = make_engine("local", None)
    assert isinstance(engine, raymm.LocalEngine)
    assert reason == "as asked"
    engine, reason = make_engine("ray", None)
    assert isinstance(engine, raymm.RayEngine)
    assert reason == "as asked"


def test_one_given_by_the_user_is_returned_as_it_is(local_engine):
    assert make_engine(local_engine, None) == (local_engine, "as given")


@pytest.mark.parametrize("engine", ["gpu", "", "RAY", None, 3, raymm.LocalEngine], ids=repr)
def test_what_is_no_engine(engine):
    with pytest.raises(PlanError, match="engine="):
        make_engine(engine, None)


@pytest.mark.parametrize("seconds", [0.0, RAY_SECONDS])
def test_auto_stays_local_for_a_short_run(no_ray, seconds):
    engine, reason = make_engine("auto", lambda each: seconds)
    assert isinstance(engine, raymm.LocalEngine)
    assert "not worth starting Ray" in reason


def test_auto_takes_ray_for_a_long_run(no_ray):
    engine, reason = make_engine("auto", lambda each: RAY_SECONDS + 1)
    assert isinstance(engine, raymm.RayEngine)
    assert "21 s" in reason


def test_auto_asks_for_the_time_on_the_local_engine(no_ray):
    asked = []
    make_engine("auto", lambda each: asked.append(each) or 0.0)
    assert [type(each) for each in asked] == [raymm.LocalEngine]


def test_auto_takes_a_ray_that_is_up(no_ray, monkeypatch):
    monkeypatch.setattr(choosing, "is_ray_up", lambda: True)
    engine, reason = make_engine("auto", None)
    assert isinstance(engine, raymm.RayEngine)
    assert "Ray is up" in reason


def test_auto_takes_a_cluster_that_is_named(no_ray, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    engine, reason = make_engine("auto", None)
    assert isinstance(engine, raymm.RayEngine)
    assert "RAY_ADDRESS" in reason


def test_the_plan_says_why(no_ray):
    small = raymm.chain([np.ones((2, 2)), np.ones((2, 9))]).plan()
    assert "not worth starting Ray" in str(small)
    huge = raymm.chain([np.ones((3000, 100)), np.broadcast_to(1.0, (100, 10**8))])
    assert "are over 20 s" in str(huge.plan("D.npy"))


@pytest.mark.ray
def test_ray_is_up_once_it_is_started(ray_cluster):
    assert is_ray_up()


def test_ray_is_not_imported_to_find_out(run_python):
    run_python(
        "import sys\n"
        "from raymm.engines.choosing import is_ray_up\n"
        "assert not is_ray_up() and 'ray' not in sys.modules\n"
    )
