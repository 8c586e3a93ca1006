"""Job: what the user asks for, one training run. One schema for the TOML file and the command line.

Order: default < file < command line. Unknown keys and wrong types raise ConfigError with the
nearest valid name. Relative paths are relative to where the command runs; `{run}` in a store
directory stands for the run directory.
Does NOT know torch: names of optimizers and dtypes stay text here.
"""

from __future__ import annotations

import json
import re
import sysconfig
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self

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


class RunSection(Section):
    dir: str = ""
    """run directory; default runs/NAME-OF-THE-JOB-FILE"""
    steps: Whole = 1000
    """train up to this step"""
    minutes: Number | None = Field(default=None, gt=0)
    """stop after so long; the same command goes on"""
    memory_limit: SizeText | None = None
    """hard limit of a process's memory, enforced by the system, as `1.5GiB`"""
    device: str = ""
    """cpu, cuda (each worker's own one) or cuda:N; default: cuda where there is one"""
    seed: Integer = 0
    """of initial parameters, data order and dropout"""
    new_store: Flag = False
    """go on with the store that is there, or a new one, whatever the run has trained"""
    log_every: Count = 1
    """a line every so many steps where no progress bar can be drawn"""


class ModelSection(Section):
    config: dict[str, Any] = {}
    """a transformers config: model_type and its own keys"""
    pretrained: str | None = None
    """folder of config.json and safetensors"""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """of parameters in compute"""
    blocks: Texts | None = None
    """names of the modules to stream; default: found"""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.pretrained and self.config:
            raise ValueError("give either config or pretrained, not both")
        if not self.pretrained and "model_type" not in self.config:
            raise ValueError("give pretrained, or config with a model_type such as `llama`")
        return self


class DataSection(Section):
    paths: Texts = [f"{sysconfig.get_path('stdlib')}/**/*.py"]
    """files, folders or globs; default: the source of this Python's standard library"""
    seq_len: Count = 256
    batch_size: Count = 8
    """rows of one forward pass"""
    held_out: Number = Field(default=0.01, lt=1)
    """fraction of the tokens never trained on"""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a tokenizer.json"""


class OptimizerSection(Section):
    name: str = Field(default="adamw", description=f"{', '.join(OPTIMIZERS)}, or MODULE:CLASS")
    lr: Number = 3e-4
    weight_decay: Number | None = None
    """default: the optimizer's own, as all below"""
    betas: tuple[Number, Number] | None = None
    eps: Number | None = None
    momentum: Number | None = None
    options: dict[str, Any] = {}
    """any other argument of the optimizer's class"""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """of lr over run.steps"""
    warmup_steps: Whole = 0
    clip_norm: Number | None = Field(default=None, gt=0)
    """clip the gradient's global norm"""
    accumulate: Count = 1
    """forward and backward passes a step"""
    delay: Whole | Literal["none"] = 0
    """updates that a step's parameters may lack; 1: a step computes while the last one's updates
    run; `none`: no bound"""

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in OPTIMIZERS and ":" not in name:
            raise ValueError(
                f"unknown optimizer {name!r};"
                f" {did_you_mean(name, OPTIMIZERS) or 'or give MODULE:CLASS'}"
            )
        return name


class StoreSection(Section):
    files: Texts = ["{run}/store"]
    """a directory for each server of this host; [] keeps all in RAM"""
    rates: list[Number] | Literal["measured"] | None = None
    """relative rates of the directories, or `measured`: a new store is spread by them"""
    direct: Flag = True
    """direct I/O where the file system takes it"""
    moved_from: Texts = []
    """directories that the store rested in and shall leave"""
    chunk_elements: Count = MAX_CHUNK
    """parameters of a unit that is transferred and stored"""


class SwitchSection(Section):
    """A switch that sums the workers' gradients."""

    address: str
    """HOST:PORT of its `roadtrain serve --switch`"""
    parent: str = ""
    """the switch above it; default: the server is"""
    workers: list[Whole] = []
    """ranks (with servers.relay: hosts) that send to it; default: of the only switch all"""


def _switch_tables(given: object) -> object:
    """An address alone stands for a switch of all workers, text for addresses with commas."""
    texts = [text for text in given.split(",") if text] if isinstance(given, str) else given
    if not isinstance(texts, list):
        return given
    return [{"address": one} if isinstance(one, str) else one for one in texts]


