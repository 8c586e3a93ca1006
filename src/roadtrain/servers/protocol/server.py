"""The state machine of a server. Events and messages in, actions out; no I/O, no threads, no clock.

The messages and actions of a chunk in one step (servers/protocol/chunk_state.py has the phases):
    Push -> Hold -> Done      the server holds the gradient
    ApplyUpdate               the update is queued by (step, order) until a record buffer is free
    Read -> Done              skipped if the record is in memory
    Update -> Done            the new version exists; waiting pulls are answered
    Write -> Done             skipped if there are no files
When a step has ended and all its updates are written, the step is prepared and committed
(servers/protocol/server_steps.py). With several workers, ApplyUpdate, EndStep and Commit take
effect once all workers have sent them, and the gradients are summed before the update:
    Close or ApplyUpdate of all -> Total -> Done      all get the norm of the sum (GradAccumulated)

With staleness 1, the weights part of a record is one update behind its master. A pull gets the
weights part or the master, whichever has the requested version. Messages about the next step wait
until this step's update is done. Gradients among them that cannot stay in their receive buffers are
spilled.

Rule 3: a chunk is written for step s only after step s-1 is committed, so the committed record is
never overwritten. Rule 4: only resident records and a fixed number of other records are in memory.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from roadtrain.errors import LoopError, LostError
from roadtrain.servers.protocol import messages as m
from roadtrain.servers.protocol.chunk_state import AFTER_UPDATE, ChunkPhase, ChunkState, Early
from roadtrain.servers.protocol.queues import Turns
from roadtrain.servers.protocol.server_steps import ServerSpec, ServerSteps


class ServerStateMachine:
    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.steps = ServerSteps(spec)
        self.chunks = {number: ChunkState(part) for number, part in spec.chunks.items()}
        for number, in_last_step in spec.delayed.items():
            self.chunks[number].master_from = 0 if in_last_step else -1
        # Free record buffers. Each buffer is either free or held by exactly one chunk.
        self.free = list(range(spec.buffers))
        # Heaps of (step, order, chunk) with all chunks that have a queued update. Chunks whose
        # record is resident need no buffer and have a heap of their own.
        self.queue: list[tuple[int, int, int]] = []
        self.resident_queue: list[tuple[int, int, int]] = []
        self.updating = 0  # number of resident chunks that are UPDATING; at most spec.at_once
        # Chunks that are UPDATED and whose write waits for a commit. Only used with files.
        self.gated: deque[int] = deque()
        self.turns: Turns[m.Pull] = Turns(spec.answers)
        self.lost: str | None = None  # message about the worker that was lost

    @property
    def committed(self) -> int:
        return self.steps.committed

    def handle(self, event: m.Event) -> list[m.Action]:
        """Handle a message or an event, and return the next actions.

        Raises LostError if a step needs a worker whose link was lost. Raises LoopError if workers
        request contradictory updates of a chunk.
        """
        match event:
            case m.Pull():
                return self._pull(event)
            case m.Push() | m.Close() | m.ApplyUpdate() | m.DiscardGrad():
                return self._gradient(event)
            case m.EndStep():
                self._nobody_lost()
                return self.steps.end(event)
            case m.Commit():
                return self.steps.commit(event)
            case m.CommitDone(step):
                return self._committed(step)
            case m.PeerLost():
                return self._peer_lost(event)
            case m.Done(action, result):
                return self._done(action, result)

    def _done(self, action: m.Action, result: tuple[Any, ...]) -> list[m.Action]:
        match action:
            case m.Answer(pull):
                return self._answered(pull)
            case m.Hold(push):
                return self._held(push, *result)
            case m.Spill():
                return self._spilled(action)
            case m.Total(chunk):
                return [m.Send(m.GradAccumulated(chunk, *result))]
            case m.Read(chunk):
                return self._read(chunk)
            case m.Update(chunk):
                return self._updated(chunk, *result)
            case m.Write(chunk):
                return self._written(chunk)
            case m.Prepare(step):
                return self._prepared(step)
        raise AssertionError(f"unexpected report that {action} is done")

    # lost workers

    def _peer_lost(self, event: m.PeerLost) -> list[m.Action]:
        """Record a lost worker. Raises LostError only if a step is open, because between steps all
        workers may be leaving.
        """
        step = self.committed + 1
        self.lost = f"worker {event.worker} was lost before step {step} was committed: {event.why}"
        if self.steps.busy or any(chunk.in_step for chunk in self.chunks.values()):
            raise LostError(self.lost)
        return []

    def _nobody_lost(self) -> None:
        if self.lost is not None:
            raise LostError(self.lost)

    # pulls

    def _pull(self, pull: m.Pull) -> list[m.Action]:
        chunk = self.chunks[pull.chunk]
        if chunk.version < pull.version or chunk.changing:
            chunk.pulls.append(pull)
            return []
        self.turns.ask(pull.worker, pull)
        return self._answers()

    def _answers(self) -> list[m.Action]:
        """Return the answers to the pulls that may be answered now."""
        out: list[m.Action] = []
        while (pull := self.turns.next()) is not None:
            chunk = self.chunks[pull.chunk]
            if chunk.changing:  # the update began while the pull waited for its turn
                self.turns.answered(pull.worker)
                chunk.pulls.append(pull)
            else:
                out.append(self._answer(chunk, pull))
        return out

    def _answer(self, chunk: ChunkState, pull: m.Pull) -> m.Answer:
        chunk.answering += 1
        newest = chunk.master_from is not None and pull.version >= chunk.master_from
        kept = chunk.resident if newest else chunk.in_memory
        return m.Answer(pull, kept or chunk.phase in AFTER_UPDATE, newest)

    def _answered(self, pull: m.Pull) -> list[m.Action]:
        chunk = self.chunks[pull.chunk]
        chunk.answering -= 1
        self.turns.answered(pull.worker)
        out: list[m.Action] = [
            m.Send(m.Pulled(pull.ticket, pull.chunk), pull.worker),
            *self._answers(),
        ]
        if chunk.answering == 0 and chunk.phase is ChunkPhase.READ:
            out.append(self._update(pull.chunk, chunk))
        self._finish_write(chunk)
        return out + self._advance()

    def _answer_waiting(self, chunk: ChunkState) -> list[m.Action]:
        ready = [pull for pull in chunk.pulls if pull.version <= chunk.version]
        chunk.pulls = [pull for pull in chunk.pulls if pull.version > chunk.version]
        for pull in ready:
            self.turns.ask(pull.worker, pull)
        return self._answers()

    # gradients

    def _gradient(self, event: m.GradientMessage) -> list[m.Action]:
        if not isinstance(event, m.DiscardGrad):
            self._nobody_lost()
        if isinstance(event, m.ApplyUpdate):
            self.steps.update_requested(event.step, event.chunk)
        chunk = self.chunks[event.chunk]
        if chunk.update_due or chunk.is_ahead(event.worker):
            return self._set_aside(chunk, event)
        match event:
            case m.Push():
                chunk.holds.append(event)
                return [m.Hold(event)] if len(chunk.holds) == 1 else []
            case m.Close():
                chunk.closed.setdefault(event.step, set()).add(event.worker)
                return self._meet(event.chunk)
            case m.ApplyUpdate():
                return self._update_requested(chunk, event)
            case m.DiscardGrad():
                if not chunk.holds:
                    return self._discard(chunk, event)
                chunk.holds.append(event)  # an earlier push is still being held
                return []

    def _set_aside(self, chunk: ChunkState, event: m.GradientMessage) -> list[m.Action]:
        """Keep a message about the chunk's next step until its current update is done."""
        if not isinstance(event, m.Push) or not self._in_the_way(event):
            chunk.early.append(event)
            return []
        spill = m.Spill(event, chunk.next_spill_slot(self.spec.workers))
        chunk.early.append(spill)
        return [spill]

    def _in_the_way(self, push: m.Push) -> bool:
        """Return whether a push must be spilled, because its receive buffer must become free."""
        if push.keep or not self.spec.durable:
            return False
        return push.sums is None and push.spill_slot is None

    def _spilled(self, spill: m.Spill) -> list[m.Action]:
        push, chunk = spill.push, self.chunks[spill.chunk]
        at = next(i for i, message in enumerate(chunk.early) if message is spill)
        chunk.early[at] = replace(push, grad=None, spill_slot=spill.spill_slot)
        return [m.Send(m.BufferFree(push.ticket), push.worker), *self._in_turn(chunk)]

    def _in_turn(self, chunk: ChunkState) -> list[m.Action]:
        """Handle the kept messages about the chunk's next step, up to a push that is still being
        spilled.
        """
        out: list[m.Action] = []
        early: deque[Early] = deque(chunk.early)
        chunk.early = []
        while early and not isinstance(early[0], m.Spill):
            event = early.popleft()
            assert not isinstance(event, m.Spill)
            out += self.handle(event)
        chunk.early += early
        return out

    def _held(self, push: m.Push, sums: Any, kept: bool) -> list[m.Action]:
        chunk = self.chunks[push.chunk]
        chunk.holds.popleft()
        out: list[m.Action] = []
        if self.spec.alone:
            out.append(m.Send(m.GradAccumulated(push.chunk, sums)))
        if push.spill_slot is not None:
            chunk.spill_slots.remove(push.spill_slot)
        elif kept:
            chunk.kept.append((push.worker, push.ticket))
        else:
            out.append(m.Send(m.BufferFree(push.ticket), push.worker))
        while chunk.holds and isinstance(discard := chunk.holds[0], m.DiscardGrad):
            chunk.holds.popleft()
            out += self._discard(chunk, discard)
        if chunk.holds and isinstance(following := chunk.holds[0], m.Push):
            out.append(m.Hold(following))
        return out + self._meet(push.chunk) + self._advance()

    def _discard(self, chunk: ChunkState, event: m.DiscardGrad) -> list[m.Action]:
        assert chunk.queued is None
        chunk.summed_in = None  # the next gradient must be summed again
        return [m.Discard(event.chunk, event.worker), *self._free_kept(chunk, event.worker)]

    def _free_kept(self, chunk: ChunkState, worker: int | None = None) -> list[m.Action]:
        return [m.Send(m.BufferFree(ticket), to) for to, ticket in chunk.free_kept(worker)]

    # updates

    def _update_requested(self, chunk: ChunkState, update: m.ApplyUpdate) -> list[m.Action]:
        if self.spec.alone:
            self._enqueue(chunk, update)
            return self._advance()
        updates = chunk.updates.setdefault(update.step, {})
        assert update.worker not in updates, f"chunk {update.chunk} is asked to update twice"
        updates[update.worker] = update
        if chunk.summed_in is None or chunk.summed_in < update.step:
            chunk.closed.setdefault(update.step, set()).add(update.worker)
        return self._meet(update.chunk) + self._advance()

    def _enqueue(self, chunk: ChunkState, update: m.ApplyUpdate) -> None:
        assert chunk.queued is None, f"chunk {update.chunk} is asked to update twice"
        chunk.queued = update
        queue = self.resident_queue if chunk.resident else self.queue
        heapq.heappush(queue, (update.step, update.order, update.chunk))

    def _next_step(self, chunk: ChunkState) -> int:
        """Return the step whose update makes the chunk's next version."""
        return self.spec.committed + chunk.version + 1

    def _meet(self, number: int) -> list[m.Action]:
        """Sum a chunk's gradients once all workers have closed them, and queue its update once all
        have requested it.

        Only the chunk's next step is handled, so no gradient is used in the wrong step.
        """
        chunk = self.chunks[number]
        if chunk.holds or self.spec.alone:
            return []
        step, workers = self._next_step(chunk), self.spec.workers
        out: list[m.Action] = []
        if len(chunk.closed.get(step, ())) == workers:
            del chunk.closed[step]
            chunk.summed_in = step
            out.append(m.Total(number))
        if len(chunk.updates.get(step, ())) < workers:
            return out
        updates = chunk.updates.pop(step)
        update = agreed([updates[worker] for worker in range(workers)])
        if any(scale is not None for scale in update.scales):
            self._enqueue(chunk, update)
            return out
        chunk.version += 1  # no worker has a gradient, so the values do not change
        self.steps.update_over(step, number)
        out += [m.Discard(number, None), *self._free_kept(chunk), *self._answer_waiting(chunk)]
        return out + self._meet(number) + self._in_turn(chunk) + self.steps.prepare()

    def _read(self, number: int) -> list[m.Action]:
        chunk = self.chunks[number]
        if chunk.answering and chunk.in_memory:
            chunk.enter(ChunkPhase.READ)  # memory must not change while pulls copy from it
            return []
        return [self._update(number, chunk)]

    def _update(self, number: int, chunk: ChunkState) -> m.Update:
        assert chunk.active is not None
        chunk.enter(ChunkPhase.UPDATING)
        self.updating += chunk.resident
        return m.Update(number, chunk.active)

    def _updated(self, number: int, checksum: int = 0) -> list[m.Action]:
        chunk = self.chunks[number]
        chunk.enter(ChunkPhase.UPDATED)
        assert chunk.active is not None
        self.steps.updated(chunk.active.step, number, checksum)
        self.updating -= chunk.resident
        chunk.version += 1
        if chunk.master_from is not None:
            chunk.master_from = chunk.version
        out = [
            *self._free_kept(chunk),
            *self._answer_waiting(chunk),
            *self._meet(number),
            *self._in_turn(chunk),
        ]
        if not self.spec.durable:
            return out + self._written(number)
        self.gated.append(number)
        return out + self._advance()

    def _written(self, number: int) -> list[m.Action]:
        chunk = self.chunks[number]
        assert chunk.active is not None
        chunk.enter(ChunkPhase.WRITTEN)
        self.steps.update_over(chunk.active.step, number)
        chunk.active = None
        self._finish_write(chunk)
        return self.steps.prepare() + self._advance()

    def _finish_write(self, chunk: ChunkState) -> None:
        """Free the buffer of a written chunk once no pull copies from it."""
        if chunk.phase is not ChunkPhase.WRITTEN or chunk.answering:
            return
        chunk.enter(ChunkPhase.IDLE)
        if chunk.buffer is not None:
            self.free.append(chunk.buffer)
            chunk.buffer = None

    def _prepared(self, step: int) -> list[m.Action]:
        report = self.steps.prepared(step)
        return [report, *(self._advance() if self.spec.commits else []), *self.steps.prepare()]

    def _committed(self, step: int) -> list[m.Action]:
        if step <= self.committed:
            return []  # another worker has reported it
        self.steps.committed = step
        return self._advance() + self.steps.prepare()

    def _advance(self) -> list[m.Action]:
        """Start all updates and reads that can start, and all writes whose previous step is
        committed.
        """
        return [
            *self._start_writes(),
            *self._start_updates(self.resident_queue, lambda: self.updating < self.spec.at_once),
            *self._start_updates(self.queue, lambda: bool(self.free)),
        ]

    def _start_writes(self) -> list[m.Action]:
        out: list[m.Action] = []
        waiting: deque[int] = deque()
        for number in self.gated:
            chunk = self.chunks[number]
            assert chunk.active is not None
            if self.committed >= chunk.active.step - 1 and not chunk.answering:
                chunk.enter(ChunkPhase.WRITING)
                out.append(m.Write(number))
            else:
                waiting.append(number)
        self.gated = waiting
        return out

    def _start_updates(
        self, queue: list[tuple[int, int, int]], room: Callable[[], bool]
    ) -> list[m.Action]:
        out: list[m.Action] = []
        later: list[tuple[int, int, int]] = []
        while queue and room():
            entry = heapq.heappop(queue)
            number = entry[2]
            chunk = self.chunks[number]
            read_by_pulls = chunk.resident and chunk.answering
            if chunk.phase is not ChunkPhase.IDLE or chunk.holds or read_by_pulls:
                later.append(entry)
                continue
            assert chunk.queued is not None and chunk.active is None
            chunk.active, chunk.queued = chunk.queued, None
            if chunk.resident:
                out.append(self._update(number, chunk))
            else:
                chunk.enter(ChunkPhase.READING)
                chunk.buffer = self.free.pop()
                out.append(m.Read(number, chunk.buffer))
        for entry in later:
            heapq.heappush(queue, entry)
        return out

    # status and checks

    def waits(self) -> tuple[list[m.Pull], list[tuple[int, str]]]:
        """Return the waiting pulls, and for each missing message a pair: the worker that has not
        sent it, and its description.
        """
        ending = self.steps.ending.items()
        owed = [(step, ended, f"the end of step {step}") for step, ended in ending]
        for number, chunk in self.chunks.items():
            step = self._next_step(chunk)
            if closed := chunk.closed.get(step):
                owed.append((step, closed, f"the gradient of chunk {number} in step {step}"))
            if updates := chunk.updates.get(step):
                owed.append((step, set(updates), f"the update of chunk {number} in step {step}"))
        owed.sort(key=lambda row: row[0])
        pulls = [pull for chunk in self.chunks.values() for pull in chunk.pulls]
        pulls += [pull for waiting in self.turns.waiting.values() for pull in waiting]
        everybody = range(self.spec.workers)
        return pulls, [(w, what) for _, done, what in owed for w in everybody if w not in done]

    def check(self) -> None:
        """Assert every invariant."""
        chunks = self.chunks.values()
        used = [chunk.buffer for chunk in chunks if chunk.buffer is not None]
        assert sorted(used + self.free) == list(range(self.spec.buffers))
        queued = sorted(number for _, _, number in (*self.queue, *self.resident_queue))
        assert queued == sorted(n for n, chunk in self.chunks.items() if chunk.queued is not None)
        assert all(self.chunks[number].resident for _, _, number in self.resident_queue)
        assert self.updating == sum(c.resident and c.phase is ChunkPhase.UPDATING for c in chunks)
        assert self.updating <= self.spec.at_once
        assert sorted(self.gated) == sorted(
            n for n, chunk in self.chunks.items() if chunk.phase is ChunkPhase.UPDATED
        )
        for chunk in chunks:
            chunk.check(self._next_step(chunk), self.spec.workers)
        for step, numbers in self.steps.open_updates.items():
            open_now = {n for n, chunk in self.chunks.items() if step in chunk.open_steps()}
            assert numbers == open_now, (step, numbers, open_now)
        self.steps.check()
        self.turns.check()


