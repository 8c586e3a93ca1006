"""StoreMeta: the description of a store, written as `store.json` into every generation directory.

Only the process that has locked the directory may write the description. The committed step is in
the ledger (storage/ledger.py).
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields
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
    """The update rule of a parameter group, and the names of the rule's state arrays (fp32) and
    state scalars (float64, one value per parameter)."""

    rule: str
    arrays: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()


@dataclass(frozen=True)
class Brief:
    """The fields that the description of a store has in every version of the format."""

    format: int
    job: str
    index: int
    fingerprint: str = ""
    copy_of: int = 0


@dataclass(frozen=True)
class StoreMeta:
    """The description of a store: its contents, and its directories. `of` sets the fields about the
    contents; `create_store` sets `owners`, `directories`, `generation`, `index` and `copy_of`."""

    job: str  # uuid
    blocks: tuple[tuple[str, tuple[ParamSpec, ...]], ...]
    chunk_elements: int
    groups: tuple[GroupRule, ...]
    owners: tuple[int, ...] = ()  # for each chunk, the index of its directory in `directories`
    directories: tuple[str, ...] = ()
    generation: int = 0
    index: int = 0  # index of this directory
    staleness: int = 0
    replicas: int = 1  # number of directories that hold each chunk
    copy_of: int = 0  # number of the generation of which this one is a copy; 0 if it is no copy
    # for a store on servers: every session that began to train (storage/history.py)
    history: tuple[HistoryLink, ...] = ()
    # servers of the last session without which this server may continue, as a witness allowed
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
        """The layout of each chunk's record, by chunk id."""
        out = {}
        for chunk in self.table.chunks:
            rule = self.groups[chunk.group] if chunk.trainable else GroupRule("")
            out[chunk.id] = record(chunk, len(rule.arrays), len(rule.scalars), self.staleness)
        return out

    @cached_property
    def where(self) -> dict[str, list[tuple[Chunk, int, Span]]]:
        """The spans of each parameter, by the parameter's name. A span is a parameter's range in
        one chunk. A list element is (chunk, index of the span in the chunk, span)."""
        out: dict[str, list[tuple[Chunk, int, Span]]] = {}
        for chunk in self.table.chunks:
            for i, span in enumerate(chunk.spans):
                out.setdefault(self.table.params[span.param].name, []).append((chunk, i, span))
        return out

    def holders(self, chunk: int) -> tuple[int, ...]:
        """Return the directories (or servers) that hold `chunk`: its owner, and those with
        copies."""
        owner, n = self.owners[chunk], len(self.directories)
        return (owner, *((owner + i) % n for i in range(1, self.replicas)))

    def owned(self, index: int) -> dict[int, Record]:
        """Return the layouts of the records that directory `index` holds, by chunk id."""
        return {chunk: r for chunk, r in self.records.items() if index in self.holders(chunk)}

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the servers that took part in the last session."""
        return self.history[-1].members if self.history else tuple(range(len(self.directories)))

    def write(self, directory: Path) -> None:
        """Write the description, atomically and durably."""
        replace_file(directory / "store.json", sealed(self.to_json().encode()), "writing")

    @cached_property
    def signature(self) -> str:
        """A hash of the parameters, dtypes, chunks and update rules, which all workers must agree
        on."""
        agreed = self.blocks, self.chunk_elements, self.groups, self.staleness, self.replicas
        body = json.dumps(msgspec.to_builtins(agreed))
        return hashlib.sha256(body.encode()).hexdigest()[:32]

    def to_json(self) -> str:
        plain = {f.name: msgspec.to_builtins(getattr(self, f.name)) for f in fields(self)}
        return json.dumps(plain | {"fingerprint": self.table.fingerprint()})

    @staticmethod
    def load(directory: Path) -> StoreMeta:
        """Read the description in `directory`.

        Raises:
            GoneError: There is no description.
            DamagedError: The description is damaged.
            ForeignError: The description has another format.
        """
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
        """Parse a description. `where` names the source of the text in messages.

        Raises:
            DamagedError: The text is not a valid description.
            ForeignError: The description has another format.
        """
        try:
            brief = msgspec.json.decode(text, type=Brief)
            if brief.format != FORMAT:
                raise ForeignError(
                    f"{where} has store format {brief.format}, but this version reads {FORMAT}"
                )
            meta = _DECODER.decode(text)
        except ValueError as error:
            raise DamagedError(
                f"{where}: not a store description ({error})", hint=RESTORE
            ) from error
        table = meta.table
        if table.fingerprint() != brief.fingerprint or len(meta.owners) != len(table.chunks):
            raise DamagedError(f"{where}: fingerprint or owners do not match chunks", hint=RESTORE)
        return meta


# Built at import, before any thread starts. If two threads decode a class with nested classes for
# the first time at once, msgspec (0.22) lets one of them read an incomplete type, and the process
# crashes.
_DECODER = msgspec.json.Decoder(StoreMeta)
