"""Routing in generation: prompts, `cache` policies, beam search, traces, and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from typer.testing import CliRunner

from cases import rotated
from graftlm import load_recipe, run_recipe
from graftlm.cli import app
from graftlm.errors import DataError, GraftError, RecipeError
from graftlm.evaluation import Results
from graftlm.generation.generate import Decoding, Generation, TracedToken, generate_text
from graftlm.generation.traces import print_trace, trace_page
from graftlm.store.artifact import save_graft
from tiny import BackboneFolder, tiny_ids
from token_routing.tools import NEW, backbone, generate, recomputed, routing, write_adapters


@pytest.mark.parametrize(("every", "cache"), rotated([1, 2, 4], ["keep", "recompute"]))
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_cached_logits_are_those_of_a_pass_that_knows_the_prompt(
    every: int, cache: str, family: str, tmp_path: Path
) -> None:
    folders = write_adapters(family, tmp_path)
    with routing(family, folders, prompt="whole", every=every, cache=cache) as model:
        output = generate(model, tiny_ids(2, 11))
        actual = torch.stack(output.logits, 1)
        torch.testing.assert_close(actual, recomputed(model, output.sequences, 11), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["keep", "recompute"])
@pytest.mark.parametrize("live", [False, True], ids=["generate", "passes"])
def test_padding_on_the_left_is_no_part_of_a_prompt(live: bool, cache: str, folders: dict[str, str]) -> None:
    ids, padding = tiny_ids(1, 6), 5
    padded = torch.cat([torch.zeros(1, padding, dtype=torch.long), ids], 1)
    mask = (torch.arange(padding + 6) >= padding).long()[None]
    with routing("llama", folders, prompt="whole", every=2, cache=cache, window=3) as model, torch.no_grad():
        if live:  # the prompt is what the first pass on a cache reads
            options = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "attention_mask": mask}
            actual = model.model(padded, past_key_values=DynamicCache(), **options).logits[:, padding:]
            expected = model.model(ids, past_key_values=DynamicCache()).logits
        else:
            expected = torch.stack(generate(model, ids).logits)
            actual = torch.stack(generate(model, padded, attention_mask=mask).logits)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_keep_and_recompute_agree_only_where_no_route_changes(folders: dict[str, str]) -> None:
    def generated_logits(**settings: Any) -> Tensor:
        with routing("llama", folders, **settings) as model:
            return torch.stack(generate(model, tiny_ids(1, 6)).logits, 1)

    fixed = {"prompt": "whole", "reads": "prompt"}
    torch.testing.assert_close(
        generated_logits(cache="keep", **fixed), generated_logits(cache="recompute", **fixed), rtol=1e-4, atol=1e-4
    )
    moving = {"prompt": "whole", "every": 1, "policy": "softmax", "temperature": 0.05, "window": 2}
    assert (
        generated_logits(cache="keep", **moving)[:, 2] - generated_logits(cache="recompute", **moving)[:, 2]
    ).abs().max() > 1e-3


def test_recomputing_is_the_published_procedure(folders: dict[str, str]) -> None:
    """Each token's logits are those of the whole text under that token's weights."""
    with routing("llama", folders, prompt="whole", every=1, cache="recompute") as model:
        output = generate(model, tiny_ids(1, 6))
        weights = model.cache_traces(output.past_key_values)["graft"].values
    with routing("llama", folders) as model:
        graft: Any = model.grafts["graft"]
        for step, actual in enumerate(output.logits):
            position = 5 + step
            graft._token_weights = lambda *_, position=position, **__: weights[:, position : position + 1]
            with torch.no_grad():
                expected = model(output.sequences[:, : position + 1], use_cache=False).logits[:, -1]
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_beam_search_reorders_routes(folders: dict[str, str]) -> None:
    with routing("llama", folders, prompt="whole", every=1) as model:
        output = generate(model, tiny_ids(2, 7), num_beams=3, output_scores=True)
        logits = recomputed(model, output.sequences, 7)
        chosen = logits.log_softmax(-1).gather(-1, output.sequences[:, 7:, None]).sum((1, 2))
        torch.testing.assert_close(output.sequences_scores * NEW, chosen, rtol=1e-3, atol=1e-3)


def test_a_cache_filled_without_the_graft_is_refused(folders: dict[str, str]) -> None:
    bare = backbone("llama").model(tiny_ids(1, 5), use_cache=True)
    with routing("llama", folders) as model, pytest.raises(GraftError, match="cache"):
        model(tiny_ids(1, 1), past_key_values=bare.past_key_values)


def test_embeddings_are_refused(folders: dict[str, str]) -> None:
    with routing("llama", folders) as model, pytest.raises(GraftError, match="input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, 48))


def test_an_empty_prompt_is_refused(folders: dict[str, str]) -> None:
    with routing("llama", folders) as model:
        with pytest.raises(GraftError):
            model(torch.zeros(1, 0, dtype=torch.long))
        with pytest.raises(DataError):
            generate_text(model, backbone("llama").need_tokenizer(), "", Decoding(max_new_tokens=1))


def test_a_trace_has_every_token(folders: dict[str, str]) -> None:
    host = backbone("llama")
    with routing("llama", folders, prompt="whole", every=1) as model:
        actual = generate_text(model, host.need_tokenizer(), "The fox", Decoding(max_new_tokens=12), trace=True)
        assert actual.trace is not None
        assert len(actual.trace) == actual.tokens
        assert "".join(token.text for token in actual.trace) == actual.text
        for token in actual.trace:
            assert list(token.values) == ["one", "two", "three", "none"]
            assert sum(token.values.values()) == pytest.approx(1, abs=1e-5)
        with pytest.raises(GraftError, match="num_beams"):
            generate_text(model, host.need_tokenizer(), "The", Decoding(num_beams=2), trace=True)
    with pytest.raises(GraftError):
        generate_text(host.model, host.need_tokenizer(), "The", Decoding(max_new_tokens=1), trace=True)


HOSTILE = Generation(
    "<b>",
    "</script>é",
    2,
    0.1,
    [TracedToken("</script>", {"a": 0.9, "none": 0.1}), TracedToken("é", {"a": 0.2, "none": 0.8})],
)


def test_a_trace_page_escapes_text() -> None:
    page = trace_page(HOSTILE)
    assert page.count("</script>") == 1
    assert "&lt;/script&gt;" in page
    assert "&lt;b&gt;" in page
    data = page.split('id="trace">')[1].split("</script>")[0]
    assert json.loads(data) == [token.values for token in HOSTILE.trace or []]


def test_a_trace_in_the_terminal() -> None:
    from rich.console import Console

    console = Console(record=True, width=80, force_terminal=True, color_system="truecolor")
    print_trace(HOSTILE, console)
    text = console.export_text(styles=False)
    assert "<b></script>é" in text
    assert "a  55% on average, the largest of 1 of 2 tokens" in text
    assert "none  45% on average, the largest of 1 of 2 tokens" in text


@pytest.fixture
def recipe(folders: dict[str, str], tiny_backbone: BackboneFolder, tmp_path: Path) -> Path:
    (tmp_path / "two.txt").write_text("Le renard brun saute par-dessus le chien.")
    text = f"""
