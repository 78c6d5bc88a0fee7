"""Task templates: instructions and solved exemplars for each kind of request, one YAML file per task."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from graftlm.config import Config, read_yaml
from graftlm.errors import RecipeError, did_you_mean

FOLDER = Path(__file__).with_name("templates")
POOL = "exemplars.yaml"
InstructionName = Literal["ask", "user", "write", "context", "plain"]
_FIELDS = {"language", "source"}  # the fields that an instruction may contain in braces


class Exemplar(Config):
    """A solved example: a text, its ambiguity, and how an answer resolves it.

    Args:
        id: identifier, unique in its file.
        kind: the kind of ambiguity, such as formality; clear for a text without ambiguity.
        text: the text.
        context: what the user knows and the translator does not.
        question: the question to ask; empty if there is nothing to ask.
        answers: possible answers.
        answer: the answer that the context gives; empty if the context gives none.
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
            yield f"the answer {self.answer!r} of the exemplar {self.id} should be one of its answers"


class ExemplarFile(Config):
    """A YAML file of exemplars that replace those of a template.

    Args:
        exemplars: ambiguous texts, in the order in which prompts show them.
        unambiguous: texts with nothing to ask; without the key, the template's are kept.
        unanswerable: texts whose context gives no answer; without the key, the template's are kept.
    """

    exemplars: tuple[Exemplar, ...] = Field(min_length=1)
    unambiguous: tuple[Exemplar, ...] | None = None
    unanswerable: tuple[Exemplar, ...] | None = None

    def _problems(self) -> Iterator[str]:
        seen: set[str] = set()
        for exemplar in (*self.exemplars, *(self.unambiguous or ()), *(self.unanswerable or ())):
            if exemplar.id in seen:
                yield f"the id {exemplar.id!r} occurs twice, but each exemplar needs its own"
            seen.add(exemplar.id)


class Instructions(Config):
    """The instruction of each step.

    In an instruction, `{language}` is replaced by the name of the output language, `{source}` by the source language.

    Args:
        ask: for the translator, before the output.
        user: for the model that answers from the context.
        write: for the translator, with answers.
        context: for the baseline that reads the context instead of answers.
        plain: for the baseline that reads only the text; also used after a refusal.
    """

    ask: str
    user: str
    write: str
    context: str
    plain: str

    def _problems(self) -> Iterator[str]:
        for name, text in self:
            parsed = string.Formatter().parse(text)
            fields = {field for _, field, _, _ in parsed if field is not None}
            unknown = sorted(fields - _FIELDS)
            if unknown:
                yield (
                    f"the instruction {name} contains the field {{{unknown[0]}}}, but only {{language}} and {{source}} "
                    "exist"
                )


class Template(Config):
    """A task, such as translate, rewrite or answer.

    Args:
        name: name of the task.
        source: language code of the input texts.
        reply: the label before an output in prompts for models without a chat template.
        languages: names of the output languages, by code.
        exemplars: ambiguous texts, in the order in which prompts show them.
        unambiguous: texts with nothing to ask, shown when the translator looks for a question. Those with outputs are
            also shown for plain outputs, instead of the exemplars, whose outputs depend on an answer.
        unanswerable: texts whose context gives no answer, shown when a model answers.
        instructions: the instruction of each step.
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
            missing = sorted(self.languages.keys() - exemplar.outputs.keys())
            if missing:
                yield f"the exemplar {exemplar.id} has no output in {missing[0]}, a language of the template"

    @property
    def sha256(self) -> str:
        """SHA-256 hash of the template's content."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def target(self, code: str | None) -> str:
        """Return the code of the output language.

        Args:
            code: language code; None selects the template's only language.

        Raises:
            RecipeError: the template lacks the language, or it has several and `code` is None.
        """
        if code is None and len(self.languages) == 1:
            return next(iter(self.languages))
        if code is None:
            known = ", ".join(self.languages)
            raise RecipeError(f"The template {self.name} has several target languages, {known}: name one (--to).")
        if code not in self.languages:
            known = did_you_mean(code, self.languages)
            raise RecipeError(
                f"The template {self.name} does not write {code!r}{known}: name one of its languages (--to)."
            )
        return code

    def instruction(self, name: InstructionName, language: str) -> str:
        """Return an instruction with the languages filled in.

        Args:
            name: the step.
            language: code of the output language, a key of `languages`.
        """
        instruction: str = getattr(self.instructions, name)
        return instruction.format(language=self.languages[language], source=self.source).strip()


@cache
def load_template(name: str, exemplars: str | None = None) -> Template:
    """Load a template. It is cached, so later changes of its files have no effect in this process.

    Args:
        name: name of a built-in template, or a YAML file whose name ends in `.yaml` or `.yml`.
        exemplars: an `ExemplarFile` whose exemplars replace the template's. The template then has those of its
            languages in which every exemplar has an output.

    Raises:
        RecipeError: the template, its pool or the exemplars do not exist or are not valid YAML, an exemplar is not in
            the pool, a value is missing or invalid, or no language of the template has an output of every exemplar.
    """
    if exemplars is not None:
        return _replace_exemplars(load_template(name), Path(exemplars))
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    is_built_in = path.parent == FOLDER
    if is_built_in and name not in template_names():
        known = did_you_mean(name, template_names())
        raise RecipeError(f"There is no template {name!r}{known}: name a built-in template, or a YAML file.")
    values = read_yaml(path)
    pool = _read_pool(path.parent, values.pop("pool", None))
    for key in ("exemplars", "unambiguous", "unanswerable"):
        listed = values.get(key)
        if isinstance(listed, list):
            values[key] = [_resolve(exemplar, pool, path) for exemplar in listed]
    return Template.parse(values, where=f"the template {name}" if is_built_in else str(path))


def _replace_exemplars(template: Template, path: Path) -> Template:
    """Return a template with the exemplars of a file, limited to the languages of their outputs."""
    file = ExemplarFile.from_yaml(path)
    languages = dict(template.languages)
    for exemplar in file.exemplars:
        for code in template.languages.keys() - exemplar.outputs.keys():
            languages.pop(code, None)
    if not languages:
        known = ", ".join(template.languages)
        raise RecipeError(
            f"The exemplars of {path} have no language in common with the template {template.name}, which writes "
            f"{known}: give every exemplar an output in one of them."
        )
    values: dict[str, object] = template.model_dump()
    values["languages"] = languages
    values |= file.model_dump(exclude_none=True)
    return Template.parse(values, where=str(path))


def template_names() -> list[str]:
    """Return the names of the built-in templates."""
    names = [path.stem for path in FOLDER.glob("*.yaml") if path.name != POOL]
    return sorted(names)


def _read_pool(folder: Path, name: object) -> dict[str, object]:
    """Return the exemplars of a pool by id; empty if the template names no pool."""
    if name is None:
        return {}
    listed = read_yaml(folder / str(name)).get("exemplars") or []
    return {str(exemplar.get("id")): exemplar for exemplar in listed if isinstance(exemplar, dict)}


def _resolve(exemplar: object, pool: Mapping[str, object], path: Path) -> object:
    """Return an exemplar that is given by its id in the pool, or written out in place."""
    if not isinstance(exemplar, str):
        return exemplar
    if exemplar not in pool:
        hint = did_you_mean(exemplar, pool)
        raise RecipeError(
            f"{path} names the exemplar {exemplar!r}, but its pool has no such exemplar{hint}: correct the id, or "
            "write the exemplar in place."
        )
    return pool[exemplar]
