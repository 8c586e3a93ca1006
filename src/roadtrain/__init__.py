"""Training of models that are larger than the accelerator's memory. The first function to use is
`roadtrain.place(model, optimizer, store=...)`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from roadtrain.errors import RoadtrainError

__version__ = "0.3.0"  # pyproject.toml reads it here

if TYPE_CHECKING:
    from roadtrain.integrations.ddp import Summation, sum_hook
    from roadtrain.integrations.fsdp import sum_fsdp
    from roadtrain.kernels.lion import Lion
    from roadtrain.options.lossy import Delay, Downcast, TopK
    from roadtrain.placement.optimizer import PlacedOptimizer
    from roadtrain.placement.place import place
    from roadtrain.placement.stores import Files, Memory, Servers
    from roadtrain.stages.parallel_options import ParallelOptions
    from roadtrain.stages.parallelism import Parallelism
    from roadtrain.stages.parallelize import parallelize
    from roadtrain.stages.stage_model import MicroBatch
    from roadtrain.switch.options import FanIn, SwitchNode
    from roadtrain.training.trackers import Trackers

__all__ = [
    "Delay",
    "Downcast",
    "FanIn",
    "Files",
    "Lion",
    "Memory",
    "MicroBatch",
    "ParallelOptions",
    "Parallelism",
    "PlacedOptimizer",
    "RoadtrainError",
    "Servers",
    "Summation",
    "SwitchNode",
    "TopK",
    "Trackers",
    "parallelize",
    "place",
    "sum_fsdp",
    "sum_hook",
]

_HOMES = {
    "place": "roadtrain.placement.place",
    "Files": "roadtrain.placement.stores",
    "Memory": "roadtrain.placement.stores",
    "Servers": "roadtrain.placement.stores",
    "FanIn": "roadtrain.switch.options",
    "SwitchNode": "roadtrain.switch.options",
    "TopK": "roadtrain.options.lossy",
    "Downcast": "roadtrain.options.lossy",
    "Delay": "roadtrain.options.lossy",
    "PlacedOptimizer": "roadtrain.placement.optimizer",
    "Trackers": "roadtrain.training.trackers",
    "parallelize": "roadtrain.stages.parallelize",
    "ParallelOptions": "roadtrain.stages.parallel_options",
    "Parallelism": "roadtrain.stages.parallelism",
    "MicroBatch": "roadtrain.stages.stage_model",
    "Lion": "roadtrain.kernels.lion",
    "Summation": "roadtrain.integrations.ddp",
    "sum_hook": "roadtrain.integrations.ddp",
    "sum_fsdp": "roadtrain.integrations.fsdp",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, because importing torch takes a second."""
    if name not in _HOMES:
        raise AttributeError(f"module 'roadtrain' has no attribute {name!r}")
    module = __import__(_HOMES[name], fromlist=[name])
    globals()[name] = found = getattr(module, name)
    return found
