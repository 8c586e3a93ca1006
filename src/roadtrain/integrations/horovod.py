"""Horovod's and BytePS's calls for PyTorch over roadtrain's summation service: a script changes its
import.

    import roadtrain.hvd as hvd  # or: as bps
    hvd.init()

Started by torchrun, or alone as a world of one. An average divides first and sums then: with two
workers the bits of DDP's. Names of tensors: integrations/named_sums.py, NOTE keys. Workers that do
not mean the same (type, shape, order, name) all get a DifferError within seconds, a RuntimeError as
Horovod's, and may go on. `compression`: one of Compression, or its string. Does NOT know process
sets, other operations than sum and average, gather and its kin, elastic training; sums are not
differentiated.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from roadtrain.environment import local_rank_of
from roadtrain.errors import ConfigError
from roadtrain.integrations.ddp import Summation
from roadtrain.integrations.distributed import (
    Asynchronous,
    Distributed,
    distribute,
    distribute_asynchronously,
)
from roadtrain.integrations.named_sums import AT_ONCE, Exchange, Handle, on_link
from roadtrain.streaming import plain
from roadtrain.sums.tensor_sums import described

__all__ = [
    "Average",
    "Compression",
    "CrossBarrier",
    "DistributedOptimizer",
    "Sum",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "declare",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]

Average, Sum = "average", "sum"
# of DistributedOptimizer: they change no result
IGNORED = {"num_groups", "groups", "sparse_as_dense"}
PIECE = 64 << 20  # bytes of a broadcast that are on the link, and where need be on the device


class Compression:
    """How a tensor travels. Lossy, but for `none`. bits: of each value."""

    none, fp16, bf16, onebit = "", "fp16", "bf16", "onebit"

    @staticmethod
    def topk(share: float = 0.01) -> str:
        return f"topk:{share:g}"

    @staticmethod
    def dither(bits: int = 4) -> str:
        return f"dither:{bits}"


def _format(compression: str) -> str:
    if not isinstance(compression, str):
        raise ConfigError(
            f"compression={compression!r}", hint="one of Compression, or a string as 'topk:0.01'"
        )
    return compression


class _World:
    exchange: Exchange | None = None  # between init() and shutdown()
    own_group = False  # the process group was started by init()
    optimizers: weakref.WeakSet[Distributed] = weakref.WeakSet()


def init(**options: Any) -> None:
    """`options` are those of roadtrain.Summation; workers of several hosts need its token_file.
    A second call does nothing."""
    if _World.exchange is not None:
        return
    _World.own_group = not dist.is_initialized()
    if _World.own_group:
        backend = (
            "cpu:gloo,cuda:nccl"
            if torch.cuda.is_available() and dist.is_nccl_available()
            else "gloo"
        )
        launched = {"RANK", "WORLD_SIZE"} & os.environ.keys()
        alone: dict[str, Any] = (
            {} if launched else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        )
        dist.init_process_group(backend, **alone)
    try:
        _World.exchange = Exchange(Summation(**options))
    except BaseException:
        if _World.own_group:
            dist.destroy_process_group()
        raise


def shutdown() -> None:
    """What steps with `model=` put off is applied first. init() after it needs another
    MASTER_PORT: torch's store of the old group may still answer at the old one."""
    if (exchange := _World.exchange) is None:
        return
    try:
        for optimizer in _World.optimizers:
            optimizer.apply_all()
    finally:
        _World.exchange = None
        _World.optimizers.clear()
        exchange.close()
        if _World.own_group:
            dist.destroy_process_group()


def is_initialized() -> bool:
    return _World.exchange is not None


def _exchange() -> Exchange:
    if _World.exchange is None:
        raise ConfigError(
            "roadtrain.hvd is not initialized", hint="init() comes first, shutdown() last"
        )
    return _World.exchange


def rank() -> int:
    return _exchange().rank


def size() -> int:
    return _exchange().workers


def local_rank() -> int:
    return _local("LOCAL_RANK")[0]


def local_size() -> int:
    return _local("LOCAL_WORLD_SIZE")[1]


