"""`python -m benchmarks NAME`: run a benchmark that compares roadtrain with another library, and
print a table of results.

The table shows whether each result meets its goal. If a goal is missed, the exit code is still 0.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmarks
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.options.names import unknown_name


def names() -> list[str]:
    """List the names of all benchmarks."""
    return sorted(modules())


def modules() -> dict[str, str]:
    """Map each benchmark to its module, without importing it: a file SUBJECT/NAME.py that defines a
    function `run`.
    """
    files = Path(benchmarks.__file__).parent.glob("*/*.py")
    return {
        path.stem: f"benchmarks.{path.parent.name}.{path.stem}"
        for path in files
        if re.search(r"^def run\(.*\) -> Report:", path.read_text(), re.MULTILINE)
    }


def items_of(name: str) -> list[str]:
    """List the items of a benchmark: parts that can run alone. Most benchmarks have none."""
    return list(getattr(importlib.import_module(modules()[name]), "ITEMS", ()))


def run(name: str, json: str | None = None, quick: bool = False, only: Sequence[str] = ()) -> None:
    """Run the benchmark NAME and print its table of results.

    Args:
        json: file to which the results are also written, as JSON
        quick: use small sizes, only to check that the benchmark works
        only: names of the items (parts of the benchmark) to run; if empty, all run

    Raises:
        ConfigError: the benchmark or an item does not exist
    """
    existing = modules()
    if name not in existing:
        raise unknown_name("benchmark", name, sorted(existing))
    module = importlib.import_module(existing[name])
    items = items_of(name)
    if only and not items:
        raise ConfigError(
            f"benchmark {name} has no items", hint="run the whole benchmark, without --only"
        )
    for item in only:
        if item not in items:
            raise unknown_name("item", item, items)
    report = module.run(quick=quick, **({"only": only} if only else {}))
    report.print()
    if json is not None:
        Path(json).write_text(report.to_json() + "\n")


def bench(name: str, json: str | None = None, quick: bool = False) -> None:
    """Run a benchmark and print its table of results. Deprecated: use `python -m benchmarks NAME`.

    Args:
        json: also write the results to this file
        quick: use small sizes, only to check that the benchmark works
    """
    print("roadtrain bench is deprecated: use `python -m benchmarks`", file=sys.stderr)
    run(name, json, quick)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("name", help=f"one of {', '.join(names())}")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, only to check that it runs"
    )
    parser.add_argument(
        "--only", metavar="ITEM,..", default="", help="run only these items of the benchmark"
    )
    parser.add_argument("--list", action="store_true", help="print the benchmark's items, and end")
    args = parser.parse_args(argv)
    try:
        if args.list:
            if args.name not in names():
                raise unknown_name("benchmark", args.name, names())
            print(*items_of(args.name) or ["no items"], sep="\n")
            return 0
        run(args.name, args.json, args.quick, [item for item in args.only.split(",") if item])
    except RoadtrainError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
