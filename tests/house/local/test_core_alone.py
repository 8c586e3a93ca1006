"""The core is independent of the other rooms (docs/design.md): without them the README's example
trains and the core's own tests pass."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import roadtrain

HOMES = vars(roadtrain)["_HOMES"]  # the modules of the public names
ROOT = Path(__file__).resolve().parents[3]
SRC = ROOT / "src" / "roadtrain"
GROUND = ("__init__", "errors", "units", "chunks", "retry", "environment")
ROOMS = (
    "options",
    "kernels",
    "device",
    "transport",
    "streaming",
    "storage",
    "servers",
    "placement",
)
CORE = {"roadtrain", *(f"roadtrain.{name}" for name in (*GROUND, *ROOMS))}
# these read the whole tree, or the modules that all tests import
WHOLE = ("test_size.py", "test_tree.py", "test_fork_server.py")


def imports_of(path: Path) -> set[str]:
    """Return the modules that a test file imports, also in programs that it contains as text."""
    text = path.read_text()
    names = set(re.findall(r"\broadtrain(?:\.\w+)+", text))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module}
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def needs_only_the_core(path: Path) -> bool:
    """Return whether a test file and its modules of tests/support need no room beyond the core."""
    helpers = []
    for name in imports_of(path):
        package, _, rest = name.partition(".")
        home = ".".join(HOMES.get(rest, name).split(".")[:2])
        if package == "roadtrain" and home not in CORE:
            return False
        if package in ("benchmarks", "roadtrain_rdma", "roadtrain_switch_offload"):
            return False
        if (helper := ROOT / f"{name.replace('.', '/')}.py").exists() and package == "tests":
            helpers.append(helper)
    return all(map(needs_only_the_core, helpers))


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the core and its tests."""
    root = tmp_path_factory.mktemp("core")
    for name in GROUND:
        target = root / "src" / "roadtrain" / f"{name}.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SRC / f"{name}.py", target)
    for room in ROOMS:
        ignored = shutil.ignore_patterns("*.pyc")  # numba's cache is copied
        shutil.copytree(SRC / room, root / "src" / "roadtrain" / room, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copytree(ROOT / "tests" / "support", root / "tests" / "support")
    for path in ROOT.glob("tests/*/unit/test_*.py"):
        if path.name not in WHOLE and needs_only_the_core(path):
            target = root / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    return root


def run(core: Path, *command: str) -> subprocess.CompletedProcess[str]:
    # a single thread: threads of concurrent tests wait for each other and take ten times as long
    environ = {**os.environ, "PYTHONPATH": f"{core / 'src'}:{core}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=core,
        env=environ,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.exhaustive
def test_the_readme_example_trains_on_files_and_in_memory(core: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code, count = re.subn(r"(steps_done, )20\)", r"\g<1>6)", code)  # test_readme.py runs all steps
    assert count == 1
    in_memory, count = re.subn(r'store="[^"]*"', "store=roadtrain.Memory()", code)
    assert count == 1
    code += f"{in_memory}\nassert roadtrain.__file__.startswith({str(core)!r})\n"
    done = run(core, "-c", code)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 14
    for placed, *losses in (lines[:7], lines[7:]):
        assert placed.startswith("placed")
        assert float(losses[-1].split()[1]) < float(losses[0].split()[1])


FEW = """
from hypothesis import settings

settings.register_profile("few", max_examples=2, deadline=None)
original = settings.__init__


def few(self, parent=None, **options):
    options.pop("max_examples", None)  # even if a test requests more
    original(self, parent, **options)


settings.__init__ = few


def pytest_collection(session):
    settings.load_profile("few")  # after the profile of the tests' conftest


def pytest_collection_modifyitems(items):
    items[:] = {(item.path, item.originalname): item for item in items}.values()
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_tests_of_the_core_pass(core: Path) -> None:
    """A single case of each test is enough for its imports; the tests of the whole tree run all."""
    (core / "few.py").write_text(FEW)
    assert len([*core.glob("tests/*/unit/test_*.py")]) >= 30  # else the selection is wrong
    words = [
        "-q",
        "--hypothesis-profile=ci",
        "-p",
        "few",
        "-m",
        "not slow and not exhaustive",
        "tests",
    ]
    done = run(core, "-m", "pytest", *words)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
