"""`roadtrain doctor` names each of the faults below, which are injected for real, within 10 s."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from roadtrain.lab import LoopDevice, Throttle, lab_available
from roadtrain.lab.control_groups import ControlGroup
from roadtrain.lab.cpus import CpuLimit, cpus_available
from roadtrain.retry import retry
from roadtrain.storage.mark import MarkRecord
from roadtrain.storage.sealed import sealed
from tests.support.ports import free_port

MOST_S = 10.0  # wall time of the whole command
MIB = 1 << 20
pytestmark = [
    pytest.mark.slow,
    pytest.mark.alone,
    pytest.mark.skipif(os.geteuid() != 0, reason="not root"),
]
JOB = """
run.dir = "{run}"
store.files = {files}
[model.config]
model_type = "llama"
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
"""


@dataclass
class Injected:
    """How to start the command such that it meets a fault."""

    words: tuple[str, ...] = ()  # its arguments
    before: tuple[str, ...] = ()  # a command that starts it, such as `taskset -c 0`
    environ: Mapping[str, str] = field(default_factory=dict)


Inject = Callable[[Path, ExitStack], Injected]


def doctor(home: Path, injected: Injected) -> tuple[dict[str, Any], str, int, float]:
    """Run the command. Returns its JSON report, its output, its exit code and its wall time."""
    report = home / "report.json"
    environ = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    environ |= {"HOME": str(home), **injected.environ}
    command = (sys.executable, "-m", "roadtrain", "doctor", *injected.words)
    words = [*injected.before, *command, "--json", str(report)]
    begin = time.monotonic()
    done = subprocess.run(
        words, env=environ, cwd=home, capture_output=True, text=True, timeout=60, check=False
    )
    wall = time.monotonic() - begin
    assert report.exists(), done.stderr
    return json.loads(report.read_text()), done.stdout, done.returncode, wall


def job_file(home: Path, *files: Path, more: str = "") -> str:
    path = home / "job.toml"
    names = json.dumps([str(file) for file in files or (home / "run/store",)])
    path.write_text(JOB.format(run=home / "run", files=names) + more)
    return str(path)


def in_mounts(script: str, *words: str) -> Injected:
    """Run the command in a mount namespace of its own, after the commands of `script`."""
    return Injected(words, ("unshare", "-m", "sh", "-c", f'set -e; {script}; exec "$@"', "-"))


def threads(home: Path, _: ExitStack) -> Injected:
    return Injected(environ={"OMP_NUM_THREADS": "1"})


def affinity(home: Path, _: ExitStack) -> Injected:
    return Injected(before=("taskset", "-c", "0"))


def descriptors(home: Path, _: ExitStack) -> Injected:
    return Injected(before=("prlimit", "--nofile=256:256"))


def address_space(home: Path, _: ExitStack) -> Injected:
    return Injected(before=("prlimit", "--data=4000000000"))


def file_size(home: Path, _: ExitStack) -> Injected:
    return Injected(before=("prlimit", "--fsize=200000000"))


def in_group(group: ControlGroup, *words: str) -> Injected:
    script = f'echo $$ > {group.group / "cgroup.procs"}; exec "$@"'
    return Injected(words, ("sh", "-c", script, "-"))


def processor_quota(home: Path, stack: ExitStack) -> Injected:
    if why := cpus_available():
        pytest.skip(why)
    return in_group(stack.enter_context(CpuLimit((os.cpu_count() or 2) * 0.8)))


class MemoryLimit(ControlGroup):
    controller = "memory"

    def _make(self) -> None:
        names = ("memory.limit_in_bytes", "memory.max")
        path = next(self.group / name for name in names if (self.group / name).exists())
        path.write_text(str(2000 * MIB))


def memory_limit(home: Path, stack: ExitStack) -> Injected:
    if lab_available():
        pytest.skip(str(lab_available()))
    group = stack.enter_context(MemoryLimit())
    return in_group(group, job_file(home, more='[budget]\nhost = "3GiB"\n'))


def memory(home: Path, _: ExitStack) -> Injected:
    return Injected((job_file(home, more='[budget]\nhost = "9TiB"\n'),))


def slow_disk(home: Path, stack: ExitStack) -> Injected:
    if why := lab_available():
        pytest.skip(why)
    device = stack.enter_context(LoopDevice(home / "slow.img", 1100 * MIB))
    group = stack.enter_context(Throttle([device], 20e6, 20e6))
    return in_group(group, "--dirs", str(device.mount))


def full(home: Path, stack: ExitStack) -> Injected:
    if why := lab_available():
        pytest.skip(why)
    device = stack.enter_context(LoopDevice(home / "full.img", 64 * MIB))
    with (device.mount / "filled").open("wb") as file:
        free = os.statvfs(device.mount)
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize - MIB)
    return Injected(("--dirs", str(device.mount)))


def tmpfs(home: Path, _: ExitStack) -> Injected:
    (home / "ssd").mkdir()
    return in_mounts(f"mount -t tmpfs tmpfs {home}/ssd", "--dirs", f"{home}/ssd")


def inodes(home: Path, _: ExitStack) -> Injected:
    (home / "ssd").mkdir()
    return in_mounts(f"mount -t tmpfs -o nr_inodes=9 x {home}/ssd", "--dirs", f"{home}/ssd")


def buffered(home: Path, _: ExitStack) -> Injected:
    """A directory on an overlay above ramfs, which has no direct I/O."""
    (home / "a").mkdir()
    (home / "b").mkdir()
    script = f"cd {home}; mount -t ramfs x a; mkdir a/u a/w a/o"
    script += "; mount -t overlay x -o lowerdir=b,upperdir=a/u,workdir=a/w a/o"
    return in_mounts(script, "--dirs", f"{home}/a/o")


def read_only(home: Path, _: ExitStack) -> Injected:
    (home / "ssd").mkdir()
    script = f"mount --bind {home}/ssd {home}/ssd; mount -o remount,ro,bind {home}/ssd"
    return in_mounts(script, "--dirs", f"{home}/ssd")


def missing(home: Path, _: ExitStack) -> Injected:
    return Injected((job_file(home, home / "no/such/disk"),))


def no_model(home: Path, _: ExitStack) -> Injected:
    path = job_file(home)
    text = JOB.partition("[model.config]")[0].format(run=home / "run", files=[str(home / "run/s")])
    Path(path).write_text(f'{text}\n[model]\npretrained = "no/such/model"\n')
    return Injected((path,))


def same_disk(home: Path, _: ExitStack) -> Injected:
    for name in "ab":
        (home / name).mkdir()
    return Injected(("--dirs", f"{home}/a,{home}/b"))


def locked(home: Path, stack: ExitStack) -> Injected:
    (home / "store").mkdir()
    fd = os.open(home / "store", os.O_RDONLY)
    stack.callback(os.close, fd)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return Injected(("--dirs", f"{home}/store"))


def damaged(home: Path, _: ExitStack) -> Injected:
    (home / "store").mkdir()
    (home / "store/CURRENT").write_text("garbage")
    return Injected(("--dirs", f"{home}/store"))


def future_files(home: Path, _: ExitStack) -> Injected:
    (home / "run").mkdir()
    path = home / "run/mark.json"
    path.write_bytes(sealed(json.dumps({"job": MarkRecord().job}).encode()))
    os.utime(path, (time.time() + 3600,) * 2)
    return Injected((job_file(home),))


@contextmanager
def server(home: Path, *words: str, code: str = "") -> Iterator[str]:
    """Run `roadtrain serve`, after the Python statements `code`. Yields its address."""
    address = f"127.0.0.1:{free_port()}"
    (home / "served").mkdir()
    args = ["serve", address, "--store", str(home / "served"), *words]
    program = f"{code}\nfrom roadtrain.cli import main\nmain({args!r})"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    try:
        host, port = address.split(":")
        retry(lambda: socket.create_connection((host, int(port))).close(), OSError, 30)
        yield address
    finally:
        process.kill()
        process.wait()


def other_clock(home: Path, stack: ExitStack) -> Injected:
    code = "import time; now = time.time; time.time = lambda: now() + 300"
    return Injected(("--peers", stack.enter_context(server(home, code=code))))


def token_refused(home: Path, stack: ExitStack) -> Injected:
    for name in ("ours", "theirs"):
        path = home / f"{name}.token"
        path.write_text(name * 8)
        path.chmod(0o600)
    address = stack.enter_context(server(home, "--token-file", f"{home}/theirs.token"))
    return Injected(("--peers", address, "--token-file", f"{home}/ours.token"))


def token_open(home: Path, _: ExitStack) -> Injected:
    path = home / "token"
    path.write_text("t" * 40)
    path.chmod(0o644)
    return Injected(("--token-file", str(path)))


def no_server(home: Path, _: ExitStack) -> Injected:
    return Injected(("--peers", f"127.0.0.1:{free_port()}"))


def listener(stack: ExitStack, comment: str = "") -> str:
    """Start a process that accepts connections, and never answers. Returns its address."""
    where = ("127.0.0.1", free_port())
    code = f"import socket, time; s = socket.create_server({where}); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code + comment])
    stack.callback(process.wait)
    stack.callback(process.kill)
    retry(lambda: socket.create_connection(where).close(), OSError, 30)
    return f"{where[0]}:{where[1]}"


def silent_server(home: Path, stack: ExitStack) -> Injected:
    return Injected(("--peers", listener(stack, "  # roadtrain serve")))


def port_in_use(home: Path, stack: ExitStack) -> Injected:
    return Injected(("--peers", listener(stack)))


def interface(home: Path, _: ExitStack) -> Injected:
    return Injected(environ={"GLOO_SOCKET_IFNAME": "eth77"})


def interface_down(home: Path, _: ExitStack) -> Injected:
    script = 'ip link add down0 type dummy; exec "$@"'
    before = ("unshare", "-n", "sh", "-c", script, "-")
    return Injected(before=before, environ={"NCCL_SOCKET_IFNAME": "down"})


def host_name(home: Path, _: ExitStack) -> Injected:
    script = 'hostname host-of-nobody; exec "$@"'
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return Injected(before=("unshare", "-u", "sh", "-c", script, "-"), environ=environ)


def tcp_buffers(home: Path, _: ExitStack) -> Injected:
    script = 'echo 4096 16384 65536 > /proc/sys/net/ipv4/tcp_rmem; exec "$@"'
    return Injected(before=("unshare", "-n", "sh", "-c", script, "-"))


def extra(home: Path, _: ExitStack) -> Injected:
    code = "import sys; sys.modules['transformers'] = None\n"
    (home / "sitecustomize.py").write_text(code)
    path = f"{home}{os.pathsep}{os.environ['PYTHONPATH']}"
    return Injected((job_file(home),), environ={"PYTHONPATH": path})


def tracker(home: Path, _: ExitStack) -> Injected:
    (home / "sitecustomize.py").write_text("import sys; sys.modules['wandb'] = None\n")
    path = f"{home}{os.pathsep}{os.environ['PYTHONPATH']}"
    job = Path(job_file(home))
    job.write_text(f'run.report_to = ["wandb"]\n{job.read_text()}')
    return Injected((str(job),), environ={"PYTHONPATH": path})


def old_torch(home: Path, _: ExitStack) -> Injected:
    about = home / "torch-2.0.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0.1\n")
    path = f"{home}{os.pathsep}{os.environ['PYTHONPATH']}"
    return Injected(environ={"PYTHONPATH": path})


def broken_torch(home: Path, _: ExitStack) -> Injected:
    (home / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open')\n")
    path = f"{home}{os.pathsep}{os.environ['PYTHONPATH']}"
    return Injected(environ={"PYTHONPATH": path})


def shared_memory(home: Path, _: ExitStack) -> Injected:
    return in_mounts("mount -t tmpfs -o size=1M tmpfs /dev/shm")


def leftovers(home: Path, _: ExitStack) -> Injected:
    return in_mounts(
        "mount -t tmpfs x /dev/shm; head -c 999999 /dev/zero > /dev/shm/roadtrain-dead"
    )


def kernel_cache(home: Path, _: ExitStack) -> Injected:
    return Injected(environ={"NUMBA_CACHE_DIR": "/proc/nowhere"})


# The name of the finding, and how the fault is injected.
FAULTS: tuple[tuple[str, Inject], ...] = (
    ("threads", threads),
    ("affinity", affinity),
    ("descriptors", descriptors),
    ("address-space", address_space),
    ("file-size", file_size),
    ("cpu-quota", processor_quota),
    ("memory-limit", memory_limit),
    ("memory", memory),
    ("slow-disk", slow_disk),
    ("full", full),
    ("tmpfs", tmpfs),
    ("inodes", inodes),
    ("direct-io", buffered),
    ("directory", read_only),
    ("directory", missing),
    ("file", no_model),
    ("same-disk", same_disk),
    ("lock", locked),
    ("store", damaged),
    ("clock", future_files),
    ("clock", other_clock),
    ("server", token_refused),
    ("server", no_server),
    ("server", silent_server),
    ("token", token_open),
    ("interface", interface),
    ("interface", interface_down),
    ("host-name", host_name),
    ("tcp-buffers", tcp_buffers),
    ("extra", extra),
    ("extra", tracker),
    ("port", port_in_use),
    ("version", old_torch),
    ("torch", broken_torch),
    ("shared-memory", shared_memory),
    ("leftovers", leftovers),
    ("kernel-cache", kernel_cache),
)


# Faults for `make test`; the others belong to `make test-rest`.
OFTEN = (threads, memory_limit, slow_disk, full, tmpfs, locked, token_refused, interface)


@pytest.mark.skipif(not shutil.which("unshare"), reason="no unshare: apt install util-linux")
@pytest.mark.parametrize(
    ("name", "inject"),
    [
        pytest.param(
            name,
            inject,
            id=f"{name}-{inject.__name__}",
            marks=[] if inject in OFTEN else pytest.mark.exhaustive,
        )
        for name, inject in FAULTS
    ],
)
def test_a_fault_is_named_with_its_fix_within_10_s(
    tmp_path: Path, name: str, inject: Inject
) -> None:
    with ExitStack() as stack:
        report, printed, code, wall = doctor(tmp_path, inject(tmp_path, stack))
    found = [f for f in report["findings"] if f["fault"] == name and f["level"] != "note"]
    assert found and all(finding["fix"] for finding in found), printed
    assert found[0]["what"] in printed and f"fix: {found[0]['fix']}" in printed
    # no other alarm, except what comes with the fault
    others = {f["fault"] for f in report["findings"] if f["level"] != "note"} - {name}
    assert others <= COMPANIONS.get(inject.__name__, set()), printed
    assert code == 1 and wall < MOST_S
    assert not list(tmp_path.rglob("probe-*"))


# Findings that a fault brings with it.
COMPANIONS = {"inodes": {"tmpfs"}, "affinity": {"cpu-quota"}}


def test_at_least_20_kinds_of_faults_are_injected() -> None:
    assert len({name for name, _ in FAULTS}) >= 20


def test_a_healthy_machine_raises_no_alarm(tmp_path: Path) -> None:
    for words in ((), (job_file(tmp_path),), ("--dirs", str(tmp_path))):
        report, printed, code, wall = doctor(tmp_path, Injected(words))
        assert {f["level"] for f in report["findings"]} <= {"note"} and code == 0, printed
        # a busy machine may be too slow to import torch in time
        assert {f["fault"] for f in report["findings"]} <= {"load", "torch"}, printed
        assert wall < MOST_S and not list(tmp_path.rglob("probe-*"))


def test_the_locks_process_is_named(tmp_path: Path) -> None:
    with ExitStack() as stack:
        report, *_ = doctor(tmp_path, locked(tmp_path, stack))
    [finding] = [f for f in report["findings"] if f["fault"] == "lock"]
    assert f"process {os.getpid()} (" in finding["what"]
