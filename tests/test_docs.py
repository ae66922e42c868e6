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


@pytest.mark.ray
def test_example_shared_engine(tmp_path):
    printed = run([ROOT / "examples" / "shared_engine.py"], tmp_path)
    assert printed.count("limited by") == 3


def test_benchmark_runs_at_toy_size(tmp_path):
    script = ROOT / "scripts" / "bench_multi_dot.py"
    run([script, "--toy", "--folder", tmp_path, "--json", "bench.json"], tmp_path)
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert figures
