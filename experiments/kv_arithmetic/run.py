"""Table 1 of the composition paper from nothing: two models made here, composed on a fifth of the keys.

Every trained row sees the same D_C for the same number of steps. Learning rates were chosen with seed 0 on validation
expressions (`--table rates`), and stand in `RATES`; both changed compositions take the composition's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from pydantic import Field

from experiments import Options
from experiments.kv_arithmetic import paper
from experiments.kv_arithmetic.data import World
from experiments.kv_arithmetic.exam import Exam
from experiments.kv_arithmetic.figure import accuracy
from experiments.kv_arithmetic.joint import Job, Joint
from experiments.kv_arithmetic.parents import Lessons, Parent, Role, Shape
from experiments.kv_arithmetic.schedule import run_jobs
from graftlm.config import Config
from graftlm.evaluation import Aim, Metric, Results, Row, combine_seeds, value_of
from graftlm.evaluation.report import write_report
from graftlm.io import write_atomically

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
TRAINED = ("composition", "lora", "random_m_a", "encoder_m_a")
# Chosen by --table rates.
RATES = {"composition": 3e-2, "lora": 1e-3, "random_m_a": 3e-2, "encoder_m_a": 3e-2}
TRIED_RATES = (1e-3, 3e-3, 1e-2, 3e-2)
ABLATIONS: dict[str, dict[str, Any]] = {
    "norm-none": {"norm": "none"},
    "init-paper": {"init": "paper"},
    "positions-none": {"positions": "none"},
}
FORMS = """Percent of right answers. Two forms of KV-MATH: *scratchpad*, where the answer puts the values in and then
computes (`abc+def>` to `210+430=640`): kv_math_held_in, kv_math_held_out; and *direct*, the answer alone (`abc+def=` to
`640`): kv_math_direct_held_out. KV-SUBS (subs) is what a scratchpad answer puts in, NUM-MATH (num_math) `210+430=` to
`640`. Numbers are written with their ones first."""


class Setting(Config):
    """Sizes and lengths of one table."""

    world: World = Field(default_factory=World)
    exam: Exam = Field(default_factory=Exam)
    memory: Lessons = Lessons(steps=500, learning_rate=5e-3, examples=20_000)
    arithmetic: Lessons = Lessons(steps=2300, batch_size=40, learning_rate=5e-3, examples=100_000)
    joint: Lessons = Lessons(steps=500, examples=10_000)
    data: Joint = Field(default_factory=Joint)
    shapes: dict[Role, Shape] = Field(default_factory=dict)
    graft: dict[str, Any] = Field(default_factory=lambda: {"stride": 2, "norm": "pre", "positions": "rotary"})
    lora_rank: int = 13
    named: float = 0.0


FULL = Setting()
# As many keys and operands as in the paper. m_A is wider, for 216,000 weights do not hold 25,000 pairs; steps are those
# of a quarter of an hour of one core, which are far too few (README.md).
_WIDE = Shape(width=128, inner=384)
LARGE = Setting(
    world=World(keys=25_000, letters=(2, 6), operands=(3, 6)),
    exam=Exam(expressions=100, validation=50),
    memory=Lessons(steps=1300, batch_size=32, learning_rate=3e-3, examples=60_000),
    arithmetic=Lessons(steps=1200, batch_size=32, learning_rate=5e-3, examples=60_000),
    joint=Lessons(steps=250, batch_size=32, examples=12_000),
    shapes={"memory": _WIDE, "random": _WIDE},
    lora_rank=16,
)
QUICK = Setting(
    world=World(keys=40, letters=(2, 2)),
    exam=Exam(expressions=4, validation=3),
    memory=Lessons(steps=4, batch_size=4, examples=16),
    arithmetic=Lessons(steps=4, batch_size=4, examples=16),
    joint=Lessons(steps=4, batch_size=4, examples=16),
    shapes={role: Shape(width=16, layers=2, heads=2, inner=32) for role in ("memory", "arithmetic", "random")},
    graft={"stride": 1},
    lora_rank=9,
)


class Plan:
    """Which jobs there are."""

    def __init__(self, options: Options, setting: Setting | None = None) -> None:
        self.options = options
        self.setting = setting or (QUICK if options.quick else FULL)
        self.seeds = options.seeds[:1] if options.quick else options.seeds

    def parent(self, role: Role, seed: int) -> Parent:
        """One of the models that others stand on."""
        s = self.setting
        lessons = s.arithmetic if role == "arithmetic" else s.memory
        shape = s.shapes.get(role, Shape())
        named = s.named if role == "arithmetic" else 0.0
        return Parent(role=role, world=s.world, exam=s.exam, shape=shape, lessons=lessons, named=named, seed=seed)

    def job(self, row: str, seed: int, name: str = "", *, rate: float | None = None, **changes: Any) -> Job:
        """One row for one seed; `changes` are to the graft's config, or to the job where it has such a field."""
        own = Job.model_fields.keys() - {"augmenting"}  # which is the graft's
        fields = {key: changes.pop(key) for key in list(changes) if key in own}
        said = {"joint": self.setting.data, "lessons": self.setting.joint, "seed": seed} | fields
        job_id = f"{name or row}_s{seed}"
        if row in ("m_a", "m_b"):
            role: Role = "memory" if row == "m_a" else "arithmetic"
            return Job(id=job_id, model=role, parents=[self.parent(role, seed)], **said)
        rate = rate or RATES[row]
        if row == "lora":
            graft = {"kind": "lora", "rank": self.setting.lora_rank}
            parents = [self.parent("arithmetic", seed)]
            return Job(id=job_id, model="arithmetic", graft=graft, parents=parents, rate=rate, **said)
        read: Role = "random" if row == "random_m_a" else "memory"
        graft = {"kind": "composition"} | self.setting.graft | changes
        if row == "encoder_m_a":
            graft["refresh"] = "prompt"
        parents = [self.parent("arithmetic", seed), self.parent(read, seed)]
        return Job(id=job_id, model="arithmetic", graft=graft, augmenting=read, parents=parents, rate=rate, **said)


