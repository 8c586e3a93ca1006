"""Adapt candidate plans to a job, and return the shape of a job's model.

An adapted plan has the job's dtype, clipping, compression, delay and degrees of [parallelism]. A
plan is refused, with a reason, if it cannot have these settings or if `train` would refuse the job.
Importing this module does not import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from roadtrain.chunks import ITEMSIZE
from roadtrain.config.cluster import Cluster, Host
from roadtrain.config.job import Job
from roadtrain.config.job_model import with_vocabulary
from roadtrain.config.machines import Machines
from roadtrain.config.models import ModelShape
from roadtrain.config.plan_file import Plan, PlanFile
from roadtrain.errors import ConfigError
from roadtrain.kernels.optimizers import OPTIMIZERS
from roadtrain.options.budgets import DEVICE_GRADIENTS
from roadtrain.options.schema import flat
from roadtrain.planner import switches
from roadtrain.planner.fit_inputs import model_of
from roadtrain.planner.job_keys import contradicted, job_keys, stated_degrees
from roadtrain.planner.machines_of import IN_STAGES, machines_of, why_not_run
from roadtrain.stages.host_ranks import check_ranks
from roadtrain.stages.networks import ETHERNET, KINDS


def shape_of_job(job: Job) -> ModelShape:
    """Return the shape of the job's model. Raises ConfigError if the model's config does not define
    the size of the model."""
    length, config = job.data.seq_len, job.model.config
    build = importlib.import_module("roadtrain.training.build")  # imports torch
    if job.model.pretrained:
        build.build_config(job)
        return model_of(job.model.pretrained, length).shape
    if "vocab_size" not in config and job.data.tokenizer != "bytes":
        raise ConfigError("the job's model has no vocab_size", hint="set model.config.vocab_size")
    built = build.build_config(with_vocabulary(job)).to_dict()
    counting = importlib.import_module("roadtrain.planner.model_config")
    kind = str(config["model_type"])
    shape: ModelShape = counting.shape_of_config(built, seq_len=length, name=kind)
    return shape


@dataclass(frozen=True)
class JobPlans:
    """Adapts plans to one job and one cluster. Caches the reasons why plans are refused."""

    job: Job
    cluster: Cluster
    # for a placement and a number of devices, the machines or the reason why there are none
    machines: dict[Any, Machines | str] = field(default_factory=dict)
    trained: dict[Any, str] = field(default_factory=dict)  # reasons why `train` refuses a plan

    def fitted(self, plan: Plan) -> Plan | str:
        """Return the plan adapted to the job, or the reason why the plan cannot train the job."""
        plan = self._stated(self.as_it_runs(plan))
        for why_not in (self._refused, self._unplaced, self._apart, self._unsplit, self._untrained):
            if why := why_not(plan):
                return why
        return plan

    def _unplaced(self, plan: Plan) -> str:
        if why := why_not_run(plan, self.cluster):
            return why
        key = plan.placement.name, plan.parallelism.devices
        if key not in self.machines:
            try:
                self.machines[key] = machines_of(plan, self.cluster)
            except ConfigError as error:
                self.machines[key] = str(error).partition("\n")[0]
        found = self.machines[key]
        return found if isinstance(found, str) else ""

    def _apart(self, plan: Plan) -> str:
        """Return the reason why the hosts of a data-parallel group cannot exchange gradients, or ""
        if there is none."""
        if plan.placement.name not in IN_STAGES or self.job.parallelism.across_clusters:
            return ""
        hosts = switches.hosts_of(plan, self.cluster)
        left, places = plan.parallelism.devices, []
        for number, host in enumerate(hosts):
            many = min(host.devices, left)
            places.append((f"{host.name} {number}", _fabric(host), many))
            left -= many
        return refusal(check_ranks, plan.parallelism, places)

    def _unsplit(self, plan: Plan) -> str:
        """Return the reason why the model's layers cannot be split over a tensor-parallel group, or
        "" if there is none."""
        degree = plan.parallelism.tp
        if degree == 1:
            return ""
        model = with_vocabulary(self.job).model.model_dump_json(exclude_none=True)
        options = importlib.import_module("roadtrain.training.job_options")  # imports torch
        why: str = options.why_not_split(model, degree)
        return why

    def _untrained(self, plan: Plan) -> str:
        """Return the reason why `train` refuses the job with the plan's keys, or "" if it accepts
        the job."""
        passes = plan.num_microbatches if plan.parallelism.virtual_stages > 1 else 0
        options = (plan.num_microbatches > 1, passes, plan.staleness, plan.keep, plan.memory)
        key = plan.placement.name, plan.parallelism, options
        if key not in self.trained:
            self.trained[key] = refusal(self._train, plan)
        return self.trained[key]

    def _train(self, plan: Plan) -> None:
        """Check the job with the plan's keys as `train` does. Raises ConfigError."""
        machines = self.machines[plan.placement.name, plan.parallelism.devices]
        assert isinstance(machines, Machines)
        names = {host.name: host.address or f"host{n}" for n, host in enumerate(machines.hosts)}
        plan_file = PlanFile(plan, machines, None, self.cluster)
        keys = flat(job_keys(plan_file, self.job, names))
        own, found = self.job.servers, keys.get("servers.addresses", [])
        if own.addresses not in ([], found):
            raise ConfigError(
                f"the job sets servers.addresses, not those of the plan's {len(found)} server(s)"
            )
        if plan.placement.fans_in and (own.ca or own.cert or own.key):
            raise ConfigError("switches cannot be combined with TLS (servers.ca, cert, key)")
        options = importlib.import_module("roadtrain.training.job_options")  # imports torch
        options.check_job(self.job.changed(keys), [h.workers for h in machines.worker_hosts])

    def _stated(self, plan: Plan) -> Plan:
        """Return the plan with `widths` and `stages` from the job's [parallelism], where they fit
        the plan."""
        stated, ranks = stated_degrees(self.job), plan.parallelism
        if plan.placement.name not in IN_STAGES:
            return plan
        widths = tuple(stated.get("widths", ()))
        if len(widths) == ranks.pp and sum(widths) * ranks.tp == ranks.devices:
            wide = replace(ranks, dp=1, widths=widths, stages=())
            together = plan.step_microbatches
            passes = together if wide.widths else together // wide.dp
            plan, ranks = plan.changed(parallelism=wide, num_microbatches=passes), wide
        if "stages" in stated:
            sizes = stated["stages"]  # a text is resolved when the job's ranks start
            stages = () if isinstance(sizes, str) else tuple(sizes)
            plan = plan.changed(parallelism=replace(ranks, stages=stages))
        return plan

    def _refused(self, plan: Plan) -> str:
        """Return a sentence that names a setting of the job that the plan does not support, or ""
        if there is none."""
        job, section, name = self.job, self.job.parallelism, plan.placement.name
        if why := contradicted(plan, job):
            return why.partition(", the plan is")[0]
        if section.placements:
            return "the job has [[parallelism.placements]], which cannot be planned"
        if section.reducers:
            return "the job sets parallelism.reducers, which the plan decides"
        if job.optimizer.delay == "none":
            return 'optimizer.delay = "none" cannot be simulated, as it does not define a step'
        return "the job has [parallelism]" if section.used and name not in IN_STAGES else ""

    def as_it_runs(self, plan: Plan) -> Plan:
        """Return the plan with the job's dtype, optimizer, clipping, delay and compression."""
        job, place = self.job, plan.placement
        width = ITEMSIZE[job.model.dtype]
        late = job.optimizer.delay if isinstance(job.optimizer.delay, int) else 0
        named = OPTIMIZERS.get(job.optimizer.name)
        state = (8 if named is None else named.state_nbytes) + 4 * bool(job.optimizer.momentum)
        state += 4 if width < 4 or late or plan.staleness else 0  # an fp32 copy that is updated
        changes: dict[str, Any] = {"parameter_bytes": width, "activation_bytes": width}
        if place.name in IN_STAGES:
            changes |= {"gradient_bytes": 4}  # gradients of stages are summed in fp32
            changes["activation_bytes"] = 2 if job.parallelism.activations else width
        else:
            sent = 2 if job.compress.downcast else width
            changes |= {"gradient_bytes": sent, "held_bytes": width, "upstream_bytes": width}
            changes |= {"activation_checkpointing": True, "keep": job.compress.keep}
            changes["staleness"] = late or plan.staleness
            scaled = job.optimizer.clip_norm is not None or job.model.dtype == "fp16"
            changes["update_at"] = "step" if scaled else "gradient"
        # a record on files includes the parameters
        changes["state_bytes"] = state + (width if place.name == "files" else 0)
        devices = [host.device for host in self.cluster.workers if host.device is not None]
        if all(device.is_host for device in devices):
            changes["context_bytes"] = 0
        elif place.streamed:
            changes["device_gradients"] = DEVICE_GRADIENTS + 1  # one more as autograd computes it
        return plan.changed(**changes)


