"""Snapshots of a part (storage/snapshot.py): each holds the bytes of its step whatever is written
meanwhile, and a crash during a snapshot leaves the previous one. The reference is a dict from step
to the bytes of all parts."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from roadtrain.chunks import ChunkTable, ParamSpec
from roadtrain.device.buffers import Buffer
from roadtrain.errors import ForeignError, FullError
from roadtrain.storage.direct import in_ram
from roadtrain.storage.file import FileTier
from roadtrain.storage.generation import create_part, open_part, publish_part
from roadtrain.storage.meta import GroupRule, StoreMeta
from roadtrain.storage.snapshot import Snapshots, describe_storage, held_in, open_snapshot, restore
from roadtrain.storage.tier import RECORD, STATE_PART, WEIGHTS, part_range

TABLE = ChunkTable.build(
    [
        ("root", [ParamSpec("emb", (150, 1000), "bf16", True, 0)]),
        (
            "b0",
            [
                ParamSpec("w", (100, 1000), "fp32", True, 0),
                ParamSpec("f", (5000,), "bf16", False, -1),
            ],
        ),
    ],
    chunk_elements=1 << 16,
)
META = StoreMeta.of(TABLE, [GroupRule("adamw", ("m", "v"), ("t",))])
META = replace(META, owners=(0,) * len(TABLE.chunks), directories=("here",))
RNG = random.Random(0)
Seen = dict[int, dict[tuple[int, str], bytes]]  # step -> contents at its commit


def parts(tier: FileTier) -> dict[tuple[int, str], bytes]:
    """All committed bytes, including the step that last wrote each chunk."""
    found = {}
    for chunk, record in META.records.items():
        for part in (WEIGHTS, STATE_PART):
            first, last = part_range(record, part)
            if last > first and (part == STATE_PART or tier.has_weights(chunk)):
                buffer = Buffer(last - first)
                tier.read(chunk, part, buffer.view[: last - first])
                found[chunk, part] = bytes(buffer.view[: last - first]) + bytes(
                    [tier.written_in(chunk)]
                )
    return found


def step(tier: FileTier, number: int, seen: Seen) -> None:
    """Write some chunks as a server would, and commit the step."""
    for chunk, record in META.records.items():
        if number == 0 or (TABLE.chunks[chunk].trainable and RNG.random() < 0.7):
            part = STATE_PART if number and record.master and RNG.random() < 0.5 else RECORD
            first, last = part_range(record, part)
            data = Buffer(last - first)
            data.view[: last - first] = np.random.default_rng(RNG.randrange(1 << 30)).bytes(
                last - first
            )
            tier.write(chunk, part, data.view[: last - first])
    tier.prepare(number, b"blob %d" % number)
    tier.committed(number)
    seen[number] = parts(tier)


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.slow
def test_every_snapshot_holds_its_step(
    slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Seen = {}
    copy = FileTier.copy

    def sleepy(self: FileTier, *args: object) -> int:
        time.sleep(0.01)
        return copy(self, *args)

    if slow:
        monkeypatch.setattr(FileTier, "copy", sleepy)
    tier = create_part(tmp_path / "ram", META)
    step(tier, 0, seen)
    publish_part(tmp_path / "ram")
    newest = -1
    for _ in range(4):  # sessions; the first snapshot is taken at once
        kept = open_snapshot(tmp_path / "files", META, newest)
        first, lines = kept.step < 0, []
        snapshots = Snapshots(tier, kept, 3, lines.append)
        snapshots.start()
        begin = tier.step
        for number in range(begin + 1, begin + 9):
            step(tier, number, seen)
            kept.check()
        snapshots.close()
        kept.close()
        assert len(lines) == len([n for n in range(begin + 1, begin + 9) if n % 3 == 0]) + first, (
            lines
        )
        kept = open_part(tmp_path / "files")
        assert (
            kept is not None
            and kept.step == tier.step // 3 * 3
            and kept.blob == b"blob %d" % kept.step
        )
        assert parts(kept) == seen[kept.step]
        newest = kept.step
        kept.close()
    tier.close()


@pytest.mark.slow
def test_a_crash_leaves_the_previous_snapshot_which_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Seen = {}
    tier, kept = create_part(tmp_path / "ram", META), open_snapshot(tmp_path / "files", META, -1)
    step(tier, 0, seen)
    snapshots = Snapshots(tier, kept, 2, lambda _: None)
    snapshots.start()
    for number in range(1, 5):
        step(tier, number, seen)
    snapshots.close()
    assert kept.step == 4
    snapshots = Snapshots(tier, kept, 2, lambda _: None)
    snapshots.start()
    with monkeypatch.context() as broken:  # killed after the copies, before they are valid
        broken.setattr(kept, "prepare", lambda *_: (_ for _ in ()).throw(FullError("stopped")))
        step(tier, 5, seen)
        step(tier, 6, seen)
        snapshots.close()
        with pytest.raises(FullError):
            tier.prepare(7, b"")
    tier.close()
    kept.close()

    for target in (4, 2):  # 2: another server lacks step 4, which is then dropped for good
        kept = open_snapshot(tmp_path / "files", META, target)
        again = create_part(tmp_path / "ram", META)
        if target == 4:  # killed here: a half-restored store is ignored
            again.close()
            # the store that it was to replace is still there
            assert sorted(held_in(tmp_path / "ram")[0]) == [5, 6]
            again = create_part(tmp_path / "ram", META)
            restore(kept, again)
            assert parts(again) == seen[target] and again.blob == kept.blob
            again.close()
            assert max(held_in(tmp_path / "ram")[0]) == 6, "not published"
        else:
            again.close()
        kept.close()
    assert held_in(tmp_path / "files") == ((2,), replace(META, generation=1))
    # it is not resumed: a new store, still empty, replaces it
    again = open_snapshot(tmp_path / "files", META, -1)
    again.close()
    assert held_in(tmp_path / "files") == ((), None)


def test_a_snapshot_of_another_job_is_refused(tmp_path: Path) -> None:
    tier = create_part(tmp_path / "ram", META)
    seen: Seen = {}
    step(tier, 0, seen)
    kept = open_snapshot(tmp_path / "files", META, -1)
    snapshots = Snapshots(tier, kept, 2, lambda _: None)
    snapshots.start()
    snapshots.close()
    kept.close()
    tier.close()
    for other in (
        replace(META, job="6ba7b810-9dad-11d1-80b4-00c04fd430c8"),
        replace(META, index=1),
    ):
        with pytest.raises(ForeignError, match="holds a snapshot of server 0 of job"):
            open_snapshot(tmp_path / "files", other, 0)


def test_the_start_reports_the_durability(tmp_path: Path) -> None:  # Rule 3
    ram, files = Path("/dev/shm/x"), tmp_path / "files"
    assert in_ram(ram) and not in_ram(files)
    assert "RAM alone" in describe_storage(ram, Path(), 0)
    assert describe_storage(ram, files, 7) == "in RAM, a snapshot to files every 7 steps"
    assert "RAM as well" in describe_storage(ram, ram, 7)
    assert describe_storage(files, Path(), 0) == "on files: every committed step is durable"
