"""dry_run(): describe as text a launch that does not happen: the checks before the start, the
processes on each host, and the files that would be written.

Contacts no host, creates nothing and shows no secrets (Rule 8).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from roadtrain.launch.checks import CHECKED
from roadtrain.launch.home import RunHome
from roadtrain.launch.processes import Process
from roadtrain.launch.resolve import ResolvedRun
from roadtrain.training.progress import show_table
from roadtrain.units import show_count


def dry_run(run: ResolvedRun, home: RunHome) -> str:
    """Return a description of the launch of a run. `home`: the directory for the files of the
    launch. Raises ConfigError if the workers do not fit the plan's hosts."""
    services = run.services()
    workers = run.workers(run.worker_hosts, 0).processes
    hosts = run.machines.hosts
    spares = ", ".join(spare.name for spare in run.machines.spares) or "none"
    lines = [
        f"run {run.name}: {show_count(len(workers), 'worker')} and"
        f" {show_count(len(services), 'service')} on {show_count(len(hosts), 'host')},"
        f" spare hosts: {spares}",
        "",
        "checked before anything starts",
        *(f"  {number}. {text}" for number, text in enumerate(CHECKED, 1)),
        "",
        "started, in this order",
    ]
    processes = (*services, *workers)
    show_table([("", *_process(run, process)) for process in processes], lines.append)
    lines += ["", "written"]
    rows = (*_written_here(home), *_written(run, processes))
    show_table([("", *row) for row in rows], lines.append)
    return "\n".join(lines)


def _process(run: ResolvedRun, process: Process) -> tuple[str, str, str]:
    where = f"{process.host} ({run.address(process.host)})"
    return where, process.role, shlex.join(("python", *process.words))


def _written_here(home: RunHome) -> Iterator[tuple[str, str, str]]:
    before = "; replaces that of the previous run of this name" if home.exists else ""
    files = (home.plan_path, home.job_path, home.path / "launch.json", home.path / "state.json")
    for path in files:
        yield "here", str(path), "in a directory of mode 700"
    yield "here", str(home.token_path), "mode 600, a secret that is generated at the start"
    yield "here", str(home.all_log), f"all lines{before}"
    yield "here", f"{home.log_directory}/", f"the lines of each process{before}"


def _written(run: ResolvedRun, processes: Sequence[Process]) -> Iterator[tuple[str, str, str]]:
    """Yield (host, path, note for the user) for each file or directory that the launch would write
    on a host."""
    for host in run.machines.hosts:
        own = [process for process in processes if process.host == host.name]
        files = {file.path: file for process in own for file in process.files}
        for path, file in files.items():
            secret = "600, a secret that is generated at the start"
            yield host.name, path, f"mode {secret if file.secret else 644}"
        for path in (path for place in host.servers for path in (place.store, place.snapshot)):
            if path:
                yield host.name, f"{path}/", "by its server"
        if host.workers:
            for path in (run.directory, *run.stores_of_workers(host.name)):
                yield host.name, f"{path}/", "by its workers"
