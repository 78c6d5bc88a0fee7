"""Generate text from a model, with or without a graft, streamed if desired; and converse with it in the terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from graftlm.backbone import max_sequence_length, padding_id, token_texts
from graftlm.config import Config
from graftlm.data.chats import Message, render_question
from graftlm.errors import DataError, GraftError
from graftlm.files.reading import decode_utf8
from graftlm.grafted.graft_set import trace_values
from graftlm.grafted.model import GraftedModel
from graftlm.store.artifact import backbone_of, is_model, load_grafts

HELP = "Write a message. /reset begins anew, /system TEXT sets the system's message, /exit or Ctrl-D ends.\n"


class Decoding(Config):
    """How tokens are chosen: greedily, by beam search, or by sampling."""

    max_new_tokens: int = Field(64, ge=1)
    sample: bool = False
    temperature: float | None = Field(None, gt=0, description="Temperature of sampling; 1 by default.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling: total probability of the candidates.")
    num_beams: int = Field(1, ge=1, description="Beams of beam search; 1 is greedy.")
    seed: int | None = Field(None, ge=0, description="Random seed.")

    def _problems(self) -> Iterator[str]:
        if not self.sample and (self.temperature is not None or self.top_p is not None):
            yield "temperature and top_p change random choices only: add sample (--sample)"

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of transformers' `generate`; they override the checkpoint's own defaults."""
        arguments = {"max_new_tokens": self.max_new_tokens, "do_sample": self.sample, "num_beams": self.num_beams}
        if self.sample:
            arguments |= {"temperature": self.temperature or 1.0, "top_p": self.top_p or 1.0, "top_k": 0}
        return arguments


@dataclass(frozen=True)
class TracedToken:
    """A generated token's text, and the trace values of the position that predicted it, by label."""

    text: str
    values: dict[str, float]


