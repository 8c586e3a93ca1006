"""`roadtrain launch --write kubernetes`: write run.yaml, for `kubectl apply -f`, to run the plan.

    Secret        has the token
    ConfigMap     has job.toml and reducers.txt
    Service       is headless and covers all pods; StatefulSets require a Service
    StatefulSet   runs one server, reducer or switch, with one instance that restarts on its node
    Job           runs the workers of one host with torchrun; restarts until all workers are done

A pod runs on the node that the plan names, with the node's network and shared memory. The namespace
of the pods must allow hostNetwork, hostIPC and hostPath. Host names must be node names. There is
one Job per host, because an indexed Job cannot assign its pods to nodes in order. Does NOT contact
Kubernetes, and does NOT build an image.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from roadtrain.config.job import DataSection, Job, files_read
from roadtrain.errors import ConfigError
from roadtrain.launch import torchrun
from roadtrain.launch.processes import HostFile, Process, Role
from roadtrain.launch.resolve import ResolvedRun
from roadtrain.storage.direct import make_directory, typed_errors
from roadtrain.switch.options import MOST_JOBS
from roadtrain.transport.address import write_token

Tree = dict[str, Any]
PYTHON = "python"  # the image's interpreter
MARK = "# Written by `roadtrain launch --write kubernetes`"
NOTICE_S = 120  # time between SIGTERM and SIGKILL
MOST_STARTS = 100  # largest number of times that Kubernetes restarts the workers of a host
LONGEST_NAME = 52  # largest length of an object's name, as Kubernetes appends up to 11 characters
GLOB = re.compile(r"[*?\[]")


def write_kubernetes(run: ResolvedRun, out: Path, image: str) -> list[str]:
    """Write run.yaml and return notes for the user. Raises ConfigError if Kubernetes cannot run the
    plan."""
    objects = kubernetes_objects(run, image)
    torchrun.check_ours(out, ["run.yaml"], MARK)
    make_directory(out)
    with typed_errors(out / "run.yaml", "writing"):
        write_token(out / "run.yaml", as_yaml(objects).encode())  # run.yaml contains the token
    return [
        f"{len(torchrun.hosts_of(run))} hosts; start the run with:"
        f" kubectl apply -f {out / 'run.yaml'}",
        "servers keep running when the workers are done, until kubectl delete -f",
        *torchrun.notes_for_user(run),
    ]


def as_yaml(objects: Iterable[Tree]) -> str:
    text = yaml.dump_all(
        objects, Dumper=_BlockDumper, sort_keys=False, default_flow_style=False, width=100
    )
    return f"{MARK}: do not edit; change the plan or the job and write again.\n{text}"


class _BlockDumper(yaml.SafeDumper):
    """A YAML dumper that writes multi-line strings as block literals."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_BlockDumper.add_representer(str, _text)


def kubernetes_objects(run: ResolvedRun, image: str) -> list[Tree]:
    """Return the Kubernetes objects of a run. Raises ConfigError if Kubernetes cannot run the
    plan."""
    return _RunObjects(torchrun.with_device(run), image).all()


