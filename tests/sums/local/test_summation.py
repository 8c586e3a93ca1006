"""The summation service over real sockets: right sums in the order of the workers, whatever is
spare; errors with names; DDP's own losses through its hook (Rules 1, 2, 4, 5 and 8)."""

import contextlib
import faulthandler
import hashlib
import importlib
import os
import re
import subprocess
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import roadtrain
from benchmarks.sums.pending_sums import PendingSums
from roadtrain.errors import BudgetError, ConfigError, DeadlineError, LostError, RoadtrainError
from roadtrain.kernels.cast import cast
from roadtrain.servers import frames as m
from roadtrain.servers import health, serve
from roadtrain.sums import formats
from roadtrain.sums import sums as service
from roadtrain.sums.spare_hosts import SpareHosts
from roadtrain.sums.sum_server import Reducers
from roadtrain.sums.worker_sums import SumOptions, WorkerSums
from roadtrain.transport.address import address_of, write_token
from roadtrain.transport.tcp import TcpOptions, listen
from tests.support.processes import FORK, free_port
from tests.support.warm_python import warm_python

DTYPES = {"fp32": np.float32, "bf16": np.uint16}


class Hosts:
    """`n` workers' and `k` spare hosts' reducers, in this process."""

    def __init__(self, n, k=0, nbytes=1 << 28):
        self.n = n
        self.reducers = [Reducers(nbytes) for _ in range(n + k)]
        self.listeners = [
            listen(("127.0.0.1", 0), one.accept, TcpOptions(), lambda _: None, language=m.LANGUAGE)
            for one in self.reducers
        ]

    def worker(self, rank, **options):
        addresses = [one.address for one in self.listeners]
        sites = [None if i == rank else address for i, address in enumerate(addresses[: self.n])]
        spares = tuple(
            (i, "{}:{}".format(*address), 1.0) for i, address in enumerate(addresses) if i >= self.n
        )
        who = {"spares": spares}
        who |= {key: options.pop(key) for key in ("spares", "reducer_lost") if key in options}
        options = {"deadline_s": 20, "part_bytes": 1 << 16, **options}
        return WorkerSums(
            rank,
            sites,
            [1.0] * self.n,
            own=self.reducers[rank].accept,
            options=SumOptions("s", TcpOptions(), **options),
            **who,
        )

    def run(self, work, ranks=None, **options):
        """`work(rank, summation)` of all workers at once: what each returned or raised."""
        found = {}

        def one(rank):
            try:
                sums = self.worker(rank, **options)
                try:
                    found[rank] = work(rank, sums)
                finally:
                    sums.close()
            except RoadtrainError as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks or range(self.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return [found[rank] for rank in sorted(found)]

    def close(self):
        for one in self.reducers:
            one.close(10)
            assert one._used == 0, "memory is given back"
        for one in self.listeners:
            one.close()


@pytest.fixture
def hosts():
    made = []

    def make(*args, **options):
        made.append(Hosts(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def values(rank, number, key, elements, dtype):
    wide = np.random.default_rng([rank, number, key]).standard_normal(elements, np.float32)
    if dtype == "fp32":
        return wide
    narrow = np.empty(elements, np.uint16)
    cast(wide, "fp32", narrow, dtype)
    return narrow


def expected(workers, number, key, elements, dtype):
    """Left to right in fp32, then rounded to what travels."""
    total = np.zeros(elements, np.float32)
    for rank in range(workers):
        wide = np.empty(elements, np.float32)
        cast(values(rank, number, key, elements, dtype), dtype, wide, "fp32")
        total = wide if rank == 0 else total + wide
    out = np.empty(elements, DTYPES[dtype])
    cast(total, "fp32", out, dtype)
    return out


TENSORS = {1: (1_000_003, "fp32"), 2: (7, "fp32"), 3: (300_000, "bf16"), 4: (0, "fp32")}


@pytest.mark.parametrize(("n", "k"), [(1, 0), (2, 0), (2, 1), (3, 2), (4, 4)])
def test_sums_are_those_of_the_workers_in_order(n, k, hosts):  # Rule 1
    def work(rank, sums):
        for number in range(3):
            outs, pending = {}, PendingSums(sums)
            for key in sorted(TENSORS, reverse=rank % 2):  # not in the same order everywhere
                elements, dtype = TENSORS[key]
                outs[key] = np.empty(elements, DTYPES[dtype])
                grad = values(rank, number, key, elements, dtype)
                pending.sum(
                    key, m.as_bytes(grad), outs[key].view(np.uint8).data, dtype, priority=-key
                )
            pending.wait()
            for key, (elements, dtype) in TENSORS.items():
                assert np.array_equal(outs[key], expected(n, number, key, elements, dtype)), (
                    number,
                    key,
                )
        return sums.sent_bytes

    found = hosts(n, k).run(work)
    assert all(isinstance(sent, int) for sent in found), found
    if n == k == 4:
        # all of it left
        assert len(set(found)) == 1 and found[0] == 3 * (4 * 1_000_010 + 2 * 300_000)


@pytest.mark.parametrize(
    "elements", [9_000_001, pytest.param(20_000_000, marks=pytest.mark.exhaustive)]
)
def test_parts_of_a_large_tensor_are_summed_in_order(elements, hosts):  # Rule 1
    """Parts of the size that the tensor determines: 141 and 305 KiB."""

    def work(rank, sums):
        out, pending = np.empty(elements, np.float32), PendingSums(sums)
        pending.sum(1, m.as_bytes(values(rank, 0, 1, elements, "fp32")), out.data.cast("B"), "fp32")
        pending.wait()
        return np.array_equal(out, expected(2, 0, 1, elements, "fp32"))

    assert hosts(2).run(work, part_bytes=0) == [True, True]


def test_asynchronous_training_gets_the_sum_of_all_deltas(hosts):
    """Nobody waits: a worker may be rounds ahead."""
    rounds, here = [3, 5], threading.Barrier(2)

    def work(rank, sums):
        here.wait()
        out, pending = np.empty(100_000, np.float32), PendingSums(sums)
        for _ in range(rounds[rank]):
            grad = m.as_bytes(np.full(100_000, 1.0 + rank, np.float32))
            pending.sum(1, grad, out.view(np.uint8).data, "fp32")
            pending.wait()
        return out

    last = hosts(2, 1).run(work, rule="accumulate")
    assert max(out.max() for out in last) == 3 * 1.0 + 5 * 2.0
    assert all((out >= own).all() for out, own in zip(last, (3.0, 10.0)))


def once(elements, dtype="fp32", **at):
    def work(rank, sums):
        n = at.get("of", {}).get(rank, elements)
        out = np.empty(n, DTYPES[dtype])
        pending = PendingSums(sums)
        pending.sum(1, m.as_bytes(np.zeros(n, DTYPES[dtype])), out.view(np.uint8).data, dtype)
        pending.wait()

    return work


def test_workers_that_differ_are_told(hosts):
    found = hosts(2).run(once(100, of={1: 120}))
    assert all({"100", "120"} <= set(re.findall(r"\d+", str(e))) for e in found), found


def test_a_worker_that_does_not_come_is_waited_for_not_for_ever(hosts):  # Rule 5
    begin = time.monotonic()
    (found,) = hosts(2).run(once(100_000), ranks=[0], deadline_s=1)
    assert (
        isinstance(found, DeadlineError)
        and "worker 0 waited 1 s" in str(found)
        and "tensor 1" in str(found)
    )
    assert time.monotonic() - begin < 10


def test_a_worker_that_leaves_is_named(hosts):  # Rule 5
    here = threading.Barrier(2)

    def work(rank, sums):
        here.wait()
        return once(100_000)(rank, sums) if rank == 0 else None

    found = hosts(2).run(work)
    assert isinstance(found[0], LostError) and "worker 1 has left" in str(found[0])


def test_a_worker_that_left_before_others_pushed_is_named(hosts):  # Rule 5
    made = hosts(2)
    here = threading.Barrier(2)

    def all_noticed():
        return all(job.lost_ranks == {1} for one in made.reducers for job in one.jobs.values())

    def work(rank, sums):
        here.wait()
        if rank == 1:
            return None  # and leaves
        begin = time.monotonic()
        while not all_noticed() and time.monotonic() - begin < 10:
            time.sleep(0.01)
        return once(100_000)(rank, sums)

    begin = time.monotonic()
    found = made.run(work)
    assert isinstance(found[0], LostError) and "worker 1 has left" in str(found[0])
    assert time.monotonic() - begin < 15, "nobody waits for the deadline of 20 s"


def test_the_budget_of_a_summer_holds(hosts):  # Rule 4
    made = hosts(2, nbytes=1 << 20)
    here = threading.Barrier(2)

    def work(rank, sums):
        here.wait()
        return once(1_000_000)(rank, sums)

    found = made.run(work)
    assert all(isinstance(e, (LostError, BudgetError)) for e in found)
    assert any("the budget of this host is 1.0 MiB" in str(e) for e in found), found


def test_what_a_stranger_sends_ends_only_his_own(hosts):  # Rule 8
    made = hosts(2)
    with contextlib.suppress(RoadtrainError):
        WorkerSums(
            0,
            [None, ("127.0.0.1", made.listeners[1].address[1])],
            [1.0] * 2,
            (),
            made.reducers[0].accept,
            SumOptions("x", TcpOptions(token=b"the wrong secret of a job")),
        ).close()
    with pytest.raises(RoadtrainError, match="worker 5 of 2"):
        WorkerSums(
            5,
            [one.address for one in made.listeners],
            [1.0] * 2,
            (),
            None,
            SumOptions("s", TcpOptions()),
        ).close()
    assert made.run(once(1000)) == [None, None]


@contextlib.contextmanager
def spare_host(*words):
    """`roadtrain serve --sum` in a process of its own: (process, address)."""
    command = [
        warm_python(),
        "-m",
        "roadtrain.cli",
        "serve",
        "127.0.0.1:0",
        "--sum",
        "--budget",
        "8MiB",
        *words,
    ]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process, re.search(r"summing at (\S+),", process.stdout.readline())[1]
        finally:
            process.kill()


def spare_waits(address, options):
    """What a spare host says, once it waits for worker 1: (text, whom it waits for)."""
    until = time.monotonic() + 10
    while True:
        text, waits, _ = health.ask(address, options)
        if "worker 1" in waits or time.monotonic() > until:
            return text, waits
        time.sleep(0.02)


def test_a_spare_host_by_its_command(tmp_path, hosts):
    """Its status says who keeps the others waiting."""
    write_token(tmp_path / "token", b"a secret of the job")
    options, made = TcpOptions(token=b"a secret of the job"), hosts(2)
    with spare_host("--token-file", str(tmp_path / "token")) as (_, where):
        address = address_of(where)
        both = [made.worker(rank, spares=((2, where, 1e9),), spare=options) for rank in range(2)]
        grad, outs = np.ones(1000, np.float32), [np.zeros(1000, np.float32) for _ in both]
        pending = [PendingSums(sums) for sums in both]
        for rank, begun in enumerate(pending):
            begun.sum(1, m.as_bytes(grad), outs[rank].view(np.uint8).data, "fp32")
            if rank == 0:
                text, waits = spare_waits(address, options)
                assert (
                    text.startswith("sums for 1 job(s)")
                    and "tensor 1, round 1" in waits["worker 1"][1]
                )
        for begun in pending:
            begun.wait()
            begun.sums.close()
        assert all((out == 2).all() for out in outs)
    for wrong in (
        {"sum": True, "store": "x"},
        {},
        {"sum": True, "snapshot": "x"},
        {"store": "x", "formats": "y"},
    ):
        with pytest.raises(ConfigError, match="--sum"):
            serve.command("127.0.0.1:0", **wrong)
    with pytest.raises(ConfigError, match="nowhere_to_be_found"):
        serve.command("127.0.0.1:0", sum=True, formats="nowhere_to_be_found")


def test_spare_hosts_know_formats_of_the_user(tmp_path, hosts, monkeypatch):
    (tmp_path / "doubled.py").write_text(
        "from roadtrain.sums.formats import Fp16, register\n@register\nclass Doubled(Fp16):\n   "
        " name = 'doubled'\n    def encode(self, values, out, seed):\n        super().encode(2 *"
        " values, out, seed)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("doubled")
    try:
        for words, right in ((["--formats", "doubled"], True), ([], False)):
            made = hosts(2)
            with spare_host(*words) as (_, where):

                def work(rank, sums):
                    out = np.zeros(1000, np.float32)
                    pending, grad = PendingSums(sums), m.as_bytes(np.ones(1000, np.float32))
                    pending.sum(1, grad, out.view(np.uint8).data, "fp32", format="doubled")
                    pending.wait()
                    return out.max()

                found = made.run(work, spares=((2, where, 1e9),))
            assert found == [8.0] * 2 if right else all("doubled" in str(one) for one in found), (
                found
            )
    finally:
        del formats.FORMATS["doubled"]
        formats.format_of.cache_clear()


# DDP


def ddp_child(rank, workers, port, hook, out, options=None, steps=6):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
    }
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(50, exit=True)  # who hangs says where
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(
            nn.Linear(40, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 5)
        ),
        bucket_cap_mb=0.2,
    )
    state, options = None, dict(options or {})
    per_host = options.pop("per_host", workers)
    service.host_identity = lambda: f"host {rank // per_host}"
    if hook:
        state = roadtrain.Summation(budget="64MiB", **options)
        model.register_comm_hook(state, roadtrain.sum_hook)
    optimizer, lines = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        loss = nn.functional.mse_loss(model(torch.randn(8, 40)), torch.randn(8, 5))
        loss.backward()
        if steps > 6:
            time.sleep(0.05 if hook else 0.0)
            if step == 3:
                out.put((rank, step, "trains"))
        optimizer.step()
        optimizer.zero_grad()
        lines.append(loss.item().hex())
    whole = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    out.put((rank, lines, hashlib.sha256(whole).hexdigest()))
    faulthandler.dump_traceback_later(25, exit=True)  # sooner than it is given up
    if state is not None:
        state.close()
    out.close()
    out.join_thread()
    os._exit(0)  # gloo's groups may hang while they end


@contextlib.contextmanager
def ddp_processes(workers, hook, options=None, steps=6):
    out, port = FORK.Queue(), free_port()
    processes = [
        FORK.Process(target=ddp_child, args=(rank, workers, port, hook, out, options, steps))
        for rank in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        yield lambda: sorted(out.get(timeout=60) for _ in processes)
        for process in processes:
            process.join(30)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()


def ddp(workers, hook, options=None, steps=6):
    with ddp_processes(workers, hook, options, steps) as found:
        return found()


@pytest.mark.parametrize(("workers", "per_host"), [(2, 1), (2, 2), (3, 2)])
def test_ddp_trains_as_by_itself(workers, per_host):
    """Also where the workers of a host sum through shared memory first."""
    own, ours = ddp(workers, False), ddp(workers, True, {"per_host": per_host})
    assert len({digest for _, _, digest in ours}) == 1, "all workers have the same parameters"
    if workers == 2:
        assert ours == own  # the same bits
    for (_, mine, _), (_, theirs, _) in zip(ours, own):
        assert [float.fromhex(x) for x in mine] == pytest.approx(
            [float.fromhex(x) for x in theirs], rel=1e-5
        )


def test_roots_are_who_sums_on_a_host():
    """On the second host only its second worker: all that the network carries goes through it."""
    found = ddp(4, True, {"per_host": 2, "roots": [1]})
    assert len({digest for _, _, digest in found}) == 1


@pytest.mark.parametrize("format", ["bf16", "topk:0.5", "onebit"])
def test_ddp_learns_with_encoded_gradients(format):
    own, ours = ddp(2, False, steps=6), ddp(2, True, {"per_host": 1, "format": format})
    assert len({digest for _, _, digest in ours}) == 1, "all workers have the same parameters"
    last = [float.fromhex(lines[-1]) for _, lines, _ in (own[0], ours[0])]
    assert last[0] != last[1] and last[0] == pytest.approx(
        last[1], rel={"bf16": 0.02}.get(format, 0.5)
    )


def test_ddp_goes_on_when_a_spare_host_dies_and_uses_it_when_it_is_back(tmp_path):  # Rule 5
    """The losses are those without spare hosts. The file of spare hosts is read again."""
    with ddp_processes(2, False, steps=120) as found:
        own = found() and found()
    with spare_host() as (host, address), spare_host() as (_, another):
        file = tmp_path / "spares"
        file.write_text(f"{address}\n")
        with ddp_processes(2, True, {"per_host": 1, "spares": str(file)}, 120) as found:
            assert sorted(found()) == [(0, 3, "trains"), (1, 3, "trains")]
            host.kill()
            file.write_text(f"{address}  # is back some time\n{another} 0.5\n")
            deadline = time.monotonic() + 20
            while health.ask(address_of(another), TcpOptions())[0].startswith("sums for 0"):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert found() == own


def fsdp_child(rank, workers, port, hook, out):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
    }
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(50, exit=True)  # who hangs says where
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 7))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    state = roadtrain.Summation(budget="64MiB") if hook else None
    if state is not None:
        roadtrain.sum_fsdp(model, state)
    optimizer, lines = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(5):
        torch.manual_seed(100 * step + rank)
        loss = nn.functional.mse_loss(model(torch.randn(8, 40)), torch.randn(8, 7))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lines.append(loss.item().hex())
    out.put((rank, lines))
    if state is not None:
        state.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("workers", [2, 3])
