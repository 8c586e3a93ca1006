"""Summation: a worker's side of the summation service. Cuts tensors into parts, sends each to the host that sums it,
the most wanted first, and puts what comes back where it belongs.

    sum(key, grad, out) -> parts (flow/shares.py) -> queue by priority -> links, few parts ahead -> out, then `done`

The worker's own summer is one of the hosts; its parts cross no network. Bytes leave from `grad` and land in `out`
without a copy in between. Every wait has a deadline (Rule 5). Does NOT divide, and does NOT know torch.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from roadtrain.errors import DeadlineError, LostError, PeerError, RoadtrainError, WireError
from roadtrain.flow.shares import Part, cut, order
from roadtrain.node import messages as m
from roadtrain.node.summing import Summers
from roadtrain.spec.chunks import ITEMSIZE
from roadtrain.units import KIB
from roadtrain.wire import local
from roadtrain.wire.link import Link
from roadtrain.wire.tcp import Address, Options, connect

PART_BYTES = 256 * KIB  # of one frame; the paper's bound is 4 MB
AHEAD = 2  # parts that wait in a link: what is more urgent goes before all others

Done = Callable[[], None]


class _Tensor:
    """What is under way of one tensor."""

    def __init__(self, round: int, grad: memoryview, out: memoryview, dtype: str, done: Done, parts: int) -> None:
        self.round, self.grad, self.out, self.dtype, self.done, self.left = round, grad, out, dtype, done, parts
        self.sites: set[int] = set()
        self.began = time.monotonic()


class _Site:
    """The link to one summer: its Receiver."""

    def __init__(self, owner: Summation, number: int, name: str) -> None:
        self.owner, self.number, self.name, self.ahead = owner, number, name, 0
        self.link: Link

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        if kind != m.SUM:
            raise WireError(f"a frame of kind {kind} has no payload, {nbytes} bytes came")
        key, start, number = m.header(kind, header)
        return self.owner.place_of(key, start, number, nbytes)

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        if kind == m.FAILED:
            self.owner.fail(LostError(f"{self.name} ended: {m.header(kind, header)[1]}"))
            return
        self.owner.came(m.header(kind, header)[0])

    def lost(self, error: PeerError) -> None:
        self.owner.fail(error)


class Summation:
    """`sites`: of every summer, in the order of `shares`, its address; None: the one of this process, `own`. `session`:
    the same for all workers of one start. `spare`: how spare hosts are reached, where not by `options`. Raises
    LostError, AuthError, WireError, DeadlineError."""

    def __init__(
        self, rank: int, workers: int, sites: Sequence[Address | None], shares: Sequence[float], own: Summers | None, *,
        session: str, options: Options, spare: Options | None = None, rule: str = "sum", deadline_s: float = 600.0,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.rank, self.workers, self.shares, self.deadline_s = rank, workers, tuple(shares), deadline_s
        self._part_bytes, self.sent_bytes = part_bytes, 0
        self._lock = threading.Condition()
        self._tensors: dict[int, _Tensor] = {}
        self._rounds: dict[int, int] = {}
        self._cuts: dict[tuple[int, int, str], list[Part]] = {}
        self._queue: list[tuple[int, int, int, int, Part]] = []  # priority, number of the call, of the part, key
        self._calls = itertools.count()
        self.error: BaseException | None = None  # what has ended it
        self._sites: list[_Site] = []
        self._closed, self._watcher = threading.Event(), threading.Thread()
        hello = (session, rank, workers, rule)
        try:
            for number, address in enumerate(sites):
                name = f"the summer of worker {number}" if number < workers else f"spare host {number - workers}"
                site = _Site(self, number, name)
                if address is None:
                    assert own is not None
                    site.link = _to_own(site, own, hello, options)
                else:
                    how = options if number < workers or spare is None else spare
                    site.link = connect(address, site, how, hello=m.encode(hello), name=name)
                self._sites.append(site)
        except BaseException:
            self.close()
            raise
        self._watcher = threading.Thread(target=self._watch, name="summation", daemon=True)
        self._watcher.start()

    def sum(self, key: int, grad: memoryview, out: memoryview, dtype: str, done: Done, *, priority: int = 0) -> None:
        """Begins; `done` is called when `out` (as many bytes as `grad`, not the same memory) holds the sum, from a
        thread of a link. `grad` must not change before. Smaller priorities go first. All workers call it with the same
        keys; a key's calls follow each other."""
        elements = len(grad) // ITEMSIZE[dtype]
        shape = key, elements, dtype
        with self._lock:
            self._check()
            if key in self._tensors:
                raise RuntimeError(f"tensor {key} is still being summed")
            if shape not in self._cuts:
                parts = cut(key, elements, self.shares, self._part_bytes // ITEMSIZE[dtype])
                self._cuts[shape] = order(parts, self.rank)
            mine, number = self._cuts[shape], self._rounds.get(key, 0) + 1
            self._rounds[key] = number
            tensor = self._tensors[key] = _Tensor(number, grad, out, dtype, done, len(mine))
            call = next(self._calls)
            for i, part in enumerate(mine):
                heapq.heappush(self._queue, (priority, call, i, key, part))
            posts = self._next()
        if not mine:
            self._tensors.pop(key)
            tensor.done()
        self._post(posts)

    def _next(self) -> list[tuple[_Site, bytes, memoryview]]:
        """Under the lock: what may leave now. In order also where only the first's link is full: its pace is that of
        all, else links with a small share would be done early and idle late."""
        out = []
        while self._queue:
            _, _, _, key, part = self._queue[0]
            site = self._sites[part.site]
            if site.ahead >= AHEAD:
                break
            heapq.heappop(self._queue)
            site.ahead += 1
            tensor = self._tensors[key]
            tensor.sites.add(part.site)
            size = ITEMSIZE[tensor.dtype]
            header = m.encode((key, part.start, tensor.round, tensor.dtype))
            out.append((site, header, tensor.grad[part.start * size : part.stop * size]))
        return out

    def _post(self, posts: Sequence[tuple[_Site, bytes, memoryview]]) -> None:
        for site, header, view in posts:
            try:
                site.link.send(m.PART, header, [view], lambda site=site: self._sent(site))  # type: ignore[misc]
                self.sent_bytes += len(view) * (site.number != self.rank)
            except PeerError as error:
                self.fail(error)

    def _sent(self, site: _Site) -> None:
        with self._lock:
            site.ahead -= 1
            posts = self._next() if self.error is None else []
        self._post(posts)

    def place_of(self, key: int, start: int, number: int, nbytes: int) -> memoryview:
        with self._lock:
            tensor = self._tensors.get(key)
        if tensor is None or tensor.round != number:
            raise WireError(f"a sum of round {number} of tensor {key} came, which is not under way")
        at = start * ITEMSIZE[tensor.dtype]
        if at + nbytes > len(tensor.out):
            raise WireError(f"{nbytes} bytes at {at} of tensor {key}, which has {len(tensor.out)}")
        return tensor.out[at : at + nbytes]

    def came(self, key: int) -> None:
        with self._lock:
            tensor = self._tensors[key]
            tensor.left -= 1
            if tensor.left:
                return
            del self._tensors[key]
            self._lock.notify_all()
        tensor.done()

    def wait(self) -> None:
        """Until nothing is under way. Raises what has failed."""
        with self._lock:
            self._lock.wait_for(lambda: not self._tensors or self.error is not None)  # _watch ends it
            self._check()

    def _watch(self) -> None:
        """DeadlineError names what has been missing for so long."""
        while not self._closed.wait(min(1.0, self.deadline_s / 4)):
            with self._lock:
                key, tensor = next(iter(self._tensors.items()), (0, None))  # the oldest
                if tensor is None or time.monotonic() - tensor.began < self.deadline_s:
                    continue
                names = [self._sites[site].name for site in sorted(tensor.sites)]
            self.fail(DeadlineError(
                f"worker {self.rank} waited {self.deadline_s:.0f} s for {tensor.left} part(s) of tensor {key}, "
                f"round {tensor.round}, from {', '.join(names)}", hint="is another worker late, or a link slow?"))

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error
            tensors, self._tensors = list(self._tensors.values()), {}
            self._queue.clear()
            self._lock.notify_all()
        for tensor in tensors:
            tensor.done()  # who waits for it looks at `error`

    def close(self) -> None:
        self._closed.set()
        if self._watcher.is_alive():
            self._watcher.join()
        for site in self._sites:
            site.link.close()


class _Late:
    """Stands for a Receiver that is made after its link."""

    def __init__(self) -> None:
        self.real: Any = None
        self.ready = threading.Event()

    def room(self, kind: int, header: bytes, nbytes: int) -> memoryview:
        self.ready.wait()
        return self.real.room(kind, header, nbytes)  # type: ignore[no-any-return]

    def arrived(self, kind: int, header: bytes, payload: memoryview) -> None:
        self.ready.wait()
        self.real.arrived(kind, header, payload)

    def lost(self, error: PeerError) -> None:
        self.ready.wait()
        if self.real is not None:
            self.real.lost(error)


def _to_own(site: _Site, own: Summers, hello: tuple[str, int, int, str], options: Options) -> Link:
    late = _Late()
    mine, theirs = local.pair(site.name, site, f"worker {hello[1]}", late)
    try:
        late.real = own.accept(theirs, m.encode(hello))
    except RoadtrainError:
        mine.close()
        raise
    finally:
        late.ready.set()
    return mine
