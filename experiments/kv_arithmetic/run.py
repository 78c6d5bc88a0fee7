"""Table 1 of the composition paper from nothing: two models made here, composed on a fifth of the keys.

Every trained row sees the same D_C for the same number of steps, at a rate from a search of as many settings as any
other row's, on validation expressions with the first seed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from experiments import Options
from experiments.kv_arithmetic.data import World
from experiments.kv_arithmetic.runs import Exam, JointData, KvArithmeticRun, ModelShape, ParentRun, Role, TrainingLength
from experiments.study import Measurements, Study, aim, bars, combined_row, metric, numbers_of, published
from graftlm.config import Config
from graftlm.evaluation import Aim, Results, Row, combine_seeds
from graftlm.files.digests import digest
from graftlm.files.writing import write_atomically
from graftlm.runs.run import Run

NAME = "kv-arithmetic"
LABELS = {
    "m_a": "m_A, memory",
    "m_b": "m_B, arithmetic",
    "pipeline": "pipeline: m_A writes, m_B computes",
    "probability_mixture": "mixture of probabilities",
    "composition": "composition",
    "lora": "LoRA on m_B",
    "random_m_a": "random m_A",
}
RATES: tuple[dict[str, Any], ...] = tuple({"rate": rate} for rate in (1e-3, 3e-3, 1e-2))
# What the search tries for each row that has settings.
SEARCHED = dict.fromkeys(("composition", "lora", "random_m_a"), RATES) | {
    "probability_mixture": tuple({"weight": weight} for weight in (0.25, 0.5, 0.75))
}
RIVALS = {"pipeline": "pipeline", "probability_mixture": "mixture"}
GRAFT: dict[str, Any] = {"norm": "pre", "positions": "local"}
COMPARED = ("kv_math_held_out", "kv_math_direct_held_out")
SHOWN = {
    "subs_held_out": "values of keys held out",
    "num_math": "sums of numbers",
    "kv_math_held_in": "sums of keys held in, scratchpad",
    "kv_math_held_out": "sums of keys held out, scratchpad",
    "kv_math_direct_held_out": "sums of keys held out, direct",
}
FORMS = """Percent of right answers. Two forms of KV-MATH: *direct*, the answer alone (`abc+def=` to `640`):
kv_math_direct_held_out; and *scratchpad*, where the answer puts the values in and then computes (`abc+def>` to
`#012+#034=640`): kv_math_held_in, kv_math_held_out. KV-SUBS (subs) is what a scratchpad answer puts in, NUM-MATH
(num_math) `#012+#034=` to `640`. Results are written with their ones first."""


class KvArithmeticSize(Config):
    """Sizes and lengths."""

    world: World = Field(default_factory=World)
    exam: Exam = Field(default_factory=Exam)
    memory: TrainingLength = TrainingLength(steps=2000, learning_rate=5e-3, examples=100_000)
    arithmetic: TrainingLength = TrainingLength(steps=3500, learning_rate=3e-3, examples=120_000)
    joint: TrainingLength = TrainingLength(steps=1500, examples=30_000)
    data: JointData = Field(default_factory=JointData)
    m_a: ModelShape = Field(default_factory=ModelShape)
    m_b: ModelShape = ModelShape(layers=6, starts_at=1, attends_from=2)
    pairs: tuple[tuple[int, int], ...] = ((3, 0), (3, 5))
    lora_rank: int = 9


FULL = KvArithmeticSize()
QUICK = KvArithmeticSize(
    world=World(keys=60, largest=40, letters=2),
    exam=Exam(expressions=4, held_in=4, validation=3),
    memory=TrainingLength(steps=4, batch_size=4, examples=16),
    arithmetic=TrainingLength(steps=4, batch_size=4, examples=16),
    joint=TrainingLength(steps=4, batch_size=4, examples=16),
    m_a=ModelShape(width=16, layers=2, heads=2, inner=32),
    m_b=ModelShape(width=16, layers=2, heads=2, inner=32, starts_at=1, attends_from=1),
    pairs=((1, 0), (1, 1)),
    lora_rank=9,
)


class KvArithmeticStudy(Study):
    """The runs of the experiment.

    Attributes:
        parents: the models that rows depend on, by run id.
        settings: what the search chose, by row.
    """

    def __init__(self, options: Options, size: KvArithmeticSize | None = None) -> None:
        super().__init__(options)
        self.size = size or (QUICK if options.quick else FULL)
        self.parents: dict[str, ParentRun] = {}
        self.settings: dict[str, dict[str, Any]] = {}

    def execute(self, runs: Sequence[Run], title: str) -> Measurements:
        return super().execute([*self.parents.values(), *runs], title)

    def search(self) -> None:
        """Choose every row's setting on validation expressions."""
        tried: dict[str, dict[str, tuple[KvArithmeticRun, dict[str, Any]]]] = {}
        for row, settings in SEARCHED.items():
            for number, setting in enumerate(settings):
                fields: dict[str, Any] = {"validation": True, **setting}
                run = self.row_run(row, self.seeds[0], f"search-{row}-{number}", **fields)
                tried.setdefault(row, {})[run.id] = run, setting
        candidates = {row: [run for run, _ in by_id.values()] for row, by_id in tried.items()}
        chosen = self.choose(candidates, ("wrong_scratchpad", "wrong_direct"), "the settings")
        self.settings = {row: tried[row][run.id][1] for row, run in chosen.items()}

    def parent(self, role: Role, seed: int, **changes: Any) -> ParentRun:
        """One of the models that rows depend on; `changes` are other fields of the run."""
        size = self.size
        computes = role == "arithmetic"
        fields: dict[str, Any] = {"world": size.world, "exam": size.exam} | changes
        fields = {"shape": size.m_b if computes else size.m_a} | fields
        length = size.arithmetic if computes else size.memory
        run = ParentRun(id="parent", role=role, length=length, seed=seed, **fields)
        name = f"parent-{role}-s{seed}-{digest(run.settings())[:8]}"
        return self.parents.setdefault(name, run.model_copy(update={"id": name}))

    def row_run(self, row: str, seed: int, name: str = "", **changes: Any) -> KvArithmeticRun:
        """A row for one seed; `changes` are other fields of the run."""
        size = self.size
        fields: dict[str, Any] = {"world": size.world, "exam": size.exam, "joint": size.data, "length": size.joint}
        fields |= {"id": f"{name or row}_s{seed}", "label": LABELS[row], "seed": seed}
        fields |= self.settings.get(row, {}) | changes
        roles: list[Role] = ["memory" if row == "m_a" else "arithmetic"]
        if row in RIVALS:
            roles.append("memory")
            fields["rival"] = RIVALS[row]
        elif row == "lora":
            fields["graft"] = {"kind": "lora", "rank": size.lora_rank}
        elif row in SEARCHED:
            roles.append("random" if row == "random_m_a" else "memory")
            fields["graft"] = {"kind": "composition", "augmenting": {"pairs": size.pairs}} | GRAFT
        return KvArithmeticRun(depends_on=tuple(self.parent(role, seed).id for role in roles), **fields)


