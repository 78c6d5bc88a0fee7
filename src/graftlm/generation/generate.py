"""Generate text from a model, with or without a graft, and chat with a model in the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from graftlm.backbone import (
    IncrementalDetokenizer,
    answer_end_ids,
    compiled_decoding,
    continuation_text,
    end_ids,
    max_sequence_length,
    padding_id,
    token_texts,
)
from graftlm.backbone.chat_templates import Message
from graftlm.backbone.load import has_chat_template
from graftlm.config import Config
from graftlm.data.chats import render_question
from graftlm.errors import ArtifactError, DataError, GraftError
from graftlm.files.reading import decode_utf8
from graftlm.generation.sums import read_summands, sum_of_grafts
from graftlm.grafted.model import GraftedModel
from graftlm.grafted.traces import trace_values
from graftlm.store.artifact import backbone_name, backbone_of, is_model, load_grafts
from graftlm.store.manifest import read_manifest
from graftlm.store.stages import chosen_graft

HELP = (
    "Type a message. /reset starts a new conversation, /system TEXT sets the system message, /exit or Ctrl-D quits.\n"
)


class Decoding(Config):
    """Decoding options: greedy decoding, beam search or sampling.

    Args:
        max_new_tokens: maximum number of new tokens.
        sample: sample tokens instead of selecting the most likely one.
        temperature: sampling temperature, which requires `sample`; None means 1.
        top_p: total probability of the candidates of nucleus sampling, which requires `sample`; None means 1.
        num_beams: number of beams; 1 disables beam search.
        seed: seed of PyTorch's global random generator; None leaves its state unchanged.
        compile: compile the step of each token, if the model and its grafts can be compiled. Beam search and traces are
            not compiled.
    """

    max_new_tokens: int = Field(64, ge=1)
    sample: bool = False
    temperature: float | None = Field(None, gt=0, description="Sampling temperature; 1 by default.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling: total probability of the candidates.")
    num_beams: int = Field(1, ge=1, description="Number of beams; 1 disables beam search.")
    seed: int | None = Field(None, ge=0, description="Random seed.")
    compile: bool = Field(False, description="Compile the step of a token: a minute at first, then faster on a GPU.")

    def _problems(self) -> Iterator[str]:
        if self.sample:
            return
        if self.temperature is not None or self.top_p is not None:
            yield "temperature and top_p only affect sampling, but sample is off: set sample (--sample)"

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of transformers' `generate`, which override the checkpoint's defaults."""
        arguments: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "do_sample": self.sample,
            "num_beams": self.num_beams,
        }
        if self.sample:
            arguments["temperature"] = self.temperature or 1.0
            arguments["top_p"] = self.top_p or 1.0
            arguments["top_k"] = 0
        return arguments


@dataclass(frozen=True)
class TracedToken:
    """A generated token and the trace at the position that predicted it.

    Args:
        text: the text of the token.
        values: value of the trace by label, such as the weight of each expert or the mean opening of the gates.
    """

    text: str
    values: dict[str, float]


@dataclass(frozen=True)
class Generation:
    """A prompt and its continuation.

    Args:
        prompt: the prompt; for a chat, the rendered chat template.
        text: the new text, without special tokens.
        tokens: number of new tokens, including an end token.
        seconds: duration of the generation, without tokenization and trace.
        trace: one entry per new token, or None if no trace was requested.
        weights: the weight of each graft of a sum by name; None for other models.
    """

    prompt: str
    text: str
    tokens: int
    seconds: float
    trace: list[TracedToken] | None = None
    weights: dict[str, float] | None = None

    def to_json(self) -> dict[str, object]:
        """Return the fields by name as JSON values; `trace` is a list of {"text": ..., "values": {...}}, or None."""
        return asdict(self)


