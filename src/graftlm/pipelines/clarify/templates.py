"""What is asked of models, as data: one YAML file a task, with exemplars of the project's own."""

from __future__ import annotations

import hashlib
import string
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from graftlm.config import Config, read_yaml
from graftlm.errors import RecipeError, did_you_mean

FOLDER = Path(__file__).with_name("templates")
POOL = "exemplars.yaml"
Part = Literal["ask", "user", "write", "context", "plain"]
_FIELDS = {"language", "source"}  # what an instruction may name in braces


class Exemplar(Config):
    """A text, what is unclear in it, and how that was settled.

    Args:
        id: unique in its file.
        kind: of ambiguity, such as formality; clear where there is none.
        context: what a user knows, and a translator does not.
        question: what to ask; empty where nothing is to be asked.
        answers: that are possible.
        answer: the one that the context tells; empty where it does not tell.
        outputs: what to write under that answer, by language.
    """

    id: str = Field(min_length=1)
    kind: str
    text: str = Field(min_length=1)
    context: str = ""
    question: str = ""
    answers: tuple[str, ...] = ()
    answer: str = ""
    outputs: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_of_the_answers(self) -> Self:
        if self.answer and self.answer not in self.answers:
            raise ValueError(f"the answer {self.answer!r} of the exemplar {self.id} is none of its answers")
        return self


class Instructions(Config):
    """What each step tells the model; `{language}` and `{source}` stand for languages' names.

    Args:
        ask: the translator, before anything else.
        user: the model that answers from the context.
        write: the translator, with answers.
        context: a baseline that sees the context instead.
        plain: a baseline that sees neither, and what follows a refusal.
    """

    ask: str
    user: str
    write: str
    context: str
    plain: str

    @model_validator(mode="after")
    def _known_fields(self) -> Self:
        for part, text in self:
            named = {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}
            if unknown := sorted(named - _FIELDS):
                raise ValueError(f"the instruction {part} names the field {{{unknown[0]}}}; fields are {{language}}")
        return self


class Template(Config):
    """One task: translate, rewrite, answer, or another.

    Args:
        name: what a conversation remembers it by.
        source: the language of texts.
        reply: the word before what is written.
        languages: names of the languages to write in, by code; the first is the default where there is one alone.
        exemplars: of ambiguous texts, in the order in which they are shown.
        clear: texts with nothing to ask, shown where questions are asked.
        unknown: texts whose context does not tell, shown where a model answers.
        nothing: what a translator writes when there is nothing to ask.
        untold: what a user writes when the context does not tell.
    """

    name: str
    source: str = "en"
    reply: str
    languages: dict[str, str] = Field(min_length=1)
    exemplars: tuple[Exemplar, ...] = Field(min_length=1)
    clear: tuple[Exemplar, ...] = ()
    unknown: tuple[Exemplar, ...] = ()
    instructions: Instructions
    nothing: str = "None"
    untold: str = "Unknown"

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for one in self.exemplars:
            for name in ("context", "question", "answer"):
                if not getattr(one, name):
                    raise ValueError(f"the exemplar {one.id} has no {name}, which every exemplar needs")
            if missing := sorted(self.languages.keys() - one.outputs.keys()):
                raise ValueError(f"the exemplar {one.id} has no output in {missing[0]}, a language of the template")
        return self

    @property
    def sha256(self) -> str:
        """Of everything that the template says."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def target(self, code: str | None) -> str:
        """The code of a language to write in; None takes the only one there is.

        Raises:
            RecipeError: the template has no such language, or several and none was named.
        """
        if code is None and len(self.languages) == 1:
            return next(iter(self.languages))
        if code is None:
            raise RecipeError(f"The template {self.name} writes {', '.join(self.languages)}: name one (--to).")
        if code not in self.languages:
            known = did_you_mean(code, self.languages)
            raise RecipeError(f"The template {self.name} does not write {code!r}{known}: name one it has (--to).")
        return code

    def instruction(self, part: Part, language: str) -> str:
        """One instruction, with the language's name in its place."""
        names = {"language": self.languages[language], "source": self.source}
        return getattr(self.instructions, part).format_map(names).strip()


@cache
def load_template(name: str) -> Template:
    """A template that comes with the room, by name, or one of the user's, by the path of its YAML file.

    Raises:
        RecipeError: there is none, or it lacks something.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    if path.parent == FOLDER and name not in template_names():
        known = did_you_mean(name, template_names())
        raise RecipeError(f"There is no template {name!r}{known}: name one of those, or a YAML file.")
    values = read_yaml(path)
    pool = values.pop("pool", None)
    known = _pool(path.parent / str(pool)) if pool is not None else {}
    for key in ("exemplars", "clear", "unknown"):
        if isinstance(values.get(key), list):
            values[key] = [_resolved(one, known, path) for one in values[key]]
    return Template.parse(values, where=str(path) if path.parent != FOLDER else f"the template {name}")


def template_names() -> list[str]:
    """The templates that come with the room."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml") if path.name != POOL)


def _pool(path: Path) -> dict[str, Any]:
    """The exemplars of a file, by id."""
    values = read_yaml(path)
    return {str(one.get("id")): one for one in values.get("exemplars", []) if isinstance(one, dict)}


def _resolved(one: Any, known: dict[str, Any], path: Path) -> Any:
    """An exemplar that is given by its id in the pool, or as it stands."""
    if not isinstance(one, str):
        return one
    if one not in known:
        raise RecipeError(f"{path} names the exemplar {one!r}, which its pool does not have{did_you_mean(one, known)}.")
    return known[one]
