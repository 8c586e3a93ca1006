"""The emulated storage: exact rates for direct I/O; nothing of it outlives its context, an
error or a SIGKILL."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.storage.devices import TokenLink
from roadtrain.errors import ConfigError
from roadtrain.lab import PREFIX, LoopDevice, Throttle, lab_available, sweep

needs_lab = pytest.mark.skipif(lab_available() is not None, reason=str(lab_available()))
pytestmark = [pytest.mark.lab, pytest.mark.alone]

BLOCK = 4 << 20
READ, WRITE = 200e6, 100e6


def left_behind(prefix: str) -> list[str]:
    """Directories, groups, mounts and loops whose name begins with `prefix`."""
    places = (Path(tempfile.gettempdir()), Path("/sys/fs/cgroup/blkio"))
    found = [str(path) for place in places if place.exists() for path in place.glob(f"{prefix}*")]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if prefix in line]
    return found


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert left_behind(f"{PREFIX}{os.getpid()}-") == []
    loops = Path("/sys/block").glob("loop*/loop/backing_file")
    assert [loop for loop in loops if str(tmp_path) in loop.read_text()] == []
    assert list(tmp_path.glob("*.img")) == []


def direct_rate(path: Path, nbytes: int, *, write: bool, times: int) -> float:
    """Bytes a second of direct I/O in this process over a file of `nbytes`, several times, once
    the first quarter has used up the throttle's burst.

    A process that stood still may catch up within a slice of the throttle, which is 0.1 s: what is
    measured must take some seconds.
    """
    flags = os.O_CREAT | os.O_WRONLY if write else os.O_RDONLY
    descriptor = os.open(path, flags | os.O_DIRECT)
    buffer = mmap.mmap(-1, BLOCK)
    try:
        for position in range(0, times * nbytes, BLOCK):
            if position == nbytes // 4:
                begin = time.perf_counter()
            offset = position % nbytes
            done = (
                os.pwrite(descriptor, buffer, offset)
                if write
                else os.preadv(descriptor, [buffer], offset)
            )
            assert done == BLOCK
        return (times - 1 / 4) * nbytes / (time.perf_counter() - begin)
    finally:
        os.close(descriptor)
        buffer.close()


def assert_exact(
    measure: Callable[[], dict[str, float]], want: dict[str, float], rel: float
) -> None:
    """A rate may never exceed what is set; that it is reached, a busy machine may need three
    tries to show."""
    tries = []
    for _ in range(3):
        tries.append(measure())
        assert all(tries[-1][name] <= want[name] * (1 + rel) for name in want), tries
        if all(tries[-1][name] >= want[name] * (1 - rel) for name in want):
            return
    raise AssertionError(f"never reached {want}: {tries}")


@needs_lab
def test_rates_are_exact_and_independent(tmp_path: Path) -> None:
    want = {"write a": WRITE, "write b": WRITE, "read a": READ, "read b": READ}
    with (
        LoopDevice(tmp_path / "a.img", 300 << 20) as a,
        LoopDevice(tmp_path / "b.img", 300 << 20) as b,
        Throttle([a, b], READ, WRITE) as limit,
    ):
        limit.enter_process(os.getpid())

        def measure() -> dict[str, float]:
            rates: dict[str, float] = {}

            def both_ways(name: str, device: LoopDevice) -> None:
                path, nbytes = device.mount / "x", 64 * BLOCK
                rates[f"write {name}"] = direct_rate(path, nbytes, write=True, times=2)
                rates[f"read {name}"] = direct_rate(path, nbytes, write=False, times=4)

            threads = [
                threading.Thread(target=both_ways, args=pair) for pair in (("a", a), ("b", b))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return rates

        assert_exact(measure, want, rel=0.05)


@needs_lab
def test_members_return_to_where_they_were(tmp_path: Path) -> None:
    before = Path("/proc/self/cgroup").read_text()
    with LoopDevice(tmp_path / "a.img", 64 << 20) as device:
        with pytest.raises(ZeroDivisionError), Throttle([device], READ, WRITE) as limit:
            limit.enter_process(os.getpid())
            assert Path("/proc/self/cgroup").read_text() != before
            child = subprocess.Popen(["sleep", "60"])
            raise ZeroDivisionError
        assert Path("/proc/self/cgroup").read_text() == before
        child.kill()
        child.wait()


@needs_lab
def test_an_error_inside_and_one_while_making_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), LoopDevice(tmp_path / "a.img", 64 << 20) as device:
        (device.mount / "x").write_bytes(b"1")
        raise ZeroDivisionError
    with pytest.raises(Exception, match="mkfs"), LoopDevice(tmp_path / "b.img", 8192):
        pass
    (tmp_path / "mine").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="exists"), LoopDevice(tmp_path / "mine", 64 << 20):
        pass
    assert (tmp_path / "mine").read_bytes() == b"precious"


@needs_lab
def test_sweep_removes_what_a_killed_process_left(tmp_path: Path) -> None:
    code = f"""
import os, time
from roadtrain.lab import LoopDevice, Throttle
with LoopDevice({str(tmp_path / "a.img")!r}, 64 << 20) as device, Throttle([device], 1e8, 1e8) as limit:
    print(os.getpid(), flush=True)
    time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert not [name for name in sweep() if f"{PREFIX}{pid}-" in name], (
            "swept a living process's things"
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(left_behind(f"{PREFIX}{pid}-")) == 3
    swept = sweep()
    assert len([name for name in swept if f"{PREFIX}{pid}-" in name]) == 2
    assert left_behind(f"{PREFIX}{pid}-") == []


@pytest.mark.parametrize(
    ("nbytes", "rate"), [(10**6, 4e9), (14 * 10**6, 4e9), (10**6, 1e8), (5 * 10**6, 1e9)]
)
def test_a_link_is_exact_over_many_pieces(nbytes: int, rate: float) -> None:
    count = max(4, int(0.4 * rate / nbytes))

    def measure() -> dict[str, float]:
        link = TokenLink(rate)
        begin = time.perf_counter()
        for _ in range(count):
            link.take(nbytes)
        assert link.nbytes == count * nbytes
        return {"link": link.nbytes / (time.perf_counter() - begin)}

    assert_exact(measure, {"link": rate}, rel=0.02)


def test_a_link_is_shared_first_come_first_served_and_idle_time_is_not_credit() -> None:
    link = TokenLink(1e9)
    taken_s = dict[int, float]()

    def take(who: int) -> None:
        link.take(50 * 10**6)
        taken_s[who] = time.perf_counter() - begin

    threads = [threading.Thread(target=take, args=(who,)) for who in range(4)]
    begin = time.perf_counter()
    for who, thread in enumerate(threads):
        thread.start()
        while link.nbytes < (who + 1) * 50 * 10**6:  # until it stands in the line
            time.sleep(0.001)
    for thread in threads:
        thread.join()
    # how late they wake is the machine's; that no one is early shows whom they came after
    assert all(taken_s[who] >= 0.0499 * (who + 1) for who in range(4)), taken_s
    # how late the last taker woke is given back, as the class says; the idle 0.2 s are not
    late = link.late_s
    time.sleep(0.2)
    begin = time.perf_counter()
    link.take(50 * 10**6)
    assert time.perf_counter() - begin >= 0.0499 - late


@needs_lab
def test_a_device_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"1024.0 TiB: (No space|File too large)"):
        LoopDevice(tmp_path / "a.img", 1 << 50).__enter__()
    assert not (tmp_path / "a.img").exists()
