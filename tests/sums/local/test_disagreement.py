"""Workers that do not run the same operation: each gets an error within 5 s, and its process
continues with the next sums. The cases are those of Horovod's own error tests and of DDP's hook,
and mismatches that occur later, when the workers have agreed on a name.
"""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import roadtrain.hvd as hvd
from roadtrain.errors import DifferError, LoopError, TwiceError
from roadtrain.integrations.ddp import Summation, sum_hook
from tests.support import world
from tests.support.world import run_hvd

SOON_S = 5.0


def run(workers, work):
    return run_hvd(workers, work, deadline_s=40)


def error_of(call):
    """Return the message of the error that `call` must raise within SOON_S.

    It is a RuntimeError, as Horovod's tests expect.
    """
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        call()
    assert time.monotonic() - begin < SOON_S, error.value
    assert isinstance(error.value, DifferError), error.value
    return str(error.value)


def check_sum(expected):
    """Check that a sum over all workers succeeds."""
    assert hvd.allreduce(torch.ones(5), op=hvd.Sum).tolist() == [expected] * 5


def kind(rank):
    return torch.int32 if rank % 2 == 0 else torch.float32


CASES = {
    "shape": lambda rank: hvd.allreduce(torch.zeros([17 + rank] * 3)),
    "as many elements": lambda rank: hvd.allreduce(
        torch.zeros([17, 23 * 57] if rank == 0 else [17, 23, 57])
    ),
    "type": lambda rank: hvd.allreduce(torch.zeros(17, 17, 17, dtype=kind(rank))),
    "type, named": lambda rank: hvd.allreduce(torch.zeros(17, dtype=kind(rank)), name="n"),
    "16 bits": lambda rank: hvd.allreduce(
        torch.zeros(8, dtype=torch.bfloat16 if rank else torch.float16), name="m"
    ),
    "operation": lambda rank: hvd.allreduce(
        torch.ones(4), op=hvd.Sum if rank == 0 else hvd.Average, name="o"
    ),
    "format": lambda rank: hvd.allreduce(
        torch.ones(4), compression="bf16" if rank == 0 else "", name="f"
    ),
    "name": lambda rank: hvd.allreduce(torch.ones(4), name=f"name {rank}"),
    "async": lambda rank: hvd.synchronize(hvd.allreduce_async(torch.ones(4 + rank), name="s")),
    "broadcast, shape": lambda rank: hvd.broadcast(torch.ones(17, 10 * (rank + 1), 17), 0),
    "broadcast, type": lambda rank: hvd.broadcast(torch.ones(17, dtype=kind(rank)), 0),
    "broadcast, root": lambda rank: hvd.broadcast(torch.ones(17), rank),
    "object, root": lambda rank: hvd.broadcast_object({"a": rank}, rank),
    "parameters, root": lambda rank: hvd.broadcast_parameters({"a": torch.ones(3)}, rank),
    "other calls": lambda rank: hvd.barrier() if rank else hvd.broadcast(torch.ones(3), 0),
    "a sum and a barrier": lambda rank: (
        hvd.barrier() if rank else hvd.allreduce(torch.ones(3), name="b")
    ),
    "integers": lambda rank: (
        hvd.allreduce(torch.tensor(3)) if rank else hvd.allreduce(torch.ones(3), name="i")
    ),
}


def all_cases(rank):
    """Run all cases in a single process after a single init."""
    n = hvd.size()
    errors = {}
    check_sum(n)
    for name, call in CASES.items():
        errors[name] = error_of(partial(call, rank))
        check_sum(n)  # unnamed sums are in step again, too
        if n == 2:
            assert hvd.broadcast(torch.tensor([rank, 7]), 1).tolist() == [1, 7]
            assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).tolist() == [1]
    return errors


def known_names(rank):
    """Raise mismatches in later rounds of an agreed name, after which further rounds succeed."""
    for _ in range(3):
        hvd.allreduce(torch.ones(40_000), name="x")
    error_of(lambda: hvd.allreduce(torch.ones(40_000 + rank), name="x"))
    for _ in range(2):
        assert (
            hvd.allreduce(torch.full((40_000,), 1.0 + rank), name="x", op=hvd.Sum)[-1].item() == 3.0
        )
    handles = [hvd.allreduce_async(torch.ones(1000), name=f"t{i + 10 * rank}") for i in range(3)]
    error_of(lambda: hvd.synchronize(handles[0]))
    for handle in handles[1:]:  # the other pending sums are canceled, too
        with pytest.raises(DifferError):
            hvd.synchronize(handle)
    order = ("a", "b") if rank else ("b", "a")
    message = error_of(
        lambda: [hvd.allreduce(torch.ones(3, dtype=torch.float64), name=name) for name in order]
    )
    check_sum(2)
    return message


