"""What users read runs: README blocks, examples, the benchmark at its toy size."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"(<!-- ray -->\n)?```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


def run(arguments, folder, timeout=120):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def marked(blocks):
    for place, (ray_mark, text) in enumerate(blocks):
        marks = [pytest.mark.ray] if ray_mark else []
        yield pytest.param(text, id=f"block{place}", marks=marks)


def test_the_readme_has_blocks_to_run():
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("text", list(marked(BLOCKS)))
def test_readme_block_runs(text, tmp_path):
    (tmp_path / "block.py").write_text(text)
    # Ray's own warnings are Ray's; anything that raymm alone says is an error.
    run(["block.py"] if "RayEngine" in text else ["-W", "error", "block.py"], tmp_path)


def test_example_main_job(tmp_path):
    printed = run([ROOT / "examples" / "main_job.py", "5000", tmp_path], tmp_path)
    assert "one row:" in printed
    assert (tmp_path / "D.npy").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tables", ["(40000, 20) float32", "read by pyarrow:", "gram: (20, 20)"]),
        ("sparse", ["5,000 entries", "the same: True"]),
        ("lazy", ["(300, 50000) float32", "found", "smallest after relu: 0.0"]),
    ],
)
def test_example_runs(name, says, tmp_path):
    printed = run(["-W", "error", ROOT / "examples" / f"{name}.py"], tmp_path)
    for words in says:
        assert words in printed


@pytest.mark.ray
def test_example_shared_engine(tmp_path):
    printed = run([ROOT / "examples" / "shared_engine.py"], tmp_path)
    assert printed.count("limited by") == 3


@pytest.mark.ray
def test_example_ray_objects(tmp_path):
    printed = run([ROOT / "examples" / "ray_objects.py"], tmp_path)
    assert "(300, 40000) float32" in printed
    assert "D @ x:" in printed
    assert "smallest of |D|:" in printed


def test_benchmark_runs_at_toy_size(tmp_path):
    script = ROOT / "scripts" / "bench_multi_dot.py"
    run([script, "--toy", "--folder", tmp_path, "--json", "bench.json"], tmp_path)
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert figures


def test_benchmark_of_sources_runs_at_toy_size(tmp_path):
    script = ROOT / "scripts" / "bench_io.py"
    arguments = ["--toy", "--only", "sources", "--folder", tmp_path, "--json", "bench.json"]
    run([script, *arguments], tmp_path)
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert {row["source"] for row in figures["sources"]} >= {"npy", "npz", "parquet", "arrow"}
    assert all(row["ok"] for row in figures["sources"])
