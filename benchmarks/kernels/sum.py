"""Compare the summation kernel of a server with torch.add. The kernel adds eight received bf16
gradients into one fp32 buffer in one pass.

The floor is the speed of memory: the faster of a kernel that only reads and writes, and of numpy's
copy of as many bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from benchmarks.common.report import Report, cores, interleave
from benchmarks.common.rows import row
from roadtrain.kernels.cast import kernel
from roadtrain.kernels.sum import sum_k
from roadtrain.units import MIB

BUFFERS, PART = 8, 1 << 19  # elements of a part: 1 MiB of bf16


@kernel
def _touch(total, buffers):
    for at in range(0, total.size, 4096):
        seen = np.float32(0)
        for k in range(len(buffers)):
            part = buffers[k][at : at + 4096]
            bits = np.uint16(0)
            for i in range(part.size):
                bits |= part[i]
            seen += np.float32(bits)
        tile = total[at : at + 4096]
        for i in range(tile.size):
            tile[i] = seen


def run(quick: bool = False) -> Report:
    elements = (8 if quick else 32) * MIB
    rng = np.random.default_rng(0)
    wide = rng.standard_normal(elements, np.float32)
    buffers = [(np.roll(wide, i).view(np.uint32) >> 16).astype(np.uint16) for i in range(BUFFERS)]
    total, theirs = np.zeros(elements, np.float32), torch.zeros(elements)
    peers = [torch.from_numpy(buffer.view(np.int16)).view(torch.bfloat16) for buffer in buffers]

    def torch_sum() -> None:
        theirs.zero_()
        for peer in peers:
            torch.add(theirs, peer, out=theirs)

    def copy_over(at: int) -> None:  # half of the bytes are read, half written
        for source, target in zip(buffers[::2], buffers[1::2]):
            np.copyto(target[at : at + PART], source[at : at + PART])
        half = PART // 2
        np.copyto(total[at : at + half], total[at + half : at + PART])

    with ThreadPoolExecutor(cores()) as pool:

        def each(work: Callable[[int], None]) -> Callable[[], None]:
            return lambda: deque(pool.map(work, range(0, elements, PART)), maxlen=0).clear()

        def ours(at: int) -> None:
            sum_k(total[at : at + PART], [b[at : at + PART] for b in buffers], "bf16")

        def read(at: int) -> None:
            _touch(total[at : at + PART], tuple(b[at : at + PART] for b in buffers))

        work = {"ours": each(ours), "torch": torch_sum, "read": each(read), "copy": each(copy_over)}
        seconds = interleave(work, 3 if quick else 9)
    rate = {name: elements * (2 * BUFFERS + 4) / s for name, s in seconds.items()}
    sum_k(total, buffers, "bf16")
    torch_sum()
    same = bool((torch.from_numpy(total) == theirs).all())
    case = f"{BUFFERS} bf16 buffers of {elements / 1e6:.0f} M elements into one, {cores()} threads"
    floor = min(seconds["read"], seconds["copy"]) / seconds["ours"]
    rows = [
        row(
            case,
            "read and written",
            "GB/s",
            rate["ours"],
            (rate["torch"], "torch.add into fp32"),
            more_is_better=True,
            of_floor=floor,
            goal="ratio >= 5",
        ),
        row(case, "of memory speed", "", floor, of_floor=floor, goal="ours >= 0.8"),
        row(case, "the same bits as torch.add", "", float(same), goal="ours == 1"),
    ]
    return Report("sum", rows)
