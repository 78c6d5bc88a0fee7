"""Table 1 of the composition paper from nothing: two models made here, composed on a fifth of the keys.

Every trained row sees the same D_C for the same number of steps. Learning rates were chosen with seed 0 on validation
expressions (`--table rates`), and stand in `RATES`; both changed compositions take the composition's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from pydantic import Field

from experiments import Options
from experiments.kv_arithmetic.data import World
from experiments.kv_arithmetic.runs import Exam, JointData, KvArithmeticRun, ModelShape, ParentRun, Role, TrainingLength
from experiments.study import Study, TableRow, aim, bars, combined_row, numbers_of, published
from graftlm.config import Config
from graftlm.evaluation import Aim, Results, Row
from graftlm.io import digest, write_atomically

NAME = "kv-arithmetic"
WITHIN_TEN_MINUTES = ("1", "ablations")
LABELS = {
    "m_a": "m_A, memory",
    "m_b": "m_B, arithmetic",
    "composition": "composition",
    "lora": "LoRA on m_B",
    "random_m_a": "random m_A",
    "encoder_m_a": "m_A as encoder",
}
# Of the trained rows, chosen by --table rates.
RATES = {"composition": 3e-2, "lora": 1e-3, "random_m_a": 3e-2, "encoder_m_a": 3e-2}
TRIED_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
ABLATIONS: dict[str, dict[str, Any]] = {
    "norm-none": {"norm": "none"},
    "init-paper": {"init": "paper"},
    "positions-none": {"positions": "none"},
}
SHOWN = {
    "subs_held_out": "values of keys held out",
    "num_math": "sums of numbers",
    "kv_math_held_in": "sums of keys held in, scratchpad",
    "kv_math_held_out": "sums of keys held out, scratchpad",
    "kv_math_direct_held_out": "sums of keys held out, direct",
}
FORMS = """Percent of right answers. Two forms of KV-MATH: *scratchpad*, where the answer puts the values in and then
computes (`abc+def>` to `210+430=640`): kv_math_held_in, kv_math_held_out; and *direct*, the answer alone (`abc+def=` to
`640`): kv_math_direct_held_out. KV-SUBS (subs) is what a scratchpad answer puts in, NUM-MATH (num_math) `210+430=` to
`640`. Numbers are written with their ones first."""


class KvArithmeticSize(Config):
    """Sizes and lengths of one table."""

    world: World = Field(default_factory=World)
    exam: Exam = Field(default_factory=Exam)
    memory: TrainingLength = TrainingLength(steps=500, learning_rate=5e-3, examples=20_000)
    arithmetic: TrainingLength = TrainingLength(steps=2300, batch_size=40, learning_rate=5e-3, examples=100_000)
    joint: TrainingLength = TrainingLength(steps=500, examples=10_000)
    data: JointData = Field(default_factory=JointData)
    shapes: dict[Role, ModelShape] = Field(default_factory=dict)
    graft: dict[str, Any] = Field(default_factory=lambda: {"stride": 2, "norm": "pre", "positions": "rotary"})
    lora_rank: int = 13
    named: float = 0.0


FULL = KvArithmeticSize()
# As many keys and operands as in the paper. m_A is wider, for 216,000 weights do not hold 25,000 pairs; steps are those
# of a quarter of an hour of one core, which are far too few (README.md).
_WIDE = ModelShape(width=128, inner=384)
LARGE = KvArithmeticSize(
    world=World(keys=25_000, letters=(2, 6), operands=(3, 6)),
    exam=Exam(expressions=100, validation=50),
    memory=TrainingLength(steps=1300, batch_size=32, learning_rate=3e-3, examples=60_000),
    arithmetic=TrainingLength(steps=1200, batch_size=32, learning_rate=5e-3, examples=60_000),
    joint=TrainingLength(steps=250, batch_size=32, examples=12_000),
    shapes={"memory": _WIDE, "random": _WIDE},
    lora_rank=16,
)
QUICK = KvArithmeticSize(
    world=World(keys=40, letters=(2, 2)),
    exam=Exam(expressions=4, validation=3),
    memory=TrainingLength(steps=4, batch_size=4, examples=16),
    arithmetic=TrainingLength(steps=4, batch_size=4, examples=16),
    joint=TrainingLength(steps=4, batch_size=4, examples=16),
    shapes={role: ModelShape(width=16, layers=2, heads=2, inner=32) for role in ("memory", "arithmetic", "random")},
    graft={"stride": 1},
    lora_rank=9,
)


class KvArithmeticStudy(Study):
    """The runs of the experiment at one size."""

    def __init__(self, options: Options, size: KvArithmeticSize | None = None) -> None:
        super().__init__(options)
        self.size = size or (QUICK if options.quick else FULL)
        self.parents: dict[str, ParentRun] = {}

    def resized(self, **changes: Any) -> KvArithmeticStudy:
        """The study at another size, with the same collection of parents."""
        study = copy(self)
        study.size = self.size.model_copy(update=changes)
        return study

    def parent(self, role: Role, seed: int) -> ParentRun:
        """One of the models that rows depend on."""
        size, own = self.size, role == "arithmetic"
        run = ParentRun(
            id="parent",
            role=role,
            world=size.world,
            exam=size.exam,
            shape=size.shapes.get(role, ModelShape()),
            length=size.arithmetic if own else size.memory,
            named=size.named if own else 0.0,
            seed=seed,
        )
        name = f"parent-{role}-s{seed}-{digest(run.settings())[:8]}"  # a table may have several of one role
        return self.parents.setdefault(name, run.model_copy(update={"id": name}))

    def row_run(
        self, row: str, seed: int, name: str = "", *, graft: dict[str, Any] | None = None, **changes: Any
    ) -> KvArithmeticRun:
        """A row for one seed; `graft` changes the composition's config, `changes` other fields of the run."""
        size = self.size
        fields: dict[str, Any] = {"world": size.world, "exam": size.exam, "joint": size.data, "length": size.joint}
        fields |= {"id": f"{name or row}_s{seed}", "label": LABELS.get(row, row), "seed": seed} | changes
        roles: list[Role] = ["memory" if row == "m_a" else "arithmetic"]
        if row in RATES:
            fields.setdefault("rate", RATES[row])
            fields["graft"] = {"kind": "lora", "rank": size.lora_rank}
            if row != "lora":
                roles.append("random" if row == "random_m_a" else "memory")
                fields["graft"] = {"kind": "composition"} | size.graft | (graft or {})
            if row == "encoder_m_a":
                fields["graft"]["refresh"] = "prompt"
        return KvArithmeticRun(depends_on=tuple(self.parent(role, seed).id for role in roles), **fields)


