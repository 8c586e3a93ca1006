"""Collect the measurements that determine the sizes of stages: speeds, times of messages, free
memory. Does NOT cut a model or move blocks.

All ranks make the same calls and compute the same values.
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

# number of timed messages; a message before them is not timed, because it may open a connection
TIMED_MESSAGES = 2

Channels = dict[tuple[int, str], float]  # (boundary, FORWARD or BACKWARD) -> seconds of a message


@dataclass(frozen=True)
class MeasuredRank:
    """The measurements of one rank: its speed, the times of the messages that it receives, and its
    free memory."""

    times: RankTimes
    messages: Channels
    room: float = math.inf  # bytes of device memory that training may use; infinite if unknown


def measure_messages(
    links: StageLinks, shape: PipelineShape, nbytes: int, device: torch.device
) -> Channels:
    """Measure the seconds in which a message of `nbytes` arrives at this rank, over each boundary
    and direction. All replicas send at the same time, as in a step. `links` must be idle. Raises
    PeerError if a rank is lost (Rule 5)."""
    found: Channels = {}
    stages = shape.stages
    wraps = shape.virtual_stages > 1 and stages > 1
    for boundary in range(stages if wraps else stages - 1):
        ends = boundary, (boundary + 1) % stages
        for what, (sender, receiver) in ((FORWARD, ends), (BACKWARD, ends[::-1])):
            many = _messages(shape, what, boundary, sender, receiver)
            if shape.stage == sender:
                mine = [m for m in many if m.sender.replica == shape.replica]
                _reply(links, mine, nbytes, device)
            if shape.stage == receiver:
                mine = [m for m in many if m.receiver.replica == shape.replica]
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


def _request(message: Transfer) -> Transfer:
    """Return the request for a message: one byte in the opposite direction, sent when the receiver
    is ready."""
    other = BACKWARD if message.what == FORWARD else FORWARD
    return Transfer(other, message.micro, message.boundary, message.receiver, message.sender)


def _time(links: StageLinks, mine: Sequence[Transfer], nbytes: int, device: torch.device) -> float:
    """Request the messages `mine` several times, and return the shortest time in seconds until all
    have arrived."""
    arriving = [_message(nbytes, device) for _ in mine]
    took = []
    for _ in range(TIMED_MESSAGES + 1):
        then = finished_at(device)  # not after `post`: a GPU is busy while it receives
        for transfer, buffer in zip(mine, arriving, strict=True):
            links.post(transfer, [buffer])
        for transfer in mine:
            links.send(_request(transfer), [_message(1, device)])
        for transfer in mine:
            links.wait(transfer)
        links.flush()
        took.append(finished_at(device) - then)
    return min(took[1:])


def _reply(links: StageLinks, mine: Sequence[Transfer], nbytes: int, device: torch.device) -> None:
    message = _message(nbytes, device)
    for _ in range(TIMED_MESSAGES + 1):
        for transfer in mine:
            links.post(_request(transfer), [_message(1, device)])
        for transfer in mine:
            links.wait(_request(transfer))
        for transfer in mine:
            links.send(transfer, [message])
        links.flush()


def _message(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def measured_work(
    groups: Groups,
    measured: Sequence[MeasuredRank],
    num_microbatches: int,
    weights: Sequence[float],
) -> StepWork:
    """Return the work of a step, with the speed of each stage's slowest rank and the time of the
    slowest message over each boundary and direction. measured: the measurements of each rank.
    weights: the weight of each block."""
    parallelism = groups.parallelism
    speeds, messages = [], Channels()
    for stage in range(parallelism.pp):
        ranks = [measured[rank].times for rank in groups.stage_ranks(stage)]
        slowest = max(ranks, key=lambda times: times.forward_s + times.backward_s)
        speeds.append(StageSpeed(slowest.forward_s, slowest.backward_s))
    for rank in measured:
        for key, seconds in rank.messages.items():
            messages[key] = max(seconds, messages.get(key, 0.0))
    boundaries = tuple(
        BoundarySpeed(messages.get((i, FORWARD), 0.0), messages.get((i, BACKWARD), 0.0))
        for i in range(len(parallelism.boundaries))
    )
    ends = max(m.times.before for m in measured), max(m.times.after for m in measured)
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
    """Return the memory model of the stages. A stage's memory is that of its device with the least
    free memory. parameters: the number of elements of each parameter, by name. nbytes: values for
    the fields of StageMemory whose names end with `_bytes`."""
    blocks, ends = block_memories(cuts, parameters, [m.times for m in measured])
    rooms = [
        min(measured[rank].room for rank in groups.stage_ranks(s))
        for s in range(groups.parallelism.pp)
    ]
    return StageMemory(work, tuple(rooms), blocks, ends, **nbytes)
