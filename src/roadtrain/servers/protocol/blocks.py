"""Messages about blocks at a server. `divided` turns them into messages about chunks, which the
state machines of servers, relays and fan-in ends handle, and BlockAnswers joins the answers.
`gathered` turns messages about chunks, as relays and fan-in ends send them, into messages about
blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from roadtrain.chunks import PAGE, Block, Chunk, ChunkTable
from roadtrain.servers.protocol import messages as m
from roadtrain.units import round_up


def chunks_in(block: Block, bits: int) -> list[Chunk]:
    """Return the chunks of `block` that a bitmap names, in the order of the table."""
    return [chunk for i, chunk in enumerate(block.chunks) if bits >> i & 1]


def bit_of(block: Block, chunk: int) -> int:
    """Return the bitmap that names the chunk with the number `chunk`."""
    return 1 << chunk - block.chunks[0].id


def trained(block: Block) -> list[int]:
    """Return the parameters to which `BlockUpdate.scales` belongs, as indices of the table."""
    return [span.param for run in block.runs if run.trainable for span in run.spans]


def divided(message: Any, blocks: Sequence[Block]) -> Iterator[Any]:
    """Yield the messages about chunks that a message about a block stands for. Other messages are
    yielded unchanged.
    """
    if not isinstance(message, m.BlockMessage):
        yield message
        return
    block = blocks[message.block]
    chunks, worker = chunks_in(block, message.chunks), message.worker
    match message:
        case m.BlockPull():
            for c in chunks:
                yield m.Pull(c.id, message.version, destination(message, c), message.ticket, worker)
        case m.BlockPush(_, _, grad, fresh, keep, ticket, dtype, update):
            updates = {} if update is None else {u.chunk: u for u in divided(update, blocks)}
            for c in chunks:
                cast = dtype if c.dtype == "fp32" else ""
                part = _cut(grad, c.push_offset, c)
                yield m.Push(c.id, part, fresh, keep, ticket, None, worker, cast)
                if c.id in updates:
                    yield updates[c.id]
        case m.BlockClose(_, _, step):
            yield from (m.Close(c.id, step, worker) for c in chunks)
        case m.BlockUpdate(_, _, step, hyper, scales, order):
            scale_of = dict(zip(trained(block), scales))
            for c in chunks:
                scaled = [scale_of[span.param] for span in c.spans]
                yield m.ApplyUpdate(c.id, step, hyper[c.group], scaled, order, worker)
        case m.BlockDiscard():
            yield from (m.DiscardGrad(c.id, worker) for c in chunks)


def destination(pull: m.BlockPull, chunk: Chunk) -> Any:
    """Return the memory into which a pull copies the weights part of `chunk`."""
    if callable(pull.into):
        return pull.into(chunk)
    return _cut(pull.into, chunk.offset - pull.first, chunk)


def _cut(memory: Any, at: int, chunk: Chunk) -> Any:
    return None if memory is None else memory[at : at + round_up(chunk.weights_nbytes, PAGE)]


def gathered(messages: Iterable[m.Pull | m.GradientMessage], table: ChunkTable) -> list[Any]:
    """Return messages about blocks that stand for `messages`, none of which is a push. Messages
    about the same chunk keep their order. Pulls with the same ticket become one pull.
    """
    groups: list[tuple[tuple[Any, ...], dict[int, Any]]] = []  # (block and fields, by chunk)
    for message in messages:
        block = table.chunks[message.chunk].block
        key: tuple[Any, ...] = (type(message), block)
        match message:
            case m.Pull():
                key += message.version, message.ticket
            case m.Close():
                key += (message.step,)
            case m.ApplyUpdate():
                key += message.step, message.order
        found = None
        for candidate, by_chunk in groups:
            if message.chunk in by_chunk:
                found = None
            elif candidate == key and found is None:
                found = by_chunk
        if found is None:
            groups.append((key, found := {}))
        found[message.chunk] = message
    return [_whole(table.blocks[key[1]], key[2:], found) for key, found in groups]


def _whole(block: Block, fields: tuple[Any, ...], by_chunk: Mapping[int, Any]) -> m.BlockMessage:
    bits = sum(bit_of(block, chunk) for chunk in by_chunk)
    match next(iter(by_chunk.values())):
        case m.Pull():
            version, ticket = fields
            return m.BlockPull(block.index, bits, version, None, ticket)
        case m.Close():
            return m.BlockClose(block.index, bits, *fields)
        case m.ApplyUpdate():
            step, order = fields
            hyper: dict[int, tuple[float, ...]] = {
                run.group: () for run in block.runs if run.trainable
            }
            scale_of: dict[int, float | None] = dict.fromkeys(trained(block))
            for chunk in chunks_in(block, bits):
                update = by_chunk[chunk.id]
                hyper[chunk.group] = update.hyper
                scale_of |= {span.param: s for span, s in zip(chunk.spans, update.scales)}
            return m.BlockUpdate(block.index, bits, step, hyper, [*scale_of.values()], order)
        case _:
            return m.BlockDiscard(block.index, bits)


class BlockAnswers:
    """Joins a server's answers about chunks, so that a worker gets one answer to each message about
    a block. Messages that belong to no such message are passed on unchanged.

    Args:
        server: Number of the server.
        blocks: The blocks of the table.
        held: Numbers of the chunks that the server holds.
        join: Joins the sums of several chunks.
    """

    def __init__(
        self,
        server: int,
        blocks: Sequence[Block],
        held: Collection[int],
        join: Callable[[list[Any]], Any],
    ) -> None:
        self.server, self._blocks, self._join = server, blocks, join
        self._block_of = {c.id: b.index for b in blocks for c in b.trainable if c.id in held}
        # block -> number of its trainable chunks at this server
        self._trainable = {b.index: sum(c.id in held for c in b.trainable) for b in blocks}
        # (worker, ticket) -> number of chunks without an answer
        self._pulls: dict[tuple[int, int], int] = {}
        self._pushes: dict[tuple[int, int], int] = {}
        # block -> for each gradient, in order: chunk -> its sums. Only the gradients of which some,
        # but not all chunks have sums.
        self._sums: dict[int, deque[dict[int, Any]]] = {}

    def divided(self, message: Any) -> Iterator[Any]:
        """Divide a message of a worker, and expect the answers to its parts. Messages with the same
        ticket, which an intermediary may send, get one answer.
        """
        if isinstance(message, m.BlockPull | m.BlockPush):
            left = self._pulls if isinstance(message, m.BlockPull) else self._pushes
            key = message.worker, message.ticket
            left[key] = left.get(key, 0) + message.chunks.bit_count()
        return divided(message, self._blocks)

    def joined(self, message: Any, to: int | None) -> Any:
        """Return the message to send to worker `to` (None: to all workers) instead of `message`, or
        None if other chunks have no answer yet.
        """
        match message:
            case m.Pulled(ticket):
                return _last(self._pulls, (to or 0, ticket), message, m.BlockPulled(ticket))
            case m.BufferFree(ticket):
                return _last(self._pushes, (to or 0, ticket), message, message)
            case m.GradAccumulated(chunk, sums):
                return self._accumulated(self._block_of[chunk], chunk, sums)
        return message

    def _accumulated(self, block: int, chunk: int, sums: Any) -> m.BlockAccumulated | None:
        gradients = self._sums.setdefault(block, deque())
        gradient = next((found for found in gradients if chunk not in found), None)
        if gradient is None:
            gradients.append(gradient := {})
        gradient[chunk] = sums
        if len(gradient) < self._trainable[block]:
            return None
        assert gradient is gradients[0], "sums of a chunk arrive in the order of the gradients"
        gradients.popleft()
        whole = self._join([gradient[number] for number in sorted(gradient)])
        return m.BlockAccumulated(self.server, block, whole)

    def check(self) -> None:
        """Assert every invariant."""
        assert all(count > 0 for count in (*self._pulls.values(), *self._pushes.values()))
        for block, gradients in self._sums.items():
            assert all(0 < len(found) < self._trainable[block] for found in gradients)


def _last(left: dict[tuple[int, int], int], key: tuple[int, int], message: Any, whole: Any) -> Any:
    """Count an answer. Returns `message` if `key` is unknown, `whole` after the last answer, else
    None.
    """
    if key not in left:
        return message
    left[key] -= 1
    if left[key]:
        return None
    del left[key]
    return whole