def run(options: Options) -> Results:
    """Run the chosen tables, by default those of ten minutes."""
    study, tables = KvArithmeticStudy(options), options.chosen(tuple(TABLES), WITHIN_TEN_MINUTES)
    table_rows = [table_row for table in tables for table_row in TABLES[table](study)]
    runs = [run for table_row in table_rows for run in table_row.runs]
    measured = study.execute([*study.parents.values(), *runs], NAME)
    rows = [
        combined_row(name, label, [measured[run.id].row.metrics for run in runs]) for name, label, runs in table_rows
    ]
    shown = [row for row in rows if row.id in LABELS]
    plots = {"accuracy": bars(shown, SHOWN, "right answers, %")} if shown else {}
    details = {"wall_s": study.seconds} | _details(study, tables, table_rows)
    paper = published(__file__, {row.id for row in rows})
    results = study.write(NAME, rows, aims=aims(rows), paper=paper, details=details, plots=plots)
    report = options.out / "report.md"
    write_atomically(report, f"{report.read_text(encoding='utf-8')}\n{FORMS}\n".encode())
    return results


def _first(study: KvArithmeticStudy, row: str, name: str, label: str, **changes: Any) -> TableRow:
    """A row of the first seed alone."""
    return TableRow(name, label, [study.row_run(row, study.seeds[0], name, **changes)])


def table_1(study: KvArithmeticStudy) -> list[TableRow]:
    """Every row for every seed."""
    return [TableRow(row, label, [study.row_run(row, seed) for seed in study.seeds]) for row, label in LABELS.items()]


def ablations(study: KvArithmeticStudy) -> list[TableRow]:
    """Normalisation, start and positions of the cross-attention, one changed at a time, with the first seed."""
    unchanged = study.row_run("composition", study.seeds[0])
    return [TableRow("as-composed", "norm pre, init zero, positions rotary", [unchanged])] + [
        _first(study, "composition", name, ", ".join(f"{key} {value}" for key, value in graft.items()), graft=graft)
        for name, graft in ABLATIONS.items()
    ]


