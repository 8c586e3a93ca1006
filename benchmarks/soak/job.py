"""Processes of `roadtrain soak`: a server, and a worker that trains a tiny model and logs every
loss.

On SIGUSR1, a process writes the stacks of all its threads to its log.
"""

from __future__ import annotations

import faulthandler
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.soak.power import Power, Strike
from roadtrain.errors import RoadtrainError
from roadtrain.kernels.sum import sum_k, sum_squares
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.options.lossy import Delay
from roadtrain.placement.place import place
from roadtrain.placement.stores import Servers
from roadtrain.servers.serve import SessionHost
from roadtrain.storage.mark import Mark
from roadtrain.training.metrics import Metrics, committed_by
from roadtrain.training.step_exchange import StepExchange
from roadtrain.training.stop import INTERRUPTED
from roadtrain.transport.tcp import TcpOptions

BUDGET = 96 << 20
CHUNK = 1 << 16  # elements: the smallest chunk
VOCABULARY, WIDTH, LAYERS = 50, 64, 3
REFUSED = 3  # exit code of a worker that ended with an error message
GROWN = 1 << 20  # bytes: more than a ledger has spare


@dataclass(frozen=True)
class Flavour:
    """Options of the job. `clip`: clip the gradient to this norm, so that updates wait for all
    gradients; None to update during backward.
    """

    clip: float | None = None
    staleness: int = 0


FLAVOURS = {"plain": Flavour(), "clipped": Flavour(clip=0.5), "late": Flavour(staleness=1)}


@dataclass(frozen=True)
class WorkerArgs:
    """Arguments of one worker for one start.

    Attributes:
        relay: True if all workers are on one host and a relay communicates for all of them
        change: what is wrong with this worker: "model", "dtype" or "token"; "" if nothing is wrong
        grows_at: first step that commits more state, which needs more room on the disk
        stops_at: first step after which the worker asks to stop; 0 if workers do not exchange
            requests to stop
        run: run directory, which records the store; only worker 0 has one
    """

    flavour: str
    servers: tuple[str, ...]
    rank: int
    workers: int
    attempt: int
    steps: int
    log: str
    deadline_s: float
    relay: bool = False
    change: str = ""
    grows_at: int = 1 << 30
    stops_at: int = 0
    replicas: int = 1
    run: str = ""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        out: torch.Tensor = self.head(h)
        return out


class GrowingState:
    """State of the job that is committed with each step, and whose size can grow."""

    nbytes = 0

    def state_dict(self) -> dict[str, Any]:
        return {"data": torch.zeros(self.nbytes, dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.nbytes = 0


def serve(
    directory: str,
    port: int,
    token: bytes,
    log: str,
    ready: Connection,
    shadow: str,
    strikes: Sequence[Strike],
) -> None:
    """Run a server like `roadtrain serve`. `shadow`: directory for the durable content of the
    store, or "" to track none.
    """
    redirect_output(log)
    torch.set_num_threads(1)
    if shadow:
        Power(Path(shadow), [Path(directory)], strikes).install()
    with SessionHost(
        ("127.0.0.1", port), Path(directory), BUDGET, TcpOptions(token=token), print
    ) as host:
        ready.send(host.where)
        host.run()


def work(args: WorkerArgs, token: bytes) -> None:
    """Train, and log a line for each step: attempt, step, loss, norm, committed step, monotonic
    seconds. At the end, log `end` or `error`.
    """
    redirect_output(args.log)
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(args.rank),
        "WORLD_SIZE": str(args.workers),
        "MASTER_PORT": "1",
        "LOCAL_WORLD_SIZE": str(args.workers if args.relay else 1),
        "TORCHELASTIC_RUN_ID": "soak",
        "TORCHELASTIC_RESTART_COUNT": str(args.attempt),
    }
    with errors_logged(args.attempt):
        _train(args, token)


@contextmanager
def errors_logged(attempt: int) -> Iterator[None]:
    """Log an error of the `with` block, and end this process."""
    try:
        yield
    except RoadtrainError as error:
        print(attempt, "error", f"{type(error).__name__}: {error}".replace("\n", "; "))
        # as if killed: without atexit handlers, so that the scene sees what hangs
        os._exit(REFUSED)


def warm() -> None:
    """Load and compile code in the fork server, so that its child processes need not do it
    again.
    """
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], foreach=False)
    rule = rules_for(optimizer)[0]
    a, b, c, d = np.zeros((4, 64), np.float32)
    sum_k(a, [b, c], "fp32")
    sum_squares(a, "fp32")
    rule.apply(
        a, b, "fp32", [c, d], np.zeros(1), rule.hyper(optimizer.param_groups[0]), 1.0, None, "fp32"
    )


