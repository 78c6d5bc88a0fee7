"""What ends an answer is one definition, from training to the server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from graftlm.backbone import Backbone, answer_end_ids, read_stops, turn_end_ids
from graftlm.data.chats import chat_tokens
from graftlm.data.conversations import read_chat
from graftlm.data.own_text_sampling import OwnTextSampler
from graftlm.data.source_config import SelfSourceConfig
from graftlm.errors import DataError
from graftlm.evaluation.chat_answers import answer_questions, template_questions
from graftlm.evaluation.examples import generate_answers
from graftlm.export.folder import export_graft
from graftlm.export.turn_ends import add_turn_ends
from graftlm.generation.generate import ChatSession, Decoding, generate_text
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.pipelines.clarify.models import LocalModel
from graftlm.pipelines.clarify.prompts import Prompt
from graftlm.serving.service import open_service
from serving.web import post, running
from tiny import EOS, tiny_model
from tokenizers_by_kind import prefix_blank, unigram, with_template

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As the first Llama 3, which opens another answer behind each conversation.
OPENS_ANSWER = (
    "{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "<|head|>assistant<|/head|>\n\n"
)
# As Gemma: roles have other names, and <eos> is in no conversation.
OTHER_ROLES = (
    "{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
# As Phi 3: EOS stands behind the last turn alone.
EOS_AT_LAST = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# As GLM 4: an answer ends where the next turn begins.
NEXT_TURN = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As Vicuna's or Alpaca's format, written for a tokenizer without markers.
TEXT_ONLY = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
# As a template that separates an answer from the next question, but does not end the last one.
BETWEEN_TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.role == 'assistant' and not loop.last %}<|sep|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEMPLATES: dict[str, tuple[str, Sequence[str], tuple[str, ...]]] = {
    "ChatML": (CHATML, ("<|im_start|>", "<|im_end|>"), ("<|im_end|>",)),
    "opens another answer": (OPENS_ANSWER, ("<|head|>", "<|/head|>", "<|eot|>"), ("<|eot|>",)),
    "other roles": (OTHER_ROLES, ("<turn>", "<end>"), ("<end>",)),
    "EOS at last": (EOS_AT_LAST, ("<|user|>", "<|assistant|>", "<|end|>"), ("<|end|>", "<eos>")),
    "next turn": (NEXT_TURN, ("<|user|>", "<|assistant|>"), ("<|user|>",)),
    "text only": (TEXT_ONLY, (), ()),
    "between turns": (BETWEEN_TURNS, ("<|user|>", "<|assistant|>", "<|sep|>"), ("<|sep|>",)),
}
# Templates that take contents in other forms, need other messages, or change contents.
_PART = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
_CONTENT = "{{ m.content }}"
_NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}"
_NEEDS_TOOLS = "{% for t in tools %}{{ t | tojson }}{% else %}{{ raise_exception('no tools') }}{% endfor %}"
DEMANDING = {
    "contents in parts": CHATML.replace(_CONTENT, _PART),
    "the first part": CHATML.replace(_CONTENT, "{{ m.content[0]['text'] }}"),
    "a system message": _NEEDS_SYSTEM + CHATML,
    "a system message and parts": _NEEDS_SYSTEM + CHATML.replace(_CONTENT, _PART),
    "tools": _NEEDS_TOOLS + CHATML,
    "a system message and tools": _NEEDS_SYSTEM + _NEEDS_TOOLS + CHATML,
    "titles": CHATML.replace(_CONTENT, "{{ m.content | title }}"),
    "capitals in parts": CHATML.replace(_CONTENT, _PART.replace("p.text", "p.text | upper")),
    "no hyphens": CHATML.replace(_CONTENT, "{{ m.content | replace('-', ' ') }}"),
    "the last part of a content": CHATML.replace(_CONTENT, "{{ m.content.split('-')[-1] }}"),
    "no blanks": CHATML.replace(_CONTENT, "{{ m.content | replace(' ', '') }}"),
    "short contents": CHATML.replace(_CONTENT, "{{ m.content[:12] }}"),
    "quoted contents": CHATML.replace(_CONTENT, "{{ m.content | tojson }}"),
    "an end between turns, in titles": BETWEEN_TURNS.replace(_CONTENT, "{{ m.content | title }}").replace(
        "<|sep|>", "<|im_end|>"
    ),
}
TALK = [
    {"role": "user", "content": "Who keeps the light?"},
    {"role": "assistant", "content": "Oda."},
    {"role": "user", "content": "Since when?"},
    {"role": "assistant", "content": "Since May."},
]


def chain_model(tokenizer: Any, *chains: Sequence[int]) -> Any:
    """A model that writes, behind each token of a chain, the next one, whatever stands before."""
    model = tiny_model("llama", vocab_size=512, num_hidden_layers=1, hidden_size=96)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            if name.endswith("norm.weight"):
                parameter.fill_(1)
        embeddings = torch.nn.functional.normalize(model.get_input_embeddings().weight, dim=1)
        head = model.get_output_embeddings().weight
        head.zero_()
        for chain in chains:
            for token, following in pairwise(chain):
                head[following] += 10 * embeddings[token]
    model.generation_config.eos_token_id = EOS
    return model


@pytest.fixture(scope="module", params=["special", "plain"])
def talker(request: Any) -> tuple[Any, Any]:
    """A model that says "hi", the end of its turn, and then more; and its tokenizer."""
    markers = TEMPLATES["ChatML"][1]
    tokenizer = with_template(CHATML, markers, special=request.param == "special")
    tokenizer.eos_token = "<eos>"
    line, h, i, more = (tokenizer(text)["input_ids"][-1] for text in ("\n", "h", "i", "m"))
    start, end = tokenizer.convert_tokens_to_ids(list(markers))
    return chain_model(tokenizer, [line, h, i, end, more, more], [start, more]), tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("special", [True, False])
def test_the_markers_behind_an_answer_end_it(name: str, special: bool) -> None:
    template, markers, ends = TEMPLATES[name]
    tokenizer = with_template(template, markers, special=special)
    assert turn_end_ids(tokenizer) == tuple(tokenizer.convert_tokens_to_ids(list(ends)))
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [7, 9]
    assert answer_end_ids(model, tokenizer) == {7, 9, EOS, *turn_end_ids(tokenizer)}
    assert turn_end_ids(tokenizer, chat_template="{{ messages[-1].content }}<eos>") == (EOS,)


@pytest.mark.parametrize("name", DEMANDING)
def test_the_end_of_an_answer_is_found_whatever_the_template_does_with_contents(name: str) -> None:
    tokenizer = with_template(DEMANDING[name], ("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>"))
    (end,) = turn_end_ids(tokenizer)
    assert tokenizer.convert_ids_to_tokens(end) == "<|im_end|>"
    chat = read_chat([{"role": "system", "content": "Be brief."}, *TALK], "row", [{"name": "look", "description": "-"}])
    ids, predicted, _ = chat_tokens(tokenizer, chat)
    edges = np.flatnonzero(np.diff(predicted.astype(int), prepend=0, append=0)).reshape(-1, 2)
    assert [ids[stop - 1] for _, stop in edges] == [end, end], "training teaches the same end"


def test_without_a_template_that_works_a_text_s_end_is_an_answer_s() -> None:
    for template in ("{{ raise_exception('no') }}", "{{ messages[0].content }}<|im_end|>"):
        tokenizer = with_template(template, ("<|im_end|>",))
        with pytest.warns(UserWarning, match="EOS tokens alone"):
            assert turn_end_ids(tokenizer) == ()
        assert turn_end_ids(tokenizer) == (), "it is said once"
    tokenizer.chat_template = None
    assert answer_end_ids(tiny_model("llama"), tokenizer) == {EOS}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("make", [None, prefix_blank], ids=["byte-level", "prefix blank"])
def test_what_training_teaches_ends_where_generation_stops(name: str, make: Any) -> None:
    template, markers, _ = TEMPLATES[name]
    tokenizer = with_template(template, markers) if make is None else with_template(template, markers, make=make)
    ids, predicted, _ = chat_tokens(tokenizer, read_chat(TALK, "row"))
    edges = np.flatnonzero(np.diff(predicted.astype(int), prepend=0, append=0)).reshape(-1, 2)
    assert len(edges) == 2
    ends = answer_end_ids(tiny_model("llama"), tokenizer) | {tokenizer.eos_token_id}
    for (start, stop), content in zip(edges, ("Oda.", "Since May."), strict=True):
        learned = ids[start:stop].tolist()
        first_end = next((position for position, token in enumerate(learned) if token in ends), None)
        if name == "text only" and content == "Oda.":
            assert first_end is None, "a turn inside a conversation ends as the template has it"
            continue
        assert first_end is not None
        assert tokenizer.decode(learned[:first_end]).strip() == content


def test_a_conversation_that_ends_with_context_is_whole_and_gets_no_end_token() -> None:
    tokenizer = with_template(TEXT_ONLY, ())
    ids, predicted, _ = chat_tokens(tokenizer, read_chat([*TALK[:3], TALK[3] | {"weight": 0}], "row"))
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TALK, tokenize=False)
    assert tokenizer.decode(ids[predicted]).strip() == "Oda."


def test_generate_and_chat_stop_at_the_end_of_the_turn(talker: tuple[Any, Any]) -> None:
    model, tokenizer = talker
    question = [{"role": "user", "content": "Who?"}]
    shown: list[str] = []
    answer = generate_text(model, tokenizer, question, Decoding(max_new_tokens=9), on_text=shown.append)
    assert (answer.text, answer.tokens) == ("hi", 3)
    assert "".join(shown) == "hi"
    assert ChatSession(model, tokenizer, Decoding(max_new_tokens=9)).reply("Who?") == "hi"
    assert generate_text(model, tokenizer, question, Decoding(max_new_tokens=9, num_beams=2)).text == "hi"
    text = generate_text(model, tokenizer, "h", Decoding(max_new_tokens=5))
    assert text.tokens == 5, "outside of a conversation the marker ends nothing"


def test_the_audit_s_answers_and_own_text_stop_there(talker: tuple[Any, Any]) -> None:
    model, tokenizer = talker
    (answer,) = answer_questions(model, tokenizer, template_questions(["Who?"], tokenizer), max_new_tokens=9)
    assert (answer.text, answer.stops, answer.keeps_template) == ("hi", True, True)
    backbone = Backbone.wrap(model, tokenizer)
    sampler = OwnTextSampler(backbone, SelfSourceConfig(self=True, tokens=64, chat_fraction=1, length=64), 64)
    samples = sampler.batch(0, [], 64)
    assert samples
    end = turn_end_ids(tokenizer)[0]
    for sample in samples:
        for start, stop in sample.turns:
            assert sample.ids[start:stop].index(end) == stop - start - 1


def test_the_server_stops_there_in_chats_alone(talker: tuple[Any, Any]) -> None:
    model, tokenizer = talker
    service = open_service(Backbone.wrap(model, tokenizer), name="m")
    question = [{"role": "user", "content": "Who?"}]
    with running(service) as address:
        body = {"model": "m", "messages": question, "max_tokens": 9, "temperature": 0}
        (choice,) = post(address, "/v1/chat/completions", body).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("hi", "stop")
        (choice,) = post(address, "/v1/chat/completions", {**body, "ignore_eos": True}).json()["choices"]
        assert choice["finish_reason"] == "length"
        text = {"model": "m", "prompt": "h", "max_tokens": 5, "temperature": 0}
        (choice,) = post(address, "/v1/completions", text).json()["choices"]
        assert choice["finish_reason"] == "length"
        if tokenizer.added_tokens_decoder[turn_end_ids(tokenizer)[0]].special:
            (choice,) = post(address, "/v1/completions", {**text, "stop": ["<|im_end|>"]}).json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("i", "stop")
            failed = post(address, "/v1/completions", {**text, "stop": ["<|im_end|>x"]})
            assert (failed.status_code, failed.json()["error"]["param"]) == (400, "stop")


def test_a_stop_string_that_is_a_special_token_is_its_id(talker: tuple[Any, Any]) -> None:
    model, tokenizer = talker
    (end,) = turn_end_ids(tokenizer)
    stops = read_stops(tokenizer, ["<|im_end|>", "\n", "Q:"])
    if tokenizer.added_tokens_decoder[end].special:
        assert (stops.ids, stops.strings) == ({end}, ("\n", "Q:"))
        assert read_stops(tokenizer, ["<|im_end|>\n"]).ids == {end}
    assert generate_answers(model, tokenizer, ["h"], max_new_tokens=9, stop=("<|im_end|>",)) == ["i"]


@pytest.mark.parametrize("stop", ["", "<eos>Q", "\N{WATER BUFFALO}"])
def test_a_stop_string_that_can_not_match_is_refused(stop: str) -> None:
    tokenizer = unigram()
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    with pytest.raises(DataError) as caught:
        read_stops(tokenizer, ["\n", stop])
    assert repr(stop) in str(caught.value) or not stop
    assert read_stops(tokenizer, ["sail", " ", "\N{CJK UNIFIED IDEOGRAPH-6E2F}"]).strings[0] == "sail"


def test_a_grafted_model_stops_there_unless_it_is_told_where(talker: tuple[Any, Any]) -> None:
    model, tokenizer = talker
    grafted = GraftedModel(Backbone.wrap(model, tokenizer))
    question = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who?"}], tokenize=False, add_generation_prompt=True
    )
    inputs = tokenizer(question, add_special_tokens=False, return_tensors="pt")
    size = inputs["input_ids"].shape[1]
    assert grafted.generate(**inputs, max_new_tokens=9, do_sample=False).shape[1] == size + 3
    told = grafted.generate(**inputs, max_new_tokens=9, do_sample=False, eos_token_id=EOS)
    assert told.shape[1] == size + 9
    grafted.detach()


def test_an_exported_model_names_the_end_of_a_turn(talker: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = talker
    backbone = Backbone.wrap(model, tokenizer)
    graft = build_graft(graft_config({"kind": "lora", "rank": 2}), backbone)
    folder = export_graft(graft, backbone, tmp_path / "exported")
    assert GenerationConfig.from_pretrained(folder).eos_token_id == [EOS, *turn_end_ids(tokenizer)]


def test_an_exported_model_also_ends_at_the_tokenizer_s_eos(talker: tuple[Any, Any], tmp_path: Path) -> None:
    _, tokenizer = talker
    path = tmp_path / "generation_config.json"
    for given in (7, [7, 9], None):
        path.write_text(json.dumps({"eos_token_id": given}), encoding="utf-8")
        add_turn_ends(tmp_path, tokenizer)
        known = given if isinstance(given, list) else [given] * (given is not None)
        assert json.loads(path.read_text(encoding="utf-8"))["eos_token_id"] == [*known, EOS, *turn_end_ids(tokenizer)]


def test_a_clarifying_conversation_stops_there(talker: tuple[Any, Any]) -> None:
    model, tokenizer = talker
    prompt = Prompt(instructions="Ask.", shots=(), parts=(("text", "Who?"),), label="Answer:")
    reply = LocalModel(model, tokenizer, max_new_tokens=9).generate(prompt)
    assert (reply.text, reply.truncated) == ("hi", False)
