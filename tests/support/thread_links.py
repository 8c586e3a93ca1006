"""Ranks as threads of this process, with links over queues, so that a test can inject a fault at
any operation of any rank."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from roadtrain.stages.control_links import ControlLinks, RankPlace
from roadtrain.stages.snapshot_choice import SeenSnapshot
from roadtrain.stages.snapshot_files import PartTable

# Built before the ranks' threads start: see the end of storage/meta.py. In a run, each rank is a
# process.
DECODERS = [msgspec.msgpack.Decoder(SeenSnapshot), msgspec.json.Decoder(PartTable)]


class ThreadLinks(ControlLinks):
    patience_s = 20.0  # longest wait, after which the test fails

    def __init__(self, rank: int, places: Sequence[RankPlace], shared: dict[Any, Any]) -> None:
        self.rank, self.size, self.places = rank, len(places), tuple(places)
        self.deadline_s, self.shared = 20.0, shared

    def _queue(self, key: tuple[str, int, int]) -> queue.Queue[Any]:
        with self.shared["lock"]:
            return self.shared.setdefault(key, queue.Queue())

    def gather(self, message: bytes, what: str) -> list[bytes]:
        for peer in range(self.size):
            self._queue(("gather", self.rank, peer)).put((what, message))
        out = [
            self._queue(("gather", peer, self.rank)).get(timeout=self.patience_s)
            for peer in range(self.size)
        ]
        assert {label for label, _ in out} == {what}, "ranks are at different operations"
        return [message for _, message in out]

    def send(self, tensor: torch.Tensor, peer: int, what: str) -> None:
        self._queue(("tensor", self.rank, peer)).put((what, tensor.clone()))

    def receive(self, tensor: torch.Tensor, peer: int, what: str) -> None:
        label, sent = self._queue(("tensor", peer, self.rank)).get(timeout=20)
        assert label == what
        tensor.copy_(sent)

    def send_bytes(self, message: bytes, peer: int, what: str) -> None:
        self._queue(("bytes", self.rank, peer)).put((what, message))

    def receive_bytes(self, peer: int, what: str) -> bytes:
        label, message = self._queue(("bytes", peer, self.rank)).get(timeout=20)
        assert label == what
        return message


def run_ranks(places: Sequence[RankPlace], work: Callable[[ThreadLinks], Any]) -> list[Any]:
    """Run `work` on each rank. Returns its result, or the exception that it raised, for each."""
    shared: dict[Any, Any] = {"lock": threading.Lock()}
    out: list[Any] = [None] * len(places)

    def run_rank(rank: int) -> None:
        try:
            out[rank] = work(ThreadLinks(rank, places, shared))
        except BaseException as error:
            out[rank] = error

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return out