class ServersSection(Section):
    addresses: Texts = []
    """HOST:PORT of each `roadtrain serve`, instead of store.files"""
    token_file: str | None = None
    """file (mode 600) with the servers' token"""
    ca: str | None = None
    """TLS: PEM file that the servers' certificates are known by"""
    cert: str | None = None
    """TLS: PEM file of this worker's certificate, if demanded"""
    key: str | None = None
    """TLS: PEM file of its key"""
    connections: Count = 1
    """TCP connections to each server"""
    relay: SizeText | None = None
    """host bytes for a process that communicates for the workers"""
    buffering: Literal["auto", "all", "none"] = "auto"
    """blocks kept from forward to backward: what fits and pays, all, none"""
    replicas: Count = Field(default=1, le=2)
    """2: two servers hold each chunk, any one may die"""
    give_up: Texts = []
    """HOST:PORT of servers whose contents do not count at a start that is in doubt"""
    switches: Annotated[list[SwitchSection], BeforeValidator(_switch_tables)] = []
    """switches that sum gradients on their way: HOST:PORT of the only, or tables"""
    wire: Wire = "int32"
    """what an element of a gradient travels as to switches"""
    window: Count = Field(default=WINDOW, ge=WINDOWS[0], le=WINDOWS[-1])
    """packets of a job that are under way to switches, a power of two"""
    multicast: Literal["auto", "off"] = "auto"
    """auto: the network copies parameters to all where it can; off: switches do"""

    @model_validator(mode="after")
    def _fan_in_is_a_tree(self) -> Self:
        refusing(lambda _: self.fan_in)(None)
        asked = (self.wire, self.window, self.multicast)
        if not self.switches and asked != ("int32", WINDOW, "auto"):
            raise ValueError("wire, window or multicast, and no switches are given")
        return self

    @property
    def fan_in(self) -> FanIn | None:
        """That gradients are summed in the network, and how. Raises ConfigError."""
        if not self.switches:
            return None
        nodes = [SwitchNode(one.address, one.parent, tuple(one.workers)) for one in self.switches]
        return FanIn(tuple(nodes), self.wire, self.window, self.multicast)


class BudgetSection(Section):
    host: SizeText | None = None
    """bytes of host memory, as `900MiB`; default: no limit"""
    device: SizeText | None = None
    """bytes of the accelerator for parameters and gradients; default: no limit"""


class CompressSection(Section):
    keep: Number | None = Field(default=None, gt=0, lt=1)
    """fraction of a gradient's elements that is sent, the largest; default: all"""
    error_feedback: Flag = False
    """add to the next gradient what was not sent"""
    downcast: Literal["bf16", "fp16"] | None = None
    """what gradients of fp32 parameters travel to servers in; default: fp32"""


class LaunchedSection(Section):
    """What `roadtrain launch` knows of the run that it starts; it writes this."""

    committed: Whole = 0
    """a step that the run has committed: a start that finds less is refused"""


def _parallelism_table(given: object) -> object:
    return {"auto": True} if given == "auto" else given


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
        """What is on that makes training lossy or late (Rule 2); empty by default. Each step's
        metrics have it."""
        late = {"staleness": self.optimizer.delay} if self.optimizer.delay else {}
        top_k = {"keep": self.compress.keep, "error_feedback": self.compress.error_feedback}
        narrow = {"downcast": self.compress.downcast} if self.compress.downcast else {}
        across = self.parallelism.activations if self.parallelism.used else None
        wire = {"activations": across} if across else {}
        in_network = {"fan_in": self.servers.wire} if self.servers.switches else {}
        return late | narrow | in_network | wire | (top_k if self.compress.keep is not None else {})

    def changed(self, overrides: Mapping[str, Any]) -> Job:
        """This job with dotted keys set. Raises ConfigError."""
        return make_job(merged(self.model_dump(exclude_none=True), overrides))

    def to_toml(self, leave_out: Iterable[tuple[str, str]] = ()) -> str:
        """Directories inside the run directory are written as `{run}`, so that a copy of it
        means its own. leave_out: (section, key) pairs that are not written."""
        tree = self.model_dump(mode="json", exclude_none=True)
        for section, name in leave_out:
            tree[section].pop(name, None)
        for key in ("files", "moved_from"):
            tree["store"][key] = [moved(d, self.run.dir, "{run}") for d in tree["store"][key]]
        return tomli_w.dumps(tree)


def moved(directory: str, run: str, to: str) -> str:
    """`directory` as it is called where the run directory `run` is called `to`."""
    inside = run and Path(directory).is_relative_to(run)
    return str(Path(to) / Path(directory).relative_to(run)) if inside else directory


def job_of_run(run: str) -> Job:
    """The job that a run directory was trained with. Of a copy, or one that was moved, the job
    in this directory. Raises ConfigError where `run` is not a run directory."""
    path = Path(run, "job.toml")
    if not path.is_file():
        raise ConfigError(
            f"{run} is not a run directory: it has no job.toml", hint="it is the job's --run.dir"
        )
    job = load_job(path)
    if job.run_dir.resolve() == Path(run).resolve():
        return job
    files = [moved(d, job.run.dir, str(run)) for d in job.store.files]
    return job.changed({"run.dir": str(run), "store.files": files})


