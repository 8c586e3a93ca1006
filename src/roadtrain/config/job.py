"""The job file, which describes one training run.

The TOML file and the command line have the same keys. The command line overrides the file, and the
file overrides defaults. Unknown keys and wrong types raise ConfigError with the nearest valid name.
Relative paths are relative to the working directory; `{run}` in a store directory stands for the
run directory. This module does not import torch, so optimizers and dtypes are plain text.
"""

from __future__ import annotations

import json
import re
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import tomli_w
from pydantic import BeforeValidator, Field, field_validator, model_validator

from roadtrain.chunks import MAX_CHUNK
from roadtrain.config.machines import Predicted
from roadtrain.errors import ConfigError
from roadtrain.kernels.optimizers import OPTIMIZERS
from roadtrain.options.names import did_you_mean
from roadtrain.options.schema import (
    Count,
    Flag,
    Integer,
    Number,
    Section,
    SizeText,
    Texts,
    Whole,
    as_list,
    checked,
    keys_of,
    meaning_of,
    merged,
    read_toml,
    refusing,
    unknown_key,
)
from roadtrain.stages.job_parallelism import ParallelismSection, Stages
from roadtrain.switch.options import WINDOW, WINDOWS, FanIn, SwitchNode, Wire
from roadtrain.units import parse_bytes

TrackerNames = Annotated[
    list[Literal["tensorboard", "wandb", "trackio", "mlflow"]], BeforeValidator(as_list)
]


class RunSection(Section):
    dir: str = ""
    """run directory; default: runs/ and the name of the job file"""
    steps: Whole = 1000
    """train until this step, counted from the start of the run"""
    minutes: Number | None = Field(default=None, gt=0)
    """number of minutes after which training stops; the same command continues the run"""
    memory_limit: SizeText | None = None
    """hard limit of a process's memory, enforced by the system, such as `1.5GiB`; default: none"""
    device: str = ""
    """cpu, cuda (each worker uses its own) or cuda:N; default: the accelerator, or else cpu"""
    seed: Integer = 0
    """random seed of initial parameters, data order and dropout"""
    new_store: Flag = False
    """start from the store as it is, or create a new one, even if the run has trained further"""
    log_every: Count = 1
    """number of steps between two printed lines, if no progress bar can be drawn"""
    report_to: TrackerNames = []
    """trackers that get each committed step: tensorboard, wandb, trackio, mlflow"""


class ModelSection(Section):
    config: dict[str, Any] = {}
    """transformers config of a model to create: model_type and its own keys; "null" is its null"""
    pretrained: str | None = None
    """directory of a model to load, with config.json and safetensors files"""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """dtype of parameters during computation"""
    blocks: Texts | None = None
    """names of the modules to stream one at a time; default: the model's layers are found"""
    compile: Flag = False
    """compile each of these modules with torch.compile"""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.pretrained and self.config:
            raise ValueError("give either config or pretrained, not both")
        if not self.pretrained and "model_type" not in self.config:
            raise ValueError("give pretrained, or config with a model_type such as `llama`")
        return self


class DataSection(Section):
    paths: Texts = [f"{sysconfig.get_path('stdlib')}/**/*.py"]
    """text files, directories or globs; default: the source of Python's standard library"""
    seq_len: Count = Field(default=256, description="number of tokens per sample")
    batch_size: Count = 8
    """number of samples per forward pass of a worker"""
    held_out: Number = Field(default=0.01, lt=1)
    """fraction of the tokens that is held out for evaluation and never trained on"""
    tokenizer: str = "bytes"
    """`bytes` (each byte is a token), or the path of a tokenizer.json"""


class OptimizerSection(Section):
    name: str = Field(default="adamw", description=f"{', '.join(OPTIMIZERS)}, or MODULE:CLASS")
    lr: Number = Field(default=3e-4, description="peak learning rate")
    weight_decay: Number | None = None
    """weight decay coefficient; default, as for betas, eps and momentum: the optimizer's own"""
    betas: tuple[Number, Number] | None = Field(default=None, description="Adam's two decay rates")
    eps: Number | None = Field(default=None, description="added to denominators to avoid zero")
    momentum: Number | None = Field(default=None, description="momentum factor of SGD")
    options: dict[str, Any] = {}
    """further arguments of the optimizer's class"""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """how lr changes until run.steps"""
    warmup_steps: Whole = Field(default=0, description="number of steps in which lr rises from 0")
    clip_norm: Number | None = Field(default=None, gt=0)
    """largest norm of the whole gradient, which is scaled down to it; default: no clipping"""
    accumulate: Count = 1
    """forward and backward passes (micro-batches) per step, whose gradients are added up"""
    delay: Whole | Literal["none"] = 0
    """number of updates that may be missing from the parameters of a step; with 1, a step runs
    while the updates of the previous step are applied; `none`: no bound"""

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if name not in OPTIMIZERS and ":" not in name:
            raise ValueError(
                f"unknown optimizer {name!r};"
                f" {did_you_mean(name, OPTIMIZERS) or 'give MODULE:CLASS for another'}"
            )
        return name


