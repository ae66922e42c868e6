"""Fixtures for all tests: engines, and one Ray that is started once."""

import os
import secrets
import subprocess
import sys
import warnings
from pathlib import Path

import hypothesis
import pytest

pytest.register_assert_rewrite("tests.contracts", "tests.tolerances")

import raymm  # noqa: E402  after the rewrite is registered

ROOT = Path(__file__).parents[1]
RAY_CPUS = 2
RAY_STORE_NBYTES = 100_000_000

hypothesis.settings.register_profile("raymm", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("raymm")


def pytest_configure(config):
    """Set what Ray must find in the environment: some of it is read when Ray is imported."""
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    config.pluginmanager.register(RayOnlyWhereAsked())
    # Workers import test doubles by name.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    patch.setenv("PYTHONPATH", path)
    # A token of this run's own: Ray would put one into the user's home otherwise.
    patch.setenv("RAY_AUTH_MODE", "token")
    patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    patch.delenv("RAY_ADDRESS", raising=False)
    patch.delenv("OMP_NUM_THREADS", raising=False)


class RayOnlyWhereAsked:
    """Hides the tests' Ray from ``engine="auto"`` in tests, and examples, not marked ``ray``.

    What they find must not depend on what ran before them, nor on whether a worker is free.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        with pytest.MonkeyPatch.context() as patch:
            if item.get_closest_marker("ray") is None:
                patch.setattr("raymm.engines.choosing.is_ray_up", lambda: False)
            return (yield)


@pytest.fixture
def local_engine():
    with raymm.LocalEngine() as engine:
        yield engine


@pytest.fixture(scope="session")
def ray_cluster():
    """A Ray with 2 CPUs and a small object store, as a caller might have started it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own making
        import ray  # noqa: PLC0415  only where it is used: it takes a second

        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            num_cpus=RAY_CPUS,
            object_store_memory=RAY_STORE_NBYTES,
        )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def _shared_ray_engine(ray_cluster):
    with raymm.RayEngine(num_workers=2) as engine:
        yield engine


@pytest.fixture
def ray_engine(_shared_ray_engine):
    """An engine of two workers that are kept from test to test."""
    return _shared_ray_engine


@pytest.fixture
def ray_room(_shared_ray_engine, ray_cluster):
    """A Ray whose CPUs are free, for tests that make their own engines."""
    _shared_ray_engine.close()
    return ray_cluster


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.ray)])
def engine(request):
    """Every engine."""
    return request.getfixturevalue(f"{request.param}_engine")


@pytest.fixture
def run_python(tmp_path):
    """Run a program in a process of its own, in an empty folder; return what it printed."""

    def run(code, *arguments, timeout=120, **environment):
        found = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    return run