def agreed(updates: Sequence[m.ApplyUpdate]) -> m.ApplyUpdate:
    """Merge the requests of all workers (in worker order) to update a chunk into one request.

    If only some workers have a gradient of a parameter, their scale is used. Raises LoopError if
    requests contradict each other, because the models or loops of workers differ.
    """
    scales: list[float | None] = list(updates[0].scales)
    for other in updates[1:]:
        if len(other.scales) != len(scales) or other.hyper != updates[0].hyper:
            raise LoopError(
                f"workers 0 and {other.worker} request different updates of chunk {other.chunk} in"
                f" step {other.step}: {len(scales)} and {len(other.scales)} parameters, with the"
                f" hyperparameters {updates[0].hyper} and {other.hyper}",
                hint="run the same loop with the same optimizer on every worker",
            )
        for i, (mine, theirs) in enumerate(zip(scales, other.scales)):
            if mine is None:
                scales[i] = theirs
            elif theirs is not None and not _same_scale(mine, theirs):
                raise LoopError(
                    f"workers 0 and {other.worker} scale the same gradient of step {other.step} by"
                    f" different factors, {mine} and {theirs}",
                    hint="clip by roadtrain's norm, which is the norm of the mean gradient",
                )
    return replace(updates[0], scales=tuple(scales))


def _same_scale(a: float, b: float) -> bool:
    """Return whether two scales are equal. NaN equals NaN, which all workers have after
    divergence.
    """
    return a == b or (a != a and b != b)
