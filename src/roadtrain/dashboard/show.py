"""`roadtrain show RUN`: serve the page of a run, or write a picture of it.

Only this host is served, unless readers must present a token. The server changes nothing.
Does not import torch. Bokeh is imported by the command only, because it is optional.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from roadtrain.config.cluster import Host, load_cluster
from roadtrain.dashboard.watch import RunWatch
from roadtrain.environment import need
from roadtrain.errors import ConfigError
from roadtrain.storage.direct import check_file
from roadtrain.transport.address import address_of, token_of


def command(
    run: str,
    port: int | None = None,
    listen: str = "",
    token_file: str | None = None,
    cluster: str = "",
    endurance_tbw: float | None = None,
    png: str = "",
    theme: str = "",
) -> int:
    """Show pictures of a run in a browser, while it trains and afterwards. What limits its steps,
    curves, a timeline, memory, rates, alerts.

    `run`: a run directory, a launched run's name, or several of them, separated by commas.
    Raises ConfigError.

    Args:
        port: port on this host (default: a free one)
        listen: HOST:PORT to serve other hosts at; needs --token-file
        token_file: file (mode 600) with a token that readers must enter
        cluster: cluster file of `roadtrain probe`, with whose rates disks and links are compared
        endurance_tbw: rated endurance of the SSD, terabytes written (assumed: 600)
        png: write a picture to this file instead of serving a page
        theme: light or dark (default: that of the reader's system; of a picture: light)
    """
    if theme not in ("", "light", "dark"):
        raise ConfigError(f"--theme {theme} is neither light nor dark")
    if png:
        check_file(Path(png))
    where = address_of(listen or f"127.0.0.1:{port or 0}")
    if listen and port is not None:
        raise ConfigError("--listen and --port are both set", hint="--listen names the port")
    if listen and token_file is None:
        raise ConfigError(
            f"--listen {listen} lets other hosts read the run, so it needs a token",
            hint="add --token-file FILE; or use `ssh -L` and the default address",
        )
    token = token_of(token_file)
    host = probed_host(cluster) if cluster else None
    pages: Any = need("roadtrain.dashboard.page_server", "dashboard")
    runs = [RunWatch(name) for name in run.split(",")]
    new = partial(pages.Panels, runs, host, endurance_tbw)
    try:
        if png:
            pages.write_picture(new(), Path(png), theme or "light")
            print(f"picture {png}")
        else:
            asyncio.run(pages.serve(runs, new, theme, where, token))
    finally:
        for watch in runs:
            watch.close()
    return 0


def probed_host(cluster: str) -> Host:
    """Return this host's entry of a cluster file: the one with its name, or the only one. Raises
    ConfigError."""
    hosts: Sequence[Host] = load_cluster(cluster).hosts
    name = socket.gethostname().split(".")[0]  # as `roadtrain probe` names this host
    own = [host for host in hosts if host.name == name] or hosts
    if len(own) != 1:
        names = ", ".join(host.name for host in hosts)
        raise ConfigError(
            f"{cluster} does not say which host this is: {name} is none of {names}",
            hint="name the hosts by their host names, or write a file with one host",
        )
    return own[0]
