"""ParallelOptions: what parallelize() was asked for, in one value that checks itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn

from roadtrain.errors import ConfigError
from roadtrain.options.check import Deadline, ExistingPath, PositiveInt, check_options
from roadtrain.placement.stores import Files, Memory, Servers
from roadtrain.stages.host_ranks import DataGroups
from roadtrain.stages.networks import NetworkStatement
from roadtrain.stages.parallelism import Parallelism
from roadtrain.stages.tensor import TensorPlan
from roadtrain.streaming.split import ComputeDtype

StageStore = Files | Memory | Servers


@dataclass(frozen=True)
class ParallelOptions:
    """Raises ConfigError for values that do not go together.

    parallelism: degrees, and where they are stated the blocks of each stage.
    num_microbatches: of a step, over all replicas.
    stages: how blocks are divided where parallelism does not say it: evenly, by measured speeds
    (exact), or by the formula of Yang et al. (Holmes).
    resize_stages: speeds are watched, and blocks move between stages where that makes a step
    shorter by this fraction; None: they stay.
    stores: of a stage by its number: where its parameters and optimizer state rest, instead of
    beside the stage's ranks.
    reducers: `roadtrain serve --sum` that add up the gradients beside the ranks: a list of
    HOST:PORT, or the path of a file with a line HOST:PORT [RATE] each, which the first process
    reads again and again: reducers come, go and die without a restart. Every rank keeps the whole
    state. RATE: of its link, where a rank's is 1.
    reducers_token_file: of the reducers' token, needed beyond this host.
    reducers_alone: ranks sum nothing themselves while a reducer is there.
    networks: what the user knows of cards.
    data_groups: whether a stage's ranks may be in several clusters, whose slow network then
    carries gradients.
    activations: what activations and their gradients travel as between stages; None: as they are.
    overlap: a stage's sums and new parameters travel while it computes.
    blocks: names or patterns of the blocks; None: found, as in place().
    tensor_plan: styles by patterns of layer names, where tp is above 1; None: what is known of the
    architecture (stages/tensor_families.py).
    dtype: what parameters compute in; None: their own. Masters and state are fp32.
    weights: a directory of safetensors that the first values come from.
    init: initialises a module of a model built on `meta`; None: the model's own.
    seed: of first values and dropout.
    deadline_s: after which a wait is an error that says for whom (Rule 5).
    job: what else must be the same on all processes, in words; a line each.
    """

    parallelism: Parallelism
    num_microbatches: PositiveInt
    stages: Literal["even", "measured", "paper"] = "even"
    resize_stages: Annotated[float, Field(gt=0, lt=1)] | None = None
    stores: Mapping[int, StageStore] = field(default_factory=dict)
    reducers: Sequence[str] | str = ()
    reducers_token_file: str | None = None
    reducers_alone: bool = False
    networks: Sequence[NetworkStatement] = ()
    data_groups: DataGroups = DataGroups.IN_ONE_CLUSTER
    activations: torch.dtype | None = None
    overlap: bool = True
    blocks: str | Sequence[str] | None = None
    tensor_plan: TensorPlan | None = None
    dtype: ComputeDtype | None = None
    weights: ExistingPath | None = None
    init: Callable[[nn.Module], None] | None = None
    seed: int = 0
    deadline_s: Deadline = 600.0
    job: str = ""

    def __post_init__(self) -> None:
        check_options(ParallelOptions, vars(self))
        given = self.parallelism
        if given.cp > 1 or given.ep > 1:
            raise ConfigError(
                f"context groups of {given.cp} and expert groups of {given.ep} are simulated only",
                hint="cp = 1 and ep = 1",
            )
        given.check_micro_batches(self.num_microbatches)
        measured = self.stages != "even" or self.resize_stages is not None
        if measured and (given.tp > 1 or self.stores or given.stages):
            raise ConfigError(
                f"stages {self.stages!r} are measured, with tensor groups of {given.tp},"
                f" {len(self.stores)} placed stages and sizes {given.stages or 'not stated'}",
                hint="blocks move between stages of plain layers whose state is beside their ranks,"
                " where no sizes are stated; else leave stages and resize_stages out",
            )
        for stage, store in self.stores.items():
            self._check_store(stage, store)
        if self.reducers and (given.pp > 1 or given.tp > 1 or self.stores):
            raise ConfigError(
                f"reducers sum for one stage of whole layers, there are {given.pp} stages, tensor"
                f" groups of {given.tp} and {len(self.stores)} placed stages",
                hint="pp = 1, tp = 1 and no placements; or leave reducers out",
            )
        if self.activations not in (None, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"activations travel as {self.activations}", hint="torch.bfloat16 or torch.float16"
            )

    def _check_store(self, stage: int, store: StageStore) -> None:
        widths = self.parallelism.replicas_of
        if not 0 <= stage < self.parallelism.pp:
            raise ConfigError(
                f"a store for stage {stage}, there are {self.parallelism.pp}",
                hint="stages count from 0",
            )
        if self.parallelism.tp > 1:
            raise ConfigError(
                f"stage {stage} has a store and tensor groups of {self.parallelism.tp}",
                hint="tp = 1, or leave the stage's state beside its ranks",
            )
        if widths[stage] > 1 and not isinstance(store, Servers):
            raise ConfigError(
                f"stage {stage} has {widths[stage]} data-parallel ranks, and"
                f" {type(store).__name__} is of one",
                hint="Servers, which add up the gradients of several ranks, or a width of 1",
            )

    def describe(self) -> str:
        """What must be the same on all ranks, in words; a line each."""
        apart = {"weights", "init", "deadline_s", "job", "reducers_token_file"}  # each rank's own
        said = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in apart}
        said["stores"] = {n: type(store).__name__ for n, store in sorted(self.stores.items())}
        said["reducers"] = "of a file" if isinstance(self.reducers, str) else [*self.reducers]
        said["networks"] = [one.model_dump_json() for one in self.networks]
        said["parallelism"] = repr(self.parallelism)
        said["tensor_plan"] = sorted(self.tensor_plan or ())
        return "\n".join([*(f"{key} = {value}" for key, value in said.items()), self.job])

    def lossy_notes(self) -> list[str]:
        """Rule 2: what is lossy, for printing."""
        if self.activations is None:
            return []
        return [f"lossy: activations travel as {self.activations}"]
