"""Task templates: instructions and solved exemplars for each kind of request, one YAML file per task."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from graftlm.config import Config, read_yaml
from graftlm.errors import RecipeError, did_you_mean

FOLDER = Path(__file__).with_name("templates")
POOL = "exemplars.yaml"
InstructionName = Literal["ask", "user", "write", "context", "plain"]
_FIELDS = {"language", "source"}  # the fields that an instruction may name in braces


class Exemplar(Config):
    """A solved example: a text, its ambiguity, and how an answer resolves it.

    Args:
        id: unique in its file.
        kind: the ambiguity, such as formality; clear where there is none.
        context: what the user knows and the translator does not.
        question: the question to ask; empty where there is nothing to ask.
        answers: possible answers.
        answer: the answer that the context gives; empty where the context does not say.
        outputs: the output under that answer, by language code.
    """

    id: str = Field(min_length=1)
    kind: str
    text: str = Field(min_length=1)
    context: str = ""
    question: str = ""
    answers: tuple[str, ...] = ()
    answer: str = ""
    outputs: dict[str, str] = Field(default_factory=dict)

    def _problems(self) -> Iterator[str]:
        if self.answer and self.answer not in self.answers:
            yield f"the answer {self.answer!r} of the exemplar {self.id} is none of its answers"


class Instructions(Config):
    """The instruction of each step. `{language}` and `{source}` stand for the names of languages.

    Args:
        ask: to the translator, before the output.
        user: to the model that answers from the context.
        write: to the translator, with answers.
        context: for the baseline that reads the context instead.
        plain: for the baseline that reads the text alone; also used after a refusal.
    """

    ask: str
    user: str
    write: str
    context: str
    plain: str

    def _problems(self) -> Iterator[str]:
        for name, text in self:
            fields = {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}
            if unknown := sorted(fields - _FIELDS):
                yield f"the instruction {name} names the field {{{unknown[0]}}}; fields are {{language}}"


class Template(Config):
    """One task, such as translate, rewrite or answer.

    Args:
        source: language code of the input texts.
        reply: the label before an output in prompts for models without a chat template.
        languages: output languages, code to name.
        exemplars: ambiguous texts, in the order in which prompts show them.
        unambiguous: texts with nothing to ask, shown where the translator looks for a question. Those with outputs are
            shown for plain outputs too, in place of the exemplars, whose outputs know an answer.
        unanswerable: texts whose context gives no answer, shown where a model answers.
        no_question: the reply of a translator that has nothing to ask.
        no_answer: the reply of a user whose context gives no answer.
    """

    name: str
    source: str = "en"
    reply: str
    languages: dict[str, str] = Field(min_length=1)
    exemplars: tuple[Exemplar, ...] = Field(min_length=1)
    unambiguous: tuple[Exemplar, ...] = ()
    unanswerable: tuple[Exemplar, ...] = ()
    instructions: Instructions
    no_question: str = "None"
    no_answer: str = "Unknown"

    def _problems(self) -> Iterator[str]:
        for exemplar in self.exemplars:
            for name in ("context", "question", "answer"):
                if not getattr(exemplar, name):
                    yield f"the exemplar {exemplar.id} has no {name}, which every exemplar needs"
            if missing := sorted(self.languages.keys() - exemplar.outputs.keys()):
                yield f"the exemplar {exemplar.id} has no output in {missing[0]}, a language of the template"

    @property
    def sha256(self) -> str:
        """Hash of the template's content."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def target(self, code: str | None) -> str:
        """The code of the output language. None selects the template's only language.

        Raises RecipeError if the template lacks the language, or has several and `code` is None.
        """
        if code is None and len(self.languages) == 1:
            return next(iter(self.languages))
        if code is None:
            raise RecipeError(f"The template {self.name} writes {', '.join(self.languages)}: name one (--to).")
        if code not in self.languages:
            known = did_you_mean(code, self.languages)
            raise RecipeError(f"The template {self.name} does not write {code!r}{known}: name one it has (--to).")
        return code

    def instruction(self, name: InstructionName, language: str) -> str:
        """One instruction, with the names of its languages filled in."""
        names = {"language": self.languages[language], "source": self.source}
        return getattr(self.instructions, name).format_map(names).strip()


@cache
def load_template(name: str) -> Template:
    """A built-in template by name, or a user's by its YAML file; RecipeError if it does not exist, or is incomplete."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if path.parent == FOLDER and name not in template_names():
        known = did_you_mean(name, template_names())
        raise RecipeError(f"There is no template {name!r}{known}: name one of those, or a YAML file.")
    values = read_yaml(path)
    pool = values.pop("pool", None)
    listed = read_yaml(path.parent / str(pool)).get("exemplars", []) if pool is not None else []
    known = {str(exemplar.get("id")): exemplar for exemplar in listed if isinstance(exemplar, dict)}
    for key in ("exemplars", "unambiguous", "unanswerable"):
        if isinstance(values.get(key), list):
            values[key] = [_resolve(exemplar, known, path) for exemplar in values[key]]
    return Template.parse(values, where=str(path) if path.parent != FOLDER else f"the template {name}")


def template_names() -> list[str]:
    """The names of the built-in templates."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if path.name != POOL)


def _resolve(exemplar: Any, pool: dict[str, Any], path: Path) -> Any:
    """An exemplar given by its id in the pool, or written out in place."""
    if not isinstance(exemplar, str):
        return exemplar
    if exemplar not in pool:
        hint = did_you_mean(exemplar, pool)
        raise RecipeError(f"{path} names the exemplar {exemplar!r}, which its pool does not have{hint}.")
    return pool[exemplar]
