"""Budget -> how many buffers of each kind, and what stays in memory (Rule 4).

One number is asked for: host bytes. It covers everything that roadtrain allocates: the root block,
block buffers, gradient buffers, record buffers, saved block inputs, and memory copies of what rests
on files. It does not cover the interpreter, torch itself and what a block's own forward and
backward allocate for a moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roadtrain.chunks import Chunk, ChunkTable, Record
from roadtrain.errors import BudgetError
from roadtrain.units import MIB, round_up, show_bytes

HUGE = 2 * MIB  # buffers are whole huge pages


@dataclass(frozen=True)
class Budgets:
    """`resident` / `public_resident`: chunks whose record / weights part is kept in memory.
    Bytes are upper limits."""

    root_bytes: int
    slots: int
    slot_bytes: int
    push_buffers: int
    push_bytes: int
    record_buffers: int  # of all servers together
    record_bytes: int
    scratch_bytes: int  # an expanded or spilled gradient beside each record buffer
    activation_bytes: int
    compressed_bytes: int  # indices and values that wait for the update
    resident: frozenset[int]
    weights_resident: frozenset[int]
    resident_bytes: int
    kept: int = 0  # slots of `slots` that are there to keep blocks from forward to backward

    @property
    def total(self) -> int:
        """Bytes that may be in use at once."""
        return (
            self.root_bytes
            + self.slots * self.slot_bytes
            + self.push_buffers * self.push_bytes
            + self.record_buffers * (self.record_bytes + self.scratch_bytes)
            + self.activation_bytes
            + self.compressed_bytes
            + self.resident_bytes
        )


def derive(
    table: ChunkTable,
    records: Mapping[int, Record],
    owners: Sequence[int],
    host_bytes: int,
    *,
    on_files: bool,
    holds_gradients: bool,
    serves: bool = True,
    residual_blocks: frozenset[int] = frozenset(),
    root_residual: int = 0,
    compressed_bytes: int = 0,
    buffering: str = "auto",
) -> Budgets:
    """Split `host_bytes`. `records`: of what servers in this process keep. `serves`: all servers
    are in it; else the worker, and at most one for its residuals. `holds_gradients`: updates wait
    for step(), so gradients of all blocks pile up (beyond the buffers they go to files). `twins`:
    blocks that hold the compression's residuals; the root's has its own buffer. `compressed_bytes`:
    what compressed gradients of one step take. `buffering`: whether blocks are kept from forward to
    backward ("auto": as many as fit where they come over a network; "all", "none"). Raises
    BudgetError with the least number of bytes that would do.
    """
    root, blocks = table.blocks[0], [b for b in table.blocks[1:] if b.index != root_residual]
    slot = max((round_up(b.pull_nbytes, HUGE) for b in blocks), default=0) or HUGE
    # also where no block trains
    push = max((round_up(b.push_nbytes, HUGE) for b in blocks), default=0) or HUGE
    record = max((round_up(r.nbytes, HUGE) for r in records.values()), default=HUGE)
    scratch = max((round_up(c.numel * 4, HUGE) for c in table.trainable), default=0)
    # parameters, torch's own p.grad, and the flat piece that is pushed
    root_bytes = round_up(root.pull_nbytes, HUGE) + 2 * round_up(root.push_nbytes, HUGE)
    if root_residual:
        root_bytes += round_up(table.blocks[root_residual].pull_nbytes, HUGE)
    servers = max(owners, default=0) + 1
    all_records = sum(round_up(r.nbytes, 4096) for r in records.values())
    compute = len(blocks) - len(residual_blocks - {root_residual})
    slots, pushes, per_server, activations = (
        2,
        3,
        (2 if on_files and (serves or records) else 0),
        8 * HUGE,
    )
    if not on_files and holds_gradients:
        pushes += len(blocks)

    def used() -> int:
        fixed = root_bytes + compressed_bytes + activations
        return fixed + slots * slot + pushes * push + servers * per_server * (record + scratch)

    def check_kept() -> None:
        if buffering == "all" and slots < compute:
            raise BudgetError(
                f"{slots} of {compute} blocks of {show_bytes(slot)} can be kept from forward to"
                f" backward, the budget is {show_bytes(host_bytes)}",
                hint="buffering='auto' keeps what fits (with staleness 0 or 1)",
            )

    least = used() + (0 if on_files else all_records + servers * scratch)
    if host_bytes < least:
        enough = f"{-(-least // MIB)} MiB"  # rounded up: what is named here fits
        way_out = f"give at least {enough}"
        if not on_files:
            way_out += ", or place the state on files (store=DIRECTORY)"
        elif table.chunk_elements > 1 << 16:
            way_out += f", or smaller chunks than {table.chunk_elements} elements"
        raise BudgetError(
            f"this model needs at least {enough} of host memory besides torch, "
            f"the budget is {show_bytes(host_bytes)} (its largest block is '{_largest(table)}')",
            hint=way_out,
        )
    left = host_bytes - least
    if not on_files:
        activations += left // 2
        slots += min(len(blocks), left // 4 // slot)
        check_kept()
        return Budgets(
            root_bytes,
            slots,
            slot,
            pushes,
            push,
            0,
            0,
            scratch,
            activations,
            compressed_bytes,
            frozenset(records),
            frozenset(),
            all_records + servers * scratch,
        )
    # The order in which more memory pays: overlap first, then inputs, then gradients that wait,
    # then what is kept.
    before = ("record", "slot", "push") if records else ("slot", "push", "slot")
    for name in (*before, *["record"] * 9) if serves else before:
        cost = {"record": servers * (record + scratch), "slot": slot, "push": push}[name]
        if cost <= left // 2:
            left -= cost
            slots, pushes = slots + (name == "slot"), pushes + (name == "push")
            per_server += name == "record"
    activations += left // 4
    left -= left // 4
    # Gradients that wait: for step(), or (updates begin in backward) for a device that is slower
    # than backward, so that what is left of the updates hides behind the next forward.
    more = min(compute if serves else 4, left // (2 if holds_gradients else 3) // push)
    pushes, left = pushes + more, left - more * push
    keep = 0
    # then backward pulls nothing again
    if buffering == "all" or (not serves and buffering == "auto"):
        keep = min(compute, left // slot)
        slots, left = slots + keep, left - keep * slot
        check_kept()
    resident, public, kept = _kept([c for c in table.chunks if c.id in records], records, left)
    return Budgets(
        root_bytes,
        slots,
        slot,
        pushes,
        push,
        servers * per_server,
        record,
        scratch,
        activations,
        compressed_bytes,
        resident,
        public,
        kept,
        keep,
    )


def _kept(
    chunks: Sequence[Chunk], records: Mapping[int, Record], nbytes: int
) -> tuple[frozenset[int], frozenset[int], int]:
    """Chunks of which the record, and of which the weights part, is kept in `nbytes` of memory,
    and what that takes. Parameters first (read twice a step, 2 bytes each), the root's and the
    first blocks' before the others (the next forward wants them soonest), then records (read
    once a step, 12 bytes and more)."""
    public, resident, kept = set(), set(), 0
    for chunk in chunks:
        if kept + records[chunk.id].weights_nbytes > nbytes:
            break
        public.add(chunk.id)
        kept += records[chunk.id].weights_nbytes
    for chunk in chunks:
        size = records[chunk.id].state_nbytes
        if chunk.trainable and chunk.id in public and kept + size <= nbytes:
            public.discard(chunk.id)
            resident.add(chunk.id)
            kept += size
    return frozenset(resident), frozenset(public), kept


@dataclass(frozen=True)
class ServerBudgets:
    """Of a server in a process of its own. `pool`: gradient buffers a worker; what they cannot
    hold goes to files."""

    record_buffers: int
    record_bytes: int
    scratch_bytes: int
    pool: int
    # buffers for parameters on their way from a file, or cast from masters, to the workers
    answers: int
    piece_bytes: int
    resident: frozenset[int]
    weights_resident: frozenset[int]


def derive_server(
    table: ChunkTable,
    records: Mapping[int, Record],
    host_bytes: int,
    *,
    workers: int,
    holds_gradients: bool,
    wide: bool = False,
) -> ServerBudgets:
    """Split a server's `host_bytes`; `records` are its own. `wide`: gradients come in fp32.
    Raises BudgetError with the least that would do."""
    mine = [table.chunks[number] for number in sorted(records)]
    trainable = [c for c in mine if c.trainable]
    record = max((round_up(r.nbytes, HUGE) for r in records.values()), default=HUGE)
    scratch = max((round_up(c.numel * 4, HUGE) for c in trainable), default=HUGE)
    piece = max((round_up(r.weights_nbytes, HUGE) for r in records.values()), default=HUGE)
    piece = max(piece, scratch) if wide else piece
    buffers, pool, answers = 2, 4, max(4, 2 * workers)
    least = buffers * (record + scratch) + (workers * pool + answers) * piece
    if host_bytes < least:
        raise BudgetError(
            f"a server of {len(mine)} chunks and {workers} workers needs at least"
            f" {-(-least // MIB)} MiB, its budget is {show_bytes(host_bytes)}",
            hint="raise --budget, or choose smaller chunks (chunk_elements)",
        )
    left = host_bytes - least
    while buffers < 8 and left > 8 * (record + scratch):
        buffers, left = buffers + 1, left - record - scratch
    wanted = len(trainable) if holds_gradients else min(16, len(trainable))
    more = max(0, min(wanted, left // 2 // (workers * piece)))
    pool, left = pool + more, left - more * workers * piece
    resident, public, _ = _kept(mine, records, left)
    return ServerBudgets(buffers, record, scratch, pool, answers, piece, resident, public)


@dataclass(frozen=True)
class RelayBudgets:
    """Of a relay, for each server. `copies`: buffers of parameters; `pool`: of gradients, a
    worker."""

    copies: int
    pool: int
    piece_bytes: int
    scratch_bytes: int  # of a sum


def derive_relay(
    table: ChunkTable, host_bytes: int, *, servers: int, local: int, holds_gradients: bool
) -> RelayBudgets:
    """Split a relay's `host_bytes`. One worker's gradients pass through; those of several rest here
    until all have them, the whole model's if they wait for step(). Raises BudgetError with the
    least that would do.
    """
    share = -(-len(table.trainable) // servers) + 2  # chunks of a server
    piece = max((round_up(c.weights_nbytes, HUGE) for c in table.chunks), default=HUGE)
    scratch = (
        max((round_up(c.numel * 4, HUGE) for c in table.trainable), default=HUGE)
        if local > 1
        else 0
    )
    pool = min(share, 8) if local == 1 or not holds_gradients else share
    least = servers * ((local * pool + 4) * piece + 2 * scratch)
    if host_bytes < least:
        raise BudgetError(
            f"a relay of {local} worker(s) and {servers} server(s) needs at least"
            f" {-(-least // MIB)} MiB, it has {show_bytes(host_bytes)}",
            hint="raise relay, or choose smaller chunks",
        )
    more = (host_bytes - least) // (servers * piece)
    return RelayBudgets(4 + min(more, len(table.chunks)), pool, piece, scratch)


def _largest(table: ChunkTable) -> str:
    return max(table.blocks, key=lambda b: b.pull_nbytes).name or "the root block"
