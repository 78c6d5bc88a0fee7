"""SmolLM2's compositions at their smallest, on text that the test makes: rows, aims, texts that are apart."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest
import torch

from experiments import Options, reproduce
from experiments.composed import SHARES, PromptTask
from experiments.composition_smollm2.run import (
    DOCUMENTS,
    FILES,
    INTO_ENGLISH,
    LABELS,
    MODEL,
    SOURCES,
    SPECIALISTS,
    TEXTS,
    excerpts,
    frozen_states_kept,
    ratios,
    trivial_rows,
    write_texts,
)
from experiments.parents import write_examples
from graftlm.backbone import Backbone, load_backbone
from graftlm.errors import DataError
from graftlm.evaluation.examples import Example, chrf
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.grafts.composition.augmenting import AugmentingModel


def write_data(folder: Path, lines: int = 40) -> Path:
    for number, name in enumerate(FILES):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [f"It is a text that nobody reads: file {number}, line {n}." for n in range(lines)]
        if "bible" in name:
            texts = ["### Genesis", *(f"[1:{n}] {text}" for n, text in enumerate(texts))]
        path.write_text("".join(f"{text if name.endswith('txt') else json.dumps({'text': text})}\n" for text in texts))
    return folder


@pytest.mark.slow
@pytest.mark.slow
def test_three_specialists_in_the_one_form(tmp_path: Path, tiny_backbone) -> None:
    options = Options(
        data=write_data(tmp_path / "data"),
        out=tmp_path / "out",
        quick=True,
        jobs=1,
        backbone=str(tiny_backbone("llama")),
    )
    results = reproduce("composition-smollm2", options)
    rows = {row.id: row.metrics for row in results.rows}
    assert set(rows) == set(LABELS) - {"m_a"}
    for metrics in (metrics for name, metrics in rows.items() if name not in {"copied", "constant"}):
        assert {*TEXTS, *INTO_ENGLISH, "ntrex_english_french_bpb"} <= metrics.keys()
    assert len(results.aims) == len(ratios())
    assert len(results.details["search"]["fixed_mixture"]) == len(SHARES) + 1
    assert {f"specialist_{name}" for name in SPECIALISTS} <= results.details["search"].keys()
    gates = [f"{name}_gate" for name in SPECIALISTS]
    assert set(gates) <= results.details["statistics"]["both"].keys()
    by_seed = results.details["by_seed"]
    (both,), (lora,) = by_seed["both"].values(), by_seed["lora"].values()
    ratio = results.details["ratios"]["French: both, over: LoRA, equal parameters"]["mean"]
    assert ratio == pytest.approx(both["french_bpb"] / lora["french_bpb"])


def test_documents_of_a_test_are_in_no_training() -> None:
    assert DOCUMENTS.keys() == SOURCES.keys()
    for parts in DOCUMENTS.values():
        for first, second in combinations(parts.values(), 2):
            assert not set(first) & set(second)


def test_texts_of_a_test_are_in_no_training(tmp_path: Path, tiny_backbone) -> None:
    options = Options(data=write_data(tmp_path / "data", lines=1163), out=tmp_path / "out")
    tasks = write_texts(options, load_backbone(str(tiny_backbone("llama"))))

    def lines(name: str, key: str = "text") -> list[str]:
        return [json.loads(line)[key] for line in (options.out / "texts" / name).read_text().splitlines()]

    trained = "\n".join(text for name in SOURCES for text in lines(f"{name}-train.jsonl"))
    for name in SOURCES:
        tested = [text for part in ("validation", "test") for text in lines(f"{name}-{part}.jsonl")]
        assert tested
        assert not any(text in trained for text in tested)
    answers = {*lines("pairs-prompts.jsonl"), *(text.strip() for text in lines("pairs-prompts.jsonl", "prompt"))}
    assert answers
    for task in tasks:
        assert not answers & {*lines(Path(task.path).name), *lines(Path(task.path).name, "prompt")}


@pytest.mark.slow
def test_no_author_document_or_phrase_of_a_real_test_is_trained_on(data_dir: Path, tmp_path: Path) -> None:
    """By value, on the texts of the published figures: novels, files, sentences and verses."""
    for name in ("german", "french", "old"):
        lines = (data_dir / SOURCES[name]).read_text(encoding="utf-8").splitlines()
        authors = {part: {json.loads(lines[n])["author"] for n in of} for part, of in DOCUMENTS[name].items()}
        assert not authors["test"] & (authors["train"] | authors["validation"])
    options = Options(data=data_dir, out=tmp_path)
    tasks = write_texts(options, load_backbone(MODEL))

    def phrases(path: Path) -> set[str]:
        words = [f"{line.get('prompt', '')} {line['text']}".split() for line in map(json.loads, path.open())]
        return {" ".join(text[start : start + 12]) for text in words for start in range(len(text) - 11)}

    texts = tmp_path / "texts"
    trained = set.union(*(phrases(path) for path in [*texts.glob("*-train.jsonl"), texts / "pairs-prompts.jsonl"]))
    chosen = set.union(*map(phrases, texts.glob("*-validation.jsonl")))
    tested = set.union(*(phrases(Path(path)) for path in [*texts.glob("*-test.jsonl"), *(task.path for task in tasks)]))
    assert min(map(len, (trained, chosen, tested))) > 1_000
    assert not tested & (trained | chosen)


def test_answers_that_no_model_gives(tmp_path: Path) -> None:
    write_examples(tmp_path / "trained", [("English: A\nGerman:", " B\n"), ("German: B\nEnglish:", " my garden\n")])
    write_examples(tmp_path / "task", [("German: mein Garten\nEnglish:", " my garden\n")])
    copied, constant = trivial_rows(
        [PromptTask(name="x", path=str(tmp_path / "task"), answers=1)], tmp_path / "trained"
    )
    right = [Example(prompt="", answer=" my garden\n")]
    assert copied.metrics["x_chrf"] == pytest.approx(chrf(["mein Garten"], right, beta=1))
    assert constant.metrics["x_chrf"] == pytest.approx(100)


def test_an_excerpt_is_behind_the_start_of_each_document() -> None:
    texts = [f"{'title' * 40}{index}{'x' * 160}" for index in range(25)]
    parts = excerpts(texts, "german")
    assert [len(parts[part]) for part in ("train", "validation", "test")] == [19, 2, 3]
    assert parts["test"] == [text[len(text) // 4 :][: 2000 // 3] for text in texts[21:24]]


def test_frozen_models_read_a_batch_once(tiny_backbone, monkeypatch) -> None:
    """The states that are kept are those of the same tokens and of the same model, for fewer layers too."""
    folder, reads = str(tiny_backbone("llama")), []
    run = AugmentingModel._run
    monkeypatch.setattr(AugmentingModel, "_run", lambda model, *args: reads.append(model) or run(model, *args))
    anchor = load_backbone(folder)
    expected = [logits(anchor, folder, ids, cross=cross) for ids, cross in BATCHES]
    assert len(reads) == 3
    with frozen_states_kept():
        kept = [logits(anchor, folder, ids, cross=cross) for ids, cross in BATCHES]
    assert len(reads) == 3 + 2
    for ours, theirs in zip(kept, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


BATCHES = [([5, 6, 7], True), ([5, 6, 7], False), ([5, 6, 8], True)]


def logits(anchor: Backbone, folder: str, ids: list[int], *, cross: bool) -> torch.Tensor:
    """Of a composition whose weights are not the initial ones, so that the frozen model's states count."""
    config = {"kind": "composition", "augmenting": {"a": {"name": folder}}, "stride": 1, "readout": "mixture"}
    torch.manual_seed(1)
    graft = build_graft(graft_config(config | {"cross": cross}), anchor)
    with torch.no_grad():
        for parameter in graft.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    with GraftedModel(anchor, {"graft": graft}) as model, torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        reproduce("composition-smollm2", Options(data=tmp_path, out=tmp_path / "out"))
    assert "lm_text/eltec_deu.jsonl" in str(error.value)
