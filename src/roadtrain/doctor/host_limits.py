"""Checks of processors, memory and the limits that a launcher, a container or the system sets."""

from __future__ import annotations

import math
import os
import re
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

import roadtrain.kernels
from roadtrain.doctor.diagnosis import Diagnosis, Level, Subject
from roadtrain.environment import local_rank_of
from roadtrain.lab.control_groups import hierarchy, is_version_2, own_group
from roadtrain.lab.leftovers import sweep
from roadtrain.lab.resource import folders
from roadtrain.options.budgets import host_bytes_of
from roadtrain.units import GIB, KIB, MIB, show_bytes

THREAD_NAMES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
LEAST_DESCRIPTORS = 512  # torch, libraries, links and files of a store
LEAST_ADDRESSES = 8 * GIB  # torch reserves addresses generously; with a device far more
LEAST_SHARED = 16 * MIB  # of /dev/shm
UNSCALED = ("intel_pstate", "amd-pstate-epp", "intel_cpufreq")  # `powersave` is their normal state


def own_threads(subject: Subject) -> int:
    """Return the number of processors for each worker of this host."""
    _, workers = local_rank_of(subject.environ)
    return max(1, len(os.sched_getaffinity(0)) // max(1, workers))


def check_threads(subject: Subject) -> Iterator[Diagnosis]:
    share = own_threads(subject)
    for name in THREAD_NAMES:
        text = subject.environ.get(name, "").partition(",")[0].strip()
        if text and not (text.isdigit() and int(text)):
            what = f"{name} is {text!r}, which is not a number of threads"
            yield Diagnosis("threads", "wrong", what, f"unset {name}")
        elif text and int(text) <= share // 2:
            yield Diagnosis(
                "threads",
                "slow",
                f"{name}={text} limits each worker to {text} of its {share} processors",
                f"export {name}={share}, or unset it; torchrun sets OMP_NUM_THREADS=1 where it is"
                " unset",
            )
    allowed, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    if allowed < there:
        yield Diagnosis(
            "affinity",
            "slow" if allowed == 1 else "note",
            f"this process may run on {allowed} of {there} processors",
            "start it without taskset, or with more processors from the launcher (cpuset)",
        )


def group_limits(controller: str, version_1: str, version_2: str) -> Iterator[list[str]]:
    """Yield the content of a limit's file, split into words, for this process's control group and
    for each group around it."""
    root, own = hierarchy(controller), own_group(controller)
    if root is None or own is None:
        return
    # in a container, the path of the group may be outside of what is mounted
    own = own if own.is_dir() else root
    for group in (own, *own.parents):
        path = group / (version_2 if is_version_2(root) else version_1)
        if path.is_file():
            yield path.read_text().split()
        if group == root:
            return


def memory_limit() -> float:
    """Return the memory limit of the control groups in bytes, or infinity."""
    found = group_limits("memory", "memory.limit_in_bytes", "memory.max")
    most = psutil.virtual_memory().total * 16  # larger numbers mean: no limit
    numbers = [int(words[0]) for words in found if words[0].isdigit()]
    return min((n for n in numbers if n < most), default=math.inf)


def processor_limit() -> float:
    """Return the processors that the control groups allow on average, or infinity."""
    periods = [words[0] for words in group_limits("cpu", "cpu.cfs_period_us", "cpu.max")]
    quotas = list(group_limits("cpu", "cpu.cfs_quota_us", "cpu.max"))
    pairs = [(*words, period)[:2] for words, period in zip(quotas, periods)]
    shares = [int(quota) / int(period) for quota, period in pairs if quota.isdigit()]
    return min(shares, default=math.inf)


def check_processor_quota(subject: Subject) -> Iterator[Diagnosis]:
    allowed, quota = len(os.sched_getaffinity(0)), processor_limit()
    text = subject.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    threads = min(allowed, int(text)) if text.isdigit() else allowed
    if quota < threads:
        count = max(1, int(quota))
        yield Diagnosis(
            "cpu-quota",
            "slow",
            f"the control group allows {quota:.1f} processors, but {threads} threads will run: each"
            " is stopped for a part of every period",
            f"export OMP_NUM_THREADS={count} and start with `taskset -c 0-{count - 1}`, or raise"
            " the quota of the container",
        )


def budget_of(subject: Subject) -> int:
    """Return the budget of host memory of the job, or the default budget without a job."""
    if subject.job is None:
        return host_bytes_of(None, whole=False)
    job = subject.job
    in_ram = not (job.store.files or job.servers.addresses)
    return host_bytes_of(job.budget.host, whole=in_ram)


def check_memory(subject: Subject) -> Iterator[Diagnosis]:
    budget, limit = budget_of(subject), memory_limit()
    free = psutil.virtual_memory().available
    if limit < budget:
        fix = f"host = '{int(limit) // 2 // MIB}MiB' in [budget] (place: host_budget)"
        yield Diagnosis(
            "memory-limit",
            "note" if subject.job is None else "wrong",
            f"the control group limits memory to {show_bytes(limit)}, but the budget is"
            f" {show_bytes(budget)}: the system will kill the run",
            f"{fix}, or raise the limit of the container",
        )
    if subject.job and subject.job.budget.host and budget > free:
        yield Diagnosis(
            "memory",
            "wrong",
            f"the budget is {show_bytes(budget)}, but {show_bytes(free)} of memory are free",
            f"host = '{free // 2 // MIB}MiB' in [budget], or end other programs",
        )
    swap = psutil.swap_memory()
    if swap.used > 256 * MIB and free < psutil.virtual_memory().total // 10:
        yield Diagnosis(
            "swap",
            "slow",
            f"{show_bytes(swap.used)} are swapped out and only {show_bytes(free)} of memory are"
            " free: buffers that are swapped are read from disk twice",
            "end other programs, or lower the budget; `swapoff -a` shows what does not fit",
        )
    if subject.read("proc/sys/vm/overcommit_memory") == "2":
        kib = dict(re.findall(r"(\w+):\s+(\d+) kB", subject.read("proc/meminfo")))
        left = (int(kib.get("CommitLimit", 0)) - int(kib.get("Committed_AS", 0))) * KIB
        if left < budget:
            yield Diagnosis(
                "overcommit",
                "wrong",
                f"vm.overcommit_memory=2 leaves {show_bytes(max(0, left))} to allocate, but the"
                f" budget is {show_bytes(budget)}",
                "sysctl vm.overcommit_memory=0, or raise vm.overcommit_ratio",
            )


def check_limits(subject: Subject) -> Iterator[Diagnosis]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < LEAST_DESCRIPTORS:
        yield Diagnosis(
            "descriptors",
            "wrong",
            f"this process may open {soft} files, but needs up to {LEAST_DESCRIPTORS}",
            f"ulimit -n {max(LEAST_DESCRIPTORS, hard)}",
        )
    needs = max(LEAST_ADDRESSES, 2 * budget_of(subject) if subject.job else 0)
    for letter, kind in (("v", resource.RLIMIT_AS), ("d", resource.RLIMIT_DATA)):
        soft, _ = resource.getrlimit(kind)
        if 0 <= soft < needs:
            yield Diagnosis(
                "address-space",
                "wrong",
                f"`ulimit -{letter}` is {show_bytes(soft)}, but a run may need"
                f" {show_bytes(needs)} of addresses",
                f"ulimit -{letter} unlimited; run.memory_limit limits a run's memory",
            )
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= soft < GIB:
        what = f"`ulimit -f` allows files of {show_bytes(soft)}; files of a store are larger"
        yield Diagnosis("file-size", "wrong", what, "ulimit -f unlimited")


def check_pinning(subject: Subject) -> Iterator[Diagnosis]:
    """Compare the limit of locked memory with the budget, and report a refused trial."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    budget, limit = budget_of(subject), "unlimited" if soft < 0 else show_bytes(soft)
    fix = "ulimit -l unlimited, or `LimitMEMLOCK=infinity`, `docker run --ulimit memlock=-1`"
    if subject.torch.unpinned:
        what = f"{subject.torch.unpinned} (RLIMIT_MEMLOCK is {limit})"
        yield Diagnosis("memlock", "slow", what.replace("\nhint: ", "; "), fix)
    elif soft < 0 or soft >= budget:
        return
    elif (subject.root / "sys/class/infiniband").is_dir():
        yield Diagnosis(
            "memlock",
            "wrong",
            f"RLIMIT_MEMLOCK is {limit}, but RDMA cards lock their buffers, up to"
            f" {show_bytes(budget)}",
            fix,
        )
    else:
        why = "nothing is pinned without an accelerator"
        if subject.torch.devices:
            why = f"{subject.torch.kind} pinned memory nevertheless"
        yield Diagnosis("memlock", "note", f"RLIMIT_MEMLOCK is {limit}; {why}", fix)


def check_shared_memory(subject: Subject) -> Iterator[Diagnosis]:
    path = subject.root / "dev/shm"
    if not path.is_dir():
        what, fix = "/dev/shm is missing", "mount -t tmpfs tmpfs /dev/shm"
        yield Diagnosis("shared-memory", "wrong", what, fix)
        return
    usage = psutil.disk_usage(str(path))
    many = len(subject.torch.devices) > 1
    needs = GIB if many else LEAST_SHARED
    if usage.free < needs:
        yield Diagnosis(
            "shared-memory",
            "wrong",
            f"/dev/shm has {show_bytes(usage.free)} free of {show_bytes(usage.total)}, but"
            f" {'NCCL on several devices' if many else 'torch'} may need {show_bytes(needs)}",
            "mount -o remount,size=8G /dev/shm, or `docker run --shm-size=8g`",
        )


def check_leftovers(subject: Subject) -> Iterator[Diagnosis]:
    """Report what killed runs left in shared memory, and labs that nobody removed."""
    found, held = sorted((subject.root / "dev/shm").glob("roadtrain-*")), {}
    used = _open_files() if found else set()
    for path in found:
        inside = [path, *path.rglob("*")] if path.is_dir() else [path]
        if not any(str(file) in used for file in inside):
            held[path.name] = sum(file.lstat().st_blocks * 512 for file in inside)
    if held:
        yield Diagnosis(
            "leftovers",
            "slow",
            f"{', '.join(held)} in /dev/shm hold {show_bytes(sum(held.values()))} of memory, and"
            " no process uses them",
            f"rm -r {' '.join(f'/dev/shm/{name}' for name in held)}, unless a stopped run of the"
            " lab shall be resumed",
        )
    if dead := [path.name for path, _, _, alive in folders() if not alive]:
        what = f"labs of ended processes: {', '.join(dead)}"
        fix = f"python -c 'import {sweep.__module__} as lab; lab.sweep()'"
        yield Diagnosis("leftovers", "note", what, fix)


def _open_files() -> set[str]:
    """Return the paths of all files that processes have open or mapped, as far as visible."""
    found = set()
    for process in psutil.process_iter():
        try:
            found |= {file.path for file in process.open_files()}
            found |= {mapped.path for mapped in process.memory_maps()} | {process.cwd()}
        except (psutil.Error, OSError):
            continue
    return found


def check_kernel_settings(subject: Subject) -> Iterator[Diagnosis]:
    pages = subject.read("sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in pages:
        yield Diagnosis(
            "huge-pages",
            "slow",
            f"transparent huge pages are off ({pages}): buffers use pages of 4 KiB",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    home = "sys/devices/system/cpu/cpu0/cpufreq"
    governor = subject.read(f"{home}/scaling_governor")
    if governor == "powersave" and subject.read(f"{home}/scaling_driver") not in UNSCALED:
        frequency, most = (subject.read(f"{home}/{x}_freq") for x in ("scaling_cur", "cpuinfo_max"))
        yield Diagnosis(
            "governor",
            "slow",
            f"the CPU governor is powersave: {frequency or '?'} of {most or '?'} kHz",
            "cpupower frequency-set -g performance",
        )
    for way in ("rmem", "wmem"):
        words = subject.read(f"proc/sys/net/ipv4/tcp_{way}").split()
        if len(words) == 3 and int(words[2]) < MIB:
            yield Diagnosis(
                "tcp-buffers",
                "slow",
                f"TCP buffers end at {show_bytes(int(words[2]))} (net.ipv4.tcp_{way}), less than"
                f" {show_bytes(MIB)}: a fast link with some delay stays idle",
                f"sysctl net.ipv4.tcp_{way}='{words[0]} {words[1]} {16 * MIB}'",
            )


def writable(directory: Path) -> bool:
    """Return whether files can be created in `directory`, or in its nearest parent that exists."""
    home = next(path for path in (directory, *directory.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=home):
            return True
    except OSError:
        return False


def check_caches(subject: Subject) -> Iterator[Diagnosis]:
    """Check where numba keeps compiled kernels, in the order in which numba tries, and TMPDIR."""
    home = Path(subject.environ.get("HOME", "/"))
    cache = Path(subject.environ.get("XDG_CACHE_HOME") or home / ".cache").absolute()
    own, named = Path(roadtrain.kernels.__file__).parent, subject.environ.get("NUMBA_CACHE_DIR", "")
    kept = next((p for p in (own / "__pycache__", cache / "numba") if writable(p)), None)
    fix = "export NUMBA_CACHE_DIR to a writable directory"
    if named and not writable(Path(named).absolute()):
        and_so = f"numba uses {kept}" if kept else "kernels cannot be compiled"
        level: Level = "slow" if kept else "wrong"
        what = f"NUMBA_CACHE_DIR={named} is not writable, so {and_so}"
        yield Diagnosis("kernel-cache", level, what, fix)
    elif not named and kept is None:
        what = f"neither {own} nor {cache} is writable, so kernels cannot be compiled"
        yield Diagnosis("kernel-cache", "wrong", what, fix)
    try:
        tempfile.TemporaryFile().close()
    except OSError as error:
        what = f"no temporary file can be created: {error.strerror or error}"
        yield Diagnosis("temporary-files", "wrong", what, "export TMPDIR to a writable directory")
