"""Labelled rows as batches: cut at the length, mixed by a policy, chosen where a model is unsure."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.data.labelled import AnswerSpan, LabelledConfig, LabelledRow, TaskRows, read_training_rows
from graftlm.data.labelled_batches import LabelledMixture, TaskBatch, batches_by_length, largest_entropy
from graftlm.data.row_encoder import RowEncoder
from graftlm.data.samplers import SamplerConfig
from graftlm.errors import DataError
from graftlm.grafts.heads import IGNORED, TaskSpec
from tiny import tiny_tokenizer
from training.tasks import tasks_of, write_rows

TOKENIZER = tiny_tokenizer()
ENCODER = RowEncoder(TOKENIZER, 40)


def rows_of(spec: TaskSpec, *rows: tuple[Any, Any]) -> TaskRows:
    texts = [((text,) if isinstance(text, str) else tuple(text), target) for text, target in rows]
    made = [LabelledRow(text, target, f"row {number}") for number, (text, target) in enumerate(texts, 1)]
    return TaskRows(spec, made)


TOPIC = TaskSpec(type="classification", labels=["x", "y"])
SPAN = TaskSpec(type="span")


def test_long_rows_are_cut_and_counted_or_refused() -> None:
    long = "brown fox " * 20
    task = rows_of(TOPIC, ("short", "x"), (long, "y"))
    found = RowEncoder(TOKENIZER, 12).encode(task)
    assert all(len(row) <= 12 for row in found.rows)
    assert found.cut == 1
    with pytest.raises(DataError) as error:
        RowEncoder(TOKENIZER, 12, truncation=False).encode(task)
    assert "row 2" in str(error.value)
    mixture = LabelledMixture({"t": task}, RowEncoder(TOKENIZER, 12), SamplerConfig(), 2)
    (note,) = mixture.notes
    assert "task t" in note
    assert "1 of 2" in note


def test_truncated_answers_are_measured_and_not_learned() -> None:
    context = "brown fox " * 20 + "moon"
    late = AnswerSpan(context.index("moon"), len(context), ("moon",))
    task = rows_of(SPAN, (("which", "dog moon"), AnswerSpan(4, 8, ("moon",))), (("which", context), late))
    encoder = RowEncoder(TOKENIZER, 20)
    learned = encoder.encode(task, training=True)
    assert len(learned) == 1
    found = encoder.encode(task)
    assert len(found) == 2
    assert learned.rows[0].ids.tolist() == found.rows[0].ids.tolist()
    assert found.rows[1].target is not None
    assert found.rows[1].target.tolist() == [IGNORED, IGNORED]
    mixture = LabelledMixture({"t": task}, encoder, SamplerConfig(), 1)
    assert "left out" in mixture.notes[0]
    question = rows_of(SPAN, (("which " * 30, "dog"), AnswerSpan(0, 3, ("dog",))))
    with pytest.raises(DataError) as error:
        encoder.encode(question)
    assert "row 1 has" in str(error.value)


def test_a_partly_truncated_answer_is_not_learned() -> None:
    context = "brown fox " * 20
    whole = RowEncoder(TOKENIZER, 200).encode(rows_of(SPAN, (("which", context), AnswerSpan(0, 5, ("brown",))))).rows[0]
    assert whole.alignment is not None
    end = int(whole.alignment[:10, 1].max())  # of ten tokens the last character
    for last, learned in ((end, 2), (end + 1, 1)):
        task = rows_of(
            SPAN,
            (("which", context), AnswerSpan(0, last, (context[:last],))),
            (("which", "x"), AnswerSpan(0, 1, ("x",))),
        )
        encoded = RowEncoder(TOKENIZER, 10).encode(task, training=True)
        assert len(encoded) == learned
        assert encoded.rows[-1].target is not None
        assert IGNORED not in encoded.rows[-1].target


def test_a_row_without_tokens_is_named() -> None:
    with pytest.raises(DataError, match="row 1"):
        RowEncoder(TOKENIZER, 20).encode(rows_of(TOPIC, ("", "x")))


def mixture(
    folder: Path, policy: str = "uniform", score: Any = None, sampler: dict[str, Any] | None = None
) -> LabelledMixture:
    write_rows(folder)
    tasks = {name: LabelledConfig.parse(task) for name, task in tasks_of(folder).items()}
    rows = {name: read_training_rows(name, task) for name, task in tasks.items()}
    return LabelledMixture(rows, ENCODER, SamplerConfig.parse({"policy": policy} | (sampler or {})), 12, 0, score)


def by_length(batch: TaskBatch) -> list[float]:
    """Stands for a model: which rows it is unsure of."""
    return [1 / (1 + int(mask.sum()) % 7) for mask in batch.attention_mask]


def test_a_batch_mixes_tasks_and_trims_its_parts(tmp_path: Path) -> None:
    batch = mixture(tmp_path).batch(0)
    lengths = batch.attention_mask.sum(1)
    assert lengths.tolist() == sorted(lengths.tolist(), reverse=True)
    assert len(set(batch.task.tolist())) > 2
    assert batch.totals().tolist() == [12, int(lengths.sum())]
    part = batch.rows(slice(6, 12))
    assert part.input_ids.shape == (6, int(lengths[6]))
    assert torch.equal(part.input_ids, batch.input_ids[6:, : int(lengths[6])])
    targets = part.inputs()["targets"]
    for target, tagged, whole in zip(targets, part.tagged, batch.inputs()["targets"][6:], strict=True):
        assert not tagged or len(target) == part.input_ids.shape[1]
        assert torch.equal(target, whole[: len(target)] if tagged else whole)


def test_batches_by_length_give_every_row_once(tmp_path: Path) -> None:
    task = mixture(tmp_path).tasks["topic"]
    rows = [(row, task.spec, 0) for row in task.rows]
    places = []
    for chosen, batch in batches_by_length(rows, 5, 0):
        places += chosen
        for place, ids, mask in zip(chosen, batch.input_ids, batch.attention_mask, strict=True):
            assert ids[mask.bool()].tolist() == task.rows[place].ids.tolist()
    assert sorted(places) == list(range(len(rows)))


@pytest.mark.parametrize("policy", ["uniform", "size", "entropy", "uncertainty"])
def test_a_mixture_resumes(tmp_path: Path, policy: str) -> None:
    without = ("where",) if policy == "entropy" else ()
    write_rows(tmp_path)
    tasks = {name: LabelledConfig.parse(task) for name, task in tasks_of(tmp_path).items() if name not in without}
    rows = {name: read_training_rows(name, task) for name, task in tasks.items()}

    def made() -> LabelledMixture:
        return LabelledMixture(rows, ENCODER, SamplerConfig.parse({"policy": policy}), 8, 0, by_length)

    whole = made()
    first = made()
    second = made()
    wanted = [whole.batch(step).input_ids for step in range(5)]
    for step in range(2):
        first.batch(step)
    state = json.loads(json.dumps(first.state_dict()))
    snapshot = first.snapshot()
    first.batch(2)
    assert snapshot() == state
    second.load_state_dict(state)
    assert all(torch.equal(second.batch(step).input_ids, wanted[step]) for step in range(2, 5))
    assert second.sampler.report() == whole.sampler.report()
    assert second.fingerprint() == whole.fingerprint()
    with pytest.raises(DataError) as error:
        second.batch(9)
    assert {"9", "5"} <= set(re.findall(r"\d+", str(error.value)))


def test_tasks_without_a_score_have_their_uniform_share(tmp_path: Path) -> None:
    found = mixture(tmp_path, "uncertainty", by_length)
    assert found.sampler.config.fixed == pytest.approx({"where": 1 / 6})
    assert sum(found.batch(step).task.tolist().count(4) for step in range(3)) == 6


def test_a_fixed_share_is_kept(tmp_path: Path) -> None:
    found = mixture(tmp_path, "uncertainty", by_length, sampler={"fixed": {"length": 0.5}})
    assert found.sampler.config.fixed == pytest.approx({"length": 0.5, "where": 1 / 6})


def test_the_sampler_observes_entropies_in_nats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A score is the entropy over that of knowing nothing: of another number of classes it is another entropy."""
    write_rows(tmp_path)
    tasks = {name: LabelledConfig.parse(task) for name, task in tasks_of(tmp_path).items()}
    rows = {name: read_training_rows(name, task) for name, task in tasks.items()}
    rows = {name: task for name, task in rows.items() if task.spec.type in ("classification", "multi-label")}
    found = LabelledMixture(rows, ENCODER, SamplerConfig(policy="entropy"), 12, 0, lambda b: [0.5] * len(b.task))
    heard: dict[str, list[float]] = {}
    monkeypatch.setattr(found.sampler, "observe", lambda task, values: heard.update({task: list(values)}))
    found.batch(0)
    assert set(heard) == set(rows)
    for name, values in heard.items():
        assert values == pytest.approx([largest_entropy(rows[name].spec) / 2] * len(values))


