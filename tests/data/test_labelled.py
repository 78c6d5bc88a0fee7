"""Labelled rows: every format, every type of task, and one sentence with file and row for each that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftlm.data.encoding import RowEncoder, word_places
from graftlm.data.labelled import (
    LabelledConfig,
    LabelledRow,
    Span,
    TaskRows,
    labels_of,
    read_held_out_rows,
    read_span,
    read_training_rows,
    score_metric,
)
from graftlm.data.labelled_batches import LabelledMixture, TaskBatch, batches_by_length, largest_entropy
from graftlm.data.samplers import SamplerConfig
from graftlm.errors import DataError, RecipeError
from graftlm.grafts.heads import IGNORED, TaskSpec
from tiny import tiny_tokenizer
from training.tasks import tasks_of, write_rows

TOKENIZER = tiny_tokenizer()
FORMATS = ("csv", "tsv", "jsonl", "json", "parquet")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        mark = "," if path.suffix == ".csv" else "\t"
        lines = [mark.join(rows[0]), *(mark.join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines), encoding="utf-8")
    else:
        path.write_text("\n".join(map(json.dumps, rows)) if path.suffix == ".jsonl" else json.dumps(rows))
    return path


def config(path: Path, kind: str = "classification", **more: Any) -> LabelledConfig:
    return LabelledConfig.parse({"type": kind, "train": str(path), "test": str(path)} | more)


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"rows.{suffix}", [{"text": f'say "{i}"', "label": i % 2} for i in range(4)])
    if suffix == "csv":
        path.write_text(path.read_text().replace('say "', 'say ""').replace('",', '""",').replace("say", '"say'))
    found = read_training_rows("t", config(path))
    assert found.spec == TaskSpec(type="classification", labels=["0", "1"])
    assert [(row.texts, row.target) for row in found.rows] == [((f'say "{i}"',), str(i % 2)) for i in range(4)]
    assert found.rows[2].where == f"{path}: {'line' if suffix == 'jsonl' else 'row'} 3"


def test_every_type_of_task(tmp_path: Path) -> None:
    write_rows(tmp_path)
    rows = {name: read_training_rows(name, LabelledConfig.parse(task)) for name, task in tasks_of(tmp_path).items()}
    assert rows["topic"].spec.labels == ["dog", "fox", "moon"]
    assert (rows["alike"].spec.labels, len(rows["alike"].rows[0].texts)) == (["0", "1"], 2)
    assert rows["length"].rows[0].target == 0.75
    assert rows["marks"].spec.labels == ["dog", "fox"]
    assert rows["animals"].spec.labels == ["B-ANIMAL", "O"]
    span = rows["where"].rows[0].target
    assert isinstance(span, Span)
    assert rows["where"].rows[0].texts[1][span.start : span.end] == span.answers[0]


