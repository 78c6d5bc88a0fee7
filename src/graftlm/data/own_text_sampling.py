"""Sample text from a backbone, as a substitute for its training data.

Free text begins like a document of the backbone's training. In a conversation the model samples both sides: a user's
turn after the beginning of the chat template, then the answer after the template's header of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from rich.progress import MofNCompleteColumn

from graftlm.backbone import Backbone, answer_end_ids, end_ids, leading_bos, max_sequence_length
from graftlm.backbone.chat_templates import render_messages
from graftlm.data.own_text import OwnText, batch_line, first_samples, key_line, read_complete_batches
from graftlm.data.source_config import SelfSourceConfig
from graftlm.data.token_sampler import TokenSampler
from graftlm.errors import DataError, first_line, shorten
from graftlm.files.writing import write_errors
from graftlm.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DOCUMENT_SEPARATOR = "<|endoftext|>"
_CONTENT = "the-content-of-the-user"  # a placeholder for the user's turn, which the model samples
_DEFAULT_CHAT_FRACTION = 0.5
_BARREN_BATCHES = 3
_MIN_TURN = 8
_SURPLUS = 1.25
_REAL_TEXT = "name real text under data.old, and set evaluation.own_tokens to 0"


def sample_own_text(
    backbone: Backbone,
    config: SelfSourceConfig,
    length: int,
    path: Path,
    *,
    key: str = "",
    model: PreTrainedModel | None = None,
    progress: bool = True,
) -> list[OwnText]:
    """Sample text from a backbone. Samples that an interrupted call left at `path` are kept.

    Args:
        backbone: the backbone; grafts that are attached to it are not active.
        config: how much to sample, and how.
        length: maximum number of tokens of a text if the config has none.
        path: the file of samples, which is extended.
        key: identifies the samples; a file with another key is written anew.
        model: a model that samples instead of the bare backbone, such as a `GraftedModel` on it.
        progress: show a progress bar.

    Returns:
        All samples of the file, in the order in which they were sampled.

    Raises:
        BackboneError: the backbone has no tokenizer.
        DataError: the backbone is not a causal language model, or has too few positions; its chat template is missing
            or can't be used, although conversations are requested; an opening is too long; several batches in a row
            have no usable text; or the file can't be written.
    """
    sampler = OwnTextSampler(backbone, config, config.length or length, model)
    return sample_batches(path, sampler, config.tokens, key=key, progress=progress)


class BatchSampler(Protocol):
    """A sampler whose batches depend only on its settings, their number and the earlier batches."""

    def batch(self, number: int, samples: Sequence[OwnText], needed: int) -> list[OwnText]:
        """Sample the next batch.

        Args:
            number: the number of the batch, from 0, which determines its random numbers.
            samples: the samples of all earlier batches.
            needed: number of tokens that are still to be sampled. A batch may have fewer or slightly more.

        Returns:
            The samples, in order, including those that are not used (`OwnText.left_out`).
        """
        ...

    def check_yield(self, batches: Sequence[Sequence[OwnText]]) -> bool:
        """Return whether sampling goes on after these batches, which are all so far.

        It is called after each batch, also for the batches of an interrupted call.

        Raises:
            DataError: the batches have no usable sample, and sampling more would not help.
        """
        ...


def sample_batches(
    path: Path,
    sampler: BatchSampler,
    tokens: int,
    *,
    key: str,
    progress: bool,
) -> list[OwnText]:
    """Sample batches into a file until they have enough tokens, or until the sampler stops.

    Complete batches that the file has are kept.

    Args:
        path: the file of samples, which is extended. Its folder is created.
        sampler: samples the batches.
        tokens: number of tokens to sample.
        key: identifies the samples; a file with another key is written anew.
        progress: show a progress bar.

    Returns:
        All samples of the file, in the order in which they were sampled.

    Raises:
        DataError: the sampler raises it because it yields nothing that can be used, or the file can't be written.
    """
    with write_errors(path, DataError, "free some space, and run the same command to go on"):
        return _sample_to(path, sampler, tokens, key=key, progress=progress)


def _sample_to(path: Path, sampler: BatchSampler, tokens: int, *, key: str, progress: bool) -> list[OwnText]:
    """Extend a file with batches, and return all of its samples; see `sample_batches`."""
    batches = read_complete_batches(path, key)
    samples = [sample for batch in batches for sample in batch]
    total = _count_tokens(samples)
    bar = progress_bar("sampling", tokens, MofNCompleteColumn(), "tokens", show=progress)
    with bar as update, path.open("ab") as file:
        if not batches:
            file.truncate(0)
            file.write(key_line(key))
        # The sampler drops conversations after the same batches as in the interrupted call.
        goes_on = True
        for count in range(1, len(batches) + 1):
            goes_on = sampler.check_yield(batches[:count])
        while goes_on and total < tokens:
            update(completed=total)
            batch = sampler.batch(len(batches), samples, tokens - total)
            batches.append(batch)
            samples += batch
            total += _count_tokens(batch)
            file.write(batch_line(batch))
            file.flush()
            goes_on = sampler.check_yield(batches)
        update(completed=tokens)
    return samples


def _count_tokens(samples: Sequence[OwnText]) -> int:
    return sum(sample.tokens for sample in samples)


class ChatParts(NamedTuple):
    """The tokens of a chat template around a user's first turn.

    Attributes:
        before: the tokens before the turn.
        after: the tokens from the end of the turn to the beginning of the answer.
    """

    before: list[int]
    after: list[int]


class OwnTextSampler:
    """Sample batches of text from a backbone.

    Args:
        backbone: the backbone.
        config: how to sample.
        length: maximum number of tokens of a text.
        model: a model that samples instead of the bare backbone.

    Raises:
        BackboneError: the backbone has no tokenizer.
        DataError: the backbone is not a causal language model, or has fewer than `length` positions; its chat template
            is missing or can't be used, although conversations are requested; or a text of `length` tokens has no room
            after an opening.
    """

    def __init__(
        self, backbone: Backbone, config: SelfSourceConfig, length: int, model: PreTrainedModel | None = None
    ) -> None:
        self.name = backbone.name
        self._tokenizer = backbone.need_tokenizer()
        check_backbone(backbone, length)
        self._sampler = TokenSampler(backbone, config.seed, model, config.batch_size)
        self._config = config
        self._length = length
        self._ends = end_ids(backbone.model, self._tokenizer)
        self._answer_ends = self._ends
        self._template: ChatParts | None = self._find_template()
        self._chat_fraction = 0.0
        if self._template is not None:
            self._answer_ends = answer_end_ids(backbone.model, self._tokenizer)
            fraction = config.chat_fraction
            self._chat_fraction = _DEFAULT_CHAT_FRACTION if fraction is None else fraction
        self._starts: list[list[int]] = []
        if self._chat_fraction < 1:
            self._starts = self._find_starts()

    def _find_template(self) -> ChatParts | None:
        """Return the parts of the chat template if conversations are sampled.

        By default there are none if the template is missing or can't be used.
        """
        fraction = self._config.chat_fraction
        if fraction == 0:
            return None
        if fraction is not None:
            return split_template(self._tokenizer, self._length, self.name)
        if not self._tokenizer.chat_template:
            return None
        try:
            return split_template(self._tokenizer, self._length, self.name)
        except DataError:
            return None

    def _find_starts(self) -> list[list[int]]:
        return free_starts(self._tokenizer, self._config.openings, self._length, self.name)

    def batch(self, number: int, samples: Sequence[OwnText], needed: int) -> list[OwnText]:
        """Sample the next batch.

        It has either conversations or free text, whichever has more tokens left to sample.

        Args:
            number: the number of the batch, from 0, which determines its random numbers.
            samples: the samples of all earlier batches.
            needed: number of tokens that are still to be sampled.
        """
        chat_tokens = sum(sample.tokens for sample in samples if sample.is_chat)
        missing_in_chats = self._chat_fraction * (_count_tokens(samples) + needed) - chat_tokens
        missing_in_free_text = needed - missing_in_chats
        is_chat = missing_in_chats > missing_in_free_text
        missing = math.ceil(max(missing_in_chats, missing_in_free_text))
        tokens = min(needed, max(1, missing))
        count = min(self._sampler.batch_texts, self._texts_for(tokens, samples, is_chat=is_chat))
        texts = self._sample(number, count, is_chat=is_chat)
        return first_samples(texts, tokens)

    def _texts_for(self, tokens: int, samples: Sequence[OwnText], *, is_chat: bool) -> int:
        """Return how many texts are sampled for a number of tokens, by the mean size of earlier texts of the kind."""
        sizes = [sample.tokens for sample in samples if sample.is_chat == is_chat]
        if not sizes:
            return math.ceil(tokens / self._length) + 1
        # A few more texts than are needed cost less than another batch.
        return math.ceil(_SURPLUS * tokens * len(sizes) / sum(sizes)) + 1

    def _sample(self, number: int, rows: int, *, is_chat: bool) -> list[OwnText]:
        """Sample `rows` texts with the random numbers of a batch."""
        with self._sampler.seeded(number):
            if is_chat:
                return self._conversations(rows)
            return self._free_texts(rows, number)

    def check_yield(self, batches: Sequence[Sequence[OwnText]]) -> bool:
        """Check whether the latest batches have usable samples.

        After several batches without any, conversations are no longer sampled, unless `chat_fraction` requests them.

        Args:
            batches: all batches so far.

        Returns:
            True, since sampling always goes on.

        Raises:
            DataError: the latest batches have no usable sample, although they are free text or requested conversations.
        """
        barren = 0
        for batch in reversed(batches):
            if batch:
                break
            barren += 1
        if barren == 0 or barren % _BARREN_BATCHES != 0:
            return True
        if self._chat_fraction == 0 or self._config.chat_fraction is not None:
            samples = [sample for batch in batches for sample in batch]
            raise self._yield_error(samples, barren)
        self._chat_fraction = 0.0
        self._starts = self._find_starts()
        return True

    def _yield_error(self, samples: Sequence[OwnText], barren: int) -> DataError:
        """Return the error that explains why the latest `barren` batches have no usable sample."""
        has_free_text = any(not sample.is_chat for sample in samples)
        if self._chat_fraction == 1 or (self._chat_fraction > 0 and has_free_text):
            problem = "no conversation whose user's turn ends"
            remedy = "raise the length, set chat_fraction to 0"
        else:
            problem = "only texts that end at once"
            remedy = "try a temperature of 1"
        texts = self._sampler.batch_texts
        return DataError(
            f"The backbone {self.name} samples {problem} ({barren} batches of at most {texts} texts "
            f"of {self._length} tokens, after {_count_tokens(samples):,} of {self._config.tokens:,} tokens): {remedy}, "
            "or name real text under data.old; for own_kl, set evaluation.own_tokens to 0."
        )

    def _free_texts(self, rows: int, number: int) -> list[OwnText]:
        """Sample texts after the starts in turn, without those that end at once."""
        first = number * self._sampler.batch_texts
        starts = [self._starts[(first + row) % len(self._starts)] for row in range(rows)]
        ends = set(self._ends)
        if leading_bos(self._tokenizer) is None:
            ends.update(document_start(self._tokenizer))  # it separates documents, so it also ends them
        # Texts with starts of one length are sampled together, so that each can have the full length.
        rows_by_length: dict[int, list[int]] = {}
        for row, start in enumerate(starts):
            rows_by_length.setdefault(len(start), []).append(row)
        texts: dict[int, OwnText] = {}
        for length in sorted(rows_by_length):
            group = rows_by_length[length]
            continued = self._continue([starts[row] for row in group], ends, self._length)
            for row, new in zip(group, continued, strict=True):
                if new and new[0] not in ends:
                    texts[row] = OwnText(starts[row] + new, [(length, length + len(new))])
        # The last texts of a batch may be dropped, which must not depend on the starts.
        return [texts[row] for row in sorted(texts)]

    def _conversations(self, rows: int) -> list[OwnText]:
        """Sample users' turns and answers to them, without conversations whose user's turn does not end."""
        assert self._template is not None, "conversations have a template"
        before, after = self._template
        turn_end = after[0]
        budget = self._length - len(before) - len(after)
        turns = self._continue([before] * rows, self._ends | {turn_end}, len(before) + budget // 2)
        ended = [turn for turn in turns if len(turn) > 1 and turn[-1] == turn_end]
        if not ended:
            return []
        prompts = [before + turn + after[1:] for turn in ended]
        answers = self._continue(prompts, self._answer_ends, self._length)
        texts = []
        for turn, prompt, answer in zip(ended, prompts, answers, strict=True):
            if answer:
                user_turn = (len(before), len(before) + len(turn))
                answer_turn = (len(prompt), len(prompt) + len(answer))
                texts.append(OwnText(prompt + answer, [user_turn, answer_turn]))
        return texts

    def _continue(self, prompts: list[list[int]], ends: AbstractSet[int], length: int) -> list[list[int]]:
        """Sample tokens after each prompt, up to and including the first end.

        Args:
            prompts: the prompts.
            ends: ids of the tokens that end a text.
            length: maximum number of tokens of the longest prompt and the sampled tokens together.
        """
        width = max(len(prompt) for prompt in prompts)
        return self._sampler.sample(
            prompts,
            ends,
            length - width,
            temperature=self._config.temperature,
            top_p=self._config.top_p,
        )


def check_backbone(backbone: Backbone, length: int, remedy: str | None = None) -> None:
    """Raise `DataError` if a backbone is not a causal language model, or has fewer than `length` positions.

    Args:
        backbone: the backbone.
        length: maximum number of tokens of a sampled text.
        remedy: what the user can do instead of sampling, for error messages; None names the settings of recipes.
    """
    if not (backbone.sites.family.causal and backbone.model.can_generate()):
        raise DataError(
            f"The backbone {backbone.name} can't sample text, since it is not a causal language model: "
            f"{remedy or _REAL_TEXT}."
        )
    limit = max_sequence_length(backbone.model)
    if limit < length:
        raise DataError(
            f"The backbone {backbone.name} has {limit} positions, but texts of {length} tokens are to be sampled: "
            f"{remedy or 'lower data.length or the length of the source'}."
        )


def free_starts(
    tokenizer: PreTrainedTokenizerBase,
    openings: Sequence[str],
    length: int,
    name: str,
) -> list[list[int]]:
    """Return the token ids that free texts begin with, one list for each opening.

    A list has the token with which a document begins (the leading BOS, `<|endoftext|>`, another BOS or EOS), if there
    is one, and the tokens of its opening.

    Args:
        tokenizer: the backbone's tokenizer.
        openings: texts to begin with. If there are none, one list without an opening is returned.
        length: maximum number of tokens of a text.
        name: the backbone's name, for error messages.

    Raises:
        DataError: a list would be empty, or leaves no room for another token in `length` tokens.
    """
    start = document_start(tokenizer)
    encoded: list[list[int]] = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in openings]
    if not encoded:
        encoded = [[]]
    if not start and not all(encoded):
        raise DataError(
            f"The tokenizer of {name} has no token that begins or ends a text: set openings of the backbone's own "
            "text, and set evaluation.own_tokens to 0."
        )
    for text, ids in zip(openings, encoded, strict=False):
        size = len(start) + len(ids)
        if size >= length:
            raise DataError(
                f"The opening {shorten(text)!r} has {size} tokens with the beginning of a document, but a text has at "
                f"most {length}: shorten the opening, or raise the length."
            )
    return [start + opening for opening in encoded]


def document_start(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the id of the token with which a document begins, or an empty list if the tokenizer has none."""
    candidates = (
        leading_bos(tokenizer),
        tokenizer.get_vocab().get(_DOCUMENT_SEPARATOR),
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
    )
    return [token for token in candidates if isinstance(token, int)][:1]


