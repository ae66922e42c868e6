"""Commands: what they print where, what they leave behind, their exit status."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import raymm
from raymm.chains import Chain
from raymm.cli import demo
from raymm.cli.commands import main
from raymm.engines import choosing
from raymm.kernels import blas
from raymm.sinks.npy import npy_header
from tests.tolerances import assert_product

SHAPES = {"A": (30, 7), "B": (7, 5), "C": (5, 400)}
OPERANDS = ["A.npy", "B.npy", "C.npy"]
SMALL = ["--engine", "local", "--no-progress"]
REQUEST = {
    "--order", "--dtype", "--precision", "--engine", "--num-workers", "--address",
    "--memory-limit", "--tile-columns", "--max-in-flight",
}  # fmt: skip
TABLES = {"--column", "--null"}
OPTIONS = {
    "plan": {"--out", "--json"} | TABLES | REQUEST,
    "run": {"--out", "--overwrite", "--verify", "--progress", "--json"} | TABLES | REQUEST,
    "verify": {"--precision", "--json"} | TABLES,
    "info": {"--json"},
    "demo": {"--full", "--columns", "--folder", "--keep", "--engine", "--progress", "--json"},
}


@pytest.fixture
def factors(tmp_path, monkeypatch):
    """Three files in the current folder, and what they hold."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(choosing, "is_ray_up", lambda: False)  # whatever other tests have started
    generator = np.random.default_rng(0)
    made = []
    for name, shape in SHAPES.items():
        made.append(generator.standard_normal(shape).astype(np.float32))
        np.save(f"{name}.npy", made[-1])
    return made


@pytest.fixture
def repository(request):
    """The environment of a process that finds this package."""
    return os.environ | {"PYTHONPATH": str(request.config.rootpath)}


def call(*arguments):
    """Run a command here; only its own kinds of errors are turned into a status."""
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_run_writes_the_product_and_a_summary(factors, tmp_path):
    result = call("run", *OPERANDS, "--out", "D.npy", *SMALL, "--verify")
    assert (result.exit_code, result.stderr) == (0, "")
    assert_product(np.load("D.npy"), factors)
    assert result.stdout.startswith("written    D.npy\nresult     (30, 400), 48 kB\ntime ")
    assert "engine     local, 1 worker x " in result.stdout
    assert "0 tiles repeated\nresidual   0." in result.stdout
    assert names(tmp_path) == [*OPERANDS, "D.npy"]


def test_run_tells_programs(factors):
    result = call("run", *OPERANDS, "--out", "D.npy", *SMALL, "--json")
    facts = json.loads(result.stdout)
    assert facts["outputs"] == ["D.npy"]
    assert facts["shape"] == [30, 400]
    assert facts["nbytes"] == 30 * 400 * 4
    assert facts["bytes_per_second"] == pytest.approx(facts["nbytes"] / facts["seconds"])
    assert (facts["engine"], facts["workers"], facts["retries"]) == ("local", 1, 0)
    assert facts["limit"] in ("read", "multiply", "write")
    assert facts["residual"] is None


def test_run_takes_transposes_several_outputs_order_dtype_and_tiles(factors):
    result = call(
        "run", "C.npy.T", "B.npy.T", "--out", "D.npy", "--out", "E.npy", "--order", "F",
        "--dtype", "float64", "--tile-columns", "13", "--max-in-flight", "1",
        "--memory-limit", "50MB", *SMALL,
    )  # fmt: skip
    assert result.exit_code == 0
    first, second = np.load("D.npy"), np.load("E.npy")
    assert first.flags.f_contiguous
    assert first.dtype == np.float64
    np.testing.assert_array_equal(first, second)
    assert_product(first, [factors[2].T, factors[1].T])


