"""bench devices, small: exact bytes over the interconnect, roadtrain ahead from 4 devices on, and
no remains."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from benchmarks.storage import devices
from roadtrain.errors import RoadtrainError
from roadtrain.lab import PREFIX, lab_available

pytestmark = [pytest.mark.lab, pytest.mark.alone]


@pytest.mark.skipif(lab_available() is not None, reason=str(lab_available()))
@pytest.mark.exhaustive
def test_roadtrain_is_ahead_where_the_interconnect_limits(tmp_path: Path) -> None:
    before = (len(os.listdir("/proc/self/fd")), Path("/proc/self/cgroup").read_text())
    threads = set(threading.enumerate())
    # the benchmark asserts the bytes of every phase and equal parameters
    report = devices.run(quick=True, directory=str(tmp_path))
    phases = {row.case: row for row in report.rows if row.metric == "update phase"}
    for case in (
        "4 devices",
        "8 devices",
        "8 devices, top-k",
        "8 devices, norm first",
        "8 devices, norm first, top-k",
    ):
        ours, host = phases[case].ours, phases[case].peer
        assert ours is not None and host is not None and ours < host, phases[case]
    crossed = {row.case: (row.ours, row.peer) for row in report.rows if row.unit == "M"}
    assert crossed["8 devices"] == (4.0, 16.0) and crossed["8 devices, top-k"] == (2.04, 16.0)
    assert list(tmp_path.iterdir()) == []
    assert f"{PREFIX}{os.getpid()}-" not in Path("/proc/mounts").read_text()
    assert (len(os.listdir("/proc/self/fd")), Path("/proc/self/cgroup").read_text()) == before
    assert set(threading.enumerate()) <= threads


def test_a_missing_lab_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "lab_available", lambda: "not root")
    with pytest.raises(RoadtrainError, match="not root"):
        devices.run(quick=True)
