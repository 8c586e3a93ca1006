"""Mutation testing: change one operator, number or decorator at a time, and run the module's tests.

`make mutants` runs a fixed sample of such mutants, two at a time, each on a copy of the tree and in
a forked process that has imported torch already. cosmic-ray makes the mutants; targets.toml names
each target's files and tests; kept.json lists the survivors with their reasons and the kill rate,
which may not fall. Results lie in build/mutants, so a stopped run goes on where it was.

The sample consists of the places with the lowest hash of seed, file, line and operator: editing a
file changes the sample only where the text changed.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import difflib
import hashlib
import importlib
import json
import os
import py_compile
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TextIO

import hypothesis
import numba  # noqa: F401  (imported before the fork: each mutant's tests need it)
import pytest
import torch  # noqa: F401
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[2]
TARGETS = tomllib.loads((ROOT / "tests/mutants/targets.toml").read_text())
KEPT = ROOT / "tests/mutants/kept.json"
RESULTS = ROOT / "build/mutants/results.jsonl"
SOURCES = ("src", ".", "plugins/rdma/src", "plugins/switch_offload/src")
SEED, LEAST_RATE, GIB = 33, 0.85, 1 << 30
# `is` in place of `==`: whether they differ is up to the interpreter.
IDENTITY = tuple(
    f"{old}_{new}" for old in ("Eq", "NotEq", "Lt", "LtE", "Gt", "GtE") for new in ("Is", "IsNot")
)


@dataclass(frozen=True)
class Mutant:
    """One changed line. `before` and `after` are its text without indentation."""

    target: str
    file: str
    line: int
    before: str
    after: str
    source: str

    @property
    def key(self) -> str:
        """Identity of the mutant, whatever its line number."""
        return f"{self.file}: {self.before} -> {self.after}"


def digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def what_runs(source: str) -> str | None:
    """Dump `source` without types and asserted conditions, which are checks themselves.

    None if `source` is not Python.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            node.value = None
        elif isinstance(node, ast.AnnAssign | ast.arg):
            node.annotation = ast.Name("Any")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.Assert):
            node.test = ast.Constant(True)
    return ast.dump(tree)


def places(file: str) -> Iterator[tuple[str, str, str, int]]:
    """Yield rank, file, operator and occurrence of the lowest-ranked mutant of each place."""
    text = (ROOT / file).read_text()
    lines, leaves = text.splitlines(), ("name", "newline", "string")
    nodes = [node for node in ast_nodes(get_ast(text)) if node.type not in leaves]
    best: dict[object, tuple[str, str, str, int]] = {}
    equal: Counter[tuple[object, ...]] = Counter()
    for name in operator_names():
        kind = get_operator(name)
        if kind.arguments() or name.endswith(IDENTITY):
            continue
        operator = kind()
        positions = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, place in enumerate(positions):
            (row, column), _ = place
            words = (file, lines[row - 1].strip(), column, name)
            equal[words] += 1
            ranked = (digest(SEED, *words, equal[words]), file, name, occurrence)
            best[place] = min(best.get(place, ranked), ranked)
    yield from best.values()


def mutant_at(target: str, file: str, operator: str, occurrence: int) -> Mutant | None:
    """Make a mutant, or None where the program that runs stays the same."""
    text = (ROOT / file).read_text()
    source = mutate_code(text, get_operator(operator)(), occurrence)
    if source is None or what_runs(source) in (None, what_runs(text)):
        return None
    old, new = text.splitlines(), source.splitlines()
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    _, a, b, c, d = next(change for change in changes if change[0] != "equal")
    before, after = (" ".join(map(str.strip, part)) for part in (old[a:b], new[c:d]))
    return Mutant(target, file, a + 1, before, after, source)


def sample(target: str) -> list[Mutant]:
    """The sampled mutants of a target, in the order of its files and lines."""
    files = {str(f.relative_to(ROOT)) for name in TARGETS[target]["files"] for f in ROOT.glob(name)}
    ranked = sorted(place for file in files for place in places(file))
    mutants = (mutant_at(target, *place) for _, *place in ranked)
    chosen = islice((mutant for mutant in mutants if mutant is not None), TARGETS[target]["sample"])
    return sorted(chosen, key=lambda mutant: (mutant.file, mutant.line))


def tests_of(target: str) -> list[str]:
    """Paths of the target's test files, which are named without their folders."""
    found = []
    for name in TARGETS[target]["tests"]:
        file, *rest = name.split("::")
        (path,) = (ROOT / "tests").rglob(file)
        found.append("::".join([str(path.relative_to(ROOT)), *rest]))
    return found


