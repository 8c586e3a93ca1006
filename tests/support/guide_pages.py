"""The code blocks of the guides and start pages, and the examples that tests run.

A page's example is its section `## Example`. Blocks with a title are files, `sh` blocks are
commands, and a `text` block is output that the commands before it print. The example of a folder in
examples/ is the section `## Run` of its README, and its output is output.txt.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from benchmarks.common.report import machine
from tests.support.ports import free_port
from tests.support.warm_python import warm_folder

ROOT = Path(__file__).parents[2]
# The page for maintainers is a tour of the code, and the guide to two clusters refers to the
# example of its start page.
WITHOUT = {ROOT / "docs/start/maintainers.md", ROOT / "docs/guides/two-clusters.md"}
PAGES = sorted({*ROOT.glob("docs/start/*.md"), *ROOT.glob("docs/guides/*.md")} - WITHOUT)
FOLDERS = sorted(ROOT.glob("examples/*/README.md"))
# These examples need root to create network namespaces.
LAB = {"guides/lab", "guides/networks", "start/two-clusters", "examples/two-clusters"}

_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)
_NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
_UNIT = r"(?: ?(?:[kKMGT]i?)?B(?:/s)?\b| [mun]?s\b| min\b)?"
_PARTS = re.compile(rf"(?P<gap>\.\.\.)|(?P<number>{_NUMBER}){_UNIT}|(?P<space>\s+)")
_COMPARED = ("loss ", "accuracy ", "'loss': '")  # before a number that is compared
_ADDRESS = re.compile(r"(127\.0\.0\.1:|port = )(\d{4,5})\b")


class Block(NamedTuple):
    kind: str
    title: str
    text: str


def name_of(page: Path) -> str:
    return f"examples/{page.parent.name}" if page in FOLDERS else f"{page.parent.name}/{page.stem}"


def blocks_of(text: str) -> list[Block]:
    return [Block(*found) for found in _FENCE.findall(text)]


def example_of(page: Path) -> list[Block]:
    """The blocks of the section `## Example`; empty if the page has none."""
    heading = "Run" if page in FOLDERS else "Example"
    _, _, rest = page.read_text().partition(f"\n## {heading}\n")
    blocks = blocks_of(re.split(r"\n## ", rest, maxsplit=1)[0])
    output = page.with_name("output.txt")
    return [*blocks, Block("text", "", output.read_text())] if output.exists() else blocks


def kind_of_machine() -> str:
    """The processor and torch, on which the digits of a loss depend, and Python, whose source some
    examples learn."""
    processor, python = machine().partition(",")[0], platform.python_version()
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{processor}, {capability}, torch {torch.__version__}, Python {python}"


def is_machine_of_examples() -> bool:
    """Whether this is the kind of machine that made the outputs in examples/."""
    return kind_of_machine() in (ROOT / "examples/README.md").read_text()


def lines_match(printed: str, expected: str, within: float = 0.05) -> bool:
    """Compare two lines: `...` stands for any text, a number for any number, and a loss for a loss
    within 5 %, since results differ between processors and Python versions."""
    pattern, end = "", 0
    for part in _PARTS.finditer(expected):
        pattern += re.escape(expected[end : part.start()])
        loss = part["number"] and expected[: part.start()].endswith(_COMPARED)
        number = rf"({_NUMBER})" if loss else _NUMBER + _UNIT
        pattern += ".*" if part["gap"] else number if part["number"] else r"\s+"
        end = part.end()
    pattern += re.escape(expected[end:])
    found = re.fullmatch(pattern, printed.strip())
    losses = re.findall(rf"(?:{'|'.join(_COMPARED)})({_NUMBER})", expected)
    return found is not None and all(
        abs(float(got) - float(loss)) <= within * float(loss)
        for got, loss in zip(found.groups(), losses, strict=True)
    )


def run_example(page: Path, folder: Path, timeout_s: float = 400) -> None:
    """Run a page's example in `folder` and compare its output. Addresses of this host get free
    ports, and /dev/shm is `folder` too. Processes in the background end with the example; those of
    a folder in examples/ must have ended before. With UPDATE_EXAMPLES=1 its output.txt is written.

    Commands are forked from a process that has imported torch. Those of a lab are not, because a
    forked process has the namespaces of the process that it was forked from."""
    blocks = example_of(page)
    assert any(block.kind == "sh" for block in blocks), f"{page} has no example"
    ports: dict[str, int] = {}

    def with_free_ports(text: str) -> str:
        def address(found: re.Match[str]) -> str:
            return f"{found[1]}{ports.setdefault(found[2], free_port())}"

        return _ADDRESS.sub(address, text.replace("/dev/shm/", f"{folder}/"))

    script = ["set -euo pipefail"]
    for number, block in enumerate(blocks):
        script.append(f"echo '=== {number}'")
        if block.title:
            (folder / block.title).write_text(with_free_ports(block.text))
        elif block.kind == "sh":
            script.append(with_free_ports(block.text))
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("_*"))
    if page in FOLDERS:
        for path in (folder / "examples" / page.parent.name).glob("*.*"):
            path.write_text(with_free_ports(path.read_text()))
    (folder / "all.sh").write_text("\n".join(script))
    path = Path(sys.executable).parent if name_of(page) in LAB else warm_folder()
    output = _output(folder, path, timeout_s, ends=page in FOLDERS)
    if page in FOLDERS:
        _check_nothing_left(folder)
        if os.environ.get("UPDATE_EXAMPLES"):
            _update(page, output, {str(new): old for old, new in ports.items()})
    # in a lab, the measured speed of its hosts decides how blocks are divided
    exact = page in FOLDERS and name_of(page) not in LAB and is_machine_of_examples()
    printed = output.split("=== ")
    for number, block in enumerate(blocks):
        if block.kind == "text" and not block.title:
            before = max(n for n in range(number) if blocks[n].kind == "sh")
            _check_output(block.text, "".join(printed[before + 1 :]), name_of(page), exact)


def _output(folder: Path, path: Path, timeout_s: float, ends: bool) -> str:
    """Run all.sh. Returns its output, without the folders of this machine and the name of this host.
    ends: whether no process may be left."""
    installed = Path(sys.executable).parent  # jupyter
    env = os.environ | {"PATH": f"{path}:{installed}:{os.environ['PATH']}", "HOME": str(folder)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "BIN": str(path)}
    env |= {"HF_HUB_OFFLINE": "1"}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            ["bash", "all.sh"],
            cwd=folder,
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
            left = [process.info["cmdline"] for process in _left(folder)] if ends else []
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stray in _left(folder, 0.0):
                with contextlib.suppress(psutil.NoSuchProcess):
                    stray.kill()
    text = (folder / "output").read_text()
    assert code == 0, text
    assert not left, f"processes left: {left}\n{text}"
    for words in (f"{folder}/", f"{path}/", f"{installed}/"):
        text = text.replace(words, "")
    return text.replace(f"host {socket.gethostname()}", "host HOST")


def _left(folder: Path, within_s: float = 15.0) -> list[psutil.Process]:
    """Processes that still run in `folder` after `within_s` seconds."""
    until = time.monotonic() + within_s
    while True:
        left = [
            process
            for process in psutil.process_iter(["cwd", "cmdline"])
            if Path(process.info["cwd"] or "/").is_relative_to(folder)
        ]
        if not left or time.monotonic() >= until:
            return left
        time.sleep(0.1)


def _check_nothing_left(folder: Path) -> None:
    """Check that an example has written into runs/ only."""
    new = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert new <= {"all.sh", "examples", "output", "runs"}, f"{new} in {folder}"
    here = {path.relative_to(folder) for path in (folder / "examples").rglob("*.*")}
    there = {path.relative_to(ROOT) for path in (ROOT / "examples").rglob("*.*")}
    assert not {path for path in here - there if not {"__pycache__", "runs"} & {*path.parts}}


# Lines of the shell, of progress bars, of warnings, of measurements and what follows from them, and
# of a table of links.
_LEFT_OUT = re.compile(
    r"=== |all\.sh: |it/s\]|s/it\]|Warning|warnings\.warn|socket\.cpp|\(measured|from \\ to|^  [ab]\d |^stages of |^\s*$"
)
# What differs from run to run besides numbers: the stages of a step that took the most time, and the
# division of blocks by the measured speed of hosts.
_DIFFERS = re.compile(r"(step \d+/\d+  loss \S+  |^(?:even|paper|exact) +).*")


def _update(page: Path, output: str, ports: dict[str, str]) -> None:
    lines = [
        _DIFFERS.sub(r"\1...", line) for line in output.splitlines() if not _LEFT_OUT.search(line)
    ]
    text = re.sub(r"\b\d{5}\b", lambda found: ports.get(found[0], found[0]), "\n".join(lines))
    if text:
        page.with_name("output.txt").write_text(text + "\n")


def _check_output(expected: str, printed: str, where: str, exact: bool) -> None:
    """exact: compare every digit of a loss, and generated text, which is in quotes."""
    lines = printed.splitlines()
    for line in filter(str.strip, expected.splitlines()):
        pattern = line.strip() if exact else re.sub(r'"[^"]*"', "...", line.strip())
        if not any(lines_match(got, pattern, 0.0 if exact else 0.05) for got in lines):
            raise AssertionError(f"{where} promises {line!r}, printed was:\n{printed}")


def shell_lines(page: Path) -> Iterator[str]:
    """The commands of all shell blocks of a page, continued lines as one."""
    for block in blocks_of(page.read_text()):
        if block.kind == "sh":
            yield from block.text.replace("\\\n", " ").splitlines()
