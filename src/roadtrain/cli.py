"""The `roadtrain` command line: find the function of a command, parse its options and call it.

Help texts are read from the docstrings in the source files, so `--help` does not import torch
(docs/decisions/0029). A RoadtrainError is printed as a message without a traceback. The exit code
is 2, or 3 if another process failed and repeating the command may succeed.
"""

from __future__ import annotations

import ast
import importlib
import io
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roadtrain import __version__
from roadtrain.errors import AuthError, ConfigError, PeerError, RoadtrainError
from roadtrain.options.names import unknown_name

REFUSED, PEER_FAILED = 2, 3  # exit codes for a RoadtrainError


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        target: The function that runs the command, as module:function. It returns an exit code or
            None.
        words: Names of the positional arguments. [WORD] is optional.
        job_keys: Whether every key of a job file is also an option of the command. The function
            gets these options as `overrides`.
        job_word: The position of the job file among the positional arguments, from 0. It is -1 if
            the command has no job file.
    """

    target: str
    words: tuple[str, ...] = ()
    job_keys: bool = False
    job_word: int = -1

    @property
    def takes_rest(self) -> bool:
        """Return whether the last positional argument is `-- CMD...`: the list of all arguments
        after `--`."""
        return bool(self.words) and self.words[-1].startswith("-- ")


@dataclass(frozen=True)
class Option:
    """An option of a command. `text` is the option's help text."""

    kind: type  # bool, int, float or str; a bool option takes no value
    text: str


