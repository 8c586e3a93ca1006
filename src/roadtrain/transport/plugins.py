"""Links between hosts by name: `tcp`, and those that installed distributions declare:

    [project.entry-points."roadtrain.links"]
    rdma = "roadtrain_rdma:RdmaOptions"

An entry point names a subclass of tcp.TcpOptions. TCP's connections and handshake stay; `channel`
carries the bytes of a connection that was let in another way, `check` refuses what this host
cannot do. A Channel (transport/stream.py) has four methods; tests/contract/test_link.py is what a
link must pass, plugins/rdma is an example. Links inside a host (shm, local) have no name here: the
placement knows who is near.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from roadtrain.errors import ConfigError
from roadtrain.options.names import unknown_name
from roadtrain.transport import tcp

GROUP = "roadtrain.links"
OWN = "tcp"


def link_names() -> list[str]:
    return [OWN, *sorted(_plugins())]


def link_options(name: str) -> type[tcp.TcpOptions]:
    """The options of links of this name. Raises ConfigError where nobody declares it, or what is
    declared is no link."""
    if name == OWN:
        return tcp.TcpOptions
    plugins = _plugins()
    if name not in plugins:
        raise unknown_name("link", name, link_names())
    declared = f"link `{name}` is {plugins[name].value} of {_distribution(plugins[name])}"
    try:
        options = plugins[name].load()
    except (ImportError, AttributeError) as cause:
        raise ConfigError(f"{declared}, which cannot be loaded: {cause}") from cause
    if not (isinstance(options, type) and issubclass(options, tcp.TcpOptions)):
        raise ConfigError(f"{declared}: no subclass of roadtrain.transport.tcp.TcpOptions")
    return options


def _plugins() -> dict[str, EntryPoint]:
    """A name that two distributions declare is refused, so none of them wins silently."""
    found: dict[str, EntryPoint] = {}
    for one in entry_points(group=GROUP):
        other = found.get(one.name)
        if one.name == OWN or (other is not None and other.value != one.value):
            owner = "roadtrain" if other is None else _distribution(other)
            raise ConfigError(
                f"link `{one.name}` is declared by {_distribution(one)} and by {owner}",
                hint=f"uninstall {_distribution(one)}",
            )
        found[one.name] = one
    return found


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unnamed distribution"
