"""`python -m benchmarks NAME`: run a benchmark beside its peer and print a table of results.

A missed goal is printed, and is not an error.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

import benchmarks
from roadtrain.errors import ConfigError, RoadtrainError
from roadtrain.options.names import unknown_name


def names() -> list[str]:
    """List the modules of this package that define `run`. Reads the modules' source, because
    importing all of them takes seconds.
    """
    folder = Path(benchmarks.__file__).parent
    found = (m.name for m in pkgutil.iter_modules([str(folder)]) if not m.name.startswith("_"))
    return [name for name in found if "\ndef run(" in (folder / f"{name}.py").read_text()]


def run(name: str, json: str | None = None, quick: bool = False, only: Sequence[str] = ()) -> None:
    """Run benchmarks.NAME and print its table.

    Args:
        json: also write the figures to this file
        only: run only these items of the benchmark

    Raises:
        ConfigError: the benchmark or an item does not exist
    """
    existing = names()
    if name not in existing:
        raise unknown_name("benchmark", name, existing)
    module = importlib.import_module(f"benchmarks.{name}")
    items = list(getattr(module, "ITEMS", ()))
    if only and not items:
        raise ConfigError(f"benchmark {name} has no items", hint="leave --only out")
    for item in only:
        if item not in items:
            raise unknown_name("item", item, items)
    report = module.run(quick=quick, **({"only": only} if only else {}))
    report.print()
    if json is not None:
        Path(json).write_text(report.to_json() + "\n")


def bench(name: str, json: str | None = None, quick: bool = False) -> None:
    """Run a benchmark beside its peer. Deprecated: use `python -m benchmarks NAME`.

    Args:
        json: also write the figures to this file
        quick: use small sizes, to check that the benchmark runs at all
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
    args = parser.parse_args(argv)
    try:
        run(args.name, args.json, args.quick, [item for item in args.only.split(",") if item])
    except RoadtrainError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
