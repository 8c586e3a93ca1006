"""`roadtrain COMMAND ...`: a table of commands. A command's module is imported only when it was
chosen, so `--help` and a mistyped word answer at once. Errors made on purpose end in one message
and exit code 2. Does NO work itself.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roadtrain.errors import ConfigError, RoadtrainError


@dataclass(frozen=True)
class Command:
    """`words`: positional arguments, all needed but `[WORD]`; `-- CMD...` takes all that follows a
    `--`, as a list.
    `options`: `--name` -> (type, help); bool options take no value. `job_keys`: also takes every
    key of a job, handed over as `overrides`. The target returns an exit code or None."""

    target: str  # module:function
    words: tuple[str, ...]
    does: str
    options: Mapping[str, tuple[Callable[[str], Any], str]] = field(default_factory=dict)
    job_keys: bool = False


COMMANDS = {
    "train": Command(
        "roadtrain.training.train:command",
        ("JOB.toml",),
        "Train a job. The same command resumes at the last committed step.",
        {
            "new_store": (
                bool,
                "go on with the store that is there, or a new one, whatever the run has trained",
            )
        },
        job_keys=True,
    ),
    "serve": Command(
        "roadtrain.runtime.session_host:command",
        ("HOST:PORT",),
        "Serve parameters and optimizer state to workers (store.servers of their job). The same"
        " command resumes.",
        {
            "store": (str, "directory that the state rests in; one in /dev/shm rests in memory"),
            "sum": (
                bool,
                "instead: add up gradients for workers that keep their state (roadtrain.Summation)",
            ),
            "formats": (str, "with --sum: a module to import that registers formats of your own"),
            "budget": (str, "bytes of memory for buffers, as 4GiB (half of what is free)"),
            "snapshot": (
                str,
                "directory on files that a state in memory is copied to while training goes on",
            ),
            "snapshot_every": (
                int,
                "steps between two snapshots (100); the same at all servers of a job",
            ),
            "token_file": (
                str,
                "file (mode 600) with the token that workers must know; needed beyond this host",
            ),
            "cert": (str, "TLS: PEM file of this server's certificate"),
            "key": (str, "TLS: PEM file of its key"),
            "client_ca": (
                str,
                "TLS: PEM file that workers' certificates must be signed by (else they need none)",
            ),
            "ca": (str, "the older name of --client-ca"),
        },
    ),
    "verify": Command(
        "roadtrain.training.verify:command",
        ("JOB.toml",),
        "Train a few steps placed, in RAM and plainly, compare every tensor bit for bit; exit code"
        " 1 if one differs.",
        {"steps": (int, "how many steps (3)")},
        job_keys=True,
    ),
    "status": Command(
        "roadtrain.training.status:command",
        ("RUN",),
        "Step, loss, rates, bytes written so far and how long the device endures it. Of a run on"
        " servers also each node, what it waits for and since when (RUN may be their HOST:PORT,..."
        " instead); 1 if one does not answer.",
        {
            "endurance_tbw": (
                float,
                "terabytes the device may be written, from its data sheet (assumed: 600)",
            ),
            "token_file": (str, "file with the servers' token, where RUN names servers"),
            "ca": (str, "TLS: PEM file that the servers' certificates are known by, likewise"),
            "cert": (str, "TLS: PEM file of a certificate, where the servers demand one, likewise"),
            "key": (str, "TLS: PEM file of its key, likewise"),
        },
    ),
    "export": Command(
        "roadtrain.training.export:export_run",
        ("RUN", "DIR"),
        "Write the parameters of a run directory as safetensors in Hugging Face layout, tensor by"
        " tensor.",
        {"masters": (bool, "the fp32 masters, instead of the dtype that the model computes in")},
    ),
    "import": Command(
        "roadtrain.training.export:import_weights",
        ("DIR",),
        "Start a run (--run.dir) from a Hugging Face folder, tensor by tensor, and write its"
        " job.toml.",
        job_keys=True,
    ),
    "check-rule": Command(
        "roadtrain.training.verify:check_rule_command",
        ("MODULE:NAME",),
        "Check an update rule against its reference on random data, and its speed against the"
        " storage's.",
        {"dir": (str, "a directory on the device to compare with (here)")},
    ),
    "lab up": Command(
        "roadtrain.lab.command:up",
        ("LAB.toml",),
        "Make the cluster that the file describes on this machine, hold it until Ctrl-C or `lab"
        " down`, remove it.",
        {"detach": (bool, "return when it is up; it stays until `lab down`")},
    ),
    "lab run": Command(
        "roadtrain.lab.command:run",
        ("LAB.toml", "HOST", "-- CMD..."),
        "Run a command on a host of a lab that is up: its network, its storage's rates; everything"
        " else is shared.",
    ),
    "lab down": Command(
        "roadtrain.lab.command:down", ("LAB.toml",), "End a lab, and remove what killed labs left."
    ),
    "probe": Command(
        "roadtrain.planner.probe:command",
        (),
        "Measure this host (memory, updates, sums, storage, devices) into a cluster.toml; name what"
        " was not measured.",
        {
            "dirs": (str, "storage directories, with commas between"),
            "out": (str, "the file to write (cluster.toml)"),
            "listen": (str, "HOST:PORT: instead, answer the probe of another host until Ctrl-C"),
            "hosts": (str, "HOST:PORT,... of hosts that listen: measure them and every link too"),
            "token_file": (
                str,
                "file (mode 600) with the token that listeners beyond this machine demand",
            ),
            "cert": (str, "TLS: PEM file of this host's certificate"),
            "key": (str, "TLS: PEM file of its key"),
            "ca": (str, "TLS: PEM file that the other hosts' certificates must be signed by"),
        },
    ),
    "calibrate": Command(
        "roadtrain.planner.calibrate:command",
        ("CLUSTER.toml", "JOB.toml"),
        "Run a few real steps of a job here, print them beside the simulated ones, write the"
        " measured rates back.",
        {
            "steps": (int, "how many are measured (3)"),
            "out": (str, "the file to write (CLUSTER.toml itself)"),
            "lab": (
                bool,
                "on the cluster of the file, emulated on this machine (root); writes NAME.lab.toml",
            ),
        },
    ),
    "plan": Command(
        "roadtrain.planner.plan:command",
        ("CLUSTER.toml",),
        "Find the best plan for a model on a cluster, say why, and why others lost; 1 if none"
        " fits.",
        {
            "model": (
                str,
                "a named shape as OPT-175B, a Hugging Face config.json, or MODULE:FUNCTION",
            ),
            "goal": (str, "time, cost or energy, each a sample (time)"),
            "batch": (int, "samples of a step (the least that is near the best)"),
            "headroom": (float, "share of devices' and hosts' memory that stays free (0.05)"),
            "placements": (str, "only these, with commas between (all)"),
            "late": (bool, "also plans whose updates are a step late"),
            "seq_len": (
                int,
                "tokens of a sample (a config.json: 4096 or its longest; a shape: as published)",
            ),
            "constants": (str, "fitted constants of computing, by name"),
            "out": (str, "where the pick goes (plan.toml)"),
            "json": (str, "also write all that is told to this file"),
            "html": (str, "also write one page with plots"),
            "trace": (str, "write a trace for ui.perfetto.dev to this file"),
            "job_file": (str, "write what `roadtrain train` needs of it to this file"),
            "verify": (
                bool,
                "then run steps of it here beside simulated ones; write the measured rates back",
            ),
            "lab": (
                bool,
                "--verify on the cluster emulated on this machine (root); writes NAME.lab.toml",
            ),
        },
    ),
    "simulate": Command(
        "roadtrain.planner.simulate:command",
        ("CLUSTER.toml",),
        "Predict one plan on a cluster that need not be there: step time, what is busy, memory,"
        " energy and cost.",
        {
            "model": (
                str,
                "a named shape as OPT-175B, a Hugging Face config.json, or MODULE:FUNCTION",
            ),
            "seq_len": (
                int,
                "tokens of a sample (a config.json: 4096 or its longest; a shape: as published)",
            ),
            "headroom": (
                float,
                "share of devices' and hosts' memory that stays free (0.05; the plan's)",
            ),
            "plan": (str, "plan.toml; else from the options below"),
            "placement": (
                str,
                (
                    "ddp, zero3, zero-offload, zero-infinity, near-storage, optimizer-node, ..."
                    " (zero3)"
                ),
            ),
            "dp": (int, "data-parallel ranks (all devices)"),
            "tp": (int, "tensor-parallel ranks (1)"),
            "pp": (int, "pipeline stages (1)"),
            "cp": (int, "context-parallel ranks (1)"),
            "ep": (int, "expert-parallel ranks, of dp x cp (1)"),
            "vp": (int, "parts of the model a stage (1)"),
            "precision": (str, "of products, as fp8; 16 bits"),
            "micro_batch": (int, "samples a device and pass (1)"),
            "micros": (int, "passes a step (1)"),
            "recompute": (bool, "keep blocks' inputs only"),
            "staleness": (int, "1: a step computes while the last one's updates run"),
            "topk": (float, "percent of a gradient's bytes that travel"),
            "constants": (str, "fitted constants of computing, by name"),
            "json": (str, "also write the result to this file"),
            "trace": (str, "write a trace for ui.perfetto.dev to this file"),
        },
    ),
    "reproduce": Command(
        "benchmarks.reproduce:command",
        ("[PAPER]",),
        "What the five papers print beside what the simulator gives: luwu, smart_infinity, holmes,"
        " sgc, byteps.",
        {
            "json": (str, "also write every row to this file"),
            "all": (bool, "print also what is not simulated"),
        },
    ),
    "soak": Command(
        "benchmarks.soak:command",
        (),
        "Run scripted faults (kills, power cuts, flipped bits, cut links, full disks, wrong"
        " workers) against a small job on this machine; exit code 1 if anything hangs or a loss"
        " differs.",
        {
            "faults": (int, "how many (300)"),
            "sums": (bool, "instead: spare hosts of a summation (100)"),
            "seed": (int, "which (0)"),
            "only": (str, "this fault's number, or FIRST-LAST, alone"),
            "json": (str, "also write every fault to this file; with --only, into what it holds"),
        },
    ),
    "bench": Command(
        "roadtrain.cli:bench",
        ("NAME",),
        "Run a benchmark beside its peer.",
        {
            "json": (str, "also write the figures to this file"),
            "quick": (bool, "small sizes: does it run at all"),
        },
    ),
}


# Commands whose code is beside the package, in `benchmarks`.
OUTSIDE = ("reproduce", "soak", "bench")


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # `| tee log` shows each step when it ends
    try:
        return _run(args)
    except RoadtrainError as error:
        print(f"roadtrain: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("roadtrain: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `roadtrain status RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def bench(name: str, json: str | None = None, quick: bool = False) -> None:
    """The name of the first edition for `python -m benchmarks NAME`."""
    print("roadtrain bench: is `python -m benchmarks` now", file=sys.stderr)
    importlib.import_module("benchmarks.__main__").run(name, json, quick)


def find_benchmarks() -> None:
    """Make `benchmarks` importable: it stands beside `src` in a clone and is not installed."""
    clone = Path(__file__).parents[2]
    if not (clone / "benchmarks" / "__main__.py").is_file():
        raise ConfigError(
            "the benchmarks are not here: they are in roadtrain's repository, not in the package",
            hint="run this command from a clone",
        )
    if str(clone) not in sys.path:
        sys.path.append(str(clone))


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if args[0] == "--version":
        print(importlib.import_module("importlib.metadata").version("roadtrain"))
        return 0
    name, rest = args[0], args[1:]
    if rest and any(known.startswith(f"{name} ") for known in COMMANDS):
        name, rest = f"{name} {rest[0]}", rest[1:]
    if name not in COMMANDS:
        raise _unknown("command", name, COMMANDS)
    command = COMMANDS[name]
    if {"-h", "--help"} & {*(rest[: rest.index("--")] if "--" in rest else rest)}:
        print(_command_help(name, command))
        return 0
    words, keywords = _parsed(name, command, rest)
    module, _, function = command.target.partition(":")
    if name in OUTSIDE:
        find_benchmarks()
    return getattr(importlib.import_module(module), function)(*words, **keywords) or 0


def _parsed(name: str, command: Command, args: list[str]) -> tuple[list[Any], dict[str, Any]]:
    words: list[Any] = []
    keywords: dict[str, Any] = {}
    job_args: list[str] = []
    at = 0
    takes_rest = bool(command.words) and command.words[-1].startswith("-- ")
    while at < len(args):
        arg, at = args[at], at + 1
        key, has_value, text = arg[2:].partition("=")
        option = command.options.get(key.replace("-", "_")) if arg.startswith("--") else None
        if not arg.startswith("--"):
            words.append(arg)
        elif arg == "--" and takes_rest:
            words += [args[at:]] if args[at:] else []
            break
        elif option is not None:
            kind = option[0]
            if kind is not bool and not has_value:
                if at == len(args):
                    raise ConfigError(f"--{key} needs a value")
                text, at = args[at], at + 1
            try:
                keywords[key.replace("-", "_")] = True if kind is bool else kind(text)
            except ValueError as cause:
                raise ConfigError(f"--{key}: {text!r} is not a number") from cause
        elif command.job_keys and "." in key:
            job_args.append(arg)
            if not has_value and at < len(args) and not args[at].startswith("--"):
                job_args.append(args[at])
                at += 1
        else:
            raise _unknown(
                "option", key, [k.replace("_", "-") for k in command.options], dashes="--"
            )
    least = sum(not word.startswith("[") for word in command.words)
    if not least <= len(words) <= len(command.words) or (takes_rest and isinstance(words[-1], str)):
        raise ConfigError(
            f"`roadtrain {name}` takes {' '.join(command.words) or 'options only'}, "
            f"given: {' '.join(map(str, words)) or 'nothing'}",
            hint=f"roadtrain {name} --help",
        )
    if command.job_keys:
        keywords["overrides"] = importlib.import_module("roadtrain.config.job").parse_overrides(
            job_args
        )
    return words, keywords


def _unknown(kind: str, name: str, known: Any, dashes: str = "") -> ConfigError:
    near = importlib.import_module("difflib").get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = (
        f"did you mean `{dashes}{near[0]}`?"
        if near
        else f"known: {', '.join(sorted(known)) or 'none'}"
    )
    return ConfigError(f"unknown {kind} `{dashes}{name}`", hint=hint)


def _help() -> str:
    lines = ["Trains models larger than memory.", "", "roadtrain COMMAND ...", ""]
    lines += [f"  {' '.join([name, *c.words]):32}{c.does}" for name, c in COMMANDS.items()]
    return "\n".join([*lines, "", "roadtrain COMMAND --help tells more."])


def _command_help(name: str, command: Command) -> str:
    lines = [f"roadtrain {' '.join([name, *command.words])} [OPTIONS]", "", command.does]
    if command.options:
        lines += ["", "Options"]
        lines += [
            f"  --{key.replace('_', '-'):22}{text}" for key, (_, text) in command.options.items()
        ]
    if command.job_keys:
        lines += ["", "Keys of the job, as `--run.steps 20`; the command line goes before the file"]
        for key, default, text in importlib.import_module("roadtrain.config.job").all_keys():
            lines.append(f"  --{key:26}{text}{f' [{default}]' if default else ''}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
