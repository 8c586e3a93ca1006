"""The requested layout and update rules of a job's store. This module also checks existing stores,
and makes initial records. local_servers.py and remote_servers.py open and write stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from roadtrain.chunks import Chunk, ChunkTable, Record
from roadtrain.errors import ForeignError
from roadtrain.kernels.rule import Rule
from roadtrain.servers.protocol.assignment import assign
from roadtrain.storage.convert import MASTER, RecordView, Source
from roadtrain.storage.meta import GroupRule, StoreMeta


@dataclass(frozen=True)
class StorePlan:
    """The requested location of every chunk, and the update rules."""

    table: ChunkTable
    rules: Sequence[Rule]
    directories: tuple[Path, ...]
    direct: bool = True
    # relative rates of the directories or servers; if empty, all are equal
    weights: tuple[float, ...] = ()
    # With staleness 1 the store has two versions of the parameters. With a higher staleness, the
    # store has one version, and pulls get the newest version.
    staleness: int = 0
    replicas: int = 1
    moved_from: tuple[Path, ...] = ()  # directories that held files of the store before

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The server of each chunk. Servers get elements in proportion to `weights`."""
        return assign(self.table, self.weights or (1.0,) * max(1, len(self.directories)))

    @property
    def groups(self) -> tuple[GroupRule, ...]:
        return tuple(GroupRule(r.name, tuple(r.arrays), tuple(r.scalars)) for r in self.rules)

    @cached_property
    def records(self) -> Mapping[int, Record]:
        """The layout of each chunk's record, by chunk number."""
        return self.meta().records

    def meta(self, job: str = "") -> StoreMeta:
        return StoreMeta.of(self.table, self.groups, job, int(self.staleness == 1), self.replicas)


def check_same(where: str, held: StoreMeta, store_plan: StorePlan) -> None:
    """Raise ForeignError if an existing store differs from `store_plan` in model, optimizer,
    staleness or replicas.

    `where` is the location of the existing store, and `held` its metadata.
    """
    if held.table.fingerprint() != store_plan.table.fingerprint():
        ours, theirs = (
            {p.name: f"{'trainable' if p.trainable else 'frozen'} {p.shape}" for p in table.params}
            for table in (store_plan.table, held.table)
        )
        diff = next((n for n in [*ours, *theirs] if ours.get(n) != theirs.get(n)), "")
        what = f"{diff} is {theirs.get(diff, 'absent')} there, but {ours.get(diff, 'absent')} here"
        raise ForeignError(
            f"{where}: the store is of another model: "
            + (what if diff else "its blocks have other names or other parameters"),
            hint="use the same model, blocks and error feedback, or another store directory"
            " (another --run.dir, if the store is in it)",
        )
    if held.groups != store_plan.groups:
        raise ForeignError(
            f"{where}: the store holds state of {[g.rule for g in held.groups]}, but the parameter"
            f" groups of the optimizer need {[g.rule for g in store_plan.groups]}",
            hint="use the same optimizer and parameter groups, or export the weights and start with"
            " an empty store",
        )
    if held.staleness != (store_plan.staleness == 1):
        raise ForeignError(
            f"{where}: the store was trained with staleness {held.staleness}, but staleness"
            f" {store_plan.staleness} is requested",
            hint="keep the old staleness, or export the weights and start with an empty store",
        )
    if held.replicas != store_plan.replicas:
        raise ForeignError(
            f"{where} has replicas = {held.replicas}, but {store_plan.replicas} are requested",
            hint="keep the old replicas, or export the weights and start with an empty store",
        )


def fill_record(
    meta: StoreMeta,
    store_plan: StorePlan,
    chunk: Chunk,
    source: Source,
    groups: Sequence[Mapping[str, Any]],
) -> memoryview:
    """Return the initial record of `chunk`, with values from `source`.

    `groups` are the optimizer's parameter groups, without groups of residuals.
    """
    view = RecordView.empty(meta, chunk)
    view.fill(store_plan.table.params, source)
    if chunk.trainable:
        rule = store_plan.rules[chunk.group]
        hyper = rule.hyper(groups[chunk.group] if chunk.group < len(groups) else {})
        for i in range(len(chunk.spans)):
            start_state(view, i, rule, hyper)
    return view.view


def start_state(view: RecordView, span: int, rule: Rule, hyper: Sequence[float]) -> None:
    """Write the initial state of `rule` for one parameter of a chunk, whose state must be zero.

    `span` is the index of the parameter in `chunk.spans`.
    """
    row = np.array([view.piece(what, span)[0] for what in rule.scalars])
    rule.start(
        view.piece(MASTER, span), [view.piece(what, span) for what in rule.arrays], row, hyper
    )
    for what, value in zip(rule.scalars, row):
        view.piece(what, span)[0] = value
