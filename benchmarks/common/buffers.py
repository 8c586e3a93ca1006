"""Compute the bytes of roadtrain's buffers under a plan, to compare them with the memory of real
runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from roadtrain.chunks import PAGE
from roadtrain.config.models import BlockShape
from roadtrain.config.plan_file import Plan
from roadtrain.options.budgets import HUGE
from roadtrain.units import round_up


def buffer_bytes(plan: Plan, blocks: Sequence[BlockShape]) -> float:
    """Compute the buffer bytes of a process that trains under `plan`. Does NOT count the block
    inputs that are saved for backward.
    """
    layers = [block.params for block in blocks if "." in block.name]
    total, most = sum(block.params for block in blocks), max(layers)
    sizes = [
        (plan.memory.slots, most * plan.sizes.parameter_bytes),
        (plan.memory.pushes, most * plan.sizes.gradient_bytes),
    ]
    rest = (total - sum(layers)) * (plan.sizes.parameter_bytes + plan.sizes.gradient_bytes)
    if not plan.placement.served:
        chunk, records = (
            min(plan.memory.chunk, most),
            plan.memory.buffers if plan.placement.state == "ssd" else 0,
        )
        rest += total * plan.memory.resident * plan.sizes.state_bytes
        rest += (
            total * max(0.0, plan.memory.public - plan.memory.resident) * plan.sizes.parameter_bytes
        )
        # one page of scalars per record
        sizes += [(records, chunk * plan.sizes.state_bytes + PAGE), (max(2, records), chunk * 4)]
    return rest + sum(n * round_up(int(nbytes), HUGE) for n, nbytes in sizes)
