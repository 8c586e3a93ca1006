"""A session on files for benchmarks of updates: nothing is kept in memory, so that an update reads
and writes all state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roadtrain.chunks import ChunkTable, ParamSpec
from roadtrain.kernels.torch_rules import rules_for
from roadtrain.options.budgets import BudgetTerms, derive
from roadtrain.servers.local_servers import LocalServers
from roadtrain.servers.session import JobSession
from roadtrain.servers.store_plan import StorePlan

NOTHING: Mapping[str, Any] = {}


def session_on_files(
    table: ChunkTable,
    optimizer: torch.optim.Optimizer,
    directories: Sequence[Path],
    host_budget: int,
    deadline_s: float,
    *,
    worker: Mapping[str, Any] = NOTHING,
    records: Mapping[str, Any] = NOTHING,
) -> tuple[LocalServers, JobSession]:
    """Begin a session whose state is in `directories`. It has no parameters yet.

    Args:
        worker: fields of the worker's budgets that differ from the derived ones
        records: fields of the servers' budgets that differ from the derived ones
    """
    plan = StorePlan(table, rules_for(optimizer), tuple(directories))
    terms = BudgetTerms(on_files=True, holds_gradients=False)
    budgets = derive(table, plan.meta().records, plan.owners, terms, host_budget)
    kept = replace(
        budgets.records, resident=frozenset(), weights_resident=frozenset(), resident_bytes=0
    )
    budgets = replace(
        budgets, worker=replace(budgets.worker, **worker), records=replace(kept, **records)
    )
    servers = LocalServers(plan, budgets.records, None, deadline_s=deadline_s)
    session = JobSession(
        servers,
        budgets,
        torch.device("cpu"),
        compute_blocks=(),
        compressor=None,
        deadline_s=deadline_s,
    )
    return servers, session


def fill(
    session: JobSession, table: ChunkTable, optimizer: torch.optim.Optimizer, values: np.ndarray
) -> None:
    """Write the first parameters, `values` in each block, and start the session."""
    for block in table.blocks:
        session.fill(
            block,
            lambda spec, what, a, b: values[a:b] if what == "master" else None,
            optimizer.param_groups,
        )
    session.start(b"")


def blocks_of(count: int, elements: int, dtype: str, *chunk: int) -> ChunkTable:
    """Build the table of `count` blocks with one parameter of `elements` elements each. `chunk`:
    elements of a chunk, if not the default.
    """
    rows: list[tuple[str, list[ParamSpec]]] = [("root", [])]
    for i in range(count):
        rows.append((f"b{i}", [ParamSpec(f"b{i}.w", (elements,), dtype, True, 0)]))
    return ChunkTable.build(rows, *chunk)
