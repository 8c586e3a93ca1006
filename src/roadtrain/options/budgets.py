"""Compute from a memory budget how many buffers of each kind to allocate, and which records to keep
in memory besides the state files (Rule 4: memory use is bounded).

The budget is a number of bytes of host memory. It covers everything that roadtrain allocates. It
does not cover the interpreter, torch itself, or temporary allocations in the forward and backward
of a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from roadtrain.chunks import PAGE, Block, Chunk, ChunkTable, Record
from roadtrain.environment import free_memory
from roadtrain.errors import BudgetError
from roadtrain.units import MIB, parse_bytes, round_up, show_bytes

HUGE = 2 * MIB  # bytes of a huge page; buffer sizes are multiples of HUGE
LEAST_ACTIVATIONS = 8 * HUGE  # bytes
DEVICE_SLOTS = 3  # one block is used, one has arrived, one is being copied
DEVICE_GRADIENTS = 2  # one gradient is being copied to the host, while the next is computed


@dataclass(frozen=True)
class DeviceBudgets:
    """The memory of a device. Sizes are upper limits, in bytes."""

    root_bytes: int  # parameters of the root block, and their gradients, which torch allocates
    slots: int  # number of blocks whose parameters are on the device at once
    slot_bytes: int
    gradient_bytes: int  # size of each of the DEVICE_GRADIENTS flat gradients
    autograd_bytes: int  # the gradients of one block, as torch computes them
    activation_bytes: int  # inputs of blocks that stay on the device

    @property
    def total(self) -> int:
        """Bytes that may be in use at once."""
        blocks = self.slots * self.slot_bytes + DEVICE_GRADIENTS * self.gradient_bytes
        return self.root_bytes + blocks + self.autograd_bytes + self.activation_bytes


@dataclass(frozen=True)
class WorkerBudgets:
    """The number of buffers of each kind in a worker, and their sizes. Sizes are upper limits."""

    root_bytes: int  # bytes of the buffers of the root block
    slots: int  # number of blocks whose parameters are in memory at once
    slot_bytes: int
    kept: int  # number of those slots that keep blocks from forward to backward
    push_buffers: int  # number of blocks whose gradients are in memory at once
    push_bytes: int
    activation_bytes: int  # bytes of saved inputs of blocks
    compressed_bytes: int  # bytes of compressed gradients that wait for the update
    device: DeviceBudgets | None  # None on the CPU

    @property
    def total(self) -> int:
        """Bytes of host memory that may be in use at once."""
        blocks = self.slots * self.slot_bytes + self.push_buffers * self.push_bytes
        return self.root_bytes + blocks + self.activation_bytes + self.compressed_bytes


@dataclass(frozen=True)
class RecordBudgets:
    """The buffers of all servers in a process, and the chunks that these servers keep in memory.
    Sizes are upper limits."""

    buffers: int  # number of records that are read, updated or written at once
    buffer_bytes: int
    scratch_bytes: int  # additional bytes per buffer, for an expanded or spilled gradient
    resident: frozenset[int]  # chunks whose whole record is kept in memory
    weights_resident: frozenset[int]  # chunks with only the record's weights kept in memory
    resident_bytes: int

    @property
    def total(self) -> int:
        """Bytes that may be in use at once."""
        return self.buffers * (self.buffer_bytes + self.scratch_bytes) + self.resident_bytes


@dataclass(frozen=True)
class Budgets:
    """The division of a memory budget among the buffers of a worker and the buffers of the servers
    in the same process."""

    worker: WorkerBudgets
    records: RecordBudgets  # of all servers of the process together
    host_bytes: int  # the budget
    least_bytes: int = 0  # the smallest budget with which the job runs

    @property
    def total(self) -> int:
        """Bytes that may be in use at once."""
        return self.worker.total + self.records.total

    def __str__(self) -> str:
        return f"at most {show_bytes(self.total)} of {show_bytes(self.host_bytes)}"


@dataclass(frozen=True)
class BudgetTerms:
    """The properties of a run on which the division of the memory budget depends."""

    on_files: bool  # whether the state is on files or in another process
    holds_gradients: bool  # whether updates wait for step(), so that gradients accumulate
    serves: bool = True  # whether all servers run in this process (a residual server always does)
    residual_blocks: frozenset[int] = frozenset()  # blocks with gradients that are not sent yet
    root_residual: int = 0  # index of the root's residual block, which has its own buffer; 0: none
    compressed_bytes: int = 0  # bytes of the compressed gradients of one step
    # blocks that are kept from forward to backward: "all", "none", or "auto", which keeps as many
    # as fit if blocks are sent over a network
    buffering: str = "auto"


@dataclass
class _Free:
    """The bytes of a budget that are not assigned yet."""

    host: int

    def take(self, nbytes: int, most: int, share: int = 1) -> int:
        """Assign memory to at most `most` buffers of `nbytes` bytes, from 1 / `share` of the free
        host memory. Returns the number of buffers."""
        count = min(most, self.host // share // nbytes)
        self.host -= count * nbytes
        return count

    def buy(self, order: Sequence[str], size: _Sizes, servers: int) -> Counter[str]:
        """Assign memory to a buffer of each kind in `order`, unless it needs more than half of the
        free memory. Returns the number of assigned buffers of each kind; a "record" is one buffer
        per server."""
        cost = {"record": servers * (size.record + size.scratch), "slot": size.slot}
        cost["push"] = size.push
        bought = Counter[str]()
        for kind in order:
            bought[kind] += self.take(cost[kind], 1, 2)
        return bought


def host_bytes_of(budget: str | int | None, *, whole: bool) -> int:
    """Return a budget of host memory in bytes. If `budget` is None, the budget is half of the free
    memory, or all of it if `whole` is True."""
    return free_memory() // (1 if whole else 2) if budget is None else parse_bytes(budget)


def buffer_for(nbytes: Iterable[int]) -> int:
    """Return the size of a buffer that can hold each size in `nbytes`: a multiple of a huge page,
    and never 0."""
    return round_up(max(nbytes, default=0), HUGE) or HUGE


@dataclass(frozen=True)
class _Sizes:
    """The size of a buffer of each kind, in bytes."""

    root: int  # size of the parameters, torch's own p.grad, and the flat gradient to push
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
        """Compute the sizes. Slots and push buffers must be large enough for each of `blocks`.
        `residual_block` is the index of the block with the unsent gradients of the root block; 0
        if there is none."""
        root = table.blocks[0]
        pulled, pushed = round_up(root.pull_nbytes, HUGE), round_up(root.push_nbytes, HUGE)
        residuals = (
            round_up(table.blocks[residual_block].pull_nbytes, HUGE) if residual_block else 0
        )
        return cls(
            pulled + 2 * pushed + residuals,
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
    """Divide a memory budget of `host_bytes` among the kinds of buffers.

    `records`: the records of the chunks that servers in this process own, by the id of the chunk.
    `owners`: the server number of each chunk. `device_bytes`: the budget of device memory; None on
    the CPU. If a budget is too small, raises a BudgetError that names the smallest budget that is
    enough.
    """
    on_files, serves, buffering = terms.on_files, terms.serves, terms.buffering
    blocks = [b for b in table.blocks[1:] if b.index != terms.root_residual]
    size = _Sizes.of(table, records, blocks, terms.root_residual)
    servers = max(owners, default=0) + 1
    compute = len(blocks) - len(terms.residual_blocks - {terms.root_residual})
    slots, pushes = 2, 3
    per_server = 2 if on_files and (serves or records) else 0
    activations = LEAST_ACTIVATIONS
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
    computed = [b for b in blocks if b.index not in terms.residual_blocks]
    device = None if device_bytes is None else derive_device(table, computed, device_bytes)
    left = _Free(host_bytes - least)
    keep = 0
    if on_files:
        # Extra memory is spent in this order: overlap, then inputs, then waiting gradients, then
        # data kept in memory.
        order = ("record", "slot", "push") if records else ("slot", "push", "slot")
        more = left.buy((*order, *["record"] * 9) if serves else order, size, servers)
        slots, pushes = slots + more["slot"], pushes + more["push"]
        per_server += more["record"]
        activations += left.host // 4
        left.host -= left.host // 4
        # Gradients wait for step(), or, if updates start during backward, for a slow storage
        # device, so that the remaining updates overlap with the next forward.
        most = compute if serves else 4
        pushes += left.take(size.push, most, 2 if terms.holds_gradients else 3)
        # keep blocks, so that backward does not pull them again
        if buffering == "all" or (not serves and buffering == "auto"):
            keep = left.take(size.slot, compute)
    else:
        activations += left.host // 2
        slots += left.take(size.slot, len(blocks), 4)
    slots += keep
    if buffering == "all" and slots < compute:
        raise BudgetError(
            f"buffering='all' keeps {compute} blocks of {show_bytes(size.slot)} in memory, but only"
            f" {slots} fit in the budget of {show_bytes(host_bytes)}",
            hint="use buffering='auto', which keeps as many blocks as fit (with staleness 0 or 1)",
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
        device,
    )
    record = size.record if on_files else 0
    return Budgets(
        worker,
        RecordBudgets(servers * per_server, record, size.scratch, resident, public, kept),
        host_bytes,
        least,
    )


def derive_device(table: ChunkTable, blocks: Sequence[Block], device_bytes: int) -> DeviceBudgets:
    """Divide a budget of device memory, for a worker that runs `blocks`. Memory that is left is for
    inputs of blocks. Raises BudgetError if the budget is too small."""
    root = table.blocks[0]
    push = max((b.push_nbytes for b in blocks), default=0)
    slot = max((b.pull_nbytes for b in blocks), default=0)
    least = DeviceBudgets(
        max(root.pull_nbytes, PAGE) + root.push_nbytes,
        2,
        slot or PAGE,
        push or PAGE,
        push,
        LEAST_ACTIVATIONS,
    )
    if device_bytes < least.total:
        raise _too_small(table, "device", least.total, device_bytes, True)
    slots = min(DEVICE_SLOTS, 2 + (device_bytes - least.total) // least.slot_bytes)
    device = replace(least, slots=slots)
    return replace(device, activation_bytes=device.activation_bytes + device_bytes - device.total)


def _too_small(
    table: ChunkTable, where: str, least: int, budget: int, on_files: bool
) -> BudgetError:
    """Return the error for a budget of `budget` bytes of `where` ("host" or "device") memory, if
    the model needs `least` bytes."""
    enough = f"{-(-least // MIB)} MiB"  # rounded up, so that this number is enough
    way_out = f"give at least {enough}"
    if not on_files:
        way_out += ", or keep the state on files (store=DIRECTORY)"
    elif table.chunk_elements > 1 << 16 and where == "host":
        way_out += f", or use chunks smaller than {table.chunk_elements} elements"
    return BudgetError(
        f"this model needs at least {enough} of {where} memory besides torch, but "
        f"the budget is {show_bytes(budget)} (the model's largest block is '{_largest(table)}')",
        hint=way_out,
    )


def _kept(
    chunks: Sequence[Chunk], records: Mapping[int, Record], nbytes: int
) -> tuple[frozenset[int], frozenset[int], int]:
    """Choose which records on files are also kept in `nbytes` bytes of memory: weights first,
    because they are read twice per step. Returns the chunks kept completely, the chunks whose
    weights are kept, and the bytes used."""
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
    """The buffers of a server that runs in its own process."""

    records: RecordBudgets
    pool: int  # number of gradient buffers per worker; further gradients are written to files
    # number of buffers for parameters that are read from a file, or cast from masters, and sent to
    # workers
    answers: int
    piece_bytes: int  # size of a buffer of `pool` or `answers`
    least_bytes: int  # the smallest budget with which the server runs


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
    """Divide the memory budget of a server, `host_bytes`, among the kinds of buffers.

    `records`: the records of the server's chunks, by the id of the chunk. `holds_gradients`: True
    if updates wait for step(), so that the server must store the gradients of all its chunks.
    `wide`: True if gradients arrive in fp32. `beside`: bytes that are reserved to receive sums from
    switches (fan-in). If the budget is too small, raises a BudgetError that names the smallest
    budget that is enough.
    """
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
            f" {-(-least // MIB)} MiB{of_it}, but its budget is {show_bytes(host_bytes)}",
            hint="raise --budget, or use smaller chunks (chunk_elements)",
        )
    left = host_bytes - least
    while buffers < 8 and left > 8 * (record + scratch):
        buffers, left = buffers + 1, left - record - scratch
    needed = len(trainable) if holds_gradients else min(16, len(trainable))
    more = max(0, min(needed, left // 2 // (workers * piece)))
    pool, left = pool + more, left - more * workers * piece
    kept = RecordBudgets(buffers, record, scratch, *_kept(mine, records, left))
    return ServerBudgets(kept, pool, answers, piece, least)


def _largest(table: ChunkTable) -> str:
    return max(table.blocks, key=lambda b: b.pull_nbytes).name or "the root block"
