"""WorkerSums: cuts a worker's tensors into parts, pushes each part to its reducer in the order of
priorities, and receives the sums. Does NOT divide by the number of workers or import torch.

    sum(key, grad, out) -> parts (sums/protocol/shares.py) -> priority queue -> links, few queued
    bytes each -> out, then `done`

If a spare host is removed before all workers have its sums, its parts are pushed again to another
reducer: from `out` by workers that have the sum, else from `grad`. So the `out` of the last round
and the `grad` of the current round are kept. Every wait has a deadline (Rule 5).
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from roadtrain.chunks import ITEMSIZE
from roadtrain.device.buffers import Buffer
from roadtrain.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    LostError,
    PeerError,
    RoadtrainError,
    WireError,
)
from roadtrain.retry import undone_on_error
from roadtrain.servers import frames as m
from roadtrain.servers.connection import link_to
from roadtrain.sums import formats, sum_frames
from roadtrain.sums.protocol.membership import Change, Spares
from roadtrain.sums.protocol.part_map import Map
from roadtrain.sums.protocol.shares import cut, order
from roadtrain.sums.tensor_round import TensorCodec, TensorRound
from roadtrain.transport.address import address_of
from roadtrain.transport.link import Link, Receiver
from roadtrain.transport.stream import FrameStream
from roadtrain.transport.tcp import Address, TcpOptions
from roadtrain.units import KIB, MIB

# A part is sent as one frame. It has an equal share of its tensor's bytes, within bounds: number of
# parts, smallest and largest part in bytes. Each part costs processor time. But with more hosts, or
# with spare hosts, rounds with larger parts take longer (docs/log.md). The bound in the paper is
# 4 MB.
PARTS, PARTS_OF_FEW = (512, 128 * KIB, 256 * KIB), (128, 128 * KIB, 2 * MIB)
FEW = 4  # workers without spare hosts
# A link with so many queued bytes gets no more parts. Few, so that urgent parts need not wait long.
AHEAD = 256 * KIB
DIAL_S = 2.0  # timeout to connect to a new spare host
AGAIN = -(1 << 62)  # priority of sums that other workers lack

# An entry of the queue: priority, number of the call, position in the order of the tensor's parts,
# key, round, part, and whether the sum of the part is pushed instead of the worker's part
Entry = tuple[int, int, int, int, int, int, bool]
Done = Callable[[], None]
Accept = Callable[[Link, bytes], Receiver]


@dataclass(frozen=True)
class SumOptions:
    """Options of WorkerSums."""

    session: str  # name of the run's sums, the same for all workers
    reach: TcpOptions  # options of links to the reducers of workers
    spare: TcpOptions | None = None  # options of links to spare hosts; if None, as `reach`
    rule: str = "sum"  # "sum" or "accumulate" (sums/protocol/reducer.py)
    deadline_s: float = 600.0
    part_bytes: int = 0  # largest part; 0: chosen by the size of each tensor
    separate: bool = False  # while there is a spare host, the workers' reducers sum nothing


class _ReducerLink:
    """A worker's link to a reducer, and the handler of its frames. `ahead`: the bytes of the parts
    queued in the link, before encoding."""

    def __init__(self, owner: WorkerSums, number: int, name: str) -> None:
        self.owner, self.number, self.name, self.ahead = owner, number, name, 0
        self.link: Link
        self._scratch = Buffer(1)

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        if kind != sum_frames.SUM:
            raise WireError(f"{self.name}: frame {kind} has {nbytes} bytes of payload, expected 0")
        key, start, number, summed = m.header(kind, header)
        place = self.owner.place_of(key, start, number, summed, nbytes)
        if place is None:
            if self._scratch.nbytes < nbytes:
                self._scratch = Buffer(nbytes)
            place = self._scratch.view[:nbytes]
        return place

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        if kind == m.FAILED:
            name, words = m.header(kind, header)
            error = LostError(f"{self.name} ended: {words}")
            if name in ("LostError", "BudgetError"):
                self.owner.lost(self, error)
            else:
                self.owner.fail(error)  # workers differ, so no other reducer could sum either
            return
        key, start, number, summed = m.header(sum_frames.SUM, header)
        if payload:
            self.owner.take_sum(key, start, number, summed, payload)
        else:
            self.owner.all_have(key, start, number)

    def lost(self, error: PeerError) -> None:
        self.owner.lost(self, error)


class WorkerSums:
    """Sums tensors in host memory over a group of workers.

    Args:
        rank: Rank of this worker in the group.
        reducers: Address of each worker's reducer: a path for shared memory, or None for the
            reducer of this process.
        rates: Rates of the workers' links, which determine the reducers' shares of the sums.
        spares: The spare hosts that are used at the start.
        own: Accepts the link to the reducer of this process.
        reducer_lost: Reports a lost spare host to the coordinator. None if spare hosts cannot
            change.
        roots: Workers whose reducers sum equal shares. If given, `rates` are ignored.

    Raises:
        LostError, AuthError, WireError, DeadlineError: A reducer cannot be reached.
    """

    def __init__(
        self,
        rank: int,
        reducers: Sequence[Address | str | None],
        rates: Sequence[float],
        spares: Spares,
        own: Accept | None,
        options: SumOptions,
        reducer_lost: Callable[[int, str], None] | None = None,
        roots: Sequence[int] = (),
    ) -> None:
        self.rank, self.workers, self.options = rank, len(reducers), options
        self.sent_bytes = 0  # excluding bytes to the reducer of this process
        self._spare = options.spare or options.reach
        self._hello = options.session, rank, len(reducers), options.rule
        self._lock = threading.RLock()
        self._parts = PARTS_OF_FEW if self.workers <= FEW and not spares else PARTS
        fixed = dict.fromkeys(roots, 1.0)
        self._map = Map(rates, spares, fixed, separate=options.separate)
        self._tensors: dict[int, TensorRound] = {}  # rounds in progress, by tensor
        self._later: list[TensorRound] = []  # rounds to begin after the next change of spare hosts
        self._last: dict[int, TensorRound] = {}  # last complete round of each tensor
        self._rounds: dict[int, int] = {}  # last round of each tensor that was begun
        self._codecs: dict[tuple[int, str, int], TensorCodec] = {}
        self._queue: list[Entry] = []
        # Sums that other workers lack, by (key, round, start of the part): whether the sum is still
        # in the queue. `_after` holds the entry for the part's next round until they have the sum.
        self._owed: dict[tuple[int, int, int], bool] = {}
        self._after: dict[tuple[int, int, int], Entry] = {}
        self._calls = itertools.count()
        # keys that were abandoned; sums that still arrive for these keys are ignored
        self._given_up: set[int] = set()
        self._held = False  # whether no round may begin until the next change of spare hosts
        self.error: BaseException | None = None  # the error that has ended the sums
        self._reducers: dict[int, _ReducerLink] = {}
        self._dialed: dict[int, _ReducerLink] = {}  # new spare hosts, until the next change
        self._reducer_lost = reducer_lost
        self._closed, self._watcher = threading.Event(), threading.Thread()
        with undone_on_error(self.close):
            # Spare hosts first: if a spare host refuses all workers, each worker fails with the
            # error of this host, and not with the loss of another worker.
            for number, text, _ in spares:
                name = f"spare host {text}"
                self._reducers[number] = self._reach(number, address_of(text), None, name)
            for number, address in enumerate(reducers):
                name = f"the reducer of worker {number}"
                self._reducers[number] = self._reach(number, address, own, name)
        self._watcher = threading.Thread(target=self._watch, name="summation", daemon=True)
        self._watcher.start()

    def _reach(
        self,
        number: int,
        address: Address | str | None,
        own: Accept | None,
        name: str,
        options: TcpOptions | None = None,
    ) -> _ReducerLink:
        reducer = _ReducerLink(self, number, name)
        how = options or (self.options.reach if number < self.workers else self._spare)
        try:
            reducer.link = link_to(reducer, address, own, self._hello, how, name)
        except (LostError, DeadlineError, BusyError) as error:
            if self._reducer_lost is None or number not in self._map.spares:
                raise
            # The host died before the start: take a link that is not connected, until the host is
            # removed.
            reducer.link = FrameStream(name, how.frame_limit, False, 0.0)
            self.lost(reducer, error)
        return reducer

    def sum(
        self,
        key: int,
        grad: memoryview,
        out: memoryview,
        dtype: str,
        done: Done,
        *,
        priority: int = 0,
        format: str = "",
    ) -> None:
        """Begin a sum. All workers must call `sum` with the same keys. A key may be used again only
        after its last sum is done.

        Args:
            grad: This worker's tensor. Must not change until the sum is done.
            out: Destination of the sum. As large as `grad`, and must not overlap `grad`. Must not
                change until the next sum of the same key is done.
            done: Called by a thread of a link when the sum is in `out`.
            priority: Sums with smaller priorities are sent first.
            format: Wire format of an fp32 tensor (sums/formats.py).

        Raises:
            ConfigError: There is no such format.
            BaseException: The error that has ended the sums.
        """
        if format and dtype != "fp32":
            raise ConfigError(
                f"tensor {key} has dtype {dtype}, but only fp32 can be sent as {format}",
                hint="choose no format for this tensor",
            )
        elements = len(grad) // ITEMSIZE[dtype]
        codec = None
        if format and (codec := self._codecs.get((key, format, elements))) is None:
            codec = self._codecs[key, format, elements] = TensorCodec(format, elements)
        count, least, most = self._parts
        nbytes = self.options.part_bytes or min(max(len(grad) // count, least), most)
        parts = cut(elements, nbytes // ITEMSIZE[dtype])
        urgency = priority, next(self._calls)
        tensor = TensorRound(key, grad, out, dtype, done, urgency, parts, codec)
        with self._lock:
            if self.error is not None:
                raise self.error
            if key in self._tensors or any(later.key == key for later in self._later):
                raise RuntimeError(f"tensor {key} is still being summed")
            if parts and self._held:
                self._later.append(tensor)
            elif parts:
                self._begin(tensor)
            posts = self._next()
        if not parts:
            done()
        self._post(posts)

    def _begin(self, tensor: TensorRound) -> None:
        """Begin a tensor's next round: queue all parts of the tensor. The caller holds the lock."""
        key = tensor.key
        self._rounds[key] = tensor.round = self._rounds.get(key, 0) + 1
        tensor.waits.update(range(len(tensor.parts)))
        self._tensors[key] = tensor
        of = self._map.reducers(key, len(tensor.parts), tensor.round)
        for place, part in enumerate(order(of, self.rank)):
            heapq.heappush(self._queue, (*tensor.urgency, place, key, tensor.round, part, False))

    def _next(self) -> list[tuple[_ReducerLink, TensorRound, int, int, int]]:
        """Take the entries that must be sent now out of the queue. The caller holds the lock.

        Returns:
            For each entry: (reducer, tensor, part, value of the header field `start`, round). The
            round is 0 unless a sum is pushed.
        """
        out = []
        while self._queue:
            *_, key, number, part, summed = self._queue[0]
            tensor = self._tensors.get(key)
            if tensor is None or tensor.round != number:
                # The round is complete. If a later round is complete too, no worker lacks this sum,
                # and only the reducer's notice that all have the sum is needed.
                tensor = self._last[key]
            start = tensor.parts[part][0]
            if summed and (key, number, start) not in self._owed:
                heapq.heappop(self._queue)
                continue
            if not summed and (key, number - 1, start) in self._owed:
                self._after[key, number - 1, start] = heapq.heappop(self._queue)
                continue
            of, moved = self._map.assigned(key, len(tensor.parts), number)
            reducer = self._reducers[of[part]]
            if reducer.ahead >= AHEAD:
                break
            heapq.heappop(self._queue)
            reducer.ahead += len(tensor.of(tensor.out, part))
            if summed:
                self._owed[key, number, start] = False
            else:
                tensor.sent[part] = reducer.number
            where = ~start if moved[part] else start
            out.append((reducer, tensor, part, where, number if summed else 0))
        return out

    def _post(self, posts: Sequence[tuple[_ReducerLink, TensorRound, int, int, int]]) -> None:
        for reducer, tensor, number, where, summed in posts:
            start, stop = tensor.parts[number]
            view = tensor.of(tensor.out, number) if summed else tensor.pushed(number, self.rank)
            itemsize = ITEMSIZE[tensor.dtype] if summed else 0
            header = m.encode(
                (tensor.key, where, summed or tensor.round, stop - start, tensor.format, itemsize)
            )
            try:
                sent = partial(self._sent, reducer, len(tensor.of(tensor.out, number)))
                reducer.link.send(sum_frames.PART, header, [view], sent)
                self.sent_bytes += len(view) * (reducer.number != self.rank)
            except PeerError as error:
                self.lost(reducer, error)

    def _sent(self, reducer: _ReducerLink, nbytes: int) -> None:
        with self._lock:
            reducer.ahead -= nbytes
            posts = self._next() if self.error is None else []
        self._post(posts)

    def _awaited(self, key: int, start: int, number: int) -> tuple[TensorRound, int] | None:
        """Return the tensor and the part to which an arriving sum belongs, or None if the sum was
        abandoned. Raises WireError if the sum is not in progress."""
        with self._lock:
            tensor = self._tensors.get(key)
            if key in self._given_up:
                return None
        part = -1 if tensor is None or tensor.round != number else tensor.number(start)
        if tensor is None or part not in tensor.waits:
            raise WireError(
                f"a reducer sent a sum that is not in progress: tensor {key}, round {number}, from"
                f" element {start} on"
            )
        return tensor, part

    def place_of(
        self, key: int, start: int, number: int, summed: bool, nbytes: int
    ) -> memoryview | None:
        """Return the memory in which to receive the sum of a part. Returns None if the sum must be
        decoded first, or was abandoned. Raises WireError if the sum is not in progress or has the
        wrong size."""
        if (awaited := self._awaited(key, start, number)) is None:
            return None
        tensor, part = awaited
        place = tensor.of(tensor.out, part)
        codec = None if summed else tensor.codec
        expected = len(place) if codec is None else codec.codec.nbytes(len(place) // 4)
        if nbytes != expected:
            raise WireError(
                f"a reducer sent {nbytes} bytes as the sum of tensor {key} from element {start} on,"
                f" but this sum has {expected} bytes"
            )
        return place if codec is None else None

    def take_sum(
        self, key: int, start: int, number: int, summed: bool, payload: memoryview
    ) -> None:
        if (awaited := self._awaited(key, start, number)) is None:
            return
        tensor, part = awaited
        if not summed and tensor.codec is not None:
            formats.decode(tensor.codec.format, payload, tensor.values(tensor.out, part))
        with self._lock:
            if key in self._given_up:
                return
            tensor.waits.remove(part)
            if tensor.waits or self._tensors.pop(key, None) is None:
                return
            tensor.grad = memoryview(b"")  # `out` is kept, as other workers may need it
            self._last[key] = tensor
        tensor.done()

    def all_have(self, key: int, start: int, number: int) -> None:
        """Note that all workers have a sum that this worker pushed. So this worker may send its
        part of the next round."""
        owed = key, number, max(start, ~start)
        with self._lock:
            if key in self._given_up:
                return
            if self._owed.pop(owed, True):
                raise WireError(
                    f"round {number} of tensor {key} reached all workers, but was not pushed here"
                )
            if (entry := self._after.pop(owed, None)) is not None:
                heapq.heappush(self._queue, entry)
            posts = self._next() if self.error is None else []
        self._post(posts)

    def give_up(self) -> None:
        """Abandon all sums in progress, without calling their `done`. All workers must call this
        method, and must use other keys for later sums."""
        with self._lock:
            self._given_up |= self._rounds.keys()
            for of_keys in (self._tensors, self._last, self._rounds, self._codecs):
                of_keys.clear()
            for of_parts in (self._queue, self._later, self._owed, self._after):
                of_parts.clear()
            reducers = list(self._reducers.values())
        self._notify(reducers, sum_frames.GIVEN_UP)

    def _notify(self, reducers: Sequence[_ReducerLink], kind: int) -> None:
        for reducer in reducers:
            try:
                reducer.link.send(kind, m.encode(()))
            except PeerError as error:
                self.lost(reducer, error)

    # changes of spare hosts

    def lost(self, reducer: _ReducerLink, error: PeerError) -> None:
        """Handle the loss of a link. The loss of a worker ends the sums. The loss of a spare host
        is reported to the coordinator, which removes the host."""
        if reducer.number < self.workers or self._reducer_lost is None:
            self.fail(error)
        else:
            self._reducer_lost(reducer.number, str(error).splitlines()[0])

    def dial(self, added: Spares) -> list[int]:
        """Connect to new spare hosts. Returns the numbers of the hosts that cannot be reached."""
        refused = []
        for number, text, _ in added:
            how, name = replace(self._spare, retry_s=0.0, connect_s=DIAL_S), f"spare host {text}"
            try:
                self._dialed[number] = self._reach(number, address_of(text), None, name, how)
            except RoadtrainError:
                refused.append(number)
        return refused

    def hold(self) -> dict[int, tuple[int, bool]]:
        """Begin no round until `change` is called. Returns, for each tensor, the last round, and
        whether the sum of this round is complete."""
        with self._lock:
            self._held = True
            return {key: (number, key not in self._tensors) for key, number in self._rounds.items()}

    def change(self, change: Change) -> None:
        """Apply a change of the spare hosts, push the parts of removed hosts again, and resume
        after `hold`."""
        for number in change.removed:
            if (reducer := self._reducers.get(number)) is not None:
                reducer.link.close()  # first, so that no more frames arrive on this link
        with self._lock:
            again = [
                entry
                for key, (_, lacked) in change.rounds.items()
                for tensor in (self._tensors.get(key), self._last.get(key))
                if tensor is not None
                for entry in self._to_push_again(tensor, set(change.removed), lacked)
            ]
            for owed in self._settled(change):
                del self._owed[owed]
                if owed in self._after:
                    again.append(self._after.pop(owed))
            self._map.change(change)
            for number in change.removed:
                self._reducers.pop(number, None)
            for number, _, _ in change.added:
                self._reducers[number] = self._dialed.pop(number)
            refused, self._dialed = list(self._dialed.values()), {}
            for entry in again:
                heapq.heappush(self._queue, entry)
            self._held, later, self._later = False, self._later, []
            for tensor in later:
                self._begin(tensor)
            posts = self._next() if self.error is None else []
            reducers = list(self._reducers.values())
        for reducer in refused:
            reducer.link.close()
        self._notify(reducers, sum_frames.MOVED)
        self._post(posts)

    def _settled(self, change: Change) -> list[tuple[int, int, int]]:
        """List the sums that this worker pushed for others, and whose reducer was removed after all
        workers got the sum."""
        out = []
        for key, number, start in self._owed:
            tensor = self._last.get(key) or self._tensors[key]
            of = self._map.reducers(key, len(tensor.parts), number)
            if number < change.rounds[key][1] and of[tensor.number(start)] in change.removed:
                out.append((key, number, start))
        return out

    def _to_push_again(self, tensor: TensorRound, removed: set[int], lacked: int) -> list[Entry]:
        """Make queue entries for the parts of a tensor whose reducer was removed: for sums of round
        `lacked`, which some worker lacks, and for parts whose sum has not arrived."""
        out = []
        key, number = tensor.key, tensor.round
        for part, reducer in enumerate(self._map.reducers(key, len(tensor.parts), number)):
            if reducer not in removed:
                continue
            if part in tensor.waits:
                if tensor.sent.pop(part, None) is not None:
                    out.append((*tensor.urgency, part, key, number, part, False))
                continue
            owed = key, number, tensor.parts[part][0]
            if number == lacked and not self._owed.get(owed, False):
                self._owed[owed] = True
                out.append((AGAIN, 0, part, key, number, part, True))
        return out

    # the end

    def _watch(self) -> None:
        """End all sums with a DeadlineError if a sum is not done after `deadline_s` seconds."""
        while not self._closed.wait(min(1.0, self.options.deadline_s / 4)):
            with self._lock:
                tensor = next(iter((*self._tensors.values(), *self._later)), None)  # the oldest
                if tensor is None or time.monotonic() - tensor.began < self.options.deadline_s:
                    continue
                what = self._waited_for(tensor)
            self.fail(
                DeadlineError(
                    f"worker {self.rank} waited {self.options.deadline_s:.0f} s for {what}",
                    hint="is another worker late or stopped, or a link slow?",
                )
            )

    def _waited_for(self, tensor: TensorRound) -> str:
        """Describe the missing sums of a tensor, for a message. The caller holds the lock."""
        if not tensor.round:
            return "all workers to agree on the spare hosts"
        waited = {tensor.sent[part] for part in tensor.waits if part in tensor.sent}
        names = [self._reducers[number].name for number in sorted(waited & self._reducers.keys())]
        return (
            f"{len(tensor.waits)} part(s) of tensor {tensor.key}, round {tensor.round}, from"
            f" {', '.join(names)}"
        )

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error
            tensors = [*self._tensors.values(), *self._later]
            self._tensors, self._later = {}, []
            self._queue.clear()
        for tensor in tensors:
            tensor.done()  # the callback checks `error`

    def close(self) -> None:
        self._closed.set()
        if self._watcher.is_alive():
            self._watcher.join()
        for reducer in [*self._reducers.values(), *self._dialed.values()]:
            reducer.link.close()
