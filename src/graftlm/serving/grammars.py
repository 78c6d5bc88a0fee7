"""What an answer may be: JSON by a schema, a regular expression, one of several texts, a Lark grammar, tool calls.

llguidance compiles a grammar for the model's tokens, and says for each row which tokens may come next.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from graftlm.serving.protocol import ServingError

JSON_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spaces of `json.dumps`: with any spaces allowed, a weak model may write nothing else."""


class Grammar:
    """A compiled grammar, and the state of one answer in it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def matcher(self) -> Grammar:
        """A copy for another answer."""
        return Grammar(self._matcher.deep_copy())

    @property
    def problem(self) -> str:
        """Why the answer can not go on, such as a grammar whose states are too many; empty if nothing is wrong."""
        return self._matcher.get_error()

    def allowed(self) -> Tensor:
        """(V,) bool: the tokens that may come next, end tokens included; none after a problem."""
        return torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0

    def add(self, token: int) -> bool:
        """Go on by a token; whether nothing can follow it."""
        self._matcher.consume_token(token)
        return self._matcher.is_stopped() and not self.problem


class GrammarCompiler:
    """Compiles grammars for a model's tokenizer, number of tokens and end tokens. All methods are thread-safe."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: Collection[int]) -> None:
        self._tokenizer, self._vocabulary, self._end_ids = tokenizer, vocabulary, sorted(end_ids)
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None

    def json(self, schema: Mapping[str, Any] | bool, param: str) -> Grammar:
        """JSON that a schema describes, with the spaces that `json.dumps` writes.

        Raises ServingError if the schema is wrong, or has a keyword that is not supported; so of the other methods.
        """
        text = json.dumps(schema)
        if '"x-guidance"' in text:
            raise ServingError(f"{param} has the key x-guidance, which is the server's: leave it out.", param)
        return self._compile(LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS), param)

    def regex(self, pattern: str, param: str) -> Grammar:
        """Text that a regular expression of Rust's syntax matches as a whole."""
        return self._compile(LLMatcher.grammar_from_regex(pattern), param)

    def lark(self, grammar: str, param: str) -> Grammar:
        """Text that the rule `start` of a Lark grammar matches."""
        return self._compile(LLMatcher.grammar_from_lark(grammar), param)

    def choice(self, texts: Sequence[str], param: str) -> Grammar:
        """One of these texts."""
        return self.lark("start: " + " | ".join(map(quoted, texts)), param)

    def _compile(self, grammar: str, param: str) -> Grammar:
        matcher = LLMatcher(self._llguidance_tokens(), grammar, log_level=0)
        if problem := matcher.get_error():
            reason = " ".join(problem.split())[:300].rstrip(".")
            raise ServingError(f"{param} can't be followed ({reason}): change it.", param)
        return Grammar(matcher)

    def _llguidance_tokens(self) -> LLTokenizer:
        with self._lock:
            if self._tokens is None:
                try:
                    self._tokens = from_tokenizer(self._tokenizer, self._vocabulary, self._end_ids)
                except (ValueError, TypeError) as error:
                    raise ServingError(
                        f"Answers can't be constrained with this model's tokenizer ({str(error).rstrip('.')}): leave "
                        "response_format, structured_outputs and tools out."
                    ) from error
            return self._tokens


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)
