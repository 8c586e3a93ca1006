"""The `[parallelism]` table of a job file: degrees, stages, networks, stores of stages,
reducers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from roadtrain.errors import ConfigError
from roadtrain.options.schema import Count, Flag, Number, Section, Texts, Whole
from roadtrain.stages.host_ranks import DataGroups
from roadtrain.stages.networks import NetworkStatement
from roadtrain.stages.parallelism import Parallelism

ADDRESS = re.compile(r"[^/\s]+:\d+")


def _as_addresses(value: object) -> object:
    """Split a text that is a comma-separated list of addresses. Return any other value
    unchanged."""
    texts = value.split(",") if isinstance(value, str) else []
    return texts if texts and all(map(ADDRESS.fullmatch, texts)) else value


FileOrAddresses = Annotated[str | list[str], BeforeValidator(_as_addresses)]
Stages = list[Whole] | Literal["even", "measured", "paper"]


class StagePlacement(Section):
    """The place where one stage's parameters and optimizer state are stored. Stages without a
    StagePlacement keep both on their ranks."""

    stage: Whole
    files: Texts = []
    """directories of the stage's host"""
    servers: Texts = []
    """HOST:PORT of each `roadtrain serve`"""
    token_file: str | None = None
    """file with the servers' token"""
    memory: Flag = False
    """streamed from this host's memory"""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if bool(self.files) + bool(self.servers) + self.memory != 1:
            raise ValueError(f"stage {self.stage} needs exactly one of files, servers and memory")
        if self.token_file and not self.servers:
            raise ValueError(f"stage {self.stage} has a token_file, which needs servers")
        return self


class ParallelismSection(Section):
    auto: Flag = False
    """`parallelism = "auto"` instead of the table: use the parallelism of the plan that `roadtrain
    launch` runs"""
    dp: Count | None = None
    """data-parallel ranks of each stage; default: number of processes / (pp x tp)"""
    tp: Count = 1
    """tensor-parallel ranks, on one host"""
    pp: Count = 1
    """pipeline stages"""
    widths: list[Count] = []
    """data-parallel ranks of each stage, if they differ"""
    stages: Stages = "even"
    """number of blocks of each stage; or the way to divide blocks: "even", "measured" (the fastest
    division by measured speeds) or "paper" (by the formula of Yang et al. (Holmes))"""
    virtual_stages: Count = 1
    """parts of the model in each stage (interleaved schedule)"""
    num_microbatches: Count | None = None
    """micro-batches of a step, over all replicas; default: optimizer.accumulate x replicas of the
    widest stage"""
    activations: Literal["bf16", "fp16"] | None = None
    """dtype of activations sent between stages; default: unchanged"""
    across_clusters: Flag = False
    """allow the ranks of a stage in several clusters, so that a slow network carries gradients"""
    overlap: Flag = True
    """send gradients and new parameters of a stage while it computes"""
    resize_stages: Number | None = Field(default=None, gt=0)
    """move blocks between stages when that shortens a step by this fraction"""
    snapshot_every: Count = 50
    """steps between snapshots of state on the ranks"""
    snapshot_replicas: Count = Field(default=1, le=2)
    """number of hosts that store each part of a snapshot; the second host is in another cluster"""
    deadline: Number = Field(default=600.0, gt=0)
    """timeout of any wait, in seconds"""
    networks: list[NetworkStatement] = []
    """properties of network cards; properties that are not stated are detected"""
    placements: list[StagePlacement] = []
    """stages whose state is not kept on their ranks"""
    reducers: FileOrAddresses = ""
    """`roadtrain serve --sum` processes that sum the gradients: a list of HOST:PORT; or a file with
    lines HOST:PORT [RATE], which the first process re-reads during training; {run} stands for the
    run directory"""
    reducers_token_file: str | None = None
    """token file, needed if a reducer is on another host; {run} stands for the run directory"""
    reducers_alone: Flag = False
    """whether ranks leave all sums to the reducers while a reducer is available (placement
    parameter-server)"""

    def check_known(self) -> None:
        """Raise ConfigError if the parallelism is "auto", which only a plan can replace by
        degrees."""
        if self.auto:
            raise ConfigError(
                'parallelism = "auto" needs a plan, and there is none',
                hint="run `roadtrain plan CLUSTER.toml --job JOB.toml`, then `roadtrain launch"
                " plan.toml JOB.toml`",
            )

    @model_validator(mode="after")
    def _one_placement_a_stage(self) -> Self:
        stages = [placement.stage for placement in self.placements]
        if twice := [stage for stage in stages if stages.count(stage) > 1]:
            raise ValueError(f"stage {twice[0]} has {len(twice)} placements, but may have only one")
        return self

    @model_validator(mode="after")
    def _reducers_are_named(self) -> Self:
        if not self.reducers and (self.reducers_token_file or self.reducers_alone):
            raise ValueError("reducers_token_file or reducers_alone is set, but not reducers")
        return self

    @model_validator(mode="after")
    def _auto_alone(self) -> Self:
        stated = [name for name in DEGREES if getattr(self, name) != DEGREES[name]]
        if self.auto and stated:
            raise ValueError(f'{stated[0]} is set, but parallelism = "auto" plans all degrees')
        return self

    @property
    def data_groups(self) -> DataGroups:
        return DataGroups.ANYWHERE if self.across_clusters else DataGroups.IN_ONE_CLUSTER

    @property
    def used(self) -> bool:
        """Return whether the job trains in stages, with `parallelize`."""
        several = self.pp > 1 or self.tp > 1 or self.dp is not None
        return several or bool(self.widths) or bool(self.placements) or bool(self.reducers)

    def of_run(self, directory: str) -> Self:
        """Return this section with {run} in paths replaced by the run directory."""
        reducers, token = self.reducers, self.reducers_token_file
        if isinstance(reducers, str):
            reducers = reducers.replace("{run}", directory)
        token = token and token.replace("{run}", directory)
        return self.model_copy(update={"reducers": reducers, "reducers_token_file": token})

    def degrees(self, processes: int) -> Parallelism:
        """Return the Parallelism for a number of processes. Raises ConfigError if they cannot be
        divided evenly among the stages."""
        dp = self.dp
        if dp is None and not self.widths:
            dp, rest = divmod(processes, self.pp * self.tp)
            if rest or not dp:
                raise ConfigError(
                    f"{processes} processes do not divide into {self.pp} stages whose replicas have"
                    f" {self.tp} tensor-parallel ranks each",
                    hint="start a multiple of pp x tp processes, or set widths",
                )
        stated = tuple(self.stages) if isinstance(self.stages, list) else ()
        return Parallelism(
            dp=dp or 1,
            tp=self.tp,
            pp=self.pp,
            stages=stated,
            virtual_stages=self.virtual_stages,
            widths=tuple(self.widths),
        )


# the keys that a plan determines, with their defaults
DEGREES: Mapping[str, object] = {
    name: ParallelismSection.model_fields[name].default
    for name in ("dp", "tp", "pp", "widths", "stages", "virtual_stages")
}
