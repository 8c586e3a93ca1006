"""`roadtrain doctor`: run all checks on this machine, and print its hardware, the part that
roadtrain will use, and its faults.

A new check is a function `check_...` of one of the modules in CHECKS, which takes a Subject and
yields Diagnoses, and an entry in faults.toml. Disks, servers and torch are measured at the same
time, before all checks. A check or a measurement that hangs is abandoned.
"""

from __future__ import annotations

import getpass
import math
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil

from roadtrain.config.job import Job, load_job
from roadtrain.doctor import host_limits, reachable_names, software, store_directories
from roadtrain.doctor.diagnosis import Diagnosis, Subject, diagnose, within
from roadtrain.doctor.reachable_names import ask_peer
from roadtrain.doctor.store_directories import by_disk, quick_rates
from roadtrain.doctor.torch_report import TorchReport, report_torch
from roadtrain.environment import control_group_limit
from roadtrain.errors import ConfigError
from roadtrain.launch.host_report import versions
from roadtrain.stages.host_cards import this_host
from roadtrain.storage.direct import check_file, free_nbytes, in_ram, replace_file
from roadtrain.storage.rates import StorageRates
from roadtrain.transport.address import address_of
from roadtrain.units import show_bytes, show_count, show_rate

Check = Callable[[Subject], Iterable[Diagnosis]]
MEASURED_S = 7.5  # from the start of this process to the end of all measurements
LEAST_S, MOST_S, CHECK_S = 4.0, 6.5, 1.5  # for all measurements, and for all checks
PACKAGES = ("numpy", "numba", "transformers", "tokenizers", "accelerate", "peft", "ray")
SECRET = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL", re.IGNORECASE)
ADDRESS = re.compile(
    r"\b(?!127\.)\d{1,3}(?:\.\d{1,3}){3}\b|\b(?:[0-9a-f]{0,4}:){3,7}[0-9a-f]{0,4}\b"
)

CHECKS: tuple[Check, ...] = tuple(
    check
    for module in (software, host_limits, store_directories, reachable_names)
    for name, check in vars(module).items()
    if name.startswith("check_")
)


class DoctorReport(msgspec.Struct, frozen=True):
    """The result of the command, as `--json` writes it."""

    machine: dict[str, str]  # hardware, limits, versions and measured rates
    uses: dict[str, str]  # the part of it that roadtrain will use
    findings: tuple[Diagnosis, ...]
    seconds: float
    format: int = 1

    @property
    def alarms(self) -> int:
        return sum(finding.level != "note" for finding in self.findings)

    def text(self) -> str:
        """Format the report for people: first the machine, last what is wrong."""
        lines = list[str]()
        for title, table in (("this machine", self.machine), ("roadtrain will use", self.uses)):
            lines += [title, *(f"  {name + ':':15}{text}" for name, text in table.items())]
        order = ("note", "slow", "wrong")
        for finding in sorted(self.findings, key=lambda finding: order.index(finding.level)):
            lines.append(f"{finding.level}: [{finding.fault}] {finding.what}")
            lines += [f"  fix: {finding.fix}"] if finding.fix else []
        count = show_count(self.alarms, "finding")
        end = f"{count} to fix" if self.alarms else "nothing is wrong"
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
    """Examine this machine: print its hardware, the part that roadtrain will use, faults and fixes.

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
        replace_file(Path(json), msgspec.json.format(msgspec.json.encode(report)), "writing")
    hosts = [address_of(peer)[0] for peer in subject.peers]
    print(without_names(report.text(), hosts) if paste else report.text())
    return 1 if report.alarms else 0


def subject_of(path: str, dirs: str, peers: str, token_file: str | None) -> Subject:
    """Return what the command's arguments name. Raises ConfigError."""
    job: Job | None = load_job(path) if path else None
    named, found = (list(dict.fromkeys(filter(None, x.split(",")))) for x in (dirs, peers))
    if dirs and not named:
        raise ConfigError(f"--dirs {dirs!r} names no directory", hint="write --dirs DIR,DIR")
    if job:
        named = named or job.store.files or [job.run.dir]
        switches = (switch.address for switch in job.servers.switches)
        found = found or [*job.servers.addresses, *switches]
        token_file = token_file or job.servers.token_file
    for peer in found:
        address_of(peer)
    directories = tuple(map(Path, named)) or (Path.cwd(),)
    return Subject(directories, bool(named), job, tuple(found), token_file)


