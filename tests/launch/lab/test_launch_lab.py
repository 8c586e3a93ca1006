"""The lab as an engine: hosts, rates, separate directories, and which files persist."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roadtrain.config.cluster import make_cluster
from roadtrain.config.machines import Machines, PlanHost
from roadtrain.config.plan_file import PlanFile, make_plan
from roadtrain.errors import ConfigError, LaunchError
from roadtrain.lab import PREFIX, lab_available, network_available, sweep
from roadtrain.launch.lab_engine import LabEngine, kept_memory
from roadtrain.launch.processes import Process, Role
from roadtrain.launch.protocol.run_events import HostJoined, HostLost, Output, ProcessEnded

pytestmark = [
    pytest.mark.lab,
    pytest.mark.alone,
    pytest.mark.skipif(network_available() is not None, reason=str(network_available())),
]
SIZE, FAST, SLOW = 4 << 20, 40e6, 5e6  # bytes, bytes per second
# The fastest of three: a busy machine slows a transfer down and never speeds it up.
SEND = (
    "import socket, sys, time\n"
    "def took():\n"
    "    for trial in range(200):\n"
    "        try: peer = socket.create_connection((sys.argv[1], 5000)); break\n"
    "        except OSError: time.sleep(0.05)\n"
    "    began = time.monotonic(); peer.sendall(bytes(int(sys.argv[2]))); peer.shutdown(1)\n"
    "    peer.recv(1); return time.monotonic() - began\n"
    "print('took', min(took() for _ in range(3)))"
)
RECEIVE = (
    "import socket\nwith socket.create_server(('0.0.0.0', 5000)) as listener:\n"
    " while True:\n  peer = listener.accept()[0]\n"
    "  while peer.recv(1 << 20): pass\n  peer.sendall(b'1'); peer.close()"
)


def plan_of(tmp_path, *, ssds=(), rate="40MB/s"):
    cluster = make_cluster(
        {
            "hosts": [
                {
                    "name": "gpu",
                    "count": 2,
                    "device": {"flops": "1GFLOP/s", "memory": "1GB"},
                    "memory": "1GB",
                    "nics": [{"rate": "1MB/s"}, {"rate": rate, "switch": "rack"}],
                    "ssds": list(ssds),
                },
                {
                    "name": "spare",
                    "memory": "1GB",
                    "nics": [{"rate": rate, "latency": "1ms", "switch": "far"}],
                },
            ],
            "switches": [{"name": "rack"}, {"name": "far"}],
            "links": [{"between": ["rack", "far"], "rate": "20MB/s"}],
        }
    )
    hosts = tuple(PlanHost(f"gpu{n}", "gpu", f"10.99.0.{n}", workers=1) for n in range(2))
    return PlanFile(make_plan({"placement": "ddp"}), Machines(hosts=hosts), None, cluster)


def process(name, host, code, *words, directory):
    return Process(name, Role.SERVER, host, ("-c", code, *words), str(directory))


def until(engine, kind, seen=None):
    seen = [] if seen is None else seen
    deadline = time.monotonic() + 30
    while not any(isinstance(event, kind) for event in seen):
        assert time.monotonic() < deadline, f"no {kind.__name__} in {seen}"
        seen += engine.events(0.5)
    return seen


def output_of(engine, host, code, *words, directory):
    """Run a process that must succeed. Returns its output lines."""
    engine.start(process("asked", host, code, *words, directory=directory))
    seen = until(engine, ProcessEnded)
    (end,) = [event for event in seen if isinstance(event, ProcessEnded)]
    assert end.code == 0, (end, seen)
    return [event.line for event in seen if isinstance(event, Output) and event.name == "asked"]


def left():
    loops = subprocess.run(["losetup", "-l"], capture_output=True, text=True, check=True).stdout
    mounted = {line for line in loops.splitlines() if PREFIX in line}
    return mounted | {path.name for path in Path("/tmp").glob(f"{PREFIX}*")}


@pytest.fixture
def nothing_left():
    before = left()  # of other labs; a new lab removes those that are dead
    yield
    assert left() <= before


def test_hosts_leave_and_rejoin_and_rates_change(tmp_path, nothing_left):
    engine = LabEngine(plan_of(tmp_path), f"test {tmp_path}", tmp_path / "lab")
    try:
        addresses = {host.name: host.address for host in engine.hosts()}
        assert {*addresses} == {"gpu0", "gpu1"}  # spare exists but is not used yet
        assert "not emulated: the latency of cards and links" in [
            event.line for event in until(engine, Output) if isinstance(event, Output)
        ]
        assert output_of(
            engine, "gpu1", "import os; print(os.uname().nodename)", directory=tmp_path
        ) == ["gpu1"]

        engine.start(process("listener", "gpu1", RECEIVE, directory=tmp_path))
        seconds = []
        for rate in (FAST, SLOW):
            engine.run_verb(["rate", "gpu0", "1", f"{rate / 1e6}MB/s"])
            (line,) = output_of(
                engine, "gpu0", SEND, addresses["gpu1"], str(SIZE), directory=tmp_path
            )
            seconds.append(float(line.split()[1]))
        assert SIZE / SLOW * 0.8 < seconds[1] < SIZE / SLOW * 2
        assert seconds[0] < seconds[1] / 3

        engine.run_verb(["hold", "gpu1"])
        assert [e.host for e in until(engine, HostLost) if isinstance(e, HostLost)] == ["gpu1"]
        for name in ("gpu1", "spare"):
            engine.run_verb(["comes", name])
            (joined,) = [
                event for event in until(engine, HostJoined) if isinstance(event, HostJoined)
            ]
            assert (joined.host, joined.address) == (
                name,
                addresses.setdefault(name, joined.address),
            )
        assert len(set(addresses.values())) == 3
        engine.start(process("listener", "gpu1", RECEIVE, directory=tmp_path))
        engine.run_verb(["link", "far", "rack", f"{SLOW / 1e6}MB/s"])
        (line,) = output_of(engine, "spare", SEND, addresses["gpu1"], str(SIZE), directory=tmp_path)
        assert SIZE / SLOW * 0.8 < float(line.split()[1]) < SIZE / SLOW * 2
        with pytest.raises(LaunchError, match="no host 'gpu7'"):
            engine.run_verb(["rate", "gpu7", "0", "1MB/s"])
        with pytest.raises(LaunchError, match="no link between the switches"):
            engine.run_verb(["link", "a", "b", "1MB/s"])
        with pytest.raises(LaunchError, match="does not know the verb"):
            engine.run_verb(["dance"])
    finally:
        engine.close()


@pytest.mark.skipif(lab_available() is not None, reason=str(lab_available()))
def test_each_host_has_its_own_persistent_directories(tmp_path, nothing_left):
    mounted = tmp_path / "mnt" / "ssd0"
    ssd = {"read": "20MB/s", "write": "10MB/s", "directories": [str(mounted)], "capacity": "64MB"}
    write = (
        "import os, sys, time, mmap\nbegan = time.monotonic()\n"
        "file = os.open(sys.argv[1] + '/data', os.O_CREAT | os.O_WRONLY | os.O_DIRECT)\n"
        "page = mmap.mmap(-1, 1 << 20)\n"
        "for n in range(8): os.write(file, page)\n"
        "os.mkdir('/dev/shm/store-of-test'); open('/dev/shm/forgotten', 'w').close()\n"
        "os.fsync(file); print('took', time.monotonic() - began)"
    )
    look = "import os, sys; print(sorted(os.listdir(sys.argv[1])), os.listdir('/dev/shm'))"
    mark = f"test {tmp_path}"
    for start in range(2):
        engine = LabEngine(plan_of(tmp_path, ssds=[ssd]), mark, tmp_path / "lab")
        try:
            if start == 0:
                (line,) = output_of(engine, "gpu0", write, str(mounted), directory=tmp_path)
                assert float(line.split()[1]) > 0.6  # 8 MiB at 10 MB/s
            (first,) = output_of(engine, "gpu0", look, str(mounted), directory=tmp_path)
            assert "'data'" in first and "store-of-test" in first
            assert ("forgotten" in first) == (start == 0)
            (second,) = output_of(engine, "gpu1", look, str(mounted), directory=tmp_path)
            assert second == "['lost+found'] []"
            if start == 1:
                again = f"import os; os.rmdir('/dev/shm/store-of-test'); {look}"
                output_of(engine, "gpu0", again, str(mounted), directory=tmp_path)
        finally:
            engine.close()
        assert not mounted.exists() and not Path("/dev/shm/store-of-test").exists()
    assert not kept_memory(mark).exists()


def test_a_card_too_fast_to_emulate_is_refused(tmp_path, nothing_left):
    with pytest.raises(ConfigError, match=r"host gpu0 has a card of 12\.50 GB/s, but a lab"):
        LabEngine(plan_of(tmp_path, rate="100Gbit/s"), "test", tmp_path / "lab")


def test_the_next_lab_removes_the_remains_of_a_killed_supervisor(tmp_path):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom test_launch_lab import LabEngine, plan_of\n"
        "engine = LabEngine(plan_of(sys.argv[2]), 'test ' + sys.argv[2], Path(sys.argv[2], 'l'))\n"
        "print('up', flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=dict(os.environ)) as process:
        assert process.stdout.readline() == b"up\n"
        homes = set(Path("/tmp").glob(f"{PREFIX}{process.pid}-*"))
        process.kill()
    assert homes
    LabEngine(plan_of(tmp_path), f"test {tmp_path}", tmp_path / "l").close()
    assert not [home for home in homes if home.exists()]


JOB = """
[run]
dir = "{home}/run"
steps = 60
log_every = 1
[model]
dtype = "fp32"
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 32
[data]
paths = ["{home}/text.txt"]
seq_len = 32
batch_size = 4
"""
PLAN = """
placement = "server"
micro_batch = 2
parallelism = {{ dp = 2 }}
[machines]
[[machines.hosts]]
name = "gpu0"
kind = "gpu"
address = "10.99.0.1"
workers = 1
[[machines.hosts]]
name = "gpu1"
kind = "gpu"
address = "10.99.0.2"
workers = 1
[[machines.hosts]]
name = "spare"
kind = "spare"
address = "10.99.0.3"
servers = [{{ store = "{home}/ssd0/store", port = 7000 }}]
[cluster]
[[cluster.hosts]]
name = "gpu"
count = 2
memory = "2GB"
device = {{ flops = "1GFLOP/s", memory = "2GB" }}
nics = [{{ rate = "50MB/s" }}]
[[cluster.hosts]]
name = "spare"
memory = "2GB"
nics = [{{ rate = "50MB/s" }}]
[[cluster.hosts.ssds]]
read = "50MB/s"
write = "50MB/s"
capacity = "200MB"
directories = ["{home}/ssd0"]
"""


def supervisors(home, module="supervise"):
    """Return the pids of the supervisors of the runs in this home.

    module: `standby_main` returns their standbys instead.
    """
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_text().split("\0")
            if f"roadtrain.launch.{module}" in words and str(home) in words[-2]:
                pids.append(int(path.name))
    return pids


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.skipif(lab_available() is not None, reason=str(lab_available()))
def test_a_job_on_a_lab_survives_its_supervisor(tmp_path, nothing_left):
    """Rule 3: the standby continues, and the losses are unchanged by the kill."""
    (tmp_path / "text.txt").write_text("".join(f"line {n} of {n * n}\n" for n in range(2000)))
    for name, text in (("job.toml", JOB), ("plan.toml", PLAN)):
        (tmp_path / name).write_text(text.format(home=tmp_path))
    environment = os.environ | {"HOME": str(tmp_path)}
    words = [sys.executable, "-m", "roadtrain.cli", "launch"]
    log = tmp_path / ".roadtrain" / "runs" / "job" / "all.log"

    def logged():
        return log.read_text() if log.exists() else ""

    def launch(*more):
        done = subprocess.run(
            [*words, *more],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr

    try:
        launch("plan.toml", "job.toml", "--on", "lab", "--detach")
        deadline = time.monotonic() + 300
        while "step 4/60" not in logged():
            assert time.monotonic() < deadline, logged()
            time.sleep(0.05)
        (pid,) = supervisors(tmp_path)
        os.kill(pid, signal.SIGKILL)
        while "step 60/60" not in logged() or supervisors(tmp_path, "standby_main"):
            assert time.monotonic() < deadline, logged()
            time.sleep(0.05)
    finally:
        for module in ("standby_main", "supervise"):
            for pid in supervisors(tmp_path, module):
                os.kill(pid, signal.SIGKILL)
        sweep()
    text = log.read_text()
    assert int(re.findall(r"\): step (\d+), 2 worker", text)[-1]) >= 3
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    kept = [json.loads(line) for line in metrics.splitlines()]
    assert [line["step"] for line in kept] == list(range(1, 61))
    losses = {line["step"]: f"{line['loss']:.3f}" for line in kept}
    # Lines printed while the supervisor was dead are not in the log.
    logged_losses = re.findall(r"step (\d+)/60 +loss (\S+)", text)
    assert len(logged_losses) >= 40
    assert all(losses[int(step)] == loss for step, loss in logged_losses), (losses, logged_losses)
