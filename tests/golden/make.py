"""Makes what is kept in `kept/` anew: `python tests/golden/make.py [PART ...]`, PART a function
below.

When one may: never to make a test pass. A kept value says what roadtrain gave before a change that
was to change nothing. It is made anew only where a result was meant to change, with a note in
docs/decisions that says which and why, and then only that part. Kept stores and runs are never
replaced, since users have such: a new format gets a new entry beside the old ones.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import cases
import fixtures
import surface
import torch

HOME = Path("/tmp/roadtrain-golden")  # stores tell where they were made: nothing of this machine


def plain() -> None:
    """Losses of torch alone, that say whether a machine's arithmetic is that of the kept bits."""
    variants = {case.variant for case in [*cases.LOSSES.values(), *cases.STORES.values()]}
    fixtures.save(
        "plain.json", {variant.name: list(cases.plain_losses(variant)) for variant in variants}
    )


def losses() -> None:
    kept: dict[str, object] = {}
    in_ram: dict[cases.Variant, object] = {}
    for name, case in cases.LOSSES.items():
        with tempfile.TemporaryDirectory() as home:
            kept[name] = found = cases.train(case, Path(home), 0, cases.STEPS)
            again = cases.train(case, Path(home) / "again", 0, cases.STEPS)
        assert found == again, f"{name}: a run does not repeat its bits"
        if case.exact:
            assert in_ram.setdefault(case.variant, found) == found, (
                f"{name}: not the bits of another placement"
            )
    fixtures.save("losses.json", kept)


def stores() -> None:
    """Each trained STORED steps; what they hold, and three more steps."""
    shutil.rmtree(HOME, ignore_errors=True)
    kept = {}
    for name, case in cases.STORES.items():
        home = HOME / name
        home.mkdir(parents=True)
        if name == "first-edition":
            with surface.states_by_torch_save():
                cases.train(case, home, 0, cases.STORED)
            surface.without_checksums(home / "store0")
        else:
            cases.train(case, home, 0, cases.STORED)
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(home, copy, dirs_exist_ok=True)
            with cases.placed(case, Path(copy)) as (model, optimizer, _):
                held = cases.contents(case, model, optimizer)
            kept[name] = {
                "held": held,
                **cases.train(case, Path(copy), cases.STORED, cases.STORED + 3),
            }
    fixtures.pack("stores.tar.xz", HOME)
    fixtures.save("stores.json", kept)
    shutil.rmtree(HOME)


PARTS: dict[str, Callable[[], None]] = {part.__name__: part for part in (plain, losses, stores)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in sys.argv[1:] or PARTS:
        print(part, flush=True)
        PARTS[part]()
