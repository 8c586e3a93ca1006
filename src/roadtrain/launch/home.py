"""RunHome: the directory in which a launched run is found by its name: ~/.roadtrain/runs/NAME.

launch.json      what was launched (`LaunchRecord`)
plan.toml        as it was given
job.toml         the user's, with its run.dir
token            the secret of the run's processes (mode 600)
addresses.json   of the hosts, as the engine knew them when the run began
measured.json    links and steps, as the last --replan found them
state.json       of the supervisor (`RunState`): processes, and when the start's phases were done;
                 its first key is a checksum of the rest
state.before.json  the state before that one, in case state.json is damaged
control          Unix socket of the supervisor (mode 600, control_socket.py)
lock             locked while the supervisor is alive; its standby waits for it
starting         locked while a command writes the files above and starts the supervisor
all.log          every line of every process, with its role and host
log/PROCESS.log  the lines of one process; log/supervisor.log what the supervisor says when it fails

The directory is its user's alone (mode 700). Does NOT know engines, nor what a run consists of.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

from roadtrain.errors import ConfigError, FullError, LaunchError
from roadtrain.storage.direct import make_directory, replace_file, typed_errors
from roadtrain.storage.sealed import check_json, sealed_json
from roadtrain.transport.address import write_token

Struct = TypeVar("Struct")
TRIES, PAUSE_S = 50, 0.01  # of the lock: a probe (`is_supervised`) has it for a moment only
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
AGAIN = (
    "launch the same plan and job under another --name: training goes on at the last committed step"
)
PLANNED_ANEW = "it is planned anew"  # why a run ends that `launch --replan` goes on with


class StartPhase(StrEnum):
    """The phases of a start, in their order; `RunState.stamps` says when each was done."""

    LAUNCHED = "launched"  # the command was typed
    READY = "ready"  # the engine and the plan's hosts are there
    CHECKED = "checked"  # nothing is wrong with the hosts
    WORKERS = "workers"  # workers were told to start
    PLACED = "placed"  # an engine that looks for workers' places has them; other engines skip it
    IMPORTED = "imported"  # worker 0 said its first line: python and its modules are there
    JOINED = "joined"  # worker 0 said its last line before a step: its servers and peers are there
    STEPPED = "stepped"  # worker 0 said its first step


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """launch.json."""

    name: str
    engine: str  # of engines.ENGINES
    launched: float  # seconds since 1970
    directory: str  # where the command was typed: the job's relative paths begin here
    if_launcher_dies: str = "keep"  # or "stop"
    ray_address: str = ""
    start: int = 0  # of this run: 0, and one more with each --resume

    @property
    def mark(self) -> str:
        """Names this run's processes on a host: a supervisor finds what the one before has left."""
        return f"roadtrain:{RunHome.of(self.name).path}"


class ProcessRow(msgspec.Struct, frozen=True):
    """One process of a run, as state.json has it."""

    name: str
    host: str
    state: str  # launch/protocol/run_state.py: waiting, running, stopping, ended
    restarts: int
    since: float  # of the state, seconds since 1970


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """state.json."""

    phase: str = "starting"  # then going, ending, ended; unknown: read from damaged files
    code: int = 0  # of an ended run: 0 done, 130 stopped, 2 refused, else it failed
    why: str = ""  # of an ended run: one sentence
    stops: str = ""  # why it was asked to end: the next supervisor ends it, too
    attempt: int = -1  # the workers' last
    step: int = -1  # the last that is known to be committed
    processes: tuple[ProcessRow, ...] = ()
    stamps: dict[str, float] = {}  # phase of the start -> when it was done, seconds since 1970


