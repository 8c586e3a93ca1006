"""The built packages: complete, valid for an index, and usable without the repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

import roadtrain

ROOT = Path(__file__).parents[3]
PROJECTS = (ROOT, ROOT / "plugins/rdma", ROOT / "plugins/switch_offload")
README = (ROOT / "README.md").read_text()
FIRST_STEP_S = 120.0  # from the start of `pip install` to the first durable step, torch is there


def run(*words: str | Path, cwd: Path = ROOT, **more: str) -> str:
    """Run a program without this tree on its path, and return its output."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | more
    ran = subprocess.run(
        [*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of each project, and the wheel that was built from the sdist."""
    out = tmp_path_factory.mktemp("dist")
    for project in PROJECTS:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, project)
    return out


def wheel_of(dist: Path, name: str = "roadtrain") -> Path:
    (wheel,) = dist.glob(f"{name}-*.whl")
    return wheel


@pytest.mark.slow
def test_an_index_accepts_them(dist: Path) -> None:
    built = sorted(dist.iterdir())
    assert len(built) == 2 * len(PROJECTS)
    shown = run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *built)
    assert shown.count("PASSED") == len(built)


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_no_other(dist: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: git lists the files of the package")
    tracked = run("git", "ls-files", "src/roadtrain").split("\n")
    expected = {name.removeprefix("src/") for name in tracked if name}
    found = set(zipfile.ZipFile(wheel_of(dist)).namelist())
    assert {name for name in found if ".dist-info/" not in name} == expected
    assert wheel_of(dist).name.split("-")[1] == roadtrain.__version__


def test_the_version_heads_the_change_log() -> None:
    found = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert found is not None and found[1] == roadtrain.__version__


def test_extras_in_messages_and_pages_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    texts = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    named = {
        extra
        for path in (*texts, ROOT / "README.md", ROOT / "Dockerfile", ROOT / "pyproject.toml")
        for group in re.findall(r"roadtrain\[([a-z,]+)\]", path.read_text())
        for extra in group.split(",")
    }
    assert named and named <= extras, named - extras


def clean_environment(folder: Path) -> Path:
    """Make a virtual environment without packages, and return its interpreter."""
    run(sys.executable, "-m", "venv", folder)
    return folder / "bin/python"


@pytest.mark.slow
def test_the_wheel_runs_the_readme_outside_the_repository(dist: Path, tmp_path: Path) -> None:
    """The environment sees the libraries of this one, but no roadtrain except the wheel's."""
    python = clean_environment(tmp_path / "venv")
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel_of(dist), cwd=tmp_path)
    where = run(python, "-c", "import roadtrain; print(roadtrain.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    assert run(python, "train.py", cwd=tmp_path).splitlines()[-1].startswith("20 ")
    # a second run has nothing left to do: the steps are durable
    assert len(run(python, "train.py", cwd=tmp_path).splitlines()) == 1
    command = tmp_path / "venv/bin/roadtrain"
    assert run(command, "--version", cwd=tmp_path).strip() == roadtrain.__version__
    run(command, "simulate", "--help", cwd=tmp_path)


@pytest.mark.exhaustive
@pytest.mark.alone
@pytest.mark.timeout(900)
def test_the_first_durable_step_after_an_install(dist: Path, tmp_path: Path) -> None:
    """With torch there, an install from the index and a first step take at most two minutes."""
    python = clean_environment(tmp_path / "venv")
    probe = [python, "-m", "pip", "download", "-q", "--no-deps", "-d", tmp_path / "x", "rich"]
    if subprocess.run([*map(str, probe)], capture_output=True).returncode:
        pytest.skip("no package index can be reached")
    run(python, "-m", "pip", "install", "-q", "torch==2.13.0", cwd=tmp_path)
    begin = time.monotonic()
    run(python, "-m", "pip", "install", "-q", wheel_of(dist), cwd=tmp_path)
    run(python, "-m", "pip", "check", cwd=tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "train.py").write_text(code.replace("range(optimizer.steps_done, 20)", "range(1)"))
    shown = run(python, "train.py", cwd=tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "kernels"))
    seconds = time.monotonic() - begin
    assert shown.splitlines()[-1].startswith("1 ")
    print(f"installed and one step durable in {seconds:.0f} s")
    assert seconds < FIRST_STEP_S, seconds


def test_the_dockerfile_and_the_devcontainer() -> None:
    """Both name the same stages and the packages of `.ci/run`; Docker builds them elsewhere."""
    path = ROOT / "Dockerfile"
    run(Path(sysconfig.get_path("scripts"), "hadolint"), path)
    stages = re.findall(r"^FROM \S+ AS (\S+)$", path.read_text(), re.MULTILINE)
    config = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert config["build"]["target"] in stages
    folder = ROOT / ".devcontainer"
    assert (folder / config["build"]["dockerfile"]).resolve() == path
    copied = re.findall(r"^COPY (.+) \S+$", path.read_text(), re.MULTILINE)
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"]
    for name in " ".join(copied).split():
        assert (ROOT / name).exists() and name in kept, name