COMMAND_GROUPS: Mapping[str, Mapping[str, Command]] = {
    "start here": {
        "fit": Command("roadtrain.planner.fit:command", ("MODEL",)),
        "doctor": Command("roadtrain.doctor.doctor_command:command", ("[JOB.toml]",), job_word=0),
        "init": Command("roadtrain.config.init_job:command", ("[MODEL]",)),
        "train": Command(
            "roadtrain.training.command:command", ("JOB.toml",), job_keys=True, job_word=0
        ),
        "completion": Command("roadtrain.cli:completion", ("SHELL",)),
    },
    "run": {
        "serve": Command("roadtrain.servers.serve:command", ("HOST:PORT",)),
        "launch": Command("roadtrain.launch.launch:command", ("[PLAN.toml]", "[JOB.toml]")),
        "export": Command("roadtrain.training.export:export_run", ("RUN", "DIR")),
        "import": Command("roadtrain.training.export:import_weights", ("DIR",), job_keys=True),
    },
    "look": {
        "status": Command("roadtrain.launch.status_command:command", ("RUN",)),
        "show": Command("roadtrain.dashboard.show:command", ("RUN,...",)),
    },
    "plan": {
        "probe": Command("roadtrain.planner.probe:command"),
        "plan": Command("roadtrain.planner.plan:command", ("CLUSTER.toml",)),
        "simulate": Command("roadtrain.planner.simulate:command", ("CLUSTER.toml",)),
        "calibrate": Command(
            "roadtrain.planner.calibrate:command", ("CLUSTER.toml", "JOB.toml"), job_word=1
        ),
    },
    "prove": {
        "verify": Command(
            "roadtrain.training.verify:command", ("JOB.toml",), job_keys=True, job_word=0
        ),
        "check-rule": Command("roadtrain.training.check_rule:command", ("MODULE:NAME",)),
        "preflight": Command(
            "roadtrain.training.preflight_command:command", ("[JOB.toml]",), job_word=0
        ),
        "lab up": Command("roadtrain.lab.lab_command:up", ("LAB.toml",)),
        "lab run": Command("roadtrain.lab.lab_command:run", ("LAB.toml", "HOST", "-- CMD...")),
        "lab down": Command("roadtrain.lab.lab_command:down", ("LAB.toml",)),
        "soak": Command("benchmarks.soak.soak:command"),
        "reproduce": Command("benchmarks.planner.reproduce:command", ("[PAPER]",)),
        "bench": Command("benchmarks.__main__:bench", ("NAME",)),
    },
}
COMMANDS = {name: command for group in COMMAND_GROUPS.values() for name, command in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    # waiting threads of torch spin 30 times shorter: as fast alone, faster on a busy machine
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if "" not in sys.path:
        sys.path.append("")  # MODULE:NAME may name a file in the current directory
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # so that `| tee log` shows lines at once
    try:
        return run(list(sys.argv[1:] if argv is None else argv))
    except RoadtrainError as error:
        print(f"roadtrain: {error}", file=sys.stderr)
        peer_failed = isinstance(error, PeerError) and not isinstance(error, AuthError)
        return PEER_FAILED if peer_failed else REFUSED
    except KeyboardInterrupt:
        print("roadtrain: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in `roadtrain status RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run(args: list[str]) -> int:
    """Run the command line `args` and return its exit code. Raises errors, which `main` prints."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    if args[0] == "--version":
        print(__version__)
        return 0
    name, args = _named(args)
    if {"-h", "--help"} & {*(args[: args.index("--")] if "--" in args else args)}:
        print(_command_help(name))
        return 0
    words, keywords = parse(name, args)
    _check_job(name, words, keywords.get("overrides", {}))
    module, _, function = COMMANDS[name].target.partition(":")
    return getattr(importlib.import_module(module), function)(*words, **keywords) or 0


def _check_job(name: str, words: Sequence[Any], overrides: Mapping[str, Any]) -> None:
    """Check the command's job file before torch is imported."""
    if 0 <= (number := COMMANDS[name].job_word) < len(words):
        job = importlib.import_module("roadtrain.config.job")  # imports pydantic
        job.load_job(words[number], overrides)


def _named(args: list[str]) -> tuple[str, list[str]]:
    """Split `args` into the command's name, which may have two words, and the other arguments."""
    length = 2 if any(command.startswith(f"{args[0]} ") for command in COMMANDS) else 1
    name = " ".join(args[:length])
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    return name, args[length:]


def parse(name: str, args: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """Parse the arguments of the command `name`. Returns the positional and the keyword arguments
    for the command's function. Raises ConfigError."""
    command, options = COMMANDS[name], options_of(COMMANDS[name].target)
    words: list[Any] = []
    keywords: dict[str, Any] = {}
    job_args: list[str] = []
    left = list(args)
    while left:
        arg = left.pop(0)
        if arg == "--" and command.takes_rest:
            words += [left] if left else []
            break
        if not arg.startswith("--"):
            words.append(arg)
            continue
        typed, has_value, text = arg.removeprefix("--").partition("=")
        key = typed.replace("-", "_")
        if (option := options.get(key)) is not None:
            keywords[key] = _value(typed, option.kind, text if has_value else None, left)
        elif command.job_keys and "." in typed:
            job_args.append(arg)
            if not has_value and left and not left[0].startswith("--"):
                job_args.append(left.pop(0))
        elif "." in typed:
            raise ConfigError(
                f"unknown option `--{typed}`",
                hint=f"`roadtrain {name}` takes no keys of a job: write them into the job file",
            )
        else:
            raise unknown_name("option", f"--{typed}", map(_typed, options))
    _check_words(name, words)
    if command.job_keys:
        job = importlib.import_module("roadtrain.config.job")  # imports pydantic
        keywords["overrides"] = job.parse_overrides(job_args)
    return words, keywords


def _value(key: str, kind: type, text: str | None, left: list[str]) -> Any:
    """Return the value of an option: `text`, or if `text` is None the first item of `left`, which
    is removed."""
    if kind is bool:
        if text:
            raise ConfigError(f"--{key} takes no value, got {text}")
        return True
    if text is None:
        if not left:
            raise ConfigError(f"--{key} needs a value")
        text = left.pop(0)
    try:
        return kind(text)
    except ValueError as cause:
        raise ConfigError(f"--{key}: {text!r} is not a number") from cause


def _check_words(name: str, words: Sequence[Any]) -> None:
    command = COMMANDS[name]
    least = sum(not word.startswith("[") for word in command.words)
    rest_is_missing = command.takes_rest and words and isinstance(words[-1], str)
    if not least <= len(words) <= len(command.words) or rest_is_missing:
        raise ConfigError(
            f"`roadtrain {name}` takes {' '.join(command.words) or 'options only'}, "
            f"got {' '.join(map(str, words)) or 'nothing'}",
            hint=f"see `roadtrain {name} --help`",
        )


def _function_of(target: str) -> ast.FunctionDef:
    """Return the parsed source of a command's function."""
    module, _, name = target.partition(":")
    top = Path(__file__).parents[1]
    if module.startswith("benchmarks."):
        top = _find_benchmarks()
    text = (top / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    # parse the function alone: parsing whole modules would make `roadtrain --help` twice as slow
    found = re.search(rf"^def {name}\(.*?(?=^[\w@]|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, target
    (function,) = ast.parse(found[0]).body
    assert isinstance(function, ast.FunctionDef)
    return function


def summary_of(target: str) -> str:
    """Return the first paragraph of the docstring of a command's function, as a single line."""
    try:
        function = _function_of(target)
    except ConfigError:
        return "Needs a clone of the repository."
    return " ".join((ast.get_docstring(function) or "").partition("\n\n")[0].split())


def options_of(target: str) -> Mapping[str, Option]:
    """Return the options that the docstring of a command's function lists under `Args:`, by
    name."""
    function = _function_of(target)
    annotations = {
        arg.arg: ast.unparse(arg.annotation)
        for arg in (*function.args.args, *function.args.kwonlyargs)
        if arg.annotation
    }
    kinds: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
    _, _, section = (ast.get_docstring(function) or "").partition("Args:\n")
    return {
        key: Option(kinds[annotations[key].removesuffix(" | None")], " ".join(text.split()))
        for key, text in re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", section, re.MULTILINE)
    }


def _find_benchmarks() -> Path:
    """Make the benchmarks importable, and return the clone of the repository that contains them."""
    clone = Path(__file__).parents[2]
    if not (clone / "benchmarks" / "__main__.py").is_file():
        raise ConfigError(
            "the benchmarks are not installed: they are only in roadtrain's repository",
            hint="run this command from a clone",
        )
    if str(clone) not in sys.path:
        sys.path.append(str(clone))
    return clone


def _help() -> str:
    lines = ["Trains models larger than memory.", "", "roadtrain COMMAND ...", ""]
    for title, group in COMMAND_GROUPS.items():
        lines.append(f"{title}:")
        for name, command in group.items():
            first = summary_of(command.target).partition(". ")[0].removesuffix(".")
            lines.append(f"  {' '.join([name, *command.words]):32}{first}")
        lines.append("")
    return "\n".join([*lines, "Run `roadtrain COMMAND --help` for the options of a command."])


def _command_help(name: str) -> str:
    command = COMMANDS[name]
    options = options_of(command.target)
    lines = [
        f"roadtrain {' '.join([name, *command.words])} [OPTIONS]",
        "",
        summary_of(command.target),
    ]
    if options:
        lines += ["", "Options"]
        lines += [f"  {_typed(key) + ' ':24}{option.text}" for key, option in options.items()]
    if command.job_keys:
        lines += ["", "Keys of the job, such as `--run.steps 20`; they override the job file"]
        for key, default, text in importlib.import_module("roadtrain.config.job").all_keys():
            lines.append(f"  --{key + ' ':26}{text}{f' [{default}]' if default else ''}")
    return "\n".join(lines)


def completion(shell: str) -> int:
    """Print a script by which SHELL (bash, zsh or fish) completes commands, options, job keys and
    files.

    `eval "$(roadtrain completion bash)"` in ~/.bashrc, the same with zsh in ~/.zshrc, or `roadtrain
    completion fish | source` in config.fish.
    """
    words: dict[str, dict[str, str]] = {}  # the first word of a command -> words after it
    for name, command in COMMANDS.items():
        first, _, second = name.partition(" ")
        own = words.setdefault(first, {})
        own |= {second: summary_of(command.target)} if second else {}
        with suppress(ConfigError):  # benchmarks are not installed
            own |= {_typed(k): option.text for k, option in options_of(command.target).items()}
        if command.job_keys:
            keys = importlib.import_module("roadtrain.config.job").all_keys()
            own |= {f"--{key}": text for key, _, text in keys}
    if shell in ("bash", "zsh"):
        cases = "\n".join(
            f'      {first}) words="{" ".join(own)}" ;;' for first, own in words.items()
        )
        both = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
        script = Path(__file__).with_name("completion.bash").read_text(encoding="utf-8")
        script = script.replace("@COMMANDS@", " ".join(words)).replace("@CASES@", cases)
        print((both if shell == "zsh" else "") + script)
        return 0
    if shell != "fish":
        raise unknown_name("shell", shell, ("bash", "zsh", "fish"))
    print(f"complete -c roadtrain -n __fish_use_subcommand -f -a {shlex.quote(' '.join(words))}")
    for first, own in words.items():
        for word, text in own.items():
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            inside = f"'__fish_seen_subcommand_from {first}'"
            print(f"complete -c roadtrain -n {inside} {kind} -d {shlex.quote(text)}")
    return 0


def _typed(key: str) -> str:
    return f"--{key.replace('_', '-')}"


if __name__ == "__main__":
    sys.exit(main())
