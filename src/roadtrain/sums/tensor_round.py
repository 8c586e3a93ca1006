"""A round of summing a tensor at a worker: the tensor's parts, the sums that are missing, and the
encoding of parts. Does NOT send parts or choose reducers. Not thread-safe, except `pushed`: the
caller holds a lock.

    grad -> parts -> (encoded, once) -> reducers -> (decoded) -> out
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from roadtrain.chunks import ITEMSIZE
from roadtrain.device.buffers import Buffer
from roadtrain.sums import formats


class TensorCodec:
    """The encoding of one tensor, with its residual and its encoded parts of the last round."""

    def __init__(self, format: str, elements: int) -> None:
        self.format, self.codec = format, formats.format_of(format)
        self.residual = np.zeros(elements, np.float32) if self.codec.feedback else None
        self.encoded: dict[int, tuple[int, memoryview]] = {}  # first element -> (round, bytes)
        self._encoding: dict[int, threading.Lock] = {}  # by first element

    def encode(self, values: np.ndarray, start: int, number: int, seed: int) -> memoryview:
        """Return the encoded bytes of the part that begins at element `start`, in round `number`.
        The bytes are the same if the part is pushed again."""
        nbytes = self.codec.nbytes(values.size)
        # If a reducer is removed, one thread may push a part again while another encodes it.
        with self._encoding.setdefault(start, threading.Lock()):
            last, raw = self.encoded.get(start) or (0, Buffer(nbytes).view[:nbytes])
            if last < number:
                kept = None if self.residual is None else self.residual[start : start + values.size]
                formats.encode(self.format, values, kept, raw, seed)
                self.encoded[start] = number, raw
        return raw


@dataclass(eq=False)
class TensorRound:
    """The state of one round of summing a tensor at a worker. `key`, `grad`, `out`, `dtype` and
    `done` are the arguments of `WorkerSums.sum`."""

    key: int
    grad: memoryview
    out: memoryview
    dtype: str
    done: Callable[[], None]
    urgency: tuple[int, int]  # priority, number of the call
    parts: Sequence[tuple[int, int]]  # (first element, element after the last) of each part
    codec: TensorCodec | None
    round: int = 0  # 0 until the round begins
    waits: set[int] = field(default_factory=set)  # parts whose sum has not arrived
    sent: dict[int, int] = field(default_factory=dict)  # part -> reducer that got the part
    began: float = field(default_factory=time.monotonic)

    @property
    def format(self) -> str:
        return self.dtype if self.codec is None else self.codec.format

    def number(self, start: int) -> int:
        """Return the number of the part that begins at element `start`, or -1 if there is none.
        `start` may have all bits inverted, as in the frames of moved parts (Map.assigned)."""
        start = max(start, ~start)
        size = self.parts[0][1]
        return start // size if start % size == 0 and start // size < len(self.parts) else -1

    def of(self, memory: memoryview, number: int) -> memoryview:
        start, stop = self.parts[number]
        return memory[start * ITEMSIZE[self.dtype] : stop * ITEMSIZE[self.dtype]]

    def values(self, memory: memoryview, number: int) -> np.ndarray:
        """Return part `number` of an fp32 tensor as an array that shares `memory`, the memory of
        the tensor."""
        return np.frombuffer(self.of(memory, number), np.float32)

    def pushed(self, number: int, rank: int) -> memoryview:
        """Return the bytes that the worker with rank `rank` sends for part `number`."""
        if self.codec is None:
            return self.of(self.grad, number)
        start = self.parts[number][0]
        seed = formats.seed_of(rank, self.key, start, self.round)
        return self.codec.encode(self.values(self.grad, number), start, self.round, seed)