class StoreSection(Section):
    files: Texts = ["{run}/store"]
    """directories of the store, one server for each; [] keeps it in RAM"""
    rates: list[Number] | Literal["measured"] | None = None
    """relative speeds by which a new store is divided among files, or `measured`; default: equal"""
    direct: Flag = True
    """use direct I/O if the file system supports it"""
    moved_from: Texts = []
    """directories that held the store in earlier runs and are no longer used"""
    chunk_elements: Count = MAX_CHUNK
    """number of parameters per chunk, the unit of transfer and storage"""


class SwitchSection(Section):
    """A switch that sums the gradients of workers."""

    address: str
    """HOST:PORT of its `roadtrain serve --switch`"""
    parent: str = ""
    """address of the next switch towards the server; default: the server is next"""
    workers: list[Whole] = []
    """ranks (with servers.relay: hosts) that send to it; default: all, if there is one switch"""


def _switch_tables(value: object) -> object:
    """Turn addresses of switches (a list, or text with commas) into a list of tables."""
    texts = [text for text in value.split(",") if text] if isinstance(value, str) else value
    if not isinstance(texts, list):
        return value
    return [{"address": entry} if isinstance(entry, str) else entry for entry in texts]


class ServersSection(Section):
    addresses: Texts = []
    """HOST:PORT of each `roadtrain serve` that holds the store, instead of store.files"""
    token_file: str | None = None
    """file (mode 600) with the token that servers require"""
    ca: str | None = None
    """TLS: PEM file of the authority that signed the servers' certificates; default: no TLS"""
    cert: str | None = None
    """TLS: PEM file of this worker's certificate, if servers require one"""
    key: str | None = None
    """TLS: PEM file of that certificate's private key"""
    connections: Count = 1
    """TCP connections to each server"""
    relay: SizeText | None = None
    """memory for a relay, a process that communicates for all workers of a host; default: none"""
    buffering: Literal["auto", "all", "none"] = "auto"
    """blocks kept in memory from forward to backward: all, none, or auto (if it helps and fits)"""
    replicas: Count = Field(default=1, le=2)
    """servers that hold each chunk; with 2, any one of the servers may fail"""
    give_up: Texts = []
    """HOST:PORT of servers to disregard if it is unclear at the start which servers are current"""
    switches: Annotated[list[SwitchSection], BeforeValidator(_switch_tables)] = []
    """switches that sum gradients on their way: HOST:PORT if there is only one, or tables"""
    wire: Wire = "int32"
    """number format of gradients on the way to switches"""
    window: Count = Field(default=WINDOW, ge=WINDOWS[0], le=WINDOWS[-1])
    """number of packets that a job may have in flight to switches, a power of two"""
    multicast: Literal["auto", "off"] = "auto"
    """auto: the network copies parameters to all workers if it can; off: switches do"""

    @model_validator(mode="after")
    def _fan_in_is_a_tree(self) -> Self:
        refusing(lambda _: self.fan_in)(None)
        options = (self.wire, self.window, self.multicast)
        if not self.switches and options != ("int32", WINDOW, "auto"):
            raise ValueError("a switch option (wire, window, multicast) is given, but no switches")
        return self

    @property
    def fan_in(self) -> FanIn | None:
        """The options for summing gradients in switches; None if there are no switches. Raises
        ConfigError if an option is invalid."""
        if not self.switches:
            return None
        nodes = tuple(SwitchNode(s.address, s.parent, tuple(s.workers)) for s in self.switches)
        return FanIn(nodes, self.wire, self.window, self.multicast)


class BudgetSection(Section):
    host: SizeText | None = None
    """host memory, such as `900MiB`; default: half of the free memory, or all for a store in RAM"""
    device: SizeText | None = None
    """accelerator memory for parameters and gradients; default: no limit"""


class CompressSection(Section):
    keep: Number | None = Field(default=None, gt=0, lt=1)
    """fraction of each gradient's elements that is sent, the largest ones; default: all"""
    error_feedback: Flag = False
    """add the elements that were not sent to the next gradient"""
    downcast: Literal["bf16", "fp16"] | None = None
    """dtype in which gradients of fp32 parameters are sent to servers; default: fp32"""


