"""A worker's session with the servers of its job, for one start of the job. Does NOT know modules
or optimizers: values are flat arrays by parameter index.
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
from roadtrain.servers.usage import Usage, disk_usage, process_usage
from roadtrain.servers.worker import Worker
from roadtrain.storage.convert import RecordView, Source, gather_param, param_pieces
from roadtrain.storage.meta import StoreMeta
from roadtrain.storage.tier import WEIGHTS

# The opened servers of a job; see local_servers.py for their methods.
JobServers = LocalServers | RemoteServers


class JobSession:
    """A worker's session with its servers.

    Attributes:
        stages: Seconds and bytes of each stage since the last `stages.take()`.
        step: The last committed step at the time when the session was opened.
    """

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
        self.servers, self.stages = servers, Stages(f"worker {servers.group.rank}")
        self.store_plan, self.group, self.step = servers.store_plan, servers.group, servers.step
        self.new = servers.new  # whether this worker must fill a new store
        self._own, self._host_bytes = None, budgets.host_bytes
        with undone_on_error(servers.abort):
            tier = None if residuals is None else residuals.open(self.meta.job, self.step, report)
            # ids of the previous session and of this session of this worker's residuals
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
                device_slots=budgets.worker.device.slots if budgets.worker.device else 0,
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
        """Write the initial records of a block of a new store, with values from `source`.

        `groups` are the optimizer's parameter groups.
        """
        self.worker.heap.trim(at_once=True)  # free the previous block, which the model has released
        for chunk in block.chunks:
            record = fill_record(self.meta, self.store_plan, chunk, source, groups)
            for number in self.worker.owners[chunk.id]:
                self.servers.fill(number, chunk.id, record)

    def start(self, blob: bytes) -> None:
        """Start all servers. For a new store, step 0 is committed with the job state `blob`."""
        self.worker.heap.trim(at_once=True)
        if self._own is not None:
            self._own.start()
        self.servers.start(blob)

    def read(self, name: str, what: str) -> np.ndarray:
        """Return an array of a parameter. All steps must have ended and must be committed.

        Master values and state arrays have the shape of the parameter, and a state scalar has shape
        (1,). The dtype is fp32, but master values of a frozen parameter have its own dtype. Raises
        ConfigError if the array does not exist.
        """
        return gather_param(self.meta, name, what, lambda c: self.servers.record_of(c, what))

    def pieces(self, name: str, what: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the array that `read` returns, chunk by chunk, as (index of the first element,
        values).

        Weights include updates that are not committed yet.
        """
        if what != WEIGHTS:
            yield from param_pieces(
                self.meta, name, what, lambda c: self.servers.record_of(c, what)
            )
            return
        for chunk, _, span in self.meta.where.get(name, ()):
            view = self.worker.pull_newest(chunk)
            yield span.origin, array_in(view, chunk.dtype, 0, chunk.numel)[span.start : span.stop]

    def rewrite(self, change: Callable[[RecordView], None], step: int, blob: bytes) -> None:
        """Apply `change` to every record. The store is then at `step`.

        Allowed only with local servers, and only after all steps are committed. If the store is on
        files, the change is atomic, and committed on return.
        """
        self.worker.rest()
        assert isinstance(self.servers, LocalServers)
        self.servers.rewrite(change, step, blob)
        self.worker.reset(step)

    def refill(self, change: Callable[[RecordView], None], step: int, blob: bytes) -> None:
        """Replace all contents of remote servers. The store is then at `step`.

        All workers must call this method. Worker 0 applies `change` to records of zeros and sends
        them. After a PeerError, the session cannot be used any more.
        """
        self.worker.rest()
        before = self.servers
        assert isinstance(before, RemoteServers)
        before.stop()
        before.close()
        self.servers = servers = before.again(step)
        if servers.numbers != before.numbers:
            raise LostError(
                f"new values must be written to servers {list(before.numbers)}, but only servers"
                f" {list(servers.numbers)} answer"
            )
        self.worker.links.update(servers.connect(self.worker.deliver, self.stages))
        if servers.new:
            for chunk in self.store_plan.table.chunks:
                view = RecordView.empty(self.meta, chunk)
                change(view)
                for number in self.worker.owners[chunk.id]:
                    servers.fill(number, chunk.id, view.view)
        servers.start(blob)
        self.worker.reset(step)

    def nbytes(self) -> int:
        """Return the size in bytes of the buffers of the worker and the servers of this process."""
        own = 0 if self._own is None else self._own.nbytes()
        return self.worker.nbytes() + self.servers.nbytes() + own

    def usage(self, kept_nbytes: int = 0) -> dict[str, Usage]:
        """Return the bytes in use and the budget of "host", "process", "device" (on an accelerator)
        and "disk" (with a store on files of this host).

        `kept_nbytes`: bytes of host memory in use that the session does not know.
        """
        out = {"host": Usage(bytes=self.nbytes() + kept_nbytes, budget=self._host_bytes)}
        if (buffers := self.worker.buffers.on_device) is not None:
            device = buffers.accelerator
            out["device"] = Usage(bytes=device.held, budget=sum(device.budgets))
        out["process"] = process_usage()
        tiers = [] if self.servers.store is None else [*self.servers.store.tiers]
        if self._own is not None and self._own.tier is not None:
            tiers.append(self._own.tier)
        return out | ({"disk": disk_usage(tiers)} if tiers else {})

    def close(self) -> None:
        """Close everything. Raises DeadlineError if threads of a server do not end in time."""
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
                hint="check whether the storage device still responds",
            )
