"""Imported by the fork server of `roadtrain soak` only: its children find torch and the kernels loaded."""

import torch._dynamo  # noqa: F401  torch's optimizers import it, which takes seconds

from roadtrain.bench.soak_job import warm

warm()