def twice(rank):
    """A case of Horovod: a name that is still pending."""
    for turn in range(2):
        if rank == turn:
            hvd.allreduce_async(torch.ones(17), name="twice")
            with pytest.raises(ValueError, match="already being summed") as error:
                hvd.allreduce_async(torch.ones(17), name="twice")
            assert isinstance(error.value, TwiceError) and isinstance(error.value, LoopError)
        hvd.barrier()
    return "ended"


@pytest.mark.exhaustive
def test_two_workers_report_each_mismatch():
    both = run(2, all_cases)
    for errors in both:
        assert not isinstance(errors, str), both
        assert errors["shape"].startswith(
            "workers differ about 'an unnamed sum': worker 0: float32 [17, 17, 17]"
        )
        assert "worker 1: float32 [18, 18, 18]" in errors["shape"]
        assert "int32 [17, 17, 17]" in errors["type"] and "float32 [17, 17, 17]" in errors["type"]
        assert "worker 0: float32 [4]; worker 1: float32 [4], divided by 2" in errors["operation"]
        assert "'name 0'" in errors["name"] and "'name 1'" in errors["name"]
        assert (
            "from worker 0" in errors["broadcast, root"]
            and "from worker 1" in errors["broadcast, root"]
        )


@pytest.mark.exhaustive
def test_three_workers_report_each_mismatch():
    all_three = run(3, all_cases)
    for errors in all_three:
        assert not isinstance(errors, str), all_three
        assert (
            "int32 [17, 17, 17]" in errors["type"]
            and "worker 1: float32 [17, 17, 17]" in errors["type"]
        )


def test_mismatches_are_reported_when_names_are_known():
    first, second = run(2, known_names)
    assert "workers wait for each other" in first and first == second


def test_a_pending_name_is_refused():
    assert run(2, twice) == ["ended", "ended"]


def late_and_reordered(rank):
    """Sum late and in another order than the other worker, which waits."""
    sums = []
    for number in range(2):
        if rank == number:
            time.sleep(3.5)
        names = ("a", "b", "c") if rank else ("c", "a", "b")
        handles = {
            name: hvd.allreduce_async(torch.ones(3), name=name, op=hvd.Sum) for name in names
        }
        sums += [hvd.synchronize(handles[name]).tolist() for name in names]
    hvd.barrier()
    return sums


def test_a_worker_waits_for_a_late_worker():
    assert run(2, late_and_reordered) == [[[2.0] * 3] * 6] * 2


def optimizers(rank):
    """Use DistributedOptimizer with models that differ, and then with equal models."""
    for wrong in (
        nn.Linear(3, 2 + rank),
        nn.Linear(3, 2, dtype=torch.bfloat16 if rank else torch.float32),
    ):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(wrong.parameters(), lr=0.1), wrong.named_parameters()
        )

        def step(model=wrong, optimizer=optimizer):
            model(torch.ones(1, 3, dtype=model.weight.dtype)).sum().backward()
            optimizer.step()

        error_of(step)
    model = nn.Linear(3, 2)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 3), 1.0 + rank)).sum().backward()
        optimizer.step()
    return model.weight.detach().tolist()


def test_horovods_optimizer_reports_models_that_differ():
    first, second = run(2, optimizers)
    assert not isinstance(first, str), first
    assert first == second


def under_ddp(rank):
    dist.init_process_group("gloo")
    with Summation(budget="64MiB", deadline_s=40) as state:
        for wrong in (
            nn.Linear(40, 300 + rank),
            nn.Linear(4, 4, dtype=torch.bfloat16 if rank else torch.float32),
        ):
            unsynced = nn.parallel.DistributedDataParallel(wrong, init_sync=False)
            unsynced.register_comm_hook(state, sum_hook)
            begin = time.monotonic()
            with pytest.raises(
                RuntimeError, match=r"workers differ about .DDP's bucket 0"
            ) as error:
                unsynced(
                    torch.ones(2, wrong.in_features, dtype=wrong.weight.dtype)
                ).sum().backward()
            assert time.monotonic() - begin < SOON_S
        right = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
        right.register_comm_hook(state, sum_hook)
        for _ in range(3):
            right(torch.ones(2, 4) * (rank + 1)).sum().backward()
        return str(error.value), right.module.weight.grad[0, 0].item()


def test_the_ddp_hook_reports_models_that_differ():
    results = world.run(2, under_ddp)
    for rank in range(2):
        assert not isinstance(results[rank], str), results[rank]
        assert results[rank][1] == 9.0, "2 samples, mean of the factors 1 and 2, three times"
