"""No trained state is deleted, only the given directories are touched, and committed state is
durable (Rule 3)."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_store_file import (
    META,
    OWNERS,
    RECORDS,
    TRAINABLE,
    made,
    opened,
    random_bytes,
    read,
    step_of,
)

from roadtrain.chunks import PAGE
from roadtrain.errors import (
    DamagedError,
    ForeignError,
    ForkedError,
    GoneError,
    StaleError,
    StoreError,
)
from roadtrain.storage import generation
from roadtrain.storage import lock as lock_module
from roadtrain.storage.convert import convert, read_param
from roadtrain.storage.file import FileTier
from roadtrain.storage.generation import (
    create_part,
    create_store,
    open_part,
    open_store,
    publish_part,
)
from roadtrain.storage.ledger import HEADER
from roadtrain.storage.meta import StoreMeta
from roadtrain.storage.sealed import unsealed
from roadtrain.storage.snapshot import held_in
from roadtrain.storage.tier import RECORD
from tests.support.power import Disk

PART = replace(META, owners=(0,) * len(OWNERS), directories=("here",))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "LOCK_WAIT_S", 0.1)


@pytest.fixture(scope="module")
def part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A server's directory at step 3."""
    home = tmp_path_factory.mktemp("part")
    fill_part(home, PART, 3)
    publish_part(home)
    return home


def fill_part(directory: Path, meta: StoreMeta, step: int) -> None:
    tier = create_part(directory, meta)
    for chunk in RECORDS:
        tier.write(chunk, RECORD, random_bytes(chunk, RECORD))
    tier.prepare(step, b"")
    tier.committed(step)
    tier.close()