def test_an_existing_output_is_kept_unless_told(factors):
    np.save("D.npy", np.arange(3))
    refused = call("run", *OPERANDS, "--out", "D.npy", *SMALL)
    assert refused.exit_code == 2
    assert "D.npy exists" in refused.stderr
    assert "--overwrite" in refused.stderr
    assert np.load("D.npy").tolist() == [0, 1, 2]
    assert call("run", *OPERANDS, "--out", "D.npy", *SMALL, "--overwrite").exit_code == 0
    assert_product(np.load("D.npy"), factors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "A.npy", "--out", "D.npy"], "at least 2 operands"),
        (["run", "A.npy", "C.npy", "--out", "D.npy"], "A.npy (30, 7) @ C.npy (5, 400): 7 != 5"),
        (["run", "A.npy", "X.npy", "--out", "D.npy"], "X.npy"),
        (["run", *OPERANDS, "--out", "D.bin"], "the suffix chooses"),
        (["run", *OPERANDS, "--out", "s3://bucket/D.npy"], "s3"),
        (["run", *OPERANDS, "--out", "none/D.npy"], "does not exist"),
        (["run", *OPERANDS, "--out", "A.npy", "--overwrite"], "would overwrite the operand"),
        (["run", *OPERANDS, "--out", "D.npy", "--out", "./D.npy"], "two outputs are the same"),
        (["run", *OPERANDS, "--out", "D.npy", "--memory-limit", "1 cup"], "is no size"),
        (["run", *OPERANDS, "--out", "D.npy", "--memory-limit", "10B"], "memory_limit is 10 bytes"),
        (["run", *OPERANDS, "--out", "D.npy", "--dtype", "int8"], "real cannot become integer"),
        (
            ["run", *OPERANDS, "--out", "D.npy", "--engine", "local", "--num-workers", "2"],
            "--engine local",
        ),
        (["plan", "A.npy", "C.npy"], "7 != 5"),
        (["verify", "A.npy", *OPERANDS], "(30, 7) is not of the product's shape (30, 400)"),
        (["verify", "X.npy", *OPERANDS], "X.npy"),
        (["demo", "--columns", "100000000000"], "are free"),
    ],
)
def test_a_wrong_request_is_status_2(factors, tmp_path, arguments, message):
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("raymm: error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert names(tmp_path) == OPERANDS


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", *OPERANDS],
        ["run", *OPERANDS, "--out", "D.npy", "--dtype", "number"],
        ["run", *OPERANDS, "--out", "D.npy", "--precision", "low"],
        ["run", *OPERANDS, "--out", "D.npy", "--tile-columns", "0"],
        ["run", *OPERANDS, "--out", "D.npy", "--engine", "abacus"],
        ["plan"],
        ["multiply"],
        ["info", "--xml"],
    ],
)
def test_what_cannot_be_parsed_is_status_2(factors, arguments):
    result = call(*arguments)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr


def test_work_that_cannot_finish_is_status_1(factors, tmp_path):
    for name in SHAPES:
        np.save(f"{name}.npy", np.full(SHAPES[name], 100, np.int32))
    result = call("run", *OPERANDS, "--out", "D.npy", "--dtype", "int8", *SMALL)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("raymm: error: the result holds ")
    assert names(tmp_path) == OPERANDS


def test_memory_that_runs_out_is_status_1(factors, monkeypatch):
    monkeypatch.setattr(Chain, "run", raising(MemoryError("Unable to allocate 1 TiB")))
    result = call("run", *OPERANDS, "--out", "D.npy")
    assert result.exit_code == 1
    assert "out of memory Unable to allocate 1 TiB" in result.stderr


def test_an_interrupt_is_status_130(factors, monkeypatch):
    monkeypatch.setattr(Chain, "run", raising(KeyboardInterrupt()))
    result = call("run", *OPERANDS, "--out", "D.npy", "--out", "E.npy")
    assert result.exit_code == 130
    assert result.stderr == "raymm: interrupted: nothing new appears as D.npy or E.npy\n"


def raising(error):
    def function(*arguments, **keywords):
        raise error

    return function


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_in_the_middle_of_a_run(factors, tmp_path, repository, name):
    code = """
import os, signal, sys
from raymm.cli import main, reports

def interrupt(self, event, before=reports.Listener.__call__):
    before(self, event)
    if type(event).__name__ == "TileFinished":
        try:
            os.kill(os.getpid(), getattr(signal, name))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # must not cut the cleaning up short

name = sys.argv.pop()
reports.Listener.__call__ = interrupt
main()
"""
    arguments = ["run", *OPERANDS, "--out", "D.npy", *SMALL, "--tile-columns", "10", name]
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stdout) == (128 + getattr(signal, name), "")
    assert found.stderr == "raymm: interrupted: nothing new appears as D.npy\n"
    assert names(tmp_path) == OPERANDS


