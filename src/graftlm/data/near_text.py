"""Sample text near the new text: texts that begin like the new ones and are about other things.

A graft that learns facts by conversation overgeneralizes to similar questions first. So the backbone writes such
questions and answers them, and the graft learns to answer them as before. A conversation begins with the first words of
a new question; the backbone samples the rest of the question, then the answer. Where the new text has prompts and
completions, or documents, the backbone continues the first words of a prompt or of a sentence as free text.

A text is left out if its question does not end, if the question is a new one or repeats an earlier one, if it is about
a thing that the new text names (`graftlm.data.new_names`), or if the answer is empty or runs in a loop.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graftlm.backbone import Backbone, answer_end_ids, continuation_ids, end_ids
from graftlm.data.new_names import Name, NewNames, normalized, questions_of
from graftlm.data.own_text import OwnText, first_samples
from graftlm.data.own_text_sampling import ChatParts, check_backbone, free_starts, sample_batches, split_template
from graftlm.data.source_config import SelfSourceConfig
from graftlm.data.sources import Document
from graftlm.data.token_sampler import TokenSampler
from graftlm.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEFT_OUT = {
    "unfinished question": "raise question_tokens",
    "new question": "name more varied new text",
    "new name": "name new text with fewer names",
    "repeated question": "raise temperature, or name more varied new text",
    "no answer": "try another answer_temperature",
}
"""The reasons for which texts are left out, and what helps if they leave out nearly all texts."""

_MAX_WORDS = 4
_MAX_OPENING_TOKENS = 16
_RARE_WORD_TOKENS = 3
_MIN_ANSWER = 8
_DRAWS = 200
_SENTENCE_CHARACTERS = 400
_RECENT_TEXTS = 128
_MIN_SHARE = 0.02
_SIMILAR = 0.8
_LOOP = 4
_LOOP_TIMES = 4
_REMEDY = "leave near out of the backbone's own text"
# A word with what is attached to it; in scripts without spaces, a character.
_SPACELESS = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_OPENING_WORD = re.compile(rf"\s*(?:[{_SPACELESS}]|[^\s{_SPACELESS}]+)")
_SENTENCE_START = re.compile(r"(?:[.!?]\s+|\n\s*)(?=\w)")


def sample_near_text(
    backbone: Backbone,
    config: SelfSourceConfig,
    documents: Sequence[Document],
    length: int,
    path: Path,
    *,
    key: str = "",
    progress: bool = True,
    log: Callable[[str], None] | None = None,
) -> list[OwnText]:
    """Sample text near new documents. Texts that an interrupted call left at `path` are kept.

    Sampling stops early if nearly all of the latest texts are left out.

    Args:
        backbone: the backbone; grafts that are attached to it are not active.
        config: how much to sample, and how.
        documents: the new documents, at least one.
        length: maximum number of tokens of a text if the config has none.
        path: the file of texts, which is extended.
        key: identifies the texts; a file with another key is written anew. It must depend on the documents.
        progress: show a progress bar.
        log: called with a line of text about the names of the new text, and with one if sampling stops early.

    Returns:
        All texts of the file, including those that are left out.

    Raises:
        BackboneError: the backbone has no tokenizer.
        DataError: the backbone is not a causal language model, or has too few positions; new documents are
            conversations, and its chat template is missing, can't be used or leaves no room for them; no opening is
            found in the new documents; every text is left out; or the file can't be written.
    """
    sampler = NearTextSampler(backbone, config, documents, config.length or length)
    if log is not None:
        log(sampler.names_line())
    samples = sample_batches(path, sampler, config.tokens, key=key, progress=progress)
    total = sum(sample.tokens for sample in samples)
    if log is not None and total < config.tokens:
        log(
            f"Sampling stopped after {total:,} of {config.tokens:,} tokens, since nearly all of the latest texts were "
            "left out."
        )
    return samples


@dataclass(frozen=True)
class Opening:
    """The beginning of a text.

    Attributes:
        text: the first words of a new question, prompt or sentence.
        kind: what the new document is: chat, prompt (a prompt with a completion) or document (free text).
        system: the system message of the conversation; None if there is none.
    """

    text: str
    kind: str
    system: str | None = None


class NewOpenings:
    """Draw openings of one to four words from new documents. They end before the first name or rare word.

    Args:
        documents: the new documents, at least one.
        names: the names of the documents.
        tokenizer: the backbone's tokenizer.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        names: NewNames,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._documents = documents
        self._names = names
        self._tokenizer = tokenizer

    def draw(self, generator: np.random.Generator) -> Opening:
        """Return a random opening of a random document.

        Raises:
            DataError: none of 200 random documents has an opening.
        """
        for _ in range(_DRAWS):
            document = self._documents[int(generator.integers(len(self._documents)))]
            opening = self._opening(document, generator)
            if opening is not None:
                return opening
        raise DataError(
            f"None of {_DRAWS} texts drawn from the new text begins with words before a name, such as 'What is', but "
            f"text near the new text begins with such words: {_REMEDY}, or begin some new questions with common words."
        )

    def _opening(self, document: Document, generator: np.random.Generator) -> Opening | None:
        """Return a random opening of a document, or None if it has none or its opening has too many tokens."""
        questions = questions_of(document)
        if questions:
            text = questions[0]
            kind = "chat" if document.chat is not None else "prompt"
        else:
            text = _random_sentence(document.text, generator)
            kind = "document"
        ends = self._ends(text)
        if not ends:
            return None
        end = ends[int(generator.integers(len(ends)))]
        opening = text[:end].strip()
        ids = self._tokenizer(opening, add_special_tokens=False)["input_ids"]
        if not ids or len(ids) > _MAX_OPENING_TOKENS:
            return None
        return Opening(opening, kind, _system_message(document))

    def _ends(self, text: str) -> list[int]:
        """Return the characters at which an opening of one, two, ... words ends, before the end of the text."""
        text = text.rstrip()
        limit = self._names.first_position(text)
        ends = []
        for match in _OPENING_WORD.finditer(text):
            if match.end() > limit or len(ends) == _MAX_WORDS:
                break
            is_rare = self._names.tokens_of(match.group().strip()) >= _RARE_WORD_TOKENS
            is_last = match.end() == len(text)
            if ends and (is_rare or is_last):
                break
            ends.append(match.end())
        return ends


