"""Workers that do not do the same: each gets one sentence, within 5 s, and the process goes on with
the next sums. The cases are those of Horovod's own tests of errors, and of DDP's hook; and what
differs later, when names are known.
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


def told(call):
    """The words of the error that `call` must raise, soon, as one that Horovod's tests catch."""
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        call()
    assert time.monotonic() - begin < SOON_S, error.value
    assert isinstance(error.value, DifferError), error.value
    return str(error.value)


def works(expected):
    """A sum over all, as ever."""
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


def one_after_the_other(rank):
    """All in one process, after one init."""
    n = hvd.size()
    found = {}
    works(n)
    for name, call in CASES.items():
        found[name] = told(partial(call, rank))
        works(n)  # also what is unnamed is in step again
        if n == 2:
            assert hvd.broadcast(torch.tensor([rank, 7]), 1).tolist() == [1, 7]
            assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).tolist() == [1]
    return found


def known_names(rank):
    """What differs in a later round, of a name that all agreed about; the next round goes on."""
    for _ in range(3):
        hvd.allreduce(torch.ones(40_000), name="x")
    told(lambda: hvd.allreduce(torch.ones(40_000 + rank), name="x"))
    for _ in range(2):
        assert (
            hvd.allreduce(torch.full((40_000,), 1.0 + rank), name="x", op=hvd.Sum)[-1].item() == 3.0
        )
    handles = [hvd.allreduce_async(torch.ones(1000), name=f"t{i + 10 * rank}") for i in range(3)]
    told(lambda: hvd.synchronize(handles[0]))
    for handle in handles[1:]:  # those under way then are given up, too
        with pytest.raises(DifferError):
            hvd.synchronize(handle)
    order = ("a", "b") if rank else ("b", "a")
    words = told(
        lambda: [hvd.allreduce(torch.ones(3, dtype=torch.float64), name=name) for name in order]
    )
    works(2)
    return words


def twice(rank):
    """Horovod's: a name that is under way."""
    for turn in range(2):
        if rank == turn:
            hvd.allreduce_async(torch.ones(17), name="twice")
            with pytest.raises(ValueError, match="already being summed") as error:
                hvd.allreduce_async(torch.ones(17), name="twice")
            assert isinstance(error.value, TwiceError) and isinstance(error.value, LoopError)
        hvd.barrier()
    return "ended"


def test_horovods_errors_one_after_the_other():
    two = run(2, one_after_the_other)
    for found in two:
        assert not isinstance(found, str), two
        assert found["shape"].startswith(
            "workers differ about 'an unnamed sum': worker 0: float32 [17, 17, 17]"
        )
        assert "worker 1: float32 [18, 18, 18]" in found["shape"]
        assert "int32 [17, 17, 17]" in found["type"] and "float32 [17, 17, 17]" in found["type"]
        assert "worker 0: float32 [4]; worker 1: float32 [4], divided by 2" in found["operation"]
        assert "'name 0'" in found["name"] and "'name 1'" in found["name"]
        assert (
            "from worker 0" in found["broadcast, root"]
            and "from worker 1" in found["broadcast, root"]
        )


@pytest.mark.exhaustive
def test_horovods_errors_by_three():
    three = run(3, one_after_the_other)
    for found in three:
        assert not isinstance(found, str), three
        assert (
            "int32 [17, 17, 17]" in found["type"]
            and "worker 1: float32 [17, 17, 17]" in found["type"]
        )


def test_what_differs_when_names_are_known():
    one, two = run(2, known_names)
    assert "workers wait for each other" in one and one == two


def test_a_name_under_way_twice():
    assert run(2, twice) == ["ended", "ended"]


def slow_is_not_other(rank):
    """A worker that comes late, in another order, is waited for."""
    found = []
    for number in range(2):
        if rank == number:
            time.sleep(3.5)
        names = ("a", "b", "c") if rank else ("c", "a", "b")
        handles = {
            name: hvd.allreduce_async(torch.ones(3), name=name, op=hvd.Sum) for name in names
        }
        found += [hvd.synchronize(handles[name]).tolist() for name in names]
    hvd.barrier()
    return found


def test_a_late_worker_is_waited_for():
    assert run(2, slow_is_not_other) == [[[2.0] * 3] * 6] * 2


def optimizers(rank):
    """Models that differ, under DistributedOptimizer; then one that is the same."""
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

        told(step)
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


def test_models_that_differ_under_horovods_optimizer():
    one, two = run(2, optimizers)
    assert not isinstance(one, str), one
    assert one == two


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


def test_models_that_differ_under_ddp():
    found = world.run(2, under_ddp)
    for rank in range(2):
        assert not isinstance(found[rank], str), found[rank]
        assert found[rank][1] == 9.0, "2 samples, mean of the factors 1 and 2, three times"
