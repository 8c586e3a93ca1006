"""The power cut of `roadtrain soak` keeps synced data and loses whatever POSIX allows it to lose.
It serves to test Rule 3, so it must neither save unsynced data nor lose synced data."""

import errno
import os
import random

import pytest

from benchmarks.soak.power import SECTOR, Power, Strike, begin, cut


class ScriptedChoice:
    """Scripted choices in place of random ones, for the fate of unsynced bytes and names."""

    def __init__(self, *choices):
        self.choices = list(choices)

    def choice(self, options):
        choice_made = self.choices.pop(0)
        assert choice_made in options
        return choice_made


@pytest.fixture
def disk(tmp_path):
    root, shadow = tmp_path / "root", tmp_path / "shadow"
    root.mkdir()
    (root / "old").write_bytes(b"a" * 3 * SECTOR)
    begin(shadow, [root])
    return root, shadow


def write_file(power, path, content, offset=0):
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    power.pwritev(fd, [content], offset)
    return fd


@pytest.mark.parametrize("synced", [False, True])
@pytest.mark.parametrize("left", ["none", "any", "all"])
def test_bytes_are_durable_from_their_sync_on(disk, synced, left):
    root, shadow = disk
    power = Power(shadow, [root])
    fd = write_file(power, root / "old", b"b" * SECTOR, SECTOR)
    if synced:
        power.sync(fd, "fdatasync")
    os.close(fd)
    rng = random.Random(1)
    rng.choice = lambda options, draw=rng.choice: left if left in options else draw(options)
    cut(shadow, [root], rng)
    now = (root / "old").read_bytes()
    pieces = [now[at : at + SECTOR] for at in range(0, len(now), SECTOR)]
    new = b"b" * SECTOR
    assert pieces[::2] == [b"a" * SECTOR] * 2 and pieces[1] in (new, b"a" * SECTOR)
    if synced or left != "any":
        assert (pieces[1] == new) == (synced or left == "all")


@pytest.mark.parametrize("synced", [False, True])
def test_names_are_durable_from_the_sync_of_their_directory_on(disk, synced):
    root, shadow = disk
    power = Power(shadow, [root])
    fd = write_file(power, root / "new", b"c")
    power.sync(fd, "fsync")
    os.close(fd)
    os.replace(root / "new", root / "old")
    (root / "below").mkdir()
    if synced:
        fd = os.open(root, os.O_RDONLY)
        power.sync(fd, "fsync")
        os.close(fd)
    cut(shadow, [root], ScriptedChoice("none", "none"))
    assert (root / "old").read_bytes() == (b"c" if synced else b"a" * 3 * SECTOR)
    assert sorted(path.name for path in root.iterdir()) == (["below", "old"] if synced else ["old"])


@pytest.mark.parametrize("again", [False, True])
def test_a_later_sync_does_not_save_bytes_of_a_failed_sync(disk, again):
    """The kernel marks the pages clean: reads return them from memory, even in the next process,
    but they are lost in a cut unless they are written again."""
    root, shadow = disk
    power = Power(shadow, [root], [Strike("sync", 0, "EIO", "old")])
    fd = write_file(power, root / "old", b"b" * SECTOR)
    with pytest.raises(OSError) as raised:
        power.sync(fd, "fdatasync")
    assert raised.value.errno == errno.EIO
    later = Power(shadow, [root])
    if again:
        later.pwritev(fd, [b"b" * SECTOR], 0)
    later.sync(fd, "fdatasync")
    os.close(fd)
    assert (root / "old").read_bytes()[:1] == b"b"
    cut(shadow, [root], ScriptedChoice("all", "all"))
    assert (root / "old").read_bytes()[:1] == (b"b" if again else b"a")


def test_a_script_counts_the_calls_on_its_files(disk):
    root, shadow = disk
    power = Power(shadow, [root], [Strike("write", 1, "EIO", "old")])
    fds = [os.open(root / name, os.O_RDWR | os.O_CREAT) for name in ("old", "new")]
    for fd in (fds[1], fds[0], fds[1]):
        power.write(fd, b"x")
    with pytest.raises(OSError):
        power.write(fds[0], b"x")
    assert power.write(fds[0], b"x") == 1 and power.totals == {"sync": 0, "write": 5}
    for fd in fds:
        os.close(fd)


def test_after_a_cut_the_contents_of_the_device_are_final(disk):
    root, shadow = disk
    fd = write_file(Power(shadow, [root]), root / "old", b"b" * SECTOR)
    os.close(fd)
    cut(shadow, [root], ScriptedChoice("all", "all"))
    cut(shadow, [root], ScriptedChoice("none", "none"))
    assert (root / "old").read_bytes()[:1] == b"b"
