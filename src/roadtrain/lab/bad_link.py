"""A TCP relay that makes a link bad on purpose: slow, late, stalled, cut, flipping bits. In user
space: no root needed.

Stands before one target; peers connect to the relay instead. Runs in a thread of its own, or as a
process, also on a host of the lab: `python -m roadtrain.lab.bad_link LISTEN:PORT TARGET:PORT`
prints its address, then each line of its input is a method with its arguments, answered by `done`:
`set_rate 1e6`, `cut 1000 back`, `flip 5000 there 7`; it ends with its input. Assumes TCP. Does NOT
lose or reorder bytes, changes none but those that `flip` asks for, and does NOT look into them.

Note: two ways. `there` is from the peer to the target, `back` the other. Each has its own rate,
which all connections share; a piece leaves no earlier than the delay after its arrival. What is on
the way is bounded: QUEUE pieces a connection and way, so at a long delay the rate is at most QUEUE
* PIECE / delay.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

PIECE, QUEUE = 1 << 16, 256
SLICE_S = 0.02  # the longest piece in time: a new rate, a stall or a cut takes effect within it
# asyncio wakes up to some ms late; a direction that was busy may catch up with that
CREDIT_S = 0.01
Way = Literal["there", "back"]


class Relay:
    """Inside the context `.address` is where it listens; port 0: any free one. `nbytes` counts what
    it passed on, `flipped` the bits that it changed.

    The methods may be called from any thread at any time and have taken effect when they return.
    """

    def __init__(
        self,
        target: tuple[str, int],
        bytes_per_s: float = float("inf"),
        delay_s: float = 0.0,
        listen: tuple[str, int] = ("127.0.0.1", 0),
    ) -> None:
        self.target, self.delay_s, self.listen = target, delay_s, listen
        self.nbytes: dict[Way, int] = {"there": 0, "back": 0}
        self._rate: dict[Way, float] = {"there": bytes_per_s, "back": bytes_per_s}
        # when the last piece will have crossed
        self._free_at: dict[Way, float] = {"there": 0.0, "back": 0.0}
        # bytes until the cut
        self._left: dict[Way, float] = {"there": float("inf"), "back": float("inf")}
        self.flipped = 0
        # way, place among the bytes that go that way, bit
        self._flips: list[tuple[Way, int, int]] = []
        # every living connection and its sides
        self._open: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    def set_rate(self, bytes_per_s: float, back_bytes_per_s: float | None = None) -> None:
        """`there`, and `back` (the same, unless said otherwise)."""
        rates: dict[Way, float] = {"there": bytes_per_s, "back": back_bytes_per_s or bytes_per_s}
        self._do(lambda: self._rate.update(rates))

    def stall(self) -> None:
        """Nothing is passed on, every connection stays open, new ones too. Until `resume`."""
        self._do(self._going.clear)

    def cut(self, after_nbytes: int = 0, way: Way = "there") -> None:
        """Closes both sides of every connection, at once or as soon as exactly so many more bytes
        went that way."""

        def begin() -> None:
            self._left[way] = after_nbytes
            if not after_nbytes:
                self._cut(way)

        self._do(begin)

    def flip(self, after_nbytes: int = 0, way: Way = "there", bit: int = 0) -> None:
        """Changes one bit (0 to 7) of the byte that goes that way after so many more, of all
        connections together. Any number may be asked for. What waits here (for its rate, a
        delay, a stall) has yet to go."""

        def begin() -> None:
            self._flips.append((way, self.nbytes[way] + int(after_nbytes), int(bit)))

        self._do(begin)

    def resume(self) -> None:
        """No stall, no cut or flip that waits for its bytes."""

        def begin() -> None:
            self._flips.clear()
            self._left = {"there": float("inf"), "back": float("inf")}
            self._going.set()

        self._do(begin)

    def __enter__(self) -> Relay:
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="lab relay", daemon=True
        )
        self._thread.start()
        if cause := started.exception():
            self._thread.join()
            raise cause
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._ended.set)
        self._thread.join()

    def _do(self, change: Callable[[], object]) -> None:
        async def in_the_loop() -> None:
            change()

        asyncio.run_coroutine_threadsafe(in_the_loop(), self._loop).result()

    async def _serve(self, started: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended, self._going = asyncio.Event(), asyncio.Event()
        self._going.set()
        try:
            server = await asyncio.start_server(self._accept, *self.listen)
        except OSError as cause:
            started.set_exception(cause)
            return
        self.address: tuple[str, int] = server.sockets[0].getsockname()[:2]
        started.set_result(None)
        await self._ended.wait()
        server.close()  # asyncio.run cancels the connections

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sides = [writer]
        # asyncio's own logs when it is cancelled
        task = self._loop.create_task(self._connect(reader, sides))
        self._open[task] = sides
        task.add_done_callback(self._close)

    async def _connect(
        self, reader: asyncio.StreamReader, sides: list[asyncio.StreamWriter]
    ) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            sides.append(far_writer)
            ways: tuple[tuple[Way, asyncio.StreamReader, asyncio.StreamWriter], ...]
            ways = ("there", reader, far_writer), ("back", far_reader, sides[0])
            async with asyncio.TaskGroup() as tasks:
                for way, source, sink in ways:
                    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(QUEUE)
                    # after drain() all is with the kernel, also before a cut
                    sink.transport.set_write_buffer_limits(0)
                    tasks.create_task(self._read(source, queue))
                    tasks.create_task(self._write(way, queue, sink))
        except* OSError:  # one side broke: so does the other, in _close
            pass

    def _close(self, task: asyncio.Task[None]) -> None:
        for side in self._open.pop(task):
            side.transport.abort()

    async def _read(
        self, reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        piece = b"x"
        while piece:  # the last one is empty: the end of the stream, which is as late as the rest
            piece = await reader.read(PIECE)
            await queue.put((self._loop.time() + self.delay_s, piece))

    async def _write(
        self, way: Way, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        while True:
            due, piece = await queue.get()
            await asyncio.sleep(due - self._loop.time())
            if not piece:
                await self._going.wait()
                return writer.write_eof()
            while piece:
                await self._going.wait()
                # another connection passes on the last bytes before the cut
                while not self._left[way]:
                    await asyncio.sleep(CREDIT_S)
                size = int(max(1, min(len(piece), self._left[way], self._rate[way] * SLICE_S)))
                self._left[way] -= size
                last = not self._left[way]
                begin = max(self._free_at[way], self._loop.time() - CREDIT_S)
                self._free_at[way] = begin + size / self._rate[way]
                await asyncio.sleep(self._free_at[way] - self._loop.time())
                await self._going.wait()
                begin_at = self.nbytes[way]
                self.nbytes[way] += size
                writer.write(self._spoiled(way, begin_at, piece[:size]))
                await writer.drain()
                piece = piece[size:]
                if last:
                    return self._cut(way)

    def _spoiled(self, way: Way, begin: int, piece: bytes) -> bytes:
        """`piece`, which goes as bytes `begin`, ... of its way, with the bits changed that
        `flip` asked for."""
        if not self._flips:
            return piece
        spoiled = bytearray(piece)
        for flip in list(self._flips):
            its_way, at, bit = flip
            if its_way == way and begin <= at < begin + len(piece):
                spoiled[at - begin] ^= 1 << bit
                self._flips.remove(flip)
                self.flipped += 1
        return bytes(spoiled)

    def _cut(self, way: Way) -> None:
        self._left[way] = float("inf")
        for task, sides in self._open.items():
            task.cancel()
            for side in sides:  # now: nothing more may leave until the tasks notice
                side.transport.abort()


def main(listen: str, target: str) -> None:
    (host, port), (to, to_port) = (text.rsplit(":", 1) for text in (listen, target))
    with Relay((to, int(to_port)), listen=(host, int(port))) as relay:
        print(*relay.address, flush=True)
        for line in sys.stdin:
            name, *words = line.split()
            getattr(relay, name)(*(word if word.isalpha() else float(word) for word in words))
            print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
