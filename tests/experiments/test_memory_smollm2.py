"""SmolLM2's memory at its smallest, on text that the test makes: rows, parts that are apart, what is measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from cases import rotated
from experiments import Options, reproduce
from experiments.memory_smollm2 import run as experiment
from experiments.memory_smollm2.texts import PARTS, RecallMaker, Sizes, modules, read_ids, split, words
from graftlm.backbone import load_backbone
from graftlm.errors import DataError
from graftlm.evaluation import Row
from graftlm.evaluation.measurement import Measurement
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config


def write_data(folder: Path) -> Path:
    for number, name in enumerate(experiment.SOURCES.values()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [" ".join(f"the {n} words of text {number} {line}" for n in range(60)) for line in range(8)]
        path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts))
    return folder


@pytest.mark.slow
@pytest.mark.slow
def test_every_row_has_every_metric(tmp_path: Path, tiny_backbone) -> None:
    data, out = write_data(tmp_path / "data"), tmp_path / "out"
    options = Options(data=data, out=out, quick=True, jobs=1, backbone=str(tiny_backbone("llama")))
    results = reproduce("memory-smollm2", options)
    rows = {row.id: row.metrics for row in results.rows}
    assert rows.keys() == {*experiment.LABELS, "lookup"}
    assert rows.pop("lookup").keys() == {"recall_16_windows", "validation_recall_16_windows"}
    for metrics in rows.values():
        assert {
            "nats_within",
            "nats_beyond",
            "gain_of_far",
            "recall_16_windows",
            "validation_recall_nats",
        } <= metrics.keys()
    assert rows["memory"]["memory_bytes_ratio"] == pytest.approx(1, abs=0.05)  # the sinks, rotated
    assert rows["full"]["memory_bytes_ratio"] > 20
    assert len(results.aims) == 4
    assert results.details["search"].keys() == experiment.RATES.keys()
    assert results.details["differences"].keys() == {"window_sinks", "lora_window", "full"}
    lora = json.loads((out / "runs" / "lora_window_lr0.0003_s0" / "graft" / "graft.json").read_text())
    assert lora["training"]["trained_after"] == ["window_sinks"]
    tried = {"memory_lr0.001_s0", "lora_window_lr0.0003_s0", "lora_full_lr0.001_s0"}
    assert results.details["by_rate"].keys() == tried
    full = json.loads((out / "runs" / "lora_full_lr0.001_s0" / "graft" / "graft.json").read_text())
    assert "trained_after" not in full["training"]
    check_fillers(out / "texts", options.backbone)


def check_fillers(folder: Path, backbone: str | None) -> None:
    """What stands between pairs in the test is of novels that training does not have."""
    tokenizer = load_backbone(str(backbone)).need_tokenizer()
    training = (folder / "train.jsonl").read_text()
    for part, source in (("test", "novels"), ("validation", "rfcs")):
        tested = f"of text {[*experiment.SOURCES].index(source)} 7"
        texts = [tokenizer.decode(ids[0]) for ids, _ in read_ids(folder / f"{part}-recall.jsonl")]
        assert all(tested in text for text in texts)
        assert tested not in training


def test_parts_share_no_document() -> None:
    documents = {name: [f"{name} {n} " * 40 for n in range(9)] for name in (*experiment.SOURCES, "python")}
    parts = split(documents, Sizes(document=20, tested=2))
    everything = [text for part in parts.values() for texts in part.values() for text in texts]
    assert len(everything) == len(set(everything)) == 9 * len(documents)
    assert not parts["test"].keys() & parts["validation"].keys()
    assert len(modules()) > 50


def test_parts_share_no_word(tiny_backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_backbone(str(tiny_backbone("llama"))).need_tokenizer()
    assert words(tokenizer)
    monkeypatch.setattr("experiments.memory_smollm2.texts.words", lambda tokenizer: [f"word{n}." for n in range(30)])
    drawn = {}
    for part in PARTS:
        maker = RecallMaker(part, tokenizer, "another text " * 400, pairs=4)
        texts = [tokenizer.decode(maker.make(400, 16).ids) for _ in range(8)]
        drawn[part] = {word for text in texts for word in re.findall(r"word\d+", text)}
    assert all(len(of_part) == 10 for of_part in drawn.values())
    assert len(set().union(*drawn.values())) == 30


def test_answers_are_where_a_text_says(tiny_backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is the word of its key's note, more than a window before it."""
    tokenizer = load_backbone(str(tiny_backbone("llama"))).need_tokenizer()
    window, length = 16, 400
    monkeypatch.setattr("experiments.memory_smollm2.texts.words", lambda tokenizer: [f"word{n}" for n in range(18)])
    text = RecallMaker("test", tokenizer, "another text " * 400, pairs=2).make(length, window)
    assert abs(len(text.ids) - length) < 4
    lines = tokenizer.decode(text.ids).split("\n")
    pairs = dict(line[2:-1].split(" means ") for line in lines if line.endswith(".") and " means " in line)
    assert len(pairs) == len(text.answers) == 2
    for start, stop in text.answers:
        assert start >= text.asked_from
        *_, key, verb = tokenizer.decode(text.ids[:start]).split()
        assert verb == "means"
        assert tokenizer.decode(text.ids[start:stop]).strip() == pairs[key]
        assert "." not in tokenizer.decode(text.ids[text.asked_from - window : start])


