"""The process of benchmark `deepspeed` that trains with DeepSpeed: a Llama of 420 M parameters on
CPU by ZeRO-3, with optimizer state offloaded to files.

Needs the extra `bench`, a C++ compiler and libaio's headers (Debian: libaio-dev). DeepSpeed
compiles its C++ ops at first use, so compile them before you measure (`build_ops`). The settings
are the fastest of all that were tried.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from benchmarks.common import model420

# before DeepSpeed is imported
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed

PORT = 29512


def config(directory: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": model420.BATCH,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": model420.LEARNING_RATE,
                "betas": model420.BETAS,
                "eps": model420.EPS,
                "weight_decay": model420.WEIGHT_DECAY,
            },
        },
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 50_000_000,  # elements that are updated at a time
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": directory,
                "buffer_count": 16,  # pipelining fails with 5
                "pin_memory": True,
                "pipeline_read": True,
                "pipeline_write": True,
            },
            # parameters up to this size are never partitioned
            "stage3_param_persistence_threshold": 10**9,
            "reduce_bucket_size": 20_000_000,
        },
        "aio": {
            "block_size": 8 << 20,
            "queue_depth": 16,
            "intra_op_parallelism": 2,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def train(steps: int, directory: str) -> dict[str, Any]:
    torch.set_num_threads(os.cpu_count() or 1)
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(PORT),
    }
    deepspeed.init_distributed(dist_backend="gloo")
    model = model420.build(model420.compute_default())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config(directory)
    )
    done = [
        model420.run_step(engine, engine.step, model420.batch(step), engine.backward)
        for step in range(steps)
    ]
    return {
        "system": f"DeepSpeed {deepspeed.__version__}",
        "losses": [loss for loss, _ in done],
        "steps": [seconds for _, seconds in done],
    }


def build_ops() -> None:
    accelerator = deepspeed.accelerator.get_accelerator()
    for name in ("CPUAdamBuilder", "AsyncIOBuilder"):
        accelerator.create_op_builder(name).load()
