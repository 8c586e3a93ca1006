"""One round of a tensor that a worker sums: its parts, which of them are waited for, and the bytes
that they travel as.

    grad -> parts -> (encoded, once) -> reducers -> (decoded) -> out

Assumes the lock of whoever asks. Does NOT know links, nor who sums which part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from roadtrain.chunks import ITEMSIZE
from roadtrain.device.buffers import Buffer
from roadtrain.sums import formats


class TensorCodec:
    """Of one tensor that travels encoded: what it has lost so far, and its parts' bytes of the
    last round."""

    def __init__(self, format: str, elements: int) -> None:
        self.format, self.codec = format, formats.format_of(format)
        self.residual = np.zeros(elements, np.float32) if self.codec.feedback else None
        self.encoded: dict[int, tuple[int, memoryview]] = {}  # first element -> round, bytes

    def encode(self, values: np.ndarray, start: int, number: int, seed: int) -> memoryview:
        """Once a round: what is pushed again is the same."""
        nbytes = self.codec.nbytes(values.size)
        last, raw = self.encoded.get(start) or (0, Buffer(nbytes).view[:nbytes])
        if last != number:
            kept = None if self.residual is None else self.residual[start : start + values.size]
            formats.encode(self.format, values, kept, raw, seed)
            self.encoded[start] = number, raw
        return raw


@dataclass(eq=False)
class TensorRound:
    """One round of a tensor."""

    key: int
    grad: memoryview
    out: memoryview
    dtype: str
    done: Callable[[], None]
    urgency: tuple[int, int]  # priority, number of the call
    parts: Sequence[tuple[int, int]]  # first element, the one behind the last
    codec: TensorCodec | None
    round: int = 0  # 0: it has not begun
    waits: set[int] = field(default_factory=set)  # parts whose sum has not come
    sent: dict[int, int] = field(default_factory=dict)  # part -> the reducer it was pushed to
    began: float = field(default_factory=time.monotonic)

    @property
    def format(self) -> str:
        return self.dtype if self.codec is None else self.codec.format

    def number(self, start: int) -> int:
        """Of the part that begins there; -1: none does. ~start: of one that went elsewhere
        (Map.moved)."""
        start = max(start, ~start)
        size = self.parts[0][1]
        return start // size if start % size == 0 and start // size < len(self.parts) else -1

    def of(self, memory: memoryview, number: int) -> memoryview:
        start, stop = self.parts[number]
        return memory[start * ITEMSIZE[self.dtype] : stop * ITEMSIZE[self.dtype]]

    def values(self, memory: memoryview, number: int) -> np.ndarray:
        """fp32 [n], where the tensor is."""
        return np.frombuffer(self.of(memory, number), np.float32)

    def pushed(self, number: int, rank: int) -> memoryview:
        """A part as worker `rank` sends it."""
        if self.codec is None:
            return self.of(self.grad, number)
        start = self.parts[number][0]
        seed = formats.seed_of(rank, self.key, start, self.round)
        return self.codec.encode(self.values(self.grad, number), start, self.round, seed)
