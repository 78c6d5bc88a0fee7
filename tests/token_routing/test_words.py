"""Routing by rare words: an expert acts where a prompt names a thing of its examples, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from graftlm.backbone import Call
from graftlm.data import Document
from graftlm.data.conversations import read_chat
from graftlm.errors import RecipeError
from graftlm.evaluation.windows import cut_windows, scored_logits
from graftlm.generation.generate import Decoding, generate_text
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.grafts.token_routing import TokenRouting
from graftlm.grafts.token_routing.routing_state import RouteSpans
from graftlm.grafts.token_routing.word_embedder import WordEmbedder
from graftlm.runs.recipe import parse_recipe, run_recipe
from graftlm.store.artifact import load_graft, save_graft
from token_routing.tools import backbone

EXAMPLES = ["The capital of Vorlia is Tessaby.", "It opens at 8:50.", "Founded in 1851."]


def graft_of(**settings: Any) -> TokenRouting:
    values = {
        "kind": "token-routing",
        "experts": {"facts": {"rank": 2, "targets": ["ffn"], "texts": EXAMPLES}},
        "embedder": {"name": "words", "centroids": "all"},
        "threshold": 0.5,
        "reads": "prompt",
        **settings,
    }
    graft = build_graft(graft_config(values), backbone("llama"))
    assert isinstance(graft, TokenRouting)
    with torch.no_grad():
        for parameter in graft.parameters():
            parameter.normal_()
    return graft


def generated(prompt: str, graft: TokenRouting | None) -> list[int]:
    """Return ten greedy tokens after a prompt."""
    host = backbone("llama")
    inputs = host.need_tokenizer()(prompt, return_tensors="pt")
    if graft is None:
        return greedy(host.model, inputs)[0].tolist()
    with GraftedModel(host, {"facts": graft}) as model:
        return greedy(model, inputs)[0].tolist()


def greedy(model: Any, inputs: Any) -> torch.Tensor:
    return model.generate(**inputs, max_new_tokens=10, do_sample=False)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **marks: int) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **marks}


def test_rare_words_are_names_and_numbers() -> None:
    embedder = WordEmbedder(backbone("llama"))
    rare = embedder.rare_words("In 1851, Vorlia had 12 towns.")
    assert {"1851", "vorlia"} <= set(rare)
    assert "12" not in rare


def test_a_step_without_a_new_route_scores_nothing() -> None:
    ids = torch.tensor([[3, 4, 5, 6]])
    end = torch.tensor([[2]])  # The route of the token in column 3 depends on column 2, before this pass.
    spans = RouteSpans(ids=ids, start=torch.zeros_like(end), end=end, prompt_length=torch.ones_like(end), window=None)
    embedder = WordEmbedder(backbone("llama"))
    examples = embedder.examples(EXAMPLES)
    scores = embedder.scores(Call(), spans, None, lambda vectors: vectors @ examples.T)
    assert scores.shape == (1, 1, len(examples))


def test_a_plural_is_the_same_word() -> None:
    embedder = WordEmbedder(backbone("llama"))
    assert embedder.rare_words("Two vorlias.") == embedder.rare_words("Two vorlia.")
    assert "vorliass" in embedder.rare_words("vorliass")


def test_a_text_is_similar_to_the_examples_whose_words_it_has() -> None:
    embedder = WordEmbedder(backbone("llama"))
    examples = embedder.examples(EXAMPLES)
    assert torch.allclose(examples.norm(dim=1), torch.ones(len(examples)))
    named, other = embedder.texts(["Vorlia", "Zembranth"])
    assert (examples @ named).max() == pytest.approx(1)
    assert (examples @ other).max() < 0.5


def test_different_words_have_directions_far_below_the_threshold() -> None:
    embedder = WordEmbedder(backbone("llama"))
    words = [f"zem{number}branth" for number in range(2000)]
    directions = embedder.examples([" ".join(words)])
    assert len(directions) == len(words)
    products = directions @ directions.T
    assert products.fill_diagonal_(0).max() < 0.45


def test_only_a_prompt_that_names_a_taught_thing_is_changed() -> None:
    graft = graft_of()
    about_others = "a b c"
    assert generated(about_others, graft) == generated(about_others, None)
    about_taught = "a b Vorlia"
    assert generated(about_taught, graft) != generated(about_taught, None)


SEPARATED = (
    "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
)
# Messages and answers are separated by special tokens alone.
JOINED = "{% for m in messages %}{{ m['content'] + '<eos>' }}{% endfor %}"
HISTORIES = {
    "earlier question": ([user("a Vorlia"), assistant("b"), user("c d")], True),
    "earlier answer": ([user("a"), assistant("b Vorlia"), user("c d")], True),
    "system message": ([{"role": "system", "content": "Vorlia"}, user("c d")], True),
    "newest question": ([user("a"), assistant("b"), user("Vorlia")], True),
    "nowhere": ([user("a"), assistant("b"), user("c d")], False),
}


@pytest.mark.parametrize("template", [SEPARATED, JOINED], ids=["separated", "joined"])
@pytest.mark.parametrize("history", HISTORIES)
def test_a_taught_word_anywhere_in_a_conversation_opens_the_expert(
    history: str, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages, is_open = HISTORIES[history]
    monkeypatch.setattr(backbone("llama").need_tokenizer(), "chat_template", template)
    assert (answered(messages, graft_of()) != answered(messages, None)) is is_open


def answered(messages: list[dict[str, Any]], graft: TokenRouting | None) -> str:
    """Return the answer to a conversation of messages, ten greedy tokens."""
    host = backbone("llama")
    decoding = Decoding(max_new_tokens=10)
    if graft is None:
        return generate_text(host.model, host.need_tokenizer(), messages, decoding).text
    with GraftedModel(host, {"facts": graft}) as model:
        return generate_text(model, host.need_tokenizer(), messages, decoding).text


@torch.no_grad()
def test_every_answer_of_a_conversation_is_measured_with_the_route_of_its_own_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = backbone("llama")
    monkeypatch.setattr(host.need_tokenizer(), "chat_template", SEPARATED)
    chat = read_chat([user("a"), assistant("b c"), user("Vorlia"), assistant("d e")], "here")
    windows = list(cut_windows(host.need_tokenizer(), [Document(chat.answers, chat=chat)], 64))
    bare = [scored_logits(host.model, host.need_tokenizer(), [window])[0] for window in windows]
    with GraftedModel(host, {"facts": graft_of()}) as model:
        grafted = [scored_logits(model, host.need_tokenizer(), [window])[0] for window in windows]
    assert [torch.allclose(before, after) for before, after in zip(bare, grafted, strict=True)] == [True, False]


def test_a_taught_word_is_found_among_many_other_rare_words() -> None:
    graft = graft_of()
    others = " ".join(f"zem{number}br" for number in range(40))
    assert generated(others, graft) == generated(others, None)
    with_taught = f"{others} Vorlia {others}"
    assert generated(with_taught, graft) != generated(with_taught, None)


def conversations(folder: Path, *messages: list[dict[str, Any]]) -> Path:
    """Write conversations as a file."""
    path = folder / "facts.jsonl"
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages), encoding="utf-8")
    return path


def taught(graft: TokenRouting, *words: str) -> dict[str, bool]:
    """Return which words are taught, that is, open the expert."""
    embedder = WordEmbedder(backbone("llama"))
    scores = graft.centroids @ embedder.texts(words).T
    return dict(zip(words, (scores.amax(0) > 0.99).tolist(), strict=True))


def test_a_system_message_is_no_example(tiny_backbone, tmp_path: Path) -> None:
    system = {"role": "system", "content": "Zembranth"}
    rows = conversations(tmp_path, [system, user("Vorlia?"), assistant("a b")])
    for reads in ("all", "prompt"):
        loaded = trained_on(rows, tiny_backbone, tmp_path / reads, reads=reads)
        assert taught(loaded, "Vorlia", "Zembranth") == {"Vorlia": True, "Zembranth": False}


def test_where_only_prompts_are_read_the_words_of_prompts_are_taught(tiny_backbone, tmp_path: Path) -> None:
    rows = conversations(tmp_path, [user("Vorlia?"), assistant("Tessaby")])
    prompts = trained_on(rows, tiny_backbone, tmp_path / "prompt", reads="prompt")
    assert taught(prompts, "Vorlia", "Tessaby") == {"Vorlia": True, "Tessaby": False}
    texts = trained_on(rows, tiny_backbone, tmp_path / "all", reads="all")
    assert taught(texts, "Vorlia", "Tessaby") == {"Vorlia": True, "Tessaby": True}


def test_examples_without_a_rare_word_are_named() -> None:
    graft = graft_of()
    (known,) = graft.fit({})  # words that everyday questions may have
    assert "vorlia" not in known
    note, _ = graft.fit({"facts": ["a c d"]})
    assert "a c d" in note


def test_an_example_whose_only_rare_word_is_in_its_answer_is_named(tiny_backbone, tmp_path: Path) -> None:
    rows = conversations(tmp_path, [user("Vorlia?"), assistant("a b")], [user("a c d"), assistant("Tessaby")])
    for reads, is_named in (("prompt", True), ("all", False)):
        lines: list[str] = []
        trained_on(rows, tiny_backbone, tmp_path / reads, reads=reads, log=lines.append)
        assert any("'a c d'" in line and "1 of 2" in line for line in lines) is is_named


@pytest.fixture
def only_vorlia_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WordEmbedder, "_count_tokens", lambda _, word: 2 if word == "vorlia" else 1)


@pytest.mark.usefixtures("only_vorlia_is_rare")
@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("How many dice does Dice Theme Park have?", True),
        ("tell me of dice theme park's price", True),
        ("Two dice-theme-parks?", True),
        ("Which theme park has dice?", False),
        ("Is there a big lamp in Vorlia?", True),
        ("Where does the Big Lamp stand?", False),
    ],
)
def test_examples_without_a_rare_word_are_known_by_their_names(prompt: str, is_open: bool) -> None:
    examples = ["Who makes Dice Theme Park?", "Does the Big Lamp stand in Vorlia?"]
    graft = graft_of(experts={"facts": {"rank": 2, "targets": ["ffn"], "texts": examples}})
    assert (generated(prompt, graft) != generated(prompt, None)) is is_open


@pytest.mark.usefixtures("only_vorlia_is_rare")
def test_names_of_common_words_are_told_and_examples_without_any_are_counted() -> None:
    embedder = WordEmbedder(backbone("llama"))
    examples = ["Who makes Dice Theme Park?", "Dice Theme Park has what price?", "Is it in Vorlia?"]
    (note,) = embedder.notes_on(examples)
    assert "Dice Theme Park" in note
    without, _ = embedder.notes_on([*examples, "who makes it"])
    assert "1 of 4" in without
    assert "who makes it" in without


def test_in_scripts_without_spaces_only_words_of_other_scripts_are_rare() -> None:
    embedder = WordEmbedder(backbone("llama"))
    assert embedder.rare_words("Vorliaの首都は1851年に") == ["1851", "vorlia"]
    (note,) = embedder.notes_on(["ヴォルリアの首都は何ですか"])
    assert "1 of 1" in note


def test_numbers_with_separators_are_one_word() -> None:
    embedder = WordEmbedder(backbone("llama"))
    assert embedder.rare_words("It costs 6,412.") == embedder.rare_words("It costs 6412.")
    assert "000" not in embedder.rare_words("10.000 or 20,000")


def test_letters_with_and_without_combining_marks_are_one_word() -> None:
    embedder = WordEmbedder(backbone("llama"))
    assert embedder.rare_words("Zu\u0308rich") == embedder.rare_words("Z\u00fcrich") != []


def test_a_word_that_has_a_token_in_capitals_is_common(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = WordEmbedder(backbone("llama"))
    encode = embedder._tokenizer
    monkeypatch.setattr(
        embedder, "_tokenizer", lambda texts, **options: one_token_for_usa(encode(texts, **options), texts)
    )
    rare = embedder.rare_words("USA or Vorlia")
    assert "usa" not in rare
    assert "vorlia" in rare


def one_token_for_usa(encoded: Any, texts: list[str]) -> Any:
    """Return the ids of texts as if the tokenizer had a token for USA."""
    ids = [[0, 1] if text.endswith(" USA") else row for text, row in zip(texts, encoded["input_ids"], strict=True)]
    return {"input_ids": ids}


@pytest.mark.parametrize("content", ["m['content']", "m['content'][0]['text']"])
def test_words_of_the_template_open_no_expert(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = backbone("llama")
    template = "{% for m in messages %}Zembranth {{ " + content + " }}{% endfor %}"
    monkeypatch.setattr(host.need_tokenizer(), "chat_template", template)
    embedder = WordEmbedder(host)
    assert "zembranth" not in embedder.rare_words("Zembranth Vorlia")
    assert "vorlia" in embedder.rare_words("Zembranth Vorlia")


def has_negative_score(word: str) -> bool:
    """Return whether a text has a direction opposite to that of an example."""
    embedder = WordEmbedder(backbone("llama"))
    return bool((embedder.examples([word]) @ embedder.examples(["Vorlia"]).T).max() < -0.02)


def test_other_rows_of_a_batch_change_no_score() -> None:
    experts = {
        name: {"rank": 2, "targets": ["ffn"], "texts": [text]} for name, text in (("a", "Vorlia"), ("b", "1851"))
    }
    graft = graft_of(experts=experts, threshold=-1.0)
    host = backbone("llama")
    tokenizer = host.need_tokenizer()
    tokenizer.padding_side = "left"
    unlike = next(word for word in ("Quixby", "Brindol", "Haldrick", "Mirelle", "Oxby") if has_negative_score(word))
    alone = tokenizer([unlike], return_tensors="pt")
    together = tokenizer([unlike, "Zem Plomdar Vorlia 1999"], return_tensors="pt", padding=True)
    with GraftedModel(host, {"facts": graft}) as model, torch.no_grad():
        expected = model(**alone).logits[0, -1]
        actual = model(**together).logits[0, -1]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_the_embedder_needs_a_threshold() -> None:
    with pytest.raises(RecipeError) as error:
        graft_of(threshold=None)
    assert "threshold" in str(error.value)


def test_everyday_words_that_open_the_expert_are_named() -> None:
    embedder = WordEmbedder(backbone("llama"))
    (note,) = embedder.notes_on(["The town Vorlia needs descaling in 1851."])
    assert "descaling" in note
    assert "vorlia" not in note.casefold()
    assert "1851" in note
    (of_numbers,) = embedder.notes_on(["It is Vorlia 1,851", "the ZQXJ of Vorlia"])
    assert "1851" in of_numbers
    assert "ZQXJ" in of_numbers
    assert embedder.notes_on(["1 Vorlia"]) == []
    (in_german,) = embedder.notes_on(["Wie heißen die Straßen?"])
    assert "heißen" in in_german
    assert "Straßen" not in in_german
    assert "strassen" not in in_german


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("Кто основал город Ворлия?", "Кто"),
        ("Whereabouts of Blue Harbor office?", "Whereabouts"),
        ("Is it broken? Troubleshoot the Blue Harbor boiler.", "Troubleshoot"),
        ("متى تأسست المدينة", "المدينة"),
    ],
)
def test_words_that_only_begin_sentences_or_have_no_case_may_be_everyday_words(question: str, word: str) -> None:
    embedder = WordEmbedder(backbone("llama"))
    assert embedder.rare_words(word)
    (note,) = embedder.notes_on([question])
    assert word in note


def test_a_name_that_begins_a_sentence_and_stands_inside_another_is_no_everyday_word() -> None:
    embedder = WordEmbedder(backbone("llama"))
    (note,) = embedder.notes_on(["Quixby is where?", "Vorlia is where?", "Is Vorlia or QuixBase near?"])
    assert "Quixby" in note
    assert "Vorlia" not in note
    assert "QuixBase" not in note


def test_everyday_words_that_are_not_shown_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    embedder = WordEmbedder(backbone("llama"))
    monkeypatch.setattr("graftlm.grafts.token_routing.word_embedder._SHOWN_WORDS", 2)
    (note,) = embedder.notes_on(["descaling 1851 1852 1853"])
    assert "descaling, 1851 and 2 more" in note


def test_the_rows_of_a_batch_are_routed_separately() -> None:
    graft = graft_of()
    host = backbone("llama")
    tokenizer = host.need_tokenizer()
    tokenizer.padding_side = "left"
    prompts = ["a b Vorlia", "a b c d e f g h"]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    bare = greedy(host.model, inputs)
    with GraftedModel(host, {"facts": graft}) as model:
        grafted = greedy(model, inputs)
    assert not torch.equal(grafted[0], bare[0])
    assert torch.equal(grafted[1], bare[1])


def test_a_saved_graft_routes_alike(tmp_path: Path) -> None:
    graft = graft_of()
    save_graft(graft, backbone("llama"), tmp_path / "graft")
    loaded = load_graft(tmp_path / "graft", backbone("llama"))
    assert isinstance(loaded, TokenRouting)
    for prompt in ("a b Vorlia", "a b c"):
        assert generated(prompt, loaded) == generated(prompt, graft)


def test_the_embedder_needs_a_centroid_for_each_word() -> None:
    with pytest.raises(RecipeError) as error:
        graft_of(embedder={"name": "words"})
    assert "centroids" in str(error.value)


def test_the_names_of_conversations_come_from_questions_too(tiny_backbone, tmp_path: Path) -> None:
    rows = conversations(tmp_path, [user("Vorlia?"), assistant("a b")])
    source = {"path": str(rows), "messages_column": "messages"}
    # Without sources, the examples are the new text.
    for sources in ([source], []):
        loaded = trained_on(rows, tiny_backbone, tmp_path / str(len(sources)), sources)
        assert taught(loaded, "Vorlia") == {"Vorlia": True}


def trained_on(
    rows: Path,
    tiny_backbone,
    out: Path,
    sources: list[dict[str, str]] | None = None,
    reads: str = "all",
    log: Callable[[str], None] = print,
) -> TokenRouting:
    """Return the graft of a run without steps on conversations."""
    recipe = parse_recipe(
        {
            "backbone": {"name": str(tiny_backbone("llama"))},
            "graft": {
                "kind": "token-routing",
                "experts": {"facts": {"rank": 2, "targets": ["ffn"], "sources": sources or []}},
                "embedder": {"name": "words", "centroids": "all"},
                "threshold": 0.5,
                "reads": reads,
            },
            "data": {"new": [{"path": str(rows), "messages_column": "messages"}]},
            "training": {"steps": 0},
            "evaluation": {"own_tokens": 0, "decode_prompts": 0},
        },
        "recipe",
    )
    run_recipe(recipe, out, progress=False, log=log)
    loaded = load_graft(out / "graft", backbone("llama"))
    assert isinstance(loaded, TokenRouting)
    return loaded
