"""Generate the kept values in `kept/` again: `python tests/golden/make.py [PART ...]`, where PART
names a function below.

Never do this to make a test pass. A kept value records the result before a change that was to
change nothing. Generate a part again only if its result was meant to change, with a note in
docs/decisions that says which and why. Kept stores and runs are never replaced, since users have
such stores: a new format gets a new entry beside the old ones.
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
import workers

HOME = Path("/tmp/roadtrain-golden")  # stores record their path, which must not name this machine


def plain() -> None:
    """Losses of plain torch, which show whether a machine's arithmetic is that of the kept bits."""
    variants = {case.variant for case in [*cases.LOSSES.values(), *cases.STORES.values()]}
    kept = {variant.name: list(cases.plain_losses(variant)) for variant in variants}
    fixtures.save("plain.json", kept | {"job": list(cases.plain_job_losses())})


def losses() -> None:
    kept: dict[str, object] = {}
    in_ram: dict[cases.Variant, object] = {}
    for name, case in cases.LOSSES.items():
        with tempfile.TemporaryDirectory() as home:
            kept[name] = found = cases.train(case, Path(home), 0, cases.STEPS)
            again = cases.train(case, Path(home) / "again", 0, cases.STEPS)
        assert found == again, f"{name}: a repeated run gave other bits"
        if case.exact:
            assert in_ram.setdefault(case.variant, found) == found, (
                f"{name}: other bits than another placement"
            )
    fixtures.save("losses.json", kept)


def two_workers() -> None:
    with tempfile.TemporaryDirectory() as home:
        fixtures.save("workers.json", workers.run(Path(home)))


def stores() -> None:
    """Stores trained for STORED steps, their contents, and the results of three more steps."""
    shutil.rmtree(HOME, ignore_errors=True)
    kept = {}
    for name, case in cases.STORES.items():
        home = HOME / name
        home.mkdir(parents=True)
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


def runs() -> None:
    """Run directories of `roadtrain train`: one on files and one with its state on two servers."""
    shutil.rmtree(HOME, ignore_errors=True)
    (HOME / "files").mkdir(parents=True)
    (HOME / "served").mkdir()
    kept = {}
    for name in ("files", "served"):
        home = HOME / name
        (home / "text.txt").write_text(cases.TEXT)
        (home / "job.toml").write_text(cases.JOB)
        cases.train_job(home, 3)
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(home, copy, dirs_exist_ok=True)
            kept[name] = cases.exported(Path(copy))
            lines = cases.train_job(Path(copy), 6)
            kept[name] |= {"lines": [cases.lasting(line) for line in lines]}
            kept[name] |= {
                "types": [cases.types_of(line) for line in lines],
                "after": cases.exported(Path(copy)),
            }
    kept["status"] = cases.at(HOME / "files", "status", "run")
    fixtures.pack("runs.tar.xz", HOME)
    fixtures.save("runs.json", kept)
    shutil.rmtree(HOME)


def command_line() -> None:
    """The set of options of every command."""
    kept = {}
    for name in surface.command_names():
        code, text = surface.command(*name.split(), "--help")
        assert code == 0, name
        kept[name] = sorted(surface.options_in(text) - {"--help"})
    fixtures.save("options.json", kept)


def job_keys() -> None:
    kept = {key: fixtures.without_machine(text) for key, text in surface.job_defaults().items()}
    with tempfile.TemporaryDirectory() as home:
        path = Path(home, "job.toml")
        path.write_text(fixtures.job_with(cases.JOB_VALUES))
        tree = surface.job_of(path)
    fixtures.save("job.json", {"defaults": kept, "tree": tree, "place": surface.place_options()})


def frames() -> None:
    headers, besides = {}, {}
    for name, kind in surface.kinds().items():
        values = fixtures.example(surface.header_type(kind), [0])
        headers[name] = {"kind": kind, "values": values, "hex": surface.encoded(values).hex()}
    for name, values in cases.BESIDES.items():
        besides[name] = {"values": fixtures.plain(values), "hex": surface.encoded(values).hex()}
    messages = {
        name: [kind, raw.hex(), b"".join(map(bytes, parts)).hex()]
        for name, (kind, raw, parts) in surface.messages().items()
    }
    fixtures.save(
        "frames.json",
        {
            "headers": headers,
            "besides": besides,
            "heads": surface.heads(),
            "handshake": surface.handshake(),
        },
    )
    fixtures.save_packed("messages.json.gz", messages)


def sums() -> None:
    fixtures.save_packed("sums.json.gz", {"summed": cases.summed(), "codecs": cases.codecs()})


def order() -> None:
    """Actions of servers on each chunk, in order, in the real run and the simulation."""
    kept = {name: cases.real_order(name) for name in cases.ORDERS}
    fixtures.save("order.json", kept)
    for name in cases.SIMULATED_ORDERS:
        (fixtures.KEPT / f"order-{name}.txt").write_text(cases.simulated_order(name))


def simulated() -> None:
    kept = {" ".join(words): cases.simulated(words) for words in cases.simulations()}
    kept |= {paper: cases.reproduced(paper) for paper in ("byteps", "holmes")}
    fixtures.save_packed("simulated.json.gz", kept)


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part
    for part in (
        plain,
        losses,
        two_workers,
        stores,
        runs,
        command_line,
        job_keys,
        frames,
        sums,
        order,
        simulated,
    )
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in sys.argv[1:] or PARTS:
        print(part, flush=True)
        PARTS[part]()
