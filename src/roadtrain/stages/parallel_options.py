"""ParallelOptions: the options of `parallelize`. The constructor checks the options."""

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
    """Options of `parallelize`.

    Args:
        parallelism: Degrees of parallelism, and optionally the number of blocks of each stage.
        num_microbatches: Number of micro-batches of a step, over all replicas.
        stages: Way of dividing blocks among stages, if `parallelism` does not state a division:
            "even", "measured" (the fastest division by measured speeds), or "paper" (by the formula
            of Yang et al. (Holmes)).
        resize_stages: Fraction of a step. Blocks move between stages during training if a step
            becomes shorter by at least this fraction. If None, blocks never move.
        stores: Storage of a stage's parameters and optimizer state, by stage number. A stage
            without a store keeps its parameters and state on its ranks.
        reducers: `roadtrain serve --sum` processes that sum the gradients: a list of HOST:PORT, or
            the path of a file with lines HOST:PORT [RATE]. The first process of the job reads the
            file again and again, so reducers can be added and removed without a restart. RATE is
            the rate of the reducer's link, divided by the rate of a rank's link. With reducers,
            every rank keeps the optimizer state of all parameters of its stage.
        reducers_token_file: File with the reducers' token. The token is needed if a reducer is on
            another host.
        reducers_alone: Whether only the reducers sum gradients while a reducer is available. If
            False, the ranks sum a part of the gradients themselves.
        networks: Properties of network cards. All properties that are not stated here are detected.
        data_groups: Whether a stage's ranks may be in several clusters. If the ranks are in several
            clusters, gradients are sent over the slow network between the clusters.
        activations: dtype in which activations and their gradients are sent between stages
            (bfloat16 or float16). If None, they are sent unchanged.
        overlap: Whether a stage sends gradients and new parameters while it computes.
        blocks: Names or patterns of the blocks. If None, blocks are found as in `place`.
        tensor_plan: Tensor-parallel styles by patterns of layer names, for tp above 1. If None, the
            built-in styles of the architecture are used.
        dtype: Compute dtype of the parameters. If None, parameters keep their dtype. Masters and
            state are fp32.
        weights: Directory of safetensors files with the initial values.
        init: Function that initializes a module of a model built on `meta`. If None, the model's
            own initialization is used.
        seed: Seed of initial values and dropout.
        deadline_s: Timeout of any wait, in seconds. The error names the missing rank (Rule 5).
        job: Further settings that must be equal on all processes, as text, one per line.

    Raises:
        ConfigError: Values are invalid or cannot be combined.
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
        degrees = self.parallelism
        if degrees.cp > 1 or degrees.ep > 1:
            raise ConfigError(
                f"cp {degrees.cp} and ep {degrees.ep} can be simulated, but not trained",
                hint="set cp = 1 and ep = 1",
            )
        degrees.check_micro_batches(self.num_microbatches)
        measured = self.stages != "even" or self.resize_stages is not None
        if measured and (degrees.tp > 1 or self.stores or degrees.stages):
            raise ConfigError(
                f"stages={self.stages!r} with resize_stages={self.resize_stages} needs tp 1, no"
                f" stores and no stated stage sizes, but tp is {degrees.tp}, the number of stores"
                f" is {len(self.stores)}, and the stage sizes are {degrees.stages or 'not stated'}",
                hint="change these options, or leave stages and resize_stages out",
            )
        for stage, store in self.stores.items():
            self._check_store(stage, store)
        if self.reducers and (degrees.pp > 1 or degrees.tp > 1 or self.stores):
            raise ConfigError(
                f"reducers need pp 1, tp 1 and no stores, but pp is {degrees.pp}, tp is"
                f" {degrees.tp}, and the number of stores is {len(self.stores)}",
                hint="set pp = 1 and tp = 1 without stores, or leave reducers out",
            )
        if self.activations not in (None, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"activations cannot be sent as {self.activations}", hint="use bfloat16 or float16"
            )

    def _check_store(self, stage: int, store: StageStore) -> None:
        widths = self.parallelism.replicas_of
        if not 0 <= stage < self.parallelism.pp:
            raise ConfigError(
                f"stores has a store for stage {stage}, but pp is {self.parallelism.pp}",
                hint=f"use stage numbers from 0 to {self.parallelism.pp - 1}",
            )
        if self.parallelism.tp > 1:
            raise ConfigError(
                f"stage {stage} has a store, which needs tp 1, but tp is {self.parallelism.tp}",
                hint="set tp = 1, or remove the store",
            )
        if widths[stage] > 1 and not isinstance(store, Servers):
            raise ConfigError(
                f"stage {stage} has {widths[stage]} data-parallel ranks, but a"
                f" {type(store).__name__} store supports only 1",
                hint="use Servers, which sum the gradients of several ranks, or a width of 1",
            )

    def describe(self) -> str:
        """Return the options that must be equal on all ranks as a text, one option per line."""
        # may differ between ranks
        own = {"weights", "init", "deadline_s", "job", "reducers_token_file"}
        common = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
        common["stores"] = {n: type(store).__name__ for n, store in sorted(self.stores.items())}
        common["reducers"] = "of a file" if isinstance(self.reducers, str) else [*self.reducers]
        common["networks"] = [network.model_dump_json() for network in self.networks]
        common["parallelism"] = repr(self.parallelism)
        common["tensor_plan"] = sorted(self.tensor_plan or ())
        return "\n".join([*(f"{key} = {value}" for key, value in common.items()), self.job])

    def lossy_notes(self) -> list[str]:
        """Return lines for the log that report lossy options (Rule 2)."""
        if self.activations is None:
            return []
        return [f"lossy: activations are sent as {self.activations}"]
