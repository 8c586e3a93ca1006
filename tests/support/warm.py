"""Done once in the process that all others are forked from: kernels are loaded and the schemas of
options are built. Each of its children would take most of a second for that.

Starts no threads and runs no backward pass: neither survives a fork.
"""

import gc

import numpy as np

from roadtrain import Files, Servers, place
from roadtrain.kernels.rules import NATIVE
from roadtrain.kernels.sum import accumulate, sum_k, sum_squares
from roadtrain.options.check import check_options

ADAMW = (1e-2, 0.1, 1e-8, 0.0, 0.9, 0.999)


def array(dtype: str, n: int = 64) -> np.ndarray:
    """An aligned array as a server's kernels get it."""
    return np.frombuffer(bytearray(4 * n), np.float32 if dtype == "fp32" else np.uint16)[:n]


def load_kernels() -> None:
    for dtype in ("fp32", "bf16"):
        sum_squares(array(dtype), dtype)
        accumulate(array("fp32"), array(dtype), dtype)
        for workers in (1, 2, 3, 4):
            sum_k(array("fp32"), [array(dtype)] * workers, dtype)
        copy = None if dtype == "fp32" else array(dtype)
        for decay in (0.1, 0.0):
            hyper = (ADAMW[0], decay, *ADAMW[2:])
            moments = [array("fp32"), array("fp32")]
            NATIVE["AdamRule"]().apply(
                array("fp32"), array(dtype), dtype, moments, np.zeros(1), hyper, 1.0, copy, dtype
            )


load_kernels()
for options in (place, Files, Servers):
    check_options(options, {})
# else each child visits all that is loaded here, and copies its pages
gc.collect()
gc.freeze()