def flip_bit(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def names(directory: Path) -> set[str]:
    return {p.name for p in directory.iterdir()}


# CURRENT


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.slow
def test_any_flipped_bit_in_current_is_recovered(part: Path, tmp_path: Path, by_hand: bool) -> None:
    """A flip from "1" to "0" once deleted the generation. The records prove which generation
    counts, and a line reports it."""
    shutil.copytree(part, home := tmp_path / "home")
    whole = b"1\n" if by_hand else (home / "CURRENT").read_bytes()
    for bit in range(8 * len(whole)):
        (home / "CURRENT").write_bytes(whole)
        flip_bit(home / "CURRENT", bit)
        # a blank became another
        silent = by_hand and (home / "CURRENT").read_bytes().strip() == b"1"
        assert held_in(home)[0] == (3,)
        tier = open_part(home)
        assert tier is not None and tier.step == 3
        assert silent or "CURRENT" in tier.note, bit
        tier.close()
        assert unsealed((home / "CURRENT").read_bytes()) == b"1"  # mended
        assert names(home) == {"CURRENT", "gen-1"}


def test_a_flip_is_reported(part: Path, tmp_path: Path) -> None:
    for number, content in enumerate([b"0\n", b"3\n", b"q\n", b"", b"1\nxxh3 0000000000000000\n"]):
        shutil.copytree(part, home := tmp_path / str(number))
        (home / "CURRENT").write_bytes(content)
        tier = open_part(home)
        assert tier is not None and "gen-1, at step 3, is used" in tier.note, content
        tier.close()


def test_an_ambiguous_store_is_an_error_and_is_left_alone(part: Path, tmp_path: Path) -> None:
    """Generations of two jobs with a damaged CURRENT, and a damaged CURRENT without any record."""
    shutil.copytree(part, home := tmp_path / "home")
    fill_part(other := tmp_path / "other", replace(PART, job=META.job[:-4] + "0000"), 9)
    shutil.move(other / "gen-1", home / "gen-2")
    flip_bit(home / "CURRENT", 0)
    shutil.copytree(part, empty := tmp_path / "empty")
    for number in range(2):
        (empty / "gen-1" / f"ledger.{number}").write_bytes(bytes(HEADER.size))
    flip_bit(empty / "CURRENT", 0)
    for directory in (home, empty):
        before = {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()}
        for call in (open_part, lambda d: open_store([d]), lambda d: create_part(d, PART)):
            with pytest.raises(DamagedError, match="CURRENT is damaged") as raised:
                call(directory)
            assert "hint: write the number N of the right gen-N into CURRENT" in str(raised.value)
        assert {p: p.read_bytes() for p in directory.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize("name", ["ledger.0", "ledger.1", "store.json"])
@pytest.mark.slow
def test_flipped_bits_in_the_other_files(tmp_path: Path, name: str) -> None:
    """A flipped bit in the files that describe and commit a generation is found, or the other
    record is used and reported; nothing is removed."""
    store = made([tmp_path / "s"])
    step_of(store, 1)
    step_of(store, 2)
    store.close()
    path = tmp_path / "s" / "gen-1" / name
    whole = path.read_bytes()
    saved = {p: p.read_bytes() for p in path.parent.iterdir()}
    end = 200 if name.startswith("ledger") else len(whole)
    seam = range(8 * whole.find(b"\n"), 8 * whole.find(b"\n") + 8) if name == "store.json" else ()
    for bit in [*range(0, 8 * end, 97), *seam]:
        for p, content in saved.items():
            p.write_bytes(content)
        flip_bit(path, bit)
        try:
            found = opened([tmp_path / "s"])
        except StoreError as error:
            assert name == "store.json", bit
            assert (
                isinstance(error, DamagedError)
                and "store.json" in str(error)
                and "hint" in str(error)
            )
        else:
            assert name != "store.json" and found.step == (1 if name == "ledger.0" else 2)
            assert any("torn record is ignored" in note for note in found.notes)
            found.close()
        assert (path.parent / "slot0.bin").stat().st_size == len(saved[path.parent / "slot0.bin"])


@pytest.mark.parametrize("count", [1, 2])
# Rule 3
def test_a_damaged_record_is_kept_if_the_previous_step_is_incomplete(
    tmp_path: Path, count: int
) -> None:
    """The next step has begun to overwrite the slots of the older record: only repairing the newer
    record helps."""
    directories = [tmp_path / str(i) for i in range(count)]
    store = made(directories)
    step_of(store, 1)
    step_of(store, 2)
    file = store.tiers[0].ledger.entry.file
    for chunk in TRAINABLE:
        # of step 3, then the process is killed
        store.tier_of(chunk).write(chunk, RECORD, random_bytes(chunk, RECORD))
    store.close()
    path = directories[0] / "gen-1" / f"ledger.{file}"
    before = {p: p.read_bytes() for d in directories for p in sorted(d.rglob("*")) if p.is_file()}
    flip_bit(path, 8 * 70)
    with pytest.raises(
        DamagedError, match="the data of step 1, the last step with an intact record, is incomplete"
    ) as error:
        opened(directories)
    assert "nothing was changed" in str(error.value)
    flip_bit(path, 8 * 70)
    assert {p: p.read_bytes() for p in before} == before
    store = opened(directories)
    assert store.step == 2
    store.close()


def test_a_servers_damaged_record_is_left_alone_too(tmp_path: Path) -> None:  # Rule 3
    home = tmp_path / "part"
    fill_part(home, PART, 1)
    publish_part(home)
    tier = open_part(home)
    assert tier is not None
    for step in (2, 3):  # the last step is not committed: the server is killed
        for chunk in TRAINABLE:
            tier.write(chunk, RECORD, random_bytes(chunk, RECORD))
        if step == 2:
            tier.prepare(step, b"")
            tier.committed(step)
            path = home / "gen-1" / f"ledger.{tier.ledger.entry.file}"
    tier.close()
    before = path.read_bytes()
    flip_bit(path, 8 * 70)
    with pytest.raises(
        DamagedError, match="the data of step 1, the last step with an intact record, is incomplete"
    ):
        open_part(home)
    flip_bit(path, 8 * 70)
    assert path.read_bytes() == before
    tier = open_part(home)
    assert tier is not None and tier.step == 2
    tier.close()


def test_a_generation_that_does_not_count_is_renamed(part: Path, tmp_path: Path) -> None:
    """A leftover generation with a step may be valuable."""
    fill_part(home := tmp_path / "home", PART, 2)
    publish_part(home)
    for step in (5, 6):
        shutil.copytree(home / "gen-1", home / f"gen-{step}")
    (home / "gen-7").mkdir()
    for name, step in (("gen-5", 1), ("gen-1", 3)):  # gen-5 is behind, gen-1 is ahead
        shutil.rmtree(home / name)
        fill_part(scratch := tmp_path / name, PART, step)
        shutil.move(scratch / "gen-1", home / name)
    for number in (5, 6):  # as if created there
        rewrite_number(home / f"gen-{number}", number)
    tier = open_part(home)
    assert tier is not None and tier.step == 3
    assert "gen-5.aside" in tier.note and "holds step 2" in tier.note
    tier.close()
    assert names(home) == {"CURRENT", "gen-1", "gen-5.aside", "gen-6.aside"}
    again = create_part(home, PART)  # the renamed generations do not interfere
    assert again.meta.generation == 2
    again.close()


def rewrite_number(home: Path, number: int) -> None:
    """Rewrite the description of a generation so that it states `number`."""
    meta = replace(StoreMeta.load(home), generation=number)
    meta.write(home)


def test_a_kill_between_the_first_commit_and_current(tmp_path: Path) -> None:
    """Directory 0 has a record, so the store is complete: hours of filling are not lost."""
    store = create_store([tmp_path / "a", tmp_path / "b"], META, OWNERS)
    for chunk in RECORDS:
        store.tier_of(chunk).write(chunk, RECORD, random_bytes(chunk, RECORD))
    store.tiers[1].prepare(0, b"")
    store.close()
    with pytest.raises(
        GoneError, match="holds step 0 of a store, but the first directory of this store is not in"
    ):
        open_store([tmp_path / "b"])  # as if its disk were not mounted
    assert (tmp_path / "b" / "gen-1" / "slot0.bin").exists()
    assert open_store([tmp_path / "a", tmp_path / "b"]) is None  # the store was never finished
    assert not names(tmp_path / "a") and not names(tmp_path / "b")
    store = create_store([tmp_path / "a", tmp_path / "b"], META, OWNERS)
    for chunk in RECORDS:
        store.tier_of(chunk).write(chunk, RECORD, random_bytes(chunk, RECORD))
    store.commit(0, b"zero")
    store.close()
    store = opened([tmp_path / "a", tmp_path / "b"])
    assert store.step == 0 and "there is no CURRENT" in store.notes[0]
    store.close()


# sessions record which opening trained a step


def train_session(directories: list[Path], steps: range) -> None:
    """Open the store and train `steps` in a new session."""
    store = opened(directories)
    store.begin_session()
    for step in steps:
        step_of(store, step)
    store.close()


@pytest.mark.parametrize(
    "trained_before", [True, False], ids=["of a session", "of an earlier version"]
)
def test_copies_trained_independently_are_not_mixed(tmp_path: Path, trained_before: bool) -> None:
    """Both copies are at the same step of the same job."""
    ours, theirs = ([tmp_path / run / name for name in "ab"] for run in "xy")
    made(ours).close()
    if trained_before:
        train_session(ours, range(1, 6))
    for mine, its in zip(ours, theirs):
        shutil.copytree(mine, its)
    # equal copies may be mixed
    train_session([ours[0], theirs[1]], range(6, 6))
    train_session(ours, range(6, 9))
    train_session(theirs, range(6, 9))
    before = {p: p.read_bytes() for d in (*ours, *theirs) for p in d.rglob("*") if p.is_file()}
    for mixed in ([ours[0], theirs[1]], [theirs[0], ours[1]], [ours[1], theirs[0]]):
        with pytest.raises(ForkedError, match=r"hold step 8 of two sessions") as raised:
            open_store(mixed)
        assert all(str(directory) in str(raised.value) for directory in mixed)
    assert before == {p: p.read_bytes() for p in before}
    for whole in (ours, theirs):
        opened(whole).close()


def test_a_session_that_committed_nothing_leaves_no_trace(tmp_path: Path) -> None:
    """It is killed after it began or while it prepares its first step."""
    directories = [tmp_path / "a", tmp_path / "b"]
    made(directories).close()
    train_session(directories, range(1, 3))
    store = opened(directories)
    session = store.begin_session()
    for chunk in TRAINABLE:
        store.tier_of(chunk).write(chunk, RECORD, random_bytes(chunk, RECORD))
    store.tiers[1].prepare(3, b"")
    store.close()
    store = opened(directories)
    assert store.step == 2 and store.session == session.before
    store.close()
    train_session(directories, range(3, 4))
    opened(directories).close()


def test_a_converted_store_keeps_its_session(tmp_path: Path) -> None:
    made([tmp_path / "a"]).close()
    train_session([tmp_path / "a"], range(1, 3))
    store = opened([tmp_path / "a"])
    session = store.session
    other = replace(META, chunk_elements=1 << 17)
    new = convert(store, other, [tmp_path / "b"], [0] * len(other.table.chunks))
    assert (new.step, new.session) == (2, session)
    new.close()


def test_a_damaged_newest_record_is_not_an_older_copy(tmp_path: Path) -> None:
    """A run that knows of step 2 gets an error that names the damaged file and a remedy."""
    made([tmp_path]).close()
    train_session([tmp_path], range(1, 3))
    flip_bit(tmp_path / "gen-1" / "ledger.0", 800)

    def accept(job: str, step: int, session: str) -> None:
        if step < 2:
            raise StaleError(f"the store is at step {step}", hint="put the newer one back")

    with pytest.raises(DamagedError, match=r"ledger.0: the newest record is damaged") as raised:
        open_store([tmp_path], accept=accept)
    assert "continue from step 1" in str(raised.value) and "newer copy" not in str(raised.value)
    opened([tmp_path]).close()  # a start that accepts step 1 may use it


# directories that were not given


def test_a_copy_does_not_touch_the_original(tmp_path: Path) -> None:
    """The copy records the paths of the original. A directory of the copy is damaged, missing or
    not named."""
    original = [tmp_path / "a", tmp_path / "b"]
    made(original).close()
    (tmp_path / "copy").mkdir()
    copy = [Path(shutil.copytree(d, tmp_path / "copy" / d.name)) for d in original]
    locked = opened(original)  # even while the original is in use
    before = {
        p: (p.read_bytes(), p.stat().st_mtime_ns)
        for d in original
        for p in d.rglob("*")
        if p.is_file()
    }
    for directories in ([copy[0]], [copy[0], tmp_path / "nowhere"]):
        with pytest.raises(
            GoneError,
            match=r"directory 1 of the store's 2 .* is not among the . directories that were named",
        ) as raised:
            open_store(directories)
        assert "moved_from" in str(raised.value)
    with pytest.raises(GoneError, match="first directory of this store is not in the list"):
        open_store([copy[1]])
    flip_bit(copy[1] / "gen-1" / "store.json", 99)
    with pytest.raises(DamagedError, match=r"copy/b/gen-1/store.json"):
        open_store(copy)
    locked.close()
    shutil.rmtree(copy[1])
    shutil.copytree(original[1], copy[1])
    store = opened(copy)
    step_of(store, 1)
    store.close()
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in before} == before


# locks


@pytest.mark.slow
def test_a_second_creation_is_refused_at_once_and_deletes_nothing(tmp_path: Path) -> None:
    # this creation fills the store for hours
    first = create_store([tmp_path / "a", tmp_path / "b"], META, OWNERS)
    there = set(tmp_path.rglob("*"))
    for directories in (
        [tmp_path / "a", tmp_path / "b"],
        [tmp_path / "b"],
        [tmp_path / "c", tmp_path / "a"],
    ):
        with pytest.raises(StoreError, match=r"in use by (this|another) process"):
            open_store(directories)
        with pytest.raises(StoreError, match=r"in use by (this|another) process"):
            create_store(directories, META, [0] * len(OWNERS))
    with pytest.raises(StoreError, match=r"in use by (this|another) process"):
        open_part(tmp_path / "a")
    assert there <= set(tmp_path.rglob("*"))
    for chunk in RECORDS:
        first.tier_of(chunk).write(chunk, RECORD, random_bytes(chunk, RECORD))
    first.commit(0, b"")
    first.publish()
    first.close()
    with pytest.raises(ForeignError, match="already holds a store"):  # a moment later
        create_store([tmp_path / "a"], META, [0] * len(OWNERS))
    opened([tmp_path / "a", tmp_path / "b"]).close()


def test_a_part_that_is_being_filled(tmp_path: Path) -> None:
    tier = create_part(tmp_path, PART)
    for call in (open_part, lambda d: create_part(d, PART)):
        with pytest.raises(StoreError, match=r"in use by (this|another) process"):
            call(tmp_path)
    assert held_in(tmp_path) == ((), None)  # reading is allowed
    tier.close()
    assert open_part(tmp_path) is None and not names(tmp_path)


# durability


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    (root := tmp_path / "disk").mkdir()
    made_disk = Disk(root, monkeypatch)
    yield made_disk
    made_disk.close()


def write_step(store: FileTier, step: int) -> None:
    for chunk in TRAINABLE:
        store.write(chunk, RECORD, random_bytes(chunk, RECORD))
    store.prepare(step, b"")
    store.committed(step)


def assert_survives(disk: Disk, to: Path, *steps: int) -> None:
    """Check that after a power cut the store is at one of `steps` and every checksum is right."""
    tier = open_part(disk.cut(to) / "s")
    assert tier is not None and tier.step in steps, (tier and tier.step, steps)
    for chunk in RECORDS:
        tier.read(chunk, RECORD, memoryview(bytearray(tier.meta.records[chunk].nbytes)))
    tier.close()


def part_at(directory: Path, step: int) -> FileTier:
    fill_part(directory, PART, 0)
    publish_part(directory)
    tier = open_part(directory)
    assert tier is not None
    for number in range(1, step + 1):
        write_step(tier, number)
    return tier


def test_a_power_cut_after_each_step(tmp_path: Path, disk: Disk) -> None:
    (disk.root / "s").mkdir()
    disk._keep_directory(disk.root)
    tier = part_at(disk.root / "s", 2)
    assert_survives(disk, tmp_path / "1", 2)
    for chunk in TRAINABLE:
        tier.write(chunk, RECORD, random_bytes(chunk, RECORD))
    assert_survives(disk, tmp_path / "2", 2)
    tier.close()


@pytest.mark.parametrize("then", ["killed", "failed"])
def test_a_record_that_was_never_synced(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """A process is killed between write and fdatasync, or fdatasync fails; then come a start, steps
    and a power cut at any moment."""
    tier = part_at(disk.root / "s", 2)
    if then == "failed":
        disk.fail = "ledger."
        with pytest.raises(StoreError, match="fdatasync of the record of step 3"):
            write_step(tier, 3)
        disk.fail = ""
    else:
        with monkeypatch.context() as patch:
            patch.setattr(
                os,
                "fdatasync",
                lambda fd: disk._synced(fd, "fdatasync") if "slot" in name_of(fd) else None,
            )
            write_step(tier, 3)
    tier.close()
    assert_survives(disk, tmp_path / "0", 2)
    again = open_part(disk.root / "s")
    assert again is not None and again.step == (3 if then == "killed" else 2)
    now = again.step
    assert_survives(disk, tmp_path / "1", now)  # this step counts, so it must be durable
    for chunk in TRAINABLE:  # the next step overwrites the slots of the previous one
        again.write(chunk, RECORD, random_bytes(chunk, RECORD))
    for slot in again._slots:
        slot.sync("now")
    assert_survives(disk, tmp_path / "2", now)
    again.prepare(now + 1, b"")
    again.committed(now + 1)
    assert_survives(disk, tmp_path / "3", now + 1)
    again.close()


def test_a_disk_that_still_fails_ends_the_next_start(tmp_path: Path, disk: Disk) -> None:
    part_at(disk.root / "s", 2).close()
    disk.fail = "ledger."
    for _ in range(2):
        with pytest.raises(StoreError, match="fdatasync of the loaded record"):
            open_part(disk.root / "s")
    disk.fail = ""
    assert_survives(disk, tmp_path / "0", 2)


@pytest.mark.slow
def test_a_power_cut_at_any_sync(tmp_path: Path, disk: Disk) -> None:
    """A store of two directories is created, trained, reopened, trained and moved into one
    directory: every committed step survives bit for bit."""
    cuts: list[tuple[Path, int]] = []
    committed = -1
    disk.synced = lambda: cuts.append((disk.cut(tmp_path / str(len(cuts))), committed))
    a, b = disk.root / "a", disk.root / "b"
    store = made([a, b])
    committed = 0
    step_of(store, 1)
    committed = 1
    store.close()
    store = opened([a, b])
    step_of(store, 2)
    committed = 2
    convert(store, replace(META, job=store.meta.job), [a], [0] * len(OWNERS)).close()
    disk.synced = lambda: None
    assert len(cuts) > 40
    for number, (home, least) in enumerate(cuts):
        found = open_store([home / "a", home / "b"])
        assert (found is None and least < 0) or (found is not None and found.step >= least), (
            number,
            least,
        )
        for chunk in RECORDS if found is not None else ():
            read(found, chunk, RECORD)
        if found is not None:
            found.close()
        shutil.rmtree(home)


def name_of(fd: int) -> str:
    return os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))


