"""Residuals of error feedback where the servers are elsewhere: what this worker has not sent rests
on its own host.

They are the part of one more server, which only this worker knows and which runs in its process. It
prepares each step before the others commit it (protocol/commit.py), so after a kill it is at the
step that the job goes on from (Rule 3). Where it is not (the worker is on another host now, or all
went back to a snapshot), residuals begin at zero, and that is said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roadtrain.chunks import ChunkTable, Record
from roadtrain.config.budgets import RecordBudgets
from roadtrain.device.buffers import Buffer
from roadtrain.runtime.server import Server, Setup
from roadtrain.runtime.store_plan import StorePlan
from roadtrain.runtime.trace import Stages
from roadtrain.storage.file import FileTier
from roadtrain.storage.generation import create_part, open_part, publish_part
from roadtrain.storage.ledger import StoreMeta

Report = Callable[[str], None]


@dataclass(frozen=True)
class Residuals:
    """`store_plan`: the model's blocks and behind them their twins (runtime/compress.py), with one
    directory. `base`: the chunks of the model; all others are this part's. `number`: of its server,
    one more than the last of the job's.
    """

    store_plan: StorePlan
    base: int
    number: int

    @property
    def table(self) -> ChunkTable:
        return self.store_plan.table

    @property
    def directory(self) -> Path:
        return self.store_plan.directories[0]

    @property
    def records(self) -> Mapping[int, Record]:
        return self.meta().owned(self.number)

    def meta(self, job: str = "") -> StoreMeta:
        owners = tuple(self.number if chunk.id >= self.base else -1 for chunk in self.table.chunks)
        return replace(
            self.store_plan.meta(job),
            owners=owners,
            directories=("",) * (self.number + 1),
            index=self.number,
        )

    def open(self, job: str, step: int, report: Report) -> FileTier:
        """At `step` of `job`. Raises ForeignError where the directory holds another job's,
        StoreError."""
        meta, steps = self.meta(job), tuple[int, ...]()
        if (found := open_part(self.directory, direct=self.store_plan.direct)) is not None:
            same, steps = (
                (found.meta.job, found.meta.signature) == (job, meta.signature),
                found.found,
            )
            found.close()
            if same and step in steps:
                part = open_part(self.directory, step, direct=self.store_plan.direct)
                assert part is not None
                if part.note:
                    report(part.note)
                return part
        tier = create_part(self.directory, meta, direct=self.store_plan.direct)
        try:
            for chunk, record in meta.owned(self.number).items():
                tier.write(chunk, "record", Buffer(record.nbytes).view)
            tier.prepare(step, b"")
            tier.committed(step)
            for line in publish_part(self.directory):
                report(line)
        except BaseException:
            tier.close()
            raise
        if step:
            report(
                f"lossy: {self.directory} has residuals of step(s)"
                f" {', '.join(map(str, steps)) or 'none'}, not of {step}: they begin at zero"
            )
        return tier

    def server(
        self,
        tier: FileTier,
        budgets: RecordBudgets,
        deliver: Callable[[Any], None],
        stages: Stages,
        report: Report,
    ) -> Server:
        setup = Setup(
            self.number,
            f"residuals ({self.directory})",
            tier.meta,
            self.store_plan.rules,
            tier,
            budgets,
            report,
        )
        return Server(setup, lambda message, _: deliver(message), stages, tier.step)
