"""How the tokenizers and the chat templates of two models differ."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from transformers import PreTrainedTokenizerBase

from graftlm.backbone.chat_templates import render_messages
from graftlm.errors import first_line

_CONVERSATION = (("user", "Where?"), ("assistant", "There."), ("user", "Why?"))
_COMPARED_CHARACTERS = 20_000
_PROBES = (
    "The 3 cafés cost 1,250.75 €.",
    "def f(x):\n\treturn  x ** 2\n",
    "Ça, Größe, Łódź, Ελλάδα, 東京",
    "<|a|> [b]",
)
_SHOWN_BEFORE = 10  # characters of a template before the first difference
_SHOWN_AFTER = 20


def tokenizer_difference(
    base: PreTrainedTokenizerBase, tuned: PreTrainedTokenizerBase, texts: Mapping[str, str] = MappingProxyType({})
) -> str | None:
    """Describe the first difference found between two tokenizers; None if none is found.

    The ids of all tokens of `base` are compared, and the ids that both give to a few sample texts and to the beginnings
    of other texts. Tokens that only `tuned` has don't count beyond that.

    Args:
        base: the tokenizer of the base.
        tuned: the other tokenizer.
        texts: texts on which the models are compared, by name.
    """
    if base is tuned:
        return None
    base_ids = base.get_vocab()
    tuned_ids = tuned.get_vocab()
    moved = sum(tuned_ids.get(token) != number for token, number in base_ids.items())
    if moved:
        return f"{moved:,} of {len(base_ids):,} tokens have another id or are missing"
    for text in _PROBES:
        if base(text)["input_ids"] != tuned(text)["input_ids"]:
            return "they encode a sample text differently"
    for name, text in texts.items():
        start = text[:_COMPARED_CHARACTERS]
        if base(start)["input_ids"] != tuned(start)["input_ids"]:
            return f"they encode the text {name} differently"
    return None


def template_difference(base: PreTrainedTokenizerBase, tuned: PreTrainedTokenizerBase) -> str | None:
    """Describe how the chat template of `tuned` differs from that of `base`; None if they render alike."""
    base_text = _rendered_probe(base)
    tuned_text = _rendered_probe(tuned)
    if base_text == tuned_text:
        return None
    if base_text is None:
        return "BASE has none"
    if tuned_text is None:
        return "TUNED has none"
    position = _first_difference(base_text, tuned_text)
    shown = slice(max(0, position - _SHOWN_BEFORE), position + _SHOWN_AFTER)
    return f"{base_text[shown]!r} of BASE is {tuned_text[shown]!r} in TUNED"


def _first_difference(first: str, second: str) -> int:
    shorter = min(len(first), len(second))
    for position in range(shorter):
        if first[position] != second[position]:
            return position
    return shorter


def _rendered_probe(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Render a short conversation in a tokenizer's chat template; None without a template."""
    if not tokenizer.chat_template:
        return None
    messages = [{"role": role, "content": content} for role, content in _CONVERSATION]
    try:
        return render_messages(tokenizer, messages, header=True)
    except Exception as error:  # raised by jinja, or by the template
        return f"can't be filled: {first_line(error)}"
