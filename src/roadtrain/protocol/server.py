"""What a server does next. Events and messages in, actions out; no I/O, no threads, no clock.

A chunk's way through one step:
    Push -> Hold -> Done                the gradient rests here (HELD)
    ApplyUpdate                             wanted: queued by (step, order) until a record buffer is
                                        free
    Read -> Done                        READING  (skipped where the record is kept in memory)
    Update -> Done                      UPDATING; the new version exists: waiting pulls are answered
                                        at once
    Write -> Done                       WRITING  (skipped where nothing rests on files)
When a step is sealed and all its releases are written, the step is prepared (first server:
committed when told). With replicas a server first says what it has written (Written), and prepares
when the workers have compared that. With several workers ApplyUpdate, EndStep and Commit count once
all have sent theirs (`_meet`); what they push is summed first:
    Close or ApplyUpdate of all -> Total -> Done      all are told the sum's norm (GradAccumulated)

With staleness 1 the weights part of a record is one update behind its master: a pull gets the one
or the other, so the next step computes while this one's updates run. What is said of the next step
before then waits in `early`; gradients that cannot wait where they lie are written away (Push ->
Spill -> Done), for what this step needs may come behind them.

Rule 3: a chunk is written for step s only when step s-1 is committed, so the slot that is
overwritten is never the committed one. Rule 4: at most `buffers` records are away from their files
at once.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from roadtrain.errors import LoopError, LostError
from roadtrain.protocol import messages
from roadtrain.protocol.commit import added
from roadtrain.protocol.queues import Turns

IDLE, READING, UPDATING, WRITING = "idle", "reading", "updating", "writing"
# updates of resident chunks that are begun: pulls of those that are not begun go on being answered
AT_ONCE = 2


@dataclass(slots=True)
class ChunkState:
    """`resident`: the record (or, if `public_resident`, its weights part) is kept in memory for
    good: 0 buffers. READING, UPDATING, WRITING hold one record buffer unless resident. `release`
    waits in the queue; `active` is being carried out (the next step's release may arrive while this
    step's record is still being written).
    """

    resident: bool
    weights_resident: bool
    version: int = 0
    phase: str = IDLE
    buffer: int | None = None
    # the first is a Push that is being carried out
    holds: deque[messages.Push | messages.DiscardGrad] = field(default_factory=deque)
    # (worker, ticket) of pushes whose memory is in use
    kept: list[tuple[int, int]] = field(default_factory=list)
    # step -> workers whose gradient of it is whole
    closed: dict[int, set[int]] = field(default_factory=dict)
    totalled: int = -1  # the last step whose sum was taken
    # step -> what workers released so far
    said: dict[int, dict[int, messages.ApplyUpdate]] = field(default_factory=dict)
    apply_update: messages.ApplyUpdate | None = None
    active: messages.ApplyUpdate | None = None
    answering: int = 0  # pulls being answered, from the file or from memory
    read: bool = False  # the record is in its buffer, the update waits for `answering` to end
    # each waits for a newer version, or for the update to end
    pulls: list[messages.Pull] = field(default_factory=list)
    late: bool = False  # the weights part is that before the update to version `updated`
    updated: int = -1
    # messages about a step whose turn has not come; a Spill under way
    early: list[Any] = field(default_factory=list)
    spill_slots: set[int] = field(default_factory=set)  # of what was stashed and is not yet held

    @property
    def in_memory(self) -> bool:
        return self.resident or self.weights_resident


class ServerStateMachine:
    """One server's decisions. `chunks`: chunk -> (record resident, public resident). `durable`:
    records rest on files.
    `base`: the step at which this session of `workers` workers began. `alone`: one worker that is
    no relay. `late`: chunks whose weights part is one update behind -> whether the last update was
    in step `base`. `first`: the server that commits. `everywhere`: the job's own state is kept by
    all servers (replicas), not by the first alone. `owners`: with replicas, the owner of each
    chunk.
    `answers`: how many of a worker's pulls are answered at once.

    Invariants (asserted by `check`): free buffers and the buffers of chunks are disjoint and
    together all buffers; a chunk in `queue` has a release; `open_releases[s]` are the chunks that
    any worker released in step s, until written.
    """

    def __init__(
        self,
        server: int,
        chunks: Mapping[int, tuple[bool, bool]],
        buffers: int,
        *,
        durable: bool,
        committed: int = 0,
        workers: int = 1,
        alone: bool | None = None,
        late: Mapping[int, bool] | None = None,
        first: int = 0,
        everywhere: bool = False,
        answers: int = 1 << 30,
        owners: Mapping[int, int] | None = None,
    ) -> None:
        self.commits_here, self.keeps_blobs = server == first, server == first or everywhere
        self.server, self.workers, self.base = server, workers, committed
        self.alone = workers == 1 if alone is None else alone
        self.durable = durable
        self.chunks = {c: ChunkState(resident, public) for c, (resident, public) in chunks.items()}
        for number, updated in (late or {}).items():
            self.chunks[number].late, self.chunks[number].updated = True, -(not updated)
        self.n_buffers = buffers
        self.free = list(range(buffers))
        # heap of (step, order, chunk); those that are resident apart
        self.queue: list[tuple[int, int, int]] = []
        self.resident_queue: list[tuple[int, int, int]] = []
        self.updating = 0  # resident chunks whose update was begun
        self.gated: deque[int] = deque()  # updated chunks whose write waits for the commit before
        self.open_releases: dict[int, set[int]] = {}
        self.sealed: deque[int] = deque()  # steps sealed and not yet prepared, in order
        self.seals: dict[int, set[int]] = {}  # step -> workers that sealed it, until all have
        self.commits: dict[int, dict[int, Any]] = {}  # step -> worker -> blob, told to commit
        self.preparing: int | None = None
        self.committed = committed
        self.everywhere, self.owners = everywhere, owners or {}
        self.told = committed  # the last step that was said to be written
        # step -> owner -> the sums of Written, so far
        self.sums: dict[int, dict[int, tuple[int, int]]] = {}
        self.turns = Turns(answers)
        self.gone = ""  # which worker has, and why

    def handle(self, event: Any) -> list[Any]:
        """Next actions. Asserts on what a correct doer cannot report. Raises LostError where a
        step needs a worker that has gone, LoopError where workers do different things."""
        if self.gone and isinstance(
            event, (messages.Push, messages.Close, messages.ApplyUpdate, messages.EndStep)
        ):
            raise LostError(self.gone)
        if isinstance(event, messages.ApplyUpdate):
            self.open_releases.setdefault(event.step, set()).add(event.chunk)
        if isinstance(
            event, (messages.Push, messages.Close, messages.ApplyUpdate, messages.DiscardGrad)
        ) and self._too_early(event):
            return self._set_aside(event)
        if isinstance(event, messages.Done):
            done = getattr(self, "_done_" + type(event.action).__name__)
            actions: list[Any] = done(event.action, *event.result)
        else:
            actions = getattr(self, "_on_" + type(event).__name__)(event)
        return actions

    # messages

    def _too_early(
        self, event: messages.Push | messages.Close | messages.ApplyUpdate | messages.DiscardGrad
    ) -> bool:
        """Whether its sender has released the chunk's step before, whose gradient is still
        needed."""
        chunk = self.chunks[event.chunk]
        pending = chunk.apply_update is not None or chunk.phase in (READING, UPDATING)
        before = any(event.worker == other.worker for other in chunk.early)
        return pending or before or any(event.worker in said for said in chunk.said.values())

    def _set_aside(
        self, event: messages.Push | messages.Close | messages.ApplyUpdate | messages.DiscardGrad
    ) -> list[Any]:
        chunk = self.chunks[event.chunk]
        if (
            not isinstance(event, messages.Push)
            or event.keep
            or not self.durable
            or (
                # compressed, or put away already
                event.sums is not None or isinstance(event.grad, int)
            )
        ):
            chunk.early.append(event)
            return []
        spill = messages.Spill(
            event,
            next(
                spill_slot
                for spill_slot in itertools.count(self.workers)
                if spill_slot not in chunk.spill_slots
            ),
        )
        chunk.spill_slots.add(spill.spill_slot)
        chunk.early.append(spill)
        return [spill]

    def _done_Spill(self, spill: messages.Spill) -> list[Any]:
        push, chunk = spill.push, self.chunks[spill.push.chunk]
        chunk.early[[e is spill for e in chunk.early].index(True)] = replace(
            push, grad=spill.spill_slot
        )
        return [messages.Send(messages.BufferFree(push.ticket), push.worker), *self._in_turn(chunk)]

    def _in_turn(self, chunk: ChunkState) -> list[Any]:
        """What was early is said again; up to what is still being written away."""
        out, events = list[Any](), deque(chunk.early)
        chunk.early = []
        while events and not isinstance(events[0], messages.Spill):
            out += self.handle(events.popleft())
        chunk.early += events
        return out

    def _on_PeerLost(self, event: messages.PeerLost) -> list[Any]:
        """Nothing is lost where no step is open and none of the others begins one: they may be
        leaving too."""
        step = self.committed + 1
        self.gone = f"worker {event.worker} has gone before step {step} was committed: {event.why}"
        busy = (
            self.seals
            or self.sealed
            or self.commits
            or self.preparing is not None
            or self.open_releases
        )
        if busy or any(c.closed or c.said or c.holds or c.early for c in self.chunks.values()):
            raise LostError(self.gone)
        return []

    def _on_Pull(self, pull: messages.Pull) -> list[Any]:
        chunk = self.chunks[pull.chunk]
        if chunk.version < pull.version or (chunk.phase == UPDATING and chunk.in_memory):
            chunk.pulls.append(pull)
            return []
        self.turns.ask(pull.worker, pull)
        return self._answers()

    def _answers(self) -> list[Any]:
        """Begin those whose turn it is."""
        out: list[Any] = []
        while (pull := self.turns.next()) is not None:
            chunk = self.chunks[pull.chunk]
            if chunk.phase == UPDATING and chunk.in_memory:  # it began before this pull's turn came
                self.turns.answered(pull.worker)
                chunk.pulls.append(pull)
            else:
                out.append(self._answer(chunk, pull))
        return out

    def _answer(self, chunk: ChunkState, pull: messages.Pull) -> messages.Answer:
        chunk.answering += 1
        newest = chunk.late and pull.version >= chunk.updated
        return messages.Answer(
            pull, (chunk.resident if newest else chunk.in_memory) or chunk.phase == WRITING, newest
        )

    def _done_Answer(self, answer: messages.Answer) -> list[Any]:
        pull = answer.pull
        chunk = self.chunks[pull.chunk]
        chunk.answering -= 1
        self.turns.answered(pull.worker)
        out: list[Any] = [
            messages.Send(messages.Pulled(pull.ticket, pull.chunk), pull.worker),
            *self._answers(),
        ]
        if chunk.answering == 0 and chunk.read:
            out += self._update(pull.chunk, chunk)
        self._finish_write(chunk)
        return out + self._advance()

    def _on_Push(self, push: messages.Push) -> list[Any]:
        holds = self.chunks[push.chunk].holds
        holds.append(push)
        return [messages.Hold(push)] if len(holds) == 1 else []

    def _done_Hold(self, hold: messages.Hold, sums: Any, kept: bool) -> list[Any]:
        push = hold.push
        chunk = self.chunks[push.chunk]
        chunk.holds.popleft()
        out: list[Any] = (
            [messages.Send(messages.GradAccumulated(push.chunk, sums))] if self.alone else []
        )
        if isinstance(push.grad, int):
            chunk.spill_slots.remove(push.grad)
        elif kept:
            chunk.kept.append((push.worker, push.ticket))
        else:
            out.append(messages.Send(messages.BufferFree(push.ticket), push.worker))
        while chunk.holds and isinstance(forget := chunk.holds[0], messages.DiscardGrad):
            chunk.holds.popleft()
            out += self._forget(forget)
        if chunk.holds and isinstance(following := chunk.holds[0], messages.Push):
            out.append(messages.Hold(following))
        return out + self._meet(push.chunk) + self._advance()

    def _free_kept(self, chunk: ChunkState, of: int | None = None) -> list[Any]:
        freed = [k for k in chunk.kept if of in (None, k[0])]
        chunk.kept = [k for k in chunk.kept if k not in freed]
        return [messages.Send(messages.BufferFree(ticket), worker) for worker, ticket in freed]

    def _on_Close(self, event: messages.Close) -> list[Any]:
        self.chunks[event.chunk].closed.setdefault(event.step, set()).add(event.worker)
        return self._meet(event.chunk)

    def _on_ApplyUpdate(self, apply_update: messages.ApplyUpdate) -> list[Any]:
        if self.alone:
            return self._released(apply_update) + self._advance()
        chunk = self.chunks[apply_update.chunk]
        said = chunk.said.setdefault(apply_update.step, {})
        assert apply_update.worker not in said, f"chunk {apply_update.chunk} released twice"
        said[apply_update.worker] = apply_update
        if chunk.totalled < apply_update.step:
            chunk.closed.setdefault(apply_update.step, set()).add(apply_update.worker)
        return self._meet(apply_update.chunk) + self._advance()

    def _released(self, apply_update: messages.ApplyUpdate) -> list[Any]:
        chunk = self.chunks[apply_update.chunk]
        assert chunk.apply_update is None, f"chunk {apply_update.chunk} released twice"
        chunk.apply_update = apply_update
        queue = self.resident_queue if chunk.resident else self.queue
        heapq.heappush(queue, (apply_update.step, apply_update.order, apply_update.chunk))
        return []

    def _meet(self, number: int) -> list[Any]:
        """With several workers: the chunk's next step goes on once all have said the same. What
        they say of a later one waits until this one's update is done, so that no gradient is taken
        for another step's.
        """
        chunk = self.chunks[number]
        step = self.base + chunk.version + 1
        out: list[Any] = []
        if chunk.holds or self.alone:
            return out
        if len(chunk.closed.get(step, ())) == self.workers:
            del chunk.closed[step]
            chunk.totalled = step
            out.append(messages.Total(number))
        if len(chunk.said.get(step, ())) == self.workers:
            apply_update = agreed([chunk.said[step][worker] for worker in range(self.workers)])
            del chunk.said[step]
            if any(scale is not None for scale in apply_update.scales):
                return out + self._released(apply_update)
            chunk.version += 1  # nobody has a gradient: the step passes
            self.open_releases[step].discard(number)
            out += [
                messages.Discard(number, None),
                *self._free_kept(chunk),
                *self._answer_waiting(chunk),
            ]
            return out + self._meet(number) + self._in_turn(chunk) + self._prepare()
        return out

    def _done_Total(self, total: messages.Total, sums: Any) -> list[Any]:
        return [messages.Send(messages.GradAccumulated(total.chunk, sums))]

    def _on_DiscardGrad(self, event: messages.DiscardGrad) -> list[Any]:
        holds = self.chunks[event.chunk].holds
        if holds:  # in its turn: what was pushed before it is still being held
            holds.append(event)
            return []
        return self._forget(event)

    def _forget(self, event: messages.DiscardGrad) -> list[Any]:
        chunk = self.chunks[event.chunk]
        assert chunk.apply_update is None
        chunk.totalled = -1  # what is pushed instead is summed anew
        return [messages.Discard(event.chunk, event.worker), *self._free_kept(chunk, event.worker)]

    def _on_EndStep(self, event: messages.EndStep) -> list[Any]:
        sealed = self.seals.setdefault(event.step, set())
        sealed.add(event.worker)
        if len(sealed) < self.workers:
            return []
        del self.seals[event.step]
        self.sealed.append(event.step)
        self.open_releases.setdefault(event.step, set())
        return self._prepare()

    def _on_Commit(self, event: messages.Commit) -> list[Any]:
        self.commits.setdefault(event.step, {})[event.worker] = event.blob
        return self._prepare()

    def _on_CommitDone(self, event: messages.CommitDone) -> list[Any]:
        if event.step <= self.committed:
            return []  # another worker said so before
        self.committed = event.step
        return self._advance() + self._prepare()

    # what doers report

    def _done_Read(self, read: messages.Read) -> list[Any]:
        chunk = self.chunks[read.chunk]
        assert chunk.phase == READING
        if chunk.answering and chunk.in_memory:
            chunk.read = True  # what is being copied out must not change under the copy
            return []
        return self._update(read.chunk, chunk)

    def _update(self, number: int, chunk: ChunkState) -> list[Any]:
        assert chunk.active is not None
        chunk.phase, chunk.read = UPDATING, False
        self.updating += chunk.resident
        return [messages.Update(number, chunk.active)]

    def _done_Update(self, update: messages.Update, checksum: int = 0) -> list[Any]:
        number = update.chunk
        chunk = self.chunks[number]
        assert chunk.phase == UPDATING and chunk.active is not None
        if number in self.owners:
            sums = self.sums.setdefault(chunk.active.step, {})
            owner = self.owners[number]
            sums[owner] = added(sums.get(owner, (0, 0)), number, checksum)
        chunk.version += 1
        chunk.updated = chunk.version
        self.updating -= chunk.resident
        chunk.phase = WRITING
        out = [
            *self._free_kept(chunk),
            *self._answer_waiting(chunk),
            *self._meet(number),
            *self._in_turn(chunk),
        ]
        if not self.durable:
            return out + self._done_Write(messages.Write(number))
        self.gated.append(number)
        return out + self._advance()

    def _answer_waiting(self, chunk: ChunkState) -> list[Any]:
        ready = [pull for pull in chunk.pulls if pull.version <= chunk.version]
        chunk.pulls = [pull for pull in chunk.pulls if pull.version > chunk.version]
        for pull in ready:
            self.turns.ask(pull.worker, pull)
        return self._answers()

    def _done_Write(self, write: messages.Write) -> list[Any]:
        chunk = self.chunks[write.chunk]
        assert chunk.phase == WRITING and chunk.active is not None
        self.open_releases[chunk.active.step].discard(write.chunk)
        chunk.active = None
        self._finish_write(chunk)
        return self._prepare() + self._advance()

    def _finish_write(self, chunk: ChunkState) -> None:
        """A written chunk gives its buffer back once nobody copies from it any more."""
        if chunk.phase != WRITING or chunk.active is not None or chunk.answering:
            return
        chunk.phase = IDLE
        if chunk.buffer is not None:
            self.free.append(chunk.buffer)
            chunk.buffer = None

    def _done_Prepare(self, prepare: messages.Prepare) -> list[Any]:
        assert self.preparing == prepare.step
        self.preparing = None
        if self.commits_here:
            self.committed = prepare.step
            return [
                messages.Send(messages.CommitDone(prepare.step)),
                *self._advance(),
                *self._prepare(),
            ]
        return [messages.Send(messages.Prepared(self.server, prepare.step)), *self._prepare()]

    # decisions

    def _prepare(self) -> list[Any]:
        """The oldest sealed step, once all its writes are done; who keeps the job's own state
        also waits for that."""
        if not self.sealed or self.preparing is not None or self.open_releases[self.sealed[0]]:
            return []
        step = self.sealed[0]
        if self.committed < step - 1:
            return []
        out: list[Any] = []
        if self.everywhere and self.told < step:
            self.told = step
            sums = [(owner, *both) for owner, both in sorted(self.sums.pop(step, {}).items())]
            out.append(messages.Send(messages.Written(self.server, step, tuple(sums))))
        if self.keeps_blobs and len(self.commits.get(step, ())) < self.workers:
            return out
        self.sealed.popleft()
        del self.open_releases[step]
        self.preparing = step
        blobs = self.commits.pop(step, {})
        return [*out, messages.Prepare(step, [blobs[worker] for worker in sorted(blobs)])]

    def _advance(self) -> list[Any]:
        """Start what can start: writes past the gate, then reads or updates of the most wanted
        chunks."""
        out: list[Any] = []
        for _ in range(len(self.gated)):
            number = self.gated.popleft()
            chunk = self.chunks[number]
            assert chunk.active is not None
            if self.committed >= chunk.active.step - 1 and not chunk.answering:
                out.append(messages.Write(number))
            else:
                self.gated.append(number)
        for queue in (self.resident_queue, self.queue):
            later: list[tuple[int, int, int]] = []
            while queue and (
                self.updating < AT_ONCE if queue is self.resident_queue else self.free
            ):
                entry = heapq.heappop(queue)
                chunk = self.chunks[entry[2]]
                if chunk.phase != IDLE or chunk.holds or (chunk.answering and chunk.resident):
                    later.append(entry)
                    continue
                assert chunk.apply_update is not None and chunk.active is None
                chunk.active, chunk.apply_update = chunk.apply_update, None
                if chunk.resident:
                    out += self._update(entry[2], chunk)
                else:
                    chunk.phase = READING
                    chunk.buffer = self.free.pop()
                    out.append(messages.Read(entry[2], chunk.buffer))
            for entry in later:
                heapq.heappush(queue, entry)
        return out

    def waits(self) -> tuple[list[messages.Pull], list[tuple[int, str]]]:
        """For people: the pulls that wait for a version or their turn; which worker owes what."""
        owed = [(step, said, f"the end of step {step}") for step, said in self.seals.items()]
        for number, chunk in self.chunks.items():
            step = self.base + chunk.version + 1
            for said, what in (
                (chunk.closed.get(step), "gradient"),
                (chunk.said.get(step), "update"),
            ):
                owed += (
                    [(step, set(said), f"the {what} of chunk {number} in step {step}")]
                    if said
                    else []
                )
        pulls = [pull for chunk in self.chunks.values() for pull in chunk.pulls]
        pulls += [pull for waiting in self.turns.waiting.values() for pull in waiting]
        return pulls, [
            (w, what)
            for _, said, what in sorted(owed, key=lambda one: one[0])
            for w in range(self.workers)
            if w not in said
        ]

    def check(self) -> None:
        """Assert every invariant."""
        used = [c.buffer for c in self.chunks.values() if c.buffer is not None]
        assert sorted(used + self.free) == list(range(self.n_buffers))
        for _, _, number in (*self.queue, *self.resident_queue):
            assert self.chunks[number].apply_update is not None
        assert (
            self.updating
            == sum(c.resident and c.phase == UPDATING for c in self.chunks.values())
            <= AT_ONCE
        )
        for chunk in self.chunks.values():
            assert all(p.version > chunk.version or chunk.phase == UPDATING for p in chunk.pulls)
            assert chunk.answering >= 0
            aside = [
                getattr(e, "spill_slot", getattr(e, "grad", None))
                for e in (*chunk.early, *chunk.holds)
            ]
            assert {
                spill_slot for spill_slot in aside if isinstance(spill_slot, int)
            } == chunk.spill_slots
            if chunk.phase in (READING, UPDATING) and not chunk.resident:
                assert chunk.buffer is not None
        for step, numbers in self.open_releases.items():
            open_now = {
                n
                for n, c in self.chunks.items()
                for r in (c.apply_update, c.active, *c.early)
                if (isinstance(r, messages.ApplyUpdate) and r.step == step) or step in c.said
            }
            assert numbers == open_now, (step, numbers, open_now)


def agreed(releases: list[messages.ApplyUpdate]) -> messages.ApplyUpdate:
    """What all workers released, in their order. A parameter without a gradient on some of them
    is scaled as the others say. Raises LoopError where they say different things: their models
    or loops differ."""
    scales: list[float | None] = list(releases[0].scales)
    for other in releases[1:]:
        if len(other.scales) != len(scales) or other.hyper != releases[0].hyper:
            raise LoopError(
                f"workers 0 and {other.worker} differ in step {other.step}, chunk {other.chunk}:"
                f" hyperparameters {releases[0].hyper} and {other.hyper}",
                hint="every worker runs the same loop with the same optimizer",
            )
        for i, scale in enumerate(other.scales):
            mine = scales[i]
            if (
                mine is not None
                and scale is not None
                and scale != mine
                and not (mine != mine and scale != scale)
            ):
                raise LoopError(
                    f"workers 0 and {other.worker} scale a gradient of step {other.step} by"
                    f" {scales[i]} and {scale}",
                    hint="clip by the norm that roadtrain gives: it is that of the workers' mean",
                )
            scales[i] = scale if scales[i] is None else scales[i]
    return replace(releases[0], scales=tuple(scales))
