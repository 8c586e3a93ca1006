"""`roadtrain doctor`: run all checks on this machine, and print what it has, what roadtrain uses,
and what is wrong.

A new check is a function that takes a Subject and yields Diagnoses, and a line in CHECKS. Disks,
servers and torch are measured at the same time, in the background, while the first checks run. A
check or a measurement that hangs is abandoned.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from roadtrain import __version__
from roadtrain.config.job import Job, load_job
from roadtrain.doctor import host_limits, reachable_names, software, store_directories
from roadtrain.doctor.diagnosis import Background, Diagnosis, PeerAnswer, Subject
from roadtrain.doctor.torch_report import TorchReport, report_torch
from roadtrain.errors import ConfigError
from roadtrain.launch.host_report import versions
from roadtrain.stages.host_cards import this_host
from roadtrain.storage.direct import check_file, replace_file
from roadtrain.transport.address import address_of
from roadtrain.units import show_bytes

T = TypeVar("T")
Default = TypeVar("Default")
Check = Callable[[Subject], Iterable[Diagnosis]]
MEASURE_S = 6.5  # for the first checks and all measurements; the command ends within 10 s
LAST_S = 1.0  # for the checks of what was measured
PACKAGES = ("numpy", "numba", "transformers", "tokenizers", "accelerate", "peft", "ray")
SECRET = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL", re.IGNORECASE)
ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b(?:[0-9a-f]{0,4}:){3,7}[0-9a-f]{0,4}\b")

# These read the system, and take milliseconds.
CHECKS: tuple[Check, ...] = (
    software.check_versions,
    software.check_extras,
    host_limits.check_threads,
    host_limits.check_processor_quota,
    host_limits.check_memory,
    host_limits.check_limits,
    host_limits.check_leftovers,
    host_limits.check_kernel_settings,
    host_limits.check_caches,
    store_directories.check_directories,
    store_directories.check_same_disk,
    reachable_names.check_interfaces,
    reachable_names.check_names,
    reachable_names.check_token,
)
# These need what was measured in the background.
MEASURED_CHECKS: tuple[Check, ...] = (
    software.check_torch,
    software.check_devices,
    host_limits.check_pinning,
    host_limits.check_shared_memory,
    store_directories.check_rates,
    store_directories.check_clock,
    reachable_names.check_peers,
)


class DoctorReport(msgspec.Struct, frozen=True):
    """The result of the command, as `--json` writes it."""

    machine: dict[str, str]  # what the machine has
    uses: dict[str, str]  # what roadtrain will use
    findings: tuple[Diagnosis, ...]
    seconds: float
    format: int = 1

    @property
    def is_healthy(self) -> bool:
        return all(finding.level == "note" for finding in self.findings)

    def text(self) -> str:
        """Format the report for people: first the machine, last what is wrong."""
        lines = ["this machine"]
        lines += [f"  {name + ':':15}{text}" for name, text in self.machine.items()]
        lines += ["roadtrain will use"]
        lines += [f"  {name + ':':15}{text}" for name, text in self.uses.items()]
        for level in ("note", "slow", "wrong"):
            for finding in self.findings:
                if finding.level == level:
                    lines.append(f"{level}: [{finding.fault}] {finding.what}")
                    lines += [f"  fix: {finding.fix}"] if finding.fix else []
        count = sum(finding.level != "note" for finding in self.findings)
        end = "nothing is wrong" if self.is_healthy else f"{count} finding(s) to fix"
        return "\n".join([*lines, f"doctor: {end} ({self.seconds:.1f} s)"])


def command(
    path: str = "",
    *,
    dirs: str = "",
    peers: str = "",
    token_file: str | None = None,
    json: str = "",
    paste: bool = False,
) -> int:
    """Examine this machine: what it has, what roadtrain will use, what is wrong and how to fix it.

    With a job, check what the job needs: its directories, budgets, servers and packages. The
    command ends within 10 s and changes nothing. The exit code is 1 if something prevents or slows
    training.

    Args:
        dirs: directories for stores, separated by commas; default: those of the job, or else the
            current directory
        peers: HOST:PORT,... of servers to ask; default: those of the job
        token_file: file (mode 600) with the token of these servers; default: that of the job
        json: file in which to write the report as JSON
        paste: print the report without names of hosts and users and without addresses, for an issue
    """
    if json:
        check_file(Path(json))
    subject = subject_of(path, dirs, peers, token_file)
    report = examine(subject)
    if json:
        replace_file(
            Path(json), msgspec.json.format(msgspec.json.encode(report)) + b"\n", "writing"
        )
    hosts = [address_of(peer)[0] for peer in subject.peers]
    print(without_names(report.text(), hosts) if paste else report.text())
    return 0 if report.is_healthy else 1


def subject_of(path: str, dirs: str, peers: str, token_file: str | None) -> Subject:
    """Return what the command's arguments name. Raises ConfigError."""
    job: Job | None = load_job(path) if path else None
    named = [Path(d) for d in dict.fromkeys(filter(None, dirs.split(",")))]
    if dirs and not named:
        raise ConfigError(f"--dirs {dirs!r} names no directory", hint="write --dirs DIR,DIR")
    found = tuple(filter(None, peers.split(",")))
    if job:
        switches = (switch.address for switch in job.servers.switches)
        found = found or (*job.servers.addresses, *switches)
        token_file = token_file or job.servers.token_file
    for peer in found:
        address_of(peer)
    if not named and job:
        where = job.store.files or ([] if job.servers.addresses else [job.run.dir])
    else:
        where = []
    directories = named or [Path(d) for d in where] or [Path.cwd()]
    return Subject(tuple(directories), bool(named), job, tuple(dict.fromkeys(found)), token_file)