def test_fsdp2_trains_as_by_itself(workers):
    found = {}
    for hook in (False, True):
        out, port = FORK.Queue(), free_port()
        processes = [
            FORK.Process(target=fsdp_child, args=(rank, workers, port, hook, out))
            for rank in range(workers)
        ]
        for process in processes:
            process.start()
        found[hook] = sorted(out.get(timeout=60) for _ in processes)
        for process in processes:
            process.join(30)
            assert process.exitcode == 0
    for (_, mine), (_, theirs) in zip(found[True], found[False]):
        assert [float.fromhex(x) for x in mine] == pytest.approx(
            [float.fromhex(x) for x in theirs], rel=1e-5
        )
        assert workers > 2 or mine == theirs


def test_fsdp2_is_needed_for_its_sums():
    with pytest.raises(ConfigError, match="fully_shard"):
        roadtrain.sum_fsdp(nn.Linear(2, 2), None)


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        ("spares", 5),
        ("rates", "fast"),
        ("budget", "lots"),
        ("deadline_s", -1),
        ("local", "no"),
        ("tls", 3),
        ("token_file", 7),
    ],
)
def test_a_wrong_option_of_the_hook_is_named(option, wrong):  # Rule 6
    with pytest.raises(RoadtrainError, match=f"Summation: `{option}` cannot be"):
        roadtrain.Summation(**{option: wrong})


def test_the_hook_needs_a_process_group():
    with pytest.raises(ConfigError, match="no process group"):
        roadtrain.Summation()


def test_spare_hosts_are_named_rightly(tmp_path):
    for spares, rates in (
        (["10.0.0.1:1"], [1.0, 2.0]),
        (["nowhere"], None),
        (str(tmp_path / "none"), None),
    ):
        with pytest.raises(ConfigError, match=r"spare host|not an address"):
            SpareHosts(spares, rates, None).now()
    (tmp_path / "file").write_text("# ours\n10.0.0.1:7000\n\n10.0.0.2:7000 0.25 # slow\n")
    assert SpareHosts(str(tmp_path / "file"), None, None).now() == {
        "10.0.0.1:7000": 1.0,
        "10.0.0.2:7000": 0.25,
    }
    (tmp_path / "file").write_text("10.0.0.1:7000 fast\n")
    with pytest.raises(ConfigError, match="fast"):
        SpareHosts(str(tmp_path / "file"), None, None).now()
