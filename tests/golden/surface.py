"""The parts of roadtrain that the goldens use: the only file here that imports package internals.

When a module moves or a class is renamed, only this file changes; kept values stay as they are.
`tests/golden/README.md` says when a kept value may change.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import socket
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tomli_w
import torch
from msgspec.structs import replace

import roadtrain
from roadtrain import Delay, Downcast, Files, Servers, TopK, cli
from roadtrain.chunks import ChunkTable, ParamSpec
from roadtrain.config import job
from roadtrain.config.cluster import make_cluster
from roadtrain.config.models import BlockShape, ModelShape
from roadtrain.config.plan_file import Plan, PlanMemory
from roadtrain.config.plan_file import placement as named_placement
from roadtrain.errors import RoadtrainError
from roadtrain.servers import frames as m
from roadtrain.servers.protocol import messages as ops
from roadtrain.servers.protocol.server import ServerStateMachine
from roadtrain.servers.serve import SessionHost
from roadtrain.simulator.compute import Constants
from roadtrain.simulator.run import simulate
from roadtrain.simulator.step import SimulatedStage
from roadtrain.storage.direct import DirectFile
from roadtrain.sums import formats, sum_frames
from roadtrain.sums.reducer import Reducer
from roadtrain.switch import switch_frames
from roadtrain.transport import handshake as shake
from roadtrain.transport import link as wire
from roadtrain.transport.tcp import TcpOptions

SERVER_BUDGET = 96 << 20  # bytes
SPILL = "spill.bin"  # the file of gradients that await their update


def silent(_: str) -> None: ...


# Options of place() in the first edition -> the option today, the class of its value, its field,
# and the default at that time.
PLACE_OPTIONS: dict[str, tuple[str, Any, str, Any]] = {
    "servers": ("store", Servers, "addresses", None),
    "replicas": ("store", Servers, "replicas", 1),
    "give_up": ("store", Servers, "give_up", ()),
    "link": ("store", Servers, "link", None),
    "relay": ("store", Servers, "relay", None),
    "buffering": ("store", Servers, "buffering", "auto"),
    "store_rates": ("store", Files, "rates", None),
    "moved_from": ("store", Files, "moved_from", ()),
    "direct": ("store", Files, "direct", True),
    "topk": ("compress", TopK, "keep", None),
    "topk_per_block": ("compress", TopK, "per_block", False),
    "error_feedback": ("compress", TopK, "error_feedback", False),
    "grad_dtype": ("compress", Downcast, "dtype", None),
    "staleness": ("delay", Delay, "steps", 0),
    "budget": ("host_budget", None, "", None),
}
CHANGED = {  # values whose spelling has changed
    "topk": lambda volume: volume / 2,
    "grad_dtype": lambda dtype: {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype],
}


def place(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """roadtrain.place with the option names of the first edition."""
    now: dict[str, Any] = {"report": silent, "deadline_s": 60}
    fields: dict[str, dict[str, Any]] = {}
    kinds: dict[str, Any] = {}
    for name, value in options.items():
        option, kind, field, _ = PLACE_OPTIONS.get(name, (name, None, "", None))
        value = CHANGED.get(name, lambda same: same)(value)
        if kind is None:
            now[option] = value
        else:
            kinds[option] = kind
            fields.setdefault(option, {})[field] = value
    if kinds.get("store") is Servers and "store" in now:
        fields["store"]["residuals"] = now.pop("store")
    if kinds.get("store") is Files:
        fields["store"]["directories"] = now.pop("store")
    now |= {option: kind(**fields[option]) for option, kind in kinds.items()}
    return roadtrain.place(model, optimizer, **now)


@contextlib.contextmanager
def serving(directories: Sequence[Path]) -> Iterator[list[str]]:
    """Serve each directory from this process; yields HOST:PORT of each server."""
    with contextlib.ExitStack() as stack:
        hosts = []
        for directory in directories:
            host = stack.enter_context(
                SessionHost(("127.0.0.1", 0), directory, SERVER_BUDGET, TcpOptions(), silent)
            )
            thread = threading.Thread(target=host.run)
            thread.start()
            stack.callback(thread.join)
            stack.callback(host.stop)
            hosts.append(host.where)
        yield hosts


@contextlib.contextmanager
def counting_spills() -> Iterator[list[int]]:
    """Yield a list that gets the size of each gradient written to a spill file."""
    write, seen = DirectFile.write, list[int]()

    def counted(self: DirectFile, view: memoryview, *rest: Any) -> None:
        if self.path.name == SPILL:
            seen.append(len(view))
        write(self, view, *rest)

    DirectFile.write = counted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        DirectFile.write = write  # type: ignore[method-assign]


# Option names of the first edition, which the goldens use -> names today.
SERVER_KEYS = ("relay", "buffering", "replicas", "give_up", "token_file", "ca", "cert", "key")
JOB_KEYS = {
    "store.dirs": "store.files",
    "store.servers": "servers.addresses",
    **{f"store.{name}": f"servers.{name}" for name in (*SERVER_KEYS, "connections")},
    "compress.topk": "compress.keep",
    "compress.gradients": "compress.downcast",
    "optimizer.staleness": "optimizer.delay",
}
OPTIONS = {
    **{f"--{then}": f"--{now}" for then, now in JOB_KEYS.items()},
    "--topk": "--keep",
    "--micros": "--num-microbatches",
    "--vp": "--virtual-stages",
    "--recompute": "--activation-checkpointing",
}
PERCENT = ("--topk", "--compress.topk")  # percent of the bytes, half of which are indices


def command(*words: str) -> tuple[int, str]:
    """Run `roadtrain WORDS`; return its exit code and output. Options and job files may use names
    of the first edition; such job files are rewritten."""
    for path in map(Path, words):
        for file in (path, path / "job.toml"):
            if file.name == "job.toml" and file.is_file():
                _translate(file)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = cli.main(options_of_now(words))
    return code, out.getvalue()


def options_of_now(words: Sequence[str]) -> list[str]:
    before = ("", *words)
    of_bytes = [word in PERCENT for word in before]
    return [
        str(float(word) / 200) if percent else OPTIONS.get(word, word)
        for word, percent in zip(words, of_bytes)
    ]


def _translate(file: Path) -> None:
    tree = tomllib.loads(file.read_text())
    for then, now in JOB_KEYS.items():
        (section, name), (to, key) = then.split("."), now.split(".")
        if name in tree.get(section, {}):
            value = tree[section].pop(name)
            tree.setdefault(to, {})[key] = value / 200 if then == "compress.topk" else value
    file.write_text(tomli_w.dumps(tree))


def options_in(text: str) -> set[str]:
    """Options that a help text lists, with their first-edition names as well."""
    named = set(re.findall(r"(?<![\w-])--[a-z](?:[\w.-]*\w)?", text))
    return named | {then for then, now in OPTIONS.items() if now in named}


# commands and the keys of a job


def command_names() -> list[str]:
    """Only to make fixtures."""
    return list(cli.COMMANDS)


def job_defaults() -> dict[str, str]:
    """Every key of a job -> its default as text, including first-edition names."""
    now = {key: default for key, default, _ in job.all_keys()}
    return now | {then: now[key] for then, key in JOB_KEYS.items()}


def job_of(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """All keys of a job file after command-line overrides, as a tree of plain values under
    first-edition names."""
    _translate(path)
    words = job.parse_overrides(options_of_now(overrides))
    loaded = job.load_job(path, words).model_dump(mode="json")
    now = {f"{section}.{name}": v for section, table in loaded.items() for name, v in table.items()}
    for key in ("run.memory_limit", "budget.device", "model.compile"):
        del now[key]
    for then, key in JOB_KEYS.items():
        now[then] = now.pop(key)
    if now["compress.topk"] is not None:
        now["compress.topk"] *= 200  # percent of the bytes, of which half are indices
    tree: dict[str, Any] = {}
    for key, value in now.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return tree


def place_options() -> dict[str, str]:
    """Options of place() -> their defaults as text, including first-edition names."""
    parameters = inspect.signature(roadtrain.place).parameters.values()
    former = {name: repr(default) for name, (*_, default) in PLACE_OPTIONS.items()}
    now = {p.name: "" if p.default is p.empty else repr(p.default) for p in parameters}
    return former | now


# simulated results under first-edition names


def simulated(tree: dict[str, Any]) -> dict[str, Any]:
    """The numbers that `simulate --json` and `plan --json` report for a plan."""
    names = (
        "params",
        "step_s",
        "differ_s",
        "samples_per_s",
        "busy",
        "bytes",
        "stages",
        "memory",
        "peaks",
        "joules",
        "price",
        "assumed_values",
    )
    return {name: tree[name] for name in names}


# frames


FRAMES = (m, sum_frames, switch_frames)


def kinds() -> dict[str, int]:
    """Only to make fixtures: the kinds of frames by name."""
    return {
        name: number
        for room in FRAMES
        for name, number in vars(room).items()
        if type(number) is int and number in room.HEADERS and name != "EDITION"
    }


def header_type(kind: int) -> Any:
    """Only to make fixtures: the type of a frame's header."""
    return next(room.HEADERS[kind] for room in FRAMES if kind in room.HEADERS)


