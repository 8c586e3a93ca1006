"""The process of benchmark `deepspeed` that trains with DeepSpeed: a Llama of 420 M parameters on
CPU by ZeRO-3, with state offloaded to files.

    python -m benchmarks.placement.deepspeed_peer --json OUT --dir D --steps 4
    python -m benchmarks.placement.deepspeed_peer --json OUT --build   only compile (minutes)

Needs the extra `bench`, a C++ compiler and libaio's headers (Debian: libaio-dev). DeepSpeed
compiles its C++ ops at first use, so compile them before you measure. The default settings are the
fastest of all settings that were tried; the docs list the others.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import deepspeed
import torch

from benchmarks.common.model420 import (
    BETAS,
    EPS,
    LEARNING_RATE,
    WEIGHT_DECAY,
    arguments,
    batch,
    build,
    run_step,
    write_result,
)


def config(args: argparse.Namespace) -> dict[str, Any]:
    offload = {
        "device": args.optimizer,
        "nvme_path": args.dir,
        "buffer_count": args.buffers,
        "pin_memory": True,
        "pipeline_read": args.pipeline,
        "pipeline_write": args.pipeline,
    }
    params = {
        "device": args.params,
        "nvme_path": args.dir,
        "buffer_count": args.param_buffers,
        "buffer_size": 4_000_000,
        "pin_memory": True,
    }
    return {
        "train_micro_batch_size_per_gpu": args.rows,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "bf16": {"enabled": True},
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": LEARNING_RATE,
                "betas": BETAS,
                "eps": EPS,
                "weight_decay": WEIGHT_DECAY,
            },
        },
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": args.sub_group,
            "offload_optimizer": offload,
            "offload_param": params if args.params != "none" else None,
            "stage3_param_persistence_threshold": args.persist,
            "reduce_bucket_size": args.reduce_bucket,
        },
        "aio": {
            "block_size": args.aio_block,
            "queue_depth": args.aio_depth,
            "intra_op_parallelism": args.aio_threads,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def train(args: argparse.Namespace) -> dict[str, Any]:
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(args.port),
    }
    deepspeed.init_distributed(dist_backend="gloo")
    model = build(args.compute, checkpoint=args.checkpoint)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config(args)
    )
    losses, seconds = [], []
    for step in range(args.steps):
        loss, parts = run_step(
            engine, engine.step, batch(step, args.rows, args.seq), engine.backward
        )
        losses.append(loss)
        seconds.append(parts)
    settings = {
        name: value
        for name, value in vars(args).items()
        if name not in ("json", "dir", "steps", "port")
    }
    return {
        "system": f"DeepSpeed {deepspeed.__version__}",
        "losses": losses,
        "steps": seconds,
        "settings": settings,
    }


def build_ops() -> None:
    accelerator = deepspeed.accelerator.get_accelerator()
    for name in ("CPUAdamBuilder", "AsyncIOBuilder"):
        accelerator.create_op_builder(name).load()


def main(argv: list[str]) -> None:
    parser = arguments(
        argparse.ArgumentParser(description="the 420 M model under DeepSpeed with NVMe offload")
    )
    parser.add_argument("--build", action="store_true", help="only compile the ops")
    parser.add_argument(
        "--optimizer", choices=("nvme", "cpu"), default="nvme", help="where optimizer state is kept"
    )
    parser.add_argument(
        "--params",
        choices=("nvme", "cpu", "none"),
        default="none",
        help="where bf16 parameters are kept",
    )
    parser.add_argument("--pipeline", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--checkpoint", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument(
        "--buffers", type=int, default=16, help="optimizer buffers; pipelining fails with 5"
    )
    parser.add_argument("--param-buffers", type=int, default=300)
    parser.add_argument(
        "--sub-group", type=int, default=50_000_000, help="elements updated at a time"
    )
    parser.add_argument(
        "--persist",
        type=int,
        default=10**9,
        help="parameters up to this size are never partitioned",
    )
    parser.add_argument("--reduce-bucket", type=int, default=20_000_000)
    parser.add_argument("--aio-block", type=int, default=8 << 20)
    parser.add_argument("--aio-depth", type=int, default=16)
    parser.add_argument("--aio-threads", type=int, default=2)
    parser.add_argument("--port", type=int, default=29512)
    args = parser.parse_args(argv)
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(os.cpu_count() or 1)
    if args.build:
        build_ops()
    else:
        write_result(train(args), args)


if __name__ == "__main__":
    main(sys.argv[1:])
