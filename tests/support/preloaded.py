"""Imported by the process from which tests fork others: loads the modules, kernels and option
checks that they need, which would take each child most of a second.

Starts no threads and runs no backward pass: neither survives a fork.
"""

import gc
import importlib

import numpy as np
import torch

from roadtrain import Files, Servers, place
from roadtrain.kernels.rules import NATIVE
from roadtrain.kernels.sum import accumulate, sum_k, sum_squares
from roadtrain.options.check import check_options
from roadtrain.switch.fixed_point import load_kernels

MODULES = (
    "encodings.idna",
    "roadtrain.relay.route",
    "roadtrain.servers.serve",
    "roadtrain.switch.end",
    "roadtrain.training.train",
    "tests.support.processes",
    "torch.profiler._cupti_monitor",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
ADAMW = (1e-2, 0.1, 1e-8, 0.0, 0.9, 0.999)


def array(dtype: str, n: int = 64) -> np.ndarray:
    """Return an aligned array, as a server passes to kernels."""
    return np.frombuffer(bytearray(4 * n), np.float32 if dtype == "fp32" else np.uint16)[:n]


def call_kernels() -> None:
    """Compile the kernels that most tests call, or read them from numba's cache."""
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
    for width in (1, 2, 4):
        load_kernels(width)


torch.set_num_threads(1)
for module in MODULES:
    importlib.import_module(module)
call_kernels()
# The first optimizer imports torch._dynamo.
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
for options in (place, Files, Servers):
    check_options(options, {})
gc.collect()
gc.freeze()  # forked processes then neither scan nor copy shared objects in garbage collection