def run(options: Options) -> Results:
    """Search every row's setting, then run the only table."""
    options.chosen(("1",))
    study = KvArithmeticStudy(options)
    study.search()
    by_seed = {row: [study.row_run(row, seed) for seed in study.seeds] for row in LABELS}
    study.execute([run for runs in by_seed.values() for run in runs], NAME)
    rows = [
        combined_row(name, LABELS[name], [study.measured[run.id].row.metrics for run in runs])
        for name, runs in by_seed.items()
    ]
    plots = {"accuracy": bars(rows, SHOWN, "right answers, %")}
    details = {"wall_s": study.seconds} | study.evidence(by_seed) | _details(study, by_seed)
    details["differences"] = differences(study, by_seed)
    paper = published(__file__, {row.id for row in rows})
    results = study.write(NAME, rows, aims=aims(rows), paper=paper, details=details, plots=plots)
    report = options.out / "report.md"
    write_atomically(report, f"{report.read_text(encoding='utf-8')}\n{FORMS}\n".encode())
    return results


def differences(study: KvArithmeticStudy, by_seed: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Paired differences of the composition over every other row, in points: mean and interval over seeds."""
    return {
        f"composition - {other}": {
            name: combine_seeds(
                [_points(study, run, name) - _points(study, rival, name) for run, rival in pairs]
            ).model_dump()
            for name in COMPARED
        }
        for other in LABELS.keys() - {"composition"}
        for pairs in [list(zip(by_seed["composition"], by_seed[other], strict=True))]
    }


def _points(study: KvArithmeticStudy, run: Run, name: str) -> float:
    return metric(study.measured[run.id], name)


def aims(rows: Sequence[Row]) -> list[Aim]:
    """The paper's figure for direct answers, the pipeline's less 2 for the others, and controls that stay low."""
    values = numbers_of(rows)
    if not LABELS.keys() <= values.keys():
        return []
    composed, direct = values["composition"], COMPARED[1]
    return [
        aim("composition, direct: at least the paper's", direct, 84.3, composed[direct], operator.ge),
        aim(
            "composition, scratchpad: at least the pipeline's less 2",
            COMPARED[0],
            values["pipeline"][COMPARED[0]] - 2,
            composed[COMPARED[0]],
            operator.ge,
        ),
        *(
            aim(f"{LABELS[row]}: under 5%", name, 5.0, values[row][name])
            for row in ("m_a", "m_b", "lora", "random_m_a")
            for name in COMPARED
        ),
    ]


def _details(study: KvArithmeticStudy, by_seed: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    firsts = {row: study.measured[runs[0].id].details for row, runs in by_seed.items()}
    return {"size": study.size.model_dump(mode="json"), "settings": study.settings} | {
        name: {row: details[key] for row, details in firsts.items() if key in details}
        for name, key in (("costs", "cost"), ("operations", "operations"), ("losses", "losses"))
    }
