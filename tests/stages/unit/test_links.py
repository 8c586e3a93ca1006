"""Messages between stages on a device: pairs of ranks connect in one order, waits do not poll, and a
missing message is a typed error (Rule 5). Stand-ins for torch.distributed have the rules of NCCL."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from test_networks import Ranks, holmes

from roadtrain.errors import DeadlineError
from roadtrain.lab.emulated_device import EmulatedDevice
from roadtrain.stages import data_group, links, process_groups
from roadtrain.stages.networks import CONTROL, choose_networks
from roadtrain.stages.parallelism import Parallelism
from roadtrain.stages.protocol.pipeline import (
    BACKWARD,
    FORWARD,
    Peer,
    PipelineShape,
    StageStateMachine,
    Transfer,
)
from roadtrain.stages.rank_groups import Groups

CPU = torch.device("cpu")
TWO = Parallelism(pp=2)
SHAPES = [
    TWO,
    Parallelism(pp=3, dp=2, tp=2),
    Parallelism(pp=3, widths=(2, 3, 1)),
    Parallelism(pp=2, dp=2, virtual_stages=2),
    Parallelism(pp=4, virtual_stages=2),
]


def groups_of(parallelism):
    return Groups.of(parallelism, [("host", "", parallelism.devices)])


def links_of(parallelism, rank, deadline_s=20.0):
    """Links of a rank. Their stand-in for a process group is (rank, boundary, direction)."""
    boundaries = range(len(parallelism.boundaries))
    channels = {(b, what): (rank, b, what) for b in boundaries for what in (FORWARD, BACKWARD)}
    return links.StageLinks(channels, groups_of(parallelism), rank, deadline_s, CPU)


def pairs_of_a_step(parallelism, num_microbatches):
    """Return (boundary, direction, sender, receiver) for ranks that exchange messages in a step."""
    pairs, sizes = set(), (parallelism.replicas_of, parallelism.virtual_stages, num_microbatches)
    for rank in range(parallelism.devices):
        at = groups_of(parallelism).position(rank)
        for message in StageStateMachine(PipelineShape(at.stage, at.replica, *sizes)).sends():
            to = message.receiver
            receiver = parallelism.rank(replace(at, stage=to.stage, replica=to.replica))
            pairs.add((message.boundary, message.what, rank, receiver))
    return pairs


@pytest.mark.parametrize("parallelism", SHAPES, ids=str)
def test_all_pairs_of_a_step_connect_in_one_order(parallelism, monkeypatch):  # Rule 5
    """The first message of a pair blocks each of its ranks until both have begun it."""
    met, done = {}, SimpleNamespace(wait=lambda _: None, is_completed=lambda: True)

    def meet(group, sender, receiver):
        met.setdefault((*group[1:], sender, receiver), threading.Barrier(2)).wait(2)
        return done

    monkeypatch.setattr(links.distributed, "isend", lambda _, to, group: meet(group, group[0], to))
    monkeypatch.setattr(links.distributed, "irecv", lambda _, by, group: meet(group, by, group[0]))
    with ThreadPoolExecutor(parallelism.devices) as threads:
        ranks = range(parallelism.devices)
        list(threads.map(lambda rank: links_of(parallelism, rank).connect(), ranks))
    assert set(met) == pairs_of_a_step(parallelism, 12)


@pytest.fixture
def device(monkeypatch):
    """A device whose current stream runs beside the host. `events`: set an event to let the message
    arrive. `timeouts`: those with which messages were awaited."""
    events, timeouts = [], []

    def begin(tensor, peer, group):
        event = emulated.new_event()
        event.done = threading.Event()
        events.append(event.done)

        def wait(timeout=None):
            timeouts.append(timeout)
            emulated.current().wait_event(event)

        return SimpleNamespace(wait=wait, is_completed=event.done.is_set)

    monkeypatch.setattr(links.distributed, "isend", begin)
    monkeypatch.setattr(links.distributed, "irecv", begin)
    with EmulatedDevice().active() as emulated, emulated.on(stream := emulated.new_stream()):
        yield SimpleNamespace(events=events, timeouts=timeouts)
        for event in events:
            event.set()
    stream.end()


def receive(own, micro):
    message = Transfer(FORWARD, micro, 0, Peer(0, 0), Peer(1, 0))
    own.post(message, [torch.empty(4)])
    own.wait(message)


def send(own, micro):
    own.send(Transfer(BACKWARD, micro, 0, Peer(1, 0), Peer(0, 0)), [torch.ones(4)])


def test_the_host_goes_on_until_it_is_ahead_and_no_wait_polls(device):
    own = links_of(TWO, rank=1)
    for micro in range(links.AHEAD):
        receive(own, micro)  # returns, although no message has arrived
    threading.Timer(0.2, device.events[0].set).start()
    then = time.monotonic()
    receive(own, links.AHEAD)
    assert 0.1 < time.monotonic() - then < 10, "the oldest message is awaited"
    threading.Timer(0.1, lambda: [event.set() for event in device.events]).start()
    own.flush()
    assert all(event.is_set() for event in device.events)
    assert set(device.timeouts) == {None}, "with a timeout, NCCL polls"


FIRST = "waits for a message before the first step from"
ARRIVES = "waits for the activations of micro-batch 5 of step 3 from"
LEAVES = "sends the gradient of the activations of micro-batch 5 of step 3 to"


@pytest.mark.parametrize(
    ("act", "step", "what"), [(receive, -1, FIRST), (receive, 3, ARRIVES), (send, 3, LEAVES)]
)
def test_a_message_that_never_arrives_is_a_typed_error(device, act, step, what):  # Rule 5
    own = links_of(TWO, rank=1, deadline_s=0.1)
    own.step = step
    act(own, 5)
    then = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        own.flush()
    assert time.monotonic() - then < 2.0
    sentence, hint = str(caught.value).split("\n")
    late = "timed out after 0.1 s, deadline 0.1 s"
    assert sentence == f"stage 1, replica 0 {what} stage 0 (rank 0 on host): {late}"
    assert hint.startswith("hint: check that the other rank's host")


@pytest.mark.parametrize("rank", [0, 1])
def test_nccl_groups_connect_on_their_device_in_one_order(rank, monkeypatch):
    """NCCL's own timeout, which ends the process, is later than the typed deadline."""
    made, dist = [], process_groups.dist

    def new_group(ranks, group_desc, backend, timeout, device_id, **_):
        made.append((group_desc, backend, device_id))
        options = SimpleNamespace(_timeout=timeout)
        return SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))

    nccl = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "get_rank", lambda *_: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "new_group", new_group)
    groups, device = [Ranks("tp", (0, 1)), Ranks("pp", (1, 4))], torch.device("cuda", rank)
    networks = choose_networks(groups, holmes())
    options = {"device": device, "say": lambda _: None}
    found = process_groups.make_process_groups(groups, networks, 7.0, **options)
    control = (CONTROL, process_groups.GLOO, None)
    assert made == [control, control, ("tp", "nccl", device), ("pp", "nccl", device)]
    backend = found.of["tp"]._get_backend(device)  # noqa: SLF001
    assert backend.options._timeout == timedelta(seconds=21)  # noqa: SLF001
    assert data_group.DataGroup(found.of["tp"], device).deadline_s == 7.0