def examine(subject: Subject) -> DoctorReport:
    """Measure, and run all checks. Takes at most 10 s."""
    begin, started = time.monotonic(), time.time() - psutil.Process().create_time()
    seconds = min(MOST_S, max(LEAST_S, MEASURED_S - started))
    disks = by_disk(at for at in subject.dirs if not in_ram(at)).values()
    works: dict[Hashable, Callable[[], Any]]
    works = {at: partial(quick_rates, at) for at, *_ in disks}
    works |= {peer: partial(ask_peer, subject, peer) for peer in subject.peers}
    works["torch"] = partial(report_torch, dict(subject.environ), seconds - 0.5)
    done = within(seconds, works)
    silent = f"no answer for {seconds:.1f} s"
    subject = replace(
        subject,
        torch=done.get("torch", TorchReport(unknown="this machine is too busy")),
        rates={at: done.get(at) for at, *_ in disks},
        answers={peer: done.get(peer, silent) for peer in subject.peers},
    )
    found = run_checks(CHECKS, subject, CHECK_S)
    took = round(time.monotonic() - begin, 2)
    return DoctorReport(facts(subject), uses(subject), tuple(found), took)


def run_checks(checks: Sequence[Check], subject: Subject, seconds: float) -> list[Diagnosis]:
    """Run checks at the same time. A check that fails or hangs is reported as a note."""
    done = within(seconds, {check: partial(_run, check, subject) for check in checks})
    late = {check: [not_checked(check, "it took too long")] for check in checks}
    return [finding for found in (late | done).values() for finding in found]


def _run(check: Check, subject: Subject) -> list[Diagnosis]:
    try:
        return list(check(subject))
    except Exception as error:
        return [not_checked(check, repr(error))]


def not_checked(check: Check, why: str) -> Diagnosis:
    return diagnose("not-checked", check=check.__name__, why=why)


def facts(subject: Subject) -> dict[str, str]:
    """Return what the machine has."""
    memory, torch = psutil.virtual_memory(), subject.torch
    limit, quota = control_group_limit() or math.inf, host_limits.processor_limit()
    most = f"{show_bytes(limit)} of memory" if limit < memory.total else "all memory"
    share = "all" if quota == math.inf else f"{quota:.1f}"
    threads = show_count(torch.threads, "thread")
    devices = [f"{name}, {show_bytes(total)}" for name, _, total in torch.devices]
    found = versions() | {name: software.installed(name) or "missing" for name in PACKAGES}
    out = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processors": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        "memory": f"{show_bytes(memory.available)} free of {show_bytes(memory.total)}",
        "control group": f"{most}, {share} processors",
        "devices": "; ".join(devices) or torch.failure or torch.unknown or "none",
        "torch": f"{torch.version or 'unknown'} for {torch.built_for or 'CPUs'}, {threads}",
        "versions": ", ".join(f"{name} {version}" for name, version in found.items()),
        "network cards": "; ".join(map(str, this_host().cards)) or "none",
    }
    for number, (at, rates) in enumerate(subject.rates.items()):
        text = str(rates or "too slow to measure")
        if isinstance(rates, StorageRates):
            three = [show_rate(rate) for rate in (rates.read, rates.write, rates.mixed)]
            text = "reads {}, writes {}, both at once {}".format(*three)
        out[f"disk {number}"] = f"{at}: {show_bytes(free_nbytes(at))} free; {text}"
    return out


def uses(subject: Subject) -> dict[str, str]:
    """Return what roadtrain will use of the machine."""
    job, state = subject.job, ", ".join(map(str, subject.dirs))
    if job and not job.store.files:
        state = ", ".join(job.servers.addresses) or "in memory"
    device = subject.torch.kind or ("unknown" if subject.torch.unknown else "cpu")
    return {
        "device": (job and job.run.device) or device,
        "host memory": show_bytes(host_limits.budget_of(subject)),
        "state": state,
    }


def without_names(text: str, hosts: Sequence[str] = ()) -> str:
    """Replace the names of this and of other hosts, users, addresses, home directories and secrets
    in a text."""
    environ, own = os.environ, socket.gethostname()
    names = [*hosts, own, own.partition(".")[0], socket.getfqdn(), environ.get("MASTER_ADDR", "")]
    users = [environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")]
    with suppress(KeyError, OSError):
        users.append(getpass.getuser())
    hidden = {os.path.expanduser("~"): "~", **dict.fromkeys(names, "HOST")}
    hidden |= {v: "SECRET" for name, v in environ.items() if SECRET.search(name) and len(v) > 5}
    hidden |= dict.fromkeys({*users} - {"root"}, "USER")
    for word in sorted(hidden.keys() - {"", "localhost", "127.0.0.1"}, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", hidden[word], text)
    return ADDRESS.sub("ADDRESS", text)