def _local(name: str) -> tuple[int, int]:
    if size() > 1 and name not in os.environ:
        raise ConfigError(f"{name} is not set", hint="torchrun sets it")
    return local_rank_of(os.environ)


def _averages(op: str | None, average: bool | None = None) -> bool:
    if op not in (None, Average, Sum) or (average is not None and op is not None):
        raise ConfigError(
            f"average={average}, op={op!r}",
            hint="op=Average, op=Sum, or none of both for the average",
        )
    return op != Sum and average is not False


def _begun(
    tensor: torch.Tensor,
    average: bool,
    name: str | None,
    compression: str,
    how: tuple[bool, bool],
    priority: int = 0,
) -> Any:
    """how: whether in place, and whether waited for."""
    exchange, (inplace, wait) = _exchange(), how
    handle = exchange.begin(
        tensor,
        name or (AT_ONCE if wait else None),
        out=tensor if inplace else None,
        divisor=size() if average else 1,
        priority=priority,
        format=_format(compression),
    )
    return exchange.finish(handle) if wait else handle


def _allreduce(*how: bool) -> Callable[..., Any]:
    def allreduce(
        tensor: torch.Tensor,
        average: bool | None = None,
        name: str | None = None,
        compression: str = Compression.none,
        op: str | None = None,
    ) -> Any:
        """The average (or sum) over all workers, a tensor of the caller's own; `_` at the end:
        in the tensor's place. async: a Handle for `synchronize`, before which the tensor must
        not change."""
        return _begun(tensor, _averages(op, average), name, compression, how)  # type: ignore[arg-type]

    return allreduce


def _push_pull(*how: bool) -> Callable[..., Any]:
    def push_pull(
        tensor: torch.Tensor,
        average: bool = True,
        name: str | None = None,
        version: int = 0,
        priority: int = 0,
        compression: str = Compression.none,
    ) -> Any:
        """BytePS's allreduce. Greater priorities go first; `version` means nothing here."""
        return _begun(tensor, average, name, compression, how, -priority)  # type: ignore[arg-type]

    return push_pull


allreduce, allreduce_ = _allreduce(False, True), _allreduce(True, True)
allreduce_async, allreduce_async_ = _allreduce(False, False), _allreduce(True, False)
push_pull, push_pull_inplace = _push_pull(False, True), _push_pull(True, True)
push_pull_async, push_pull_async_inplace = _push_pull(False, False), _push_pull(True, False)


def synchronize(handle: Handle) -> torch.Tensor:
    """Waits for the result. Once for each handle."""
    return _exchange().finish(handle)


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would not wait."""
    return handle.done()


def declare(name: str) -> str:
    """BytePS's; nothing needs it here."""
    return name


