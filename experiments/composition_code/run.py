"""An English anchor composed with a Python specialist, trained on a twentieth of the specialist's text and functions.

Every trained row takes the same number of steps on the same number of rows, at the learning rate that its own search on
validation text chose. The modules of the test are used for no choice, and no model has read them.
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

TABLES = {
    "rows": ("mixture", "cross", "both", "lora", "skyline", "vanilla_m_a", "random_m_a"),
}
LABELS = {"m_a": "code specialist m_A"}
SHOWN = {
    "c2t_bpb": "docstring from function",
    "t2c_bpb": "function from docstring",
}
CONTROLS = ("fixed_mixture", *(row for row in TABLES["rows"] if row != "both"))
RATIOS = better_parent(SHOWN) | over_controls(SHOWN, CONTROLS)
SHORTEST_DOC = 24
LONGEST_DOC = 160
SHORTEST_CODE = 60
LONGEST_CODE = 420


class CodeAmounts(Amounts):
    """Amounts of text; validation takes half of a task's examples.

    Args:
        functions: functions of training modules, half of them docstring from function, half function from docstring.
        answers: examples that are answered for chrF.
    """

    tested: int = 9_000
    examples: int = 80
    functions: int = 800
    answers: int = 16


QUICK = CodeAmounts(
    share=0.5,
    old=1_200,
    functions=20,
    tested=1_500,
    examples=6,
    answers=2,
)


class Function(NamedTuple):
    """A function.

    Attributes:
        code: source without the docstring.
        doc: first paragraph of the docstring, on one line.
    """

    code: str
    doc: str


def run(options: Options) -> Results:
    """Run the chosen tables."""
    amounts = QUICK if options.quick else CodeAmounts()
    study = TextStudy(options, TABLES, LABELS, amounts)
    counts = write_texts(study, amounts)
    study.validation = [study.task("validation_c2t"), study.task("validation_t2c")]
    study.tasks = [study.task(name, answers=amounts.answers, **ends(name)) for name in ("c2t", "t2c")]
    models = {
        "m_b": study.anchor,
        "m_a": study.model(study.parents.code),
    }
    rows, details = study.measure(models, trained_rows(study))
    details["setting"] = {**study.setting(), "texts": counts}
    return study.report(__file__, rows, RATIOS, SHOWN, details)


def write_texts(study: TextStudy, amounts: CodeAmounts) -> dict[str, int]:
    """Write every text and task; all texts are cut or chosen so that every example fits into a row.

    Returns:
        Numbers of characters and examples that rows are trained on, and of functions by part.
    """
    folder = study.texts
    python = study.write_parts({"python": "python-train"}, cut=True)["python"]
    kinds = {part: _functions_of_part(study, part) for part in ("train", "validation", "test")}
    trained = []
    for index, function in enumerate(spaced(kinds["train"], amounts.functions)):
        trained.append(docstring_of(function) if index % 2 else code_of(function))
    write_examples(folder / "functions-prompts.jsonl", trained)
    tested = spaced(kinds["test"], amounts.examples)
    validated = spaced(kinds["validation"], amounts.examples // 2)
    for prefix, functions_of_task in (("validation_", validated), ("", tested)):
        docstrings = [docstring_of(function) for function in functions_of_task]
        codes = [code_of(function) for function in functions_of_task]
        write_examples(folder / f"task-{prefix}c2t.jsonl", docstrings)
        write_examples(folder / f"task-{prefix}t2c.jsonl", codes)
    counts = {
        "specialist's text, characters": sum(len(text) for text in python),
        "functions": len(trained),
    }
    for part, members in kinds.items():
        counts[f"functions of {part} modules"] = len(members)
    return counts


def _functions_of_part(study: TextStudy, part: str) -> list[Function]:
    """Return the functions of a part's modules whose examples fit into a row in both directions."""
    sources = read_texts(study.parents.corpus / f"python-{part}.jsonl")
    kept = []
    for function in functions(sources):
        examples = [docstring_of(function), code_of(function)]
        if len(fitting(examples, study.tokenizer, study.length)) == len(examples):
            kept.append(function)
    return kept


def ends(name: str) -> dict[str, Any]:
    """Return the fields of a task that end its answers.

    A docstring is one line; a function ends before the first line without indentation.
    """
    if name.endswith("c2t"):
        return {"max_new_tokens": 48, "stop": ("\n",)}
    return {"max_new_tokens": 80, "stop": ("\n\n", "\n#", "\ndef", "\nclass")}


def trained_rows(study: TextStudy) -> list[ComposedRow]:
    """Return every trained row, all on the same data; the new domain is Python."""
    tests = {
        "old": "old",
        "new": "python",
        "validation_old": "validation_old",
        "validation_new": "validation_python",
    }
    data = study.data(["python-part", "functions-prompts"], ["english-part"], tests)
    grafts = study.grafts("code", study.parents.code)
    return [ComposedRow(name, graft, data) for name, graft in grafts.items()]


def functions(sources: Iterable[str]) -> list[Function]:
    """Return the functions and methods of modules that have a docstring and a medium size, each docstring once."""
    by_docstring: dict[str, Function] = {}
    for source in sources:
        for function in _of_module(source):
            by_docstring.setdefault(function.doc, function)
    return list(by_docstring.values())


def docstring_of(function: Function) -> tuple[str, str]:
    """Return prompt and answer of code to text."""
    prompt = f"{function.code}\n\n# What it does:"
    return prompt, f" {function.doc}\n"


def code_of(function: Function) -> tuple[str, str]:
    """Return prompt and answer of text to code; the prompt includes the function's name and arguments."""
    head, _, body = function.code.partition("\n")
    prompt = f"# {function.doc}\n{head}\n"
    return prompt, f"{body}\n"


def _of_module(source: str) -> Iterator[Function]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules have old escapes
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        doc = " ".join(docstring.partition("\n\n")[0].split())
        node.body = node.body[1:]
        node.decorator_list = []
        code = ast.unparse(node) if node.body else ""
        if SHORTEST_DOC <= len(doc) <= LONGEST_DOC and SHORTEST_CODE <= len(code) <= LONGEST_CODE:
            yield Function(code, doc)
