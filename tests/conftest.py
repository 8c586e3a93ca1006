"""Make tests, and the processes that they start, run the code of the tree that contains the
tests."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "roadtrain": ROOT / "src",
    "benchmarks": ROOT,
    "roadtrain_rdma": ROOT / "plugins/rdma/src",
    "roadtrain_switch_offload": ROOT / "plugins/switch_offload/src",
}


def check_tree() -> None:
    """Raise UsageError if Python finds a package of ours outside this tree."""
    for name, folder in PACKAGES.items():
        spec = importlib.util.find_spec(name)
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve()
        if found != folder / name / "__init__.py":
            raise pytest.UsageError(
                f"these tests belong to {ROOT} and would test another {name}: Python finds"
                f" {found or 'none'}, the tests need {folder / name}\n"
                f"hint: `make` in {ROOT} installs this tree; or set"
                f" PYTHONPATH={os.pathsep.join(map(str, PACKAGES.values()))}"
            )


# At import: the fixtures already import what is checked here.
check_tree()
# Tests start processes, some of them in other directories.
before = filter(None, [os.environ.get("PYTHONPATH")])
os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, PACKAGES.values()), *before])
# Models are tiny: a second thread of OpenMP would only spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest_plugins = ["tests.support.fixtures", "tests.support.not_run"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder: `unit`, `local` or `lab`."""
    for item in items:
        if (level := item.path.parent.name) in ("unit", "local", "lab"):
            item.add_marker(level)
