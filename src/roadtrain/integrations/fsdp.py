"""FSDP2 over the summation service: its reduce-scatter of gradients, by its own interface for that.

    fully_shard(model)
    roadtrain.sum_fsdp(model, roadtrain.Summation(spares=["10.0.0.9:7000"]))

Every worker gets the whole sum and keeps its piece: n times the bytes that come back by a ring, so
it pays only with links that are faster inwards, or workers that share a host. Parameters are
gathered as before. Assumes one group of all workers. Does NOT overlap: FSDP2 waits for each
reduce-scatter.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from roadtrain.errors import ConfigError
from roadtrain.integrations.ddp import Summation


class _Scatter(ReduceScatter):  # type: ignore[misc]
    """Of one module."""

    def __init__(self, state: Summation, number: int) -> None:
        self._state, self._number = state, number

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if dist.get_world_size(group) != self._state.workers or op not in (
            dist.ReduceOp.SUM,
            dist.ReduceOp.AVG,
        ):
            raise ConfigError(
                f"a reduce-scatter, {op}, of {dist.get_world_size(group)} of {self._state.workers}",
                hint="one group of all; for other factors set_force_sum_reduction_for_comms(True)",
            )
        if op == dist.ReduceOp.AVG:
            input_tensor.div_(self._state.workers)
        key = self._number << 40 | input_tensor.numel()
        identity = f"gradients of FSDP2's module {self._number}"
        whole = self._state.sum(key, identity, input_tensor).wait()
        output_tensor.copy_(
            whole.view(-1).chunk(self._state.workers)[dist.get_rank(group)].view_as(output_tensor)
        )


def sum_fsdp(model: torch.nn.Module, state: Summation) -> None:
    """Gradients of every module of `model` that `fully_shard` was applied to are summed by
    `state`. Raises ConfigError where there is none."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ConfigError(
            "no module of this model is FSDP2's", hint="fully_shard(model) comes first"
        )
    for number, module in enumerate(modules):
        module.set_custom_reduce_scatter(_Scatter(state, number))