def check_own(path: str, job: Job) -> None:
    """ConfigError where `path` is the job.toml of a run directory that was copied or moved, and
    `job`, made of it, would train in the directories of the run that it was written for."""
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
        f"{path} is of the run in {named}, and lies in {home}: {', '.join(there)} are of that run",
        hint=(
            f"to go on with the copy: --run.dir {home} --store.files"
            f" {','.join(job_of_run(str(home)).store.files)}"
        ),
    )


def load_job(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Job:
    """Read a job file, put `overrides` (dotted key -> value) over it, resolve. Raises
    ConfigError."""
    tree = merged(read_toml(path, "job file"), overrides or {})
    run = tree.setdefault("run", {})
    if isinstance(run, dict) and not run.get("dir"):
        run["dir"] = f"runs/{Path(path).stem}"
    return make_job(tree, f"{path} and the command line" if overrides else str(path))


def make_job(tree: Mapping[str, Any], where: str = "job") -> Job:
    """Of nested plain data. `where`: the file, for errors. Raises ConfigError naming the key and
    the nearest valid one."""
    job = checked(Job, tree, where)
    here = [] if job.servers.addresses else job.store.files
    files = [d.replace("{run}", job.run.dir) for d in here]
    left = [d.replace("{run}", job.run.dir) for d in job.store.moved_from]
    store = job.store.model_copy(update={"files": files, "moved_from": left})
    parallelism = job.parallelism.of_run(job.run.dir)
    return job.model_copy(update={"store": store, "parallelism": parallelism})


def parse_overrides(args: Iterable[str]) -> dict[str, Any]:
    """`--run.steps 20 --optimizer.lr=1e-4 --compress.error_feedback` -> dotted key -> value.
    Values are TOML or JSON literals (`null`: back to the default); what is neither is text, a
    text field takes its value as it stands. Raises ConfigError."""
    out: dict[str, Any] = {}
    pending: str | None = None
    for arg in args:
        if arg.startswith("--") and "." in arg.partition("=")[0]:
            if pending is not None:
                out[pending] = _flag(pending)
            key, has_value, text = arg[2:].partition("=")
            _check_key(key)
            pending = None if has_value else key
            if has_value:
                out[key] = _value(key, text)
        elif pending is not None:
            out[pending] = _value(pending, arg)
            pending = None
        else:
            raise ConfigError(
                f"unexpected argument {arg!r}", hint="options look like --run.steps 20"
            )
    if pending is not None:
        out[pending] = _flag(pending)
    return out


def all_keys() -> Iterator[tuple[str, str, str]]:
    """(dotted key, default as text, description) of every key of a job."""
    for section, field in Job.model_fields.items():
        for name, sub in keys_of(field.annotation).items():
            default = getattr(field.default, name, sub.default)
            yield f"{section}.{name}", "" if default is None else str(default), meaning_of(sub)


_NUMBERS = re.compile(r"\d+(,\d+)*")  # as `--parallelism.widths 2,1`
_FREE_KEYS = ("model.config.", "optimizer.options.")


def _kind(key: str) -> Any:
    """The type of a key's values; None for one below a free table."""
    section, _, name = key.partition(".")
    field = keys_of(Job.model_fields[section].annotation).get(name)
    return None if field is None else field.annotation


def _check_key(key: str) -> None:
    if not key.startswith(_FREE_KEYS) and key not in {known for known, _, _ in all_keys()}:
        raise unknown_key(Job, key.split("."))


def _flag(key: str) -> bool:
    """The value of an option given without one."""
    if _kind(key) not in (bool, None):
        raise ConfigError(f"--{key} needs a value")
    return True


def _value(key: str, text: str) -> Any:
    kind = _kind(key)
    if kind is str or (kind == str | None and text != "null"):
        return text
    given: Any = text
    for read in (_toml_value, json.loads):
        with suppress(tomllib.TOMLDecodeError, json.JSONDecodeError):
            given = read(text)
            break
    if kind in (float, Number | None) and isinstance(given, str):
        with suppress(ValueError):
            return float(given)  # as `.01`
    if kind in (list[Count], Stages) and isinstance(given, str) and _NUMBERS.fullmatch(given):
        return [int(piece) for piece in given.split(",")]
    if kind in (list[str], Texts | None) and isinstance(given, str):
        return [piece for piece in given.split(",") if piece]
    return given


def _toml_value(text: str) -> Any:
    return tomllib.loads(f"v = {text}")["v"]
