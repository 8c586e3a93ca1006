"""The last line of a run of tests (tests/support/not_run.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import pytest
from tests.support.needs import needs

@needs("sh", "no-such-program", apt="some-package")
def test_needs(): ...
@needs("sh", apt="dash")
def test_runs(): ...
@pytest.mark.parametrize("n", [1, 2])
def test_details(n): pytest.skip(f"not root\\nof {n}")
"""
LINE = "not run: {} (not root), {} (no no-such-program: apt install some-package)"


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")])
def test_the_last_line_sums_all_runs_by_the_first_line_of_their_reasons(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    (tmp_path / "test_these.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = ["-p", "tests.support.not_run", "--not-run", "build/sums.json", *workers]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTEST_ADDOPTS": "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    for runs in (1, 2):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.stdout.splitlines()[-1] == LINE.format(2 * runs, runs), done.stdout
