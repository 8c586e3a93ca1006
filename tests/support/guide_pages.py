"""The code blocks of the guides and start pages, and the examples that tests run.

A page's example is its section `## Example`. Blocks with a title are files, `sh` blocks are
commands, and a `text` block is output that the commands before it print.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.ports import free_port
from tests.support.warm_python import warm_folder

ROOT = Path(__file__).parents[2]
# The page for maintainers is a tour of the code, and the guide to two clusters refers to the
# example of its start page.
WITHOUT = {ROOT / "docs/start/maintainers.md", ROOT / "docs/guides/two-clusters.md"}
PAGES = sorted({*ROOT.glob("docs/start/*.md"), *ROOT.glob("docs/guides/*.md")} - WITHOUT)
# These examples need root to create network namespaces.
LAB = {"guides/lab", "guides/networks", "start/two-clusters"}

_FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)
_NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
_UNIT = r"(?: ?(?:[kKMGT]i?)?B(?:/s)?\b| [mun]?s\b| min\b)?"
_PARTS = re.compile(rf"(?P<gap>\.\.\.)|(?P<number>{_NUMBER}){_UNIT}|(?P<space>\s+)")
_ADDRESS = re.compile(r"(127\.0\.0\.1:|port = )(\d{4,5})\b")


class Block(NamedTuple):
    kind: str
    title: str
    text: str


def name_of(page: Path) -> str:
    return f"{page.parent.name}/{page.stem}"


def blocks_of(text: str) -> list[Block]:
    return [Block(*found) for found in _FENCE.findall(text)]


def example_of(page: Path) -> list[Block]:
    """The blocks of the section `## Example`; empty if the page has none."""
    _, _, rest = page.read_text().partition("\n## Example\n")
    return blocks_of(re.split(r"\n## ", rest, maxsplit=1)[0])


def lines_match(printed: str, expected: str) -> bool:
    """Compare two lines: `...` stands for any text, a number for any number, and a loss for a loss
    within 5 %, since results differ between processors and Python versions."""
    pattern, end = "", 0
    for part in _PARTS.finditer(expected):
        pattern += re.escape(expected[end : part.start()])
        loss = part["number"] and expected[: part.start()].endswith("loss ")
        number = rf"({_NUMBER})" if loss else _NUMBER + _UNIT
        pattern += ".*" if part["gap"] else number if part["number"] else r"\s+"
        end = part.end()
    pattern += re.escape(expected[end:])
    found = re.fullmatch(pattern, printed.strip())
    losses = re.findall(rf"loss ({_NUMBER})", expected)
    return found is not None and all(
        abs(float(got) - float(loss)) <= 0.05 * float(loss)
        for got, loss in zip(found.groups(), losses, strict=True)
    )


def run_example(page: Path, folder: Path, timeout_s: float = 400) -> None:
    """Run a page's example in `folder` and compare its output. Addresses of this host get free
    ports, and /dev/shm is `folder` too. Processes in the background end with the example.

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
    shutil.copytree(ROOT / "examples", folder / "examples")
    (folder / "all.sh").write_text("\n".join(script))
    path = Path(sys.executable).parent if name_of(page) in LAB else warm_folder()
    printed = _output(folder, path, timeout_s).split("=== ")
    for number, block in enumerate(blocks):
        if block.kind == "text" and not block.title:
            before = max(n for n in range(number) if blocks[n].kind == "sh")
            _check_output(block.text, "".join(printed[before + 1 :]), name_of(page))


def _output(folder: Path, path: Path, timeout_s: float) -> str:
    env = os.environ | {"PATH": f"{path}:{os.environ['PATH']}", "HOME": str(folder)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "BIN": str(path)}
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
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = (folder / "output").read_text()
    assert code == 0, text
    return text


def _check_output(expected: str, printed: str, where: str) -> None:
    lines = printed.splitlines()
    for line in filter(str.strip, expected.splitlines()):
        if not any(lines_match(got, line.strip()) for got in lines):
            raise AssertionError(f"{where} promises {line!r}, printed was:\n{printed}")


def shell_lines(page: Path) -> Iterator[str]:
    """The commands of all shell blocks of a page, continued lines as one."""
    for block in blocks_of(page.read_text()):
        if block.kind == "sh":
            yield from block.text.replace("\\\n", " ").splitlines()
