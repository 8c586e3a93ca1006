"""`python -m benchmarks NAME`: runs one benchmark beside its peer and prints its table.

A missed goal is printed; it is not an error.
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
    """The modules here that have a `run`, read from their text: importing all takes seconds."""
    folder = Path(benchmarks.__file__).parent
    found = (m.name for m in pkgutil.iter_modules([str(folder)]) if not m.name.startswith("_"))
    return [name for name in found if "\ndef run(" in (folder / f"{name}.py").read_text()]


def run(name: str, json: str | None = None, quick: bool = False, only: Sequence[str] = ()) -> None:
    """Run benchmarks.NAME; `json`: the file that its figures go to; `only`: items of it. Raises
    ConfigError."""
    known = names()
    if name not in known:
        raise unknown_name("benchmark", name, known)
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
    """Run a benchmark beside its peer: the older name of `python -m benchmarks NAME`.

    Args:
        json: also write the figures to this file
        quick: small sizes: does it run at all
    """
    print("roadtrain bench: is `python -m benchmarks` now", file=sys.stderr)
    run(name, json, quick)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("name", help=f"one of {', '.join(names())}")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all")
    parser.add_argument(
        "--only", metavar="ITEM,..", default="", help="items of it, where it has some"
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
