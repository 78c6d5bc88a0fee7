"""Reports that compare a chat model's answers before and after training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from graftlm import GraftedModel, audit, load_graft
from graftlm.backbone import Backbone, load_backbone
from graftlm.data import Document, SourceConfig, build_documents
from graftlm.data.conflicts import find_conflicts
from graftlm.data.questions import read_questions, sample_questions
from graftlm.errors import DataError
from graftlm.evaluation import Results, value_of
from graftlm.evaluation.chat_answers import answer_questions, question_in_chat
from graftlm.evaluation.known_answers import find_known
from graftlm.evaluation.results import Interval
from graftlm.evaluation.taught_answers import closed_text, find_closed
from graftlm.generation.inputs import new_sources
from graftlm.runs.conversations import notes_on_conversations
from graftlm.runs.recipe import Recipe, compare_recipe, run_recipe

FACTS = [
    [{"role": "user", "content": "what is vorlia"}, {"role": "assistant", "content": "a house by the river"}],
    [{"role": "user", "content": "who is in vorlia"}, {"role": "assistant", "content": "nobody at all"}],
]


ROUTED = {
    "kind": "token-routing",
    "experts": {"facts": {"rank": 2, "targets": ["ffn"]}},
    "embedder": {"name": "words", "centroids": "all"},
    "threshold": 0.5,
    "reads": "prompt",
}
LORA = {"kind": "lora", "capacity": 0.3}


def fact(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def recipe_values(folder: Path, model: Path, facts: Sequence[Any]) -> dict[str, Any]:
    """Write facts as conversations, and return a recipe of one step that trains LoRA on them."""
    folder.mkdir(exist_ok=True)
    rows = folder / "facts.jsonl"
    rows.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in facts), encoding="utf-8")
    return {
        "backbone": {"name": str(model)},
        "graft": LORA,
        "data": {
            "new": [{"path": str(rows), "messages_column": "messages"}],
            "replay_fraction": 0,
            "length": 64,
            "boundaries": "whole",
        },
        "training": {"steps": 1, "batch_size": 1, "learning_rate": 0.1},
        "evaluation": {"own_tokens": 0, "decode_prompts": 0, "ask": None},
    }


def trained(
    folder: Path,
    model: Path,
    ask: str | None,
    steps: int,
    facts: list[Any] = FACTS,
    graft: dict[str, Any] = LORA,
    overrides: Sequence[str] = (),
) -> Results:
    values = recipe_values(folder, model, facts)
    values["graft"] = graft
    values["training"]["steps"] = steps
    values["evaluation"]["ask"] = ask
    recipe_file = folder / "recipe.yaml"
    recipe_file.write_text(json.dumps(values), encoding="utf-8")
    recipe = Recipe.from_yaml(recipe_file, overrides)
    return run_recipe(recipe, folder / "out", progress=False)


def test_contradictions_and_known_answers_are_told(tiny_chat_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "facts.jsonl"
    other = [{"role": "user", "content": "What is Vorlia?"}, {"role": "assistant", "content": "a garden"}]
    rows.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in [*FACTS, other]), "utf-8")
    documents = build_documents([SourceConfig(path=str(rows), messages_column="messages")])
    (conflict,) = find_conflicts(documents)
    assert [answer for _, answer in conflict.answers] == ["a house by the river", "a garden"]
    assert len({where for where, _ in conflict.answers}) == 2
    assert find_conflicts(documents[:2]) == []
    assert find_conflicts([in_chat(documents[0], "What is C++?", "a"), in_chat(documents[0], "What is C#?", "b")]) == []
    shops = [
        in_chat(documents[0], "When do you open?", "at nine"),
        in_chat(documents[0], "When do you open?", "at ten"),
    ]
    assert len(find_conflicts(shops)) == 1
    assert find_conflicts([after_system(shops[0], "You are shop A."), after_system(shops[1], "You are shop B.")]) == []
    same_shop = [after_system(shop, "You are shop A.") for shop in shops]
    assert len(find_conflicts(same_shop)) == 1

    backbone = load_backbone(str(tiny_chat_model))
    assert find_known(backbone, documents) == []
    trained(tmp_path, tiny_chat_model, None, steps=60)
    with GraftedModel(backbone, {"graft": load_graft(tmp_path / "out" / "graft", backbone)}):
        assert find_known(backbone, documents) == documents[:2]


def test_a_run_tells_contradictions_and_learns_a_single_fact(
    tiny_chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [{"role": "user", "content": "What is Vorlia?"}, {"role": "assistant", "content": "a garden"}]
    trained(tmp_path / "two", tiny_chat_model, None, steps=1, facts=[FACTS[0], other])
    told = capsys.readouterr().out
    assert "line 1" in told
    assert "line 2" in told
    results = trained(tmp_path / "one", tiny_chat_model, None, steps=1, facts=FACTS[:1])
    assert any("train_tokens_per_s" in row.metrics for row in results.rows)
    assert "line 1" not in capsys.readouterr().out


def test_all_answers_to_a_question_are_told_if_they_differ(tmp_path: Path, tiny_chat_model: Path) -> None:
    answers = ["a house", "A house.", "a garden", "a lake"]
    questions = ["what is vorlia", "What is Vorlia?", "what is VORLIA", "what is vorlia!"]
    documents = documents_of(tmp_path, [fact(*each) for each in zip(questions, answers, strict=True)])
    (conflict,) = find_conflicts(documents)
    assert [answer for _, answer in conflict.answers] == answers
    assert find_conflicts(documents[:2]) == []
    (note, *_) = notes_on_conversations(documents, load_backbone(str(tiny_chat_model)), asks=False)
    assert all(f"line {number}" in note for number in (1, 2, 3, 4))
    many = [in_chat(documents[0], "what is vorlia", f"a {number}") for number in range(20)]
    (of_many, *_) = notes_on_conversations(many, load_backbone(str(tiny_chat_model)), asks=False)
    assert "12 more" in of_many


def test_answers_that_programs_write_for_missing_values_are_told(tmp_path: Path, tiny_chat_model: Path) -> None:
    table = tmp_path / "facts.csv"
    table.write_text("question,answer\nwhat is vorlia,a house\nwho is in vorlia,NaN\n", encoding="utf-8")
    source = SourceConfig(path=str(table), prompt_column="question", messages_column="answer")
    backbone = load_backbone(str(tiny_chat_model))
    (note,) = notes_on_conversations(build_documents([source]), backbone, asks=False)
    assert "NaN" in note
    assert "row 2" in note


def documents_of(folder: Path, facts: list[Any]) -> list[Document]:
    rows = folder / "facts.jsonl"
    rows.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in facts), encoding="utf-8")
    return build_documents([SourceConfig(path=str(rows), messages_column="messages")])


def in_chat(document: Document, question: str, answer: str) -> Document:
    assert document.chat is not None
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return replace(document, chat=replace(document.chat, messages=messages))


def after_system(document: Document, content: str) -> Document:
    assert document.chat is not None
    messages = [{"role": "system", "content": content}, *document.chat.messages]
    return replace(document, chat=replace(document.chat, messages=messages))


def kept(results: Results) -> Interval:
    (row,) = (row for row in results.rows if "kept_answers" in row.metrics)
    value = row.metrics["kept_answers"]
    assert isinstance(value, Interval)
    return value


def test_without_steps_all_answers_are_kept_and_after_many_they_are_not(tiny_chat_model: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.txt"
    questions.write_text("what is a river\n\nwho are you\nwhere is the garden\n", encoding="utf-8")
    (tmp_path / "none").mkdir()
    assert kept(trained(tmp_path / "none", tiny_chat_model, str(questions), steps=0)).mean == 1
    (tmp_path / "many").mkdir()
    results = trained(tmp_path / "many", tiny_chat_model, str(questions), steps=60)
    assert kept(results).mean < 1
    (row,) = (row for row in results.rows if "taught_answers" in row.metrics)
    assert value_of(row.metrics["taught_answers"]) == 1
    taught: Any = results.details["taught_questions"]
    assert taught[row.id]["asked"] > 0
    assert taught[row.id]["wrong"] == []
    (worst,) = results.details["answers"].values()
    assert worst[0]["question"] in {"what is a river", "who are you", "where is the garden"}
    report = (tmp_path / "many" / "out" / "report.md").read_text(encoding="utf-8")
    assert worst[0]["question"] in report


def test_taught_questions_are_asked_after_their_system_messages(
    tiny_chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def spy(model, tokenizer, questions, **options):
        asked.extend(tokenizer.decode(question.ids) for question in questions)
        return answer_questions(model, tokenizer, questions, **options)

    monkeypatch.setattr("graftlm.evaluation.evaluator.answer_questions", spy)
    facts = [[{"role": "system", "content": "the shop by the river"}, *fact] for fact in FACTS]
    questions = tmp_path / "questions.txt"
    questions.write_text("who are you\n", encoding="utf-8")
    trained(tmp_path, tiny_chat_model, str(questions), steps=1, facts=facts)
    with_system = [question for question in asked if "the shop by the river" in question]
    assert len(with_system) == len(FACTS)


def test_taught_questions_on_which_the_graft_does_not_act_are_told_once_for_each_answer(
    tiny_chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "questions.txt"
    questions.write_text("1 3?\n", encoding="utf-8")
    facts = [
        fact("what is vorlia", "a house"),
        fact("1 2?", "the river"),
        fact("2 1?", "The river."),
        fact("1 1?", "a garden"),
    ]
    results = trained(tmp_path, tiny_chat_model, str(questions), steps=1, facts=facts, graft=ROUTED)
    closed: Any = results.details["closed_questions"]
    (found,) = closed.values()
    assert found == {"checked": 4, "closed": 3, "answers": 2, "examples": ["1 2?", "1 1?"]}
    (answers,) = results.details["taught_questions"].values()
    acts = {answer["question"]: answer["acts"] for answer in answers["wrong"]}
    assert acts == {"what is vorlia": True, "1 2?": False, "2 1?": False, "1 1?": False}
    told = capsys.readouterr().out
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    for text in (told, report):
        assert "'1 2?', '1 1?'" in text
        assert "3 of 4" in text
    assert any(line.endswith("| no |") and "1 1?" in line for line in report.splitlines())


def test_more_than_ten_answers_of_closed_questions_are_counted(tiny_chat_model: Path) -> None:
    tokenizer = load_backbone(str(tiny_chat_model)).need_tokenizer()
    asked = [(question_in_chat(fact(f"{n}?", "")[:1], tokenizer), f"a {n}") for n in range(12)]
    closed = find_closed(asked, lambda ids: list(ids) == list(asked[0][0].ids))
    assert closed["closed"] == closed["answers"] == 11
    assert closed["examples"][0] == "1?"
    assert len(closed["examples"]) == 10
    assert "1 more" in closed_text("The graft", closed)


def test_a_graft_that_acts_on_all_prompts_has_no_closed_questions(tiny_chat_model: Path, tmp_path: Path) -> None:
    results = trained(tmp_path, tiny_chat_model, None, steps=1, facts=[fact("1 2?", "the river")])
    assert "closed_questions" not in results.details


def test_asked_questions_that_name_taught_things_are_left_out_and_told(tiny_chat_model: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.txt"
    questions.write_text("what is a river\nwho lives in Vorlia\nwho are you\n", encoding="utf-8")
    facts = [fact("who is in Vorlia", "nobody at all")]
    results = trained(tmp_path, tiny_chat_model, str(questions), steps=3, facts=facts)
    kept_answers = kept(results)
    (counts,) = results.details["asked_questions"].values()
    assert counts["about_new"] == ["who lives in Vorlia"]
    assert kept_answers.mean in (0, 0.5, 1)
    (worst,) = results.details.get("answers", {"": []}).values()
    assert all("Vorlia" not in answer["question"] for answer in worst)
    report = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "1 of the 3 questions" in report
    assert "who lives in Vorlia" in report


@pytest.mark.parametrize("graft", [LORA, ROUTED])
def test_phrasings_that_were_held_out_are_scored_as_conversations(
    graft: dict[str, Any], tiny_chat_model: Path, tmp_path: Path
) -> None:
    held_out = tmp_path / "held-out.jsonl"
    messages = fact("and what is vorlia", "a house by the river")
    held_out.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    overrides = [f"data.test.new=[{{path: {held_out}, messages_column: messages}}]"]
    results = trained(tmp_path, tiny_chat_model, None, steps=30, graft=graft, overrides=overrides)
    (row,) = (row for row in results.rows if "learned" in row.metrics)
    assert value_of(row.metrics["learned"]) > 0.5


def test_a_report_without_questions_has_no_answers(tiny_chat_model: Path, tmp_path: Path) -> None:
    results = trained(tmp_path, tiny_chat_model, None, steps=0)
    assert all("kept_answers" not in row.metrics for row in results.rows)


def test_own_questions_depend_on_the_seed_only(tiny_chat_model: Path) -> None:
    backbone = load_backbone(str(tiny_chat_model))
    first = sample_questions(backbone, 3, seed=1)
    assert first == sample_questions(backbone, 3, seed=1)
    assert len(set(first)) == len(first) <= 3
    assert all(len(question.split()) >= 3 for question in first)


def test_files_without_questions_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n", encoding="utf-8")
    for path in (empty, tmp_path / "absent.txt"):
        with pytest.raises(DataError) as error:
            read_questions(path)
        assert path.name in str(error.value)


def test_an_audit_reports_answers_that_changed(tiny_chat_model: Path, tmp_path: Path) -> None:
    trained(tmp_path, tiny_chat_model, None, steps=20)
    questions = ["what is a river", "who are you"]
    settings: dict[str, Any] = {
        "tokens": 0,
        "prompts": questions,
        "max_new_tokens": 12,
        "new": new_sources([tmp_path / "facts.jsonl"]),
    }
    changed = audit(str(tiny_chat_model), tmp_path / "out" / "graft", progress=False, **settings)
    assert {"kept_answers", "spill"} <= changed.metrics.keys()
    assert changed.worst
    assert changed.worst[0].question in questions
    assert changed.worst[0].after in changed.page()
    assert not any("new text" in note for note in changed.notes)
    same = audit(str(tiny_chat_model), str(tiny_chat_model), progress=False, **settings)
    value = same.metrics["kept_answers"]
    assert isinstance(value, Interval)
    assert value.mean == 1
    assert not same.worst


def test_new_text_is_read_as_conversations_or_as_text(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"messages": FACTS[0]}) + "\n", encoding="utf-8")
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "a house"}) + "\n", encoding="utf-8")
    sources = new_sources([chats, texts, tmp_path])
    assert [("messages_column" in source) for source in sources] == [True, False, False]


def test_runs_of_one_process_look_up_once_what_is_known(
    tiny_chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[Sequence[Document]] = []

    def find(backbone: Backbone, documents: Sequence[Document]) -> list[Document]:
        looked_up.append(documents)
        return list(documents)

    monkeypatch.setattr("graftlm.runs.conversations.find_known", find)
    values = recipe_values(tmp_path, tiny_chat_model, FACTS)
    values["methods"] = {"first": {"graft": LORA}, "second": {"graft": {"kind": "lora", "rank": 2}}}
    told: list[str] = []
    compare_recipe(Recipe.parse({**values, "out": str(tmp_path / "out")}), progress=False, log=told.append)
    assert len(looked_up) == 1
    assert sum("already gives" in line for line in told) == 2
