"""Imported by the fork server of `roadtrain soak` only: its children find torch and the kernels
loaded."""

import contextlib

import torch._dynamo  # noqa: F401  torch's optimizers import it, which takes seconds

import roadtrain.training.train  # noqa: F401
from benchmarks.soak_job import warm

with contextlib.suppress(ImportError):  # without it nobody trains alone
    import transformers.models.llama.modeling_llama  # noqa: F401  what trains alone is a small Llama

warm()
