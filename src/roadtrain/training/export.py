"""Export and import between a run directory and a folder in `transformers` format, tensor by
tensor.

The exported folder contains parameters in the compute dtype, buffers of the last commit,
config.json, and the tokenizer if the run has one. An import creates a run directory with a placed
model at step 0 and a job.toml.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roadtrain.chunks import ParamSpec
from roadtrain.config.job import Job, job_of_run, make_job
from roadtrain.environment import need
from roadtrain.errors import ConfigError
from roadtrain.placement.job_state import persistent_buffers
from roadtrain.retry import slow_work
from roadtrain.storage.convert import MASTER, read_param
from roadtrain.storage.direct import check_directory, make_directory
from roadtrain.storage.generation import open_store
from roadtrain.storage.tier import WEIGHTS
from roadtrain.streaming import plain
from roadtrain.streaming.split import DTYPES
from roadtrain.training.build import build_config
from roadtrain.training.export_stages import buffer_items, export_of
from roadtrain.training.placed_job import place_job
from roadtrain.training.run_files import mark_of, write_job
from roadtrain.training.write_safetensors import Item, export_dir


def export_run(
    run: str, directory: str, masters: bool = False, report: Callable[[str], None] = print
) -> int:
    """Write the parameters of a run directory as safetensors in Hugging Face layout, tensor by
    tensor.

    The parameters are those of the last committed step. Raises ConfigError or StoreError.

    Args:
        masters: write the fp32 masters instead of the parameters in the dtype that the model
            computes in
    """
    job = job_of_run(run)
    check_directory(Path(directory))
    if job.parallelism.used:
        step, items = export_of(job, masters)
        files = export_dir(items, directory)
    else:
        step, files = _export_store(run, job, directory, masters, report)
    _write_config(job, Path(directory), "fp32" if masters else job.model.dtype)
    if (tokenizer := Path(run, "tokenizer.json")).is_file():
        shutil.copyfile(tokenizer, Path(directory, "tokenizer.json"))
    report(f"exported step {step}: {len(files)} files in {directory}")
    return 0


def _export_store(
    run: str, job: Job, directory: str, masters: bool, report: Callable[[str], None]
) -> tuple[int, list[Path]]:
    """Export the store of a job without stages. Returns the store's step and the files that were
    written."""
    mark = mark_of(job, report, reads=True)
    with ExitStack() as stack:
        # this process becomes the only worker of the servers, which must have no workers yet
        if job.servers.addresses:
            training = place_job(job, report, mark)
            optimizer = stack.enter_context(training.optimizer)
            step, params, read = optimizer.steps_done, optimizer.params, optimizer.read
            buffers = persistent_buffers(training.model)
        else:
            if not job.store.files:
                raise ConfigError(
                    f"{run} has no state on files (store.files = [])", hint="train with it set"
                )
            where = ", ".join(job.store.files)
            store = open_store(
                job.store.files,
                direct=job.store.direct,
                accept=lambda job, step, session: mark.check(job, step, where, session=session),
            )
            assert store is not None  # the mark refuses a missing store
            stack.callback(store.close)
            for note in store.notes:
                report(note)
            step, params, read = store.step, store.table.params, partial(read_param, store)
            state = plain.decode(store.blob) if store.blob else {}
            buffers = state.get("buffers", {})
        items = _items(params, read, buffers, masters)
        with slow_work("exporting tensors", len(items), report) as advance:
            return step, export_dir(items, directory, advance=advance)


def import_weights(
    directory: str, overrides: Mapping[str, Any], report: Callable[[str], None] = print
) -> int:
    """Create a run (--run.dir) from the weights of a Hugging Face folder, and write the run's
    job.toml.

    The weights are read tensor by tensor, and the model is placed at step 0. Raises StoreError, or
    ConfigError if the run has already trained a step."""
    if "run.dir" not in overrides:
        raise ConfigError("import needs a run directory", hint="add --run.dir RUN")
    run, tokenizer = {"dir": overrides["run.dir"]}, Path(directory) / "tokenizer.json"
    data = {"tokenizer": str(tokenizer)} if tokenizer.is_file() else {}
    tree = {"model": {"pretrained": directory}, "run": run, "data": data}
    job = make_job(tree).changed({**overrides, "model.pretrained": directory})
    places = getattr(build_config(job), "max_position_embeddings", None) or job.data.seq_len
    if places < job.data.seq_len and "data.seq_len" not in overrides:
        report(f"data.seq_len is lowered to {places}, the number of positions of the model")
        job = job.changed({"data.seq_len": places})
    make_directory(job.run_dir)
    training = place_job(job, report, mark_of(job, report))
    with training.optimizer as optimizer:
        if optimizer.steps_done:
            raise ConfigError(
                f"{job.run.dir} has already trained {optimizer.steps_done} steps",
                hint="name another --run.dir",
            )
        optimizer.flush()
        write_job(training.job)
    report(f"imported {directory}; continue with: roadtrain train {job.run_dir / 'job.toml'}")
    return 0


def _items(
    params: Sequence[ParamSpec],
    read: Callable[[str, str], Any],
    buffers: Mapping[str, torch.Tensor],
    masters: bool,
) -> list[Item]:
    items: list[Item] = []
    for param in params:
        if param.name.startswith("residual:"):  # belongs to error feedback, not to the model
            continue
        what, dtype = (MASTER, "fp32") if masters and param.trainable else (WEIGHTS, param.dtype)
        items.append((param.name, dtype, param.shape, partial(read, param.name, what)))
    return [*items, *buffer_items(buffers)]


def _write_config(job: Job, directory: Path, dtype: str) -> None:
    config, transformers = build_config(job), need("transformers", "hf")
    config.dtype = DTYPES[dtype]
    models = transformers.AutoModelForCausalLM._model_mapping
    if type(config) in models:
        config.architectures = [models[type(config)].__name__]
    config.save_pretrained(directory)
