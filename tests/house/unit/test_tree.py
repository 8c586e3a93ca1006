"""The tests run the code of their own tree, in every process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WHERE = {
    "roadtrain": "src/roadtrain",
    "benchmarks": "benchmarks",
    "roadtrain_rdma": "plugins/rdma/src/roadtrain_rdma",
    "roadtrain_switch_offload": "plugins/switch_offload/src/roadtrain_switch_offload",
}


@pytest.mark.parametrize("package", WHERE)
@pytest.mark.slow
def test_a_process_that_a_test_starts_runs_this_tree(package, tmp_path):
    code = f"import {package}; print({package}.__file__)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == ROOT / WHERE[package] / "__init__.py"


@pytest.mark.slow
@pytest.mark.parametrize("package", WHERE)
def test_another_trees_package_is_refused_with_both_paths(package, tmp_path):
    """For example when `pytest` runs in a checkout while another checkout is installed."""
    other = tmp_path / package / "__init__.py"
    other.parent.mkdir()
    other.touch()
    words = [
        "-c",
        os.devnull,
        "--rootdir",
        str(ROOT),
        str(ROOT / "tests/options/unit/test_units.py"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}"},
        capture_output=True,
        text=True,
    )
    output = done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, output
    assert f"finds {other}" in output and str(ROOT / WHERE[package]) in output, output
    assert "hint: " in output
