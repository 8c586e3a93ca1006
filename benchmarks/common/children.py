"""Run functions in processes of their own, on this host or on hosts of a lab; start servers; read
the memory of a process.

A function in a child process may stop with `pause` until its parent calls `Child.go_on`, and may
read requests of its parent with `requests`. Its return value must fit into JSON, and its output
goes to a log. Does NOT import torch, so that the memory of the parent process stays small.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roadtrain.errors import DeadlineError, FullError, RoadtrainError
from roadtrain.lab import LabHost
from roadtrain.units import show_bytes

LISTEN_S, END_S = 60.0, 30.0


class Child:
    """A function that runs in a process of its own.

    Args:
        function: function of a module
        arguments: arguments of the function; dataclasses arrive as dicts, paths as strings
        host: host of the lab that the process runs on; None: this host
        log: file for the output of the process; None: show its output
        env: environment variables in addition to those of this process
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        *,
        host: LabHost | None = None,
        log: Path | None = None,
        env: Mapping[str, str] = {},
    ) -> None:
        self.name = f"{function.__module__}.{function.__name__}"
        self.name += f" on host {host.name}" if host else ""
        self.log = log
        call = [function.__module__, function.__name__, json.dumps(arguments, default=_plain)]
        start = host.run if host else subprocess.Popen
        with (log or Path(os.devnull)).open("w") as output:
            self.process: subprocess.Popen[str] = start(
                [sys.executable, "-m", __name__, *call],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output if log else None,
                text=True,
                env={**os.environ, **env},
            )
        assert self.process.stdout is not None
        self.values = self.process.stdout  # a line for each value that the process sends

    def wait_for(self, what: str, within_s: float | None = None) -> Any:
        """Wait for the value that the process sends under the name `what`: its "result", or None
        for a pause. See `wait_for_all`.
        """
        return wait_for_all([self], what, within_s)[0]

    def go_on(self, request: Any = None) -> None:
        """Let the process go on after a pause, or send it a request."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Kill the process if it still runs."""
        self.process.kill()
        self.process.communicate()

    def error(self, what: str) -> RoadtrainError:
        code = self.process.wait()
        output = self.log.read_text()[-3000:] if self.log else ""
        return RoadtrainError(f"{self.name} ended with exit code {code} before {what!r}: {output}")


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)  # type: ignore[arg-type]


def wait_for_all(children: Sequence[Child], what: str, within_s: float | None = None) -> list[Any]:
    """Wait until each process has sent a value under the name `what`, and return the values.

    Raises:
        DeadlineError: `within_s` seconds have passed
        RoadtrainError: a process ended early; the message ends with its last output
    """
    until = None if within_s is None else time.monotonic() + within_s
    found: dict[Child, Any] = {}
    while len(found) < len(children):
        waiting = {child.values: child for child in children if child not in found}
        left_s = None if until is None else max(0.0, until - time.monotonic())
        ready, _, _ = select.select(list(waiting), [], [], left_s)
        if not ready:
            names = ", ".join(child.name for child in waiting.values())
            raise DeadlineError(f"{names} did not send {what!r} within {within_s:.0f} s")
        for stream in ready:
            word, _, value = stream.readline().partition(" ")
            if not word:
                raise waiting[stream].error(what)
            if word == what:
                found[waiting[stream]] = json.loads(value)
    return [found[child] for child in children]


def go_on(children: Sequence[Child]) -> None:
    for child in children:
        child.go_on()


@contextmanager
def running(
    function: Callable[..., Any],
    each: Sequence[Mapping[str, Any]],
    home: Path,
    *,
    hosts: Sequence[LabHost] = (),
    envs: Sequence[Mapping[str, str]] = (),
    echo: bool = False,
) -> Iterator[list[Child]]:
    """Run a function in several processes at the same time, which end with the `with` block.

    Args:
        function: function of a module
        each: arguments of the function in each process
        home: folder for the logs of the processes
        hosts: host of each process in a lab; if empty, all run on this host
        envs: further environment variables of each process
        echo: show the output of the processes instead of capturing it
    """
    home.mkdir(parents=True, exist_ok=True)
    children: list[Child] = []
    try:
        for i, arguments in enumerate(each):
            host, env = hosts[i] if hosts else None, envs[i] if envs else {}
            log = None if echo else home / f"{function.__name__}{i}.log"
            children.append(Child(function, arguments, host=host, log=log, env=env))
        yield children
    finally:
        for child in children:
            child.end()