backbone: {{name: {tiny_backbone("llama")}, device: cpu}}
graft:
  kind: token-routing
  experts:
    one: {{path: {folders["one"]}, texts: ["The quick brown fox"]}}
    two: {{path: {folders["two"]}, sources: [{{path: {tmp_path / "two.txt"}}}]}}
data: {{length: 16, test: {{new: [{{path: {tmp_path / "two.txt"}}}]}}}}
training: {{steps: 0}}
evaluation: {{decode_prompts: 0, own_tokens: 100}}
out: {tmp_path / "run"}
"""
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_two_experts_of_one_name_are_refused(recipe: Path) -> None:
    recipe.write_text(recipe.read_text().replace("    two: {", "    one: {"))
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe)
    assert '"one"' in str(caught.value)


@pytest.mark.slow
def test_a_recipe_without_steps_builds_a_router(recipe: Path, tmp_path: Path) -> None:
    results = run_recipe(load_recipe(recipe), progress=False, log=lambda text: None)
    row = results.row("token-routing")
    assert row.metrics["trainable_parameters"] == 0
    assert "learned" in row.metrics
    before = (tmp_path / "run" / "measurements" / "token-routing.json").stat().st_mtime_ns
    run_recipe(load_recipe(recipe), progress=False, log=lambda text: None)
    assert (tmp_path / "run" / "measurements" / "token-routing.json").stat().st_mtime_ns == before
    (tmp_path / "two.txt").write_text("Another text of the same expert, which moves its centroid.")
    run_recipe(load_recipe(recipe), progress=False, log=lambda text: None)
    assert (tmp_path / "run" / "measurements" / "token-routing.json").stat().st_mtime_ns != before

    runner = CliRunner()
    graft = str(tmp_path / "run" / "graft")
    page = tmp_path / "trace.html"
    done = runner.invoke(
        app,
        [
            "generate",
            graft,
            "The fox",
            "--max-new-tokens",
            "5",
            "--trace",
            "--trace-html",
            str(page),
            "--device",
            "cpu",
        ],
    )
    assert done.exit_code == 0, done.output
    assert "on average, the largest of" in done.output
    assert 'id="trace"' in page.read_text()
    done = runner.invoke(
        app, ["generate", graft, "The fox", "--max-new-tokens", "5", "--trace", "--json", "--device", "cpu"]
    )
    assert len(json.loads(done.output)["trace"]) == 5
    assert Results.read(tmp_path / "run").row("token-routing")


@pytest.mark.slow
def test_new_experts_are_trained(tiny_backbone: BackboneFolder, tmp_path: Path) -> None:
    (tmp_path / "english.txt").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    (tmp_path / "french.txt").write_text("Le renard brun saute par-dessus le chien paresseux. " * 20)
    values = {
        name: f"{{rank: 2, targets: [attention], sources: [{{path: {tmp_path / name}.txt}}]}}"
        for name in ("english", "french")
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
backbone: {{name: {tiny_backbone("llama")}, device: cpu}}
graft:
  kind: token-routing
  experts: {{english: {values["english"]}, french: {values["french"]}}}
data:
  new: [{{path: {tmp_path}/english.txt}}, {{path: {tmp_path}/french.txt}}]
  replay_fraction: 0
  length: 32
  test: {{new: [{{path: {tmp_path}/french.txt}}]}}
training: {{steps: 30, batch_size: 4, learning_rate: 0.01}}
evaluation: {{decode_prompts: 0, own_tokens: 100}}
out: {tmp_path / "run"}
"""
    )
    results = run_recipe(load_recipe(path), progress=False, log=lambda text: None)
    assert results.row("token-routing").metrics["learned"].mean > 0.1  # type: ignore[union-attr]
    script = (
        "import sys; from graftlm import load_backbone, load_graft, GraftedModel; "
        "b = load_backbone(sys.argv[1]); m = GraftedModel(b, {'graft': load_graft(sys.argv[2], b)}); "
        "g = m.grafts['graft']; print(sorted(g.factors('french')), g.centroids.shape)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(tiny_backbone("llama")), str(tmp_path / "run" / "graft")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "model.layers.1.self_attn.v_proj" in run.stdout
    assert "[2, 48]" in run.stdout


def test_saving_keeps_new_experts(folders: dict[str, str], tmp_path: Path) -> None:
    with routing("llama", folders) as model:
        save_graft(model.grafts["graft"], backbone("llama"), tmp_path / "graft")  # type: ignore[arg-type]
        manifest = json.loads((tmp_path / "graft" / "graft.json").read_text())
    assert all(len(expert["sha256"]) == 64 for expert in manifest["config"]["experts"].values())
