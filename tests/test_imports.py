"""Imports run one way: the contracts of import-linter in pyproject.toml, and what they can't see."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "graftlm"

# Modules that import others by name: registries, and packages whose public names are imported on first use.
IMPORTS_BY_NAME = {
    "__init__.py",
    "grafts/registry.py",
    "models/__init__.py",
    "pipelines/summarize/__init__.py",
}
ANY_LIMIT = 429
"""Lines of src that may name `Any`; the limit only falls."""


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def test_the_contracts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # Its logging config would disable the loggers of all modules for the tests that follow in this process.
    monkeypatch.setattr("logging.config.dictConfig", lambda config: None)
    assert lint_imports(no_cache=True) == 0


def imports_by_name(file: Path) -> Iterator[int]:
    """Lines that call `import_module` with anything but the literal name of another library's module."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name != "import_module":
            continue
        argument = node.args[0]
        is_literal = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
        if not is_literal or argument.value.partition(".")[0] == "graftlm":  # type: ignore[union-attr]
            yield node.lineno


def test_only_registries_and_lazy_names_import_by_name() -> None:
    # These import what a user or an extra names, which is never a module of graftlm.
    names_of_others = {"files/extras.py", "training/tracking.py"}
    allowed = IMPORTS_BY_NAME | names_of_others
    found = {file.relative_to(SOURCE).as_posix() for file in source_files() if any(imports_by_name(file))}
    assert found <= allowed


@pytest.mark.parametrize("line", ["import_module('graftlm.cli')", "importlib.import_module(name)"])
def test_an_import_by_name_is_found(tmp_path: Path, line: str) -> None:
    file = tmp_path / "module.py"
    file.write_text(f"import importlib\n{line}\n")
    assert list(imports_by_name(file)) == [2]


def test_production_code_imports_neither_mocks_nor_experiments() -> None:
    pattern = re.compile(r"^\s*(from|import) (unittest|experiments|benchmarks|tests)\b", re.MULTILINE)
    assert [file.name for file in source_files() if pattern.search(file.read_text(encoding="utf-8"))] == []


def renderings_of_chats(file: Path) -> list[int]:
    """Lines that call `apply_chat_template`."""
    calls = [node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return [call.lineno for call in calls if getattr(call.func, "attr", "") == "apply_chat_template"]


def test_conversations_are_rendered_in_one_place() -> None:
    # The other one reads the template's own mask, of the same inputs.
    allowed = {"backbone/chat_templates.py", "data/chats.py"}
    found = {file.relative_to(SOURCE).as_posix() for file in source_files() if renderings_of_chats(file)}
    assert found == allowed, "use render_messages, which gives each template the form that it takes"


def test_any_is_used_less_and_less() -> None:
    pattern = re.compile(r"\bAny\b")
    lines = (line for file in source_files() for line in file.read_text(encoding="utf-8").splitlines())
    assert sum(1 for line in lines if pattern.search(line)) <= ANY_LIMIT
