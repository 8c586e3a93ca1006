"""Budget -> how many buffers of each kind, and what stays in memory (Rule 4).

One number is asked for: host bytes. It covers everything that roadtrain allocates: the root block,
block buffers, gradient buffers, record buffers, saved block inputs, and memory copies of what rests
on files. It does not cover the interpreter, torch itself and what a block's own forward and
backward allocate for a moment.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from roadtrain.chunks import Block, Chunk, ChunkTable, Record
from roadtrain.errors import BudgetError
from roadtrain.units import MIB, parse_bytes, round_up, show_bytes

HUGE = 2 * MIB  # buffers are whole huge pages


@dataclass(frozen=True)
class WorkerBudgets:
    """Of a worker. Bytes are upper limits."""

    root_bytes: int  # of the root block's buffers
    slots: int  # blocks of parameters that are in memory at once
    slot_bytes: int
    kept: int  # of `slots`: those that are there to keep blocks from forward to backward
    push_buffers: int  # gradients of blocks that are in memory at once
    push_bytes: int
    activation_bytes: int  # saved inputs of blocks
    compressed_bytes: int  # indices and values that wait for the update

    @property
    def total(self) -> int:
        """Bytes that may be in use at once."""
        blocks = self.slots * self.slot_bytes + self.push_buffers * self.push_bytes
        return self.root_bytes + blocks + self.activation_bytes + self.compressed_bytes


@dataclass(frozen=True)
class RecordBudgets:
    """Of servers. Bytes are upper limits."""

    buffers: int  # for records that are read, updated or written
    buffer_bytes: int
    scratch_bytes: int  # an expanded or spilled gradient beside each buffer
    resident: frozenset[int]  # chunks whose record is kept in memory
    weights_resident: frozenset[int]  # chunks whose weights part alone is kept in memory
    resident_bytes: int

    @property
    def total(self) -> int:
        """Bytes that may be in use at once."""
        return self.buffers * (self.buffer_bytes + self.scratch_bytes) + self.resident_bytes


@dataclass(frozen=True)
class Budgets:
    """Of a process with a worker."""

    worker: WorkerBudgets
    records: RecordBudgets  # of all servers in the process together
    host_bytes: int  # that they were made of

    @property
    def total(self) -> int:
        """Bytes that may be in use at once."""
        return self.worker.total + self.records.total

    def __str__(self) -> str:
        return f"at most {show_bytes(self.total)} of {show_bytes(self.host_bytes)}"


@dataclass(frozen=True)
class BudgetTerms:
    """What else is to be in the memory that is split, and what can leave it."""

    on_files: bool  # the state rests on files or elsewhere, not in this memory
    holds_gradients: bool  # updates wait for step(): gradients pile up, or go to files
    serves: bool = True  # all servers are in this process; else none but that of residuals
    residual_blocks: frozenset[int] = frozenset()  # that hold what compression has not sent
    root_residual: int = 0  # the one of the root block, which has a buffer of its own; 0: none
    compressed_bytes: int = 0  # of the compressed gradients of one step
    # whether blocks are kept from forward to backward: "all", "none", or as many as fit where they
    # come over a network ("auto")
    buffering: str = "auto"


@dataclass
class _Left:
    """Bytes that nobody has been given yet."""

    host: int
    device: float  # infinite where it is not bounded

    def take(self, nbytes: int, most: int, share: int = 1, *, on_device: bool = False) -> int:
        """At most `most` buffers of `nbytes`, together at most 1/`share` of what is left. Returns
        how many."""
        count = min(most, self.host // share // nbytes)
        if on_device:
            count = int(min(count, self.device // nbytes))
            self.device -= count * nbytes
        self.host -= count * nbytes
        return count

    def buy(self, order: Sequence[str], size: _Sizes, servers: int) -> Counter[str]:
        """One buffer more of each kind in `order`, where it takes at most half of what is left;
        a record's at every server. Returns how many of each kind."""
        cost = {"record": servers * (size.record + size.scratch), "slot": size.slot}
        cost["push"] = size.push
        bought = Counter[str]()
        for kind in order:
            bought[kind] += self.take(cost[kind], 1, 2, on_device=kind != "record")
        return bought


