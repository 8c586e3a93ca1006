"""Checks of the directories for stores: what they are, what is in them, and how fast they are."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from roadtrain.chunks import ITEMSIZE
from roadtrain.config.job import Job
from roadtrain.config.job_model import shape_of
from roadtrain.doctor.diagnosis import Diagnosis, Subject
from roadtrain.errors import RoadtrainError
from roadtrain.kernels.optimizers import OPTIMIZERS
from roadtrain.launch.host_report import (
    HostQuery,
    PathReport,
    report_host,
    report_path,
    report_store,
)
from roadtrain.storage.direct import free_nbytes, in_ram
from roadtrain.storage.lock import holder_of
from roadtrain.storage.rates import StorageRates, storage_rates
from roadtrain.sums.host_topology import disks_of
from roadtrain.units import GIB, KIB, MIB, show_bytes, show_rate, show_seconds

SHM = Path("/dev/shm")  # plans keep stores in memory there on purpose
LEAST_FREE = GIB
LEAST_INODES = 1000
SLOW_DISK = 100e6  # bytes/s, reading and writing at once; a SATA SSD has 400e6
SKEW_S = 2.0  # seconds between two clocks
SIZES = (256 * KIB, 4 * MIB, 64 * MIB)  # of the measured files; larger ones only on fast disks
ENOUGH_S = 0.25  # measurements that took longer are exact enough
MOST_S = 3.0  # for measurements of a slow disk


def quick_rates(directory: Path) -> StorageRates:
    """Measure a directory's rates in about a second, and in up to 3 s on a slow disk. Raises
    StoreError."""
    begin = time.monotonic()
    for nbytes in SIZES:
        rates = storage_rates(directory, nbytes, 0.0)
        if time.monotonic() - begin > ENOUGH_S:
            break
    # a disk that is always slow is slow; a busy machine is slow now and then
    while rates.mixed < SLOW_DISK and time.monotonic() - begin < MOST_S:
        again = storage_rates(directory, nbytes, 0.0)
        rates = max(rates, again, key=lambda found: found.mixed)
    return rates


def file_bytes(job: Job) -> int:
    """Return the bytes of the files of the job's state, or 0 if they are not known."""
    shape = shape_of(job)
    optimizer = OPTIMIZERS.get(job.optimizer.name)
    if shape is None or optimizer is None or not job.store.files:
        return 0
    weights = ITEMSIZE[job.model.dtype]
    late = job.model.dtype != "fp32" or bool(job.optimizer.delay)
    return 2 * shape.params * (weights + 4 * late + optimizer.state_nbytes)


def check_directories(subject: Subject) -> Iterator[Diagnosis]:
    needs = file_bytes(subject.job) // max(1, len(subject.dirs)) if subject.job else 0
    for directory in subject.dirs:
        report = report_store(str(directory.absolute()))
        at = report.at
        if why := _why_unusable(subject, at):
            fix = f"mkdir -p {directory}, mount its disk, or name another directory"
            yield Diagnosis("directory", "wrong", f"{directory} {why}", fix)
            continue
        if report.locked:
            yield _in_use(directory)
        if report.damage:
            fix = "restore it, or move it away to begin a new store"
            yield Diagnosis("store", "wrong", f"{directory}: {report.damage}", fix)
        yield from _check_space(directory, 0 if report.job else needs)
        yield from _check_kind(subject, directory, at)
    if subject.job:
        yield from _check_mark(subject.job, subject.dirs)


def _why_unusable(subject: Subject, at: PathReport) -> str:
    """Return the reason why a directory cannot contain a store, or "" if it can. Runs create their
    own directory, and the last part of other paths."""
    ours = subject.job is not None and Path(at.path).is_relative_to(subject.job.run_dir.absolute())
    if at.rest and not ours and (subject.job is None or len(Path(at.rest).parts) > 1):
        return f"does not exist, {at.exists} does: is the disk mounted?"
    return f"is not writable: {at.refused}" if at.refused else ""


