"""What installed distributions add to roadtrain by entry points, found by name and loaded only when
asked for.

    [project.entry-points."roadtrain.links"]
    rdma = "roadtrain_rdma:RdmaOptions"

The wings of roadtrain itself plug in the same way (pyproject.toml):

    group                      a name stands for                    read
    roadtrain.links            links between hosts                  here
    roadtrain.routes           a worker's way to its servers        servers/routes.py
    roadtrain.roles            what `roadtrain serve` serves        servers/serve.py
    roadtrain.gradient_sums    sums of a stage's gradients          stages/gradient_sum.py
    roadtrain.switch_tables    a switch's table outside its process switch/switch_command.py

A link is a subclass of tcp.TcpOptions. TCP's connections and handshake stay; `channel`
carries the bytes of a connection that was let in another way, `check` refuses what this host
cannot do. A Channel (transport/stream.py) has four methods; tests/contract/test_link.py is what a
link must pass, plugins/rdma is an example. Links inside a host (shm, local) have no name here: the
placement knows who is near.
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
    """The options of links of this name. Raises ConfigError where no distribution declares it, or
    where the entry point is no link."""
    if name == OWN:
        return tcp.TcpOptions
    options = load(GROUP, name)
    if not (isinstance(options, type) and issubclass(options, tcp.TcpOptions)):
        raise ConfigError(
            f"{_declared(GROUP, _found(GROUP)[name])}: no subclass of"
            " roadtrain.transport.tcp.TcpOptions"
        )
    return options


def plugin_names(group: str) -> list[str]:
    return sorted(_found(group))


def load(group: str, name: str) -> Any:
    """The object that the entry point `name` of `group` names. Raises ConfigError where no
    distribution declares it, or where it cannot be imported."""
    found = _found(group)
    if name not in found:
        known = [OWN, *found] if group == GROUP else found
        raise unknown_name(_kind(group), name, known)
    try:
        return found[name].load()
    except (ImportError, AttributeError) as cause:
        declared = _declared(group, found[name])
        raise ConfigError(f"{declared}, which cannot be loaded: {cause}") from cause


def _found(group: str) -> dict[str, EntryPoint]:
    """A name that two distributions declare is refused, so none of them wins silently."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        other = found.get(point.name)
        taken = group == GROUP and point.name == OWN
        if taken or (other is not None and other.value != point.value):
            owner = "roadtrain" if other is None else _distribution(other)
            raise ConfigError(
                f"{_kind(group)} `{point.name}` is declared by {_distribution(point)} and by"
                f" {owner}",
                hint=f"uninstall {_distribution(point)}",
            )
        found[point.name] = point
    return found


def _kind(group: str) -> str:
    """The word for a plugin of `group` in messages: `link`, `gradient sum`."""
    return group.rpartition(".")[2].removesuffix("s").replace("_", " ")


def _declared(group: str, point: EntryPoint) -> str:
    return f"{_kind(group)} `{point.name}` is {point.value} of {_distribution(point)}"


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unnamed distribution"