@cache
def state_of(target: str) -> str:
    """Digest of the target's files and tests: results hold while it stays the same."""
    files = {file for name in TARGETS[target]["files"] for file in ROOT.glob(name)}
    files |= {ROOT / test.partition("::")[0] for test in tests_of(target)}
    return digest(
        sorted(tests_of(target)),
        TARGETS[target].get("skip"),
        *(file.read_text() for file in sorted(files)),
    )


def copy_tree(folder: Path) -> None:
    """Copy the tree, and compile it so that a changed file is never taken for its old bytecode."""
    command = ["git", "-C", str(ROOT), "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    by_content = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(folder / "src", quiet=1, invalidation_mode=by_content)


class FirstFailure:
    """Writes the name of the first test that fails, and the modules that the tests import."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not (self.folder / "failed").exists():
            (self.folder / "failed").write_text(report.nodeid.split("[")[0])

    def pytest_sessionfinish(self) -> None:
        files = {name: str(getattr(m, "__file__", "")) for name, m in [*sys.modules.items()]}
        outside = "\n".join(name for name, file in files.items() if "site-packages" in file)
        (self.folder / "imported").write_text(outside)


def run_in_child(folder: Path, target: str, limit_s: int) -> None:
    """Run the tests of a copied tree until the first failure, then end this process."""
    code, tests = 99, tests_of(target)
    try:
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # a mutant may ask for any number of seconds and bytes
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
        resource.setrlimit(resource.RLIMIT_FSIZE, (GIB, GIB))
        resource.setrlimit(resource.RLIMIT_DATA, (8 * GIB, 8 * GIB))
        os.chdir(folder)
        sys.dont_write_bytecode = False
        sys.path[:0] = [str((folder / source).resolve()) for source in SOURCES]
        os.environ |= {"PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
        without_shrinking = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile(
            "mutants", derandomize=True, database=None, deadline=None, phases=without_shrinking
        )
        options = "-x -p no:cacheprovider --hypothesis-profile=mutants --timeout=120"
        # hypothesis was imported before the fork
        options += " -W ignore::pytest.PytestAssertRewriteWarning"
        if "skip" in TARGETS[target]:
            tests = [*tests, f"-k=not ({TARGETS[target]['skip']})"]
        options += f" --basetemp={folder / 'tmp'}"
        code = int(pytest.main([*options.split(), *tests], plugins=[FirstFailure(folder)]))
    except BaseException:  # the process ends here, whatever happens
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


class Trees:
    """Two copies of the tree, each of which runs the tests of one mutant at a time."""

    def __init__(self, parent: Path, log: TextIO, known: dict[str, dict], until: float) -> None:
        self.free, self.busy = [parent / "1", parent / "2"], {}
        self.log, self.known, self.until = log, known, until

    def start(self, target: str, mutant: Mutant | None, limit_s: int) -> None:
        folder = self.free.pop()
        if not folder.exists():
            copy_tree(folder)
        (folder / "failed").unlink(missing_ok=True)
        if mutant is not None:
            (folder / mutant.file).write_text(mutant.source)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            run_in_child(folder, target, limit_s)
        self.busy[pid] = folder, mutant

    def wait(self) -> tuple[Path, Mutant | None, str | None, float]:
        """Wait for any of the runs. Returns folder, mutant, what failed, and seconds of CPU."""
        pid, status, used = os.wait4(-1, 0)
        folder, mutant = self.busy.pop(pid)
        self.free.append(folder)
        code, killer = os.waitstatus_to_exitcode(status), None
        if (folder / "failed").exists():
            killer = (folder / "failed").read_text()
        elif code < 0:
            killer = "the limit of CPU time"
        elif code > 0:
            last = (folder / "output").read_text().strip().rpartition("\n")[2]
            killer = f"an error outside tests: {last}"
        return folder, mutant, killer, round(used.ru_utime + used.ru_stime, 2)

    def finish(self) -> None:
        """Wait for any of the mutants, and note its result."""
        folder, mutant, killer, cpu_s = self.wait()
        shutil.copy2(ROOT / mutant.file, folder / mutant.file)
        row = {"key": result_key(mutant), "killed_by": killer, "cpu_s": cpu_s}
        self.known[row["key"]] = row
        print(json.dumps(row), file=self.log, flush=True)
        where = f"{mutant.file}:{mutant.line} {mutant.before} -> {mutant.after}"
        print(f"{cpu_s:6.1f} s  {killer or 'SURVIVED'}  {where}", flush=True)

    def baseline(self, target: str) -> int:
        """Run the tests without a mutant, and return the limit of CPU seconds with one."""
        while self.busy:
            self.finish()
        self.start(target, None, 600)
        folder, _, killer, cpu_s = self.wait()
        if killer:
            raise SystemExit(f"{killer} fails without a mutant\n{(folder / 'output').read_text()}")
        print(f"{target}: {cpu_s:.1f} s of CPU time without a mutant", flush=True)
        # modules of other packages that the tests use are imported before the next fork
        for name in (folder / "imported").read_text().split():
            with contextlib.suppress(ImportError), warnings.catch_warnings(action="ignore"):
                importlib.import_module(name)
        return int(3 * cpu_s + 15)


def run(targets: list[str], known: dict[str, dict], minutes: float) -> list[Mutant]:
    """Run the sampled mutants whose results are not known, and add them to `known` and to RESULTS.

    Returns all sampled mutants of the targets.
    """
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as parent, RESULTS.open("a") as log:
        trees = Trees(Path(parent), log, known, time.monotonic() + 60 * minutes)
        mutants = [mutant for target in targets for mutant in run_target(trees, target)]
        while trees.busy:
            trees.finish()
    return mutants


def run_target(trees: Trees, target: str) -> list[Mutant]:
    mutants = sample(target)
    todo = [mutant for mutant in mutants if result_key(mutant) not in trees.known]
    if todo and time.monotonic() < trees.until:
        limit_s = trees.baseline(target)
    for mutant in todo:
        if time.monotonic() > trees.until:
            break
        if not trees.free:
            trees.finish()
        trees.start(target, mutant, limit_s)
    return mutants


def result_key(mutant: Mutant) -> str:
    return digest(mutant.source, state_of(mutant.target))[:20]


def judged(mutants: list[Mutant], known: dict[str, dict], kept: dict) -> Iterator[dict]:
    """Yield a row of kept.json for each mutant that survives, or did so in an earlier run."""
    mutants = [mutant for mutant in mutants if result_key(mutant) in known]
    rows = {f"{row['file']}: {row['before']} -> {row['after']}": row for row in kept["survivors"]}
    for mutant in mutants:
        killer, row = known[result_key(mutant)]["killed_by"], rows.get(mutant.key)
        if killer and row is None:
            continue
        words = {
            name: getattr(mutant, name) for name in ("target", "file", "line", "before", "after")
        }
        if killer:
            yield words | {"killed_by": killer}
        else:
            old = row or {}
            yield words | {name: old.get(name, "") for name in ("equivalent", "reason")}


def summarize(mutants: list[Mutant], known: dict[str, dict], rows: list[dict]) -> dict[str, dict]:
    """Count and print the results of each target and of all."""
    table: dict[str, dict] = {}
    for target in [*dict.fromkeys(mutant.target for mutant in mutants), "all"]:
        here = [mutant for mutant in mutants if target in (mutant.target, "all")]
        results = [known[key] for key in map(result_key, here) if key in known]
        killed = sum(result["killed_by"] is not None for result in results)
        equivalent = sum(
            bool(row.get("equivalent")) for row in rows if target in (row["target"], "all")
        )
        table[target] = {
            "sampled": len(here),
            "killed": killed,
            "survived": len(results) - killed,
            "equivalent": equivalent,
            "left": len(here) - len(results),
            "rate": round(killed / max(1, len(results) - equivalent), 4),
            "cpu_s": round(sum(result["cpu_s"] for result in results)),
        }
        print(f"{target:20}", *(f"{name} {value:<6}" for name, value in table[target].items()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="run one target and leave kept.json as it is")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no mutant after these")
    arguments = parser.parse_args()
    only = arguments.only
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {"rate": LEAST_RATE, "survivors": []}
    rows = map(json.loads, RESULTS.read_text().splitlines() if RESULTS.exists() else [])
    known = {row["key"]: row for row in rows}
    mutants = run([only] if only else [*TARGETS], known, arguments.minutes)
    survivors = list(judged(mutants, known, kept))
    table = summarize(mutants, known, survivors)
    if only:
        return
    rate, least = table["all"]["rate"], max(LEAST_RATE, kept["rate"])
    # the required rate grows only when no mutant is left to run
    required = least if table["all"]["left"] else max(least, rate)
    new = {"rate": required, "targets": table, "survivors": survivors}
    KEPT.write_text(json.dumps(new, indent=1) + "\n")
    if rate < least:
        found = f"{rate:.2%} of the mutants were killed, {least:.2%} are required"
        sys.exit(f"{found}\nhint: add tests that kill those in {KEPT} without `killed_by`")


if __name__ == "__main__":
    main()
