"""JobSession: one start of a job as a worker sees it, its links to the job's servers, wherever they
run: in this process (local_servers.py) or elsewhere (remote_servers.py).

Does NOT know modules or optimizers: values come in as flat arrays by parameter index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from roadtrain.chunks import Block
from roadtrain.device.buffers import array_in
from roadtrain.errors import DeadlineError, LostError
from roadtrain.kernels.codecs import Compressor
from roadtrain.options.budgets import Budgets
from roadtrain.retry import undone_on_error
from roadtrain.servers.local_servers import LocalServers
from roadtrain.servers.protocol.worker import WorkerSetup
from roadtrain.servers.remote_servers import RemoteServers
from roadtrain.servers.residuals import Residuals, residual_block_of
from roadtrain.servers.store_plan import fill_record
from roadtrain.servers.trace import Stages
from roadtrain.servers.worker import Worker
from roadtrain.storage.convert import RecordView, Source, gather_param, param_pieces
from roadtrain.storage.meta import StoreMeta
from roadtrain.storage.tier import WEIGHTS

# The servers of a job, opened; local_servers.py says what they do.
JobServers = LocalServers | RemoteServers


class JobSession:
    """`stages`: seconds and bytes since the last take. `step`: the last committed one when it
    was opened."""

    def __init__(
        self,
        servers: JobServers,
        budgets: Budgets,
        device: torch.device,
        *,
        compute_blocks: Sequence[int],
        compressor: Compressor | None,
        deadline_s: float,
        residuals: Residuals | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        self.servers, self.stages = servers, Stages()
        self.store_plan, self.group, self.step = servers.store_plan, servers.group, servers.step
        self.new = servers.new  # the store is to be filled, by this worker
        self._own = None
        with undone_on_error(servers.abort):
            tier = None if residuals is None else residuals.open(self.meta.job, self.step, report)
            # the sessions that trained this worker's residuals: the one before, and this one
            self.residual_sessions = ("", "") if tier is None else tier.ledger.begin_session()
            table, own = self.store_plan.table, None
            holders = [
                tuple(s for s in self.meta.holders(c.id) if s in servers.numbers)
                for c in table.chunks
            ]
            if residuals is not None:
                table, own = residuals.store_plan.table, residuals.number
                holders += [(own,)] * (len(table.chunks) - residuals.base)
            setup = WorkerSetup(
                table,
                holders,
                servers=[*servers.numbers, *([] if own is None else [own])],
                committed=self.step,
                compute_blocks=compute_blocks,
                slots=budgets.worker.slots,
                buffers=budgets.worker.push_buffers,
                workers=self.group.workers,
                staleness=self.store_plan.staleness,
                replicas=self.store_plan.replicas,
                own=own,
                residual_block=residual_block_of(table),
            )
            self.worker = Worker(
                setup,
                budgets.worker,
                device,
                self.stages,
                deadline_s=deadline_s,
                compressor=compressor,
            )
            self.worker.links.update(servers.connect(self.worker.deliver, self.stages))
            if residuals is not None and tier is not None:
                self._own = residuals.server(
                    tier, budgets.records, self.worker.deliver, self.stages, report
                )
                self.worker.links[residuals.number] = self._own

    @property
    def meta(self) -> StoreMeta:
        return self.servers.meta

    @property
    def blob(self) -> bytes:
        return self.servers.blob

    def fill(self, block: Block, source: Source, groups: Sequence[Mapping[str, Any]]) -> None:
        """First contents of one block of a new store: what `source` gives, then what each rule
        starts with. `groups`: the optimizer's."""
        self.worker.heap.trim(at_once=True)  # of the block before, which the model has released
        for chunk in block.chunks:
            record = fill_record(self.meta, self.store_plan, chunk, source, groups)
            for number in self.worker.owners[chunk.id]:
                self.servers.fill(number, chunk.id, record)

    def start(self, blob: bytes) -> None:
        """Step 0 of a new store is committed with `blob`; then all serve."""
        self.worker.heap.trim(at_once=True)
        if self._own is not None:
            self._own.start()
        self.servers.start(blob)

    def read(self, name: str, what: str) -> np.ndarray:
        """One parameter's master (fp32; a frozen one's own dtype) or state array, in its shape, or
        a scalar as an array of one. Only while no step is open or uncommitted. Raises ConfigError
        for what is not there.
        """
        return gather_param(self.meta, name, what, lambda c: self.servers.record_of(c, what))

    def pieces(self, name: str, what: str) -> Iterator[tuple[int, np.ndarray]]:
        """As `read`, flat and a chunk at a time: (its first element, values); of the weights part
        without waiting for a commit, which needs all workers."""
        if what != WEIGHTS:
            yield from param_pieces(
                self.meta, name, what, lambda c: self.servers.record_of(c, what)
            )
            return
        for chunk, _, span in self.meta.where.get(name, ()):
            view = self.worker.pull_newest(chunk)
            yield span.origin, array_in(view, chunk.dtype, 0, chunk.numel)[span.start : span.stop]

    def rewrite(self, change: Callable[[RecordView], None], step: int, blob: bytes) -> None:
        """Between steps, all of which are committed: `change` is made to every record, and the
        whole counts as `step`. On files all of it or, where this raises, nothing; it is
        committed on return. Only where the servers are local."""
        self.worker.rest()
        assert isinstance(self.servers, LocalServers)
        self.servers.rewrite(change, step, blob)
        self.worker.begin_again(step)

    def refill(self, change: Callable[[RecordView], None], step: int, blob: bytes) -> None:
        """As `rewrite`, where the servers are elsewhere; by all workers together. `change`: of
        worker 0, made to records of zeros. Raises PeerError: the session is of no use then."""
        self.worker.rest()
        before = self.servers
        assert isinstance(before, RemoteServers)
        before.stop()
        before.close()
        self.servers = servers = before.again(step)
        if servers.numbers != before.numbers:
            raise LostError(
                f"servers {list(before.numbers)} were filled anew, and now {list(servers.numbers)}"
                " answer"
            )
        self.worker.links.update(servers.connect(self.worker.deliver, self.stages))
        if servers.new:
            for chunk in self.store_plan.table.chunks:
                view = RecordView.empty(self.meta, chunk)
                change(view)
                for number in self.worker.owners[chunk.id]:
                    servers.fill(number, chunk.id, view.view)
        servers.start(blob)
        self.worker.begin_again(step)

    def nbytes(self) -> int:
        """Memory held by buffers of the worker and of servers of this process."""
        own = 0 if self._own is None else self._own.nbytes()
        return self.worker.nbytes() + self.servers.nbytes() + own

    def close(self) -> None:
        """DeadlineError where a server's threads hang; all else is closed nevertheless."""
        deadline_s = self.worker.deadline_s
        late = self.servers.stop()
        if self._own is not None and self._own.tier is not None:
            late += self._own.stop(deadline_s)
            self._own.tier.close()
        self.worker.close()
        self.servers.close()
        if late:
            raise DeadlineError(
                f"waited {deadline_s:.0f} s for threads to end: {', '.join(late)}",
                hint="does the device still answer?",
            )