def encoded(values: Any) -> bytes:
    return m.encode(values)


def header(kind: int, raw: bytes) -> Any:
    return m.header(kind, raw)


def besides(name: str, raw: bytes) -> Any:
    """Decode a structure that is not a frame header."""
    decoders = {
        "hello": m.HELLO,
        "hello of a summation": sum_frames.SUM_HELLO,
        "without": m.WITHOUT_REST,
        "rounds": sum_frames.ROUNDS,
        "stalled": sum_frames.STALLED,
    }
    return m.decoded(decoders[name], raw, name)


TABLE = ChunkTable.build(
    [("", [ParamSpec("p0", (2000,), "fp32", True, 0), ParamSpec("p1", (1000,), "bf16", True, 0)])]
)
CHUNKS, [BLOCK] = TABLE.chunks, TABLE.blocks


def messages() -> dict[str, Any]:
    """Name of each message from a worker to a server -> its frame: kind, header, payload."""
    grad = memoryview(bytearray(i % 251 for i in range(8192)))
    indices, sums = np.array([3, 5, 1999], np.uint32), np.array([1.5])
    fp32, half = np.array([0.5, -2.0, 3.25], np.float32), np.array([1, 2, 0x3F80], np.uint16)
    made = {
        "pull": ops.BlockPull(0, 2, 4, None, 9),
        "push of a block": ops.BlockPush(0, 3, memoryview(bytearray(16384)), True, True, 7),
        "push": ops.Push(0, grad, True, True, 7),
        "push, more": ops.Push(0, grad, False, True, 8),
        "push in bf16": ops.Push(0, grad, True, True, 7, dtype="bf16"),
        "push in fp16": ops.Push(0, grad, True, True, 7, dtype="fp16"),
        "push, sparse": ops.Push(0, (indices, fp32), True, False, 7, sums),
        "push, sparse, 16 bits": ops.Push(1, (indices[:2], half[:2]), True, False, 7, sums),
        "close": ops.BlockClose(0, 3, 5),
        "update": ops.BlockUpdate(0, 3, 5, {0: (1e-3, 0.9, 0.999)}, [0.5, 0.25], 12),
        "update without a gradient": ops.BlockUpdate(0, 2, 5, {0: (1e-3,)}, [0.5, None], 3),
        "forget": ops.BlockDiscard(0, 2),
        "end of step": ops.EndStep(5),
        "commit": ops.Commit(5, b"state"),
        "committed": ops.CommitDone(5),
    }
    return {name: m.frame(message, TABLE) for name, message in made.items()}


