"""Loads torch and the kernels in the fork server of `roadtrain soak`, so that its child processes
start with both loaded. Only the fork server imports this module.
"""

import contextlib

import torch._dynamo  # noqa: F401  torch's optimizers import it, which takes seconds

import roadtrain.training.train  # noqa: F401
from benchmarks.soak.job import warm

with contextlib.suppress(ImportError):  # without transformers no trainer runs alone
    import transformers.models.llama.modeling_llama  # noqa: F401  the model of a trainer that runs alone

warm()