class _Stream(BaseStreamer):
    """Calls `on_text` with each new piece of the continuation, in whole characters.

    Args:
        detokenizer: the text of the continuation.
        on_text: receives the pieces.
        ends: ids that end the continuation and are not part of its text.
    """

    def __init__(
        self, detokenizer: IncrementalDetokenizer, on_text: Callable[[str], None], ends: Collection[int]
    ) -> None:
        self._detokenizer = detokenizer
        self._on_text = on_text
        self._ends = ends
        self._has_prompt = False

    def put(self, value: Tensor) -> None:
        """Receive the prompt, then the ids of one token after another."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        for token in value.flatten().tolist():
            if token not in self._ends:
                text, _ = self._detokenizer.add(token)
                self._emit(text)

    def end(self) -> None:
        """Emit the text of an incomplete character."""
        self._emit(self._detokenizer.rest())

    def _emit(self, text: str) -> None:
        if text:
            self._on_text(text)


def read_prompt(argument: str) -> str:
    """Return the prompt that an argument of the command line gives.

    Args:
        argument: the prompt, or `-` to read it from stdin without a final line break.

    Raises:
        DataError: the prompt is not UTF-8 text.
    """
    if argument == "-":
        data = sys.stdin.buffer.read().removesuffix(b"\n")
    else:
        data = os.fsencode(argument)
    return decode_utf8(data, "The prompt")


def load_model(
    folder: str | Path,
    backbone: str | Path | None = None,
    *,
    changes: Sequence[str] = (),
    bare: bool = False,
    chat: bool = False,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a graft on its backbone, or a model, with the tokenizer.

    Args:
        folder: folder of a graft or of a model, a GGUF file, OWNER/NAME on the hub, or a packaged model such as
            `smollm2-135m-instruct`; or a sum of folders of grafts, such as `runs/danish:0.7+runs/legal:0.3`.
        backbone: name, folder or GGUF file of the graft's backbone; None uses the recorded one.
        changes: overrides of the graft's config, as `KEY=VALUE`.
        bare: load the backbone without the graft.
        chat: the model is to have conversations, so that its tokenizer needs a chat template.
        device: torch device; None selects the fastest available one.
        trust_remote_code: allow the backbone's repository to run its own code.

    Returns:
        The model, a `GraftedModel` if it has grafts, and its tokenizer.

    Raises:
        ArtifactError: the folder is neither a graft nor a model, or the graft belongs to another backbone or to one
            that generates no text.
        GraftError: a sum has a wrong weight, a graft twice, or a graft of a kind that takes no weight.
        RecipeError: a change does not fit the graft's config.
        BackboneError: the backbone can't be loaded, or has no tokenizer.
        DataError: the model is to have conversations, but has no chat template. No weights are loaded then.
    """
    summands = read_summands(folder)
    if summands:
        folder = next(iter(summands))
        if is_model(folder):
            raise ArtifactError(f"{folder} is a complete model, but a sum has grafts: leave the weight out.")
    elif Path(folder).is_dir() and not is_model(folder):
        folder = chosen_graft(Path(folder))
    if not is_model(folder):
        _check_writes(folder)
    if chat:
        name = backbone_name(folder, backbone)
        if has_chat_template(name, trust_remote_code=trust_remote_code) is False:
            raise DataError(f"The model {name} has no chat template for conversations: name a chat model.")
    loaded = backbone_of(folder, backbone, device=device, trust_remote_code=trust_remote_code)
    if bare or is_model(folder):
        return loaded.model, loaded.without_tokens.need_tokenizer()
    tokenizer = loaded.need_tokenizer()
    if summands:
        return sum_of_grafts(summands, loaded, changes), tokenizer
    grafts = load_grafts(folder, loaded, changes)
    return GraftedModel(loaded, grafts), tokenizer


def _check_writes(folder: str | Path) -> None:
    """Raise `ArtifactError` if the graft in a folder has a backbone that can't generate text."""
    manifest = read_manifest(folder)
    if manifest.backbone.kind == "causal-lm":
        return
    remedy = "name a graft of a causal language model"
    if manifest.graft_config().needs_tasks:
        remedy = f"predict labels with graft predict {folder} --task NAME, or {remedy}"
    raise ArtifactError(
        f"The graft {folder} was trained on {manifest.backbone.name} as {manifest.backbone.kind}, which generates no "
        f"text: {remedy}."
    )