def rates(study: KvArithmeticStudy) -> list[TableRow]:
    """Learning rates, on validation expressions, with the first seed."""
    return [
        _first(study, row, f"{row}-lr{rate:g}", f"{LABELS[row]}, lr {rate:g}", rate=rate, validation=True)
        for row in RATES
        for rate in TRIED_RATES
    ]


def joint(study: KvArithmeticStudy) -> list[TableRow]:
    """The content of D_C, with the first seed."""
    changes: dict[str, dict[str, Any]] = {
        "arithmetic": {},
        "substitution": {"task": "substitution"},
        "mixture": {"task": "mixture"},
        "no-numbers": {"numeric": 0.0},
    }
    return [
        _first(study, "composition", f"joint-{name}", f"D_C: {name}", joint=study.size.data.model_copy(update=change))
        for name, change in changes.items()
    ]


def direct(study: KvArithmeticStudy) -> list[TableRow]:
    """Attempts at the direct form, each trained on it alone and three times as long, with the first seed."""
    size = study.size
    data = size.data.model_copy(update={"form": "direct"})
    length = size.joint.model_copy(update={"steps": 3 * size.joint.steps})
    longer = size.arithmetic.model_copy(update={"steps": 2 * size.arithmetic.steps})
    named = study.resized(named=0.4, arithmetic=longer)
    last = (size.shapes.get("memory") or ModelShape()).layers - 1
    to_first_two = {"augmenting": {"pairs": [(last, 0), (last, 1)]}}
    every_layer = {"augmenting": {"pairs": [(layer, 0) for layer in range(last + 1)]}, "heads": 16}
    attempts: dict[str, tuple[KvArithmeticStudy, dict[str, Any]]] = {
        "as in Table 1": (study, {}),
        "every layer, 16 heads": (study, {"stride": 1, "heads": 16}),
        "m_A's last layer to m_B's first two": (study, to_first_two),
        "every layer of m_A to m_B's first, 16 heads": (study, every_layer),
        "m_B reads named numbers": (named, {}),
        "m_B reads named numbers, every layer, 16 heads": (named, {"stride": 1, "heads": 16}),
    }
    return [
        _first(at, "composition", f"direct-{n}", f"direct: {label}", joint=data, length=length, graft=graft)
        for n, (label, (at, graft)) in enumerate(attempts.items())
    ]


def large(study: KvArithmeticStudy) -> list[TableRow]:
    """Table 1 with as many keys and operands as in the paper, with the first seed."""
    at = study if study.options.quick else study.resized(**dict(LARGE))
    return [_first(at, row, f"large-{row}", f"large: {label}") for row, label in LABELS.items()]


TABLES: dict[str, Callable[[KvArithmeticStudy], list[TableRow]]] = {"1": table_1} | {
    table.__name__: table for table in (ablations, rates, joint, direct, large)
}


def aims(rows: Sequence[Row]) -> list[Aim]:
    """The aims of Table 1, for scratchpad answers over keys held out."""
    metric, values = "kv_math_held_out", numbers_of(rows)
    if not LABELS.keys() <= values.keys():
        return []
    limits = {"composition": 84.3, "m_a": 5.0, "m_b": 5.0, "lora": 10.0, "random_m_a": 10.0}
    relations = dict.fromkeys(limits, ("under", operator.lt)) | {"composition": ("at least", operator.ge)}
    return [
        aim(f"{LABELS[row]}: {words} {limit:g}%", metric, limit, values[row][metric], relation)
        for row, limit in limits.items()
        for words, relation in [relations[row]]
    ]


def _details(study: KvArithmeticStudy, tables: Sequence[str], table_rows: Sequence[TableRow]) -> dict[str, Any]:
    sizes = {table: LARGE if table == "large" and not study.options.quick else study.size for table in tables}
    firsts = {table_row.id: study.measured[table_row.runs[0].id].details for table_row in table_rows}
    plotted = firsts.keys() - {"as-composed", *ABLATIONS}
    return {
        "settings": {table: size.model_dump(mode="json") for table, size in sizes.items()},
        "costs": {row: details["cost"] for row, details in firsts.items() if "cost" in details},
        "operations": {row: details["operations"] for row, details in firsts.items() if "operations" in details},
        "losses": {row: firsts[row]["losses"] for row in firsts if row in plotted and "losses" in firsts[row]},
    }