class RunHome:
    """`path`: the directory."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.plan_path, self.job_path = path / "plan.toml", path / "job.toml"
        self.token_path, self.measured_path = path / "token", path / "measured.json"
        self.all_log, self.log_directory = path / "all.log", path / "log"

    @staticmethod
    def of(name: str) -> RunHome:
        """Raises ConfigError for a name that cannot be a file's."""
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot be a run's name",
                hint="letters, digits, `.`, `_` and `-`, 64 at most, a letter or digit first",
            )
        return RunHome(Path.home() / ".roadtrain" / "runs" / name)

    @property
    def exists(self) -> bool:
        return (self.path / "launch.json").is_file()

    def write(self, record: LaunchRecord, plan: str, job: str) -> None:
        """A run that is launched anew. launch.json goes first and comes last: what a launch that
        was cut off has left is no run. Raises StoreError where the directory cannot be written."""
        self._make()
        make_directory(self.log_directory)
        with typed_errors(self.path, "removing what the run before has left"):
            for name in ("launch", "state", "state.before", "addresses", "measured"):
                (self.path / f"{name}.json").unlink(missing_ok=True)
            self.all_log.unlink(missing_ok=True)
            for log in self.log_directory.glob("*.log"):
                log.unlink(missing_ok=True)
        with typed_errors(self.token_path, "writing the run's token"):
            write_token(self.token_path)
        replace_file(self.plan_path, plan.encode(), "writing the run's plan")
        replace_file(self.job_path, job.encode(), "writing the run's job")
        self.write_state(RunState(stamps={StartPhase.LAUNCHED: record.launched}))
        self.write_record(record)

    def _make(self) -> None:
        make_directory(self.path)
        with typed_errors(self.path, "keeping it from others"):
            self.path.chmod(0o700)

    def write_record(self, record: LaunchRecord) -> None:
        body = msgspec.json.format(msgspec.json.encode(record), indent=2)
        replace_file(self.path / "launch.json", body, "writing what was launched")

    def record(self) -> LaunchRecord:
        """Raises ConfigError where no run of this name was launched."""
        if not self.exists:
            raise ConfigError(
                f"no run {self.name!r} was launched: {self.path} has no launch.json",
                hint="roadtrain launch PLAN.toml JOB.toml --name NAME",
            )
        return _decoded(self.path / "launch.json", LaunchRecord)

    def write_state(self, state: RunState) -> None:
        """Replace state.json. What it held becomes state.before.json, if it is whole and there is
        room for both. Raises FullError, StoreError."""
        path, before = self.path / "state.json", self.path / "state.before.json"
        if path.exists() and _whole_state(path) is not None:
            try:
                replace_file(before, path.read_bytes(), "keeping the state before this one")
            except FullError:
                before.unlink(missing_ok=True)  # the new state may fit where it was
        body = msgspec.json.format(msgspec.json.encode(state), indent=2)
        replace_file(path, sealed_json(body), "writing the run's state")

    def write_ended(self, code: int, why: str) -> None:
        """The run has ended, for this reason."""
        ended = msgspec.structs.replace(self.state(), phase="ended", code=code, why=why)
        self.write_state(ended)

    def state(self, report: Callable[[str], None] = lambda _: None) -> RunState:
        """The content of state.json. Where that is damaged or absent: a state of phase "unknown",
        made of the one before, that a supervisor can go on from; `report` is told.

        Raises LaunchError where the files cannot be read, or the run's home is gone.
        """
        path = self.path / "state.json"
        if (state := _whole_state(path)) is not None:
            return state
        before = _whole_state(self.path / "state.before.json")
        if not self.exists:
            raise LaunchError(
                f"{path} is damaged or absent, and {self.path} has no launch.json",
                hint=AGAIN,
            )
        used = "the one before it is used" if before else "so is the one before it"
        report(
            f"{path} is damaged or absent, {used}; nothing that was trained depends on it: the run"
            " goes on at its last committed step"
        )
        return _state_after(before or RunState())

    def write_addresses(self, addresses: Mapping[str, str]) -> None:
        """host -> address."""
        body = msgspec.json.encode(addresses)
        replace_file(self.path / "addresses.json", body, "writing the hosts' addresses")

    def addresses(self) -> dict[str, str]:
        """Empty where no engine has begun the run."""
        path = self.path / "addresses.json"
        return _decoded(path, dict[str, str]) if path.exists() else {}

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Inside, no other command writes this run's files or starts its supervisor. Raises
        LaunchError where another does, StoreError where the directory cannot be written."""
        self._make()
        with _opened(self.path / "starting", os.O_CREAT) as descriptor:
            if not _lock(descriptor, fcntl.LOCK_EX):
                raise LaunchError(
                    f"run {self.name!r} is being launched by another command just now",
                    hint=f"roadtrain status {self.name}, or another --name",
                )
            yield

    @contextmanager
    def supervised(self) -> Iterator[None]:
        """Inside, this process is the run's supervisor. Raises LaunchError where another is."""
        with _opened(self.path / "lock", os.O_CREAT) as descriptor:
            for _ in range(TRIES):  # and no deadline: this process may stand still for a while
                if _lock(descriptor, fcntl.LOCK_EX):
                    break
                time.sleep(PAUSE_S)
            else:
                raise LaunchError(
                    f"run {self.name!r} has a supervisor already",
                    hint=f"roadtrain launch --stop {self.name}",
                )
            yield

    @contextmanager
    def succeeding(self) -> Iterator[None]:
        """As `supervised`, as soon as the run's supervisor is gone: however long that takes."""
        with _opened(self.path / "lock", os.O_CREAT) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

    def is_supervised(self) -> bool:
        """Whether a supervisor is alive, on this host."""
        try:
            with _opened(self.path / "lock") as descriptor:
                return not _lock(descriptor, fcntl.LOCK_SH)  # shared: two probes do not meet
        except FileNotFoundError:
            return False


@contextmanager
def _opened(path: Path, more: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | more, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, how: int) -> bool:
    """Until it is closed; whether nobody else has it."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _decoded(path: Path, kind: type[Struct]) -> Struct:
    try:
        return _checked(path, kind)
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"{path} cannot be read: {error}",
            hint=AGAIN,
        ) from error


def _whole_state(path: Path) -> RunState | None:
    """None where it is damaged or absent. Raises LaunchError where it cannot be read."""
    try:
        return _checked(path, RunState)
    except (ValueError, FileNotFoundError):
        return None
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be read: {error.strerror}", hint="try again: it may be whole"
        ) from error


def _checked(path: Path, kind: type[Struct]) -> Struct:
    content = path.read_bytes()
    check_json(content)
    return msgspec.json.decode(content, type=kind)


def _state_after(before: RunState) -> RunState:
    """A state to go on from where the one after `before` is lost: that one may have begun another
    attempt, and seen a step (so that `run.new_store` holds no longer)."""
    if before.phase == "ended":  # the lost one is of another start
        before = RunState(attempt=before.attempt, step=before.step)
    return msgspec.structs.replace(
        before,
        phase="unknown",
        attempt=before.attempt + 1,
        step=max(0, before.step),
        stamps={StartPhase.CHECKED: time.time(), **before.stamps},
    )
