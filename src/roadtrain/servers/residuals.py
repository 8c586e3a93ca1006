"""The residuals of error feedback: gradients that compression has not sent yet (kernels/codecs.py).

The residuals of a block form a separate block, which is pulled, pushed, committed and resumed like
parameters. With remote servers, a separate server in the worker's process stores the residuals. It
prepares each step before the other servers commit it. If this server lacks the step from which the
job resumes, the residuals start at zero, and the user is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from roadtrain.chunks import ChunkTable, ParamSpec, Record
from roadtrain.device.buffers import Buffer
from roadtrain.kernels.rule import Rule
from roadtrain.options.budgets import RecordBudgets
from roadtrain.retry import undone_on_error
from roadtrain.servers.server import Server, ServerConfig
from roadtrain.servers.store_plan import StorePlan
from roadtrain.servers.trace import Stages
from roadtrain.storage.file import FileTier
from roadtrain.storage.generation import create_part, open_part, publish_part
from roadtrain.storage.meta import StoreMeta

Report = Callable[[str], None]


class Replace(Rule):
    """An update rule that replaces the value with the gradient."""

    name = "replace"
    arrays: tuple[str, ...] = ()
    reads_state = False

    def hyper(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return ()

    def apply(self, p: Any, grad: Any, *_: Any) -> None:
        p[:] = grad

    def reference(self, *args: Any) -> None:
        self.apply(*args)


def residual_blocks(table: ChunkTable, groups: int) -> list[tuple[str, list[ParamSpec]]]:
    """Return the name and parameters of a residual block for every block with trainable parameters.

    For each run of trainable parameters (chunks.Run), the residual block has a run of fp32
    residuals with the same element offsets. Its i-th run is in parameter group `groups + i`.
    """
    out = []
    for block in table.blocks:
        specs = []
        for i, run in enumerate(r for r in block.runs if r.trainable):
            for span in run.spans:
                p = table.params[span.param]
                specs.append(ParamSpec(f"residual:{p.name}", p.shape, "fp32", True, groups + i))
        if specs:
            out.append((f"residual:{block.name}", specs))
    return out


def residual_block_of(table: ChunkTable) -> dict[int, int]:
    """Return a dict from each block of `table` with residuals to the block of its residuals."""
    names = {block.name: block.index for block in table.blocks}
    found = {block.index: names.get(f"residual:{block.name}") for block in table.blocks}
    return {block: residuals for block, residuals in found.items() if residuals}


@dataclass(frozen=True)
class Residuals:
    """The residuals of a worker whose servers are remote."""

    # plan of a store in one directory; its table has the model's blocks, then the residual blocks
    store_plan: StorePlan
    base: int  # number of chunks of the model; all later chunks are residuals
    number: int  # number of the residuals' server, which follows the job's servers

    @property
    def directory(self) -> Path:
        return self.store_plan.directories[0]

    @property
    def records(self) -> Mapping[int, Record]:
        return self.meta().owned(self.number)

    def meta(self, job: str = "") -> StoreMeta:
        owners = tuple(
            self.number if chunk.id >= self.base else -1 for chunk in self.store_plan.table.chunks
        )
        return replace(
            self.store_plan.meta(job),
            owners=owners,
            directories=("",) * (self.number + 1),
            index=self.number,
        )

    def open(self, job: str, step: int, report: Report) -> FileTier:
        """Open the residuals of `job` at `step`. If there are none, make residuals that are zero.

        Raises StoreError, for example ForeignError if the directory belongs to another job.
        """
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
        with undone_on_error(tier.close):
            for chunk, record in meta.owned(self.number).items():
                tier.write(chunk, "record", Buffer(record.nbytes).view)
            tier.prepare(step, b"")
            tier.committed(step)
            for line in publish_part(self.directory):
                report(line)
        if step:
            report(
                f"lossy: residuals start at zero, because {self.directory} has none of step {step}"
                f" (found steps: {', '.join(map(str, steps)) or 'none'})"
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
        setup = ServerConfig(
            self.number,
            f"residuals ({self.directory})",
            tier.meta,
            self.store_plan.rules,
            tier,
            budgets,
            report,
        )
        return Server(setup, lambda message, _: deliver(message), stages, tier.step)