# spilled gradients


def test_a_spilled_gradient_is_checked(tmp_path: Path) -> None:
    store = made([tmp_path])
    tier, chunk = store.tiers[0], TRAINABLE[0]
    data = memoryview(os.urandom(PAGE * 2 - 96))
    tier.spill_write(chunk, data)
    into = memoryview(bytearray(PAGE * 2))
    tier.spill_read(chunk, into)
    assert bytes(into[: len(data)]) == data
    assert tier._spill is not None
    with open(f"/proc/self/fd/{tier._spill.fd}", "r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes([data[7] ^ 16]), 7)
    with pytest.raises(
        DamagedError, match=f"spilled gradient of chunk {chunk} .* does not match its checksum"
    ):
        tier.spill_read(chunk, into)
    assert read(store, chunk, RECORD)
    store.close()


def test_a_converted_part_is_removed_only_from_moved_from(tmp_path: Path) -> None:
    """The part in `moved_from` is read and removed once the store counts elsewhere; nothing else is
    removed."""
    made([tmp_path / "a", tmp_path / "b"]).close()
    (tmp_path / "b" / "mine.txt").write_text("keep")
    old = open_store([tmp_path / "a"], also=[tmp_path / "b"])
    assert old is not None
    want = {p.name: read_param(old, p.name).tobytes() for p in META.table.params}
    new = convert(old, replace(META, job=old.meta.job), [tmp_path / "a"], [0] * len(OWNERS))
    assert names(tmp_path / "b") == {"mine.txt"} and names(tmp_path / "a") == {"CURRENT", "gen-2"}
    # still locked by the process that converted it
    with pytest.raises(StoreError, match=r"in use by (this|another) process"):
        open_store([tmp_path / "a"])
    new.close()
    again = opened([tmp_path / "a"])
    assert again.step == 0
    assert {p.name: read_param(again, p.name).tobytes() for p in META.table.params} == want
    again.close()


@pytest.mark.parametrize("moment", ["switch", "remove"])
def test_a_conversion_that_was_killed(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Original and copy are both complete: the current one stays, the other is removed, and neither
    is renamed."""
    made([tmp_path]).close()
    old = opened([tmp_path])

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(generation, moment, die)
        convert(
            old,
            replace(META, job=old.meta.job, chunk_elements=1 << 16),
            [tmp_path],
            [0] * len(OWNERS),
        )
    assert names(tmp_path) == {"CURRENT", "gen-1", "gen-2"}
    gc.collect()
    for fd in list(old.locks._held.values()):
        os.close(fd)
    old.locks._held.clear()
    for fd in os.listdir("/proc/self/fd"):  # as the kernel does for a killed process
        if (link := Path("/proc/self/fd", fd)).is_symlink() and str(link.readlink()).startswith(
            str(tmp_path)
        ):
            os.close(int(fd))
    store = opened([tmp_path])
    assert store.step == 0 and not store.events
    assert names(tmp_path) == {"CURRENT", "gen-1" if moment == "switch" else "gen-2"}
    store.close()
