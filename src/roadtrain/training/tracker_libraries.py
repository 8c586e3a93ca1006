"""The libraries of trackers: open a run by name, log numbers to it and close it.

All work offline. Libraries are imported when a run is opened (extra `trackers`). Does NOT decide
which steps are logged (trackers.py).
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roadtrain.options.schema import flat

BLOCK = 32 << 10
PROJECT = "roadtrain"  # name of the project or experiment, unless the library's environment sets it


@dataclass(frozen=True)
class TrackedRun:
    """A run to open. `id` is unique and the same after every resume; `last` is the last step that
    was logged, 0 for a new run. `config` has the entry "lossy" if training is lossy (Rule 2)."""

    directory: Path
    id: str
    last: int
    config: Mapping[str, Any]

    @property
    def lossy(self) -> dict[str, str]:
        return {name: str(value) for name, value in self.config.get("lossy", {}).items()}


@dataclass(frozen=True)
class OpenRun:
    """Each method may raise any error of its library.

    Attributes:
        where: A text for the user.
        last: The last step that the library has kept, where it may lose steps that were logged
            shortly before a kill; None if it never does.
    """

    where: str
    log: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], object]
    last: int | None = None


def _open_tensorboard(run: TrackedRun) -> OpenRun:
    kind = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    where = run.directory / "tensorboard"
    # TensorBoard ignores earlier records from this step on
    writer = kind(str(where), purge_step=run.last + 1)
    if not run.last:
        writer.add_text("config", f"```\n{json.dumps(run.config, indent=1, default=str)}\n```")
        writer.add_text("lossy", str(run.lossy or "nothing: training is exact"))

    def log(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()  # a kill must not lose the step

    return OpenRun(f"tensorboard --logdir {where}", log, writer.close)


def _open_wandb(run: TrackedRun) -> OpenRun:
    wandb = importlib.import_module("wandb")
    chosen = os.environ.get("WANDB_MODE")
    mode = chosen or ("online" if wandb.login(prompt=False) else "offline")
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run.directory.name,
        id=run.id,
        resume="allow",
        dir=str(run.directory),
        config=dict(run.config),
        tags=[f"lossy: {name} {value}" for name, value in run.lossy.items()],
        mode=mode,
        settings=wandb.Settings(silent=True, console="off"),
    )
    later = f"; wandb sync {run.directory}/wandb/offline-* sends it" if mode == "offline" else ""
    where = f"{mode}{later}" if chosen or mode == "online" else f"{mode}, not logged in{later}"
    last = _last_offline(run) if mode == "offline" else opened.step - 1 if run.last else 0
    return OpenRun(where, lambda step, numbers: opened.log(numbers, step=step), opened.finish, last)


def _last_offline(run: TrackedRun) -> int:
    """Return the last step in wandb's offline files, whose writer keeps up to 32 KiB in memory."""
    kind = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    last = 0
    for path in run.directory.glob(f"wandb/offline-run-*-{run.id}/run-{run.id}.wandb"):
        for data in _records(path.read_bytes()):
            record = kind.FromString(data)
            last = max(
                [last, *(int(item.value_json) for item in record.history.item if _is_step(item))]
            )
    return last


def _is_step(item: Any) -> bool:
    return item.key == "_step" or list(item.nested_key) == ["_step"]


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the whole records of a file of wandb, which has LevelDB's log format: a file header of
    7 bytes, then blocks of 32 KiB with fragments (checksum of 4 bytes, length of 2, type of 1,
    content). Types 1 and 4 end a record."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (room := BLOCK - at % BLOCK) < 7:
            at += room
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4) and at <= len(data):
            yield record
            record = b""


def _open_trackio(run: TrackedRun) -> OpenRun:
    opened = importlib.import_module("trackio").init(
        project=PROJECT,
        name=f"{run.directory.name}-{run.id}",
        config=dict(run.config),
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    where = f"trackio show --project {PROJECT}"
    last = getattr(opened, "_next_step", run.last + 1) - 1
    log = lambda step, numbers: opened.log(dict(numbers), step=step)  # noqa: E731
    return OpenRun(where, log, opened.finish, max(0, last))


def _open_mlflow(run: TrackedRun) -> OpenRun:
    logging.getLogger("mlflow.store").setLevel(logging.ERROR)  # it says much about new files
    mlflow, entities = importlib.import_module("mlflow"), importlib.import_module("mlflow.entities")
    path = run.directory.absolute() / "mlflow.db"
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{path}"
    if uri.endswith(str(path)) and not path.exists():
        # a kill while the tables are made would leave a database that cannot be opened
        (new := path.with_suffix(".new")).unlink(missing_ok=True)
        mlflow.MlflowClient(tracking_uri=f"sqlite:///{new}").search_experiments()
        new.replace(path)
    client = mlflow.MlflowClient(tracking_uri=uri)
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    found = client.get_experiment_by_name(name)
    experiment = found.experiment_id if found else client.create_experiment(name)
    same = client.search_runs([experiment], f"tags.roadtrain = '{run.id}'", max_results=1)
    if same:
        number = same[0].info.run_id
        client.update_run(number, status="RUNNING")
    else:
        tags = {"roadtrain": run.id} | {f"lossy.{key}": text for key, text in run.lossy.items()}
        made = client.create_run(experiment, run_name=run.directory.name, tags=tags)
        number = made.info.run_id
        params = [entities.Param(key, str(value)) for key, value in flat(run.config).items()]
        client.log_batch(number, params=params[:100])

    def log(step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [entities.Metric(name, value, now, step) for name, value in numbers.items()]
        client.log_batch(number, metrics=metrics, synchronous=True)

    return OpenRun(
        f"mlflow ui --backend-store-uri {uri}", log, lambda: client.set_terminated(number)
    )


# how to open a run, and the modules that it needs
LIBRARIES: Mapping[str, tuple[Callable[[TrackedRun], OpenRun], tuple[str, ...]]] = {
    "tensorboard": (_open_tensorboard, ("tensorboard",)),
    "wandb": (_open_wandb, ("wandb",)),
    "trackio": (_open_trackio, ("trackio",)),
    "mlflow": (_open_mlflow, ("mlflow", "sqlalchemy", "alembic")),
}
