"""examples/two-clusters runs as written: its script makes the lab, trains on four hosts over the
networks that each group shares, goes on where it was, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from roadtrain.lab import PREFIX, cpus_available, network_available
from roadtrain.lab.lab_command import load_lab

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "two-clusters"
WHY = network_available() or cpus_available()
SMALL = {"model.config.hidden_size": 64, "model.config.intermediate_size": 128}
pytestmark = [pytest.mark.lab, pytest.mark.slow]


def script(run_dir: Path, steps: int) -> str:
    """What the script prints."""
    words = [str(EXAMPLE / "run.sh"), "--run.dir", str(run_dir), "--run.steps", str(steps)]
    for key, value in SMALL.items():
        words += [f"--{key}", str(value)]
    done = subprocess.run(
        words,
        cwd=ROOT,
        env=os.environ | {"BIN": str(Path(sys.executable).parent), "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.skipif(WHY is not None, reason=str(WHY))
def test_the_script_trains_over_both_clusters_and_goes_on(tmp_path: Path) -> None:
    said = script(tmp_path / "run", 2)
    for group, network in (
        ("dp stage 0", "infiniband at 100 MB/s (eth0 of a0 a1)"),
        ("dp stage 1", "roce at 75 MB/s (eth0 of b0 b1)"),
        ("activations stage 0 to 1", "ethernet at 6.2 MB/s (eth1 of a0 a1 b0 b1)"),
    ):
        (line,) = (one for one in said.splitlines() if one.startswith(f"network: {group}"))
        assert network in line
    said = script(tmp_path / "run", 4)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert "steps done" in said and "4 of 4" in said
    homes = Path(tempfile.gettempdir()).glob(f"{PREFIX}*-up-*")
    labs = [json.loads((home / "lab.json").read_text())["file"] for home in homes]
    assert str(EXAMPLE / "lab.toml") not in labs


def test_its_lab_and_its_readme_say_the_same() -> None:
    lab = load_lab(EXAMPLE / "lab.toml")
    hosts = [name for host in lab.hosts for name in host.names]
    readme = (EXAMPLE / "README.md").read_text()
    assert f"for host in {' '.join(hosts)}; do" in readme
    assert f"hosts=({' '.join(hosts)})" in (EXAMPLE / "run.sh").read_text()
    for words in ("--node-rank", "--master-addr a0 --master-port 29500", "--no-python"):
        assert words in readme and words in (EXAMPLE / "run.sh").read_text()