def _in_use(directory: Path) -> Diagnosis:
    holder = 0
    for path in (directory, directory / "lock"):
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            holder = holder or holder_of(fd)
            os.close(fd)
    fix = f"end process {holder} (kill {holder}), or wait until its run ends"
    try:
        name = f"process {holder} ({Path(f'/proc/{holder}/comm').read_text().strip()})"
    except OSError:
        name = f"process {holder}, which has ended: a child of it keeps the lock"
        fix = f"find the child with `fuser -v {directory}` and end it"
    if not holder:
        name = "a process in another container or on another host"
        fix = "end the other run of this job there"
    return Diagnosis("lock", "wrong", f"{directory} is locked by {name}", fix)


def _check_space(directory: Path, needs: int) -> Iterator[Diagnosis]:
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    about, free = os.statvfs(there), free_nbytes(directory)
    if about.f_blocks and free < max(needs, LEAST_FREE):
        what = f"{directory}: {show_bytes(free)} are free"
        what += (
            f", but the state needs {show_bytes(needs)}" if needs > free else ", less than 1 GiB"
        )
        yield Diagnosis("full", "wrong", what, "free space there, or name another directory")
    if about.f_files and about.f_favail < LEAST_INODES:
        yield Diagnosis(
            "inodes",
            "wrong",
            f"{directory}: {about.f_favail} of {about.f_files} inodes are free, fewer than"
            f" {LEAST_INODES}",
            "remove files there, or name another directory",
        )


def _check_kind(subject: Subject, directory: Path, at: PathReport) -> Iterator[Diagnosis]:
    if at.files:
        kind, _, mount = at.files.split()
        yield Diagnosis(
            "network-files",
            "slow" if subject.named or subject.job else "note",
            f"{directory} is on a network file system ({kind} at {mount}): every step"
            " waits for that network",
            "name a directory on a local SSD, or run `roadtrain serve` where the disks are",
        )
    if in_ram(directory):
        on_purpose = directory.is_relative_to(SHM) or not (subject.named or subject.job)
        yield Diagnosis(
            "tmpfs",
            "note" if on_purpose else "wrong",
            f"{directory} is in memory (tmpfs), not on a disk: a restart of the machine loses it,"
            f" and its {show_bytes(free_nbytes(directory))} are this machine's memory",
            "name a directory on an SSD",
        )


def _check_mark(job: Job, directories: tuple[Path, ...]) -> Iterator[Diagnosis]:
    """Compare the job of the run directory's mark with the jobs of the stores."""
    run = str(job.run_dir.absolute())
    query = HostQuery(run, tuple(str(directory.absolute()) for directory in directories))
    report = report_host(query)
    for store in report.stores:
        foreign = store.job and report.marked_job and store.job != report.marked_job
        if foreign and not job.run.new_store:
            yield Diagnosis(
                "store",
                "wrong",
                f"{store.at.path} belongs to job {store.job}, at step {store.step}, but the run in"
                f" {run} is of job {report.marked_job}, at step {report.marked_step}",
                "set run.dir to another directory, or name this run's own store",
            )