def test_the_uncertain_rows_are_chosen(tmp_path: Path) -> None:
    found = mixture(tmp_path, "uncertainty", by_length)
    asked = found.sampler.candidates()
    measured = {pick: 1 / (1 + len(found.tasks[pick.task].rows[pick.row]) % 7) for pick in asked}
    best = sorted(asked, key=lambda pick: -measured[pick])[:10]
    batch = found.batch(0)
    wanted = sorted(found.tasks[pick.task].rows[pick.row].ids.tolist() for pick in best)
    rows = zip(batch.input_ids, batch.attention_mask, batch.task.tolist(), strict=True)
    chosen = sorted(ids[mask.bool()].tolist() for ids, mask, task in rows if task != 4)
    assert chosen == wanted


def test_policies_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        mixture(tmp_path, "uncertainty")
    assert "uncertainty" in str(error.value)
    with pytest.raises(DataError) as error:
        mixture(tmp_path, "entropy", by_length)
    assert "where" in str(error.value)


def test_the_largest_entropy() -> None:
    assert largest_entropy(TOPIC) == pytest.approx(0.6931, abs=1e-4)
    assert largest_entropy(TaskSpec(type="multi-label", labels=["a", "b", "c"])) == pytest.approx(3 * 0.6931, abs=1e-3)
