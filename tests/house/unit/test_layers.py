"""The rooms of the package (docs/design.md): a room imports only rooms listed above it. The tests
read the source and import nothing."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from pathlib import Path

import pytest

SRC = Path(__file__).parents[3] / "src" / "roadtrain"
# In the order of the design: a room imports only rooms of lines above its own. Rooms on the same
# line do not import each other; single files on the same line may.
ORDER = (
    ("errors", "units", "chunks", "retry", "environment"),
    ("options",),
    ("kernels",),
    ("device",),
    ("transport",),
    ("streaming",),
    ("storage",),
    ("servers",),
    ("placement",),
    ("relay", "switch", "sums", "stages"),
    ("config",),
    ("training", "integrations"),
    ("simulator",),
    ("lab",),
    ("planner",),
    ("launch",),
    ("doctor",),
    ("dashboard",),
    ("cli", "hvd", "__main__"),
    ("__init__",),
)
FLOORS = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms}
LOOSE_MODULES = 9
PURE = ("options", "config", "simulator")
NEVER_IN_PURE = {"torch", "socket", "threading", "asyncio", "time"}
FILE_LINES = 585  # after formatting; the aim is 500, and this limit may only fall
FORBIDDEN = ("shard", "bucket", "partition", "keeper")
# File -> words allowed there, with the reason.
EXCEPTED = {
    "integrations/ddp.py": {"bucket"},  # torch's own name: GradBucket
    "integrations/fsdp.py": {"shard"},  # torch's own name: _fully_shard
    "stages/tensor_styles.py": {"shard"},  # torch's own name of a placement
    # torch's words for the unit that its distributed data parallel sums and for the parts into
    # which ZeRO cuts state; here they mean the same
    "stages/bucket_state.py": {"bucket", "shard"},
    "stages/data_group.py": {"bucket"},
    "stages/flat_layout.py": {"bucket"},
    "stages/forward_waits.py": {"bucket"},
    "stages/gradient_hooks.py": {"bucket"},
    "stages/sharded_optimizer.py": {"bucket", "shard"},
}
# The module and its names, wherever they are used.
EXCEPTED_NAMES = {"sharded_optimizer", "ShardedOptimizer", "ShardedOptions", "bucket_bytes"}
STR_METHODS = {"partition", "rpartition"}

FILES = sorted(SRC.rglob("*.py"))
TWICE = {"route": "relay/ and switch/ each provide one at the entry point roadtrain.routes"}
MODULES = {
    ".".join(("roadtrain", *path.relative_to(SRC).with_suffix("").parts)): path for path in FILES
}


def room_of(path: Path) -> str:
    return path.relative_to(SRC).with_suffix("").parts[0]


@functools.cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in FILES]


def imports_of(tree: ast.AST, *, types_too: bool = False) -> list[tuple[str, int]]:
    """(module, line) of all imports, those under `if TYPE_CHECKING` only with `types_too`;
    `from roadtrain.x import y` counts x.y if a module."""
    skip = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        and not types_too
        for inner in ast.walk(node)
    }
    out = []
    for node in ast.walk(tree):
        if id(node) in skip:
            continue
        if isinstance(node, ast.Import):
            out += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = whole in MODULES or (SRC / alias.name).is_dir()
                out.append((whole if is_module else str(node.module), node.lineno))
    return out


def test_every_room_has_a_floor() -> None:
    assert {room_of(path) for path in FILES} <= set(FLOORS)


def test_few_modules_lie_outside_a_room() -> None:
    assert len(list(SRC.glob("*.py"))) <= LOOSE_MODULES


@pytest.mark.slow
def test_imports_only_go_up_the_list() -> None:
    """TYPE_CHECKING imports count as well."""
    wrong = []
    for path, tree in trees():
        room = room_of(path)
        for name, line in imports_of(tree, types_too=room != "__init__"):
            if not name.startswith("roadtrain."):
                continue
            target = name.split(".")[1]
            single = (SRC / f"{room}.py").exists() and (SRC / f"{target}.py").exists()
            same = FLOORS[room] == FLOORS[target] and (room == target or single)
            if not same and FLOORS[target] >= FLOORS[room]:
                wrong.append(f"{path.relative_to(SRC)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_no_import_cycles() -> None:
    """TYPE_CHECKING imports count as well."""
    edges: dict[str, set[str]] = {}
    for path, tree in trees():
        name = next(n for n, p in MODULES.items() if p == path)
        edges[name] = {
            n if n in MODULES else n.rpartition(".")[0]
            for n, _ in imports_of(tree, types_too=name != "roadtrain.__init__")
        } & set(MODULES)
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for other in edges[name] - {name}:
                visit(other, (*trail, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_protocols_import_no_torch_sockets_threads_or_clock() -> None:
    wrong = [
        f"{path.relative_to(SRC)}:{line} imports {name}"
        for path, tree in trees()
        if room_of(path) in PURE or "protocol" in path.parts
        for name, line in imports_of(tree)
        if name.split(".")[0] in NEVER_IN_PURE
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_a_class_name_exists_once() -> None:
    where: dict[str, list[str]] = {}
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(f"{path.relative_to(SRC)}:{node.lineno}")
    assert not {name: places for name, places in where.items() if len(places) > 1}


def test_a_module_name_exists_once() -> None:
    """Except X/protocol/NAME.py beside X/NAME.py, and names listed with a reason in TWICE."""
    where: dict[str, set[str]] = {}
    for path in FILES:
        home = path.parent.parent if path.parent.name == "protocol" else path.parent
        where.setdefault(path.stem, set()).add(str(home.relative_to(SRC)))
    found = {name for name, homes in where.items() if len(homes) > 1 and name != "__init__"}
    assert found == set(TWICE)


@pytest.mark.slow
def test_no_import_inside_a_function() -> None:
    wrong = [
        f"{path.relative_to(SRC)}:{inner.lineno}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
@pytest.mark.slow
def test_no_file_is_too_long(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= FILE_LINES
    assert not text or ast.get_docstring(ast.parse(text)), "a file opens with what it does"


@pytest.mark.slow
def test_competing_words_are_not_used() -> None:
    """`block`, `chunk`, `server` and so on have one meaning each; these words compete with them."""
    wrong = []
    for path in FILES:
        allowed = EXCEPTED.get(str(path.relative_to(SRC)), set())
        before = ""
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            excepted = token.string in EXCEPTED_NAMES or (
                before == "." and token.string in STR_METHODS
            )
            if token.type == tokenize.NAME and not excepted:
                found = [w for w in FORBIDDEN if w in token.string.lower() and w not in allowed]
                wrong += [
                    f"{path.relative_to(SRC)}:{token.start[0]}: {token.string}" for _ in found
                ]
            before = token.string
    assert not wrong, "\n".join(wrong)
