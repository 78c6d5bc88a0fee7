"""The documentation can be used: regions are current, links resolve, recipes are recipes, Python is Python."""

from __future__ import annotations

import ast
import re
import subprocess
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.generate import sizes
from docs.generate.regions import generated_pages, outdated_pages
from graftlm.config import read_yaml
from graftlm.grafts import graft_config

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
RECIPE = ROOT / "docs" / "tutorials" / "danish.yaml"


def blocks(language: str) -> list[tuple[str, str]]:
    """Code blocks of a language in all pages, each with its page."""
    fence = re.compile(rf"^(?P<indent> *)```{language}\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
    found = []
    for page in PAGES:
        for block in fence.finditer(page.read_text(encoding="utf-8")):
            code = re.sub(rf"^{block['indent']}", "", block["code"], flags=re.MULTILINE)
            found.append((str(page.relative_to(ROOT)), code))
    return found


def test_generated_regions_are_current() -> None:
    assert len(generated_pages()) > 10
    assert [str(page.relative_to(ROOT)) for page in outdated_pages()] == []


def _links(page: Path) -> dict[str, Path]:
    """The relative links of a page, without anchors, and the files that they name."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    return {target: (page.parent / target).resolve() for target in targets if "://" not in target}


def test_every_link_names_a_file() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    pages = [ROOT / name for name in listed.stdout.splitlines()]
    existing = [page for page in pages if page.exists()]
    assert existing
    broken = {(str(page), link) for page in existing for link, file in _links(page).items() if not file.exists()}
    assert broken == set()


def test_the_index_and_the_navigation_list_every_page() -> None:
    pages = {page for page in (ROOT / "docs").rglob("*.md") if "api" not in page.parts}
    index = ROOT / "docs" / "index.md"
    included = {ROOT / "docs/changelog.md", ROOT / "docs/contributing.md"}
    assert pages - {index} - included - {*_links(index).values()} == set()
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [str(page) for page in pages if str(page.relative_to(ROOT / "docs")) not in navigation] == []


def test_files_of_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    files = re.findall(r"`([\w/]+\.py)`", text)
    assert files
    folders = (ROOT / "src" / "graftlm", ROOT)
    assert [file for file in files if not any((folder / file).exists() for folder in folders)] == []


def _llama(shape: sizes.Shape, heads: int) -> Any:
    """A Llama of that shape, on the current device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.ffn_width,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=shape.kv_width * heads // shape.width,
        tie_word_embeddings=shape.tied,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_the_arithmetic_are_a_model_s(tied: bool) -> None:
    tiny = sizes.Shape("tiny", 3, 64, 160, 32, 320, tied)
    for shape, heads in ((tiny, 4), (sizes.SHAPES[-1], 32)):
        with torch.device("meta"):
            model = _llama(shape, heads)
        assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    assert sizes.requirements(tiny, number=4).backbone == 4 * tiny.parameters


def test_optimiser_state_of_the_arithmetic_is_adamw_s() -> None:
    weight = torch.nn.Parameter(torch.randn(50, 20))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    assert weight.grad is not None
    moments = [value for value in optimizer.state[weight].values() if value.numel() > 1]
    assert sum(tensor.nbytes for tensor in (weight, weight.grad, *moments)) == 16 * weight.numel()


@pytest.mark.parametrize(("layers", "width", "vocabulary", "inner"), [(3, 64, 320, 16), (6, 128, 640, 48)])
def test_saved_activations_of_the_arithmetic_are_measured(layers: int, width: int, vocabulary: int, inner: int) -> None:
    """Tolerance: 10%, for what the formula leaves out (norms' scales, rotary positions, attention's log-sums)."""
    from graftlm import GraftedModel, build_graft
    from graftlm.backbone import Backbone
    from tiny import tiny_tokenizer

    shape = sizes.Shape("tiny", layers, width, 5 * width // 2, width // 2, vocabulary, True)
    backbone = Backbone.wrap(_llama(shape, 4).eval(), tiny_tokenizer(), "tiny")
    graft = build_graft(graft_config({"kind": "adapter", "width": inner}), backbone)
    parameters = [*backbone.model.parameters(), *graft.parameters()]
    excluded = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    saved: dict[int, weakref.ref[torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in excluded:
            saved[address] = weakref.ref(tensor)
        return tensor

    token_ids = torch.randint(4, vocabulary, (2, 64))
    with (
        GraftedModel(backbone, {"graft": graft}) as model,
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        output = model(input_ids=token_ids, labels=token_ids, return_logits=False)
    assert output.loss is not None
    # What a chunk of logits saves is freed with the chunk.
    alive = [tensor for reference in saved.values() if (tensor := reference()) is not None]
    measured = sum(tensor.untyped_storage().nbytes() for tensor in alive)
    graft_parameters = sum(parameter.numel() for parameter in graft.parameters())
    assert measured == pytest.approx(4 * 128 * shape.saved_activations(graft_parameters), rel=0.1)


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

    if code.startswith(("# yaml-language-server", "# .github")):
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
    if "data" in values:
        sections = {name: section for name, section in sections.items() if name != "evaluation"}  # of its test texts
    parse_recipe(sections | values, page)


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_compiles_and_its_imports_exist(page: str, code: str) -> None:
    tree = ast.parse(code, filename=page)
    own = [node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graftlm")]
    exec(compile(ast.Module(own, []), page, "exec"), {})
