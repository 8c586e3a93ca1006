"""Checks of processors, memory and the limits that a launcher, a container or the system sets."""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

import roadtrain.kernels
from roadtrain.doctor.diagnosis import Diagnosis, Subject, diagnose
from roadtrain.environment import control_group_limit, control_group_words, local_rank_of
from roadtrain.launch.host_report import report_path
from roadtrain.options.budgets import host_bytes_of
from roadtrain.units import GIB, KIB, MIB, show_bytes

THREAD_NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
LEAST_DESCRIPTORS = 512  # torch, libraries, links and files of a store
LEAST_ADDRESSES = 8 * GIB  # torch reserves addresses generously; with a device far more
LEAST_SHARED = 16 * MIB  # of /dev/shm; 1 GiB with several devices
UNSCALED = ("intel_pstate", "amd-pstate-epp")  # `powersave` is their normal state


def check_threads(subject: Subject) -> Iterator[Diagnosis]:
    allowed, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    _, workers = local_rank_of(subject.environ)
    share = max(1, allowed // max(1, workers))
    for name in THREAD_NAMES:
        count = subject.environ.get(name, "").partition(",")[0].strip()
        if count and not (count.isdigit() and int(count)):
            yield diagnose("threads/number", name=name, count=count)
        elif count and int(count) <= share // 2:
            yield diagnose("threads", name=name, count=count, share=share)
    if allowed < there:
        level = "slow" if allowed == 1 else "note"
        yield diagnose("affinity", level, allowed=allowed, there=there)


def processor_limit() -> float:
    """Return the processors that the control groups allow on average, or infinity."""
    quotas = control_group_words("cpu", "cpu.cfs_quota_us", "cpu.max")
    periods = control_group_words("cpu", "cpu.cfs_period_us", "cpu.max")
    shares = [int(q) / int(p) for (q, *_), (*_, p) in zip(quotas, periods) if q.isdecimal()]
    return min(shares, default=math.inf)


def check_processor_quota(subject: Subject) -> Iterator[Diagnosis]:
    threads, quota = len(os.sched_getaffinity(0)), processor_limit()
    text = subject.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = min(threads, int(text)) if text.isdigit() else threads
    if quota < threads:
        count = max(1, int(quota))
        yield diagnose("cpu-quota", quota=quota, threads=threads, count=count, last=count - 1)


def budget_of(subject: Subject) -> int:
    """Return the budget of host memory of the job, or the default budget without a job."""
    if (job := subject.job) is None:
        return host_bytes_of(None, whole=False)
    return host_bytes_of(job.budget.host, whole=not (job.store.files or job.servers.addresses))


def check_memory(subject: Subject) -> Iterator[Diagnosis]:
    budget, limit, job = budget_of(subject), control_group_limit(), subject.job
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    free = memory.available
    if limit is not None and limit < budget:
        level, half = "wrong" if job else "note", limit // 2 // MIB
        yield diagnose("memory-limit", level, limit=limit, budget=budget, half=half)
    if job and job.budget.host and budget > free:
        yield diagnose("memory", budget=budget, free=free, half=free // 2 // MIB)
    if swap.used > 256 * MIB and free < memory.total // 10:
        yield diagnose("swap", used=swap.used, free=free)
    if subject.read("proc/sys/vm/overcommit_memory") == "2":
        kib = dict(re.findall(r"(\w+):\s+(\d+) kB", subject.read("proc/meminfo")))
        left = (int(kib.get("CommitLimit", 0)) - int(kib.get("Committed_AS", 0))) * KIB
        if left < budget:
            yield diagnose("overcommit", left=max(0, left), budget=budget)


def check_limits(subject: Subject) -> Iterator[Diagnosis]:
    needs = max(LEAST_ADDRESSES, 2 * budget_of(subject) if subject.job else 0)
    for entry, letter, kind, least in (
        ("descriptors", "n", resource.RLIMIT_NOFILE, LEAST_DESCRIPTORS),
        ("address-space", "v", resource.RLIMIT_AS, needs),
        ("address-space", "d", resource.RLIMIT_DATA, needs),
        ("file-size", "f", resource.RLIMIT_FSIZE, GIB),
    ):
        limit, _ = resource.getrlimit(kind)
        if 0 <= limit < least:
            yield diagnose(entry, letter=letter, limit=limit, needs=least)


def check_pinning(subject: Subject) -> Iterator[Diagnosis]:
    """Report a refused trial of pinning, and a limit that RDMA cards will exceed."""
    limit, budget = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], budget_of(subject)
    text = show_bytes(limit) if limit >= 0 else "unlimited"
    if why := subject.torch.unpinned.replace("\nhint: ", "; "):
        yield diagnose("memlock", "slow", limit=text, budget=budget, why=why)
    elif 0 <= limit < budget and (subject.root / "sys/class/infiniband").is_dir():
        yield diagnose("memlock", limit=text, budget=budget, why="RDMA cards lock all buffers")


def check_load(subject: Subject) -> Iterator[Diagnosis]:
    load, processors = os.getloadavg()[0], os.cpu_count() or 1
    if subject.rates and load > processors:
        yield diagnose("load", load=load, processors=processors)


def check_shared_memory(subject: Subject) -> Iterator[Diagnosis]:
    usage = psutil.disk_usage(str(subject.root / "dev/shm"))
    needs = GIB if len(subject.torch.devices) > 1 else LEAST_SHARED
    if usage.free < needs:
        yield diagnose("shared-memory", free=usage.free, total=usage.total, needs=needs)


def check_leftovers(subject: Subject) -> Iterator[Diagnosis]:
    """Report what killed runs left in shared memory."""
    found = sorted((subject.root / "dev/shm").glob("roadtrain-*"))
    opened = set()
    for link in Path("/proc").glob("[0-9]*/fd/*") if found else ():
        with suppress(OSError):  # compared by inode: hosts of a lab see other paths
            opened.add((link.stat().st_dev, link.stat().st_ino))
    for path in found:
        files = [file.lstat() for file in (path, *path.rglob("*"))]
        if not opened & {(file.st_dev, file.st_ino) for file in files}:
            held = sum(file.st_blocks for file in files) * 512
            yield diagnose("leftovers", at=path, held=held)


def check_kernel_settings(subject: Subject) -> Iterator[Diagnosis]:
    pages = subject.read("sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in pages:
        yield diagnose("huge-pages", pages=pages)
    home = "sys/devices/system/cpu/cpu0/cpufreq"
    driver, governor = (subject.read(f"{home}/scaling_{x}") for x in ("driver", "governor"))
    if governor == "powersave" and driver not in UNSCALED:
        now, most = (subject.read(f"{home}/{x}_freq") for x in ("scaling_cur", "cpuinfo_max"))
        yield diagnose("governor", now=now, most=most)
    for name in ("tcp_rmem", "tcp_wmem"):
        words = subject.read(f"proc/sys/net/ipv4/{name}").split()
        if len(words) == 3 and int(words[2]) < MIB:
            yield diagnose("tcp-buffers", name=f"net.ipv4.{name}", most=int(words[2]))


def check_kernel_cache(subject: Subject) -> Iterator[Diagnosis]:
    """Check where numba keeps compiled kernels."""
    home = subject.environ.get("XDG_CACHE_HOME") or f"{subject.environ.get('HOME', '')}/.cache"
    places = [str(Path(roadtrain.kernels.__file__).parent / "__pycache__"), home]
    if own := subject.environ.get("NUMBA_CACHE_DIR"):
        places = [own]
    if all(report_path(place).refused for place in places):
        yield diagnose("kernel-cache", places=places)
