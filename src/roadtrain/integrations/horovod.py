"""The PyTorch API of Horovod and BytePS over roadtrain's summation service. A script changes only
its import.

    import roadtrain.hvd as hvd  # or: as bps
    hvd.init()

torchrun starts the workers; a process without torchrun is the only worker. The rules for names of
tensors are in integrations/named_sums.py, Note "keys". If workers disagree (in type, shape, order
or name), a DifferError is raised on every worker within seconds, after which the workers may
continue.

Process sets, operations other than sum and average, gather and similar calls, and elastic training
are not supported. Sums are not differentiable.
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
# options of DistributedOptimizer that do not change results
IGNORED = {"num_groups", "groups", "sparse_as_dense"}
PIECE = 64 << 20  # bytes of a broadcast that are in flight at once (and on the device, with NCCL)


class Compression:
    """Formats in which tensors are sent. All formats except `none` are lossy. `share`: fraction of
    the values that `topk` sends. `bits`: bits per value that `dither` sends."""

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
            f"compression={compression!r} is not a string", hint="use a member of Compression"
        )
    return compression


class _World:
    exchange: Exchange | None = None  # None before init() and after shutdown()
    own_group = False  # whether init() has started the process group
    optimizers: weakref.WeakSet[Distributed] = weakref.WeakSet()


def init(**options: Any) -> None:
    """Start the summation service. A second call does nothing.

    Args:
        **options: Options of roadtrain.Summation. Workers of several hosts need `token`.
    """
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
    """Apply deferred steps and stop the summation service.

    A later init() needs a different MASTER_PORT, because torch's old store may still answer at the
    old port.
    """
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
            "roadtrain.hvd is not initialized", hint="call init() first, and shutdown() last"
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
        raise ConfigError(f"{name} is not set", hint="start the workers with torchrun")
    return local_rank_of(os.environ)


def _averages(op: str | None, average: bool | None = None) -> bool:
    if op not in (None, Average, Sum) or (average is not None and op is not None):
        raise ConfigError(
            f"average={average} with op={op!r} is not possible",
            hint="pass op=Average or op=Sum, or else average=True or average=False",
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
    """Begin the sum or average of a tensor, and return a Handle, or the result if this call waits.
    `how`: whether to replace the values of `tensor`, and whether to wait."""
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
        """Return the average or the sum of a tensor over all workers. The average is the default.
        `op` (Average or Sum) or `average` (True or False) selects one of the two; pass only one of
        these arguments.

        `allreduce_` and `allreduce_async_` write the result to `tensor` itself. `allreduce_async`
        and `allreduce_async_` return a Handle, which must be passed to `synchronize`; do not change
        the tensor until `synchronize` returns.
        """
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
        """Average a tensor over all workers, or sum it if `average` is False; an allreduce with the
        arguments of BytePS. Sums with a greater `priority` are sent first. `version` is ignored."""
        return _begun(tensor, average, name, compression, how, -priority)  # type: ignore[arg-type]

    return push_pull


allreduce, allreduce_ = _allreduce(False, True), _allreduce(True, True)
allreduce_async, allreduce_async_ = _allreduce(False, False), _allreduce(True, False)
push_pull, push_pull_inplace = _push_pull(False, True), _push_pull(True, True)
push_pull_async, push_pull_async_inplace = _push_pull(False, False), _push_pull(True, False)


def synchronize(handle: Handle) -> torch.Tensor:
    """Wait for the sum that belongs to `handle`, and return the result. Call once per handle."""
    return _exchange().finish(handle)


def poll(handle: Handle) -> bool:
    """Return whether `synchronize` would return at once."""
    return handle.done()


def declare(name: str) -> str:
    """Return `name`. BytePS needs this call, but roadtrain does not."""
    return name


def _agree(identity: str, signature: str) -> None:
    """Wait until all workers have made the same call, because torch.distributed would hang
    otherwise."""
    _exchange().summation.agree(identity, signature)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    return broadcast_(tensor.detach().clone(), root_rank, name)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    _agree(name or "an unnamed broadcast", f"{described(tensor)} from worker {root_rank}")
    return _broadcast(tensor, root_rank)


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int, prefix: str = ""
) -> None:
    """Broadcast tensors in place, from worker `root_rank`. `params`: a state_dict, or pairs of a
    name and a tensor. Raises ConfigError on all workers if names, dtypes or shapes differ."""
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
                f"another worker's tensors differ from those of worker {root_rank}"
                if mine == roots
                else f"tensors differ: worker {dist.get_rank()} has {differs[0]}, but worker"
                f" {root_rank} has {differs[1]}"
            ),
            hint="build the same model on all workers",
        )
    for _, tensor in tensors:
        _broadcast(tensor, root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, prefix: str = ""
) -> None:
    """Broadcast the optimizer's state and the settings of its groups. Workers other than
    `root_rank` may have no state yet."""
    _agree("broadcast_optimizer_state", f"from worker {root_rank}")
    mine = optimizer.state_dict() if dist.get_rank() == root_rank else None
    optimizer.load_state_dict(_broadcast_value(mine, root_rank))


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """Broadcast an object and return it. The object may consist of numbers, text, bytes, None and
    tensors, in lists, tuples and dicts. Raises ConfigError on all workers for other types."""
    _agree(name or "broadcast_object", f"from worker {root_rank}")
    return _broadcast_value(obj, root_rank)


@torch.no_grad()
def _broadcast(tensor: torch.Tensor, root: int) -> torch.Tensor:
    flat = tensor.detach().contiguous().reshape(-1)  # a copy if `tensor` is not contiguous
    for piece in flat.view(torch.uint8).split(PIECE) if flat.numel() else ():
        carried = on_link(piece)
        dist.broadcast(carried, root)
        piece.copy_(carried)
    tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def _broadcast_value(value: Any, root: int) -> Any:
    """Return a copy of the root's `value` on every worker, with tensors in host memory. Raises
    ConfigError on all workers if the value cannot be sent without pickle."""
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
    """Make an optimizer average its gradients over all workers.

    After init(rule="accumulate") steps are asynchronous (integrations/distributed.py,
    Asynchronous), and no other options are allowed.

    Args:
        optimizer: The optimizer, which is changed and returned.
        named_parameters: The optimizer's parameters with names, such as model.named_parameters().
        compression: Format in which gradients are sent.
        backward_passes_per_step: Number of backward passes before each step().
        op: Average or Sum.
        gradient_predivide_factor: Divisor that an average applies before the sum; the sum is then
            multiplied by this divisor / number of workers. If None, the whole division is done
            before the sum.
        model: If set, step() does not wait for the sums. Instead, each module's next forward waits
            for the module's sums, with the same results (integrations/distributed.py, Note
            "deferred steps").
        num_steps: Total number of calls of step(), 0 if it is not known. The step of the last call
            is not deferred.
        **others: Other options of Horovod and BytePS. Options that do not change results are
            ignored. All others raise ConfigError.

    Raises:
        ConfigError: An option is unknown or not possible. Later calls of backward, step and forward
            may raise LoopError and errors of the service.
    """
    if unknown := {key for key, value in others.items() if value and key not in IGNORED}:
        raise ConfigError(
            f"DistributedOptimizer has no option {', '.join(sorted(unknown))}", hint="leave it out"
        )
    if _exchange().summation.rule == "accumulate":
        if (
            _format(compression)
            or backward_passes_per_step != 1
            or model is not None
            or op != Average
        ):
            raise ConfigError("an asynchronous optimizer takes no options", hint="leave them out")
        return distribute_asynchronously(optimizer, _exchange(), named_parameters)
    n, before = (size() if _averages(op) else 1), gradient_predivide_factor
    if before is not None and (op == Sum or before <= 0):
        raise ConfigError(
            f"gradient_predivide_factor={before} is not possible with op={op!r}",
            hint="use a factor above 0, with op=Average",
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
    """Return DistributedOptimizer(..., model=model), under BytePS's name."""
    return DistributedOptimizer(
        optimizer,
        named_parameters,
        compression,
        backward_passes_per_step,
        model=model,
        num_steps=num_steps or 0,
    )
