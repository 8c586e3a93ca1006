"""Processes for tests of several workers: hosts (`roadtrain serve`) and workers, forked from a
server."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch

import roadtrain
from roadtrain import Servers
from roadtrain.errors import RoadtrainError
from roadtrain.servers import remote_servers, server
from roadtrain.servers.serve import SessionHost
from roadtrain.storage.direct import DirectFile, typed_errors
from roadtrain.storage.file import FileTier
from roadtrain.storage.mark import Mark
from roadtrain.switch import packets
from roadtrain.switch.datagrams import DatagramSocket
from roadtrain.switch.protocol import timed_sender
from roadtrain.switch.switch import SwitchHost
from roadtrain.transport.tcp import TcpOptions
from tests.support.faulty import RandomFaults, faulty
from tests.support.models import build, delay_of, new_scaler, one_step
from tests.support.ports import free_port
from tests.support.warm_python import warm_python

FORK = multiprocessing.get_context("forkserver")
# pytest: each child imports what its parent runs
FORK.set_forkserver_preload(["pytest", "tests.support.preloaded"])
BUDGET = "96MiB"
OF_SERVERS = {"replicas", "give_up", "relay", "buffering", "residuals", "fan_in"}


def open_files(pid="self"):
    """Target of each file descriptor of a process, by number."""
    found = {}
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found[number] = os.readlink(f"/proc/{pid}/fd/{number}")
    return found


def host_child(directory, address, token, log, ready, snapshot, every, fault, budget, tls=None):
    torch.set_num_threads(1)
    lines = open(log, "a", buffering=1)  # noqa: SIM115
    if fault is not None and fault[0] == "flip":
        flip_update(*fault[1:])
    elif fault is not None and fault[0] == "lose":
        lose_datagrams(fault[1])
    elif fault is not None and fault[0] == "forget":
        forget_groups()
    elif fault is not None and fault[0] == "spills":
        tell_spills(lines)
    elif fault is not None:
        break_writes(str(snapshot), *fault)
    with SessionHost(
        address,
        Path(directory),
        budget,
        TcpOptions(token=token, tls=tls),
        lambda line: lines.write(line + "\n"),
        Path(snapshot),
        every,
    ) as host:
        ready.send(host.where)
        host.run()


def break_writes(directory, kind, amount):
    """Make this process's writes to `directory` "slow" by `amount` seconds, or its disk "full"
    after `amount` writes."""
    write, count = DirectFile.write, iter(range(1 << 30))

    def broken(self, *args):
        if str(self.path).startswith(directory + "/"):
            if kind == "slow":
                time.sleep(amount)
            elif next(count) >= amount:
                with typed_errors(self.path, args[-1], len(args[0])):
                    raise OSError(errno.ENOSPC, "no space")
        write(self, *args)

    DirectFile.write = broken


def flip_update(number, byte):
    """Make this process flip a bit in `byte` of the result of update `number` before it is
    written."""
    apply_rule, count = server.apply_rule, iter(range(1 << 30))

    def broken(rule, record, *args):
        apply_rule(rule, record, *args)
        if next(count) == number:
            record.view[byte] ^= 16

    server.apply_rule = broken


def lose_datagrams(fraction):
    """Make this process lose a fraction of the datagrams that it sends."""
    made = DatagramSocket.__init__

    def lossy(self, *args, **options):
        made(self, *args, **options)
        faulty(self, RandomFaults(os.getpid(), fraction))

    DatagramSocket.__init__ = lossy


def forget_groups():
    """Make multicast fail in this process after its trial has succeeded."""
    timed_sender.STUCK = 3
    send = DatagramSocket.send

    def forgetful(self, buffer, segment, to):
        kind = packets.headers(buffer, segment, 1)["kind"][0]
        if not to[0].startswith("239.") or kind == packets.Kind.TRIAL:
            send(self, buffer, segment, to)

    DatagramSocket.send = forgetful


def tell_spills(lines):
    """Write a line for each gradient that this process spills (no fault)."""
    write = FileTier.spill_write

    def noted(self, chunk, *rest):
        write(self, chunk, *rest)
        lines.write(f"spilled a gradient of chunk {chunk}\n")

    FileTier.spill_write = noted


def switch_child(address, token, log, loss, ready):
    lines = open(log, "a", buffering=1)  # noqa: SIM115
    lose_datagrams(loss)
    options = TcpOptions(token=token)
    with SwitchHost(address, 16 << 20, options, lambda line: lines.write(line + "\n")) as switch:
        ready.send(switch.where)
        switch.run()


class SwitchProcess:
    """`roadtrain serve --switch` in its own process. where: HOST:PORT. loss: Fraction of its
    datagrams that get lost."""

    def __init__(self, log, port=0, token=None, loss=0.0):
        self.log, (here, there) = Path(log), FORK.Pipe()
        address = ("127.0.0.1", port or free_port())
        self.process = FORK.Process(
            target=switch_child, daemon=True, args=(address, token, str(log), loss, there)
        )
        self.process.start()
        there.close()
        self.where = here.recv() if here.poll(150) else None
        assert self.where, "the switch did not start"

    def kill(self):
        self.process.kill()
        self.process.join()


class HostProcess:
    """`roadtrain serve` in its own process. where: HOST:PORT."""

    def __init__(
        self,
        directory,
        port=0,
        token=None,
        snapshot="",
        every=0,
        fault=None,
        budget=96 << 20,
        tls=None,
    ):
        self.directory, self.log = directory, Path(f"{directory}.log")
        here, there = FORK.Pipe()
        self.process = FORK.Process(
            target=host_child,
            daemon=True,
            args=(
                str(directory),
                ("127.0.0.1", port or free_port()),
                token,
                str(self.log),
                there,
                str(snapshot),
                every,
                fault,
                budget,
                tls,
            ),
        )
        self.process.start()
        there.close()
        self.where = here.recv() if here.poll(150) else None
        assert self.where, "the host did not start"

    def kill(self):
        self.process.kill()
        self.process.join()


def worker_child(case, servers, log, steps, rank, workers, options, change):
    """Train up to `steps` and log the loss of every step; an error that ends the training is logged
    last."""
    torch.set_num_threads(1)
    remote_servers.GRACE_S = 2.5
    sys.executable = options.pop("python", sys.executable)  # of its relay
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "MASTER_PORT": options.pop("session", "1"),
        "LOCAL_WORLD_SIZE": str(options.pop("local", 1)),
    }
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    token, retry_s, norms = (
        options.pop("token", None),
        options.pop("retry_s", 30),
        options.pop("norms", True),
    )
    tls = options.pop("tls", None)
    until = options.pop("until", None)  # as in PipelineSpec: steps from until[0] on wait for a file
    lose_datagrams(options.pop("loss", 0.0))
    first = Path(log).with_name("worker0.log")
    while change == "late" and not (first.exists() and "end" in first.read_text()):
        time.sleep(0.02)

    def report(line):
        with open(f"{log}.said", "a") as file:
            file.write(line + "\n")

    try:
        if "run" in options:
            new_store = options.pop("new_store", False)
            options["mark"] = Mark(Path(options.pop("run")), new_store=new_store, report=report)
        link = TcpOptions(token=token, retry_s=retry_s, tls=tls)
        model, optimizer = build(case)
        if change == "model":
            model.extra = torch.nn.Linear(2, 2)
        if change == "skip":
            model.skipped = 1
        scaler = new_scaler(case)
        placed = roadtrain.place(
            model,
            optimizer,
            store=Servers(
                servers, link=link, **{n: options.pop(n) for n in OF_SERVERS & options.keys()}
            ),
            host_budget=BUDGET,
            dtype=case.dtype,
            extra={"scaler": scaler} if case.scaler else {},
            backwards_per_step=case.accumulate if case.eager else None,
            delay=delay_of(case),
            report=report,
            **{"chunk_elements": 1 << 16, "deadline_s": 30, **options},
        )
        with placed:
            if change == "lr":
                placed.param_groups[0]["lr"] *= 1.5
            while placed.steps_done < steps:
                number = placed.steps_done
                while until and number >= until[0] and not until[1].exists():
                    time.sleep(0.02)
                loss = one_step(
                    case,
                    model,
                    placed,
                    scaler,
                    number,
                    seed=1000 + number * workers + rank,
                    bad=rank == workers - 1,
                )
                norm = placed.grad_norm() if norms else 0.0  # waits for the other workers
                os.write(out, f"{placed.steps_done} {loss.hex()} {norm.hex()}\n".encode())
                if change == "stand still" and placed.steps_done == 3:
                    time.sleep(0.3)  # its gradients are sent meanwhile
                    os.kill(os.getpid(), signal.SIGSTOP)
            if rank == 0:
                names = sorted(n for n, p in model.named_parameters() if p.requires_grad)
                whats = ["master"] if case.sgd else ["master", "exp_avg"]
                total = [placed.read(n, what).tobytes() for n in names for what in whats]
                placed_hash = hashlib.sha256(b"".join(total)).hexdigest()
                os.write(out, f"end {placed_hash}\n".encode())
    except RoadtrainError as error:
        os.write(out, f"error {type(error).__name__}: {error}".replace("\n", "; ").encode() + b"\n")
        os._exit(3)


class Workers:
    """Worker processes; `logs[r]` is the log file of rank r."""

    def __init__(
        self, case, servers, tmp_path, steps, workers, *, changes=None, session="1", **options
    ):
        self.logs = [tmp_path / f"worker{r}.log" for r in range(workers)]
        if options.get("relay"):
            options["python"] = warm_python()
        self.processes = [
            FORK.Process(
                target=worker_child,
                args=(
                    case,
                    list(servers),
                    str(self.logs[r]),
                    steps,
                    r,
                    workers,
                    {**options, "session": session},
                    (changes or {}).get(r),
                ),
            )
            for r in range(workers)
        ]
        for process in self.processes:
            process.start()

    def join(self, timeout=120):
        for process in self.processes:
            process.join(timeout)
            if process.exitcode is None:
                process.kill()
                process.join()
                raise AssertionError("a worker hangs")
        return [p.exitcode for p in self.processes]

    def notes(self):
        """Lines that worker 0 reported."""
        path = Path(f"{self.logs[0]}.said")
        return path.read_text().splitlines() if path.exists() else []

    def errors(self):
        return [
            (
                next(
                    (x for x in reversed(log.read_text().splitlines()) if x.startswith("error")), ""
                )
                if log.exists()
                else ""
            )
            for log in self.logs
        ]


def losses(log):
    """Losses logged for each step, as a set with one element unless a repetition differed."""
    seen = {}
    for line in log.read_text().splitlines() if log.exists() else ():
        first, _, rest = line.partition(" ")
        if first != "error":
            seen.setdefault(first, set()).add(rest)
    return seen