def examine(subject: Subject) -> DoctorReport:
    """Run all checks. Takes at most 10 s."""
    begin = time.monotonic()
    background = Background(MEASURE_S)
    torch = background.start(lambda: report_torch(dict(subject.environ), MEASURE_S - 0.5))
    answers = {
        peer: background.start(partial(reachable_names.ask_peer, subject, peer))
        for peer in subject.peers
    }
    rates = {
        directory: background.start(partial(store_directories.measure_or_say, directory))
        for directory in store_directories.measurable(subject.dirs)
    }
    found = run_checks(CHECKS, subject, background)
    unknown = TorchReport(unknown="not examined, since this machine is too busy")
    silent = PeerAnswer(f"no answer within {MEASURE_S:g} s", answered=False)
    subject = replace(
        subject,
        torch=_or_else(torch, unknown),
        rates={at: _or_else(wait, None) for at, wait in rates.items()},
        answers={peer: _or_else(wait, silent) for peer, wait in answers.items()},
    )
    found += run_checks(MEASURED_CHECKS, subject, Background(LAST_S))
    return DoctorReport(
        facts(subject), uses(subject), tuple(found), round(time.monotonic() - begin, 2)
    )


def _or_else(wait: Callable[[], T], default: Default) -> T | Default:
    try:
        return wait()
    except TimeoutError:
        return default


def _all_of(check: Check, subject: Subject) -> list[Diagnosis]:
    return list(check(subject))


def run_checks(
    checks: Sequence[Check], subject: Subject, background: Background
) -> list[Diagnosis]:
    """Run checks at the same time. A check that fails or hangs is reported as a note."""
    running = [(check, background.start(partial(_all_of, check, subject))) for check in checks]
    found = list[Diagnosis]()
    for check, wait in running:
        try:
            found += wait()
        except Exception as error:
            why = "it took too long" if isinstance(error, TimeoutError) else repr(error)
            what = f"{check.__name__} could not run: {why}".splitlines()[0]
            found.append(Diagnosis("not-checked", "note", what))
    return found


def facts(subject: Subject) -> dict[str, str]:
    """Return what the machine has."""
    memory, torch = psutil.virtual_memory(), subject.torch
    devices = [f"{name}, {show_bytes(total)}" for name, _, total in torch.devices]
    limit, quota = host_limits.memory_limit(), host_limits.processor_limit()
    limits = [f"memory {show_bytes(limit)}"] if limit < memory.total else []
    limits += [f"{quota:.1f} processors"] if quota < len(os.sched_getaffinity(0)) else []
    found = {"roadtrain": __version__, **versions()}
    found |= {name: version for name in PACKAGES if (version := software.installed(name))}
    out = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processors": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{show_bytes(memory.available)} free of {show_bytes(memory.total)}",
        "devices": "; ".join(devices) or torch.failure or torch.unknown or "none",
        "torch": torch.unknown
        or f"{torch.version}, built for {torch.built_for or 'CPUs'}, {torch.threads} thread(s)",
        "versions": ", ".join(f"{name} {version}" for name, version in found.items()),
        "not installed": ", ".join(p for p in PACKAGES if p not in found) or "nothing",
        "control group": ", ".join(limits) or "no limits",
        "network cards": "; ".join(map(str, this_host().cards)) or "none",
    }
    for number, directory in enumerate(subject.dirs):
        rates = subject.rates.get(directory, "not measured")
        text = store_directories.measured_text(directory, rates)
        out[f"directory {number}"] = f"{directory}: {text}"
    return out


def uses(subject: Subject) -> dict[str, str]:
    """Return what roadtrain will use of the machine."""
    job, torch = subject.job, subject.torch
    device = (job and job.run.device) or torch.kind or "cpu"
    budget = show_bytes(host_limits.budget_of(subject))
    state = ", ".join(map(str, subject.dirs))
    if job and job.servers.addresses:
        state = f"{len(subject.peers)} server(s)"
    elif job and not job.store.files:
        state = "memory"
    own = "" if job and job.budget.host else ", the default"
    return {
        "device": device,
        "threads": f"{torch.threads or '?'} for torch; updates: half of the processors, at most 8",
        "host memory": f"{budget}{own}",
        "state": state,
        "servers": "; ".join(f"{peer}: {a.text}" for peer, a in subject.answers.items()) or "none",
    }


def without_names(text: str, hosts: Sequence[str] = ()) -> str:
    """Replace the names of this and of other hosts, users, addresses, home directories and secrets
    in a text."""
    hidden = {os.path.expanduser("~"): "~"}
    hidden |= {v: "SECRET" for name, v in os.environ.items() if SECRET.search(name) and len(v) > 5}
    hidden |= dict.fromkeys([*hosts, *_host_names()], "HOST")
    users = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")} | {_user()}
    hidden |= dict.fromkeys(users - {"", "root"}, "USER")
    for word in sorted(hidden, key=len, reverse=True):
        if len(word) > 1 and word != "localhost":
            text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", hidden[word], text)
    return ADDRESS.sub("ADDRESS", text)


def _host_names() -> Sequence[str]:
    own, master = socket.gethostname(), os.environ.get("MASTER_ADDR", "")
    return [own, own.partition(".")[0], socket.getfqdn(), master]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