def name_of(text: str) -> str:
    """Return a valid name or label of a Kubernetes object, derived from `text` (RFC 1035). A name
    that had to be changed ends with a hash, so that different texts have different names."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"run-{plain}"
    if named == text.replace(" ", "-") and len(named) <= LONGEST_NAME:
        return named
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{named[: LONGEST_NAME - 9].strip('-')}-{mark}"


class _RunObjects:
    """The objects of one run."""

    def __init__(self, run: ResolvedRun, image: str) -> None:
        self.run, self.image = run, image
        self.name = name_of(run.name)
        self.worker = torchrun.first_worker(run)

    def all(self) -> list[Tree]:
        services = self.run.services()
        return [
            self._object("v1", "Secret", self.name, data=self._files(secret=True)),
            self._object("v1", "ConfigMap", self.name, data=self._files(secret=False)),
            self._service(services),
            *map(self._stateful_set, services),
            *(self._job(host, rank) for rank, host in enumerate(self.run.worker_hosts)),
        ]

    def _labels(self, process: str = "") -> Tree:
        of_run = {"app.kubernetes.io/name": "roadtrain", "app.kubernetes.io/instance": self.name}
        return {**of_run, "app.kubernetes.io/component": name_of(process)} if process else of_run

    def _object(
        self, version: str, kind: str, name: str, process: str = "", **content: Tree
    ) -> Tree:
        metadata = {"name": name, "labels": self._labels(process)}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}

    def _files(self, *, secret: bool) -> Tree:
        contents = {}
        for file in torchrun.files_of(self.run):
            if file.secret == secret:
                coded = base64.b64encode(file.content.encode()).decode()
                contents[PurePosixPath(file.path).name] = coded if secret else file.content
        return contents

    def _service(self, services: Iterable[Process]) -> Tree:
        served = (port for service in services for port in service.ports)
        ports = dict.fromkeys((*served, self.run.machines.rendezvous_port))
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": self._labels(),
            "ports": [_port("tcp", port, "port") for port in ports],
        }
        return self._object("v1", "Service", self.name, spec=spec)

    def _stateful_set(self, process: Process) -> Tree:
        name = name_of(f"{self.run.name} {process.name}")
        container = {
            "name": str(process.role),
            "image": self.image,
            "command": [PYTHON, *process.words],
            "workingDir": process.directory,
            "env": [],
            "ports": _ports(process),
        }
        spec = {
            "serviceName": self.name,
            "replicas": 1,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": self._labels(process.name)},
            "template": self._pod(
                process.name, process.host, container, process.files, self._made_by(process)
            ),
        }
        return self._object("apps/v1", "StatefulSet", name, process.name, spec=spec)

    def _job(self, host: str, rank: int) -> Tree:
        process, count = f"workers {host}", self.run.host(host).workers
        launcher = torchrun.torchrun_words(self.run, str(rank), str(count), self.run.name)
        assert self.worker.words[:2] == ("-m", "roadtrain.cli")
        words = ("-m", "roadtrain.launch.pod", *self.worker.words[2:])
        container: Tree = {
            "name": "workers",
            "image": self.image,
            "command": [PYTHON, *launcher, *words],
            "workingDir": self.run.directory,
            "env": [{"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(torchrun.SHUTDOWN_S)}],
        }
        if rank == 0:
            container["ports"] = [_port("tcp", self.run.machines.rendezvous_port, "containerPort")]
        if gpus := torchrun.gpus_of(self.run).get(host):
            container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
        pod = self._pod(
            process,
            host,
            container,
            self.worker.files,
            _stores_of(self.run.job),
            _read_by(self.run.job),
        )
        pod["spec"] = {"restartPolicy": "OnFailure", **pod["spec"]}
        name = name_of(f"{self.run.name} {process}")
        spec = {"backoffLimit": MOST_STARTS, "template": pod}
        return self._object("batch/v1", "Job", name, process, spec=spec)

    def _pod(
        self,
        process: str,
        host: str,
        container: Tree,
        files: Iterable[HostFile],
        made: Iterable[str],
        read: Iterable[str] = (),
    ) -> Tree:
        """Return a pod template that mounts directories of the node at the same paths: `made` are
        created if they do not exist, `read` must exist. `process`: its name, for the labels.
        `host`: the node's name. `container`: the container, without its mounts."""
        made = [self.run.directory, *made]
        roots = _roots([*made, *read])
        on_node = {f"path-{number}": path for number, path in enumerate(roots)}
        (handed_out,) = {str(PurePosixPath(file.path).parent) for file in files}
        mounts: list[Tree] = [{"name": name, "mountPath": path} for name, path in on_node.items()]
        mounts.append({"name": "files", "mountPath": handed_out, "readOnly": True})
        volumes: list[Tree] = []
        for name, path in on_node.items():
            # Kubernetes creates a missing directory that the run writes to. If another directory is
            # missing, the pod does not start.
            kind = "DirectoryOrCreate" if path in made else "Directory"
            volumes.append({"name": name, "hostPath": {"path": path, "type": kind}})
        volumes.append({"name": "files", "projected": {"sources": self._sources(files)}})
        spec = {
            "nodeSelector": {"kubernetes.io/hostname": host},
            "hostNetwork": True,
            "hostIPC": True,
            "dnsPolicy": "ClusterFirstWithHostNet",
            "terminationGracePeriodSeconds": NOTICE_S,
            "securityContext": {"runAsUser": 0},  # the node creates directories as root
            "containers": [{**container, "volumeMounts": mounts}],
            "volumes": volumes,
        }
        return {"metadata": {"labels": self._labels(process)}, "spec": spec}

    def _sources(self, files: Iterable[HostFile]) -> list[Tree]:
        """Return the Secret, the ConfigMap, or both as volume sources for the files of a
        process."""
        sources: list[Tree] = []
        for kind, secret in (("secret", True), ("configMap", False)):
            names = [PurePosixPath(file.path).name for file in files if file.secret == secret]
            mode: Tree = {"mode": 0o600} if secret else {}
            items = [{"key": name, "path": name, **mode} for name in names]
            if items:
                sources.append({kind: {"name": self.name, "items": items}})
        return sources

    def _made_by(self, process: Process) -> list[str]:
        """Return the directories that a server creates on its node."""
        host = self.run.host(process.host)
        places = [place for place in host.servers if place.port in process.ports]
        stores = places if process.role == Role.SERVER else []
        return [path for place in stores for path in (place.store, place.snapshot) if path]


def _port(protocol: str, port: int, key: str) -> Tree:
    return {"name": f"{protocol}-{port}", key: port, "protocol": protocol.upper()}


def _ports(process: Process) -> list[Tree]:
    """Return the container ports of a process. The UDP ports of a switch, one per job, follow its
    TCP port."""
    tcp = [_port("tcp", port, "containerPort") for port in process.ports]
    if process.role != Role.SWITCH:
        return tcp
    udp = [port + 1 + job for port in process.ports for job in range(MOST_JOBS)]
    return tcp + [_port("udp", port, "containerPort") for port in udp]


def _roots(paths: Iterable[str]) -> list[str]:
    """Return the paths without duplicates and without paths that are inside another path."""
    distinct = [PurePosixPath(path) for path in dict.fromkeys(paths)]
    return [str(path) for path in distinct if not any(p in path.parents for p in distinct)]


def _stores_of(job: Job) -> list[str]:
    """Return the directories of the stores that workers open on their own nodes."""
    of_stages = [path for placement in job.parallelism.placements for path in placement.files]
    return of_stages if job.servers.addresses else [*of_stages, *job.store.files]


def _read_by(job: Job) -> list[str]:
    """Return the directories of a node that its workers read, without the default training text in
    the container image."""
    own = DataSection().paths
    text = (path for path in job.data.paths if path not in own)
    return [_directory_of(path) for path in (*text, *files_read(job).values())]


def _directory_of(path: str) -> str:
    """Return a directory that contains all matches of the glob pattern or path. Raises ConfigError
    if this is /."""
    parts = PurePosixPath(path).parts
    fixed = next((i for i, part in enumerate(parts) if GLOB.search(part)), len(parts) - 1)
    if fixed < 2:
        raise ConfigError(
            f"{path} of the job is directly in /, but a pod cannot mount its node's /",
            hint=f"move {path} into a directory",
        )
    return str(PurePosixPath(*parts[:fixed]))
