"""What an answer may be: JSON by a schema, a regular expression, one of several texts, a Lark grammar, tool calls.

llguidance compiles a grammar for the model's tokens, and says for each row which tokens may come next.
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
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from graftlm.errors import did_you_mean
from graftlm.serving.protocol import EngineError, ServingError

JSON_OPTIONS: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spaces of `json.dumps`: with any spaces allowed, a weak model may write nothing else."""
_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
_OF_SCHEMAS = _MAPS | {
    "items", "prefixItems", "additionalItems", "additionalProperties", "propertyNames", "contains", "anyOf", "allOf",
    "oneOf", "not", "if", "then", "else", "unevaluatedItems", "unevaluatedProperties",
}  # fmt: skip
_KEYWORDS = _OF_SCHEMAS | {
    "type", "enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength",
    "maxLength", "pattern", "format", "minItems", "maxItems", "uniqueItems", "minContains", "maxContains", "required",
    "minProperties", "maxProperties", "dependentRequired", "dependencies", "$ref", "$dynamicRef", "$recursiveRef",
    "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$vocabulary", "$comment", "title",
    "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "discriminator",
    "nullable", "contentEncoding", "contentMediaType", "contentSchema",
}  # fmt: skip
"""Those that llguidance follows or refuses, and those without which an answer fits too: others would do nothing."""
_CPU_SECONDS, _BYTES = 3, 2**32  # for the compilation of a grammar
_TRIAL = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({_CPU_SECONDS}, {_CPU_SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({_BYTES}, {_BYTES}))
from llguidance import LLMatcher, LLTokenizer
LLMatcher(LLTokenizer("byte"), sys.stdin.read(), log_level=0)
"""


class GrammarCompiler:
    """Compiles grammars for a model's tokenizer, number of tokens and end tokens. All methods are thread-safe.

    Each grammar is tried in a process of its own, which is stopped if it takes too long: compilation can take hours.
    Call the methods from the threads of `pool`.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: Collection[int]) -> None:
        self._tokenizer, self._vocabulary, self._end_ids = tokenizer, vocabulary, sorted(end_ids)
        self._lock = threading.Lock()
        self._tokens: LLTokenizer | None = None
        self._matcher = lru_cache(maxsize=64)(self._new_matcher)
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="graftlm-grammars")

    def json(self, schema: Mapping[str, Any] | bool, param: str) -> LLMatcher:
        """JSON that a schema describes, with the spaces that `json.dumps` writes.

        Raises ServingError if the schema is wrong, or has a keyword that is not supported; so of the other methods.
        """
        return self._compile(LLMatcher.grammar_from_json_schema(as_text(schema, param), overrides=JSON_OPTIONS), param)

    def regex(self, pattern: str, param: str) -> LLMatcher:
        """Text that a regular expression of Rust's syntax matches as a whole."""
        return self._compile(LLMatcher.grammar_from_regex(pattern), param)

    def lark(self, grammar: str, param: str) -> LLMatcher:
        """Text that the rule `start` of a Lark grammar matches."""
        return self._compile(LLMatcher.grammar_from_lark(grammar), param)

    def choice(self, texts: Sequence[str], param: str) -> LLMatcher:
        """One of these texts."""
        return self.lark("start: " + " | ".join(map(quoted, texts)), param)

    def _compile(self, grammar: str, param: str) -> LLMatcher:
        matcher = self._matcher(grammar)
        problem = matcher.get_error() if matcher else f"its compilation takes more than {_CPU_SECONDS} seconds"
        if matcher is None or problem:
            reason = " ".join(problem.split())[:300].rstrip(".")
            if "coerce_one_of" in reason:
                reason = "the branches of oneOf are not known to exclude each other; use anyOf, or give each a required"
                reason += " const of its own, a text"
            code = "grammar_too_complex" if matcher is None else None
            raise ServingError(f"{param} can't be followed ({reason}): change it.", param, code=code)
        return matcher

    def _new_matcher(self, grammar: str) -> LLMatcher | None:
        """The compiled grammar; None if a trial takes too long."""
        trial = subprocess.run([sys.executable, "-P", "-c", _TRIAL], input=grammar.encode(), stderr=subprocess.DEVNULL)
        if trial.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return None
        if trial.returncode:
            raise EngineError(f"A trial of this form ended with status {trial.returncode}: ask again, or change it.")
        return LLMatcher(self._llguidance_tokens(), grammar, log_level=0)

    def _llguidance_tokens(self) -> LLTokenizer:
        with self._lock:
            if self._tokens is None:
                try:
                    self._tokens = from_tokenizer(self._tokenizer, self._vocabulary, self._end_ids)
                except (ValueError, TypeError) as error:
                    raise ServingError(
                        f"Answers can't be constrained with this model's tokenizer ({str(error).rstrip('.')}): ask for "
                        "any text, without tools."
                    ) from error
            return self._tokens


def as_text(schema: Mapping[str, Any] | bool, param: str) -> str:
    """A schema as JSON; ServingError for an unknown keyword, and for llguidance's own, which can switch checks off."""
    text = json.dumps(schema)
    if '"x-guidance"' in text:
        raise ServingError(f"{param} has the key x-guidance, which is the server's: leave it out.", param)
    for keyword in _keywords(schema):
        if keyword not in _KEYWORDS and not keyword.startswith("x-") and f'"#/{keyword}/' not in text:
            hint = did_you_mean(keyword, sorted(_KEYWORDS))
            why = f"{param} has the keyword {keyword[:50]!r}, which would do nothing{hint}: change or remove it."
            raise ServingError(why, param)
    return text


def _keywords(schema: Any) -> Iterator[str]:
    """The keywords of a schema and of all schemas in it."""
    schemas = [schema]
    while schemas:
        if isinstance(current := schemas.pop(), list):
            schemas += current
        elif isinstance(current, Mapping):
            yield from current
            for key in _OF_SCHEMAS & current.keys():
                is_map = key in _MAPS and isinstance(current[key], Mapping)
                schemas += current[key].values() if is_map else [current[key]]


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)
