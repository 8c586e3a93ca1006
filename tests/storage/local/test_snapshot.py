"""State in RAM is copied to files every few steps while training continues. When a host's RAM is
lost, all servers go back to the newest copy that all of them have, and the losses from there are
repeated (Rule 3)."""

import random
import shutil
import time

import pytest
import torch

from roadtrain.device.buffers import Buffer
from roadtrain.errors import ConfigError
from roadtrain.servers.serve import command
from roadtrain.storage.generation import open_part
from tests.support.models import Case
from tests.support.processes import HostProcess, Workers, losses

CASE, STEPS, EVERY = Case(clip=0.5, groups=True, frozen=True), 24, 3
LATE = Case(dtype=torch.bfloat16, eager=True, staleness=1)
SLOW = ("slow", 0.02)  # a snapshot takes longer than a step
REST = pytest.mark.exhaustive  # further cases of the same rules


class Group:
    """Hosts with a RAM directory each and snapshots in files."""

    def __init__(self, home, every=EVERY, count=2):
        self.home, self.every, self.hosts, self.session = home, every, [None] * count, 0
        self.ram, self.files = (
            [home / f"ram{i}" for i in range(count)],
            [home / f"files{i}" for i in range(count)],
        )

    def start(self, case, steps, workers=2, fault=None, **options):
        """Start the hosts that are not running, and workers."""
        for i, host in enumerate(self.hosts):
            if host is None or not host.process.is_alive():
                self.hosts[i] = HostProcess(
                    self.ram[i], snapshot=self.files[i], every=self.every, fault=fault
                )
        self.session += 1
        where = [h.where for h in self.hosts]
        return Workers(case, where, self.home, steps, workers, session=str(self.session), **options)

    def kill(self, *which, lose=True):
        """Send SIGKILL to hosts; with `lose` their memory is lost, too."""
        for i in which or range(len(self.hosts)):
            self.hosts[i].kill()
            if lose:
                shutil.rmtree(self.ram[i], ignore_errors=True)

    def snapshot_steps(self):
        """Return the step of each host's newest snapshot, -1 for none."""
        tiers = [open_part(path) for path in self.files]
        steps = [-1 if tier is None else tier.step for tier in tiers]
        for tier in filter(None, tiers):
            tier.close()
        return steps


