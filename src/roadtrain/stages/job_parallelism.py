"""The `[parallelism]` of a job: degrees, stages, networks, where a stage's state rests, and who
adds up gradients."""

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

# name -> where nothing is said
DEGREES: Mapping[str, object] = {
    "dp": None,
    "tp": 1,
    "pp": 1,
    "widths": [],
    "stages": "even",
    "virtual_stages": 1,
}
ADDRESS = re.compile(r"[^/\s]+:\d+")


def _as_addresses(given: object) -> object:
    """Addresses that stand alone, with commas between; other words are a file's path."""
    texts = given.split(",") if isinstance(given, str) else []
    return texts if texts and all(map(ADDRESS.fullmatch, texts)) else given


FileOrAddresses = Annotated[str | list[str], BeforeValidator(_as_addresses)]
Stages = list[Whole] | Literal["even", "measured", "paper"]


class StagePlacement(Section):
    """Where one stage's parameters and optimizer state rest, instead of beside its ranks: files,
    servers, or memory alone."""

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
            raise ValueError(f"stage {self.stage}: give one of files, servers and memory = true")
        if self.token_file and not self.servers:
            raise ValueError(f"stage {self.stage}: token_file is for servers, and none are given")
        return self


class ParallelismSection(Section):
    auto: Flag = False
    """`parallelism = "auto"` instead of the table: it is that of the plan that `roadtrain launch`
    runs"""
    dp: Count | None = None
    """data-parallel ranks of each stage; default: what the processes give"""
    tp: Count = 1
    """tensor-parallel ranks, of one host"""
    pp: Count = 1
    """pipeline stages"""
    widths: list[Count] = []
    """data-parallel ranks of each stage, where they differ"""
    stages: Stages = "even"
    """blocks of each stage; or: as even as can be, exactly by measured speeds, or by the formula of
    Yang et al. (Holmes)"""
    virtual_stages: Count = 1
    """parts of the model that a stage has (interleaved)"""
    num_microbatches: Count | None = None
    """of a step, over all replicas; default: optimizer.accumulate of each replica of the widest
    stage"""
    activations: Literal["bf16", "fp16"] | None = None
    """what activations travel as between stages; default: as they are"""
    across_clusters: Flag = False
    """a stage's ranks may be in several clusters: a slow network carries gradients"""
    overlap: Flag = True
    """a stage's gradients and new parameters travel while it computes"""
    resize_stages: Number | None = Field(default=None, gt=0)
    """divide the stages anew where that shortens a step by this fraction"""
    snapshot_every: Count = 50
    """steps between snapshots of what rests beside the ranks"""
    snapshot_replicas: Count = Field(default=1, le=2)
    """2: each part of a snapshot also on a host of another cluster"""
    deadline: Number = Field(default=600.0, gt=0)
    """seconds that a wait may take"""
    networks: list[NetworkStatement] = []
    """what is known of network cards; the rest is found"""
    placements: list[StagePlacement] = []
    """stages whose state rests elsewhere than beside their ranks"""
    reducers: FileOrAddresses = ""
    """`roadtrain serve --sum` that add up the gradients: a list of HOST:PORT; or a file with a line
    HOST:PORT [RATE] each, which the first process reads again and again while training ({run}: the
    run directory)"""
    reducers_token_file: str | None = None
    """file with the reducers' token, needed beyond this host ({run}: as above)"""
    reducers_alone: Flag = False
    """the workers add up nothing themselves while a reducer is there (placement
    parameter-server)"""

    def check_known(self) -> None:
        """Raises ConfigError where a plan says it."""
        if self.auto:
            raise ConfigError(
                'parallelism = "auto" is that of a plan, and there is none here',
                hint="roadtrain plan CLUSTER.toml --job JOB.toml, then roadtrain launch plan.toml"
                " JOB.toml",
            )

    @model_validator(mode="after")
    def _one_placement_a_stage(self) -> Self:
        stages = [one.stage for one in self.placements]
        if twice := [stage for stage in stages if stages.count(stage) > 1]:
            raise ValueError(f"stage {twice[0]} has {len(twice)} placements, give it one")
        return self

    @model_validator(mode="after")
    def _reducers_are_named(self) -> Self:
        if not self.reducers and (self.reducers_token_file or self.reducers_alone):
            raise ValueError("reducers_token_file and reducers_alone are of reducers: name some")
        return self

    @model_validator(mode="after")
    def _auto_alone(self) -> Self:
        stated = [name for name in DEGREES if getattr(self, name) != DEGREES[name]]
        if self.auto and stated:
            raise ValueError(f"auto leaves all degrees to the plan, and {stated[0]} is given")
        return self

    @property
    def data_groups(self) -> DataGroups:
        return DataGroups.ANYWHERE if self.across_clusters else DataGroups.IN_ONE_CLUSTER

    @property
    def used(self) -> bool:
        """Whether the job is one of stages and groups."""
        several = self.pp > 1 or self.tp > 1 or self.dp is not None
        return several or bool(self.widths) or bool(self.placements) or bool(self.reducers)

    def of_run(self, directory: str) -> Self:
        """With paths that name the run directory."""
        reducers, token = self.reducers, self.reducers_token_file
        if isinstance(reducers, str):
            reducers = reducers.replace("{run}", directory)
        token = token and token.replace("{run}", directory)
        return self.model_copy(update={"reducers": reducers, "reducers_token_file": token})

    def degrees(self, processes: int) -> Parallelism:
        """For so many processes. Raises ConfigError where they do not divide."""
        dp = self.dp
        if dp is None and not self.widths:
            dp, rest = divmod(processes, self.pp * self.tp)
            if rest or not dp:
                raise ConfigError(
                    f"{processes} processes do not divide into {self.pp} stages of {self.tp}"
                    " tensor-parallel ranks",
                    hint="start a multiple of pp x tp, or give widths",
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
