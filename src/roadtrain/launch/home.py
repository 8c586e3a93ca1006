"""RunHome: the directory of a launched run, found by the run's name: ~/.roadtrain/runs/NAME.

launch.json         how the run was launched (`LaunchRecord`)
plan.toml           a copy of the plan
job.toml            a copy of the user's job
token               the secret shared by the run's processes (mode 600)
addresses.json      the addresses that the hosts had when the run started
measured.json       the link rates and step times measured for the last --replan
state.json          the supervisor's state (`RunState`); its first key is a checksum
state.before.json   the previous state, used if state.json is damaged
control             the Unix socket of the supervisor (mode 600, control_socket.py)
lock                locked while the supervisor is alive; the standby waits for the lock
starting            locked while a command writes the files above and starts the supervisor
all.log             every line of every process, with the names of the process and its host
log/PROCESS.log     the lines of one process
log/supervisor.log  stderr of the supervisor

Only the owner of the directory can read it (mode 700). Does NOT know engines or processes.
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
from roadtrain.storage.lock import is_locked
from roadtrain.storage.sealed import check_json, sealed_json
from roadtrain.transport.address import write_token

Struct = TypeVar("Struct")
# Tries to get the lock, as `is_supervised` in another process may hold the lock for a moment.
TRIES, PAUSE_S = 50, 0.01
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
AGAIN = (
    "launch the same plan and job under another --name: training continues at the committed step"
)
PLANNED_ANEW = "it is planned anew"  # `RunState.why` of a run stopped by `launch --replan`


class StartPhase(StrEnum):
    """The phases of the start of a run, in order. `RunState.stamps` has the time at which each
    phase ended."""

    LAUNCHED = "launched"  # the user entered the command
    READY = "ready"  # the engine and the plan's hosts are up
    CHECKED = "checked"  # the hosts passed all checks
    WORKERS = "workers"  # the engine was told to start workers
    PLACED = "placed"  # the workers have resources; only reported by Ray, which schedules workers
    IMPORTED = "imported"  # worker 0 printed its first line: Python has imported its modules
    JOINED = "joined"  # worker 0 printed its last line before a step: it has joined its peers
    STEPPED = "stepped"  # worker 0 printed its first step


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of how a run was launched, saved as launch.json."""

    name: str
    engine: str  # a key of engines.ENGINES
    launched: float  # seconds since 1970
    directory: str  # the command's working directory, the base of the job's relative paths
    if_launcher_dies: str = "keep"  # or "stop"
    ray_address: str = ""
    start: int = 0  # number of times that the run was resumed

    @property
    def mark(self) -> str:
        """The label of this run's processes, by which a supervisor finds leftover processes
        (descendants.py)."""
        return f"roadtrain:{RunHome.of(self.name).path}"


