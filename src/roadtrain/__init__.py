"""Training of models larger than the accelerator's memory: `roadtrain.place(model, optimizer,
store=...)`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from roadtrain.config.former_modules import FormerPaths
from roadtrain.errors import RoadtrainError

__version__ = "0.1.0"  # pyproject.toml reads it here

if TYPE_CHECKING:
    from roadtrain.api.optimizer import PlacedOptimizer
    from roadtrain.api.parallel_options import ParallelOptions
    from roadtrain.api.parallelize import parallelize
    from roadtrain.api.place import place
    from roadtrain.api.stores import Files, Memory, Servers
    from roadtrain.config.fan_in import FanIn, SwitchNode
    from roadtrain.config.lossy import Delay, Downcast, TopK
    from roadtrain.config.parallelism import Parallelism
    from roadtrain.integrations.ddp import Summation, sum_hook
    from roadtrain.integrations.fsdp import sum_fsdp
    from roadtrain.kernels.lion import Lion
    from roadtrain.parallel.stage_model import MicroBatch

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
    "parallelize",
    "place",
    "sum_fsdp",
    "sum_hook",
]

_HOMES = {
    "place": "roadtrain.api.place",
    "Files": "roadtrain.api.stores",
    "Memory": "roadtrain.api.stores",
    "Servers": "roadtrain.api.stores",
    "FanIn": "roadtrain.config.fan_in",
    "SwitchNode": "roadtrain.config.fan_in",
    "TopK": "roadtrain.config.lossy",
    "Downcast": "roadtrain.config.lossy",
    "Delay": "roadtrain.config.lossy",
    "PlacedOptimizer": "roadtrain.api.optimizer",
    "parallelize": "roadtrain.api.parallelize",
    "ParallelOptions": "roadtrain.api.parallel_options",
    "Parallelism": "roadtrain.config.parallelism",
    "MicroBatch": "roadtrain.parallel.stage_model",
    "Lion": "roadtrain.kernels.lion",
    "Summation": "roadtrain.integrations.ddp",
    "sum_hook": "roadtrain.integrations.ddp",
    "sum_fsdp": "roadtrain.integrations.fsdp",
}

sys.meta_path.append(FormerPaths())


def __getattr__(name: str) -> Any:
    """torch takes a second to import; `roadtrain --help` does not need it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'roadtrain' has no attribute {name!r}")
    module = __import__(_HOMES[name], fromlist=[name])
    globals()[name] = found = getattr(module, name)
    return found
