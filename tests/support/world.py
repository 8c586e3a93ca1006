"""Workers of a torch world in separate processes, each of which runs a function and returns its
result."""

import os
from functools import partial

import torch

import roadtrain.hvd as hvd
from tests.support.processes import FORK, free_port


def child(work, rank, workers, port, out):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(workers),
    }
    torch.set_num_threads(1)
    try:
        found = work(rank)
    except BaseException as error:
        found = f"{type(error).__name__}: {error}"
    out.put((rank, found))
    out.close()
    out.join_thread()
    os._exit(0)


def run(workers, work, wait_s=100, answers=None):
    """Run `work(rank)` on each worker. Returns the results or error texts by rank.

    Args:
        answers: Number of workers expected to answer. The others end without an answer or are
            killed.
    """
    out, port = FORK.Queue(), free_port()
    processes = [
        FORK.Process(target=child, args=(work, rank, workers, port, out)) for rank in range(workers)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(out.get(timeout=wait_s) for _ in processes[:answers])
    finally:
        for process in processes:
            process.join(10 if answers is None else 1)
            process.kill()
            process.join()
    return [found[rank] for rank in sorted(found)]


def between(work, options, rank):
    """Run `work(rank)` between Horovod's init and shutdown."""
    hvd.init(**options)
    found = work(rank)
    hvd.shutdown()
    return found


def run_hvd(workers, work, **options):
    """Like run, inside Horovod's init with `options`."""
    return run(workers, partial(between, work, {"budget": "64MiB", "deadline_s": 20, **options}))