def host_bytes_of(asked: str | int | None, *, whole: bool) -> int:
    """Bytes of a host budget: `asked`, else half of the memory that is free, or the `whole` of
    it."""
    if asked is not None:
        return parse_bytes(asked)
    free = psutil.virtual_memory().available
    return int(free if whole else free // 2)


def buffer_for(nbytes: Iterable[int]) -> int:
    """Bytes of a buffer that the largest fits into, also where there is none."""
    return round_up(max(nbytes, default=0), HUGE) or HUGE


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one buffer of each kind."""

    root: int  # parameters, torch's own p.grad, and the flat piece that is pushed
    root_on_device: int
    slot: int
    push: int
    record: int
    scratch: int

    @classmethod
    def of(
        cls,
        table: ChunkTable,
        records: Mapping[int, Record],
        blocks: Sequence[Block],
        residual_block: int,
    ) -> _Sizes:
        """`blocks`: they take slots. `residual_block`: of the root's residuals, 0 for none."""
        root = table.blocks[0]
        pulled, pushed = round_up(root.pull_nbytes, HUGE), round_up(root.push_nbytes, HUGE)
        residuals = (
            round_up(table.blocks[residual_block].pull_nbytes, HUGE) if residual_block else 0
        )
        return cls(
            pulled + 2 * pushed + residuals,
            pulled + pushed,
            buffer_for(block.pull_nbytes for block in blocks),
            buffer_for(block.push_nbytes for block in blocks),
            buffer_for(record.nbytes for record in records.values()),
            buffer_for(chunk.numel * 4 for chunk in table.trainable) if table.trainable else 0,
        )


def derive(
    table: ChunkTable,
    records: Mapping[int, Record],
    owners: Sequence[int],
    terms: BudgetTerms,
    host_bytes: int,
    device_bytes: int | None = None,
) -> Budgets:
    """Split `host_bytes`. `records`: of what servers in this process keep. `device_bytes`: of an
    accelerator, for its side of the root's buffers, of slots and of gradient buffers (None: not
    bounded). Raises BudgetError with the least number of bytes that would do."""
    on_files, serves, buffering = terms.on_files, terms.serves, terms.buffering
    blocks = [b for b in table.blocks[1:] if b.index != terms.root_residual]
    size = _Sizes.of(table, records, blocks, terms.root_residual)
    servers = max(owners, default=0) + 1
    compute = len(blocks) - len(terms.residual_blocks - {terms.root_residual})
    slots, pushes = 2, 3
    per_server = 2 if on_files and (serves or records) else 0
    activations = 8 * HUGE
    in_ram = 0
    if not on_files:
        pushes += len(blocks) if terms.holds_gradients else 0
        in_ram = sum(round_up(r.nbytes, 4096) for r in records.values()) + servers * size.scratch
    least = (
        size.root + terms.compressed_bytes + activations + slots * size.slot + pushes * size.push
    )
    least += servers * per_server * (size.record + size.scratch) + in_ram
    if host_bytes < least:
        raise _too_small(table, "host", least, host_bytes, on_files)
    on_device = size.root_on_device + slots * size.slot + pushes * size.push
    if device_bytes is not None and device_bytes < on_device:
        raise _too_small(table, "device", on_device, device_bytes, True)
    left = _Left(host_bytes - least, math.inf if device_bytes is None else device_bytes - on_device)
    keep = 0
    if on_files:
        # The order in which more memory pays: overlap first, then inputs, then gradients that
        # wait, then what is kept.
        order = ("record", "slot", "push") if records else ("slot", "push", "slot")
        more = left.buy((*order, *["record"] * 9) if serves else order, size, servers)
        slots, pushes = slots + more["slot"], pushes + more["push"]
        per_server += more["record"]
        activations += left.host // 4
        left.host -= left.host // 4
        # Gradients that wait: for step(), or (updates begin in backward) for a device that is
        # slower than backward, so that what is left of the updates hides behind the next forward.
        most = compute if serves else 4
        pushes += left.take(size.push, most, 2 if terms.holds_gradients else 3, on_device=True)
        # then backward pulls nothing again
        if buffering == "all" or (not serves and buffering == "auto"):
            keep = left.take(size.slot, compute, on_device=True)
    else:
        activations += left.host // 2
        slots += left.take(size.slot, len(blocks), 4, on_device=True)
    slots += keep
    if buffering == "all" and slots < compute:
        raise BudgetError(
            f"{slots} of {compute} blocks of {show_bytes(size.slot)} can be kept from forward to"
            f" backward, the budget is {show_bytes(host_bytes)}",
            hint="buffering='auto' keeps what fits (with staleness 0 or 1)",
        )
    resident, public, kept = frozenset(records), frozenset[int](), in_ram
    if on_files:
        mine = [c for c in table.chunks if c.id in records]
        resident, public, kept = _kept(mine, records, left.host)
    worker = WorkerBudgets(
        size.root,
        slots,
        size.slot,
        keep,
        pushes,
        size.push,
        activations,
        terms.compressed_bytes,
    )
    record = size.record if on_files else 0
    return Budgets(
        worker,
        RecordBudgets(servers * per_server, record, size.scratch, resident, public, kept),
        host_bytes,
    )


def _too_small(
    table: ChunkTable, where: str, least: int, given: int, on_files: bool
) -> BudgetError:
    enough = f"{-(-least // MIB)} MiB"  # rounded up: what is named here fits
    way_out = f"give at least {enough}"
    if not on_files:
        way_out += ", or place the state on files (store=DIRECTORY)"
    elif table.chunk_elements > 1 << 16 and where == "host":
        way_out += f", or smaller chunks than {table.chunk_elements} elements"
    return BudgetError(
        f"this model needs at least {enough} of {where} memory besides torch, "
        f"the budget is {show_bytes(given)} (its largest block is '{_largest(table)}')",
        hint=way_out,
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
    """Of a server in a process of its own."""

    records: RecordBudgets
    pool: int  # gradient buffers a worker; what they cannot hold goes to files
    # buffers for parameters on their way from a file, or cast from masters, to the workers
    answers: int
    piece_bytes: int  # of one buffer of `pool` or `answers`


def derive_server(
    table: ChunkTable,
    records: Mapping[int, Record],
    host_bytes: int,
    *,
    workers: int,
    holds_gradients: bool,
    wide: bool = False,
    beside: int = 0,
) -> ServerBudgets:
    """Split a server's `host_bytes`; `records` are its own. `wide`: gradients come in fp32.
    `beside`: of these bytes, what the end of a fan-in has. Raises BudgetError with the least that
    would do."""
    mine = [table.chunks[number] for number in sorted(records)]
    trainable = [c for c in mine if c.trainable]
    record = buffer_for(record.nbytes for record in records.values())
    scratch = buffer_for(chunk.numel * 4 for chunk in trainable)
    piece = buffer_for(record.weights_nbytes for record in records.values())
    piece = max(piece, scratch) if wide else piece
    buffers, pool, answers = 2, 4, max(4, 2 * workers)
    least = beside + buffers * (record + scratch) + (workers * pool + answers) * piece
    if host_bytes < least:
        of_it = f" ({show_bytes(beside)} of it for its fan-in)" if beside else ""
        raise BudgetError(
            f"a server of {len(mine)} chunks and {workers} workers needs at least"
            f" {-(-least // MIB)} MiB{of_it}, its budget is {show_bytes(host_bytes)}",
            hint="raise --budget, or choose smaller chunks (chunk_elements)",
        )
    left = host_bytes - least
    while buffers < 8 and left > 8 * (record + scratch):
        buffers, left = buffers + 1, left - record - scratch
    wanted = len(trainable) if holds_gradients else min(16, len(trainable))
    more = max(0, min(wanted, left // 2 // (workers * piece)))
    pool, left = pool + more, left - more * workers * piece
    kept = RecordBudgets(buffers, record, scratch, *_kept(mine, records, left))
    return ServerBudgets(kept, pool, answers, piece)


def _largest(table: ChunkTable) -> str:
    return max(table.blocks, key=lambda b: b.pull_nbytes).name or "the root block"