def split_template(
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    name: str,
    *,
    system: str | None = None,
    remedy: str = "set chat_fraction to 0",
) -> ChatParts:
    """Split a chat template into the tokens before and after a user's first turn.

    Args:
        tokenizer: the backbone's tokenizer.
        length: maximum number of tokens of a text.
        name: the backbone's name, for error messages.
        system: a system message before the turn; None for that of the template, if it has one.
        remedy: what the user can do to sample no conversations, for error messages.

    Raises:
        DataError: the tokenizer has no template; the template can't be rendered or drops the user's message, has no
            token before the turn or no special token that ends it; or it leaves no room for two turns in `length`
            tokens.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"The tokenizer of {name} has no chat template for conversations: {remedy}, or name a chat model."
        )
    messages = [{"role": "user", "content": _CONTENT}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    try:
        text = render_messages(tokenizer, messages, header=True)
    except Exception as error:  # Errors come from jinja, or are raised by the template.
        conversation = " with a system message" if system is not None else ""
        raise DataError(
            f"The chat template of {name} can't be rendered{conversation} ({first_line(error)}): {remedy}."
        ) from error
    text_before, content, text_after = text.partition(_CONTENT)
    before = tokenizer(text_before, add_special_tokens=False)["input_ids"]
    after = tokenizer(text_after, add_special_tokens=False)["input_ids"]
    if not content or not before or not after or after[0] not in tokenizer.added_tokens_decoder:
        raise DataError(
            f"The chat template of {name} has no token before a user's turn, or no special token after it, but both "
            f"are expected: {remedy}."
        )
    size = len(before) + len(after)
    if length < size + 2 * _MIN_TURN:
        raise DataError(
            f"The chat template of {name} has {size} tokens, which leaves no room for two turns of {_MIN_TURN} tokens "
            f"in a text of {length}: raise the length, or {remedy}."
        )
    return ChatParts(before, after)
