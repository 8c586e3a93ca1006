"""Ctrl-C and SIGTERM in a custom loop, at many points: the last finished step is committed, a line
says how to resume, and the resumed run repeats the losses bit for bit (Rule 3)."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEPS = 8
SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
import roadtrain

store, style, where, count, number = sys.argv[1:6]
torch.manual_seed(0)
torch.set_num_threads(1)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        backward = torch._C._current_graph_task_id() != -1
        reach("backward" if backward else "forward")
        return self.inner(x).tanh()

left = int(count)

def reach(here):
    global left
    if here == where and not started:
        left -= 1
        if left == 0:
            signal.raise_signal(int(number))

def profile(frame, event, arg):  # calls of roadtrain's functions, at all depths of step and passes
    if event == "call" and "/roadtrain/" in frame.f_code.co_filename:
        reach("call")

model = nn.Sequential(*[Layer() for _ in range(3)], nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
optimizer = roadtrain.place(model, optimizer, store=store, host_budget="60MiB")
started = optimizer.steps_done  # only the first start is interrupted

def loop():
    for step in range(optimizer.steps_done, 8):
        if step == 3 and where == "call":
            sys.setprofile(profile)
        reach("data")
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        reach("after step")
        optimizer.zero_grad()
        print("step", step + 1, loss.item().hex(), flush=True)

if style == "with":
    with optimizer:
        loop()
else:
    loop()
    optimizer.close()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "loop.py"
    path.write_text(SCRIPT)
    return path


def start(script: Path, store: Path, *args: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(script), str(store), *map(str, args)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def losses(printed: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"^step (\d+) (\S+)$", printed, re.M)}


@pytest.fixture(scope="module")
def whole(script: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a run that nothing interrupts."""
    done = start(script, tmp_path_factory.mktemp("whole") / "s", "plain", "", 0, 0)
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


# Points of the loop, and numbers of calls of functions. SIGTERM differs only in how it begins.
POINTS = [
    *(("data", 4, n) for n in (signal.SIGINT, signal.SIGTERM)),
    ("forward", 11, signal.SIGINT),
    ("backward", 8, signal.SIGTERM),
    ("after step", 3, signal.SIGINT),
    *(("call", count, signal.SIGINT) for count in (201, 950)),
]
MORE = [
    ("forward", 11, signal.SIGTERM),
    ("backward", 8, signal.SIGINT),
    ("after step", 3, signal.SIGTERM),
    *(("call", count, signal.SIGINT) for count in (60, 450, 703, 1205)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "count", "number"),
    [*POINTS, *(pytest.param(*point, marks=pytest.mark.exhaustive) for point in MORE)],
)
def test_an_interrupted_loop_resumes_after_its_last_step(
    where: str,
    count: int,
    number: signal.Signals,
    script: Path,
    whole: dict[int, str],
    tmp_path: Path,
) -> None:
    style = "with" if count % 2 else "plain"
    args = (tmp_path / "s", style, where, count, int(number))
    first = start(script, *args)
    assert first.returncode == (-signal.SIGINT if number == signal.SIGINT else 143), first.stderr
    printed = losses(first.stdout)
    assert 0 < len(printed) < STEPS, first.stdout
    (line,) = re.findall(r"^roadtrain: interrupted; .*$", first.stdout + first.stderr, re.M)
    committed = int(re.findall(r"step (\d+) is committed in", line)[0])
    # a step is finished once step() has returned, although its loss may not be printed yet
    assert max(printed) <= committed <= max(printed) + 1, line
    command = shlex.join([sys.executable, str(script), *map(str, args)])
    assert line.endswith(f"resume with: {command}"), line
    second = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert second.returncode == 0 and f"; step {committed};" in second.stdout, second.stderr
    again = losses(second.stdout)
    assert min(again) == committed + 1
    assert printed | again | {committed: whole[committed]} == whole


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    """The commit hangs here, as on a device that does not answer."""
    code = f"""
import threading, time
import torch, roadtrain
from roadtrain.storage.file import FileTier
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
optimizer = torch.optim.AdamW(model.parameters())
optimizer = roadtrain.place(model, optimizer, store={str(tmp_path / "s")!r}, host_budget="60MiB")
FileTier.prepare = lambda *args: time.sleep(60)
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
print("ready", flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        time.sleep(1.5)
        assert process.poll() is None, "it waits for the commit"
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        assert process.wait(10) == -signal.SIGINT and time.monotonic() - begin < 5


def test_handlers_of_the_user_stay(tmp_path: Path) -> None:
    code = f"""
import os, signal
import torch, roadtrain
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append("mine"))
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
optimizer = torch.optim.AdamW(model.parameters())
optimizer = roadtrain.place(model, optimizer, store={str(tmp_path / "s")!r}, host_budget="60MiB")
os.kill(os.getpid(), signal.SIGTERM)
optimizer.close()
assert seen == ["mine"] and signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
optimizer = torch.optim.AdamW(model.parameters())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "interrupted" not in done.stdout + done.stderr, done.stderr
