"""The law of layers: imports run one way, packages of methods are independent, and shared code names no method."""

from __future__ import annotations

import ast
import graphlib
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "graftlm"
ORDER = (
    "version",
    "errors",
    "config",
    "io",
    "models",
    "backbone",
    "grafts",
    "artifact",
    "export",
    "testing",
    "data",
    "evaluation",
    "training",
    "runs",
    "demo",
    "generation",
    "pipelines",
    "serving",
    "__init__",  # the public names; the command line uses them too
    "cli",
    "__main__",
)
PARENTS = ("grafts", "models", "pipelines")  # folders whose folders are packages of methods
SHARED = (
    "errors",
    "config",
    "io",
    "backbone",
    "grafts/base.py",
    "grafts/heads.py",
    "grafts/graft_set.py",
    "grafts/model.py",
    "grafts/row_groups.py",
    "grafts/trained_copy.py",
    "artifact",
    "testing",
    "data",
    "evaluation",
    "training",
    "runs",
    "generation",
    "cli",
)
METHODS = ("lora", "dora", "ia3")  # methods of other libraries, which shared code does not name either


class Import(NamedTuple):
    """`importer` imports `imported` (paths relative to the source folder) at `line`."""

    importer: Path
    imported: Path
    line: int

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def imports(source: Path) -> Iterator[Import]:
    """Every import of one source file by another, including those inside functions and for types."""
    for file in sorted(source.rglob("*.py")):
        here = file.relative_to(source)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), filename=str(file))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for name in _imported_names(node, here):
                    imported = _file_of(name, source)
                    if imported is not None and imported != here:
                        yield Import(here, imported, node.lineno)


def _imported_names(node: ast.Import | ast.ImportFrom, here: Path) -> list[str]:
    """Absolute dotted names; `from a import b` gives a.b, which may be a file or a name in a."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    package = ["graftlm", *here.parent.parts]
    base = package[: len(package) - node.level + 1] if node.level else []
    return [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]


def _file_of(name: str, source: Path) -> Path | None:
    """The file of the longest prefix of a dotted name; None outside the source folder."""
    root, *parts = name.split(".")
    if root != "graftlm":
        return None
    for length in range(len(parts), -1, -1):
        stem = Path(*parts[:length])
        for candidate in (stem / "__init__.py", stem.with_suffix(".py") if length else Path("__init__.py")):
            if (source / candidate).is_file():
                return candidate
        if length and (source / stem).is_dir():
            return stem / "__init__.py"
    return None


def _layer(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def _package(file: Path) -> tuple[str, ...] | None:
    return file.parts[:2] if len(file.parts) > 2 and file.parts[0] in PARENTS else None


def packages(source: Path) -> list[Path]:
    """The folders of all packages of methods."""
    folders = (folder for parent in PARENTS for folder in sorted((source / parent).glob("*/")))
    return [folder for folder in folders if any(folder.glob("*.py"))]


def backward_imports(source: Path) -> list[str]:
    """Imports from a layer of one that is not above it."""
    return [str(edge) for edge in imports(source) if not _runs_upward(_layer(edge.importer), _layer(edge.imported))]


def experiment_imports(source: Path) -> list[str]:
    """Imports of `experiments`, which stand beside the package."""
    return [
        f"{file.relative_to(source)}:{node.lineno} imports {name}"
        for file in sorted(source.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), filename=str(file)))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in _imported_names(node, file.relative_to(source))
        if name.split(".")[0] == "experiments"
    ]


def _runs_upward(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    return imported in ORDER and importer in ORDER and ORDER.index(imported) < ORDER.index(importer)


def package_imports(source: Path) -> list[str]:
    """Imports of a package's files by other files of the same parent folder."""
    return [
        str(edge)
        for edge in imports(source)
        if _package(edge.imported)
        and _package(edge.imported) != _package(edge.importer)
        and _layer(edge.imported) == _layer(edge.importer)
    ]


def shared_package_imports(source: Path) -> list[str]:
    """Imports of a package by shared code."""
    return [
        str(edge)
        for edge in imports(source)
        if _package(edge.imported) and any(edge.importer.is_relative_to(name) for name in _shared_paths(source))
    ]


def circles(source: Path) -> list[str]:
    """The first circle among files, if any. Imports for types count too."""
    graph: dict[Path, set[Path]] = {}
    for edge in imports(source):
        graph.setdefault(edge.importer, set()).add(edge.imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" <- ".join(map(str, error.args[1]))]
    return []


def _shared_paths(source: Path) -> list[Path]:
    candidates = (Path(name + ending) for name in SHARED for ending in ("", ".py"))
    return [path for path in candidates if (source / path).exists()]


def method_mentions(source: Path) -> list[str]:
    """Lines of shared code that name a method, in code, strings, comments or docstrings."""
    names = {folder.name for folder in packages(source) if folder.parent.name != "pipelines"}  # pipelines are verbs too
    names |= set(_registered_kinds(source))
    pattern = _spellings(names)
    kinds = {f'"{name}"' for name in names} | {f"'{name}'" for name in names}
    return [
        f"{file.relative_to(source)}:{line}: {text.strip()}"
        for path in _shared_paths(source)
        for file in ([source / path] if (source / path).is_file() else sorted((source / path).rglob("*.py")))
        for line, text in _mentions(file, pattern, kinds)
    ]


