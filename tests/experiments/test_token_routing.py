"""Token routing on generated text: its data, its metrics, a quick run, and error messages."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import Options
from experiments.token_routing import texts
from experiments.token_routing.documents import document_metrics, half_nats, switched_after
from experiments.token_routing.run import INTERVALS, LABELS
from experiments.token_routing.runs import load_arrow, load_xlora
from graftlm.backbone import load_backbone
from graftlm.errors import DataError, RecipeError
from graftlm.evaluation import Results
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from routing_data import words, write_data

run = import_module("experiments.token_routing.run")

NLLS = {"nll_math", "nll_science", "nll_code", "nll_reading", "nll_average"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def test_tokens_until_a_route_switches() -> None:
    code, prose = [0.9, 0.1, 0.0], [0.2, 0.8, 0.0]
    names = ["code", "reading"]
    steady = {"first": 3, "weights": [code] * 3 + [code] * 4 + [prose] * 10, "nats": [1.0] * 2 + [2.0] * 14}
    wavering = {**steady, "weights": [code] * 3 + [prose] * 4 + [code] + [prose] * 9}
    never = {**steady, "weights": [code] * 17}
    assert [switched_after(document, names) for document in (steady, wavering, never)] == [4, 5, 14]
    metrics = document_metrics([steady, wavering, never], names)
    assert metrics["nll_code_half"] == 1
    assert metrics["nll_prose_half"] == 2
    assert metrics["switch_tokens"] == 5
    other = {**steady, "nats": [5.0] * 16}
    assert half_nats([steady], [other])["nll_prose_half"] == 5


@pytest.mark.slow
def test_peft_methods_mix_the_same_experts(tmp_path: Path, tiny_backbone) -> None:
    folder = str(tiny_backbone("llama"))
    backbone = load_backbone(folder)
    new = {name: {"rank": 2, "targets": ["attention", "ffn"], "texts": [words(9, name)]} for name in texts.DOMAINS}
    graft: Any = build_graft(graft_config({"kind": "token-routing", "experts": new, "temperature": 1e6}), backbone)
    for parameter in graft.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    paths = [graft.write_adapter(name, tmp_path / name) for name in texts.DOMAINS]
    ids = torch.randint(4, 300, (2, 9))
    with torch.inference_mode(), GraftedModel(backbone, {"graft": graft}) as model:
        uniform, bare = model(input_ids=ids).logits, load_backbone(folder).model(input_ids=ids).logits

    xlora = load_xlora(load_backbone(folder), paths)
    trained = [name for name, parameter in xlora.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("internal_xlora_classifier" in name for name in trained)
    for parameter in xlora.base_model.internal_xlora_classifier.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.inference_mode():
        torch.testing.assert_close(xlora(input_ids=ids).logits, uniform, atol=1e-4, rtol=1e-4)
        arrow = load_arrow(load_backbone(folder), paths, seed=0)(input_ids=ids).logits
    assert (arrow - bare).abs().max() > 1e-2


@pytest.mark.slow
def test_quick_run_gives_every_row_and_is_read_back(folder: Path, tmp_path: Path) -> None:
    options = Options(data=folder, out=tmp_path / "out", quick=True, jobs=1)
    results = run.run(options)
    rows = {row.id: row.metrics for row in results.rows}
    assert set(rows) == set(LABELS)
    for name, metrics in rows.items():
        if name.startswith("cache"):
            assert {"nats_keep", "nats_recompute", "nats_apart"} == metrics.keys()
        elif name.startswith("switch"):
            assert {"nll_code_half", "nll_prose_half", "nll_document"} <= metrics.keys()
        else:
            assert metrics.keys() >= NLLS | {"likelihood_accuracy"}
            routed = name.startswith(("routed", "paper", "prompt", "linear", "published", "xlora"))
            assert ("routing_accuracy" in metrics) == routed
    for domain in texts.DOMAINS:
        assert rows["oracle"][f"nll_{domain}"] == rows[f"expert_{domain}"][f"nll_{domain}"]
    assert len(results.aims) == 12
    assert {row.id for row in results.paper} == {"base", "oracle", *(f"paper_k{k}" for k in INTERVALS)}
    assert {"log-perplexity.png", "switch.png"} <= {path.name for path in (tmp_path / "out").iterdir()}

    kept = [*(tmp_path / "out" / "runs" / "measurements").glob("*.json")]
    before = {path: path.stat().st_mtime_ns for path in kept}
    again = run.run(options.model_copy(update={"tables": ("1",)}))
    assert before
    assert {path: path.stat().st_mtime_ns for path in kept} == before, "finished runs are read back"
    assert again.row("routed_k2").metrics == results.row("routed_k2").metrics


def test_mistakes(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"lacks lm_text/eltec_eng.jsonl: pass --data"):
        run.run(Options(data=tmp_path, out=tmp_path / "out"))
    with pytest.raises(RecipeError, match="There is no table '2'"):
        run.run(Options(data=folder, out=tmp_path / "out", tables=("2",)))


def test_committed_results_have_the_rows() -> None:
    file = Path(str(run.__file__)).parent
    if not (file / "results.json").exists():
        pytest.skip("no results are committed yet")
    results = Results.read(file)
    assert {row for row in LABELS if not row.startswith("switch")} <= {row.id for row in results.rows}
    assert results.seeds[0] == 0
