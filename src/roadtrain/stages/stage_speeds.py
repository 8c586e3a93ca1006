"""What sizes of stages are chosen from: every rank's own speed, the time of messages between
stages, and the room of each device.

All ranks make the same calls and come to the same values. Does NOT cut a model nor move blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from roadtrain.stages.block_times import RankTimes, block_memories, finished_at
from roadtrain.stages.cuts import Cuts
from roadtrain.stages.links import StageLinks
from roadtrain.stages.protocol.pipeline import BACKWARD, FORWARD, Peer, PipelineShape, Transfer
from roadtrain.stages.protocol.stage_memory import StageMemory
from roadtrain.stages.protocol.step_model import BoundarySpeed, StageSpeed, StepWork
from roadtrain.stages.rank_groups import Groups

TIMED_MESSAGES = 2  # after one that is not timed, since it may open a connection

Channels = dict[tuple[int, str], float]  # boundary, FORWARD or BACKWARD -> seconds of a message


@dataclass(frozen=True)
class MeasuredRank:
    """What one rank measured of itself and of the messages that it received."""

    times: RankTimes
    messages: Channels
    room: float = math.inf  # bytes of its device that training may take; inf: nobody says


def measure_messages(
    links: StageLinks, shape: PipelineShape, nbytes: int, device: torch.device
) -> Channels:
    """Seconds in which a message of `nbytes` arrives here, for each boundary and direction in
    which this rank receives; all replicas send theirs at once, as in a step. `links` are idle.
    Raises PeerError (Rule 5)."""
    found: Channels = {}
    stages = shape.stages
    wraps = shape.virtual_stages > 1 and stages > 1
    for boundary in range(stages if wraps else stages - 1):
        ends = boundary, (boundary + 1) % stages
        for what, (sender, receiver) in ((FORWARD, ends), (BACKWARD, ends[::-1])):
            many = _messages(shape, what, boundary, sender, receiver)
            if shape.stage == sender:
                mine = [one for one in many if one.sender.replica == shape.replica]
                _reply(links, mine, nbytes, device)
            if shape.stage == receiver:
                mine = [one for one in many if one.receiver.replica == shape.replica]
                found[boundary, what] = _time(links, mine, nbytes, device)
    return found


def _messages(
    shape: PipelineShape, what: str, boundary: int, sender: int, receiver: int
) -> list[Transfer]:
    a, b = shape.widths[sender], shape.widths[receiver]
    return [
        Transfer(what, i, boundary, Peer(sender, 0, i % a), Peer(receiver, 0, i % b))
        for i in range(max(a, b))
    ]


def _request(one: Transfer) -> Transfer:
    """That the receiver is ready: a message of one byte the other way."""
    other = BACKWARD if one.what == FORWARD else FORWARD
    return Transfer(other, one.micro, one.boundary, one.receiver, one.sender)


def _time(links: StageLinks, mine: Sequence[Transfer], nbytes: int, device: torch.device) -> float:
    """On the receiver: the shortest of some times from the requests to the last message."""
    arriving = [_message(nbytes, device) for _ in mine]
    took = []
    for _ in range(TIMED_MESSAGES + 1):
        for one, buffer in zip(mine, arriving, strict=True):
            links.post(one, [buffer])
        then = finished_at(device)
        for one in mine:
            links.send(_request(one), [_message(1, device)])
        for one in mine:
            links.wait(one)
        took.append(finished_at(device) - then)
        links.flush()
    return min(took[1:])


def _reply(links: StageLinks, mine: Sequence[Transfer], nbytes: int, device: torch.device) -> None:
    """On the sender."""
    message = _message(nbytes, device)
    for _ in range(TIMED_MESSAGES + 1):
        for one in mine:
            links.post(_request(one), [_message(1, device)])
        for one in mine:
            links.wait(_request(one))
        for one in mine:
            links.send(one, [message])
        links.flush()


def _message(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def measured_work(
    groups: Groups,
    measured: Sequence[MeasuredRank],
    num_microbatches: int,
    weights: Sequence[float],
) -> StepWork:
    """Of each stage its slowest rank; of each boundary and direction its slowest message."""
    parallelism = groups.parallelism
    speeds, messages = [], Channels()
    for stage in range(parallelism.pp):
        ranks = [measured[rank].times for rank in groups.stage_ranks(stage)]
        slowest = max(ranks, key=lambda one: one.forward_s + one.backward_s)
        speeds.append(StageSpeed(slowest.forward_s, slowest.backward_s))
    for one in measured:
        for key, seconds in one.messages.items():
            messages[key] = max(seconds, messages.get(key, 0.0))
    boundaries = tuple(
        BoundarySpeed(messages.get((i, FORWARD), 0.0), messages.get((i, BACKWARD), 0.0))
        for i in range(len(parallelism.boundaries))
    )
    ends = max(one.times.before for one in measured), max(one.times.after for one in measured)
    widths = tuple(n // parallelism.cp for n in parallelism.replicas_of)
    return StepWork(
        tuple(speeds),
        tuple(weights),
        num_microbatches,
        widths,
        boundaries,
        ends,
        parallelism.virtual_stages,
    )


def measured_memory(
    groups: Groups,
    measured: Sequence[MeasuredRank],
    work: StepWork,
    cuts: Cuts,
    parameters: Mapping[str, int],
    **nbytes: float,
) -> StageMemory:
    """Of each stage the device with the least room. parameters: elements of each of the whole
    model's, by name. nbytes: those of StageMemory, a parameter's."""
    blocks, ends = block_memories(cuts, parameters, [one.times for one in measured])
    rooms = [
        min(measured[rank].room for rank in groups.stage_ranks(s))
        for s in range(groups.parallelism.pp)
    ]
    return StageMemory(work, tuple(rooms), blocks, ends, **nbytes)