def disk_of(directory: Path, root: Path = Path("/")) -> tuple[str, ...]:
    """Return the names of the disks under a directory, or of its file system if it is not on a
    disk."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    number = there.stat().st_dev
    block = root / f"sys/dev/block/{os.major(number)}:{os.minor(number)}"
    if not block.exists():
        return (f"file system {number}",)
    disks = disks_of(block.resolve())
    return tuple((disk.parent if (disk / "partition").exists() else disk).name for disk in disks)


def check_same_disk(subject: Subject) -> Iterator[Diagnosis]:
    found: dict[tuple[str, ...], list[str]] = {}
    for directory in subject.dirs:
        found.setdefault(disk_of(directory, subject.root), []).append(str(directory))
    for disk, directories in found.items():
        if len(directories) > 1:
            yield Diagnosis(
                "same-disk",
                "slow",
                f"{', '.join(directories)} are on the same disk ({', '.join(disk)}): they share"
                " its rate",
                "name a single directory of each disk",
            )


def check_rates(subject: Subject) -> Iterator[Diagnosis]:
    for directory, rates in subject.rates.items():
        if isinstance(rates, str):
            yield Diagnosis("not-measured", "note", f"{directory}: {rates}")
            continue
        if rates is None:
            what = f"{directory}: the disk did not read and write {show_bytes(SIZES[0])} in time"
            fix = "look for errors of the disk in `dmesg`, or name another directory"
            yield Diagnosis("slow-disk", "wrong", what, fix)
            continue
        if rates.mixed < SLOW_DISK:
            seconds = show_seconds(1e9 * 30 / rates.mixed)
            yield Diagnosis(
                "slow-disk",
                "slow",
                f"{directory} reads and writes {show_rate(rates.mixed)}, less than"
                f" {show_rate(SLOW_DISK)}: a step of a billion parameters takes {seconds}",
                "name a directory on an NVMe SSD; spread the state over several",
            )
        if rates.note:
            yield Diagnosis(
                "direct-io",
                "slow",
                f"{rates.note}: every byte is copied once more",
                "name a directory on ext4 or xfs",
            )


def check_clock(subject: Subject) -> Iterator[Diagnosis]:
    """Compare this host's clock with those of file systems, earlier runs and servers."""
    fix = "set the clock: timedatectl set-ntp true, or chronyc makestep, on both hosts"
    files, theirs = [Path(__file__)], subject.named or subject.job is not None
    for directory in (*subject.dirs, *([subject.job.run_dir] if subject.job else ())):
        if theirs:
            files += [path for name in ("*.json*", "gen-*/*") for path in directory.glob(name)]
        with suppress(OSError), tempfile.NamedTemporaryFile(dir=directory) as file:
            file.write(b"\0")
            file.flush()
            ahead = os.stat(file.name).st_mtime - time.time()
            if abs(ahead) > SKEW_S:
                what = f"{directory}: the clock of its file system is {_ahead(ahead)}"
                yield Diagnosis("clock", "wrong", what, fix)
    now = time.time()
    ages = {path: path.stat().st_mtime - now for path in files if path.exists()}
    newest = max(ages, key=lambda path: ages[path])
    if ages[newest] > SKEW_S:
        what = f"{newest} was written {ages[newest]:.0f} s in the future: a clock is or was wrong"
        yield Diagnosis("clock", "wrong", what, fix)
    for peer, answer in subject.answers.items():
        if answer.ahead_s is not None and abs(answer.ahead_s) > SKEW_S:
            what = f"the clock of server {peer} is {_ahead(answer.ahead_s)}"
            yield Diagnosis("clock", "wrong", what, fix)


def _ahead(seconds: float) -> str:
    way = "ahead of" if seconds > 0 else "behind"
    return f"{abs(seconds):.1f} s {way} this host's (at most {SKEW_S:.0f} s are harmless)"


def measurable(directories: Sequence[Path]) -> list[Path]:
    """Return a directory of each disk whose rates can be measured."""
    found: dict[tuple[str, ...], Path] = {}
    for directory in directories:
        if not in_ram(directory) and not report_path(str(directory.absolute())).refused:
            found.setdefault(disk_of(directory), directory)
    return list(found.values())


def measured_text(directory: Path, rates: StorageRates | str | None) -> str:
    if not isinstance(rates, StorageRates):
        return rates or "too slow to measure"
    both = f"{show_rate(rates.write)}, both at once {show_rate(rates.mixed)}"
    free = show_bytes(free_nbytes(directory))
    return f"{free} free; reads {show_rate(rates.read)}, writes {both}"


def measure_or_say(directory: Path) -> StorageRates | str:
    """Measure a directory, or return why that is impossible."""
    try:
        return quick_rates(directory)
    except RoadtrainError as error:
        return str(error).replace("\nhint: ", "; ")