def _train(args: WorkerArgs, token: bytes) -> None:
    flavour, growing = FLAVOURS[args.flavour], GrowingState()
    torch.manual_seed(0)
    model = Model()
    if args.change == "model":
        model.extra = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    mark = None
    if args.run:
        mark = Mark(Path(args.run), witness=committed_by(Path(args.run) / "metrics.jsonl"))
    placed = place(
        model,
        optimizer,
        store=Servers(
            args.servers,
            link=TcpOptions(
                token=b"another secret of it" if args.change == "token" else token,
                retry_s=args.deadline_s,
                close_s=args.deadline_s / 3,
            ),
            replicas=args.replicas,  # type: ignore[arg-type]
            relay=BUDGET if args.relay else None,
        ),
        mark=mark,
        host_budget=BUDGET,
        chunk_elements=CHUNK,
        dtype=torch.bfloat16 if args.change == "dtype" else None,
        delay=Delay(flavour.staleness) if flavour.staleness else None,
        backwards_per_step=None if flavour.clip else 1,
        extra={"growing": growing},
        deadline_s=args.deadline_s,
        report=lambda _: None,
    )
    lines = (
        Metrics(Path(args.run) / "metrics.jsonl", placed.steps_done, fresh=mark.fresh)
        if mark
        else nullcontext()
    )
    with placed, lines as metrics:
        words, stopped = StepExchange(placed) if args.stops_at else None, False
        while placed.steps_done < args.steps and not stopped:
            number = placed.steps_done
            growing.nbytes = GROWN if number >= args.grows_at else 0
            torch.manual_seed(1000 + number * args.workers + args.rank)  # also the seed of dropout
            x = torch.randint(0, VOCABULARY, (4, 16))
            loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())
            loss.backward()
            if flavour.clip:
                nn.utils.clip_grad_norm_(model.parameters(), flavour.clip)
            if words is not None:
                words.send(float(loss), 64, INTERRUPTED * (number + 1 >= args.stops_at))
            placed.step()
            placed.zero_grad()
            if words is not None:
                answer = words.receive(placed.steps_done)
                stopped = answer is not None and bool(answer.why)
            if mark is not None and metrics is not None:
                metrics.append({"step": placed.steps_done, "loss": float(loss)})
                mark.advance(placed.committed_step)
            print(
                args.attempt,
                placed.steps_done,
                float(loss).hex(),
                placed.grad_norm().hex(),
                placed.committed_step,
                time.monotonic(),
            )
        placed.flush()
        if mark is not None:
            mark.advance(placed.committed_step, now=True)
        if args.rank == 0:
            names = [
                name for name, _ in model.named_parameters() if name.endswith("in_proj_weight")
            ]
            whole = b"".join(
                placed.read(name, what).tobytes()
                for name in names
                for what in ("master", "exp_avg")
            )
            print(args.attempt, "end", hashlib.sha256(whole).hexdigest())
    print(args.attempt, "closed")


def redirect_output(log: str) -> None:
    """Append all output of this process to the file `log`, and let the process end when its parent
    ends.
    """
    threading.Thread(target=_die_with_parent, daemon=True).start()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
