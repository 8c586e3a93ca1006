"""Load the entry points with which installed Python distributions extend roadtrain. A user selects
an entry point by its name. It is loaded when it is used for the first time.

    [project.entry-points."roadtrain.links"]
    rdma = "roadtrain_rdma:RdmaOptions"

Optional parts of roadtrain itself are registered in the same way, in its pyproject.toml:

    group                      a name stands for                    loaded by
    roadtrain.links            a kind of link between hosts         this module
    roadtrain.routes           a worker's route to its servers      servers/routes.py
    roadtrain.roles            a service of `roadtrain serve`       servers/serve.py
    roadtrain.gradient_sums    a gradient sum of a stage            stages/gradient_sum.py
    roadtrain.switch_tables    a switch's table outside its process switch/switch_command.py

A distribution declares a kind of link with a subclass of tcp.TcpOptions. Such a link uses TCP
connections, and the same handshake as a TCP link. The method `channel` of the subclass makes the
Channel that moves the bytes of an accepted connection. The method `check` raises an error if this
host does not support the link. A Channel must pass tests/transport/unit/test_link.py. plugins/rdma
is an example. Links inside a host (shm, local) are chosen automatically.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from roadtrain.errors import ConfigError
from roadtrain.options.names import unknown_name
from roadtrain.transport import tcp

GROUP = "roadtrain.links"
OWN = "tcp"


def link_names() -> list[str]:
    return [OWN, *plugin_names(GROUP)]


def link_options(name: str) -> type[tcp.TcpOptions]:
    """Return the options class of the kind of link named `name`. Raises ConfigError if no
    distribution declares the name, or if the declared object is not a subclass of TcpOptions."""
    if name == OWN:
        return tcp.TcpOptions
    options = load(GROUP, name)
    if not (isinstance(options, type) and issubclass(options, tcp.TcpOptions)):
        raise ConfigError(
            f"{_declared(GROUP, _found(GROUP)[name])}, but is not a subclass of tcp.TcpOptions"
        )
    return options


def plugin_names(group: str) -> list[str]:
    return sorted(_found(group))


def load(group: str, name: str) -> Any:
    """Load the object of the entry point `name` of `group`. Raises ConfigError if no distribution
    declares the name, or if the object cannot be imported."""
    found = _found(group)
    if name not in found:
        names = [OWN, *found] if group == GROUP else found
        raise unknown_name(_kind(group), name, names)
    try:
        return found[name].load()
    except (ImportError, AttributeError) as cause:
        declared = _declared(group, found[name])
        raise ConfigError(f"{declared}, which cannot be loaded: {cause}") from cause


def _found(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of `group` by name. Raises ConfigError if two distributions declare
    the same name for different objects."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        other = found.get(point.name)
        reserved = group == GROUP and point.name == OWN
        if reserved or (other is not None and other.value != point.value):
            owner = "roadtrain" if other is None else _distribution(other)
            raise ConfigError(
                f"{_kind(group)} `{point.name}` is declared by {_distribution(point)} and by"
                f" {owner}",
                hint=f"uninstall {_distribution(point)}",
            )
        found[point.name] = point
    return found


def _kind(group: str) -> str:
    """Return a noun for error messages: for example, "link" for the group "roadtrain.links"."""
    return group.rpartition(".")[2].removesuffix("s").replace("_", " ")


def _declared(group: str, point: EntryPoint) -> str:
    return f"{_kind(group)} `{point.name}` is {point.value} of {_distribution(point)}"


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unnamed distribution"