class LaunchedSection(Section):
    """Facts about the run that `roadtrain launch` writes for the workers it starts."""

    committed: Whole = 0
    """step that the run has committed; workers that find an older step do not start"""


def _parallelism_table(value: object) -> object:
    return {"auto": True} if value == "auto" else value


class Job(Section):
    run: RunSection = RunSection()
    model: ModelSection
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    store: StoreSection = StoreSection()
    servers: ServersSection = ServersSection()
    budget: BudgetSection = BudgetSection()
    compress: CompressSection = CompressSection()
    parallelism: Annotated[ParallelismSection, BeforeValidator(_parallelism_table)] = (
        ParallelismSection()
    )
    predicted: Predicted = Predicted(seconds=0.0)
    launched: LaunchedSection = LaunchedSection()

    @property
    def run_dir(self) -> Path:
        return Path(self.run.dir)

    @property
    def limit_nbytes(self) -> int | None:
        return None if self.run.memory_limit is None else parse_bytes(self.run.memory_limit)

    @property
    def lossy(self) -> dict[str, Any]:
        """The options that make training lossy or delayed: a dict from their names in
        metrics.jsonl, such as "staleness", to values. The dict is empty if training is exact."""
        late = {"staleness": self.optimizer.delay} if self.optimizer.delay else {}
        top_k = {"keep": self.compress.keep, "error_feedback": self.compress.error_feedback}
        narrow = {"downcast": self.compress.downcast} if self.compress.downcast else {}
        across = self.parallelism.activations if self.parallelism.used else None
        wire = {"activations": across} if across else {}
        in_network = {"fan_in": self.servers.wire} if self.servers.switches else {}
        return late | narrow | in_network | wire | (top_k if self.compress.keep is not None else {})

    def changed(self, overrides: Mapping[str, Any]) -> Job:
        """Return a copy of this job with the dotted keys of `overrides` set. Raises ConfigError."""
        return make_job(merged(self.model_dump(exclude_none=True), overrides))

    def to_toml(self, leave_out: Iterable[tuple[str, str]] = ()) -> str:
        """Format the job as TOML. The text `{run}` stands for the run directory in store
        directories, so the file remains correct in a copy of the run directory. `leave_out`:
        (section, key) pairs to omit."""
        tree = self.model_dump(mode="json", exclude_none=True)
        for section, name in leave_out:
            tree[section].pop(name, None)
        for key in ("files", "moved_from"):
            tree["store"][key] = [moved(d, self.run.dir, "{run}") for d in tree["store"][key]]
        return tomli_w.dumps(tree)


def moved(directory: str, run: str, to: str) -> str:
    """Replace the beginning `run` (a run directory) of the path `directory` by `to`. Other paths
    remain unchanged."""
    inside = run and Path(directory).is_relative_to(run)
    return str(Path(to) / Path(directory).relative_to(run)) if inside else directory


def job_of_run(run: str) -> Job:
    """Load the job of a run directory, and adapt its paths if the directory was copied or moved.
    Raises ConfigError if `run` has no job."""
    path = Path(run, "job.toml")
    if not path.is_file():
        raise ConfigError(
            f"{run} is not a run directory: it has no job.toml", hint="give the job's run.dir"
        )
    job = load_job(path)
    if job.run_dir.resolve() == Path(run).resolve():
        return job
    files = [moved(d, job.run.dir, str(run)) for d in job.store.files]
    return job.changed({"run.dir": str(run), "store.files": files})


def files_read(job: Job) -> dict[str, str]:
    """Return the paths that workers read, without the training text, by the job's key that sets the
    path, such as `data.tokenizer`."""
    tokenizer, servers = job.data.tokenizer, job.servers
    named = {
        "data.tokenizer": "" if tokenizer == "bytes" else tokenizer,
        "model.pretrained": job.model.pretrained,
        "servers.ca": servers.ca,
        "servers.cert": servers.cert,
        "servers.key": servers.key,
    }
    return {key: path for key, path in named.items() if path}