def read_and_rebuilt(name: str, kind: int, raw: bytes, payload: bytes) -> Any:
    """Decode a frame into its message and encode the message again."""
    fields, view = m.header(kind, raw), memoryview(bytearray(payload))
    if kind == m.PUSH:
        if fields.chunks == m.bitmap(3):
            return m.frame(ops.BlockPush(0, 3, view, fields.fresh, True, 7), TABLE)
        chunk = CHUNKS[fields.chunks[0] - 1]
        size = len(payload) if fields.dense and not fields.dtype else 8192
        assert m.push_nbytes(fields, chunk, size) == len(payload)
        push = m.push(fields, view, chunk, True, 7, 0)
        if push.dtype:  # the frame fills the first half of the server's buffer
            push = replace(push, grad=memoryview(bytearray(payload) * 2))
        return m.frame(push, TABLE)
    bits = int.from_bytes(getattr(fields, "chunks", b""), "little")
    if kind == m.APPLY_UPDATE:
        return m.frame(m.apply_update(fields, view, BLOCK, bits, 0), TABLE)
    simple = {
        m.PULL: lambda: ops.BlockPull(fields[0], bits, fields.version, None, fields.ticket),
        m.CLOSE: lambda: ops.BlockClose(fields[0], bits, fields.step),
        m.DISCARD_GRAD: lambda: ops.BlockDiscard(fields[0], bits),
        m.END_STEP: lambda: ops.EndStep(*fields),
        m.COMMIT: lambda: ops.Commit(fields[0], view),
        m.COMMITTED: lambda: ops.CommitDone(*fields),
    }
    return m.frame(simple[kind](), TABLE)


