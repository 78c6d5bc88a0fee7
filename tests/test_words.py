"""The words of the code: one meaning for each class name, no word of the first edition, and few modules on each way."""

from __future__ import annotations

import ast
import gc
import os
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import graftlm

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT / "src" / "graftlm", ROOT / "experiments")
SOURCE = Path(graftlm.__file__).parent

# Words of the first edition, and pronouns: none of them is the name of a variable, parameter, function or module.
BANNED = {
    "found", "one", "said", "told", "asked", "place", "places", "piece", "pieces", "ticket", "tickets", "mail", "lane",
    "lanes", "shelf", "errand", "heard", "tale", "settle", "twin", "carried", "carry", "still", "room", "rooms",
    "house", "lesson", "lessons", "team", "teams", "catalogue", "stand_in", "old_share", "too_long",
}  # fmt: skip
# What a run enters before it begins (the recipe) and after its measurement (the report) is not on its way.
RECIPE_AND_REPORT = ("config.py", "evaluation/results.py", "evaluation/report.py", "evaluation/tables.py")
LIMIT = 15
RUN = "src/graftlm/runs/run.py"


def modules(folders: tuple[Path, ...] = FOLDERS) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text(encoding="utf-8"))


def identifiers(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.arg | ast.keyword) and node.arg:
        yield node.arg
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name


def test_a_class_name_has_one_meaning() -> None:
    paths_of = defaultdict(list)
    for path, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                paths_of[node.name.lstrip("_")].append(str(path))
    several = {name: paths for name, paths in paths_of.items() if len(paths) > 1}
    assert not several, "\n".join(f"{name}: {', '.join(paths)}" for name, paths in several.items())


def test_no_identifier_is_a_word_of_the_first_edition() -> None:
    lines = []
    for path, tree in modules():
        if not BANNED.isdisjoint([path.stem, *path.stem.split("_")]):
            lines.append(f"{path}: the module's name")
        for node in ast.walk(tree):
            for name in identifiers(node):
                if name.strip("_").lower() in BANNED:
                    lines.append(f"{path}:{node.lineno}: {name}")  # type: ignore[attr-defined]
    assert not lines, "\n".join(lines)


def entered(work: Callable[[], Any]) -> set[str]:
    """The modules of graftlm whose functions `work` calls in this thread, as paths in the package."""
    files: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return {os.path.relpath(file, SOURCE) for file in files if file.startswith(f"{SOURCE}{os.sep}")}


@pytest.mark.parametrize(("own_tokens", "limit"), [(0, LIMIT), (64, LIMIT + 1)], ids=["texts", "with own text"])
def test_a_text_passes_through_few_modules(own_tokens: int, limit: int, tmp_path: Path, tiny_backbone) -> None:
    from graftlm.runs.recipe import Recipe, execute

    for name in ("old", "new"):
        (tmp_path / f"{name}.txt").write_text(f"some {name} words of a text. " * 60)
    source = {name: [{"path": str(tmp_path / f"{name}.txt")}] for name in ("old", "new")}
    recipe = Recipe.parse(
        {
            "backbone": {"name": str(tiny_backbone("llama")), "device": "cpu"},
            "graft": {"kind": "neutral-residues"},
            "data": {**source, "length": 16, "test": source},
            "training": {"steps": 2, "batch_size": 4},
            "evaluation": {"decode_prompts": 1, "decode_tokens": 2, "own_tokens": own_tokens},
        }
    )
    runs = [*recipe.backbone_runs(), recipe.run()]
    execute(runs, tmp_path / "warm-up", progress=False, log=print)  # imports are no way of a text
    gc.collect()  # what earlier tests left would be freed, and so run, in between
    names = entered(lambda: execute(runs, tmp_path / "out", progress=False, log=print)) - set(RECIPE_AND_REPORT)
    assert len(names) <= limit, f"{len(names)} modules: {', '.join(sorted(names))}"


def test_there_is_one_process_pool() -> None:
    pools = {"ProcessPoolExecutor", "Pool", "ProcessPool", "Process"}
    sources = [*modules(), *modules((ROOT / "benchmarks",))]
    calls = [(path, node.func) for path, tree in sources for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [(str(path), name) for path, call in calls for name in identifiers(call) if name in pools]
    measured = ("src/graftlm/evaluation/", "benchmarks/")  # psutil's processes are measured, and not started
    assert {path for path, name in names if not (name == "Process" and path.startswith(measured))} == {RUN}


def test_there_is_one_cache_of_results() -> None:
    """Who reads back what was kept asks whether it exists; those who ask are listed with their reason."""
    reasons = {
        RUN: "the cache",
        "experiments/study.py": "checks the data folder",
        "experiments/ambiguity_checkers/run.py": "finds the files of a data set",
        "experiments/ambiguity_checkers/known.py": "finds the files of a data set",
        "experiments/clarify/run.py": "finds the files of a data set",
        "experiments/clarify/conversations.py": "resumes a run's conversations",
    }
    asking = {"exists", "is_file", "FileNotFoundError"}
    roots = ("experiments/", "src/graftlm/runs/", "src/graftlm/demo/")
    used = {
        str(path)
        for path, tree in modules()
        if str(path).startswith(roots) and asking & {name for node in ast.walk(tree) for name in identifiers(node)}
    }
    assert used <= reasons.keys(), "keep results by a Run, and what runs read by graftlm.files.writing.fill_once"


def test_a_graft_has_at_most_eight_public_methods() -> None:
    from graftlm.grafts import Graft

    assert len([name for name in vars(Graft) if not name.startswith("_") and callable(getattr(Graft, name))]) <= 8


@pytest.mark.parametrize("name", ["experiments", "benchmarks", "tests"])
def test_the_library_imports_nothing_beside_it(name: str) -> None:
    for path, tree in modules():
        if path.parts[0] == "src":
            for node in ast.walk(tree):
                names = [node.module] if isinstance(node, ast.ImportFrom) else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                assert name not in {(module or "").split(".")[0] for module in names}, path


def test_the_package_fits_into_a_wheel_of_one_megabyte(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "wheel.zip", "w", zipfile.ZIP_DEFLATED) as wheel:
        for path in (ROOT / "src").rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                wheel.write(path, path.relative_to(ROOT))
    assert (tmp_path / "wheel.zip").stat().st_size < 2**20


def test_the_source_does_not_grow() -> None:
    # The first edition has 30,000 lines; later issues added 6,000.
    def lines(folder: Path) -> int:
        return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))

    assert lines(ROOT / "src" / "graftlm") <= 36_000
    assert lines(ROOT / "experiments") <= 12_900, "with what reads data sets, tables on a real model, and controls"
