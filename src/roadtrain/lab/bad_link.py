"""A TCP relay that makes a link faulty on purpose: slow, delayed, stalled, cut, with flipped bits.

Peers connect to the relay, which passes their data on to the target. A relay runs in a thread
(`Relay`) or in a process of its own: `python -m roadtrain.lab.bad_link LISTEN:PORT TARGET:PORT`
prints the relay's address. Each line of the process's standard input calls a method of Relay, such
as `set_rate 1e6`, `cut 1000 back` or `flip 5000 there 7`. After each call the process prints
`done`. The process ends at the end of its standard input. Needs no root.

Note "directions". `there` is the direction from the peer to the target, and `back` the opposite
direction. All connections share the rate of a direction. The relay holds at most about 16 MiB per
connection and direction, so a long delay limits the rate to 16 MiB / delay.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

PIECE, QUEUE = 1 << 16, 256
SLICE_S = 0.02  # longest time that a piece takes at the set rate; changes take effect within it
# asyncio wakes up some ms late; a busy direction may make up for a delay of so many seconds
CREDIT_S = 0.01
Way = Literal["there", "back"]


class Relay:
    """A TCP relay that makes a link faulty on purpose, and runs within its context.

    `address`: the address at which the relay listens (port 0 in `listen` chooses a free port).
    `nbytes`: number of bytes passed on to the target ("there") and back ("back"). `flipped`: number
    of flipped bits. All methods are thread-safe and take effect before they return.
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
        # time at which the last piece will have crossed the link
        self._free_at: dict[Way, float] = {"there": 0.0, "back": 0.0}
        # number of bytes until the cut
        self._left: dict[Way, float] = {"there": float("inf"), "back": float("inf")}
        self.flipped = 0
        # (direction, offset among the bytes of the direction, bit)
        self._flips: list[tuple[Way, int, int]] = []
        # the task of each open connection -> both sides of the connection
        self._open: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    def set_rate(self, bytes_per_s: float, back_bytes_per_s: float | None = None) -> None:
        """Set the rate towards the target, and the rate back from it (default: the same)."""
        rates: dict[Way, float] = {"there": bytes_per_s, "back": back_bytes_per_s or bytes_per_s}
        self._do(lambda: self._rate.update(rates))

    def stall(self) -> None:
        """Stop passing data on until `resume` is called; connections stay open and new ones are
        accepted."""
        self._do(self._going.clear)

    def cut(self, after_nbytes: int = 0, way: Way = "there") -> None:
        """Close all connections when exactly `after_nbytes` more bytes (0: at once) have passed in
        the direction `way`, counted over all connections."""

        def begin() -> None:
            self._left[way] = after_nbytes
            if not after_nbytes:
                self._cut(way)

        self._do(begin)

    def flip(self, after_nbytes: int = 0, way: Way = "there", bit: int = 0) -> None:
        """Flip bit `bit` (0 to 7) of the byte that follows `after_nbytes` more bytes in the
        direction `way`, counted over all connections. Bytes that still wait in the relay are
        counted too. May be called repeatedly."""

        def begin() -> None:
            self._flips.append((way, self.nbytes[way] + int(after_nbytes), int(bit)))

        self._do(begin)

    def resume(self) -> None:
        """End a stall, and cancel pending cuts and flips."""

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
        # a task of our own: asyncio's would log its cancellation
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
                    # with limit 0, drain() waits until the kernel has all bytes, as a cut needs
                    sink.transport.set_write_buffer_limits(0)
                    tasks.create_task(self._read(source, queue))
                    tasks.create_task(self._write(way, queue, sink))
        except* OSError:  # one side failed: _close closes the other
            pass

    def _close(self, task: asyncio.Task[None]) -> None:
        for side in self._open.pop(task):
            side.transport.abort()

    async def _read(
        self, reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        piece = b"x"
        while piece:  # an empty piece marks the end of the stream, and is also delayed
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
                # wait while another connection passes on the last bytes before the cut
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
        """Return `piece` with the pending flips applied. `begin`: the number of bytes that passed
        in the direction `way` before `piece`."""
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
            for side in sides:  # abort at once, so that no more bytes leave before the tasks end
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
