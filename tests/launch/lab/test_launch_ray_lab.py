"""A launched run on Ray whose two nodes are hosts of an emulated network, with addresses of their own:
what crosses between them crosses links."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import tomli_w

from roadtrain.lab import LabHost, LabNic, Network, network_available
from roadtrain.training.metrics import read_metrics

pytestmark = [
    pytest.mark.lab,
    pytest.mark.alone,
    pytest.mark.exhaustive,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no ray: pip install ray"),
    pytest.mark.skipif(network_available() is not None, reason=str(network_available())),
]
PORT = 6379
SMALL = str(80 << 20)  # bytes of the object store
STEPS = 6
STARTS_S = 60.0
RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=2"]
MODEL = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


@contextmanager
def ray_node(host: LabHost, directory: Path, *words: str) -> Iterator[subprocess.Popen[Any]]:
    """A node of the name of its host, until the block ends: then all its processes have ended."""
    log = directory / f"ray.{host.name}.log"
    with open(log, "wb") as said:
        node = host.run(
            [
                *RAY,
                *words,
                f"--node-ip-address={host.address}",
                f"--object-store-memory={SMALL}",
                f"--labels=roadtrain-host={host.name}",
            ],
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + STARTS_S
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline and node.poll() is None, log.read_text()
            time.sleep(0.2)
        yield node
    finally:
        started = psutil.Process(node.pid).children(recursive=True)
        node.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            node.wait(20)
        _, left = psutil.wait_procs(started, timeout=10)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        node.kill()
        node.wait()


def write_files(directory: Path) -> None:
    (directory / "text").write_text("".join(f"line {n} of {n * n}\n" for n in range(2000)))
    job = {
        "run": {"dir": str(directory / "run"), "steps": STEPS, "log_every": 1},
        "model": {"dtype": "fp32", "config": MODEL},
        "data": {"paths": [str(directory / "text")], "seq_len": 32, "batch_size": 4},
        "optimizer": {"name": "adamw", "lr": 1e-3},
    }
    store = {"store": str(directory / "store"), "port": 7000}
    hosts: list[dict[str, Any]] = [
        {"name": "a", "kind": "gpu", "workers": 1},
        {"name": "b", "kind": "gpu", "workers": 1, "servers": [store]},
    ]
    plan = {
        "placement": "server",
        "parallelism": {"dp": 2},
        "micro_batch": 2,
        "machines": {"hosts": hosts},
    }
    (directory / "job.toml").write_text(tomli_w.dumps(job))
    (directory / "plan.toml").write_text(tomli_w.dumps(plan))


def test_a_run_on_two_ray_nodes_in_two_networks_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_files(tmp_path)
    nics = {"a": [LabNic(50e6)], "b": [LabNic(50e6)]}
    # Ray's sockets: a path of theirs has 107 bytes at most
    with tempfile.TemporaryDirectory(prefix="rt") as short, Network(nics) as network:
        a, b = network.hosts["a"], network.hosts["b"]
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        head.append(f"--temp-dir={short}")
        with ray_node(a, tmp_path, *head):
            address = f"{a.address}:{PORT}"
            with ray_node(b, tmp_path, f"--address={address}"):
                launched = a.run(
                    [
                        *(sys.executable, "-m", "roadtrain.cli", "launch", "plan.toml", "job.toml"),
                        *("--on", "ray", "--ray-address", address, "--name", "r"),
                    ],
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                try:
                    out, _ = launched.communicate(timeout=240)
                finally:
                    launched.kill()
    logs = "".join(path.read_text()[-3000:] for path in tmp_path.glob("ray.*.log"))
    assert launched.returncode == 0, out + logs
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    assert f"at {b.address}:7000" in out  # the server listens at its host's own address
