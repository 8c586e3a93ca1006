"""Ranks of a torch world that live for the tests of a module: each runs functions and returns their
results. Transformers is thus imported once per rank, not once per test."""

from __future__ import annotations

import os
import pickle
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.support.processes import FORK, free_port

WAIT_S = 60


def child(rank, size, port, pipe):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", rank=rank, world_size=size, timeout=timedelta(seconds=WAIT_S - 10)
    )
    while (work := pickle.loads(pipe.recv_bytes())) is not None:
        function, args = work
        try:
            answer = function(rank, *args)
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        pipe.send_bytes(pickle.dumps(answer))
    os._exit(0)  # gloo's groups may hang on exit


class Ranks:
    """Ranks in separate processes. `ranks.run(function, *args)` calls `function(rank, *args)` on
    each and returns the results or error texts."""

    def __init__(self, size):
        port = free_port()
        pipes = [FORK.Pipe() for _ in range(size)]
        self.ends = [end for end, _ in pipes]
        self.processes = [
            FORK.Process(target=child, args=(rank, size, port, other), daemon=True)
            for rank, (_, other) in enumerate(pipes)
        ]
        for process, (_, other) in zip(self.processes, pipes):
            process.start()
            other.close()

    def run(self, function, *args):
        for end in self.ends:
            end.send_bytes(pickle.dumps((function, args)))  # tensors by value
        return [self._answer(rank, end) for rank, end in enumerate(self.ends)]

    def _answer(self, rank, end):
        assert end.poll(WAIT_S), f"rank {rank} did not answer for {WAIT_S} s"
        return pickle.loads(end.recv_bytes())

    def close(self):
        for end in self.ends:
            end.send_bytes(pickle.dumps(None))
        for process, end in zip(self.processes, self.ends):
            process.join(10)
            process.kill()
            process.join()
            process.close()
            end.close()