def heads() -> dict[str, str]:
    """The heads of frames on a link, as hex."""
    whole = wire.Head(0, 20, 5, 4096, 7, 123456789, 987654321)
    return {
        "frame": wire.pack_head(whole).hex(),
        "frame with checksums": wire.pack_head(whole._replace(flags=wire.SUMMED)).hex(),
        "goodbye": wire.pack_head(wire.Head(wire.LAST, 0, 0, 0, 8)).hex(),
        "goodbye with checksums": (
            wire.pack_head(wire.Head(wire.LAST | wire.SUMMED, 0, 0, 0, 8)).hex()
        ),
    }


def handshake() -> dict[str, str]:
    """All bytes that both sides of a handshake send for fixed nonces, with and without a token."""
    transcripts = {}
    for name, token in (("no token", None), ("token", b"secret")):
        for side, raw in _handshake_transcripts(token).items():
            transcripts[f"{side}, {name}"] = bytes(raw).hex()
    return transcripts


def _handshake_transcripts(token: bytes | None) -> dict[str, bytearray]:
    client, server = ends = socket.socketpair()
    transcripts = {"client": bytearray(), "server": bytearray()}
    link, hello, deadline = bytes(range(16)), b"hello there", time.monotonic() + 10
    common = shake.Common(frame_limit=1 << 30)
    mine = shake.greeting(common, token, link, hello=hello)._replace(nonce=bytes([1] * 32))
    theirs = shake.greeting(common, token, link)._replace(nonce=bytes([2] * 32))

    def serve() -> None:
        shake.accept(server, shake.server_greet(server, theirs, token, deadline), deadline)

    with client, server, mock.patch.object(shake, "send", _recorded(ends, transcripts)):
        thread = threading.Thread(target=serve)
        thread.start()
        shake.client_verdict(
            client, shake.client_greet(client, mine, token, hello, deadline), deadline
        )
        thread.join()
    return transcripts


def _recorded(ends: Any, transcripts: dict[str, bytearray]) -> Any:
    send = shake.send

    def recorded(sock: Any, data: bytes, deadline: float) -> None:
        transcripts["client" if sock is ends[0] else "server"].extend(data)
        send(sock, data, deadline)

    return recorded


# sums


class RecordingLink:
    """A worker's link to a reducer that records the frames sent over it."""

    peer = "a worker"

    def __init__(self) -> None:
        self.frames: list[list[Any]] = []
        self.arrived = threading.Event()

    def send(self, kind: int, raw: bytes, parts: Sequence[Any] = (), urgent: bool = False) -> None:
        self.frames.append([kind, raw.hex(), b"".join(bytes(part) for part in parts).hex()])
        self.arrived.set()

    def close(self) -> None: ...


def summed(rule: str, form: str, values: Sequence[np.ndarray], rounds: int) -> list[list[Any]]:
    """Frames that a reducer sends to each worker, round by round, for the workers' `values` of
    tensor 3."""
    reducer = Reducer(rule, len(values), lambda nbytes: None, lambda _: None)
    links = [RecordingLink() for _ in values]
    connections = [reducer.join(rank, link) for rank, link in enumerate(links)]  # type: ignore[arg-type]
    for number in range(rounds):
        for rank, (connection, array) in enumerate(zip(connections, values)):
            payload = encoded_as(form, array * np.float32(number + 1), 100 * number + rank)
            raw = m.encode((3, 0, number, array.size, form, 0))
            room = connection.room(sum_frames.PART, raw, len(payload))
            room[:] = payload
            for link in links:
                link.arrived.clear()
            connection.arrived(sum_frames.PART, raw, room)
            if rule == "accumulate":
                assert links[rank].arrived.wait(10)
        assert rule == "accumulate" or all(link.arrived.wait(10) for link in links)
    found = [link.frames[:] for link in links]
    reducer.end(RoadtrainError("over"))
    for thread in reducer.threads:
        thread.join(10)
    return found


