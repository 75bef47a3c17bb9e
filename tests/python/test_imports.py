"""The imports of the package's modules, also inside functions: layers hold, and there are no circles."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "unisono"
# The packages that a package must not import, by importer.
FORBIDDEN = {
    "unisono.records": ("unisono.bench", "unisono.report", "unisono.cli"),
    "unisono.bench": ("unisono.report", "unisono.cli"),
    "unisono.report": ("unisono.bench", "unisono.cli"),
    "unisono.torch": ("unisono.bench", "unisono.report", "unisono.records", "unisono.cli"),
}


NATIVE = "_core"  # imports nothing of the package


def modules(package: Path) -> dict[str, Path]:
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _targets(node: ast.AST, name: str, path: Path, known: Container[str]) -> Iterator[str]:
    """Yields the modules that an import statement of module `name` means. `from . import x` means x, and the
    package itself only if x is no module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = name.split(".")
        above = parts[: len(parts) - node.level + (path.name == "__init__.py")] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            if alias.name != NATIVE:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def _only_for_types(tree: ast.Module) -> set[ast.AST]:
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    return {stmt for block in blocks for stmt in block.body}


def imports(package: Path) -> dict[str, set[str]]:
    """Returns for each module the modules of the package that it imports anywhere."""
    known = modules(package)
    found: dict[str, set[str]] = {}
    for name, path in known.items():
        tree = ast.parse(path.read_text())
        ignored = _only_for_types(tree)
        statements = [node for node in ast.walk(tree) if node not in ignored]
        targets = {target for node in statements for target in _targets(node, name, path, known)}
        found[name] = (targets & known.keys()) - {name}
    return found


def circle(graph: dict[str, set[str]]) -> list[str] | None:
    """Returns the modules of one circle, in order, or None."""
    done: set[str] = set()

    def visit(name: str, way: list[str]) -> list[str] | None:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return None
        for target in sorted(graph[name]):
            if (found := visit(target, [*way, name])) is not None:
                return found
        done.add(name)
        return None

    return next((found for name in sorted(graph) if (found := visit(name, [])) is not None), None)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("importer", FORBIDDEN)
def test_layers_hold(importer: str) -> None:
    wrong = [
        f"{name} imports {target}"
        for name, targets in imports(PACKAGE).items()
        for target in targets
        if within(name, importer) and any(within(target, package) for package in FORBIDDEN[importer])
    ]
    assert not wrong


def test_torch_is_optional() -> None:
    """Nothing else imports unisono.torch, which imports PyTorch, but the bench's matmuls, in a function."""
    found, measured = imports(PACKAGE), "unisono.bench.backends.matmuls"
    assert "unisono.torch.moe" in found
    for name, targets in found.items():
        if not within(name, "unisono.torch") and name != measured:
            assert not any(within(one, "unisono.torch") for one in targets), name
    at_once = ast.parse(modules(PACKAGE)[measured].read_text()).body
    assert not [one for one in at_once if isinstance(one, ast.Import) and "torch" in ast.unparse(one)]


def test_no_circle() -> None:
    found = circle(imports(PACKAGE))
    assert found is None, " imports ".join(found)


def test_a_circle_hidden_in_a_function_is_found(tmp_path: Path) -> None:
    package = tmp_path / "toy"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("from . import two\n")
    (package / "two.py").write_text("def later():\n    from toy.three import x\n")
    (package / "three.py").write_text("from .one import y\n")
    assert circle(imports(package)) == ["toy.one", "toy.two", "toy.three", "toy.one"]
    (package / "three.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .one import y\n"
    )
    assert circle(imports(package)) is None