@dataclass(frozen=True)
class Generation:
    """A prompt and its continuation: new text, number of tokens, duration, and trace, one entry per new token."""

    prompt: str
    text: str
    tokens: int
    seconds: float
    trace: list[TracedToken] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _Stream(TextStreamer):
    """Calls `on_text` with each complete word."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None], *, skip_prompt: bool) -> None:
        super().__init__(tokenizer, skip_prompt=skip_prompt, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self._on_text(text)


def read_prompt(argument: str) -> str:
    """A prompt of the command line; `-` reads stdin without its last line break; DataError if it is not UTF-8."""
    data = sys.stdin.buffer.read().removesuffix(b"\n") if argument == "-" else os.fsencode(argument)
    return decode_utf8(data, "The prompt")


def load_model(
    folder: str | Path,
    backbone: str | Path | None = None,
    *,
    changes: Sequence[str] = (),
    bare: bool = False,
    device: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, PreTrainedTokenizerBase]:
    """A graft on its backbone, or a model, with its tokenizer; `backbone_of` describes the other arguments.

    Args:
        folder: the graft's, or a model's.
        backbone: where the graft's backbone is now; None where it was.
        changes: overrides of the graft's config, as `KEY=VALUE`.
        bare: leave the graft off.
        device: torch device; None takes the fastest available.

    Raises ArtifactError if the folder is no graft and no model, or the graft belongs to another backbone, and
    BackboneError if the backbone can't be loaded.
    """
    loaded = backbone_of(folder, backbone, device=device, trust_remote_code=trust_remote_code)
    tokenizer = loaded.need_tokenizer()
    if bare or is_model(folder):
        return loaded.model, tokenizer
    return GraftedModel(loaded, load_grafts(folder, loaded, changes)), tokenizer


@torch.inference_mode()
def generate_text(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Sequence[Message],
    decoding: Decoding | None = None,
    *,
    on_text: Callable[[str], None] | None = None,
    trace: bool = False,
    cache: Any = None,
) -> Generation:
    """Continue a prompt, or answer the last message of a conversation.

    Args:
        model: a `GraftedModel` or any transformers model.
        prompt: the text to continue, or messages (role, content), which the tokenizer's chat template renders.
        decoding: how tokens are chosen; by default 64 greedy tokens.
        on_text: called with each chunk of text, the prompt first unless it is messages. Beam search calls it once.
        trace: return the graft's trace of each token, such as the chosen expert or the share of open gates.
        cache: a transformers cache that holds the first tokens of the prompt already; new tokens are added to it.

    Raises DataError if the prompt has no tokens, exceeds the model's positions, or does not fit the chat template, and
    GraftError if the model has no traceable graft, or decodes with beams.
    """
    decoding = decoding or Decoding()
    if trace and decoding.num_beams > 1:
        raise GraftError("A trace follows one continuation, and beams follow several: leave out num_beams.")
    is_chat = not isinstance(prompt, str)
    rendered = render_question(prompt, tokenizer) if is_chat else prompt
    options: dict[str, Any] = {"add_special_tokens": not is_chat, "return_tensors": "pt", "verbose": False}
    inputs = tokenizer(rendered, **options).to(model.device)
    ids = inputs["input_ids"]
    _check_length(model, ids.shape[-1], decoding.max_new_tokens)
    if decoding.seed is not None:
        torch.manual_seed(decoding.seed)
    stream = _Stream(tokenizer, on_text, skip_prompt=is_chat) if on_text and decoding.num_beams == 1 else None
    start = time.perf_counter()
    options = decoding.arguments() | {"pad_token_id": padding_id(tokenizer), "return_dict_in_generate": True}
    options |= {"streamer": stream} | ({} if cache is None else {"past_key_values": cache})
    output = model.generate(input_ids=ids, attention_mask=inputs["attention_mask"], **options)
    seconds = time.perf_counter() - start
    (tokens,) = output.sequences
    traced = _trace(model, tokenizer, tokens, ids.shape[-1], output.past_key_values) if trace else None
    if is_chat:
        full_text, prompt_text = str(tokenizer.decode(tokens[ids.shape[-1] :], skip_special_tokens=True)), ""
    else:
        full_text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        prompt_text = str(tokenizer.decode(ids[0], skip_special_tokens=True))
    if on_text is not None and stream is None:
        on_text(full_text)
    return Generation(rendered, full_text.removeprefix(prompt_text), len(tokens) - ids.shape[-1], seconds, traced)


def _trace(model: Any, tokenizer: Any, tokens: Tensor, prompt_length: int, cache: Any) -> list[TracedToken]:
    """The trace of each new token, read at the position that predicted it."""
    traces: Any = {}
    if isinstance(model, GraftedModel):  # a graft without a trace in the cache may trace a forward pass
        traces = model.cache_traces(cache) or model.forward_traces(input_ids=tokens[None, :-1], use_cache=False)[1]
    if not traces:
        raise GraftError("There is no trace: the model has no graft that decides at each token.")
    texts = token_texts(tokenizer, tokens[prompt_length:], skip_special_tokens=True)
    return [TracedToken(text, trace_values(traces, 0, prompt_length - 1 + n)) for n, text in enumerate(texts)]


def _check_length(model: Any, prompt: int, new: int) -> None:
    if prompt == 0:
        raise DataError("The prompt has no tokens: give at least one word to continue.")
    if (limit := max_sequence_length(model)) < prompt + new:
        raise DataError(
            f"The prompt and {new} new tokens make {prompt + new}, but the model has {limit} positions: "
            "shorten the prompt, or ask for fewer."
        )


class ChatSession:
    """A conversation whose history, `messages`, the model sees.

    Args:
        model: a `GraftedModel` or any transformers model.
        tokenizer: the model's, with a chat template.
        system: the system's message; None leaves it to the template.

    Raises DataError if the tokenizer has no chat template.
    """

    def __init__(
        self, model: Any, tokenizer: Any, decoding: Decoding | None = None, *, system: str | None = None
    ) -> None:
        self._model, self._tokenizer, self._decoding = model, tokenizer, decoding or Decoding()
        self.messages: list[Message] = []
        self.reset(system)
        render_question([*self.messages, {"role": "user", "content": "a"}], tokenizer)

    def reset(self, system: str | None = None) -> None:
        """Forget what was said; without `system` the system's message stays."""
        kept = self.messages[:1] if self.messages and self.messages[0]["role"] == "system" else []
        self.messages = kept if system is None else [{"role": "system", "content": system}]

    def reply(self, text: str, on_text: Callable[[str], None] | None = None) -> str:
        """The answer to a message; both join the history, unless an error or an interrupt ends the answer.

        Raises DataError if the conversation exceeds the model's positions.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        answer = generate_text(self._model, self._tokenizer, messages, self._decoding, on_text=on_text).text
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer


def talk(session: ChatSession, write: Callable[[str], Any]) -> None:
    """Read messages from stdin until its end, and write the answers."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import_module("readline")  # lines can be edited, and called back
        write(HELP)
    while (line := _next_line("> " if is_terminal else "", write)) is not None:
        text = line.strip()
        command, _, rest = text.partition(" ")
        if command == "/exit":
            return
        if command == "/help":
            write(HELP)
        elif command == "/reset":
            session.reset()
            write("The conversation begins anew.\n")
        elif command == "/system" and rest.strip():
            session.reset(rest.strip())
            write("The conversation begins anew, with this system message.\n")
        elif command.startswith("/"):
            write(f"There is no command {command}. {HELP}")
        elif text:
            try:
                session.reply(text, write)
            except DataError as error:
                write(f"{error} /reset begins anew.")
            except KeyboardInterrupt:
                write(" (stopped)")
            write("\n")


def _next_line(prompt: str, write: Callable[[str], Any]) -> str | None:
    """The next line of stdin; None at its end."""
    try:
        return input(prompt)
    except EOFError:
        return None
    except UnicodeDecodeError:
        write("This line is not UTF-8 text.\n")
        return ""
