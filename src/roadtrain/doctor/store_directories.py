"""Checks of the directories for stores: their file systems, contents, rates and clocks."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from roadtrain.chunks import ITEMSIZE
from roadtrain.config.job import Job, files_read
from roadtrain.config.job_model import shape_of
from roadtrain.doctor.diagnosis import Diagnosis, Subject, diagnose
from roadtrain.errors import RoadtrainError
from roadtrain.kernels.optimizers import OPTIMIZERS
from roadtrain.launch.host_report import HostQuery, PathReport, StoreReport, report_host
from roadtrain.storage.direct import free_nbytes, in_ram
from roadtrain.storage.lock import holder_of
from roadtrain.storage.rates import StorageRates, storage_rates
from roadtrain.sums.host_topology import disks_of
from roadtrain.units import GIB, MIB

SHM = Path("/dev/shm")  # plans keep stores in memory there on purpose
LEAST_INODES = 1000
SLOW_DISK = 100e6  # bytes/s, reading and writing at once; a SATA SSD has 400e6
SKEW_S = 2.0  # seconds between two clocks
NBYTES, EACH_S = 8 * MIB, 0.25  # size of the measured file, and seconds of each measurement


def quick_rates(directory: Path) -> StorageRates | str:
    """Measure a directory's rates in about a second, or in 3 s on a slow disk. Returns the reason
    if it cannot be measured."""
    try:
        rates = storage_rates(directory, NBYTES, EACH_S)
        if rates.mixed < SLOW_DISK:  # a disk that is always slow is slow; a busy machine is not
            again = storage_rates(directory, NBYTES, EACH_S)
            rates = max(rates, again, key=lambda found: found.mixed)
        return rates
    except RoadtrainError as error:
        return str(error).replace("\nhint: ", "; ")


def file_bytes(job: Job) -> int:
    """Return the bytes of the files of the job's state, or 0 if they are not known."""
    shape, optimizer = shape_of(job), OPTIMIZERS.get(job.optimizer.name)
    if shape is None or optimizer is None:
        return 0
    weights = ITEMSIZE[job.model.dtype]
    master = 4 if job.model.dtype != "fp32" or job.optimizer.delay else 0
    return 2 * shape.params * (weights + master + optimizer.state_nbytes)


def check_directories(subject: Subject) -> Iterator[Diagnosis]:
    job, paths = subject.job, tuple(str(directory.absolute()) for directory in subject.dirs)
    run = str(job.run_dir.absolute()) if job else paths[0]
    globs, files = (job.data.paths, files_read(job).values()) if job else ((), ())
    report = report_host(HostQuery(run, paths, globs=tuple(globs), files=tuple(files)))
    needs = file_bytes(job) // len(paths) if job else 0
    for path in report.lacking:
        yield diagnose("file", path=path)
    for directory, store in zip(subject.dirs, report.stores):
        if why := _why_unusable(job, run, store.at):
            yield diagnose("directory", at=directory, why=why)
            continue
        if store.locked:
            yield _locked(directory)
        foreign = job and store.job and report.marked_job not in ("", store.job)
        if why := store.damage:
            yield diagnose("store", at=directory, why=why)
        elif job and foreign and not job.run.new_store:
            why = f"it is of job {store.job} at step {store.step}, but the run in {run} is of job"
            why += f" {report.marked_job} at step {report.marked_step}"
            yield diagnose("store", at=directory, why=why)
        yield from _check_file_system(subject, directory, store, needs)


def _why_unusable(job: Job | None, run: str, at: PathReport) -> str:
    """Return the reason why a directory cannot contain a store, or "" if it can. A run creates its
    own directory, and the last part of other paths."""
    created = job is not None and (Path(at.path).is_relative_to(run) or "/" not in at.rest)
    if at.rest and not created:
        return f"does not exist, but {at.exists} does: is the disk mounted?"
    # `_check_file_system` says how full a disk is
    return f"is not writable: {at.refused}" if at.refused and "No space" not in at.refused else ""


