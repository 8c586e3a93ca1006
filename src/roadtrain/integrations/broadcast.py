"""What one worker has, to all others: tensors in place, and values (numbers, text, None, tensors;
lists, tuples, dicts of them) as msgpack. Nothing is pickled: what cannot be told so is refused on
all workers (Rule 8).

Assumes that all workers call the same in the same order. Does NOT send what the workers agree
about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from roadtrain.errors import ConfigError
from roadtrain.integrations.exchange import on_link
from roadtrain.streaming.split import DTYPES, NAMES

PLAIN = (bool, int, float, str, bytes, type(None))


@torch.no_grad()
def broadcast_tensor(tensor: torch.Tensor, root: int) -> torch.Tensor:
    """In place, the same bytes."""
    flat = tensor.detach().contiguous().reshape(-1)  # another memory where `tensor` has gaps
    carried = on_link(flat.view(torch.uint8))
    if carried.numel():
        dist.broadcast(carried, root)
    tensor.detach().copy_(carried.view(flat.dtype).view(tensor.shape))
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
    ConfigError on all workers."""
    tensors: list[torch.Tensor] = []
    packed, wrong = b"", None
    if dist.get_rank() == root:
        try:
            packed = msgspec.msgpack.encode(_told(value, tensors))
        except (ConfigError, TypeError, OverflowError) as error:
            wrong = error
    length = int(broadcast_tensor(torch.tensor([-1 if wrong is not None else len(packed)]), root))
    if length < 0:
        raise ConfigError(
            f"worker {root} has a value that cannot be broadcast" + (f": {wrong}" if wrong else ""),
            hint="numbers, text, bytes, None, tensors; lists, tuples and dicts of them",
        )
    data = bytearray(packed or length)
    broadcast_tensor(torch.frombuffer(data, dtype=torch.uint8), root)
    return _made(msgspec.msgpack.decode(data), iter(tensors), root)


def _told(value: Any, tensors: list[torch.Tensor]) -> list[Any]:
    if isinstance(value, torch.Tensor) and value.dtype in NAMES and value.layout is torch.strided:
        tensors.append(value.detach().cpu().contiguous().clone())
        return ["tensor", NAMES[value.dtype], list(value.shape)]
    if isinstance(value, PLAIN):
        return ["plain", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_told(one, tensors) for one in value]]
    if isinstance(value, dict):
        return ["dict", [[_told(key, tensors), _told(one, tensors)] for key, one in value.items()]]
    raise ConfigError(f"a {type(value).__name__} cannot be broadcast")


def _made(told: list[Any], tensors: Any, root: int) -> Any:
    """Tensors follow in the order in which they were told."""
    match told:
        case ["tensor", dtype, shape]:
            own = next(tensors, None)
            return broadcast_tensor(
                torch.empty(shape, dtype=DTYPES[dtype]) if own is None else own, root
            )
        case ["plain", value]:
            return value
        case ["dict", pairs]:
            return {_made(key, tensors, root): _made(one, tensors, root) for key, one in pairs}
        case [kind, values]:
            made = [_made(one, tensors, root) for one in values]
            return tuple(made) if kind == "tuple" else made
    raise AssertionError(told)


def broadcast_optimizer(optimizer: torch.optim.Optimizer, root: int) -> None:
    """Its state and the settings of its groups; also where only root has any."""
    optimizer.load_state_dict(
        broadcast_value(optimizer.state_dict() if dist.get_rank() == root else None, root)
    )