def run_child(function: Callable[..., Any], /, *, echo: bool = False, **arguments: Any) -> Any:
    """Call a function in a process of its own, and return its result.

    Args:
        function: function of a module
        echo: show the child's output instead of capturing it
        arguments: arguments of the function; paths arrive as strings

    Raises:
        RoadtrainError: the child failed; the message ends with the child's last output
    """
    return run_children(function, [arguments], echo=echo)[0]


def run_children(
    function: Callable[..., Any],
    each: Sequence[Mapping[str, Any]],
    *,
    within_s: float | None = None,
    **options: Any,
) -> list[Any]:
    """Call a function in several processes at the same time, and return their results. If a process
    fails, the others are killed.

    Args:
        function: function of a module
        each: arguments of the function in each process
        within_s: seconds until all must have ended; None: no limit
        options: further arguments of `running`

    Raises:
        RoadtrainError: a process failed; the message ends with the last output of the process
    """
    with (
        tempfile.TemporaryDirectory(prefix="roadtrain-bench-") as home,
        running(function, each, Path(home), **options) as children,
    ):
        results = wait_for_all(children, "result", within_s)
        for child in children:
            if child.process.wait(within_s):
                raise child.error("its end")
        return results


# in a child process


def send_value(what: str, value: Any = None) -> None:
    """Send a value to the parent. At most one value may be on its way."""
    print(what, json.dumps(value), file=sys.__stdout__, flush=True)


def pause(what: str) -> None:
    """Tell the parent that `what` is reached, and wait until the parent lets this process go on."""
    send_value(what)
    sys.stdin.readline()


def requests() -> Iterator[Any]:
    """Yield the requests of the parent, until it ends this process."""
    for line in sys.stdin:
        yield json.loads(line)


def main() -> None:
    module, function, arguments = sys.argv[1:]
    sys.stdout = sys.stderr
    send_value(
        "result", getattr(importlib.import_module(module), function)(**json.loads(arguments))
    )


# memory


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes, with shared and mapped pages."""
    return _memory("VmHWM")


def resident_bytes() -> int:
    """Return the present resident memory of this process in bytes."""
    return _memory("VmRSS")


def _memory(key: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Reset the peak, so that a later `peak_bytes` returns the peak since this call."""
    Path("/proc/self/clear_refs").write_text("5")


# servers


@dataclass(frozen=True)
class Server:
    address: str
    process: subprocess.Popen[Any]
    log: Path


@contextmanager
def serving(
    home: Path, *words: str, name: str = "server", port: int = 0, host: LabHost | None = None
) -> Iterator[Server]:
    """Run `roadtrain serve` during the `with` block, and yield the server once it listens.

    Args:
        home: folder for the log, NAME.log
        words: command-line arguments after the address
        port: port of the server; 0: any
        host: host of the lab that it runs on; None: this host
    """
    address = f"{host.address if host else '127.0.0.1'}:{port}"
    command = [sys.executable, "-m", "roadtrain.cli", "serve", address, *words]
    start, log = host.run if host else subprocess.Popen, home / f"{name}.log"
    with log.open("w") as output:
        process: subprocess.Popen[Any] = start(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        yield Server(_address(process, log), process, log)
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[Any], log: Path) -> str:
    """Wait until a server prints the HOST:PORT on which it listens, and return it."""
    until = time.monotonic() + LISTEN_S
    while not (found := re.search(r" at (\S+:\d+), ", log.read_text())):
        if process.poll() is not None or time.monotonic() > until:
            raise RoadtrainError(
                f"a server does not listen, exit code {process.returncode}: "
                f"{log.read_text()[-2000:]}"
            )
        time.sleep(0.05)
    return found[1]


def need_disk(directory: Path, nbytes: int) -> None:
    """Raise FullError if `directory` has fewer than `nbytes` bytes of free space."""
    free = shutil.disk_usage(directory).free
    if free < nbytes:
        raise FullError(
            f"the disk of {directory} has {show_bytes(free)} free, but the benchmark needs "
            f"{show_bytes(nbytes)}",
            hint="start the benchmark from a directory on a larger disk",
        )


if __name__ == "__main__":
    main()
