"""An English anchor and a Python specialist, composed with a twentieth of the specialist's text and some functions.

Every trained row takes as many steps of as many rows, at the rate that its own search on validation text chose. The
modules of the test took no part in any choice, and no model has read them.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from experiments import Options
from experiments.composed import Amounts, ComposedRow, TextStudy, better_parent, over_controls
from experiments.parents import fitting, read_texts, spaced, write_examples
from graftlm.evaluation import Results

TABLES = {"rows": ("mixture", "cross", "both", "lora", "skyline", "vanilla_m_a", "random_m_a")}
LABELS = {"m_a": "code specialist m_A"}
SHOWN = {"c2t_bpb": "docstring from function", "t2c_bpb": "function from docstring"}
CONTROLS = ("fixed_mixture", *(row for row in TABLES["rows"] if row != "both"))
RATIOS = better_parent(SHOWN) | over_controls(SHOWN, CONTROLS)
SHORTEST_DOC, LONGEST_DOC = 24, 160
SHORTEST_CODE, LONGEST_CODE = 60, 420


class CodeAmounts(Amounts):
    """How much of each text; validation takes half of a task's examples.

    Args:
        functions: of training modules, half of them docstring from function, half the other way round.
        answers: of the first examples, for chrF.
    """

    tested: int = 9_000
    examples: int = 80
    functions: int = 800
    answers: int = 16


QUICK = CodeAmounts(share=0.5, old=1_200, functions=20, tested=1_500, examples=6, answers=2)


def run(options: Options) -> Results:
    """Run the chosen tables."""
    amounts = QUICK if options.quick else CodeAmounts()
    study = TextStudy(options, TABLES, LABELS, amounts)
    counts = write_texts(study, amounts)
    study.validation = [study.task(name) for name in ("validation_c2t", "validation_t2c")]
    study.tasks = [study.task(name, answers=amounts.answers, **ends(name)) for name in ("c2t", "t2c")]
    models = {"m_b": study.anchor, "m_a": study.model(study.parents.code)}
    rows, details = study.measure(models, trained_rows(study))
    details["setting"] = study.setting() | {"texts": counts}
    return study.report(__file__, rows, RATIOS, SHOWN, details)


def write_texts(study: TextStudy, amounts: CodeAmounts) -> dict[str, int]:
    """Write every text and task; gives the characters and examples of what is trained on.

    All of it is cut or chosen so that every example is whole in a row.
    """
    folder, corpus = study.texts, study.parents.corpus
    python = study.write_parts({"python": "python-train"}, cut=True)["python"]
    kinds = {
        name: [
            function
            for function in functions(read_texts(corpus / f"python-{name}.jsonl"))
            if len(fitting([docstring_of(function), code_of(function)], study.tokenizer, study.length)) == 2
        ]
        for name in ("train", "validation", "test")
    }
    chosen = spaced(kinds["train"], amounts.functions)
    both = [docstring_of(function) if index % 2 else code_of(function) for index, function in enumerate(chosen)]
    write_examples(folder / "functions-prompts.jsonl", both)
    for name, start, count in (("validation", "validation_", amounts.examples // 2), ("test", "", amounts.examples)):
        chosen = spaced(kinds[name], count)
        write_examples(folder / f"task-{start}c2t.jsonl", map(docstring_of, chosen))
        write_examples(folder / f"task-{start}t2c.jsonl", map(code_of, chosen))
    trained_on = {"specialist's text, characters": sum(map(len, python)), "functions": len(both)}
    return trained_on | {f"functions of {name} modules": len(members) for name, members in kinds.items()}


def ends(name: str) -> dict[str, Any]:
    """Where answers end: a docstring is one line, and a function ends before the first line that is not indented."""
    tokens, stop = (48, ("\n",)) if name.endswith("c2t") else (80, ("\n\n", "\n#", "\ndef", "\nclass"))
    return {"max_new_tokens": tokens, "stop": stop}


def trained_rows(study: TextStudy) -> list[ComposedRow]:
    """Every trained row, all on the same data; here the new domain is Python."""
    sets = {"old": "old", "new": "python", "validation_old": "validation_old", "validation_new": "validation_python"}
    data = study.data(["python-part", "functions-prompts"], ["english-part"], sets)
    return [ComposedRow(name, graft, data) for name, graft in study.grafts("code", study.parents.code).items()]


class Function(NamedTuple):
    """A function without its docstring, and the docstring's first paragraph on one line."""

    code: str
    doc: str


def functions(sources: Iterable[str]) -> list[Function]:
    """The functions and methods of some modules with a docstring, of a middling size, each docstring once."""
    by_docstring: dict[str, Function] = {}
    for source in sources:
        for function in _of_module(source):
            by_docstring.setdefault(function.doc, function)
    return list(by_docstring.values())


def docstring_of(function: Function) -> tuple[str, str]:
    """Code to text: (prompt, answer)."""
    return f"{function.code}\n\n# What it does:", f" {function.doc}\n"


def code_of(function: Function) -> tuple[str, str]:
    """Text to code: (prompt, answer); the name and the arguments are part of the prompt."""
    head, _, body = function.code.partition("\n")
    return f"# {function.doc}\n{head}\n", f"{body}\n"


def _of_module(source: str) -> Iterator[Function]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules have old escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
            doc = " ".join(text.partition("\n\n")[0].split())
            node.body = node.body[1:]
            node.decorator_list = []
            code = ast.unparse(node) if node.body else ""
            if SHORTEST_DOC <= len(doc) <= LONGEST_DOC and SHORTEST_CODE <= len(code) <= LONGEST_CODE:
                yield Function(code, doc)
