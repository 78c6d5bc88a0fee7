"""An English anchor and a Python specialist, composed with a twentieth of the specialist's text and some functions.

Every trained row takes as many steps of as many rows, at the learning rate that the language experiment chose for its
kind of graft. The modules of the test took no part in any choice, and no model has read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from experiments import Options
from experiments.composed import (
    REPLAY_FRACTION,
    ComposedRow,
    ComposedStudy,
    PromptTask,
    composition,
    composition_aims,
    equal_lora,
    source,
)
from experiments.composition_code.functions import code_of, docstring_of, functions
from experiments.parents import (
    FILES,
    Parents,
    Size,
    cut_texts,
    fitting,
    held_out,
    make_parents,
    old_part,
    part,
    read_texts,
    spaced,
    write_examples,
)
from experiments.parents import QUICK as QUICK_SIZE
from experiments.study import bars, check_files, published
from graftlm.config import Config
from graftlm.data import DataConfig
from graftlm.demo.corpus import write_documents
from graftlm.evaluation import Results

NAME = "composition-code"
ABLATIONS = ("lora", "vanilla_m_a", "random_m_a", "encoder_m_a")
TABLES = {"4": ("composition",), "5": ("composition", *ABLATIONS)}
LABELS = {
    "m_b": "anchor m_B",
    "m_a": "code specialist m_A",
    "composition": "composition",
    "lora": "LoRA, equal parameters",
    "vanilla_m_a": "with vanilla m_A",
    "random_m_a": "with random m_A",
    "encoder_m_a": "m_A as encoder",
}
SHOWN = {"c2t_bpb": "docstring from function", "t2c_bpb": "function from docstring"}


class CodeAmounts(Config):
    """How much of each text.

    Args:
        share: of each of the specialist's modules that compositions are trained on.
        old: characters of each of the anchor's novels in the old share; of its other documents a twelfth of that.
        functions: of training modules, half of them docstring from function, half the other way round.
        tested: characters of each set of test texts; validation takes a third.
        examples: of each task; validation takes half.
        answers: of the first ones, for chrF.
    """

    share: float = 0.05
    old: int = 18_000
    functions: int = 800
    tested: int = 9_000
    examples: int = 80
    answers: int = 16


QUICK = CodeAmounts(share=0.5, old=1_200, functions=20, tested=1_500, examples=6, answers=2)


def run(options: Options) -> Results:
    """Run the chosen tables."""
    wanted = {row for table in options.chosen(tuple(TABLES)) for row in TABLES[table]}
    check_files(options, FILES)
    size, amounts = (QUICK_SIZE, QUICK) if options.quick else (Size(), CodeAmounts())
    parents, texts = make_parents(options, size), options.out / "texts"
    counts = write_texts(options.data, parents, texts, amounts, size.length)
    data = data_of(texts, size)
    validation = [task(texts, name) for name in ("validation_c2t", "validation_t2c")]
    tasks = [task(texts, name, amounts.answers) for name in ("c2t", "t2c")]
    study = ComposedStudy(options, parents.anchor, sets=data, validation=validation, tasks=tasks)
    trained = [row for row in trained_rows(parents, data) if row.id in wanted]
    rows, details = study.measure({"m_b": parents.anchor, "m_a": parents.code}, trained, LABELS)
    details["setting"] |= {"texts": counts, "amounts": amounts.model_dump(), "parents": parents.summaries}
    aims = composition_aims(
        rows,
        (
            (f"{text}, bits per byte, over {LABELS[other]}'s", metric, "composition", other, 1.0)
            for metric, text in SHOWN.items()
            for other in ("m_b", "m_a")
        ),
    )
    plots = {"bits-per-byte": bars(rows, SHOWN, "bits per byte")}
    return study.write(NAME, rows, aims=aims, paper=published(__file__), details=details, plots=plots)


def write_texts(data: Path, parents: Parents, folder: Path, amounts: CodeAmounts, length: int) -> dict[str, int]:
    """Write every text and task into `folder`; gives the characters and examples of what is trained on.

    All of it is cut or chosen so that every example is whole in a row of `length` tokens.
    """
    corpus, tokenizer = parents.corpus, AutoTokenizer.from_pretrained(parents.anchor)
    held_out(data, corpus, folder, amounts.tested)
    python = part(read_texts(corpus / "python-train.jsonl"), amounts.share)
    english = old_part(read_texts(corpus / "english.jsonl"), amounts.old)
    for name, documents in {"python": python, "english": english}.items():
        write_documents(folder / f"{name}-part.jsonl", cut_texts(documents, tokenizer, length))
    kinds = {
        name: [
            function
            for function in functions(read_texts(corpus / f"python-{name}.jsonl"))
            if len(fitting([docstring_of(function), code_of(function)], tokenizer, length)) == 2
        ]
        for name in ("train", "validation", "test")
    }
    chosen = spaced(kinds["train"], amounts.functions)
    both = [docstring_of(function) if index % 2 else code_of(function) for index, function in enumerate(chosen)]
    write_examples(folder / "functions.jsonl", both)
    for name, start, count in (("validation", "validation_", amounts.examples // 2), ("test", "", amounts.examples)):
        chosen = spaced(kinds[name], count)
        write_examples(folder / f"task-{start}c2t.jsonl", map(docstring_of, chosen))
        write_examples(folder / f"task-{start}t2c.jsonl", map(code_of, chosen))
    trained_on = {"specialist's text, characters": sum(map(len, python)), "functions": len(both)}
    return trained_on | {f"functions of {name} modules": len(members) for name, members in kinds.items()}


def task(texts: Path, name: str, answers: int = 0) -> PromptTask:
    """One task; a docstring is one line, and a function ends before the first line that is not indented."""
    tokens, stop = (48, ("\n",)) if name.endswith("c2t") else (80, ("\n\n", "\n#", "\ndef", "\nclass"))
    path = str(texts / f"task-{name}.jsonl")
    return PromptTask(name=name, path=path, answers=answers, max_new_tokens=tokens, stop=stop)


def data_of(texts: Path, size: Size) -> DataConfig:
    """What every row is trained and measured on."""
    # Here the new domain is Python.
    sets = {"old": "old", "new": "python", "validation_old": "validation_old", "validation_new": "validation_python"}
    return DataConfig(
        new=[source(texts, "python-part"), source(texts, "functions", prompt_column="prompt")],
        old=[source(texts, "english-part")],
        replay_fraction=REPLAY_FRACTION,
        length=size.length,
        boundaries="whole",
        test={name: [source(texts, file)] for name, file in sets.items()},
    )


def trained_rows(parents: Parents, data: DataConfig) -> list[ComposedRow]:
    """Every trained row, all on the same data."""
    pair = composition({"code": parents.code})
    grafts: dict[str, Mapping[str, Any]] = {
        "composition": pair,
        "lora": equal_lora(parents.anchor, pair),
        "vanilla_m_a": composition({"code": parents.vanilla}),
        "random_m_a": composition({"code": parents.random}),
        "encoder_m_a": pair | {"refresh": "prompt"},
    }
    return [ComposedRow(name, LABELS[name], graft, data) for name, graft in grafts.items()]
