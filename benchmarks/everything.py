"""Run every item of every benchmark, one after another, on a machine that does nothing else.

    python -m benchmarks.everything [--date DATE] [--limit-s SECONDS] [--quick] [NAME ...]

Results go to benchmarks/results/NAME-DATE.json, or NAME-ITEM-DATE.json for an item, and output to
build/bench/. Items whose file exists are skipped: the same command, with the same date, continues
after an interruption. With --quick, results go to build/bench/ too. The exit code is 1 if an item
failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from benchmarks.__main__ import items_of, modules
from roadtrain.errors import RoadtrainError
from roadtrain.options.names import unknown_name

HERE = Path(__file__).parent
RESULTS, LOGS = HERE / "results", HERE.parent / "build" / "bench"
# Commands of roadtrain that are benchmarks too: arguments and the option for small sizes.
COMMANDS = {
    "soak": (("soak", "--seed", "7"), ("--faults", "4")),
    "soak-sums": (("soak", "--sums"), ("--faults", "4")),
    "reproduce": (("reproduce",), ()),
}


END_S = 180.0  # for an item that is interrupted, to clean up


class Job(NamedTuple):
    name: str
    command: list[str]


def jobs(names: Sequence[str], quick: bool) -> list[Job]:
    """List the commands of the named benchmarks, or of all if `names` is empty."""
    existing = [*sorted(modules()), *COMMANDS]
    found = []
    for name in names or existing:
        if name not in existing:
            raise unknown_name("benchmark", name, existing)
        if name in COMMANDS:
            words, small = COMMANDS[name]
            found.append(Job(name, ["roadtrain.cli", *words, *(small if quick else ())]))
            continue
        words = ("benchmarks", name, *(["--quick"] if quick else []))
        items = items_of(name)
        found += [Job(f"{name}-{item}", [*words, "--only", item]) for item in items]
        if not items:
            found.append(Job(name, [*words]))
    return found


def run_jobs(todo: Sequence[Job], results: Path, day: str, limit_s: float) -> list[str]:
    """Run the jobs whose result file does not exist, and return the names of those that failed.

    Args:
        results: folder of the result files
        day: date in the names of the files
        limit_s: seconds after which a job is killed, with all processes that it started
    """
    failed = []
    for number, job in enumerate(todo, 1):
        file = results / f"{job.name}-{day}.json"
        if file.exists():
            outcome = "exists"
        else:
            begin, load = monotonic(), os.getloadavg()[0]
            outcome = run_job(job, file, limit_s)
            outcome += f" after {monotonic() - begin:.0f} s (load before {load:.1f})"
            if not file.exists():
                failed.append(job.name)
        print(f"{number}/{len(todo)} {job.name}: {outcome}", flush=True)
    return failed


def run_job(job: Job, file: Path, limit_s: float) -> str:
    """Run a job. The result file appears only when the job has ended well."""
    LOGS.mkdir(parents=True, exist_ok=True)
    part, log = file.with_suffix(".part"), LOGS / f"{job.name}.log"
    command = [sys.executable, "-m", *job.command, "--json", str(part)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)  # it removes its networks and loop devices
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code == 0 and part.exists():
        part.rename(file)
        return "done"
    part.unlink(missing_ok=True)
    ended = f"killed at the limit of {limit_s:.0f} s" if code is None else f"exit code {code}"
    return f"FAILED, {ended}, see {log}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.everything",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these benchmarks")
    parser.add_argument("--date", default=date.today().isoformat(), help="of the files' names")
    parser.add_argument("--limit-s", type=float, default=3600, help="seconds for an item")
    parser.add_argument("--quick", action="store_true", help="small sizes: check that all run")
    args = parser.parse_args(argv)
    for end in (signal.SIGTERM, signal.SIGINT):  # `&` in a script makes processes ignore SIGINT
        signal.signal(end, signal.default_int_handler)  # an item's processes end with it
    results = LOGS if args.quick else RESULTS
    results.mkdir(parents=True, exist_ok=True)
    try:
        failed = run_jobs(jobs(args.names, args.quick), results, args.date, args.limit_s)
    except RoadtrainError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command with the same --date continues", file=sys.stderr)
        return 130
    print(f"failed: {', '.join(failed)}" if failed else "all done", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