def _agree(identity: str, signature: str) -> None:
    """All workers have come to that, and to nothing else, before torch's group is used: it
    would wait for ever."""
    _exchange().summation.agree(identity, signature)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    return broadcast_(tensor.detach().clone(), root_rank, name)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    _agree(name or "an unnamed broadcast", f"{described(tensor)} from worker {root_rank}")
    return _broadcast(tensor, root_rank)


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int, prefix: str = ""
) -> None:
    """A state_dict's tensors, in the order of their names, or named ones, in place. ConfigError on
    all workers where they do not match."""
    _agree("broadcast_parameters", f"from worker {root_rank}")
    pairs = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    tensors = [(name, value) for name, value in pairs if isinstance(value, torch.Tensor)]
    mine = [[name, str(t.dtype), list(t.shape)] for name, t in tensors]
    roots = _broadcast_value(mine, root_rank)
    all_same = on_link(torch.tensor([int(mine == roots)]))
    dist.all_reduce(all_same, op=dist.ReduceOp.MIN)
    if not all_same.item():
        differs = next(
            (pair for pair in zip(mine, roots) if pair[0] != pair[1]), (len(mine), len(roots))
        )
        raise ConfigError(
            (
                f"another worker has other tensors than worker {root_rank}"
                if mine == roots
                else f"worker {dist.get_rank()} has {differs[0]}, worker {root_rank} {differs[1]}"
            ),
            hint="they build the same model",
        )
    for _, tensor in tensors:
        _broadcast(tensor, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, prefix: str = ""
) -> None:
    """State and groups' settings, also where only root has any."""
    _agree("broadcast_optimizer_state", f"from worker {root_rank}")
    mine = optimizer.state_dict() if dist.get_rank() == root_rank else None
    optimizer.load_state_dict(_broadcast_value(mine, root_rank))


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Numbers, text, bytes, None, tensors; lists, tuples and dicts of them. ConfigError on all
    workers for others."""
    _agree(name or "broadcast_object", f"from worker {root_rank}")
    return _broadcast_value(obj, root_rank)


@torch.no_grad()
def _broadcast(tensor: torch.Tensor, root: int) -> torch.Tensor:
    """In place, the same bytes."""
    flat = tensor.detach().contiguous().reshape(-1)  # another memory where `tensor` has gaps
    for piece in flat.view(torch.uint8).split(PIECE) if flat.numel() else ():
        carried = on_link(piece)
        dist.broadcast(carried, root)
        piece.copy_(carried)
    tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def _broadcast_value(value: Any, root: int) -> Any:
    """Root's `value` in its plain form (streaming/plain.py), on every worker a new one; nothing is
    pickled (Rule 8). Tensors come back on the host. Raises ConfigError on all workers where it has
    no plain form."""
    packed, wrong = b"", None
    if dist.get_rank() == root:
        try:
            packed = plain.encode(value, "the value")
        except ConfigError as error:
            wrong = error
    length = int(_broadcast(torch.tensor([-1 if wrong is not None else len(packed)]), root))
    if length < 0:
        raise ConfigError(
            f"worker {root} has a value that cannot be broadcast" + (f": {wrong}" if wrong else ""),
            hint=plain.HINT,
        )
    data = bytearray(packed or length)
    _broadcast(torch.frombuffer(data, dtype=torch.uint8), root)
    return plain.decode(memoryview(data))


def barrier() -> None:
    _agree("a barrier", "of all")
    dist.barrier()


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
    compression: str = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float | None = None,
    model: nn.Module | None = None,
    num_steps: int = 0,
    **others: Any,
) -> Distributed | Asynchronous:
    """After init(rule="accumulate") steps are asynchronous (integrations/distributed.py,
    Asynchronous) and take no other options. Else: `optimizer` itself, whose gradients are
    averaged from the moment backward has them. gradient_predivide_factor: divides before the
    sum, the rest after it; None: all before. model: step() does not wait, the model's next
    forward does, module by module; the same bits (integrations/distributed.py, NOTE later steps).
    num_steps: the last step, which is not put off. Raises ConfigError; LoopError and errors of
    the service come from backward, step and forward."""
    if unknown := {key for key, value in others.items() if value and key not in IGNORED}:
        raise ConfigError(
            f"DistributedOptimizer has no {', '.join(sorted(unknown))}", hint="leave it out"
        )
    if _exchange().summation.rule == "accumulate":
        if (
            _format(compression)
            or backward_passes_per_step != 1
            or model is not None
            or op != Average
        ):
            raise ConfigError(
                "options of DistributedOptimizer in asynchronous training", hint="it takes none"
            )
        return distribute_asynchronously(optimizer, _exchange(), named_parameters)
    n, before = (size() if _averages(op) else 1), gradient_predivide_factor
    if before is not None and (op == Sum or before <= 0):
        raise ConfigError(
            f"gradient_predivide_factor={before}, op={op!r}", hint="above 0, and with Average"
        )
    made = distribute(
        optimizer,
        _exchange(),
        named_parameters,
        passes=backward_passes_per_step,
        format=_format(compression),
        division=(before or n, before / n if before else 1.0),
        model=model,
        num_steps=num_steps,
    )
    _World.optimizers.add(made)
    return made


def CrossBarrier(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    named_parameters: Any = None,
    compression: str = Compression.none,
    backward_passes_per_step: int = 1,
    num_steps: int | None = None,
) -> Distributed | Asynchronous:
    """BytePS's name for DistributedOptimizer(..., model=model)."""
    return DistributedOptimizer(
        optimizer,
        named_parameters,
        compression,
        backward_passes_per_step,
        model=model,
        num_steps=num_steps or 0,
    )