class ProcessRow(msgspec.Struct, frozen=True):
    """The entry of a process in state.json."""

    name: str
    host: str
    state: str  # waiting, running, stopping or ended, as launch/protocol/run_state.py decides
    restarts: int
    since: float  # when the process entered the state, in seconds since 1970


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run, saved by its supervisor as state.json."""

    phase: str = "starting"  # or going, ending, ended; unknown if recovered from damaged files
    code: int = 0  # exit code of an ended run: 0 done, 130 stopped, 2 refused, others failed
    why: str = ""  # why the run ended, one sentence
    stops: str = ""  # reason of a pending stop request, which a later supervisor carries out
    attempt: int = -1  # number of the last attempt to run the workers
    step: int = -1  # the last step known to be committed
    processes: tuple[ProcessRow, ...] = ()
    stamps: dict[str, float] = {}  # when each StartPhase ended, in seconds since 1970


class RunHome:
    """The home of one run: the directory `path` and its files."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.plan_path, self.job_path = path / "plan.toml", path / "job.toml"
        self.token_path, self.measured_path = path / "token", path / "measured.json"
        self.all_log, self.log_directory = path / "all.log", path / "log"

    @staticmethod
    def of(name: str) -> RunHome:
        """Return the home of a run. Raises ConfigError if the name is not valid."""
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is not a valid run name",
                hint="use at most 64 letters, digits, `.`, `_`, `-`; begin with a letter or digit",
            )
        return RunHome(Path.home() / ".roadtrain" / "runs" / name)

    @property
    def exists(self) -> bool:
        return (self.path / "launch.json").is_file()

    def write(self, record: LaunchRecord, plan: str, job: str) -> None:
        """Write the files of a new run, and remove those of a previous run of this name. An
        interrupted launch leaves no run. Raises StoreError if the files cannot be written."""
        self._make()
        make_directory(self.log_directory)
        with typed_errors(self.path, "removing the files of the previous run"):
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
        with typed_errors(self.path, "making it private"):
            self.path.chmod(0o700)

    def write_record(self, record: LaunchRecord) -> None:
        body = msgspec.json.format(msgspec.json.encode(record), indent=2)
        replace_file(self.path / "launch.json", body, "writing the launch record")

    def record(self) -> LaunchRecord:
        """Read launch.json. Raises ConfigError if no run of this name was launched."""
        if not self.exists:
            raise ConfigError(
                f"no run {self.name!r} was launched: {self.path} has no launch.json",
                hint="roadtrain launch PLAN.toml JOB.toml --name NAME",
            )
        return _decoded(self.path / "launch.json", LaunchRecord)

    def write_state(self, state: RunState) -> None:
        """Write `state` to state.json, and keep the old content, if undamaged, as
        state.before.json. Raises FullError if the disk is full, and StoreError for another I/O
        error."""
        path, before = self.path / "state.json", self.path / "state.before.json"
        if path.exists() and _whole_state(path) is not None:
            try:
                replace_file(before, path.read_bytes(), "keeping the previous state")
            except FullError:
                before.unlink(missing_ok=True)  # makes room for the new state
        body = msgspec.json.format(msgspec.json.encode(state), indent=2)
        replace_file(path, sealed_json(body), "writing the run's state")

    def write_ended(self, code: int, why: str) -> None:
        """Record in state.json that the run has ended."""
        ended = msgspec.structs.replace(self.state(), phase="ended", code=code, why=why)
        self.write_state(ended)

    def state(self, report: Callable[[str], None] = lambda _: None) -> RunState:
        """Return the state in state.json.

        If the file is damaged or absent, call `report` with a line for the user, and return a state
        with the phase "unknown". A supervisor can continue the run from this state. Raises
        LaunchError if the files cannot be read or the run's home was removed.
        """
        path = self.path / "state.json"
        if (state := _whole_state(path)) is not None:
            return state
        before = _whole_state(self.path / "state.before.json")
        if not self.exists:
            raise LaunchError(
                f"{self.path} has no run: no launch.json, and state.json is damaged or absent",
                hint=AGAIN,
            )
        used = "state.before.json is used" if before else "and so is state.before.json"
        report(
            f"{path} is damaged or absent, {used}; no training state is lost: the run continues"
            " from the last committed step"
        )
        return _state_after(before or RunState())

    def write_addresses(self, addresses: Mapping[str, str]) -> None:
        """Write addresses.json. `addresses`: the address of each host, by the host's name."""
        body = msgspec.json.encode(addresses)
        replace_file(self.path / "addresses.json", body, "writing the hosts' addresses")

    def addresses(self) -> dict[str, str]:
        """Return the address of each host from addresses.json; empty before the first start of the
        run."""
        path = self.path / "addresses.json"
        return _decoded(path, dict[str, str]) if path.exists() else {}

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Hold a lock within the `with` statement, so that no other command writes this run's files
        or starts its supervisor. Raises LaunchError if another command has the lock, and StoreError
        if the home is not writable."""
        self._make()
        with _opened(self.path / "starting") as descriptor:
            if not _lock(descriptor):
                raise LaunchError(
                    f"another command is launching run {self.name!r} right now",
                    hint=f"roadtrain status {self.name} shows the run; --name starts another run",
                )
            yield

    @contextmanager
    def supervised(self) -> Iterator[None]:
        """Hold the lock of the run's supervisor within the `with` statement. Raises LaunchError if
        another process has it."""
        with _opened(self.path / "lock") as descriptor:
            for _ in range(TRIES):  # no deadline, as this process may be frozen during the wait
                if _lock(descriptor):
                    break
                time.sleep(PAUSE_S)
            else:
                raise LaunchError(
                    f"run {self.name!r} already has a supervisor",
                    hint=f"roadtrain launch --stop {self.name} ends the run",
                )
            yield

    @contextmanager
    def taking_over(self) -> Iterator[None]:
        """Wait, without a timeout, until the run's supervisor has ended. Then hold its lock within
        the `with` statement."""
        with _opened(self.path / "lock") as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

    def is_supervised(self) -> bool:
        """Return True if a supervisor of the run is alive on this host."""
        return is_locked(self.path / "lock")


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Try to lock a file until `descriptor` is closed. Return False if another process has the
    lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    """Return the state in a file, or None if the file is damaged or absent. Raises LaunchError on
    an I/O error."""
    try:
        return _checked(path, RunState)
    except (ValueError, FileNotFoundError):
        return None
    except OSError as error:
        raise LaunchError(
            f"{path} cannot be read: {error.strerror}", hint="try again: the file may be undamaged"
        ) from error


def _checked(path: Path, kind: type[Struct]) -> Struct:
    content = path.read_bytes()
    check_json(content)
    return msgspec.json.decode(content, type=kind)


def _state_after(before: RunState) -> RunState:
    """Return a state from which the run can safely continue after its newest state was lost.
    `before`: the state that was saved before the lost state. The run may have started another
    attempt and committed a step since then, so the returned state assumes both."""
    if before.phase == "ended":  # the lost state belonged to a later start
        before = RunState(attempt=before.attempt, step=before.step)
    return msgspec.structs.replace(
        before,
        phase="unknown",
        attempt=before.attempt + 1,
        step=max(0, before.step),
        stamps={StartPhase.CHECKED: time.time(), **before.stamps},
    )