def check_own(path: str, job: Job) -> None:
    """Raise ConfigError if `path` is in a copied or moved run directory, but `job`, which was read
    from `path`, still trains in the original."""
    home = Path(path).parent
    trained = any((home / name).exists() for name in ("mark.json", "metrics.jsonl"))
    if Path(path).name != "job.toml" or not trained:
        return
    named = load_job(path).run_dir
    there = [job.run.dir, *job.store.files]
    inside = (Path(d).resolve().is_relative_to(named.resolve()) for d in there)
    if named.resolve() == home.resolve() or not any(inside):
        return
    raise ConfigError(
        f"{path} was written for the run in {named}, not for {home}: {', '.join(there)} belong to"
        " that run",
        hint=f"to train in {home} instead: --run.dir {home} --store.files"
        f" {','.join(job_of_run(str(home)).store.files)}",
    )


def load_job(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Job:
    """Read a job file and set `overrides` (dotted key -> value) in it. Raises ConfigError."""
    tree = merged(read_toml(path, "job file"), overrides or {})
    run = tree.setdefault("run", {})
    if isinstance(run, dict) and not run.get("dir"):
        run["dir"] = f"runs/{Path(path).stem}"
    return make_job(tree, f"{path} and the command line" if overrides else str(path))


def make_job(tree: Mapping[str, Any], where: str = "job") -> Job:
    """Build a job from nested tables. `where`: name of the file in error messages. Raises
    ConfigError, which names the invalid key and the nearest valid key."""
    job = checked(Job, tree, where)
    here = [] if job.servers.addresses else job.store.files
    files = [d.replace("{run}", job.run.dir) for d in here]
    left = [d.replace("{run}", job.run.dir) for d in job.store.moved_from]
    store = job.store.model_copy(update={"files": files, "moved_from": left})
    parallelism = job.parallelism.of_run(job.run.dir)
    return job.model_copy(update={"store": store, "parallelism": parallelism})


def parse_overrides(args: Iterable[str]) -> dict[str, Any]:
    """Parse arguments such as `--run.steps 20 --optimizer.lr=1e-4 --compress.error_feedback`.

    Returns a dict from dotted keys to values. Values of keys whose type is text remain text. Other
    values are parsed as TOML or JSON literals if possible. The literal `null` restores the default.
    Raises ConfigError.
    """
    out: dict[str, Any] = {}
    left = list(args)
    while left:
        arg = left.pop(0)
        if not _names_key(arg):
            raise ConfigError(
                f"unexpected argument {arg!r}", hint="write options such as --run.steps 20"
            )
        key, has_value, text = arg.removeprefix("--").partition("=")
        _check_key(key)
        if not has_value and left and not _names_key(left[0]):
            out[key] = _value(key, left.pop(0))
        else:
            out[key] = _value(key, text) if has_value else _flag(key)
    return out


def _names_key(arg: str) -> bool:
    return arg.startswith("--") and "." in arg.partition("=")[0]


def all_keys() -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, default as text, description) of every key of a job."""
    for section, field in Job.model_fields.items():
        for name, sub in keys_of(field.annotation).items():
            default = getattr(field.default, name, sub.default)
            yield f"{section}.{name}", "" if default is None else str(default), meaning_of(sub)


_NUMBERS = re.compile(r"\d+(,\d+)*")  # such as `--parallelism.widths 2,1`
_FREE_KEYS = ("model.config.", "optimizer.options.")


def _kind(key: str) -> Any:
    """Return the type of the values of a dotted key, or None for a key inside a free-form table,
    such as `model.config`."""
    section, _, name = key.partition(".")
    field = keys_of(Job.model_fields[section].annotation).get(name)
    return None if field is None else field.annotation


def _check_key(key: str) -> None:
    if not key.startswith(_FREE_KEYS) and key not in {valid for valid, _, _ in all_keys()}:
        raise unknown_key(Job, key.split("."))


def _flag(key: str) -> bool:
    """Return True, the value of a flag. Raises ConfigError if the option `key` is not a flag."""
    if _kind(key) not in (bool, None):
        raise ConfigError(f"--{key} needs a value")
    return True


def _value(key: str, text: str) -> Any:
    kind = _kind(key)
    if kind is str or (kind == str | None and text != "null"):
        return text
    value: Any = text
    for read in (_toml_value, json.loads):
        with suppress(tomllib.TOMLDecodeError, json.JSONDecodeError):
            value = read(text)
            break
    if kind in (float, Number | None) and isinstance(value, str):
        with suppress(ValueError):
            return float(value)  # such as `.01`
    if kind in (list[Count], Stages) and isinstance(value, str) and _NUMBERS.fullmatch(value):
        return [int(piece) for piece in value.split(",")]
    if kind in (list[str], Texts | None, get_args(TrackerNames)[0]) and isinstance(value, str):
        return [piece for piece in value.split(",") if piece]
    return value


def _toml_value(text: str) -> Any:
    return tomllib.loads(f"v = {text}")["v"]
