"""Imports run one way: no two modules import each other, not even in a function or under ``TYPE_CHECKING``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("pipeline", "calibrators", "plugins")


def imports(files: dict[str, Path]) -> dict[str, set[str]]:
    """Module to the modules among ``files`` that it names in an import statement, wherever that stands."""
    graph = {}
    for name, path in files.items():
        found = {_module(dotted, files) for dotted in _named(path, name)}
        graph[name] = {module for module in found if module is not None and module != name}
    return graph


def _named(path: Path, name: str) -> Iterator[str]:
    """What the import statements name: ``from a import b`` is ``a.b``, a module of ``a`` or something in that."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            origin = ".".join([*above, node.module] if node.module else above)
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def _module(dotted: str, files: dict[str, Path]) -> str | None:
    parent = dotted.rpartition(".")[0]
    return dotted if dotted in files else parent if parent in files else None


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle, its first one again at the end; empty where there is none."""
    done: set[str] = set()
    for start in sorted(graph):
        path, waiting = [start], [sorted(graph[start] - done)]
        while path:
            if not waiting[-1]:
                done.add(path.pop())
                waiting.pop()
            elif (following := waiting[-1].pop()) in path:
                return [*path[path.index(following) :], following]
            elif following not in done:
                path.append(following)
                waiting.append(sorted(graph[following]))
    return []


def modules(root: Path, packages: tuple[str, ...]) -> dict[str, Path]:
    """Dotted name to file; a package's own name is its ``__init__.py``."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for package in packages
        for path in sorted((root / package).rglob("*.py"))
    }


def test_no_module_imports_one_that_imports_it() -> None:
    files = modules(ROOT, PACKAGES)
    graph = imports(files)
    assert len(graph) > 200
    assert graph["pipeline.package"] >= {"pipeline.artifact", "pipeline.core.files"}
    assert " -> ".join(cycle(graph)) == ""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("import p.b", "from p.a import thing"),
        ("from p import b", "import p.a as other"),
        ("from . import b", "from .a import thing"),
        ("def function():\n    from p.b import thing", "if TYPE_CHECKING:\n    from p.a import thing"),
        ("from p import thing", ""),  # by way of p/__init__.py, which has b, and that reads a
    ],
)
def test_a_cycle_is_found_however_it_is_written(tmp_path: Path, first: str, second: str) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").write_text("from p.b import thing")
    (tmp_path / "p" / "a.py").write_text(first)
    (tmp_path / "p" / "b.py").write_text(second or "import p.a")
    found = cycle(imports(modules(tmp_path, ("p",))))
    assert found[0] == found[-1]
    assert {"p.a", "p.b"} <= set(found)


def test_what_is_read_by_two_is_no_cycle(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    for name, text in {"__init__": "", "a": "from p import b, c", "b": "import p.c\nimport json", "c": ""}.items():
        (tmp_path / "p" / f"{name}.py").write_text(text)
    graph = imports(modules(tmp_path, ("p",)))
    assert graph == {"p": set(), "p.a": {"p.b", "p.c"}, "p.b": {"p.c"}, "p.c": set()}
    assert cycle(graph) == []
