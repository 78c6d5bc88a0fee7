"""What the documentation shows can be typed: recipes are recipes, Python is Python, commands exist."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer.main

from graftlm.config import read_yaml
from graftlm.errors import RecipeError
from graftlm.grafts import graft_config

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *(ROOT / "src").rglob("README.md")])
RECIPE = ROOT / "docs" / "tutorials" / "danish.yaml"


def blocks(language: str) -> list[tuple[str, str]]:
    """Code blocks of that language in all pages, each with its page."""
    fence = re.compile(rf"^(?P<indent> *)```{language}\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
    return [
        (str(page.relative_to(ROOT)), re.sub(rf"^{block['indent']}", "", block["code"], flags=re.MULTILINE))
        for page in PAGES
        for block in fence.finditer(page.read_text(encoding="utf-8"))
    ]


@pytest.fixture(scope="module")
def fill() -> Callable[..., str]:
    """The function of docs/hooks.py that fills placeholders."""
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.on_page_markdown


def test_every_placeholder_is_filled(fill: Callable[..., str]) -> None:
    pages = {page: fill(page.read_text(encoding="utf-8")) for page in (ROOT / "docs").rglob("*.md")}
    assert not [str(page) for page, text in pages.items() if "<!--" in text]


def test_lists_come_from_the_code(fill: Callable[..., str]) -> None:
    from graftlm.cli import app
    from graftlm.grafts import kinds

    verbs = fill("<!-- verbs -->", page=SimpleNamespace(file=SimpleNamespace(src_uri="methods/composition.md")))
    names = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert re.findall(r"^\| \[`(\w+)`\]\(\.\./cli\.md#\w+\) \| \w", verbs, re.MULTILINE) == names
    grafts = fill("<!-- grafts -->")
    assert re.findall(r"^\| `([\w-]+)` \| \w[^|]* \| \w", grafts, re.MULTILINE) == kinds()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r"^\| `graftlm\[(\w+)\]` \| \w[^|]* \| \w", fill("<!-- extras -->"), re.MULTILINE)
    assert extras == list(project["optional-dependencies"])
    assert "| `steps` |" in fill("<!-- keys of graftlm.training.TrainingConfig -->")


def test_the_tutorial_s_recipe_is_one() -> None:
    from graftlm.runs.recipe import load_recipe

    recipe = load_recipe(RECIPE, ["training.steps=100"])
    assert recipe.graft is not None
    assert recipe.data.replay_fraction == 0.1


def test_the_tutorial_s_comparison_fits_its_recipe(tmp_path: Path) -> None:
    from graftlm.runs.recipe import Recipe

    methods = next(code for page, code in blocks("yaml") if "add-a-language" in page and code.startswith("methods:"))
    (tmp_path / "methods.yaml").write_text(methods)
    recipe = Recipe.parse(read_yaml(RECIPE) | read_yaml(tmp_path / "methods.yaml"))
    rates = {run.id: run.training.learning_rate for run in recipe.comparison() if run.graft is not None}
    assert rates == {"neutral-residues": 2e-4, "lora": 5e-5}


@pytest.mark.parametrize(("page", "code"), blocks("yaml"))
def test_yaml_is_valid(tmp_path: Path, page: str, code: str) -> None:
    (tmp_path / "block.yaml").write_text(re.sub(r"^--8<--.*", "", code) + "\nlast: key")
    values = read_yaml(tmp_path / "block.yaml")
    if "graft" in values:
        graft_config(values["graft"], where=page)


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_compiles_and_its_imports_exist(page: str, code: str) -> None:
    tree = ast.parse(code, filename=page)
    own = [node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graftlm")]
    exec(compile(ast.Module(own, []), page, "exec"), {})


def test_every_command_exists() -> None:
    from graftlm.cli import app

    known = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    lines = [(page, line) for page, code in blocks("(?:bash|console)") for line in code.splitlines()]
    lines += [
        (str(page), span) for page in PAGES for span in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    ]
    used = {(page, call[1]) for page, line in lines if (call := re.match(r"(?:uv run )?graft ([a-z]\S*)", line))}
    assert {verb for _, verb in used}, "no command was found in the documentation"
    assert {(page, verb) for page, verb in used if verb not in known} == set()


def test_a_typing_mistake_in_the_recipe_gets_the_hint_that_the_tutorial_promises() -> None:
    from graftlm.runs.recipe import load_recipe

    with pytest.raises(RecipeError, match=r"did you mean capacity\?"):
        load_recipe(RECIPE, ["graft.capcity=0.2"])
