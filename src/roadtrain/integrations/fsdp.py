"""FSDP2 over the summation service, through FSDP2's interface for a custom reduce-scatter.

    fully_shard(model)
    roadtrain.sum_fsdp(model, roadtrain.Summation(spares=["10.0.0.9:7000"]))

Every worker receives the complete sum and keeps only its shard: n times the bytes of a ring
reduce-scatter with n workers. So the summation service is faster than a ring only if links receive
faster than they send, or if workers share a host. All workers must be in one FSDP2 group. Sums do
not overlap with backward, because FSDP2 waits for each reduce-scatter.
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
    """The reduce-scatter that FSDP2 calls for the gradients of one module of the model."""

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
                f"a reduction by {op} over {dist.get_world_size(group)} of {self._state.workers}"
                " workers is not supported, only SUM and AVG over all workers are supported",
                hint="use a group of all workers; set_force_sum_reduction_for_comms(True) makes"
                " FSDP2 use SUM",
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
    """Sum the gradients of FSDP2 modules with the summation service.

    Args:
        model: A model in which `fully_shard` was applied to one or more modules.
        state: The summation service.

    Raises:
        ConfigError: `fully_shard` was not applied to any module.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ConfigError(
            "no module of this model is an FSDP2 module", hint="call fully_shard(model) first"
        )
    for number, module in enumerate(modules):
        module.set_custom_reduce_scatter(_Scatter(state, number))