class Line(NamedTuple):
    """A row of a table: the mean over its jobs."""

    id: str
    label: str
    jobs: list[Job]


def run(options: Options) -> Results:
    """Run the asked tables, by default those of ten minutes, and write `results.json`, `report.md` and a plot.

    Raises:
        RecipeError: there is no such table.
    """
    plan, tables = Plan(options), options.chosen(tuple(TABLES), WITHIN_TEN_MINUTES)
    lines = [line for table in tables for line in TABLES[table](_plan_of(table, plan))]
    started = time.perf_counter()
    measured = run_jobs([job for line in lines for job in line.jobs], options.out, processes=options.jobs, title=NAME)
    seconds = round(time.perf_counter() - started, 1)
    rows = [_row(line, measured) for line in lines]
    results = Results.here(
        NAME,
        rows,
        seeds=plan.seeds,
        aims=aims(rows),
        paper=paper.rows({row.id for row in rows}),
        details={"wall_s": seconds} | _details(plan, tables, lines, measured),
    )
    report = write_report(results, options.out, plots=_plots(rows))
    write_atomically(report, f"{report.read_text(encoding='utf-8')}\n{FORMS}\n".encode())
    return results


def table_1(plan: Plan) -> list[Line]:
    """Every row for every seed."""
    return [Line(row, label, [plan.job(row, seed) for seed in plan.seeds]) for row, label in LABELS.items()]


def ablations(plan: Plan) -> list[Line]:
    """Normalisation, start and positions of the cross-attention, one changed at a time, with the first seed."""
    seed = plan.seeds[0]
    plain = Line("as-composed", "norm pre, init zero, positions rotary", [plan.job("composition", seed)])
    return [plain] + [
        Line(
            name,
            ", ".join(f"{key} {value}" for key, value in graft.items()),
            [plan.job("composition", seed, name, **graft)],
        )
        for name, graft in ABLATIONS.items()
    ]


def rates(plan: Plan) -> list[Line]:
    """Learning rates, on validation expressions, with the first seed."""
    seed = plan.seeds[0]
    return [
        Line(
            f"{row}-lr{rate:g}",
            f"{LABELS[row]}, lr {rate:g}",
            [plan.job(row, seed, f"{row}-lr{rate:g}", rate=rate, validation=True)],
        )
        for row in TRAINED
        for rate in TRIED_RATES
    ]


def joint(plan: Plan) -> list[Line]:
    """What D_C holds, with the first seed."""
    kinds = {
        "joint-arithmetic": plan.setting.data,
        "joint-substitution": plan.setting.data.model_copy(update={"task": "substitution"}),
        "joint-mixture": plan.setting.data.model_copy(update={"task": "mixture"}),
        "joint-no-numbers": plan.setting.data.model_copy(update={"numeric": 0.0}),
    }
    return [
        Line(name, f"D_C: {name.removeprefix('joint-')}", [plan.job("composition", plan.seeds[0], name, joint=data)])
        for name, data in kinds.items()
    ]


