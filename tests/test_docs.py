"""What the documentation shows can be typed: recipes are recipes, Python is Python, commands exist."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer.main

from experiments import EXPERIMENTS
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
def hooks() -> Any:
    """The module docs/hooks.py, which fills placeholders."""
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["docs_hooks"] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fill(hooks: Any) -> Callable[..., str]:
    """The function that fills the placeholders of a page."""
    return hooks.on_page_markdown


def test_every_placeholder_is_filled(fill: Callable[..., str]) -> None:
    pages = {page: fill(page.read_text(encoding="utf-8")) for page in (ROOT / "docs").rglob("*.md")}
    assert not [str(page) for page, text in pages.items() if "<!--" in text]


def test_lists_come_from_the_code(fill: Callable[..., str]) -> None:
    from graftlm.cli import app
    from graftlm.grafts import kinds

    verbs = fill("<!-- verbs -->", page=SimpleNamespace(file=SimpleNamespace(src_uri="methods/composition.md")))
    names = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert re.findall(r"^\| \[`([\w-]+)`\]\(\.\./cli\.md#[\w-]+\) \| \w", verbs, re.MULTILINE) == names
    grafts = fill("<!-- grafts -->")
    assert re.findall(r"^\| `([\w-]+)` \| \w[^|]* \| \w", grafts, re.MULTILINE) == kinds()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r"^\| `graftlm\[(\w+)\]` \| \w[^|]* \| \w", fill("<!-- extras -->"), re.MULTILINE)
    assert extras == list(project["optional-dependencies"])
    assert "| `steps` |" in fill("<!-- keys of graftlm.training.TrainingConfig -->")
    experiments = {f"`{name}`" for name in EXPERIMENTS}
    assert {line.split(" | ")[0].removeprefix("| ") for line in fill("<!-- experiments -->").splitlines()[2:]} == (
        experiments
    )


def _links(page: Path) -> dict[str, Path]:
    """The relative links of a page, without anchors, and the files that they name."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    return {target: (page.parent / target).resolve() for target in targets if "://" not in target}


def test_every_link_names_a_file() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    pages = listed.stdout.splitlines()
    assert "README.md" in pages
    broken = {(page, link) for page in pages for link, file in _links(ROOT / page).items() if not file.exists()}
    assert broken == set()


def test_the_index_and_the_navigation_list_every_page() -> None:
    pages = {page for page in (ROOT / "docs").rglob("*.md") if "api" not in page.parts}
    index = ROOT / "docs" / "index.md"
    unlisted = pages - {index, ROOT / "docs/changelog.md", ROOT / "docs/contributing.md"} - {*_links(index).values()}
    assert not unlisted, "docs/index.md has no link to these pages"
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [str(page) for page in pages if str(page.relative_to(ROOT / "docs")) not in navigation] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


def test_experiments_and_their_readme_agree() -> None:
    text = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    listed = {link.removesuffix("/README.md") for link in _links(ROOT / "experiments/README.md") if "/" in link}
    assert {folder for folder in listed if not folder.startswith(".")} == {
        module.rpartition(".")[2] for module in EXPERIMENTS.values()
    }
    assert all(f"`{name}`" in text for name in EXPERIMENTS)


def test_the_architecture_page_lists_the_layers_and_existing_files() -> None:
    from test_layers import ORDER

    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    layers = re.search(r"^```text\n(version.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert layers is not None
    assert tuple(line.split()[0] for line in layers[1].splitlines()) == ORDER
    source = ROOT / "src" / "graftlm"
    files = re.findall(r"`([\w/]+\.py)`", text)
    assert files
    assert {file for file in files if not (source / file).exists() and not (ROOT / file).exists()} == set()
    names = re.findall(r"`([\w/]+\.py)` \| `(\w+)", text)
    assert names
    assert {
        (file, name)
        for file, name in names
        if not re.search(
            rf"^ *(def|class|async def) {name}\b|^{name}\b", (source / file).read_text("utf-8"), re.MULTILINE
        )
    } == set()


def _llama(shape: Any, heads: int) -> Any:
    """A Llama of that shape, on the current device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": shape.layers, "hidden_size": shape.width, "intermediate_size": shape.ffn_width}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": shape.kv_width * heads // shape.width}
    config = LlamaConfig(vocab_size=shape.vocabulary, tie_word_embeddings=shape.tied, pad_token_id=0, **sizes)
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_the_arithmetic_are_a_model_s(hooks: Any, tied: bool) -> None:
    shapes = [hooks.Shape("tiny", 3, 64, 160, 32, 320, tied), *hooks.SHAPES[-1:]]
    for shape, heads in zip(shapes, (4, 32), strict=True):
        with torch.device("meta"):
            model = _llama(shape, heads)
        assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    needs = hooks.requirements(shapes[0], number=4)
    assert needs.backbone == 4 * shapes[0].parameters


def test_optimiser_state_of_the_arithmetic_is_adamw_s() -> None:
    weight = torch.nn.Parameter(torch.randn(50, 20))
    optimiser = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimiser.step()
    assert weight.grad is not None
    moments = [value for value in optimiser.state[weight].values() if value.numel() > 1]
    assert sum(tensor.nbytes for tensor in (weight, weight.grad, *moments)) == 16 * weight.numel()


@pytest.mark.parametrize(("layers", "width", "vocabulary", "inner"), [(3, 64, 320, 16), (6, 128, 640, 48)])
def test_saved_activations_of_the_arithmetic_are_measured(
    hooks: Any, layers: int, width: int, vocabulary: int, inner: int
) -> None:
    """Tolerance: 10%, for what the formula leaves out (norms' scales, rotary positions, attention's log-sums)."""
    from graftlm import GraftedModel, build_graft, graft_config
    from graftlm.backbone import Backbone
    from tiny import tiny_tokenizer

    shape = hooks.Shape("tiny", layers, width, 5 * width // 2, width // 2, vocabulary, True)
    backbone = Backbone.wrap(_llama(shape, 4).eval(), tiny_tokenizer(), "tiny")
    graft = build_graft(graft_config({"kind": "adapter", "width": inner}), backbone)
    parameters = [*backbone.model.parameters(), *graft.parameters()]
    excluded = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (address := tensor.untyped_storage().data_ptr()) not in excluded:
            saved[address] = tensor
        return tensor

    token_ids = torch.randint(4, vocabulary, (2, 64))
    with (
        GraftedModel(backbone, {"graft": graft}) as model,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        model(input_ids=token_ids, labels=token_ids)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    graft_parameters = sum(parameter.numel() for parameter in graft.parameters())
    assert measured == pytest.approx(4 * 128 * sum(shape.saved_activations(graft_parameters)), rel=0.1)


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
def test_yaml_is_a_recipe_or_sections_of_one(tmp_path: Path, page: str, code: str) -> None:
    """A block without a backbone or kind stands for sections of the tutorial's recipe."""
    from graftlm.pipelines.clarify.templates import Template
    from graftlm.runs.recipe import parse_recipe

    if code.startswith(("--8<--", "# yaml-language-server", "# .github")):
        return
    (tmp_path / "block.yaml").write_text(code)
    values = read_yaml(tmp_path / "block.yaml")
    if page.endswith("clarify.md"):
        Template.parse(values)
        return
    if list(values) == ["graft"]:
        graft_config(values["graft"], where=page)
        return
    sections = {} if {"backbone", "kind"} & values.keys() else read_yaml(RECIPE)
    parse_recipe(sections | values, page)


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