def test_plan_prints_what_a_run_would_do(factors, tmp_path):
    result = call("plan", *OPERANDS, "--out", "D.npy", "--engine", "local", "--tile-columns", "7")
    assert result.exit_code == 0
    labels = [line.split()[0] for line in result.stdout.splitlines()]
    assert labels[:6] == ["product", "result", "output", "order", "work", "tiles"]
    assert "A.npy (30, 7) @ B.npy (7, 5) @ C.npy (5, 400)" in result.stdout
    facts = json.loads(call("plan", *OPERANDS, "--out", "D.npy", "--json").stdout)
    assert facts["shape"] == [30, 400]
    assert facts["output_nbytes"] == 48_000
    assert facts["engine"] == "local"
    assert names(tmp_path) == OPERANDS


def sparse_npy(path, shape):
    """Make a file of that size on paper; the disk holds its header only."""
    with path.open("wb") as file:
        file.write(npy_header(shape, np.dtype(np.float32), False))
        file.truncate(file.tell() + 4 * shape[0] * shape[1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "bytes are free"), (["--out", "D.npy"], "needs 1,200,000,000,000,000 bytes (1")],
)
def test_plan_says_what_would_be_refused(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    np.save("A.npy", np.ones((300_000, 5), np.float32))
    sparse_npy(tmp_path / "C.npy", (5, 10**9))
    result = call("plan", "A.npy", "C.npy", *arguments, "--engine", "local")
    assert result.exit_code == 2
    assert "limit " in result.stdout  # the plan, all the same
    assert message in result.stderr


def test_verify_tells_products_from_others(factors):
    product = factors[0] @ factors[1] @ factors[2]
    np.save("D.npy", product)
    result = call("verify", "D.npy", *OPERANDS)
    assert result.exit_code == 0
    assert result.stdout.startswith("D.npy is the product: the largest error is 0.")
    facts = json.loads(call("verify", "D.npy", *OPERANDS, "--json").stdout)
    assert facts["output"] == "D.npy"
    assert 0 < facts["residual"] <= 1
    assert (facts["columns"], facts["unjudged"]) == (400, 0)
    product[4, 250] += 1
    np.save("D.npy", product)
    result = call("verify", "D.npy", *OPERANDS)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "D.npy is not A.npy (30, 7) @ B.npy (7, 5) @ C.npy (5, 400): D[4, 250] is" in (
        result.stderr
    )


def test_info(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    facts = json.loads(call("info", "--json").stdout)
    assert facts["raymm"] == raymm.__version__
    assert facts["packages"]["numpy"] == np.__version__
    assert facts["cores"] >= facts["threads"] >= 1
    assert facts["memory_nbytes"] > facts["free_memory_nbytes"] > 0
    assert facts["blas"]["multiplies_with"] == blas.library()
    assert isinstance(facts["gpus"], list)
    assert facts["auto"]["engine"] in ("local", "ray")
    text = call("info").stdout
    for label in ("raymm", "packages", "cores", "memory", "blas", "ray", "gpus", "auto"):
        assert f"\n{label} " in f"\n{text}"


def test_info_names_the_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setattr("raymm.cli.info.is_ray_up", lambda: False)  # whatever tests have started
    facts = json.loads(call("info", "--json").stdout)
    assert facts["ray_address"] == "10.0.0.1:6379"
    assert facts["auto"] == {"engine": "ray", "reason": "RAY_ADDRESS names a cluster"}


def test_demo_runs_the_main_job_and_cleans_up(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call("demo", "--engine", "local", "--columns", "500", "--no-progress")
    assert result.exit_code == 0
    assert "result     (3000, 500) float32" in result.stdout  # the plan
    assert "result     (3000, 500), 6 MB" in result.stdout  # the summary
    assert "residual   0." in result.stdout
    assert names(tmp_path) == []


def test_demo_keeps_its_files_if_told(tmp_path):
    folder = tmp_path / "new" / "demo"
    arguments = ["demo", "--engine", "local", "--columns", "300", "--folder", str(folder)]
    result = call(*arguments, "--keep", "--json")
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["plan"]["shape"] == facts["run"]["shape"] == [3000, 300]
    factors = [np.load(folder / name) for name in OPERANDS]
    assert [each.shape for each in factors] == [(3000, 100), (100, 100), (100, 300)]
    assert all(0.9 < each.std() < 1.1 for each in factors)
    assert_product(np.load(folder / "D.npy"), factors)
    again = call(*arguments)
    assert again.exit_code == 2
    assert "A.npy exists" in again.stderr
    assert names(folder) == [*OPERANDS, "D.npy"]


def test_demo_leaves_a_users_folder(tmp_path):
    (tmp_path / "mine.txt").touch()
    arguments = ["--columns", "300", "--folder", str(tmp_path), "--no-progress"]
    assert call("demo", "--engine", "local", *arguments).exit_code == 0
    assert names(tmp_path) == ["mine.txt"]


def test_demo_does_not_depend_on_how_its_inputs_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_STEP", 1000)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    demo.make_inputs(tmp_path / "a", 50)
    monkeypatch.setattr(demo, "_STEP", 10**6)
    demo.make_inputs(tmp_path / "b", 50)
    for name in OPERANDS:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.ray
def test_demo_on_ray(tmp_path, repository):
    found = subprocess.run(
        [sys.executable, "-m", "raymm", "demo", "--columns", "2000", "--json"],
        cwd=tmp_path, env=repository, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    facts = json.loads(found.stdout)["run"]
    assert facts["engine"] == "ray"
    assert facts["residual"] <= 1
    assert names(tmp_path) == []


def test_a_small_run_loads_neither_ray_nor_rich(factors, repository):
    code = """
import sys
from raymm.cli.commands import main
main(sys.argv[1:], standalone_mode=False)
print(*sorted({"ray", "torch", "rich", "pyarrow"} & set(sys.modules)), file=sys.stderr)
"""
    arguments = ["run", *OPERANDS, "--out", "D.npy"]
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stderr.split() == (["torch"] if blas.library() == "torch" else [])


def test_python_m(repository):
    found = subprocess.run(
        [sys.executable, "-m", "raymm", "--version"],
        env=repository, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout == f"raymm, version {raymm.__version__}\n"


def test_tables_as_operands(factors, tmp_path):
    left, middle, right = factors
    vectors = pa.array(right.T.tolist(), pa.list_(pa.float32()))
    table = pa.table({"id": np.arange(right.shape[1]), "C": vectors, "other": vectors})
    pq.write_table(table, "C.parquet", row_group_size=100)
    np.savez("factors.npz", A=left, B=middle)
    operands = ("factors.npz::A", "factors.npz::B", "C.parquet.T")
    result = call("run", *operands, "--column", "C", "--out", "D.npy", *SMALL, "--verify")
    assert (result.exit_code, result.stderr) == (0, "")
    assert_product(np.load("D.npy"), factors)
    result = call("plan", *operands, "--out", "E.npy", "--engine", "local")
    assert result.exit_code == 2
    assert "'C', 'other'" in result.stderr
    assert call("plan", *operands[:2], "C.parquet::other.T", "--engine", "local").exit_code == 0


@pytest.mark.parametrize("command", OPTIONS)
def test_options_and_help(command):
    """The options are a promise: scripts use them."""
    options = {
        name
        for parameter in main.commands[command].params
        for name in parameter.opts
        if name.startswith("--")
    }
    assert options == OPTIONS[command]
    text = call(command, "--help").stdout
    assert f"Example: raymm {command}" in text


def test_help_lists_the_commands():
    assert set(main.commands) == set(OPTIONS)
    text = call("--help").stdout
    for command in OPTIONS:
        assert f"\n  {command} " in text
    assert "..." not in text.partition("Commands:")[2]