@pytest.fixture
def group(tmp_path):
    groups = []

    def make(**options):
        groups.append(Group(tmp_path, **options))
        return groups[-1]

    yield make
    for started in groups:
        started.kill(lose=False)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function: case -> losses of two workers without faults."""
    by_case = {}

    def losses_of(case):
        if case not in by_case:
            home = tmp_path_factory.mktemp("whole")
            host = HostProcess(home / "host")
            workers = Workers(case, [host.where], home, STEPS, 2)
            assert workers.join() == [0, 0], workers.errors()
            host.kill()
            by_case[case] = [losses(log) for log in workers.logs]
        return by_case[case]

    return losses_of


def wait_for(ready, what, seconds=200):
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until, f"waited for {what}"
        time.sleep(0.01)


def newest(workers):
    return max((int(s) for s in losses(workers.logs[0]) if s != "end"), default=0)


def assert_same_losses(workers, reference):
    for log, expected in zip(workers.logs, reference):
        seen = losses(log)
        assert all(len(v) == 1 for s, v in seen.items() if s != "end"), (
            "a step was repeated with another loss"
        )
        assert {s: v for s, v in seen.items() if s in expected} == expected


def notes_with(workers, words):
    return [line for line in workers.notes() if words in line]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "fault"),
    [pytest.param(CASE, SLOW, id="slow"), pytest.param(LATE, None, id="late", marks=REST)],
)
def test_training_continues_during_a_snapshot(case, fault, group, undisturbed):  # Rules 1 and 3
    ours = group()
    workers = ours.start(case, STEPS, fault=fault)
    assert workers.join() == [0, 0], workers.errors()
    assert_same_losses(workers, undisturbed(case))
    assert "a snapshot to files every 3 steps" in notes_with(workers, "placed")[0]
    for host in ours.hosts:  # a session ends after its last snapshot is finished
        wait_for(lambda host=host: "session over" in host.log.read_text(), "the end of the session")
        steps = [
            int(line.split()[3])
            for line in host.log.read_text().splitlines()
            if line.startswith("snapshot of")
        ]
        assert steps == list(range(0, STEPS + 1, EVERY))
    ours.kill(lose=False)
    for i, files in enumerate(ours.files):
        tier = open_part(files)
        assert tier.step == STEPS // EVERY * EVERY
        for chunk, record in tier.meta.owned(i).items():
            part = "record" if tier.has_weights(chunk) else "state"
            start = 0 if part == "record" else record.weights_nbytes
            # read() verifies the checksums
            tier.read(chunk, part, Buffer(record.nbytes).view[start : record.nbytes])
        tier.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("case", "fault"),
    [
        pytest.param(CASE, None, id="clipped", marks=REST),
        pytest.param(LATE, SLOW, id="late, slow"),
    ],
)
def test_the_loss_of_all_memory_costs_the_steps_since_the_snapshot(case, fault, group, undisturbed):
    rng, ours = random.Random(0), group()
    for _ in range(2):
        workers = ours.start(case, STEPS * 100, fault=fault)
        wait_for(
            lambda: all("snapshot of" in host.log.read_text() for host in ours.hosts), "a snapshot"
        )
        before = newest(workers)
        wait_for(lambda workers=workers, before=before: newest(workers) > before, "some steps")
        time.sleep(rng.random())
        ours.kill()
        reached = newest(workers)
        assert workers.join() == [3, 3]
        snapshot_steps = ours.snapshot_steps()
        assert (
            min(snapshot_steps) >= 0
            and all(step % EVERY == 0 for step in snapshot_steps)
            and max(snapshot_steps) - min(snapshot_steps) in (0, EVERY)
        )
        assert reached - min(snapshot_steps) <= 2 * EVERY
        for log in workers.logs:
            (ours.home / f"{log.name}.said").unlink()
        workers = ours.start(case, min(snapshot_steps) + 1, fault=fault)
        assert workers.join() == [0, 0], workers.errors()
        assert f"step {min(snapshot_steps)};" in notes_with(workers, "placed")[0]
        assert (
            f"snapshot of step {min(snapshot_steps)}, fewer than 6 steps"
            in notes_with(workers, "memory was lost")[0]
        )
    workers = ours.start(case, max(STEPS, newest(workers) + 2))
    assert workers.join() == [0, 0], workers.errors()
    reference = [{s: v for s, v in seen.items() if s != "end"} for seen in undisturbed(case)]
    assert_same_losses(workers, reference)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("lost", "options"),
    [
        pytest.param(0, {}, id="0"),
        pytest.param(1, {}, id="1", marks=REST),
        pytest.param(1, {"relay": "64MiB"}, id="relay", marks=REST),
    ],
)
def test_all_hosts_go_back_when_one_host_is_lost(lost, options, group, undisturbed):
    ours = group(every=4)
    workers = ours.start(CASE, STEPS * 100, **options)
    wait_for(lambda: newest(workers) > 9, "some steps")
    ours.kill(lost)
    assert workers.join() == [3, 3]
    other = ours.hosts[1 - lost]
    wait_for(lambda: "session over" in other.log.read_text(), "the end of the session")
    step = newest(workers)
    workers = ours.start(CASE, max(STEPS, step + 2), **options)
    assert workers.join() == [0, 0], workers.errors()
    (line,) = notes_with(workers, "memory was lost")
    assert ("hold steps -1, " if lost == 0 else ", -1 (") in line
    back, steps = (
        int(line.split("snapshot of step ")[1].split(",")[0]),
        int(line.rsplit(", ", 1)[1].split()[0]),
    )
    assert back % 4 == 0 and back > 0 and abs(back + steps - step) <= 2, (line, step)
    assert f"back to step {back} of the snapshot" in other.log.read_text()
    assert_same_losses(
        workers, [{s: v for s, v in seen.items() if s != "end"} for seen in undisturbed(CASE)]
    )


@pytest.mark.timeout(600)
def test_with_replicas_hosts_go_back_only_if_no_copy_is_left(group, undisturbed):
    ours = group(every=4, count=3)
    workers = ours.start(CASE, STEPS * 100, replicas=2)
    wait_for(lambda: newest(workers) > 5, "some steps")
    ours.kill(0)
    assert workers.join() == [3, 3]
    workers = ours.start(CASE, STEPS * 100, replicas=2)
    step = newest(workers)
    wait_for(lambda: newest(workers) > step + 8, "some steps")
    assert notes_with(workers, "replicas: server 0") and not notes_with(workers, "memory was lost")
    ours.kill(1, 2)  # neighbours: both copies of the chunks that they share are lost
    shutil.rmtree(ours.files[2])  # the snapshots of the other hosts hold its chunks
    assert workers.join() == [3, 3]
    workers = ours.start(CASE, max(STEPS, newest(workers) + 2), replicas=2)
    assert workers.join() == [0, 0], workers.errors()
    (line,) = notes_with(workers, "memory was lost")
    assert int(line.split("snapshot of step ")[1].split(",")[0]) > step, (line, step)
    assert notes_with(workers, "replicas: server 2")
    assert_same_losses(
        workers, [{s: v for s, v in seen.items() if s != "end"} for seen in undisturbed(CASE)]
    )


@pytest.mark.timeout(600)
def test_a_snapshot_is_used_if_the_replica_is_older(group, undisturbed):
    ours = group(every=4)
    assert ours.start(CASE, 5, replicas=2).join() == [0, 0]
    ours.kill(1, lose=False)
    where = [host.where for host in ours.hosts]
    workers = Workers(CASE, where, ours.home, 14, 2, session="without", replicas=2)
    assert workers.join() == [0, 0], workers.errors()
    ours.kill(0)
    workers = ours.start(CASE, STEPS, replicas=2)
    assert workers.join() == [0, 0], workers.errors()
    assert "hold steps -1, 5 " in notes_with(workers, "snapshot of step 12, fewer than 8 steps")[0]
    assert_same_losses(
        workers, [{s: v for s, v in seen.items() if s != "end"} for seen in undisturbed(CASE)]
    )


@pytest.mark.timeout(600)
def test_a_death_without_loss_of_memory_costs_no_step(group, undisturbed):
    ours, rng = group(), random.Random(1)
    for _ in range(2):
        workers = ours.start(CASE, STEPS * 100, fault=SLOW)
        before = newest(workers)
        wait_for(lambda workers=workers, before=before: newest(workers) > before + 1, "some steps")
        time.sleep(rng.random() / 2)
        ours.kill(lose=False)
        assert workers.join() == [3, 3]
        assert not notes_with(workers, "memory was lost")
    assert ours.start(CASE, newest(workers) + 2 * EVERY).join() == [0, 0]
    ours.kill()  # despite many unfinished snapshots both hosts have a common one
    workers = ours.start(CASE, max(STEPS, newest(workers) + 2))
    assert workers.join() == [0, 0], workers.errors()
    assert notes_with(workers, "memory was lost")
    assert_same_losses(
        workers, [{s: v for s, v in seen.items() if s != "end"} for seen in undisturbed(CASE)]
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "writes",
    [pytest.param(0, id="the first", marks=REST), pytest.param(30, id="a later one")],
)
def test_a_snapshot_that_fails_ends_training_and_loses_nothing(writes, group, undisturbed):
    """The state is still in memory, so the same commands continue once the disk has room."""
    ours = group()
    workers = ours.start(CASE, STEPS * 100, fault=("full", writes))
    assert workers.join() == [3, 3]
    assert any("files" in e and "needs" in e and "are free" in e for e in workers.errors()), (
        workers.errors()
    )
    assert any("failed, the last snapshot has step" in host.log.read_text() for host in ours.hosts)
    ours.kill(lose=False)
    workers = ours.start(CASE, max(STEPS, newest(workers) + 2))
    assert workers.join() == [0, 0], workers.errors()
    assert not notes_with(workers, "memory was lost")
    assert_same_losses(
        workers, [{s: v for s, v in seen.items() if s != "end"} for seen in undisturbed(CASE)]
    )


def test_servers_with_other_snapshots_or_options_are_refused(group, tmp_path):
    ours = group()
    assert ours.start(CASE, 4).join() == [0, 0]
    ours.kill()
    ours.files.reverse()
    soon = {"retry_s": 1, "deadline_s": 4}  # else worker 1 waits for worker 0, which was refused
    workers = ours.start(CASE, 5, **soon)
    assert workers.join() == [3, 3]
    assert any("holds a snapshot of server" in e for e in workers.errors()), workers.errors()
    ours.kill()
    ours.files.reverse()
    ours.hosts[0] = HostProcess(ours.ram[0])
    workers = ours.start(CASE, 5, **soon)
    assert workers.join() == [3, 3]
    assert any("the same --snapshot-every" in e for e in workers.errors()), workers.errors()
    with pytest.raises(ConfigError, match="--snapshot-every"):
        command("127.0.0.1:0", store=str(tmp_path), snapshot_every=5)