def _random_sentence(text: str, generator: np.random.Generator) -> str:
    """Return a part of a text from the beginning of a random sentence, or from that of the text."""
    position = int(generator.integers(len(text)))
    match = _SENTENCE_START.search(text, position)
    start = match.end() if match else 0
    return text[start : start + _SENTENCE_CHARACTERS].lstrip()


def _system_message(document: Document) -> str | None:
    if document.chat is None:
        return None
    first = document.chat.messages[0]
    return first["content"] if first["role"] == "system" else None


class NearTextSampler:
    """Sample batches of text near new documents.

    Args:
        backbone: the backbone.
        config: how to sample.
        documents: the new documents, at least one.
        length: maximum number of tokens of a text.

    Raises:
        BackboneError: the backbone has no tokenizer.
        DataError: the backbone is not a causal language model, or has fewer than `length` positions; new documents are
            conversations, and its chat template is missing, can't be used or leaves no room for them; or no opening is
            found in the new documents.
    """

    def __init__(
        self,
        backbone: Backbone,
        config: SelfSourceConfig,
        documents: Sequence[Document],
        length: int,
    ) -> None:
        self.name = backbone.name
        self._tokenizer = backbone.need_tokenizer()
        check_backbone(backbone, length)
        self._sampler = TokenSampler(backbone, config.seed, rows=config.batch_size)
        self._config = config
        self._length = length
        self._ends = end_ids(backbone.model, self._tokenizer)
        self._answer_ends = answer_end_ids(backbone.model, self._tokenizer)
        self._names = NewNames(documents, self._tokenizer)
        self._openings = NewOpenings(documents, self._names, self._tokenizer)
        self._new_questions = {normalized(text) for document in documents for text in questions_of(document)}
        self._templates: dict[str | None, ChatParts] = {}
        for document in documents:
            if document.chat is not None:
                self._template(_system_message(document))
        self._openings.draw(np.random.default_rng(config.seed))
        # The words of the questions of used texts, those of the questions in the present batch, and the number of
        # texts whose questions were read. An interrupted sampling goes on with the same words.
        self._earlier: list[frozenset[str]] = []
        self._in_batch: list[frozenset[str]] = []
        self._n_read = 0

    def names_line(self) -> str:
        """Return a sentence with the first names of the new text, or that it has none, for a log."""
        names = sorted(" ".join(name) for name in self._names.told)
        if not names:
            return (
                "No names are recognized in the new text (words with capital letters inside sentences, numbers), so no "
                "texts near it are left out because of a name."
            )
        shown = ", ".join(names[:8])
        more = ", ..." if len(names) > 8 else ""
        return f"Names of the new text ({len(names):,}), which texts near it are not about: {shown}{more}."

    def _template(self, system: str | None) -> ChatParts:
        """Return the parts of the chat template with a system message, after checking that a conversation has room."""
        if system not in self._templates:
            parts = split_template(self._tokenizer, self._length, self.name, system=system, remedy=_REMEDY)
            needed = len(parts.before) + len(parts.after) + _MAX_OPENING_TOKENS
            needed += self._config.question_tokens + _MIN_ANSWER
            if needed > self._length:
                raise DataError(
                    f"A conversation near the new text has up to {needed} tokens with the chat template of {self.name} "
                    f"and a short answer, but a text has at most {self._length}: raise data.length or the length of "
                    "the source, or lower question_tokens."
                )
            self._templates[system] = parts
        return self._templates[system]

    def batch(self, number: int, samples: Sequence[OwnText], needed: int) -> list[OwnText]:
        """Sample the next batch.

        Args:
            number: the number of the batch, from 0, which determines its random numbers.
            samples: the samples of all earlier batches.
            needed: number of tokens that are still to be sampled.
        """
        for sample in samples[self._n_read :]:
            if not sample.left_out:
                self._earlier.append(self._question_words(sample))
        self._n_read = len(samples)
        self._in_batch = []
        generator = np.random.default_rng([self._config.seed, number])
        # About half of the texts are left out or have short answers.
        wanted = math.ceil(2 * needed / self._config.answer_tokens)
        count = min(self._sampler.batch_texts, wanted)
        openings = [self._openings.draw(generator) for _ in range(count)]
        rows_by_kind: dict[str, list[int]] = {"chat": [], "prompt": [], "document": []}
        for row, opening in enumerate(openings):
            rows_by_kind[opening.kind].append(row)
        texts: dict[int, OwnText] = {}
        with self._sampler.seeded(number):
            for kind, rows in rows_by_kind.items():
                sample = self._conversations if kind == "chat" else self._free_texts
                texts.update(zip(rows, sample([openings[row] for row in rows]), strict=True))
        # The last texts of a batch may be dropped, which must not depend on their kind.
        return first_samples([texts[row] for row in sorted(texts)], needed)

    def check_yield(self, batches: Sequence[Sequence[OwnText]]) -> bool:
        """Return whether sampling goes on: False if at most 2 % of the latest 128 texts are used.

        Args:
            batches: all batches so far.

        Raises:
            DataError: there are at least 128 texts, and none of them is used.
        """
        texts = [text for batch in batches for text in batch]
        used = sum(not text.left_out for text in texts[-_RECENT_TEXTS:])
        if len(texts) < _RECENT_TEXTS or used > _MIN_SHARE * _RECENT_TEXTS:
            return True
        if any(not text.left_out for text in texts):
            return False
        reasons = Counter(text.left_out for text in texts).most_common()
        counts = ", ".join(f"{count} ({reason})" for reason, count in reasons)
        raise DataError(
            f"All of the first {len(texts):,} texts that {self.name} samples near the new text are left out: {counts}. "
            f"{LEFT_OUT[reasons[0][0]].capitalize()}, or {_REMEDY}."
        )

    def _conversations(self, openings: Sequence[Opening]) -> list[OwnText]:
        """Sample the rest of each question, then the answers to the questions that can be used."""
        if not openings:
            return []
        prompts = []
        ends = set(self._ends)
        for opening in openings:
            before, after = self._template(opening.system)
            header = str(self._tokenizer.decode(before))
            prompts.append(before + continuation_ids(self._tokenizer, header, opening.text))
            ends.add(after[0])
        turns = self._sampler.sample(
            prompts,
            ends,
            self._config.question_tokens,
            temperature=self._config.temperature,
            top_p=self._config.top_p,
        )
        texts = []
        for opening, prompt, turn in zip(openings, prompts, turns, strict=True):
            texts.append(self._asked(opening, prompt, turn))
        answers = self._sampler.sample(
            [text.ids for text in texts if not text.left_out],
            self._answer_ends,
            self._config.answer_tokens,
            temperature=self._config.answer_temperature,
            top_p=self._config.top_p,
        )
        remaining = iter(answers)
        return [text if text.left_out else self._answered(text, next(remaining)) for text in texts]

    def _asked(self, opening: Opening, prompt: list[int], turn: list[int]) -> OwnText:
        """Return a conversation without its answer. It is left out if its question can't be used."""
        before, after = self._template(opening.system)
        question = (len(before), len(prompt) + len(turn))
        if len(turn) < 2 or turn[-1] != after[0]:
            return OwnText(prompt + turn, [], question, "unfinished question")
        ids = prompt + turn + after[1:]
        asked = self._decode(ids[question[0] : question[1]])
        reason = ""
        if normalized(asked) in self._new_questions:
            reason = "new question"
        elif self._names.leave_out(asked):
            reason = "new name"
        elif self._is_repeated(asked):
            reason = "repeated question"
        return OwnText(ids, [], question, reason)

    def _answered(self, text: OwnText, answer: list[int]) -> OwnText:
        """Return a conversation with its answer, which is cut at the length. It is left out if it can't be used."""
        kept = answer[: self._length - len(text.ids)]
        written = self._decode(kept)
        reason = ""
        if not normalized(written) or loops(kept):
            reason = "no answer"
        elif self._names.leave_out("", written):
            reason = "new name"
        begin = len(text.ids)
        ids = text.ids + kept
        turns = [] if reason else [(begin, len(ids))]
        return OwnText(ids, turns, text.question, reason)

    def _free_texts(self, openings: Sequence[Opening]) -> list[OwnText]:
        """Continue openings of one kind as free text."""
        if not openings:
            return []
        starts = []
        for opening in openings:
            (start,) = free_starts(self._tokenizer, [opening.text], self._length, self.name)
            starts.append(start)
        tokens = self._length - max(len(start) for start in starts)
        if openings[0].kind == "prompt":
            tokens = min(tokens, self._config.question_tokens + self._config.answer_tokens)
        continued = self._sampler.sample(
            starts,
            self._ends,
            tokens,
            temperature=self._config.temperature,
            top_p=self._config.top_p,
        )
        return [self._free_text(start, new) for start, new in zip(starts, continued, strict=True)]

    def _free_text(self, start: list[int], new: list[int]) -> OwnText:
        """Return a text of a start and sampled tokens. It is left out if it can't be used."""
        ids = start + new
        written = self._decode(ids)
        reason = ""
        if not normalized(self._decode(new)) or loops(new):
            reason = "no answer"
        elif self._begins_with_new_question(normalized(written)):
            reason = "new question"
        elif self._names.leave_out(written):
            reason = "new name"
        elif self._is_repeated(written):
            reason = "repeated question"
        turns = [] if reason else [(len(start), len(ids))]
        return OwnText(ids, turns, left_out=reason)

    def _is_repeated(self, text: str) -> bool:
        """Return whether a question or text is similar to an earlier one. Otherwise it is kept for comparison."""
        words = frozenset(normalized(text))
        if any(_similar(words, other) for other in (*self._earlier, *self._in_batch)):
            return True
        self._in_batch.append(words)
        return False

    def _begins_with_new_question(self, words: Name) -> bool:
        sizes = {len(question) for question in self._new_questions}
        return any(words[:size] in self._new_questions for size in sizes)

    def _question_words(self, sample: OwnText) -> frozenset[str]:
        start, stop = sample.question or (0, len(sample.ids))
        return frozenset(normalized(self._decode(sample.ids[start:stop])))

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def _similar(words: frozenset[str], other: frozenset[str]) -> bool:
    """Return whether the Jaccard similarity of two sets of words is at least 0.8."""
    return len(words & other) >= _SIMILAR * len(words | other)


def loops(ids: Sequence[int]) -> bool:
    """Return whether a run of four tokens occurs at least four times and makes up a third of a sequence."""
    counts = Counter(tuple(ids[start : start + _LOOP]) for start in range(len(ids) - _LOOP + 1))
    most = max(counts.values(), default=0)
    return most >= _LOOP_TIMES and 3 * _LOOP * most >= len(ids)