# the numbers that may differ between a plan and a job, with their descriptions as keys
COMPARED: Mapping[str, Callable[[Plan], Any]] = {
    "bytes of a parameter": lambda plan: plan.sizes.parameter_bytes,
    "bytes of a gradient in transfer": lambda plan: plan.sizes.gradient_bytes,
    "bytes of a parameter's optimizer state": lambda plan: plan.sizes.state_bytes,
    "fraction of a gradient that is sent": lambda plan: 1 if plan.keep is None else plan.keep,
    "updates that a step may miss": lambda plan: plan.staleness,
}


def other_numbers(plan: Plan, job: Job, cluster: Cluster) -> str:
    """Return a text that lists settings, such as the bytes of a parameter, in which the plan and
    the job differ. Such differences may make the plan's predictions wrong. Return "" if there are
    none."""
    mine = JobPlans(job, cluster).as_it_runs(plan)
    found = [
        f"{what} {planned:g} (here {here:g})"
        for what, of in COMPARED.items()
        if (planned := of(plan)) != (here := of(mine))
    ]
    intro = "the plan was made for a job with other numbers, so its predictions may be wrong: "
    return f"{intro}{', '.join(found)}" if found else ""


def refusal(check: Callable[..., object], *args: Any) -> str:
    """Return the first line of the ConfigError that `check(*args)` raises, or "" if it raises
    none."""
    try:
        check(*args)
    except ConfigError as error:
        return str(error).partition("\n")[0]
    return ""


def _fabric(host: Host) -> str:
    """Return a name for the network of the host's fastest kind of network card. Ranks compare these
    names to find out whether their hosts can communicate."""
    card = min(host.nics, key=lambda nic: KINDS.index(nic.kind), default=None)
    if card is None or card.kind == ETHERNET:
        return ETHERNET
    return f"{card.kind} {card.switch}"
