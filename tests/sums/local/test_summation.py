"""The summation service over real sockets: right sums in the order of the workers, with any number
of spare hosts; errors that name their cause; DDP's own losses through its hook (Rules 1, 2, 4, 5
and 8)."""

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
    """The reducers of `n` workers and `k` spare hosts, in this process."""

    def __init__(self, n, k=0, nbytes=1 << 28):
        self.n = n
        self.reducers = [Reducers(nbytes) for _ in range(n + k)]
        self.listeners = [
            listen(("127.0.0.1", 0), site.accept, TcpOptions(), lambda _: None, language=m.LANGUAGE)
            for site in self.reducers
        ]

    def worker(self, rank, **options):
        addresses = [listener.address for listener in self.listeners]
        sites = [None if i == rank else address for i, address in enumerate(addresses[: self.n])]
        spares = tuple(
            (i, "{}:{}".format(*address), 1.0) for i, address in enumerate(addresses) if i >= self.n
        )
        others = {"spares": spares}
        others |= {key: options.pop(key) for key in ("spares", "reducer_lost") if key in options}
        options = {"deadline_s": 20, "part_bytes": 1 << 16, **options}
        return WorkerSums(
            rank,
            sites,
            [1.0] * self.n,
            own=self.reducers[rank].accept,
            options=SumOptions("s", TcpOptions(), **options),
            **others,
        )

    def run(self, work, ranks=None, **options):
        """Run `work(rank, summation)` of all workers at once. Returns their results or errors."""
        results = {}

        def run_worker(rank):
            try:
                sums = self.worker(rank, **options)
                try:
                    results[rank] = work(rank, sums)
                finally:
                    sums.close()
            except RoadtrainError as error:
                results[rank] = error

        threads = [
            threading.Thread(target=run_worker, args=(rank,)) for rank in ranks or range(self.n)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return [results[rank] for rank in sorted(results)]

    def close(self):
        for site in self.reducers:
            site.close(10)
            assert site._used == 0, "all memory is released"
        for listener in self.listeners:
            listener.close()


@pytest.fixture
def hosts():
    opened = []

    def make(*args, **options):
        opened.append(Hosts(*args, **options))
        return opened[-1]

    yield make
    for group in opened:
        group.close()


def values(rank, number, key, elements, dtype):
    wide = np.random.default_rng([rank, number, key]).standard_normal(elements, np.float32)
    if dtype == "fp32":
        return wide
    narrow = np.empty(elements, np.uint16)
    cast(wide, "fp32", narrow, dtype)
    return narrow


def expected(workers, number, key, elements, dtype):
    """Sum from left to right in fp32, then round to the dtype on the wire."""
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
            for key in sorted(TENSORS, reverse=rank % 2):  # the order differs between workers
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

    sent_bytes = hosts(n, k).run(work)
    assert all(isinstance(sent, int) for sent in sent_bytes), sent_bytes
    if n == k == 4:
        # the spare hosts do all the summing
        assert len(set(sent_bytes)) == 1 and sent_bytes[0] == 3 * (4 * 1_000_010 + 2 * 300_000)


@pytest.mark.parametrize(
    "elements", [9_000_001, pytest.param(20_000_000, marks=pytest.mark.exhaustive)]
)
def test_parts_of_a_large_tensor_are_summed_in_order(elements, hosts):  # Rule 1
    """The size of a part follows from the tensor: 141 and 305 KiB."""

    def work(rank, sums):
        out, pending = np.empty(elements, np.float32), PendingSums(sums)
        pending.sum(1, m.as_bytes(values(rank, 0, 1, elements, "fp32")), out.data.cast("B"), "fp32")
        pending.wait()
        return np.array_equal(out, expected(2, 0, 1, elements, "fp32"))

    assert hosts(2).run(work, part_bytes=0) == [True, True]


def test_asynchronous_training_gets_the_sum_of_all_deltas(hosts):
    """No worker waits for others, and a worker may be rounds ahead."""
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


def test_workers_with_different_sizes_get_an_error(hosts):
    results = hosts(2).run(once(100, of={1: 120}))
    assert all({"100", "120"} <= set(re.findall(r"\d+", str(e))) for e in results), results


def test_waiting_for_an_absent_worker_ends_at_the_deadline(hosts):  # Rule 5
    begin = time.monotonic()
    (error,) = hosts(2).run(once(100_000), ranks=[0], deadline_s=1)
    assert (
        isinstance(error, DeadlineError)
        and "worker 0 waited 1 s" in str(error)
        and "tensor 1" in str(error)
    )
    assert time.monotonic() - begin < 10


def test_a_worker_that_leaves_is_named(hosts):  # Rule 5
    here = threading.Barrier(2)

    def work(rank, sums):
        here.wait()
        return once(100_000)(rank, sums) if rank == 0 else None

    results = hosts(2).run(work)
    assert isinstance(results[0], LostError) and "worker 1 has left" in str(results[0])


def test_a_worker_that_left_before_others_pushed_is_named(hosts):  # Rule 5
    group = hosts(2)
    here = threading.Barrier(2)

    def all_noticed():
        return all(job.lost_ranks == {1} for site in group.reducers for job in site.jobs.values())

    def work(rank, sums):
        here.wait()
        if rank == 1:
            return None  # the worker leaves
        begin = time.monotonic()
        while not all_noticed() and time.monotonic() - begin < 10:
            time.sleep(0.01)
        return once(100_000)(rank, sums)

    begin = time.monotonic()
    results = group.run(work)
    assert isinstance(results[0], LostError) and "worker 1 has left" in str(results[0])
    assert time.monotonic() - begin < 15, "no worker waits for the deadline of 20 s"


def test_the_budget_of_a_reducer_holds(hosts):  # Rule 4
    group = hosts(2, nbytes=1 << 20)
    here = threading.Barrier(2)

    def work(rank, sums):
        here.wait()
        return once(1_000_000)(rank, sums)

    results = group.run(work)
    assert all(isinstance(e, (LostError, BudgetError)) for e in results)
    assert any("the budget of this host is 1.0 MiB" in str(e) for e in results), results


def test_a_stranger_does_not_disturb_a_job(hosts):  # Rule 8
    group = hosts(2)
    with contextlib.suppress(RoadtrainError):
        WorkerSums(
            0,
            [None, ("127.0.0.1", group.listeners[1].address[1])],
            [1.0] * 2,
            (),
            group.reducers[0].accept,
            SumOptions("x", TcpOptions(token=b"the wrong secret of a job")),
        ).close()
    with pytest.raises(RoadtrainError, match="worker 5 of 2"):
        WorkerSums(
            5,
            [listener.address for listener in group.listeners],
            [1.0] * 2,
            (),
            None,
            SumOptions("s", TcpOptions()),
        ).close()
    assert group.run(once(1000)) == [None, None]


@contextlib.contextmanager
def spare_host(*words):
    """Run `roadtrain serve --sum` in a process. Yields (process, address)."""
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
    """Return (status, peers that it waits for) of a spare host once it waits for worker 1."""
    until = time.monotonic() + 10
    while True:
        text, waits, *_ = health.ask(address, options)
        if "worker 1" in waits or time.monotonic() > until:
            return text, waits
        time.sleep(0.02)


def test_the_serve_command_runs_a_spare_host(tmp_path, hosts):
    """The status names the worker that others wait for."""
    write_token(tmp_path / "token", b"a secret of the job")
    options, group = TcpOptions(token=b"a secret of the job"), hosts(2)
    with spare_host("--token-file", str(tmp_path / "token")) as (_, where):
        address = address_of(where)
        both = [group.worker(rank, spares=((2, where, 1e9),), spare=options) for rank in range(2)]
        grad, outs = np.ones(1000, np.float32), [np.zeros(1000, np.float32) for _ in both]
        pending = [PendingSums(sums) for sums in both]
        for rank, own in enumerate(pending):
            own.sum(1, m.as_bytes(grad), outs[rank].view(np.uint8).data, "fp32")
            if rank == 0:
                text, waits = spare_waits(address, options)
                assert (
                    text.startswith("sums for 1 job(s)")
                    and "tensor 1, round 1" in waits["worker 1"][1]
                )
        for own in pending:
            own.wait()
            own.sums.close()
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


def test_spare_hosts_load_formats_of_the_user(tmp_path, hosts, monkeypatch):
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
            group = hosts(2)
            with spare_host(*words) as (_, where):

                def work(rank, sums):
                    out = np.zeros(1000, np.float32)
                    pending, grad = PendingSums(sums), m.as_bytes(np.ones(1000, np.float32))
                    pending.sum(1, grad, out.view(np.uint8).data, "fp32", format="doubled")
                    pending.wait()
                    return out.max()

                results = group.run(work, spares=((2, where, 1e9),))
            if right:
                assert results == [8.0] * 2
            else:  # the job may have failed before the other worker was connected
                errors = [str(error) for error in results]
                late = "busy with another start of this job"
                assert any("doubled" in error for error in errors), errors
                assert all("doubled" in error or late in error for error in errors), errors
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
    faulthandler.dump_traceback_later(50, exit=True)  # a hang prints its stack
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
    faulthandler.dump_traceback_later(25, exit=True)  # before the parent kills it
    if state is not None:
        state.close()
    out.close()
    out.join_thread()
    os._exit(0)  # gloo's groups may hang at exit


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
    with ddp_processes(workers, hook, options, steps) as results:
        return results()


@pytest.mark.parametrize(("workers", "per_host"), [(2, 1), (2, 2), (3, 2)])
def test_ddp_trains_as_without_the_hook(workers, per_host):
    """This holds even if the workers of a host sum through shared memory first."""
    own, ours = ddp(workers, False), ddp(workers, True, {"per_host": per_host})
    assert len({digest for _, _, digest in ours}) == 1, "all workers have the same parameters"
    if workers == 2:
        assert ours == own  # the same bits
    for (_, hooked, _), (_, plain, _) in zip(ours, own):
        assert [float.fromhex(x) for x in hooked] == pytest.approx(
            [float.fromhex(x) for x in plain], rel=1e-5
        )


def test_roots_select_the_summing_workers_of_a_host():
    """On each host only the second worker sums, so all network traffic goes through it."""
    results = ddp(4, True, {"per_host": 2, "roots": [1]})
    assert len({digest for _, _, digest in results}) == 1


@pytest.mark.parametrize("format", ["bf16", "topk:0.5", "onebit"])
def test_ddp_learns_with_encoded_gradients(format):
    own, ours = ddp(2, False, steps=6), ddp(2, True, {"per_host": 1, "format": format})
    assert len({digest for _, _, digest in ours}) == 1, "all workers have the same parameters"
    last = [float.fromhex(lines[-1]) for _, lines, _ in (own[0], ours[0])]
    assert last[0] != last[1] and last[0] == pytest.approx(
        last[1], rel={"bf16": 0.02}.get(format, 0.5)
    )


def test_ddp_continues_when_a_spare_host_dies_and_uses_a_new_spare_host(tmp_path):  # Rule 5
    """The losses equal those without spare hosts. The file of spare hosts is read again."""
    with ddp_processes(2, False, steps=120) as results:
        own = results() and results()
    with spare_host() as (host, address), spare_host() as (_, another):
        file = tmp_path / "spares"
        file.write_text(f"{address}\n")
        with ddp_processes(2, True, {"per_host": 1, "spares": str(file)}, 120) as results:
            assert sorted(results()) == [(0, 3, "trains"), (1, 3, "trains")]
            host.kill()
            file.write_text(f"{address}  # is back some time\n{another} 0.5\n")
            deadline = time.monotonic() + 20
            while health.ask(address_of(another), TcpOptions())[0].startswith("sums for 0"):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert results() == own


def fsdp_child(rank, workers, port, hook, out):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
    }
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(50, exit=True)  # a hang prints its stack
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
def test_fsdp2_trains_as_without_the_hook(workers):
    losses = {}
    for hook in (False, True):
        out, port = FORK.Queue(), free_port()
        processes = [
            FORK.Process(target=fsdp_child, args=(rank, workers, port, hook, out))
            for rank in range(workers)
        ]
        for process in processes:
            process.start()
        losses[hook] = sorted(out.get(timeout=60) for _ in processes)
        for process in processes:
            process.join(30)
            assert process.exitcode == 0
    for (_, hooked), (_, plain) in zip(losses[True], losses[False]):
        assert [float.fromhex(x) for x in hooked] == pytest.approx(
            [float.fromhex(x) for x in plain], rel=1e-5
        )
        assert workers > 2 or hooked == plain


def test_sum_fsdp_requires_fully_shard():
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
        ("token", 7),
    ],
)
def test_a_wrong_option_of_the_hook_is_named(option, wrong):  # Rule 6
    with pytest.raises(RoadtrainError, match=f"Summation: `{option}` cannot be"):
        roadtrain.Summation(**{option: wrong})


def test_the_hook_needs_a_process_group():
    with pytest.raises(ConfigError, match="no process group"):
        roadtrain.Summation()


def test_addresses_and_rates_of_spare_hosts_are_checked(tmp_path):
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
