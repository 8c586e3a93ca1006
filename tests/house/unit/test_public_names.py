"""Public names and defaults that users rely on; change them only on purpose."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import roadtrain
from roadtrain import cli, hvd
from roadtrain.config import job


@pytest.mark.slow
def test_package() -> None:
    assert sorted(roadtrain.__all__) == [
        "Delay",
        "Downcast",
        "FanIn",
        "Files",
        "Lion",
        "Memory",
        "MicroBatch",
        "ParallelOptions",
        "Parallelism",
        "PlacedOptimizer",
        "RoadtrainError",
        "Servers",
        "Summation",
        "SwitchNode",
        "TopK",
        "Trackers",
        "parallelize",
        "place",
        "sum_fsdp",
        "sum_hook",
    ]


def test_horovods_and_byteps() -> None:
    assert hvd.__all__ == [
        "Average",
        "Compression",
        "CrossBarrier",
        "DistributedOptimizer",
        "Sum",
        "allreduce",
        "allreduce_",
        "allreduce_async",
        "allreduce_async_",
        "barrier",
        "broadcast",
        "broadcast_",
        "broadcast_object",
        "broadcast_optimizer_state",
        "broadcast_parameters",
        "declare",
        "init",
        "is_initialized",
        "local_rank",
        "local_size",
        "poll",
        "push_pull",
        "push_pull_async",
        "push_pull_async_inplace",
        "push_pull_inplace",
        "rank",
        "shutdown",
        "size",
        "synchronize",
    ]
    assert list(inspect.signature(hvd.DistributedOptimizer).parameters) == [
        "optimizer",
        "named_parameters",
        "compression",
        "backward_passes_per_step",
        "op",
        "gradient_predivide_factor",
        "model",
        "num_steps",
        "others",
    ]


def test_place() -> None:
    assert list(inspect.signature(roadtrain.place).parameters) == [
        "model",
        "optimizer",
        "store",
        "compress",
        "delay",
        "host_budget",
        "device_budget",
        "dtype",
        "blocks",
        "compile",
        "backwards_per_step",
        "chunk_elements",
        "device",
        "weights",
        "init",
        "extra",
        "mark",
        "deadline_s",
        "report",
        "group",
        "unknown",
    ]


def test_commands() -> None:
    assert {title: list(group) for title, group in cli.COMMAND_GROUPS.items()} == {
        "start here": ["fit", "doctor", "init", "train", "completion"],
        "run": ["serve", "launch", "export", "import"],
        "look": ["status", "show"],
        "plan": ["probe", "plan", "simulate", "calibrate"],
        "prove": [
            "verify",
            "check-rule",
            "preflight",
            "lab up",
            "lab run",
            "lab down",
            "soak",
            "reproduce",
            "bench",
        ],
    }


def test_keys_of_a_job() -> None:
    assert [key for key, _, _ in job.all_keys()] == [
        "run.dir",
        "run.steps",
        "run.minutes",
        "run.memory_limit",
        "run.device",
        "run.seed",
        "run.new_store",
        "run.log_every",
        "run.report_to",
        "model.config",
        "model.pretrained",
        "model.dtype",
        "model.blocks",
        "model.compile",
        "data.paths",
        "data.seq_len",
        "data.batch_size",
        "data.held_out",
        "data.tokenizer",
        "optimizer.name",
        "optimizer.lr",
        "optimizer.weight_decay",
        "optimizer.betas",
        "optimizer.eps",
        "optimizer.momentum",
        "optimizer.options",
        "optimizer.schedule",
        "optimizer.warmup_steps",
        "optimizer.clip_norm",
        "optimizer.accumulate",
        "optimizer.delay",
        "store.files",
        "store.rates",
        "store.direct",
        "store.moved_from",
        "store.chunk_elements",
        "servers.addresses",
        "servers.token_file",
        "servers.ca",
        "servers.cert",
        "servers.key",
        "servers.connections",
        "servers.relay",
        "servers.buffering",
        "servers.replicas",
        "servers.give_up",
        "servers.switches",
        "servers.wire",
        "servers.window",
        "servers.multicast",
        "budget.host",
        "budget.device",
        "compress.keep",
        "compress.error_feedback",
        "compress.downcast",
        "parallelism.auto",
        "parallelism.dp",
        "parallelism.tp",
        "parallelism.pp",
        "parallelism.widths",
        "parallelism.stages",
        "parallelism.virtual_stages",
        "parallelism.num_microbatches",
        "parallelism.activations",
        "parallelism.across_clusters",
        "parallelism.overlap",
        "parallelism.resize_stages",
        "parallelism.snapshot_every",
        "parallelism.snapshot_replicas",
        "parallelism.deadline",
        "parallelism.networks",
        "parallelism.placements",
        "parallelism.reducers",
        "parallelism.reducers_token_file",
        "parallelism.reducers_alone",
        "predicted.seconds",
        "predicted.stages",
        "launched.committed",
    ]


@pytest.mark.slow
def test_the_command_line_relays_and_reducers_import_no_torch() -> None:
    """Importing torch takes seconds and 200 MB, in each relay or reducer too."""
    code = (
        "import sys, roadtrain.cli, roadtrain.training.status, roadtrain.relay.relay,"
        " roadtrain.sums.reducer, roadtrain; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
