"""Grammars that constrain an answer: a JSON schema, a regular expression, a choice of texts, a Lark grammar.

llguidance compiles a grammar for the model's tokens, and computes for each row which tokens may come next.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from graftlm.errors import did_you_mean
from graftlm.serving.grammar_trial import OUT_OF_MEMORY
from graftlm.serving.protocol import EngineError, ServingError

Schema = Mapping[str, object] | bool

JSON_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The white space of `json.dumps`. Weak models that may write any white space often write nothing else."""
_MAPS_OF_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_WITH_SCHEMAS = _MAPS_OF_SCHEMAS | {
    "items", "prefixItems", "additionalItems", "additionalProperties", "propertyNames", "contains", "anyOf", "allOf",
    "oneOf", "not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
_KEYWORDS = _WITH_SCHEMAS | {
    "type", "enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength",
    "maxLength", "pattern", "format", "minItems", "maxItems", "uniqueItems", "minContains", "maxContains", "required",
    "minProperties", "maxProperties", "dependentRequired", "dependencies", "$ref", "$dynamicRef", "$recursiveRef",
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment", "title",
    "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "discriminator",
    "nullable", "contentEncoding", "contentMediaType", "contentSchema",
}  # fmt: skip
"""Keywords that llguidance implements or rejects, and annotations. It ignores others, which would be misleading."""
_TRIAL = Path(__file__).with_name("grammar_trial.py")
_TRIAL_SECONDS = 3
_TRIAL_BYTES = 2**32
_ABOVE_LIMITS = (-signal.SIGXCPU, -signal.SIGKILL, -signal.SIGABRT, OUT_OF_MEMORY)
"""Return codes of a trial that exceeded its limits; see `grammar_trial.py`."""


class _TrialError(Exception):
    """A trial ended without a result although it did not exceed its limits. The message is the reason."""


class GrammarCompiler:
    """Compiles grammars for a model. All methods are thread-safe and may take seconds: call them in threads of `pool`.

    The compilation of some grammars would take hours. Each new grammar is compiled first in another process, with
    limits on time and memory. The last 64 grammars are cached. Copy a returned matcher (`deep_copy`) before use.

    All methods raise `ServingError` if the grammar is invalid, unsupported or too complex, or if the tokenizer does not
    support grammars, and `EngineError` if the other process fails. Their argument `param` is the request's key for the
    grammar, which these errors name.

    Args:
        tokenizer: the model's tokenizer.
        vocabulary: number of token ids of the model.
        end_ids: tokens that end a text.

    Attributes:
        pool: threads for compilation.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._end_ids = sorted(end_ids)
        self._lock = threading.Lock()
        self._llguidance_tokenizer: LLTokenizer | None = None
        self._cached_matcher = lru_cache(maxsize=64)(self._new_matcher)
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="graftlm-grammars")

    def json(self, schema: Schema, param: str) -> LLMatcher:
        """Compile a JSON schema. The white space of answers is that of `json.dumps`."""
        text = checked_schema(schema, param)
        return self._compile(LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS), param)

    def regex(self, pattern: str, param: str) -> LLMatcher:
        """Compile a regular expression in Rust's syntax, which the whole answer must match."""
        return self._compile(LLMatcher.grammar_from_regex(pattern), param)

    def lark(self, grammar: str, param: str) -> LLMatcher:
        """Compile a Lark grammar in llguidance's dialect, whose rule `start` the whole answer must match."""
        return self._compile(LLMatcher.grammar_from_lark(grammar), param)

    def choice(self, texts: Sequence[str], param: str) -> LLMatcher:
        """Compile a choice between at least one text. The answer is one of the texts."""
        alternatives = " | ".join(quoted(text) for text in texts)
        return self.lark(f"start: {alternatives}", param)

    def _compile(self, grammar: str, param: str) -> LLMatcher:
        try:
            matcher = self._cached_matcher(grammar)
        except _TrialError as error:
            raise EngineError(
                f"The grammar in {param} could not be compiled ({error}): try again, or simplify the grammar.", param
            ) from error
        if matcher is None:
            raise ServingError(
                f"{param} is too complex: its compilation exceeds the limit of {_TRIAL_SECONDS} seconds or of memory, "
                "so simplify it.",
                param,
                code="grammar_too_complex",
            )
        problem = matcher.get_error()
        if problem:
            raise ServingError(
                f"{param} is invalid or uses an unsupported feature ({_reason(problem)}): correct or rewrite it.", param
            )
        return matcher

    def _new_matcher(self, grammar: str) -> LLMatcher | None:
        """Compile a grammar; None if the trial exceeds its limits.

        Raises:
            _TrialError: the trial failed for another reason.
            ServingError: the tokenizer does not support grammars.
        """
        command = [sys.executable, "-P", str(_TRIAL), str(_TRIAL_SECONDS), str(_TRIAL_BYTES)]
        trial = subprocess.run(command, input=grammar.encode(), stderr=subprocess.PIPE)
        if trial.returncode in _ABOVE_LIMITS:
            return None
        if trial.returncode:
            raise _TrialError(_failure(trial.returncode, trial.stderr))
        return LLMatcher(self._tokenizer_of_llguidance(), grammar, log_level=0)

    def _tokenizer_of_llguidance(self) -> LLTokenizer:
        with self._lock:
            if self._llguidance_tokenizer is None:
                try:
                    self._llguidance_tokenizer = from_tokenizer(self._tokenizer, self._vocabulary, self._end_ids)
                except (ValueError, TypeError) as error:
                    reason = str(error).rstrip(".")
                    raise ServingError(
                        f"Answers can't be constrained with this model's tokenizer ({reason}): leave out tools and "
                        "formats of the answer."
                    ) from error
            return self._llguidance_tokenizer


def _failure(returncode: int, stderr: bytes) -> str:
    """Return why a process failed: the last line of its standard error, or the name of its signal, or its status."""
    lines = stderr.decode(errors="replace").split("\n")
    written = [line.strip() for line in lines if line.strip()]
    if written:
        return written[-1][:300].rstrip(".")
    if returncode < 0:
        return signal.Signals(-returncode).name
    return f"exit status {returncode}"


def _reason(problem: str) -> str:
    """Return llguidance's error in one line."""
    if "coerce_one_of" in problem:
        return (
            "the branches of oneOf may overlap; use anyOf, or give each branch a required property with another "
            "constant string"
        )
    return " ".join(problem.split())[:300].rstrip(".")


def checked_schema(schema: Schema, param: str) -> str:
    """Return a schema as JSON text if all of its keywords are known.

    Args:
        schema: the schema, which is not checked further.
        param: the request's key for the schema, which errors name.

    Raises:
        ServingError: the schema has an unknown keyword that does not begin with `x-`, or it has `x-guidance` of
            llguidance, which can disable checks.
    """
    text = json.dumps(schema)
    if '"x-guidance"' in text:
        raise ServingError(f"{param} has the key x-guidance, which is reserved for the server: leave it out.", param)
    for keyword in _keywords(schema):
        is_known = keyword in _KEYWORDS or keyword.startswith("x-")
        is_reference_target = f'"#/{keyword}/' in text
        if not is_known and not is_reference_target:
            hint = did_you_mean(keyword, sorted(_KEYWORDS))
            raise ServingError(
                f"{param} has the unknown keyword {keyword[:50]!r}{hint}: change it, or leave it out.", param
            )
    return text


def _keywords(schema: object) -> Iterator[str]:
    """Yield the keywords of a schema and of all schemas in it."""
    remaining = [schema]
    while remaining:
        current = remaining.pop()
        if isinstance(current, list):
            remaining.extend(current)
        elif isinstance(current, Mapping):
            yield from current
            for key in _WITH_SCHEMAS & current.keys():
                inner = current[key]
                if key in _MAPS_OF_SCHEMAS and isinstance(inner, Mapping):
                    remaining.extend(inner.values())
                else:
                    remaining.append(inner)


def quoted(text: str) -> str:
    """Return a text as a quoted literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)
