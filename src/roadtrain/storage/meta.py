"""StoreMeta: the description of a store, written as `store.json` into every generation directory.

The process that writes it must hold the directory's lock. The description does not contain the
committed step: see storage/ledger.py.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from roadtrain.chunks import Chunk, ChunkTable, ParamSpec, Record, Span, record
from roadtrain.errors import DamagedError, ForeignError
from roadtrain.storage.direct import replace_file, typed_errors
from roadtrain.storage.history import HistoryLink
from roadtrain.storage.sealed import sealed, unsealed

FORMAT = 1
RESTORE = "restore this file from a copy of the store; the disk may be failing"


@dataclass(frozen=True)
class GroupRule:
    """Update rule of a parameter group, with the names of its state arrays (fp32) and scalars
    (float64, one row per parameter)."""

    rule: str
    arrays: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()


@dataclass(frozen=True)
class Brief:
    """Fields that the description of a store has in every format."""

    format: int
    job: str
    index: int
    fingerprint: str = ""
    copy_of: int = 0


@dataclass(frozen=True)
class StoreMeta:
    """Contents and location of a store. Callers set the first four fields; `create_store` sets the
    fields that locate it."""

    job: str  # uuid
    blocks: tuple[tuple[str, tuple[ParamSpec, ...]], ...]
    chunk_elements: int
    groups: tuple[GroupRule, ...]
    owners: tuple[int, ...] = ()  # of each chunk, as index into `directories`
    directories: tuple[str, ...] = ()
    generation: int = 0
    index: int = 0  # index of this directory
    staleness: int = 0
    replicas: int = 1  # directories that hold each chunk
    copy_of: int = 0  # generation that this one replaces with a copy; 0: none
    # for a store on servers: every session that began to train (storage/history.py)
    history: tuple[HistoryLink, ...] = ()
    # servers of the last session that this one may continue without, as a witness has allowed
    without: tuple[int, ...] = ()
    format: int = FORMAT

    @staticmethod
    def of(
        table: ChunkTable,
        groups: Sequence[GroupRule],
        job: str = "",
        staleness: int = 0,
        replicas: int = 1,
    ) -> StoreMeta:
        blocks = tuple((b.name, tuple(table.params[i] for i in b.params)) for b in table.blocks)
        job = job or str(uuid.uuid4())
        return StoreMeta(
            job, blocks, table.chunk_elements, tuple(groups), staleness=staleness, replicas=replicas
        )

    @cached_property
    def table(self) -> ChunkTable:
        return ChunkTable.build(self.blocks, self.chunk_elements)

    @cached_property
    def records(self) -> dict[int, Record]:
        """Layout of each chunk's record, by chunk id."""
        out = {}
        for chunk in self.table.chunks:
            rule = self.groups[chunk.group] if chunk.trainable else GroupRule("")
            out[chunk.id] = record(chunk, len(rule.arrays), len(rule.scalars), self.staleness)
        return out

    @cached_property
    def where(self) -> dict[str, list[tuple[Chunk, int, Span]]]:
        """Spans of each parameter, by name: (chunk, index of the span in it, span)."""
        out: dict[str, list[tuple[Chunk, int, Span]]] = {}
        for chunk in self.table.chunks:
            for i, span in enumerate(chunk.spans):
                out.setdefault(self.table.params[span.param].name, []).append((chunk, i, span))
        return out

    def holders(self, chunk: int) -> tuple[int, ...]:
        """Return the directories (or servers) that hold `chunk`: its owner, then the following
        ones."""
        owner, n = self.owners[chunk], len(self.directories)
        return (owner, *((owner + i) % n for i in range(1, self.replicas)))

    def owned(self, index: int) -> dict[int, Record]:
        """Return the records that directory `index` holds."""
        return {chunk: r for chunk, r in self.records.items() if index in self.holders(chunk)}

    @property
    def members(self) -> tuple[int, ...]:
        """The servers of the last session."""
        return self.history[-1].members if self.history else tuple(range(len(self.directories)))

    def write(self, directory: Path) -> None:
        """Write the description, atomically and durably."""
        replace_file(directory / "store.json", sealed(self.to_json().encode()), "writing")

    @property
    def signature(self) -> str:
        """Equal for two workers whose parameters, dtypes, chunks and rules are equal."""
        keys = ("blocks", "chunk_elements", "groups", "staleness", "replicas")
        body = json.dumps([asdict(self)[key] for key in keys])
        return hashlib.sha256(body.encode()).hexdigest()[:32]

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"fingerprint": self.table.fingerprint()})

    @staticmethod
    def load(directory: Path) -> StoreMeta:
        """Read the description. Raises GoneError, DamagedError, or ForeignError for another
        format."""
        path = directory / "store.json"
        with typed_errors(path, "reading"):
            content = path.read_bytes()
        try:
            body = unsealed(content)
        except ValueError as error:
            raise DamagedError(f"{path}: {error}", hint=RESTORE) from error
        return StoreMeta.from_json(body, str(path))

    @staticmethod
    def from_json(text: bytes | str, where: str) -> StoreMeta:
        """Parse a description. Messages name its source, `where`. Raises DamagedError, or
        ForeignError for another format."""
        try:
            brief = msgspec.json.decode(text, type=Brief)
            if brief.format != FORMAT:
                raise ForeignError(
                    f"{where}: store format {brief.format}, this version reads {FORMAT}"
                )
            meta = _DECODER.decode(text)
        except ValueError as error:
            raise DamagedError(
                f"{where}: not a store description ({error})", hint=RESTORE
            ) from error
        table = meta.table
        if table.fingerprint() != brief.fingerprint or len(meta.owners) != len(table.chunks):
            raise DamagedError(f"{where}: does not match its fingerprint", hint=RESTORE)
        return meta


# Built at import, before any thread starts. When two threads are the first to decode a class with
# nested classes, msgspec (0.22) lets the second read an incomplete type, and the process crashes.
_DECODER = msgspec.json.Decoder(StoreMeta)
