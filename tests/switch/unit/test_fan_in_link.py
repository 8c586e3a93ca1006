"""A participant's link to a hub that sums its packets: bytes, order, freed buffers, and every way
in which the link ends."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roadtrain.chunks import PAGE, ChunkTable, ParamSpec
from roadtrain.environment import WorkerIdentity
from roadtrain.errors import LostError, PeerError, WireError
from roadtrain.servers import frames as m
from roadtrain.servers.routes import RouteEnds
from roadtrain.switch import fan_in_link as link_module
from roadtrain.switch import fixed_point, packets, switch_frames
from roadtrain.switch.fan_in_link import FanInLink
from roadtrain.switch.options import FanIn, SwitchNode
from roadtrain.switch.packets import Kind
from roadtrain.switch.route import OpenSwitchRoute
from roadtrain.switch.trial import packet_of
from roadtrain.units import round_up
from tests.support import switch_references as references
from tests.support.fan_in_hub import WINDOW, Hub
from tests.support.faulty import RandomFaults

N, SMALL = 30_720, 2048  # elements of chunks; the larger ones need more packets than a window holds
ONLY = m.bitmap(1)  # names the only chunk of a block
WIDTH = {"int32": 4, "int16": 2, "int8": 1}


def table() -> ChunkTable:
    """Three blocks of one chunk: fp32, bf16, a small one."""
    blocks = [
        ("root", [ParamSpec("a", (N,), "fp32", 0, True)]),
        ("one", [ParamSpec("b", (N,), "bf16", 0, True)]),
        ("two", [ParamSpec("c", (SMALL,), "fp32", 0, True)]),
    ]
    return ChunkTable.build(blocks, 1 << 16)


class Owner:
    """A worker behind a link."""

    def __init__(self, rank: int, chunks: Any) -> None:
        self.rank, self.chunks = rank, chunks
        self.changed = threading.Condition()
        self.into: dict[int, bytearray] = {}  # ticket -> where it goes
        self.pulled: list[int] = []
        self.frames: list[tuple[int, Any]] = []
        self.free: list[int] = []  # tickets of pushes
        self.errors: list[PeerError] = []
        self.link: FanInLink
        self._tickets = itertools.count(1)

    def pull(self, chunk: int, version: int) -> int:
        ticket = next(self._tickets)
        self.into[ticket] = bytearray(round_up(self.chunks[chunk].weights_nbytes, PAGE))
        self.link.send(m.PULL, m.encode((chunk, ONLY, version, ticket)), urgent=True)
        return ticket

    def push(self, chunk: int, values: np.ndarray, dtype: str = "", fresh: bool = True) -> int:
        """Push flat `values` of the dtype in which they are sent."""
        ticket = next(self._tickets)
        part = np.zeros(round_up(values.nbytes, PAGE), np.uint8)
        part[: values.nbytes] = values.view(np.uint8)
        header = m.encode((chunk, ONLY, fresh, -1, dtype, False))
        self.link.send(m.PUSH, header, [part.data], lambda: self._freed(ticket))
        return ticket

    def _freed(self, ticket: int) -> None:
        with self.changed:
            self.free.append(ticket)
            self.changed.notify_all()

    def until(self, ready: Callable[[], bool], seconds: float = 10.0) -> None:
        with self.changed:
            assert self.changed.wait_for(ready, seconds), (self.errors, self.pulled, self.free)

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        if kind != m.PULLED:
            return memoryview(bytearray(nbytes))
        into = self.into[m.header(kind, header).ticket]
        assert len(into) == nbytes
        return memoryview(into)

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        with self.changed:
            if kind == m.PULLED:
                self.pulled.append(m.header(kind, header).ticket)
            else:
                self.frames.append((kind, m.header(kind, header)))
            self.changed.notify_all()

    def lost(self, error: PeerError) -> None:
        with self.changed:
            self.errors.append(error)
            self.changed.notify_all()


class Scene:
    def __init__(self, workers: int = 2, wire: Any = "int32", adds: bool = False, **hub: Any):
        self.hub = Hub(workers, **hub)
        switch = SwitchNode("127.0.0.1:9")
        self.plan = FanIn((switch,), wire=wire, window=WINDOW)
        self.chunks = table().chunks
        self.owners = [Owner(rank, self.chunks) for rank in range(workers)]
        for owner in self.owners:
            hello = m.Hello("session", owner.rank, workers, 1, 0, "signature")
            ends = RouteEnds(
                [self.hub.listener.address],
                self.hub.options,
                WorkerIdentity(owner.rank, workers),
                SimpleNamespace(table=table()),
                10.0,
                adds=adds,
            )
            route = OpenSwitchRoute(ends, self.plan)
            owner.link = route.connect(0, owner, self.hub.options, hello, print)

    def close(self) -> None:
        for owner in self.owners:
            owner.link.close()
        self.hub.close()

    def weights(self, chunk: int, seed: int) -> np.ndarray:
        nbytes = round_up(self.chunks[chunk].weights_nbytes, PAGE)
        return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)

    def sum(self, chunk: int, round: int, announced: set[int]) -> np.ndarray:
        """Run a round from its grant to the sum, returned as fp32."""
        hub, own, width = self.hub, self.chunks[chunk], self.plan.width
        count = fixed_point.exponent_packets_of(own.numel)
        maxima = hub.maxima(hub.grant(chunk, round, count, announced), count)
        count = fixed_point.packets_of(own.numel, width)
        first, hub.up = hub.up, hub.up + count
        hub.send(Kind.MAXIMA, chunk, round, maxima, first)
        total = hub.sums(first, count, width).reshape(-1).view(f"i{width}")[: own.numel]
        blocks = fixed_point.blocks_of(own.numel)
        return references.reference_dequantize(
            total.astype(np.int32), maxima[:blocks], hub.workers, width
        )

    def summed(self, gradients: list[np.ndarray | None], dtype: str) -> np.ndarray:
        """Expected sum according to the plain references; None in `gradients` stands for zeros."""
        numel = next(gradient.size for gradient in gradients if gradient is not None)
        flat = [
            np.zeros(numel, np.float32) if gradient is None else gradient for gradient in gradients
        ]
        kinds = ["fp32" if gradient is None else dtype for gradient in gradients]
        maxima = np.max(
            [references.reference_exponents(x, kind) for x, kind in zip(flat, kinds)], axis=0
        )
        count, width = len(flat), self.plan.width
        total = sum(
            references.reference_quantize(x, kind, maxima, count, width)
            for x, kind in zip(flat, kinds)
        )
        return references.reference_dequantize(np.asarray(total), maxima, count, width)


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []
    before = threading.active_count()

    def make(**options: Any) -> Scene:
        made.append(Scene(**options))
        made[-1].hub.join()
        return made[-1]

    yield make
    for opened in made:
        opened.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before, threading.enumerate()


def noise(seed: int, size: int = N) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 3, size)).astype(np.float32)


@pytest.mark.parametrize("wire", ["int32", "int16", "int8"])
def test_sums_equal_the_references_and_then_free_their_memory(scene: Any, wire: str) -> None:
    it = scene(wire=wire)
    values = [noise(owner.rank) for owner in it.owners]
    tickets = [owner.push(0, x) for owner, x in zip(it.owners, values)]
    it.hub.wait_frames(switch_frames.ANNOUNCE, 1)
    assert not any(owner.free for owner in it.owners)  # it may still be read until it is summed
    got = it.sum(0, 1, {0, 1})
    np.testing.assert_array_equal(got, it.summed(values, "fp32"))
    width = it.plan.width
    exact = values[0].astype(np.float64) + values[1]
    maxima = np.max([references.reference_exponents(x, "fp32") for x in values], axis=0)
    bound = np.repeat([fixed_point.error_bound(int(e), 2, width) for e in maxima], 352)[:N]
    assert np.all(np.abs(got - exact) <= bound + np.abs(exact) * 2.0**-24)  # Rule 2
    for owner, ticket in zip(it.owners, tickets):
        owner.until(lambda owner=owner, ticket=ticket: owner.free == [ticket])


@pytest.mark.parametrize(
    "faults",
    [
        {"loss": 0.05, "faults": RandomFaults(3, 0.05)},
        {"faults": RandomFaults(4, duplicate=0.2)},
        {"faults": RandomFaults(5, reorder=0.3)},
        {"loss": 0.02, "faults": RandomFaults(6, 0.02, 0.05, 0.2)},
    ],
    ids=["loss", "duplicates", "reordered", "all"],
)
@pytest.mark.slow
def test_lost_doubled_or_reordered_packets_change_nothing(
    scene: Any, faults: dict[str, Any]
) -> None:
    it = scene(workers=3, wire="int16", **faults)
    for round in (1, 2):
        values = [noise(10 * round + owner.rank) for owner in it.owners]
        for owner, x in zip(it.owners, values):
            owner.push(0, x, fresh=round == 1)
            owner.pull(0, round)
        it.hub.wait_frames(m.PULL, round)
        weights = it.weights(0, round)
        it.hub.send(Kind.PARAMETERS, 0, round, weights)
        it.hub.wait_frames(switch_frames.ANNOUNCE, round)
        got = it.sum(0, round, {0, 1, 2})
        np.testing.assert_array_equal(got, it.summed(values, "fp32"))
        for owner in it.owners:
            owner.until(lambda owner=owner, n=round: len(owner.pulled) == len(owner.free) == n)
            assert owner.into[owner.pulled[-1]] == weights.tobytes()
    it.hub.until(lambda: it.hub.merged_beat.ack == len(it.hub.down))


def test_a_worker_that_announced_nothing_sends_zeros(scene: Any) -> None:
    it = scene()
    mine, later = noise(1), noise(2)
    first = it.owners[0].push(0, mine)
    ahead = it.owners[1].push(0, later)  # a push of its next step
    it.hub.wait_frames(switch_frames.ANNOUNCE, 1)
    np.testing.assert_array_equal(it.sum(0, 1, {0}), it.summed([mine, None], "fp32"))
    it.owners[0].until(lambda: it.owners[0].free == [first])
    assert it.owners[1].free == []
    np.testing.assert_array_equal(it.sum(0, 2, {1}), it.summed([None, later], "fp32"))
    it.owners[1].until(lambda: it.owners[1].free == [ahead])


@pytest.mark.slow
def test_16_bit_and_downcast_gradients(scene: Any) -> None:
    it = scene(workers=1)
    half = (noise(3).view(np.uint32) >> 16).astype(np.uint16)
    it.owners[0].push(1, half)
    np.testing.assert_array_equal(it.sum(1, 1, {0}), it.summed([half], "bf16"))
    half16 = noise(4).clip(-6e4, 6e4).astype(np.float16).view(np.uint16)
    it.owners[0].push(0, half16, "fp16")
    np.testing.assert_array_equal(it.sum(0, 1, {0}), it.summed([half16], "fp16"))


def test_a_relay_gets_fp32_sums_whatever_the_dtype(scene: Any) -> None:
    it = scene(workers=1, adds=True)
    it.owners[0].push(1, noise(5))
    np.testing.assert_array_equal(it.sum(1, 1, {0}), it.summed([noise(5)], "fp32"))


def test_a_block_with_a_nan_is_nan_for_all_workers(scene: Any) -> None:  # Rule 6
    it = scene()
    values = [noise(6), noise(7)]
    values[1][400] = np.nan
    for owner, x in zip(it.owners, values):
        owner.push(0, x)
    it.hub.wait_frames(switch_frames.ANNOUNCE, 1)
    got = it.sum(0, 1, {0, 1})
    assert np.isnan(got[352:704]).all() and np.isfinite(got[:352]).all()


def test_each_of_several_pulls_of_a_version_is_filled_by_its_own_broadcast(scene: Any) -> None:
    """With a staleness above 1 two answers for the same version may differ."""
    it = scene(workers=1, faults=RandomFaults(8, 0.1, reorder=0.3))
    owner = it.owners[0]
    tickets = [owner.pull(0, 2**32 + 5) for _ in range(2)]
    it.hub.wait_frames(m.PULL, 2)
    answers = [it.weights(0, seed) for seed in (1, 2)]
    for answer in answers:
        it.hub.send(Kind.PARAMETERS, 0, 5, answer)
    owner.until(lambda: sorted(owner.pulled) == tickets)
    got = sorted(bytes(owner.into[ticket]) for ticket in tickets)
    assert got == sorted(answer.tobytes() for answer in answers)


def test_a_pull_that_is_answered_over_tcp_is_not_filled_twice(scene: Any) -> None:
    it = scene(workers=1)
    owner, member = it.owners[0], it.hub.members[0]
    tickets = [owner.pull(2, 1), owner.pull(2, 1)]
    by_network, by_tcp = it.weights(2, 1), it.weights(2, 2)
    it.hub.send(Kind.PARAMETERS, 2, 1, by_network)
    owner.until(lambda: owner.pulled == tickets[:1])
    # it names a ticket that the broadcast has answered meanwhile
    member.link.send(m.PULLED, m.encode((tickets[0], 2)), [by_tcp.data])
    owner.until(lambda: owner.pulled == tickets)
    assert owner.into[tickets[0]] == by_network.tobytes()
    assert owner.into[tickets[1]] == by_tcp.tobytes()
    assert not owner.errors


def test_messages_after_a_push_follow_its_announcement(scene: Any) -> None:
    it = scene(workers=1)
    owner, member = it.owners[0], it.hub.members[0]
    for chunk in (0, 2):
        owner.push(chunk, noise(chunk, it.chunks[chunk].numel))
        owner.link.send(m.CLOSE, m.encode((chunk, ONLY, 1)))
    it.hub.until(lambda: len(member.frames) == 4)
    frames = [(frame.kind, frame.fields.block) for frame in member.frames]
    assert frames == [
        (switch_frames.ANNOUNCE, 0),
        (m.CLOSE, 0),
        (switch_frames.ANNOUNCE, 2),
        (m.CLOSE, 2),
    ]


def test_messages_are_queued_until_the_switches_are_ready() -> None:
    it = Scene(workers=1)
    owner = it.owners[0]
    try:
        owner.push(2, noise(9, SMALL))
        owner.pull(2, 1)
        it.hub.until(lambda: len(it.hub.members[0].frames) == 2)
        it.hub.join()
        np.testing.assert_array_equal(it.sum(2, 1, {0}), it.summed([noise(9, SMALL)], "fp32"))
        it.hub.send(Kind.PARAMETERS, 2, 1, it.weights(2, 1))
        owner.until(lambda: len(owner.pulled) == len(owner.free) == 1)
    finally:
        it.close()


@pytest.mark.slow
def test_a_trial_of_the_networks_multicast_is_answered() -> None:
    for sends in (True, False):
        it = Scene(workers=1)
        try:
            it.hub.join("239.255.1.2:29317")
            if sends:
                packet = np.zeros(48, np.uint8)
                packets.write_headers(packet, 48, 1, kind=Kind.TRIAL, job=7, first=0)
                packets.seal(packet, 48, 1, it.hub.key)
                it.hub.socket.send(packet, 48, ("239.255.1.2", 29317))
            it.hub.wait_frames(switch_frames.TRIAL_RESULT, 1)
            assert [frame.trial for frame in it.hub.members[0].of(switch_frames.TRIAL_RESULT)] == [
                sends
            ]
        finally:
            it.close()


def test_a_compressed_gradient_is_refused(scene: Any) -> None:
    it = scene(workers=1)
    with pytest.raises(WireError, match="compressed gradient of block 0 cannot be summed"):
        header = m.encode((0, ONLY, True, 3, "fp32", False))
        it.owners[0].link.send(m.PUSH, header, [memoryview(b"x" * 32)])


def bad_grant(it: Scene) -> None:
    it.hub.grant(0, 1, 1, {0})


def bad_parameters(it: Scene) -> None:
    it.hub.send(Kind.PARAMETERS, 0, 3, it.weights(0, 1))


def bad_maxima(it: Scene) -> None:
    it.hub.send(Kind.MAXIMA, 0, 3, it.weights(0, 1))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (bad_grant, "round 1 of chunk 0 was granted, but not announced"),
        (bad_parameters, "chunk 0, version 3, which was not requested"),
        (bad_maxima, "unexpected maxima: packet 0 of chunk 0, round 3"),
    ],
)
def test_an_unrequested_message_ends_the_link(scene: Any, wrong: Any, words: str) -> None:
    it = scene(workers=1)
    ticket = it.owners[0].push(2, noise(1, SMALL))
    it.hub.wait_frames(switch_frames.ANNOUNCE, 1)
    wrong(it)
    owner = it.owners[0]
    owner.until(lambda: bool(owner.errors))
    assert isinstance(owner.errors[0], PeerError) and words in str(owner.errors[0])
    assert owner.free == [ticket] and len(owner.errors) == 1
    with pytest.raises(LostError):
        owner.link.send(m.CLOSE, m.encode((0, ONLY, 1)))
    with pytest.raises(LostError):
        owner.push(2, noise(1, SMALL))
    assert owner.free == [ticket]  # its data was never sent


def test_errors_of_packets_name_server_and_switch(scene: Any) -> None:  # Rule 5
    it = scene(workers=1)
    bad_parameters(it)
    owner = it.owners[0]
    owner.until(lambda: bool(owner.errors))
    assert "server 0" in str(owner.errors[0]) and "switch 127.0.0.1:9" in str(owner.errors[0])


@pytest.mark.slow
def test_a_silent_switch_is_named_beside_the_stragglers_of_the_server(
    scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # Rule 5
    monkeypatch.setattr(link_module, "SILENT_S", 1)
    it = scene(workers=1)
    hub, owner = it.hub, it.owners[0]
    other = "worker 1, which is gone"
    silent = r"switch 127\.0\.0\.1:9, which has sent no packet since \d\d:\d\d:\d\d UTC"

    def names() -> list[str]:
        progress = [fields for kind, fields in owner.frames if kind == m.PROGRESS]
        assert all(fields.of == m.WAITS_ONLY for fields in progress)
        return [fields.doing for fields in progress]

    def server_names(text: str) -> None:
        hub.members[0].link.send(m.PROGRESS, m.encode((text, 0, m.WAITS_ONLY)))

    def expect(*patterns: str) -> None:
        owner.until(lambda: len(names()) >= len(patterns))
        assert len(names()) == len(patterns)
        for pattern, text in zip(patterns, names(), strict=True):
            assert re.fullmatch(pattern, text), text

    server_names("")  # nothing changes
    hub.quiet = True
    packet = packet_of(7, hub.key)  # multicast packets do not come from the switch
    [child] = hub.children.values()
    for _ in range(20):
        hub.socket.send(packet, packet.size, child)
        time.sleep(0.1)
    expect(silent)
    hub.quiet = False
    expect(silent, "")
    server_names(other)
    hub.quiet = True
    both = f"{other}; {silent}"
    expect(silent, "", other, both)
    server_names("")  # the switch's name stays
    expect(silent, "", other, both, silent)
    longer = "switch 127.0.0.1:90, which is gone"  # another switch
    server_names(longer)
    expect(silent, "", other, both, silent, f"{longer}; {silent}")
    root = "the root switch 127.0.0.1:9, which is silent"  # the same switch, not named twice
    server_names(root)
    expect(silent, "", other, both, silent, f"{longer}; {silent}", root)


@pytest.mark.parametrize("ends", ["hub", "owner"])
def test_a_link_that_ends_returns_all_memory_once(scene: Any, ends: str) -> None:
    """The gradient is announced, granted and half sent."""
    it = scene(workers=2)
    owner = it.owners[0]
    tickets = [owner.push(chunk, noise(1, it.chunks[chunk].numel)) for chunk in (0, 2, 0)]
    it.hub.until(lambda: len(it.hub.members[0].of(switch_frames.ANNOUNCE)) == 3)
    count = fixed_point.exponent_packets_of(N)
    it.hub.maxima(it.hub.grant(0, 1, count, {0}), count)
    owner.pull(0, 1)
    if ends == "owner":
        owner.link.close()
        owner.link.close()
        assert not owner.errors
    else:
        it.hub.members[0].link.close()
        owner.until(lambda: bool(owner.errors))
    assert sorted(owner.free) == tickets


def test_packets_of_a_returned_gradient_are_not_sent(
    scene: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link ends while a thread builds packets of a gradient that already went back to its
    owner."""
    it, real, made = scene(workers=1), fixed_point.quantize, threading.Event()
    owner = it.owners[0]

    def slow(*arguments: Any) -> None:
        if not made.is_set():
            threading.Thread(target=owner.link.close).start()
            while vars(owner.link)["_member"] is not None:
                time.sleep(0.001)
            owner.link.lost(LostError("the server is gone"))
            assert owner.free
        real(*arguments)
        made.set()

    monkeypatch.setattr(fixed_point, "quantize", slow)
    owner.push(2, noise(1, SMALL))
    it.hub.wait_frames(switch_frames.ANNOUNCE, 1)
    maxima = it.hub.maxima(it.hub.grant(2, 1, 1, {0}), 1)
    first = it.hub.up
    it.hub.send(Kind.MAXIMA, 2, 1, maxima, first)
    assert made.wait(10)
    owner.link.close()
    time.sleep(0.1)
    assert max(it.hub.numbers) < first


def test_a_stranger_changes_nothing(scene: Any) -> None:  # Rule 8
    it = scene(workers=1)
    owner = it.owners[0]
    ticket = owner.pull(2, 1)
    wrong = np.zeros(1456, np.uint8)
    packets.write_headers(wrong, 1456, 1, kind=Kind.PARAMETERS, job=7, first=0, a=2, b=1)
    it.hub.socket.send(wrong, 1456, it.hub.children[0])
    it.hub.wait_frames(m.PULL, 1)
    it.hub.send(Kind.PARAMETERS, 2, 1, it.weights(2, 1))
    owner.until(lambda: owner.pulled == [ticket])
    assert owner.into[ticket] == it.weights(2, 1).tobytes()
    assert owner.link.strangers == 1