@torch.inference_mode()
def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message],
    decoding: Decoding | None = None,
    *,
    on_text: Callable[[str], None] | None = None,
    trace: bool = False,
    cache: Cache | None = None,
    ends: Collection[int] | None = None,
) -> Generation:
    """Continue a prompt, or answer the last message of a conversation.

    Args:
        model: a `GraftedModel` or any causal language model of transformers.
        tokenizer: the model's tokenizer.
        prompt: text to continue, or messages, which are rendered with the tokenizer's chat template.
        decoding: decoding options; None generates at most 64 tokens greedily.
        on_text: called with each new piece of text. For a text prompt, the first piece is the prompt itself. With beam
            search it is called once, with the whole text.
        trace: return the graft's trace of each token, such as the chosen expert or the fraction of open gates.
        cache: a cache that already contains the first tokens of the prompt. New tokens are added to it.
        ends: ids of the tokens that end the new text. None takes those that end a text, and for messages also those
            that end a turn of the assistant; see `answer_end_ids`.

    Returns:
        The prompt, the new text, and the number of new tokens.

    Raises:
        DataError: the prompt has no tokens, does not fit the chat template, or exceeds the maximum length of the model
            together with the new tokens.
        GraftError: a trace is requested together with beam search, or from a model without a graft that has a trace.
    """
    decoding = decoding or Decoding()
    if trace and decoding.num_beams > 1:
        raise GraftError(f"A trace follows a single continuation, but num_beams is {decoding.num_beams}: set it to 1.")
    is_chat = not isinstance(prompt, str)
    rendered = render_question(prompt, tokenizer) if is_chat else prompt
    # Chat templates contain special tokens already.
    encoded = tokenizer(rendered, add_special_tokens=not is_chat, return_tensors="pt", verbose=False)
    inputs = encoded.to(model.device)
    prompt_ids = inputs["input_ids"][0].tolist()
    _check_length(model, len(prompt_ids), decoding.max_new_tokens)
    if ends is None:
        ends = answer_end_ids(model, tokenizer) if is_chat else end_ids(model, tokenizer)
    shown_prompt = ""
    if not is_chat:
        shown_prompt = str(tokenizer.decode(prompt_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    stream = None
    if on_text and decoding.num_beams == 1:
        if shown_prompt:
            on_text(shown_prompt)
        stream = _Stream(IncrementalDetokenizer(tokenizer, prompt_ids, ()), on_text, ends)
    options = decoding.arguments()
    if cache is not None:
        options["past_key_values"] = cache
    if decoding.seed is not None:
        torch.manual_seed(decoding.seed)
    # The dynamic cache of eager steps keeps the trace.
    wanted = decoding.compile and not trace
    compiled = compiled_decoding(model, options, prompt_tokens=len(prompt_ids), wanted=wanted)
    options |= compiled or {"disable_compile": True}
    start = time.perf_counter()
    output = model.generate(  # type: ignore[operator]  # a method of GenerationMixin
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        pad_token_id=padding_id(tokenizer),
        eos_token_id=sorted(ends) or None,
        return_dict_in_generate=True,
        streamer=stream,
        **options,
    )
    seconds = time.perf_counter() - start
    (tokens,) = output.sequences
    written = [token for token in tokens[len(prompt_ids) :].tolist() if token not in ends]
    text = continuation_text(tokenizer, prompt_ids, written)
    if on_text is not None and stream is None:
        on_text(shown_prompt + text)
    return Generation(
        prompt=rendered,
        text=text,
        tokens=len(tokens) - len(prompt_ids),
        seconds=seconds,
        trace=_trace(model, tokenizer, tokens, len(prompt_ids), output.past_key_values) if trace else None,
        weights=model.weights if isinstance(model, GraftedModel) and model.weights else None,
    )


def _trace(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: Tensor,
    prompt_length: int,
    cache: Cache,
) -> list[TracedToken]:
    """Return the trace of each new token, read at the position that predicted it."""
    traces = {}
    if isinstance(model, GraftedModel):
        traces = model.cache_traces(cache)
        if not traces:  # A graft that stores no trace in the cache may trace a forward pass.
            _, traces = model.forward_traces(input_ids=tokens[None, :-1], use_cache=False)
    if not traces:
        raise GraftError(
            "A trace was requested, but the model has no graft that makes a decision at each token: leave out the "
            "trace, or use such a graft."
        )
    texts = token_texts(
        tokenizer,
        tokens[prompt_length:],
        tokens[:prompt_length],
        skip_special_tokens=True,
    )
    return [
        TracedToken(text=text, values=trace_values(traces, row=0, token=position))
        for position, text in enumerate(texts, start=prompt_length - 1)
    ]


def _check_length(model: PreTrainedModel, prompt: int, new: int) -> None:
    """Raise `DataError` if a prompt is empty, or does not fit into the model's positions with the new tokens."""
    if prompt == 0:
        raise DataError("The prompt has no tokens: give at least one word to continue.")
    limit = max_sequence_length(model)
    if limit < prompt + new:
        raise DataError(
            f"The prompt has {prompt} tokens and max_new_tokens is {new}, {prompt + new} in all, but the model has "
            f"{limit} positions: shorten the prompt, or request fewer new tokens."
        )


class ChatSession:
    """A conversation with a model, which reads all messages again for each answer.

    With `Decoding.compile`, the step of a token is compiled once for each doubling of the conversation's length.

    Args:
        model: a `GraftedModel` or any causal language model of transformers.
        tokenizer: the model's tokenizer, with a chat template.
        decoding: decoding options; None generates at most 64 tokens greedily.
        system: the system message; None leaves it to the template.

    Attributes:
        messages: the conversation so far, as {"role": ..., "content": ...}.

    Raises:
        DataError: the tokenizer has no chat template, or its template can't render the system message and a question.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        decoding: Decoding | None = None,
        *,
        system: str | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._decoding = decoding or Decoding()
        self.messages: list[Message] = []
        self.reset(system)
        # An unusable template raises its error here rather than at the first reply.
        render_question([*self.messages, {"role": "user", "content": "a"}], tokenizer)

    def reset(self, system: str | None = None) -> None:
        """Start a new conversation.

        Args:
            system: the new system message; None keeps the present one.
        """
        if system is not None:
            self.messages = [{"role": "system", "content": system}]
        elif self.messages and self.messages[0]["role"] == "system":
            self.messages = self.messages[:1]
        else:
            self.messages = []

    def reply(self, text: str, on_text: Callable[[str], None] | None = None) -> str:
        """Answer a message, and add the message and the answer to `messages`.

        If the generation fails or is interrupted, `messages` stays the same.

        Args:
            text: the user's message.
            on_text: called with each new piece of the answer.

        Returns:
            The answer.

        Raises:
            DataError: the conversation and the new tokens exceed the maximum length of the model, or the chat template
                can't render the conversation.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        generation = generate_text(self._model, self._tokenizer, messages, self._decoding, on_text=on_text)
        answer = generation.text
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer


def talk(session: ChatSession, write: Callable[[str], None]) -> None:
    """Read messages and commands from stdin until its end or /exit, and write the answers.

    A message that can't be answered is reported by `write`, and the conversation goes on.

    Args:
        session: the conversation, which is continued in place.
        write: called with each piece of text to show; it must not add line breaks.
    """
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import_module("readline")  # Importing it makes `input` editable and gives it a history.
        write(HELP)
    input_prompt = "> " if is_terminal else ""
    while True:
        line = _next_line(input_prompt, write)
        if line is None:
            return
        text = line.strip()
        if text.partition(" ")[0] == "/exit":
            return
        if text.startswith("/"):
            _run_command(session, text, write)
        elif text:
            _reply(session, text, write)


def _run_command(session: ChatSession, text: str, write: Callable[[str], None]) -> None:
    command, _, rest = text.partition(" ")
    system = rest.strip()
    if command == "/help":
        write(HELP)
    elif command == "/reset":
        session.reset()
        write("The conversation starts anew.\n")
    elif command == "/system" and system:
        session.reset(system)
        write("The conversation starts anew with this system message.\n")
    else:
        write(f"There is no command {command}. {HELP}")


def _reply(session: ChatSession, text: str, write: Callable[[str], None]) -> None:
    try:
        session.reply(text, write)
    except DataError as error:
        write(f"{error} Start a new conversation with /reset.")
    except KeyboardInterrupt:
        write(" (stopped)")
    write("\n")


def _next_line(prompt: str, write: Callable[[str], None]) -> str | None:
    """Return the next line of stdin, or None at its end."""
    try:
        return input(prompt)
    except EOFError:
        return None
    except UnicodeDecodeError:
        write("This line is not UTF-8 text.\n")
        return ""