def test_files_without_a_header(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text('what " is\t0.5\nwho\t1\n')
    found = read_training_rows("t", config(tmp_path / "a.tsv", "regression", columns=["text", "label"]))
    assert [(row.texts[0], row.target) for row in found.rows] == [('what " is', 0.5), ("who", 1.0)]


@pytest.mark.parametrize(
    ("name", "text", "columns"),
    [
        ("a.conll", "# a tag\n-DOCSTART- O\n\nIn O\n#1 O\nRome B-PLACE\n", []),
        ("a.conll", "In\tO\n#1\tO\nRome\tB-PLACE\n\n\n", []),
        ("a.annotated", "In\tO\n#1\tO\nRome\tB-PLACE\n", []),
        ("a.iob2", "# text = In #1 Rome\n1\tIn\tO\t-\n2\t#1\tO\t-\n3\tRome\tB-PLACE\t-\n", []),
        ("a.txt", "O x In\nO x #1\nB-PLACE x Rome\n", ["label", "pos", "text"]),
    ],
)
def test_words_with_tags(tmp_path: Path, name: str, text: str, columns: list[str]) -> None:
    (tmp_path / name).write_text(text.replace("# a tag\n", ""))
    (row,) = read_training_rows("t", config(tmp_path / name, "tagging", columns=columns)).rows
    assert (row.texts, row.target) == (("In", "#1", "Rome"), ("O", "O", "B-PLACE"))


def test_words_with_tags_in_tables(tmp_path: Path) -> None:
    rows = [{"words": ["In", "Rome"], "tags": ["O", "B-PLACE"]}, {"words": "New York", "tags": "B-PLACE I-PLACE"}]
    path = write(tmp_path / "a.jsonl", rows)
    found = read_training_rows("t", config(path, "tagging", text="words", label="tags"))
    assert [row.target for row in found.rows] == [("O", "B-PLACE"), ("B-PLACE", "I-PLACE")]
    assert score_metric(config(path, "tagging"), found.spec) == "entity_f1"


MIXED = [{"text": "a", "label": "yes"}, {"text": "b", "label": "no"}, {"text": "c", "label": 3}]
BAD: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "sometimes a number": (
        MIXED,
        {},
        r"a\.jsonl: line 3 has the number 3 in the column 'label', which is sometimes a number \(3 at .*line 3\) and "
        r"sometimes a word \('yes' at .*line 1\): write all labels as text",
    ),
    "two forms of a number": (
        [{"text": "a", "label": 1}, {"text": "b", "label": "1.0"}],
        {},
        r"line 2 has the label 1\.0 .* and .*line 1 has 1, which is the same number in another form: write both alike",
    ),
    "no label": ([{"text": "a", "label": None}], {}, r"line 1 has nothing in the column 'label', but a label"),
    "an empty text": (
        [{"text": "a", "label": "x"}, {"text": " ", "label": "y"}],
        {},
        r"line 2 has an empty text in the column 'text': fill it in, or leave the row out",
    ),
    "not a number": (
        [{"text": "a", "label": 1}, {"text": "b", "label": "much"}],
        {"type": "regression"},
        r"line 2 has 'much' in the column 'label', but a finite number is expected",
    ),
    "NaN": (
        [{"text": "a", "label": float("nan")}],
        {"type": "regression"},
        r"line 1 has nan in the column 'label', but a finite number",
    ),
    "one class": (
        [{"text": "a", "label": "x"}, {"text": "b", "label": "x"}],
        {},
        r"The task t has the one label 'x' in all of its 2 rows, and there is nothing to tell apart",
    ),
    "no rows": ([], {}, r"The task t has no rows \(.*a\.jsonl\): name a file with at least one, or leave it out"),
    "no column": (
        [{"body": "a", "label": "x"}],
        {},
        r"line 1 has no column 'text' \(found: body, label\): set the task's text",
    ),
    "more tags than words": (
        [{"text": ["a"], "label": ["O", "B"]}],
        {"type": "tagging"},
        r"line 1 has 1 words and 2 tags, but as many of both",
    ),
    "no tags": ([{"text": "a", "label": None}], {"type": "tagging"}, r"line 1 has nothing in the column 'label'"),
    "an answer that is not there": (
        [{"question": "q", "context": "some text", "answers": ["other"]}],
        {"type": "span"},
        r"line 1 has the answer 'other', which does not stand in its context anywhere",
    ),
    "an answer at another place": (
        [{"question": "q", "context": "some text", "answers": {"text": ["text"], "answer_start": [4]}}],
        {"type": "span"},
        r"line 1 has the answer 'text', which does not stand in its context at character 4",
    ),
    "no answer": (
        [{"question": "q", "context": "some text", "answers": []}],
        {"type": "span"},
        r"line 1 has no answer in the column 'answers'",
    ),
    "a label that is not the task's": (
        MIXED[:2],
        {"labels": ["yes", "maybe"]},
        r"line 2 has the label 'no', which is not among the task's labels of the task t",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_does_not_fit_is_named(tmp_path: Path, case: str) -> None:
    rows, more, sentence = BAD[case]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(DataError, match=sentence) as error:
        read_training_rows("t", LabelledConfig.parse({"type": "classification", "train": str(path)} | more))
    assert "\n" not in str(error.value)


def test_a_label_not_seen_in_training(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", MIXED[:2])
    test = write(tmp_path / "test.jsonl", [{"text": "a", "label": "yes"}, {"text": "b", "label": "noo"}])
    task = config(train, test=str(test))
    found = read_training_rows("t", task)
    with pytest.raises(DataError, match=r"test\.jsonl: line 2 has the label 'noo', which is not seen in training of"):
        read_held_out_rows("t", task, found.spec)
    with pytest.raises(DataError, match=r"There is no file .*gone\.csv: check test of the task t"):
        read_held_out_rows("t", config(train, test=str(tmp_path / "gone.csv")), found.spec)


def test_classes_with_one_example_are_told(tmp_path: Path) -> None:
    rows = [{"text": "a", "label": "x"}] * 3 + [{"text": "b", "label": "rare"}]
    path = write(tmp_path / "a.jsonl", rows)
    (note,) = read_training_rows("t", config(path)).notes
    assert note == (
        f"The task t has 1 labels with one example, 'rare' ({path}: line 4): what is learned of them is left to chance."
    )
    limited = read_training_rows("t", config(path, limit=1, seed=1))
    assert limited.spec.labels == ["rare", "x"], "labels are those of all rows"
    assert any("without any example" in note for note in limited.notes)


def test_a_limit_is_drawn_by_its_seed(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": str(i), "label": i % 2} for i in range(50)])
    drawn = [[row.texts[0] for row in read_training_rows("t", config(path, limit=5, seed=s)).rows] for s in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(drawn[0]) == 5


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"text": ["a", "b", "c"]}, "one column, or two of a pair"),
        ({"text": ["a", "a"]}, "one column twice"),
        ({"type": "tagging", "text": ["a", "b"]}, "a tagging task has one text"),
        ({"type": "span", "text": "a"}, "for span those of question and context"),
        ({"type": "regression", "labels": ["a"]}, "has no labels: leave them out"),
        ({"metric": "pearson"}, "the metrics of classification are accuracy, macro_f1, matthews, and pearson is none"),
    ],
)
def test_configs_that_do_not_fit(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        LabelledConfig.parse({"type": "classification", "train": "a.csv"} | values)


words = st.lists(st.text("abcdæøå1.'-\U0001f600", min_size=1, max_size=9), min_size=1, max_size=8)


@given(words=words)
def test_a_word_is_tagged_at_its_first_token(words: list[str]) -> None:
    text = " ".join(words)
    offsets = TOKENIZER(text, return_offsets_mapping=True)["offset_mapping"]
    places = word_places(words, offsets)
    start = 0
    assert len(set(places)) == len(words), "each word has a token of its own"
    for word, place in zip(words, places, strict=True):
        assert offsets[place][0] <= start < offsets[place][1]
        assert place == 0 or offsets[place - 1][1] <= start, "none before it reaches into the word"
        start += len(word) + 1


@given(context=st.text("abc d.é", min_size=1, max_size=40), start=st.integers(0, 39), size=st.integers(1, 9))
def test_an_answer_s_tokens_cover_it(context: str, start: int, size: int) -> None:
    answer = context[start : start + size]
    if not answer.strip():
        return
    value = {"text": [answer], "answer_start": [start]}
    row = LabelledRow(("which?", context), read_span(value, context, "answers", "here"), "here")
    spec = TaskSpec(type="span")
    (found,) = RowEncoder(TOKENIZER, 200).encode(TaskRows(spec, [row])).rows
    assert found.target is not None
    assert found.places is not None
    first, last = found.target.tolist()
    assert found.places[first, 0] <= start < found.places[first, 1]
    assert found.places[last, 0] < start + len(answer) <= found.places[last, 1]


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
    assert ([len(row) <= 12 for row in found.rows], found.cut) == ([True, True], 1)
    with pytest.raises(DataError, match=r"row 2 has \d+ tokens, but 12 are read: raise the length"):
        RowEncoder(TOKENIZER, 12, too_long="refuse").encode(task)
    mixture = LabelledMixture({"t": task}, TOKENIZER, SamplerConfig(), 2, length=12)
    assert mixture.notes == ["Of the 2 rows of the task t 1 are longer than 12 tokens and were cut at their end."]


def test_answers_behind_the_cut_are_not_learned_but_measured() -> None:
    context = "brown fox " * 20 + "moon"
    late = Span(context.index("moon"), len(context), ("moon",))
    task = rows_of(SPAN, (("which", "dog moon"), Span(4, 8, ("moon",))), (("which", context), late))
    encoder = RowEncoder(TOKENIZER, 20)
    assert encoder.encode(task, training=True).kept == [0]
    found = encoder.encode(task)
    assert found.kept == [0, 1]
    assert found.rows[1].target is not None
    assert found.rows[1].target.tolist() == [IGNORED, IGNORED]
    mixture = LabelledMixture({"t": task}, TOKENIZER, SamplerConfig(), 1, length=20)
    assert "and 1 left out, as their answer lies behind the cut" in mixture.notes[0]
    question = rows_of(SPAN, (("which " * 30, "dog"), Span(0, 3, ("dog",))))
    with pytest.raises(DataError, match=r"row 1 has a question of \d+ tokens, which leaves nothing"):
        encoder.encode(question)


def test_a_row_without_tokens_is_named() -> None:
    with pytest.raises(DataError, match="row 1 has no tokens"):
        RowEncoder(TOKENIZER, 20).encode(rows_of(TOPIC, ("", "x")))


def mixture(folder: Path, policy: str = "uniform", score: Any = None, **more: Any) -> LabelledMixture:
    write_rows(folder)
    tasks = {name: LabelledConfig.parse(task) for name, task in tasks_of(folder).items()}
    rows = {name: read_training_rows(name, task) for name, task in tasks.items()}
    return LabelledMixture(rows, TOKENIZER, SamplerConfig.parse({"policy": policy}), 12, 0, 40, score, **more)


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
def test_a_mixture_goes_on_where_it_stopped(tmp_path: Path, policy: str) -> None:
    without = ("length", "where") if policy == "entropy" else ()
    write_rows(tmp_path)
    tasks = {name: LabelledConfig.parse(task) for name, task in tasks_of(tmp_path).items() if name not in without}
    rows = {name: read_training_rows(name, task) for name, task in tasks.items()}

    def made() -> LabelledMixture:
        return LabelledMixture(rows, TOKENIZER, SamplerConfig.parse({"policy": policy}), 8, 0, 40, by_length)

    whole, first, second = made(), made(), made()
    wanted = [whole.batch(step).input_ids for step in range(5)]
    for step in range(2):
        first.batch(step)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert all(torch.equal(second.batch(step).input_ids, wanted[step]) for step in range(2, 5))
    assert second.report() == whole.report()
    assert second.fingerprint() == whole.fingerprint()
    with pytest.raises(DataError, match="Step 9 was asked for, but the sampler is at 5"):
        second.batch(9)


def test_tasks_without_entropy_have_their_uniform_share(tmp_path: Path) -> None:
    found = mixture(tmp_path, "uncertainty", by_length)
    assert found.sampler.config.fixed == pytest.approx({"length": 1 / 6, "where": 1 / 6})
    counts = [found.batch(step).task.tolist() for step in range(3)]
    assert [sum(batch.count(number) for batch in counts) for number in (2, 4)] == [6, 6]


def test_the_uncertain_rows_are_chosen(tmp_path: Path) -> None:
    found = mixture(tmp_path, "uncertainty", by_length)
    asked = found.sampler.candidates()
    measured = {pick: 1 / (1 + len(found.tasks[pick.task].rows[pick.row]) % 7) for pick in asked}
    best = sorted(asked, key=lambda pick: -measured[pick])[:8]
    batch = found.batch(0)
    wanted = sorted(found.tasks[pick.task].rows[pick.row].ids.tolist() for pick in best)
    rows = zip(batch.input_ids, batch.attention_mask, batch.task.tolist(), strict=True)
    chosen = sorted(ids[mask.bool()].tolist() for ids, mask, task in rows if task not in (2, 4))
    assert chosen == wanted


def test_policies_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="policy uncertainty goes by what a model predicts, and there is no score"):
        mixture(tmp_path, "uncertainty")
    with pytest.raises(DataError, match="The task length is of the type regression, whose predictions have no entropy"):
        mixture(tmp_path, "entropy", by_length)


def test_the_largest_entropy() -> None:
    assert largest_entropy(TOPIC) == pytest.approx(0.6931, abs=1e-4)
    assert largest_entropy(TaskSpec(type="multi-label", labels=["a", "b", "c"])) == pytest.approx(3 * 0.6931, abs=1e-3)


def test_labels_of_a_row() -> None:
    assert labels_of(LabelledRow(("a",), "x", "")) == ("x",)
    assert labels_of(LabelledRow(("a",), 0.5, "")) == ()
    assert labels_of(LabelledRow(("a", "b"), Span(0, 1, ("b",)), "")) == ()
