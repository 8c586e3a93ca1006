"""WorkerSums: a worker's side of the summation service. Cuts tensors into parts, sends each to the
host that sums it, the most wanted first, and puts what comes back where it belongs.

    sum(key, grad, out) -> parts (sums/protocol/shares.py) -> queue by priority -> links, few parts
    ahead -> out, then `done`

The worker's own reducer is one of the hosts; its parts cross no network. Bytes leave from `grad`
and land in `out` without a copy in between, but for those that are encoded. Spare hosts may come
and go (sums/protocol/membership.py): what a host that is gone had not answered is pushed again
elsewhere, from `grad` or, by who has the sum, from `out`: the last two rounds' are kept for that.
Every wait has a deadline (Rule 5). Does NOT divide, and does NOT know torch.
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
from roadtrain.units import KIB

PART_BYTES = 128 * KIB  # of one frame; the paper's bound is 4 MB
AHEAD = 2  # parts that wait in a link: what is more urgent goes before all others
DIAL_S = 2.0  # for a spare host that is new
AGAIN = -(1 << 62)  # the priority of sums that others lack

# priority, call, place in its order, key, round, part, whether it is the sum
Entry = tuple[int, int, int, int, int, int, bool]
Done = Callable[[], None]
Accept = Callable[[Link, bytes], Receiver]


@dataclass(frozen=True)
class SumOptions:
    """How one worker sums."""

    session: str  # the same for all workers of one start
    reach: TcpOptions
    spare: TcpOptions | None = None  # how spare hosts are reached, where not by `reach`
    rule: str = "sum"  # sums/protocol/reducer.py
    deadline_s: float = 600.0
    part_bytes: int = PART_BYTES
    separate: bool = False  # workers sum only while there is no spare host


class _ReducerLink:
    """The link to one reducer: its Receiver."""

    def __init__(self, owner: WorkerSums, number: int, name: str) -> None:
        self.owner, self.number, self.name, self.ahead = owner, number, name, 0
        self.link: Link
        self._scratch = Buffer(1)

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        if kind != sum_frames.SUM:
            raise WireError(f"a frame of kind {kind} has no payload, {nbytes} bytes came")
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
                self.owner.fail(error)  # the workers differ: nobody else could sum that either
            return
        key, start, number, summed = m.header(sum_frames.SUM, header)
        if payload:
            self.owner.came(key, start, number, summed, payload)
        else:
            self.owner.all_have(key, start, number)

    def lost(self, error: PeerError) -> None:
        self.owner.lost(self, error)


class WorkerSums:
    """`reducers`: of every worker's reducer its address (a path: shared memory); None: the one of
    this process, which `own` accepts. `spares`: the spare hosts; `rates`: of all workers' links;
    `roots`: instead, which workers' reducers sum. `reducer_gone`: tells the coordinator, with which
    spare hosts may come and go. Raises LostError, AuthError, WireError, DeadlineError."""

    def __init__(
        self,
        rank: int,
        reducers: Sequence[Address | str | None],
        rates: Sequence[float],
        spares: Spares,
        own: Accept | None,
        options: SumOptions,
        reducer_gone: Callable[[int, str], None] | None = None,
        roots: Sequence[int] = (),
    ) -> None:
        self.rank, self.workers, self.options = rank, len(reducers), options
        self.sent_bytes = 0  # to other hosts
        self._spare = options.spare or options.reach
        self._hello = options.session, rank, len(reducers), options.rule
        self._lock = threading.RLock()
        fixed = dict.fromkeys(roots, 1.0)
        self._map = Map(rates, spares, fixed, separate=options.separate)
        self._tensors: dict[int, TensorRound] = {}  # under way
        self._later: list[TensorRound] = []  # to be begun after the next change of spare hosts
        self._last: dict[int, TensorRound] = {}  # complete
        self._rounds: dict[int, int] = {}
        self._codecs: dict[tuple[int, str, int], TensorCodec] = {}
        self._queue: list[Entry] = []
        # key, round, part's start: sums that others lack -> whether in the queue still; what waits
        # until they have them
        self._owed: dict[tuple[int, int, int], bool] = {}
        self._after: dict[tuple[int, int, int], Entry] = {}
        self._calls = itertools.count()
        # keys that are not used again, of which sums may still come
        self._given_up: set[int] = set()
        self._held = False
        self.error: BaseException | None = None  # what has ended it
        self._reducers: dict[int, _ReducerLink] = {}
        self._dialed: dict[int, _ReducerLink] = {}
        self._reducer_gone = reducer_gone
        self._closed, self._watcher = threading.Event(), threading.Thread()
        with undone_on_error(self.close):
            # first those that refuse all workers alike: one that leaves there is not missed below
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
            if self._reducer_gone is None or number not in self._map.spares:
                raise
            # leads nowhere: the host died before all began
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
        """Begins; `done` is called when `out` (as many bytes as `grad`, not the same memory)
        holds the sum, from a thread of a link. `grad` must not change before, and `out` not
        until the key's next sum is done. Smaller priorities go first. All workers call it with
        the same keys; a key's calls follow each other. `format`: how fp32 travels
        (sums/formats.py). Raises ConfigError, and what has ended it."""
        if format and dtype != "fp32":
            raise ConfigError(
                f"tensor {key} is {dtype} and should travel as {format}", hint="formats are of fp32"
            )
        elements = len(grad) // ITEMSIZE[dtype]
        codec = None
        if format and (codec := self._codecs.get((key, format, elements))) is None:
            codec = self._codecs[key, format, elements] = TensorCodec(format, elements)
        parts = cut(elements, self.options.part_bytes // ITEMSIZE[dtype])
        urgency = priority, next(self._calls)
        tensor = TensorRound(key, grad, out, dtype, done, urgency, parts, codec)
        with self._lock:
            if self.error is not None:
                raise self.error
            if key in self._tensors or any(one.key == key for one in self._later):
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
        """Under the lock."""
        key = tensor.key
        self._rounds[key] = tensor.round = self._rounds.get(key, 0) + 1
        tensor.waits.update(range(len(tensor.parts)))
        self._tensors[key] = tensor
        of = self._map.reducers(key, len(tensor.parts), tensor.round)
        for place, part in enumerate(order(of, self.rank)):
            heapq.heappush(self._queue, (*tensor.urgency, place, key, tensor.round, part, False))

    def _next(self) -> list[tuple[_ReducerLink, TensorRound, int, int, int]]:
        """Under the lock: what may leave now, with its place, and of the sum itself its round. In
        order also where only the first's link is full: its pace is that of all, else links with a
        small share would be done early.
        """
        out = []
        while self._queue:
            *_, key, number, part, summed = self._queue[0]
            tensor = self._tensors.get(key)
            if tensor is None or tensor.round != number:
                # complete; where a later round is, nobody lacks this sum: that only has to be said
                tensor = self._last[key]
            start = tensor.parts[part][0]
            if summed and (key, number, start) not in self._owed:
                heapq.heappop(self._queue)
                continue
            if not summed and (key, number - 1, start) in self._owed:
                self._after[key, number - 1, start] = heapq.heappop(self._queue)
                continue
            reducer = self._reducers[self._map.reducers(key, len(tensor.parts), number)[part]]
            if reducer.ahead >= AHEAD:
                break
            heapq.heappop(self._queue)
            reducer.ahead += 1
            if summed:
                self._owed[key, number, start] = False
            else:
                tensor.sent[part] = reducer.number
            moved = self._map.moved(key, len(tensor.parts), number)[part]
            out.append((reducer, tensor, part, ~start if moved else start, number if summed else 0))
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
                reducer.link.send(sum_frames.PART, header, [view], partial(self._sent, reducer))
                self.sent_bytes += len(view) * (reducer.number != self.rank)
            except PeerError as error:
                self.lost(reducer, error)

    def _sent(self, reducer: _ReducerLink) -> None:
        with self._lock:
            reducer.ahead -= 1
            posts = self._next() if self.error is None else []
        self._post(posts)

    def _awaited(self, key: int, start: int, number: int) -> tuple[TensorRound, int] | None:
        """The tensor and its part whose sum comes; None: it is given up. Raises WireError."""
        with self._lock:
            tensor = self._tensors.get(key)
            if key in self._given_up:
                return None
        part = -1 if tensor is None or tensor.round != number else tensor.number(start)
        if tensor is None or part not in tensor.waits:
            raise WireError(
                f"a sum of round {number} of tensor {key} from {start} on came, which is not"
                " under way"
            )
        return tensor, part

    def place_of(
        self, key: int, start: int, number: int, summed: bool, nbytes: int
    ) -> memoryview | None:
        """Where a sum goes that comes; None where it is still to be decoded, or given up.
        Raises WireError."""
        if (awaited := self._awaited(key, start, number)) is None:
            return None
        tensor, part = awaited
        place = tensor.of(tensor.out, part)
        codec = None if summed else tensor.codec
        wanted = len(place) if codec is None else codec.codec.nbytes(len(place) // 4)
        if nbytes != wanted:
            raise WireError(
                f"{nbytes} bytes of tensor {key} from {start} on came, {wanted} expected"
            )
        return place if codec is None else None

    def came(self, key: int, start: int, number: int, summed: bool, payload: memoryview) -> None:
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
            tensor.grad = memoryview(b"")  # others may need `out`
            self._last[key] = tensor
        tensor.done()

    def all_have(self, key: int, start: int, number: int) -> None:
        """Of a sum that others lacked. The part's next round may go."""
        owed = key, number, max(start, ~start)
        with self._lock:
            if key in self._given_up:
                return
            if self._owed.pop(owed, True):
                raise WireError(
                    f"an answer about round {number} of tensor {key} came, which nobody asked for"
                )
            if (words := self._after.pop(owed, None)) is not None:
                heapq.heappush(self._queue, words)
            posts = self._next() if self.error is None else []
        self._post(posts)

    def give_up(self) -> None:
        """All sums under way, without a word to who waits for them (`done` is not called). All
        workers do; all keys are other ones then, and rounds begin anew."""
        with self._lock:
            self._given_up |= self._rounds.keys()
            for of_keys in (self._tensors, self._last, self._rounds, self._codecs):
                of_keys.clear()
            for of_parts in (self._queue, self._later, self._owed, self._after):
                of_parts.clear()
            reducers = list(self._reducers.values())
        self._tell(reducers, sum_frames.GIVEN_UP)

    def _tell(self, reducers: Sequence[_ReducerLink], kind: int) -> None:
        for reducer in reducers:
            try:
                reducer.link.send(kind, m.encode(()))
            except PeerError as error:
                self.lost(reducer, error)

    # spare hosts that come and go

    def lost(self, reducer: _ReducerLink, error: PeerError) -> None:
        """A link has ended. Without a worker nothing can be summed, without a spare host it can."""
        if reducer.number < self.workers or self._reducer_gone is None:
            self.fail(error)
        else:
            self._reducer_gone(reducer.number, str(error).splitlines()[0])

    def dial(self, added: Spares) -> list[int]:
        refused = []
        for number, text, _ in added:
            how, name = replace(self._spare, retry_s=0.0, connect_s=DIAL_S), f"spare host {text}"
            try:
                self._dialed[number] = self._reach(number, address_of(text), None, name, how)
            except RoadtrainError:
                refused.append(number)
        return refused

    def hold(self) -> dict[int, tuple[int, bool]]:
        """No round begins from now on until the change. Returns the rounds begun, and whether
        their sums are here."""
        with self._lock:
            self._held = True
            return {key: (number, key not in self._tensors) for key, number in self._rounds.items()}

    def change(self, change: Change) -> None:
        for number in change.gone:
            if (reducer := self._reducers.get(number)) is not None:
                reducer.link.close()  # nothing comes from it any more
        with self._lock:
            again = [
                words
                for key, (_, lacked) in change.rounds.items()
                for tensor in (self._tensors.get(key), self._last.get(key))
                if tensor is not None
                for words in self._to_push_again(tensor, set(change.gone), lacked)
            ]
            for owed in self._settled(change):
                del self._owed[owed]
                if owed in self._after:
                    again.append(self._after.pop(owed))
            self._map.change(change)
            for number in change.gone:
                self._reducers.pop(number, None)
            for number, _, _ in change.added:
                self._reducers[number] = self._dialed.pop(number)
            refused, self._dialed = list(self._dialed.values()), {}
            for words in again:
                heapq.heappush(self._queue, words)
            self._held, later, self._later = False, self._later, []
            for tensor in later:
                self._begin(tensor)
            posts = self._next() if self.error is None else []
            reducers = list(self._reducers.values())
        for reducer in refused:
            reducer.link.close()
        self._tell(reducers, sum_frames.MOVED)
        self._post(posts)

    def _settled(self, change: Change) -> list[tuple[int, int, int]]:
        """Sums that all have by now, and who would have said so is gone."""
        out = []
        for key, number, start in self._owed:
            tensor = self._last.get(key) or self._tensors[key]
            of = self._map.reducers(key, len(tensor.parts), number)
            if number < change.rounds[key][1] and of[tensor.number(start)] in change.gone:
                out.append((key, number, start))
        return out

    def _to_push_again(self, tensor: TensorRound, gone: set[int], lacked: int) -> list[Entry]:
        """Entries of the queue: parts that went to a host that is gone, those of `lacked` also
        where their sum has come."""
        out = []
        key, number = tensor.key, tensor.round
        for part, reducer in enumerate(self._map.reducers(key, len(tensor.parts), number)):
            if reducer not in gone:
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
        """DeadlineError names what has been missing for so long."""
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
        """Under the lock."""
        if not tensor.round:
            return "all to agree on spares"
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
            tensor.done()  # who waits for it looks at `error`

    def close(self) -> None:
        self._closed.set()
        if self._watcher.is_alive():
            self._watcher.join()
        for reducer in [*self._reducers.values(), *self._dialed.values()]:
            reducer.link.close()
