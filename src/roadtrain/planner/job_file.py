"""Write a plan as a job file that the user completes (`roadtrain plan --job-file`), and run real
steps of a plan (`roadtrain plan --verify`). Importing this module does not import torch."""

from __future__ import annotations

import importlib
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from roadtrain.config.cluster import Cluster
from roadtrain.config.models import read_config
from roadtrain.config.plan_file import Plan
from roadtrain.errors import ConfigError
from roadtrain.planner import switches
from roadtrain.planner.candidates import EVERY
from roadtrain.planner.job_keys import degrees, step_keys
from roadtrain.planner.plan_report import words
from roadtrain.storage.direct import replace_file


def job_text(plan: Plan, cluster: Cluster | None = None) -> str | None:
    """Return the text of a job file with which `roadtrain train` runs the plan, or None if it
    cannot. `cluster`: the plan's cluster, whose switches the job file names."""
    own: dict[str, Any] = {
        "data": {"batch_size": plan.micro_batch},
        **step_keys(plan),
        "model": {"dtype": "bf16" if plan.sizes.parameter_bytes == 2 else "fp32"},
    }
    if plan.update_at == "step":
        own["optimizer"]["clip_norm"] = 1.0
    name, ranks = plan.placement.name, plan.parallelism
    if name == "zero1" and ranks.cp == ranks.ep == 1 and not plan.activation_checkpointing:
        del own["optimizer"]["accumulate"]
        return tomli_w.dumps({**own, "parallelism": degrees(plan)})
    if ranks.tp > 1 or ranks.pp > 1:
        return None
    servers: dict[str, Any] = {"addresses": ["HOST:PORT"]}
    if name == "smartnic":
        servers |= {"relay": switches.RELAY, "buffering": "all" if plan.memory.kept else "auto"}
    else:
        servers["buffering"] = "all" if plan.memory.slots >= EVERY else "auto"
    if plan.placement.fans_in and cluster is not None:
        servers |= switches.job_keys(plan, cluster)
    elif name in ("files", "zero-offload"):
        files = ["{run}/store"] if name == "files" else []
        return tomli_w.dumps({**own, "store": {"files": files}})
    elif name not in ("server", "smartnic"):
        return None
    return tomli_w.dumps({**own, "servers": servers})


def write_job_file(path: str, plan: Plan, cluster: Cluster) -> None:
    if (text := job_text(plan, cluster)) is None:
        print(f"no job file: `roadtrain train` cannot run this plan: {words(plan, cluster)}")
        return
    replace_file(Path(path), text.encode(), "writing")
    more = "replace HOST:PORT with the addresses of your servers"
    if "[parallelism]" in text:
        more = "start it with torchrun, one process per device"
    print(f"job     {path}: add [model.config]; {more}")


def steps_of(cluster_file: str, model: str, plan: Plan, seq_len: int, lab: bool) -> int:
    """Run real steps of the plan on this host, or in the lab if `lab` is True. Compare them with
    simulated steps, and return the exit code of `roadtrain calibrate`. Raises ConfigError if the
    plan cannot run on this host or in the lab, and other RoadtrainErrors if a step fails."""
    text = job_text(plan)
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    served, many = lab and plan.placement.name == "server", plan.parallelism.devices
    if (
        text is None
        or plan.placement.name not in ("files", "zero-offload", "server")[: 2 + served]
        or (many > (plan.parallelism.dp if served else 1))
    ):
        where = "in the lab" if lab else "with one worker on this host"
        raise ConfigError(
            f"placement {plan.placement.name} on {many} device(s) cannot be run {where}",
            hint="use --placements files,zero-offload on a cluster of one device"
            + (", or --placements server" if lab else ", or add --lab"),
        )
    if path.suffix != ".json":
        raise ConfigError(f"{model} is a shape and cannot run", hint="give --model config.json")
    tree = tomllib.loads(text)
    tree["model"]["config"] = {k: v for k, v in read_config(path).items() if v is not None}
    tree["data"]["seq_len"] = seq_len
    with tempfile.TemporaryDirectory(prefix="roadtrain-verify-") as home:
        file = Path(home) / "job.toml"
        file.write_text(tomli_w.dumps({**tree, "run": {"dir": f"{home}/run"}}))
        calibrate = importlib.import_module("roadtrain.planner.calibrate")  # imports torch
        exit_code: int = calibrate.command(cluster_file, str(file), lab=lab)
    return exit_code