def _locked(directory: Path) -> Diagnosis:
    holder, how = "a process in another container or on another host", "there"
    files = [path for path in (directory, directory / "lock") if path.exists()]
    if pid := max(map(holder_of, files), default=0):
        holder, how = f"process {pid} (ended: a child keeps the lock)", f"kill {pid}"
        with suppress(psutil.NoSuchProcess):
            holder = f"process {pid} ({psutil.Process(pid).name()})"
    return diagnose("lock", at=directory, holder=holder, how=how)


def _check_file_system(
    subject: Subject, directory: Path, store: StoreReport, needs: int
) -> Iterator[Diagnosis]:
    about, free = os.statvfs(store.at.exists), free_nbytes(directory)
    needs = GIB if store.job else max(needs, GIB)
    if about.f_blocks and free < needs:
        level = "" if subject.named else "note"
        yield diagnose("full", level, at=directory, free=free, needs=needs)
    if about.f_files and about.f_favail < LEAST_INODES:
        left, total = about.f_favail, about.f_files
        yield diagnose("inodes", at=directory, free=left, total=total, needs=LEAST_INODES)
    if store.at.files:
        kind, _, mount = store.at.files.split()
        level = "slow" if subject.named else "note"
        yield diagnose("network-files", level, at=directory, kind=kind, mount=mount)
    if in_ram(directory):
        on_purpose = directory.absolute().is_relative_to(SHM) or not subject.named
        yield diagnose("tmpfs", "note" if on_purpose else "", at=directory, free=free)


def disk_of(directory: Path) -> tuple[str, ...]:
    """Return the names of the disks under a directory, or of its file system if it is not on a
    disk."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    number = there.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not block.exists():
        return (f"file system {number}",)
    disks = disks_of(block.resolve())
    return tuple((disk.parent if (disk / "partition").exists() else disk).name for disk in disks)


def by_disk(directories: Iterable[Path]) -> dict[tuple[str, ...], list[Path]]:
    found: dict[tuple[str, ...], list[Path]] = {}
    for directory in directories:
        found.setdefault(disk_of(directory), []).append(directory)
    return found


def check_same_disk(subject: Subject) -> Iterator[Diagnosis]:
    for disk, directories in by_disk(subject.dirs).items():
        if len(directories) > 1:
            yield diagnose("same-disk", dirs=map(str, directories), disk=disk)


def check_rates(subject: Subject) -> Iterator[Diagnosis]:
    for at, rates in subject.rates.items():
        if isinstance(rates, str):
            yield diagnose("not-measured", at=at, why=rates)
        elif rates is None:
            yield diagnose("slow-disk/hangs", at=at, nbytes=NBYTES)
        else:
            if (rate := rates.mixed) < SLOW_DISK:
                minutes = 30e9 / rate / 60  # AdamW with parameters in bf16: 16 bytes in, 14 out
                yield diagnose("slow-disk", at=at, rate=rate, least=SLOW_DISK, minutes=minutes)
            if rates.note:
                yield diagnose("direct-io", why=rates.note)


def check_clock(subject: Subject) -> Iterator[Diagnosis]:
    """Compare this host's clock with those of file systems, earlier runs and servers."""
    answers = subject.answers.items()
    ahead = {f"server {peer}": clock for peer, clock in answers if not isinstance(clock, str)}
    written = [Path(__file__)]
    for directory in (*subject.dirs, *([subject.job.run_dir] if subject.job else ())):
        with suppress(OSError), tempfile.NamedTemporaryFile(dir=directory) as file:
            file.write(b"\0")
            file.flush()
            ahead[f"the file system of {directory}"] = os.stat(file.name).st_mtime - time.time()
        if subject.named:
            written += [path for name in ("*.json*", "gen-*/*") for path in directory.glob(name)]
    now = time.time()
    ages = {path: path.stat().st_mtime - now for path in written if path.exists()}
    newest = max(ages, key=lambda path: ages[path])
    ahead[f"the time in {newest}"] = max(0.0, ages[newest])
    for clock, seconds in ahead.items():
        if abs(seconds) > SKEW_S:
            yield diagnose("clock", clock=clock, seconds=seconds, most=SKEW_S)
