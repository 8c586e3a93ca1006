"""Broadcasts from one worker to all others: tensors in place, values in their plain form
(streaming/plain.py). Nothing is pickled: what has no plain form is refused on all workers (Rule 8).

Assumes: all workers make the same calls in the same order. Does NOT check that they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from roadtrain.errors import ConfigError
from roadtrain.integrations.named_sums import on_link
from roadtrain.streaming import plain

PIECE = 64 << 20  # bytes that are on the link, and where need be on the device, at once


@torch.no_grad()
def broadcast_tensor(tensor: torch.Tensor, root: int) -> torch.Tensor:
    """In place, the same bytes."""
    flat = tensor.detach().contiguous().reshape(-1)  # another memory where `tensor` has gaps
    for piece in flat.view(torch.uint8).split(PIECE) if flat.numel() else ():
        carried = on_link(piece)
        dist.broadcast(carried, root)
        piece.copy_(carried)
    tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def broadcast_tensors(named: Mapping[str, Any] | Iterable[tuple[str, Any]], root: int) -> None:
    """In place. Those of a mapping in the order of their names. Raises ConfigError on all
    workers where one has others than root."""
    pairs = sorted(named.items()) if isinstance(named, Mapping) else list(named)
    tensors = [(name, value) for name, value in pairs if isinstance(value, torch.Tensor)]
    mine = [[name, str(t.dtype), list(t.shape)] for name, t in tensors]
    roots = broadcast_value(mine, root)
    all_same = on_link(torch.tensor([int(mine == roots)]))
    dist.all_reduce(all_same, op=dist.ReduceOp.MIN)
    if not all_same.item():
        differs = next(
            (pair for pair in zip(mine, roots) if pair[0] != pair[1]), (len(mine), len(roots))
        )
        raise ConfigError(
            (
                f"another worker has other tensors than worker {root}"
                if mine == roots
                else f"worker {dist.get_rank()} has {differs[0]}, worker {root} {differs[1]}"
            ),
            hint="they build the same model",
        )
    for _, tensor in tensors:
        broadcast_tensor(tensor, root)


def broadcast_value(value: Any, root: int) -> Any:
    """Root's `value`, on every worker a new one. Tensors come back on the host. Raises
    ConfigError on all workers where it has no plain form."""
    packed, wrong = b"", None
    if dist.get_rank() == root:
        try:
            packed = plain.encode(value, "the value")
        except ConfigError as error:
            wrong = error
    length = int(broadcast_tensor(torch.tensor([-1 if wrong is not None else len(packed)]), root))
    if length < 0:
        raise ConfigError(
            f"worker {root} has a value that cannot be broadcast" + (f": {wrong}" if wrong else ""),
            hint=plain.HINT,
        )
    data = bytearray(packed or length)
    broadcast_tensor(torch.frombuffer(data, dtype=torch.uint8), root)
    return plain.decode(memoryview(data))


def broadcast_optimizer(optimizer: torch.optim.Optimizer, root: int) -> None:
    """Its state and the settings of its groups; also where only root has any."""
    optimizer.load_state_dict(
        broadcast_value(optimizer.state_dict() if dist.get_rank() == root else None, root)
    )