@pytest.mark.parametrize("length", [50, 49, 43])
def test_nats_in_pieces_are_those_of_one_pass(length: int, tiny_backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = load_backbone(str(tiny_backbone("llama")))
    ids = torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(experiment, "CHUNK", 7)
    graft = build_graft(graft_config({"kind": "memory", "window": 8, "state": "none"}), backbone)
    with GraftedModel(backbone, {"graft": graft}) as model, torch.no_grad():
        log_probs = model(ids).logits[0].double().log_softmax(-1)
        expected = [-float(log_probs[t, ids[0, t + 1]]) for t in range(length - 1)]
        np.testing.assert_allclose(experiment.scores(model, ids)[0], expected, rtol=1e-3)


@pytest.mark.parametrize(("graft", "length"), rotated([{}, {"state": "none"}, {"heads": 2, "head_width": 8}], [32, 37]))
def test_the_gain_of_far_text_is_that_over_its_pieces(length: int, graft: dict, tiny_backbone) -> None:
    """Token by token: the nats behind its own piece alone, less those behind all text, of every second half but one."""
    backbone = load_backbone(str(tiny_backbone("llama")))
    ids = torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(1))
    grafts = {"graft": build_graft(graft_config({"kind": "memory", "window": 4, **graft}), backbone)} if graft else {}
    for parameter in grafts["graft"].parameters() if grafts else ():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(2))

    with GraftedModel(backbone, grafts) as model, torch.no_grad():

        def nats(text: torch.Tensor) -> float:
            return -float(model(text[:, :-1]).logits[0, -1].double().log_softmax(-1)[text[0, -1]])

        gains = [
            nats(ids[:, start : token + 1]) - nats(ids[:, : token + 1])
            for start in (8, 16, 24)
            for token in range(start + 4, start + 8)
        ]
        gain = experiment.gain_of_far(model, ids, experiment.scores(model, ids)[0], window=4)
    assert gain == pytest.approx(np.mean(gains), abs=1e-4)
    assert abs(gain) > 1e-3


def test_differences_are_paired_over_documents_and_seeds() -> None:
    """Less a row that is not trained every seed has the same pair; of a trained one its own."""
    nats = {"memory": [[1.0, 2.0], [1.2, 2.2]], "window_sinks": [[1.5, 2.3]], "lora_window": [[0.9, 2.1], [1.0, 2.0]]}
    measured = {
        row: [Measurement(Row(id=row, label=row, metrics={}), {"nats_beyond": one}) for one in of]
        for row, of in (nats | {"full": [[0.5, 1.0]]}).items()
    }
    over = experiment.differences(measured)
    assert over["window_sinks"]["by_seed"] == pytest.approx([-0.4, -0.2])
    assert over["lora_window"]["by_seed"] == pytest.approx([0.0, 0.2])
    assert over["full"]["over_documents"]["mean"] == pytest.approx(0.85)
    assert over["full"]["over_documents"]["low"] == pytest.approx(0.6)


def test_a_lookup_answers_what_followed_two_tokens_far_back(tmp_path: Path) -> None:
    """The last occurrence counts, but not one within the window."""
    notes, filler = [5, 6, 7, 1, 5, 6, 8, 1, 9, 6, 3], [2] * 6
    lines = [
        {"ids": [*notes, *filler, 5, 6, 8], "answers": [[19, 20]]},  # the last
        {"ids": [*notes, *filler, 5, 6, 7], "answers": [[19, 20]]},  # an older one
        {"ids": [*notes, *filler, 9, 6, 3], "answers": [[19, 20]]},
        {"ids": [*filler, *notes, 2, 5, 6, 8], "answers": [[20, 21]]},  # its notes are not far enough
    ]
    path = tmp_path / "recall.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert experiment.lookup_of(path, window=8)["recall_16_windows"] == 50.0


def test_recall_is_the_share_of_right_answers(tmp_path: Path, tiny_backbone) -> None:
    """Greedy continuations are right, and others are not."""
    model = load_backbone(str(tiny_backbone("llama"))).model
    ids = torch.randint(3, 90, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    wrong = ids[0].tolist()
    wrong[-1] += 1
    path = tmp_path / "recall.jsonl"
    lines = [{"ids": row, "answers": [[20, 23]]} for row in (ids[0].tolist(), wrong)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(list(read_ids(path))) == 2
    assert experiment.recall_of(model, path)["recall_16_windows"].mean == 50.0


def test_costs_are_those_of_the_first_seed() -> None:
    """Every row keeps them over seeds, of which the first alone has them; without them there is no aim of cost."""
    nats = {"nats_beyond": 2.0, "recall_16_windows": 95.0}
    costs = {"decode_step_ratio": 1.05, "memory_bytes_ratio": 1.2}
    first, second = (Measurement(Row(id="x", label="x", metrics=values), {}) for values in (nats | costs, nats))
    rows = experiment.rows_of({row: [first, second] for row in experiment.LABELS})
    assert all(row.metrics.items() >= costs.items() for row in rows)
    nats_of = {"window_sinks": 3.0, "memory": 2.4, "full": 1.0}
    for row in rows:
        row.metrics["nats_beyond"] = nats_of.get(row.id, 2.0)
    assert [(aim.measured, aim.met) for aim in experiment.aims(rows)] == [
        (pytest.approx(0.3), False),
        (95.0, True),
        (1.05, True),
        (1.2, False),
    ]


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        reproduce("memory-smollm2", Options(data=tmp_path, out=tmp_path / "out"))
    assert "longdocs/peps.jsonl" in str(error.value)