def encoded_as(form: str, values: np.ndarray, seed: int) -> bytes:
    """Encode values with a codec, or as a dtype that gradients may have."""
    if form == "fp32":
        return values.tobytes()
    out = bytearray(formats.format_of(form).nbytes(values.size))
    formats.encode(form, values, None, memoryview(out), seed)
    return bytes(out)


def decoded_as(form: str, raw: bytes, n: int) -> np.ndarray:
    out = np.empty(n, np.float32)
    formats.decode(form, memoryview(raw), out)
    return out


def residual_after(
    form: str, values: np.ndarray, residual: np.ndarray, seed: int
) -> tuple[bytes, np.ndarray]:
    """Encode values with a residual; return the bytes sent and the new residual."""
    out = bytearray(formats.format_of(form).nbytes(values.size))
    kept = residual.copy()
    formats.encode(form, values, kept, memoryview(out), seed)
    return bytes(out), kept


# the order of operations

ACTION_NAMES = {
    ops.Answer: "Answer",
    ops.Hold: "Hold",
    ops.Read: "Read",
    ops.Update: "Update",
    ops.Write: "Write",
    ops.Spill: "Stash",
    ops.Discard: "Discard",
    ops.Total: "Total",
    ops.Prepare: "Prepare",
}


def _about(action: Any) -> Any:
    return getattr(getattr(action, "push", getattr(action, "pull", action)), "chunk", None)


@contextlib.contextmanager
def logged_actions() -> Iterator[list[tuple[str, Any]]]:
    """Yield a list that gets (action, chunk) of each decision of the servers in this process."""
    handle, log = ServerStateMachine.handle, list[tuple[str, Any]]()

    def logged(self: ServerStateMachine, event: Any) -> Any:
        actions = handle(self, event)
        log.extend((ACTION_NAMES[type(a)], _about(a)) for a in actions if type(a) in ACTION_NAMES)
        return actions

    ServerStateMachine.handle = logged  # type: ignore[method-assign]
    try:
        yield log
    finally:
        ServerStateMachine.handle = handle  # type: ignore[method-assign]


def blocks_of(placed: Any) -> dict[int, int]:
    """Chunk -> its block."""
    return {c.id: c.block for c in placed.table.chunks}


def simulated_order(placement: str, staleness: int, slots: int, depth: int) -> list[str]:
    """Actions of a simulated server, in order."""
    device = {"flops": "1TFLOP/s", "memory": "80GB", "memory_rate": "1000GB/s", "copy": "100GB/s"}
    ssd = {"read": "3GB/s", "write": "3GB/s", "capacity": "1TB"}
    cluster = make_cluster(
        {
            "hosts": [
                {
                    "name": "a",
                    "devices": 1,
                    "device": device,
                    "memory": "80GB",
                    "uplink": "9GB/s",
                    "memory_rate": "100GB/s",
                    "ssds": [ssd],
                }
            ]
        }
    )
    shape = ModelShape("m", BlockShape("layer", 10_000, 1e9, 0.0, 0.0).times(depth), 1)
    plan = Plan(named_placement(placement), staleness=staleness, memory=PlanMemory(slots=slots))
    block_ended = SimulatedStage._block_ended
    with logged_actions() as log:

        def ended(stage: SimulatedStage, block: int, slot: int) -> None:
            assert stage.run is not None
            log.append((stage.run.what, block))
            block_ended(stage, block, slot)

        with mock.patch.object(SimulatedStage, "_block_ended", ended):
            simulate(plan, cluster, shape, Constants(), traced=True)
    return [
        f"{what} {block}" for what, block in log if what != "Prepare"
    ]  # Prepare concerns no block