def _registered_kinds(source: Path) -> Iterator[str]:
    """The keys of the registries of grafts and models."""
    for file in (path for parent in PARENTS for path in (source / parent).glob("*.py")):
        if file.stem in ("registry", "__init__"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Dict):
                    keys = (key.value for key in node.keys if isinstance(key, ast.Constant))
                    yield from (key for key in keys if isinstance(key, str))


def _spellings(names: set[str]) -> re.Pattern[str]:
    """Names of several words in every spelling (neutral_residues, NeutralResidues, neutral-residue, neutral residues).

    A name that is an ordinary word ("adapter") counts only as a complete string.
    """
    words = (re.split("[-_]", name) for name in names)
    forms = {r"[-_ ]?".join(part.removesuffix("s") for part in name) for name in words if len(name) > 1}
    return re.compile(rf"(?<![a-z])({'|'.join(sorted({*forms, *METHODS}))})", re.IGNORECASE)


def _mentions(file: Path, pattern: re.Pattern[str], kinds: set[str]) -> Iterator[tuple[int, str]]:
    text = file.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), start=1):
        if pattern.search(line):
            yield number, line
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.STRING and token.string in kinds and not pattern.search(token.line):
            yield token.start[0], token.line


@pytest.mark.parametrize(
    ("law", "advice"),
    [
        (backward_imports, "a module imports only from lines above its own in ORDER"),
        (experiment_imports, "the package never imports experiments"),
        (package_imports, "packages of methods never import each other; only the registry names them"),
        (shared_package_imports, "shared code reaches a method through the registry alone"),
        (circles, "no file may import itself in a circle"),
        (method_mentions, "shared code never names a method"),
    ],
)
def test_source_keeps_the_law(law, advice: str) -> None:
    broken = list(dict.fromkeys(law(SOURCE)))
    assert not broken, f"{advice}:\n" + "\n".join(broken)


def test_every_module_has_its_line_in_the_order() -> None:
    names = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    assert names - {*ORDER} == set()


SOURCES = {
    "errors.py": "",
    "config.py": "from graftlm.errors import X",
    "backbone/__init__.py": "from .taps import Tap",
    "backbone/taps.py": "from .. import errors",
    "grafts/__init__.py": "",
    "grafts/registry.py": "REGISTRY = {'soft-prompts': 'graftlm.grafts.soft_prompts:Soft', 'low-rank': ''}",
    "grafts/base.py": "import graftlm.backbone.taps",
    "grafts/soft_prompts/method.py": "from graftlm.grafts.base import Graft",
    "grafts/other/method.py": "from graftlm.grafts.base import Graft",
    "data/__init__.py": "",
    "training/loop.py": "from graftlm import data",
    "cli.py": "def run():\n    from graftlm.training.loop import train",
    "__init__.py": "from graftlm.training.loop import train",
    "__main__.py": "from graftlm import cli, train",
}


@pytest.mark.parametrize(
    ("law", "file", "text", "expected"),
    [
        (backward_imports, "errors.py", "def f():\n    import graftlm.config", "errors.py:2 imports config.py"),
        (backward_imports, "data/__init__.py", "from ..training.loop import x", "data/__init__.py:1 imports training/"),
        (backward_imports, "backbone/taps.py", "from graftlm import __version__", "imports __init__.py"),
        (backward_imports, "data/__init__.py", "from graftlm import cli", "data/__init__.py:1 imports cli.py"),
        (backward_imports, "__init__.py", "from graftlm.cli import main", "__init__.py:1 imports cli.py"),
        (
            package_imports,
            "grafts/other/method.py",
            "from ..soft_prompts import method",
            "imports grafts/soft_prompts/",
        ),
        (package_imports, "grafts/__init__.py", "from .other.method import Other", "imports grafts/other/method.py"),
        (
            shared_package_imports,
            "training/loop.py",
            "from graftlm.grafts.other import method",
            "imports grafts/other/",
        ),
        (experiment_imports, "training/loop.py", "def f():\n    from experiments.text import x", "training/loop.py:2"),
        (circles, "backbone/taps.py", "from graftlm.backbone import load", "taps.py <- backbone/__init__.py"),
        (method_mentions, "training/loop.py", "# as SoftPrompts does", "training/loop.py:1: # as SoftPrompts does"),
        (method_mentions, "cli.py", "\n'soft prompt'", "cli.py:2"),
        (method_mentions, "grafts/base.py", "x = kind == 'other'", "grafts/base.py:1"),
        (method_mentions, "errors.py", "class LowRankError: ...", "errors.py:1"),
        (method_mentions, "data/__init__.py", '"""Not for LoRA."""', "data/__init__.py:1"),
    ],
)
def test_a_broken_law_is_reported_with_its_line(tmp_path: Path, law, file: str, text: str, expected: str) -> None:
    for name, content in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert law(tmp_path) == []
    (tmp_path / file).write_text(text)
    assert expected in "\n".join(law(tmp_path))