def direct(plan: Plan) -> list[Line]:
    """Attempts at the direct form, each trained on it alone and three times as long, with the first seed."""
    seed, setting = plan.seeds[0], plan.setting
    longer = setting.joint.model_copy(update={"steps": 3 * setting.joint.steps})
    data = setting.data.model_copy(update={"form": "direct"})
    lessons = setting.arithmetic.model_copy(update={"steps": 2 * setting.arithmetic.steps})
    named = Plan(plan.options, setting.model_copy(update={"named": 0.4, "arithmetic": lessons}))
    last = (setting.shapes.get("memory") or Shape()).layers - 1
    tries: dict[str, tuple[Plan, dict[str, Any]]] = {
        "as in Table 1": (plan, {}),
        "every layer, 16 heads": (plan, {"stride": 1, "heads": 16}),
        "m_A's last layer to m_B's first two": (plan, _pairs((last, 0), (last, 1))),
        "every layer of m_A to m_B's first, 16 heads": (
            plan,
            _pairs(*((i, 0) for i in range(last + 1))) | {"heads": 16},
        ),
        "m_B reads named numbers": (named, {}),
        "m_B reads named numbers, every layer, 16 heads": (named, {"stride": 1, "heads": 16}),
    }
    return [
        Line(
            f"direct-{n}",
            f"direct: {label}",
            [p.job("composition", seed, f"direct-{n}", joint=data, lessons=longer, **graft)],
        )
        for n, (label, (p, graft)) in enumerate(tries.items())
    ]


def large(plan: Plan) -> list[Line]:
    """Table 1 with as many keys and operands as in the paper, with the first seed."""
    seed = plan.seeds[0]
    return [
        Line(f"large-{row}", f"large: {label}", [plan.job(row, seed, f"large-{row}")]) for row, label in LABELS.items()
    ]


def _plan_of(table: str, plan: Plan) -> Plan:
    return Plan(plan.options, LARGE) if table == "large" and not plan.options.quick else plan


def _pairs(*pairs: tuple[int, int]) -> dict[str, Any]:
    return {"augmenting": {"pairs": list(pairs)}}


TABLES: dict[str, Callable[[Plan], list[Line]]] = {
    "1": table_1,
    "ablations": ablations,
    "rates": rates,
    "joint": joint,
    "direct": direct,
    "large": large,
}


def aims(rows: Sequence[Row]) -> list[Aim]:
    """What the issue asks of Table 1, all of scratchpad answers over keys held out."""
    by_id = {row.id: row for row in rows}
    if not LABELS.keys() <= by_id.keys():
        return []
    metric = "kv_math_held_out"
    wanted = {"composition": 84.3, "m_a": 5.0, "m_b": 5.0, "lora": 10.0, "random_m_a": 10.0}
    found = []
    for row, aim in wanted.items():
        value = value_of(by_id[row].metrics[metric])
        least = row == "composition"
        text = f"{LABELS[row]}: {'at least' if least else 'under'} {aim:g}%"
        found.append(Aim(text=text, metric=metric, aim=aim, measured=value, met=value >= aim if least else value < aim))
    return found


def _row(line: Line, measured: Mapping[str, dict[str, Any]]) -> Row:
    of_seeds = [measured[job.id]["metrics"] for job in line.jobs]
    metrics: dict[str, Metric] = {name: combine_seeds([metrics[name] for metrics in of_seeds]) for name in of_seeds[0]}
    return Row(id=line.id, label=line.label, metrics=metrics)


def _details(
    plan: Plan, tables: Sequence[str], lines: Sequence[Line], measured: Mapping[str, dict[str, Any]]
) -> dict[str, Any]:
    first = {line.id: measured[line.jobs[0].id] for line in lines}
    changed = {"as-composed", *ABLATIONS}
    return {
        "settings": {table: _plan_of(table, plan).setting.model_dump(mode="json") for table in tables},
        "costs": {row: one["cost"] for row, one in first.items() if "cost" in one},
        "operations": {row: one["operations"] for row, one in first.items() if "operations" in one},
        "losses": {row: one["losses"] for row, one in first.items() if "losses" in one and row not in changed},
    }


def _plots(rows: Sequence[Row]) -> dict[str, Figure]:
    shown = [row for row in rows if row.id in LABELS]
    return {"accuracy": accuracy(shown)} if shown else {}
