"""Table 1 of the composition paper: two models that are trained here, composed on a fifth of the keys.

Every trained row reads the same D_C for the same number of steps, at a rate that a search chose on validation
expressions with the first seed. The search has the same number of settings for every row.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from experiments import Options
from experiments.kv_arithmetic.data import World
from experiments.kv_arithmetic.runs import Exam, JointData, KvArithmeticRun, ModelShape, ParentRun, Role, TrainingLength
from experiments.study import Measurements, Study, aim, all_runs, bars, combined_row, metric, numbers_of, published
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
RATES = ({"rate": 1e-3}, {"rate": 3e-3}, {"rate": 1e-2})
WEIGHTS = ({"weight": 0.25}, {"weight": 0.5}, {"weight": 0.75})
# Settings of the search, by row.
SEARCHED: dict[str, tuple[dict[str, float], ...]] = {
    "composition": RATES,
    "lora": RATES,
    "random_m_a": RATES,
    "probability_mixture": WEIGHTS,
}
RIVALS = {
    "pipeline": "pipeline",
    "probability_mixture": "mixture",
}
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
    """Sizes and lengths of the experiment.

    Args:
        world: form of keys, numbers and expressions.
        exam: numbers of tested expressions.
        memory: length of m_A's training.
        arithmetic: length of m_B's training.
        joint: length of the training on D_C.
        data: content of D_C.
        m_a: shape of m_A.
        m_b: shape of m_B.
        pairs: layers of m_A and m_B that the composition connects.
        lora_rank: rank of LoRA.
    """

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

    Args:
        options: options of the experiment.
        size: sizes and lengths.

    Attributes:
        parents: runs of the models that rows depend on, by run id.
        settings: setting that the search chose, by row.
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
        candidates: dict[str, list[KvArithmeticRun]] = {}
        settings: dict[str, dict[str, float]] = {}
        for row, settings_of_row in SEARCHED.items():
            candidates[row] = []
            for number, setting in enumerate(settings_of_row):
                fields: dict[str, Any] = {"validation": True, **setting}
                run = self.row_run(row, self.seeds[0], f"search-{row}-{number}", **fields)
                candidates[row].append(run)
                settings[run.id] = setting
        chosen = self.choose(candidates, ("wrong_scratchpad", "wrong_direct"), "the settings")
        self.settings = {row: settings[run.id] for row, run in chosen.items()}

    def parent(self, role: Role, seed: int, **changes: Any) -> ParentRun:
        """Return the run of a model that rows depend on; `changes` has further fields of the run."""
        size = self.size
        computes = role == "arithmetic"
        fields: dict[str, Any] = {
            "world": size.world,
            "exam": size.exam,
            "shape": size.m_b if computes else size.m_a,
            "length": size.arithmetic if computes else size.memory,
            **changes,
        }
        run = ParentRun(id="parent", role=role, seed=seed, **fields)
        name = f"parent-{role}-s{seed}-{digest(run.settings())[:8]}"
        return self.parents.setdefault(name, run.model_copy(update={"id": name}))

    def row_run(self, row: str, seed: int, name: str = "", **changes: Any) -> KvArithmeticRun:
        """Return the run of a row with one seed.

        Args:
            row: name of the row.
            seed: seed of the run.
            name: prefix of the run's id; by default the row's name.
            changes: other fields of the run.
        """
        size = self.size
        fields: dict[str, Any] = {
            "id": f"{name or row}_s{seed}",
            "label": LABELS[row],
            "world": size.world,
            "exam": size.exam,
            "joint": size.data,
            "length": size.joint,
            "seed": seed,
            **self.settings.get(row, {}),
            **changes,
        }
        roles: list[Role] = ["memory" if row == "m_a" else "arithmetic"]
        if row in RIVALS:
            roles.append("memory")
            fields["rival"] = RIVALS[row]
        elif row == "lora":
            fields["graft"] = {"kind": "lora", "rank": size.lora_rank}
        elif row in SEARCHED:
            roles.append("random" if row == "random_m_a" else "memory")
            fields["graft"] = {
                "kind": "composition",
                "augmenting": {"pairs": size.pairs},
                **GRAFT,
            }
        parents = tuple(self.parent(role, seed).id for role in roles)
        return KvArithmeticRun(depends_on=parents, **fields)


def run(options: Options) -> Results:
    """Search every row's setting, then run the only table."""
    options.chosen(("1",))
    study = KvArithmeticStudy(options)
    study.search()
    by_seed = {row: [study.row_run(row, seed) for seed in study.seeds] for row in LABELS}
    study.execute(all_runs(by_seed), NAME)
    rows = []
    for name, runs in by_seed.items():
        metrics = [study.measured[run.id].row.metrics for run in runs]
        rows.append(combined_row(name, LABELS[name], metrics))
    details = {
        "wall_s": study.seconds,
        **study.evidence(by_seed),
        **_details(study, by_seed),
        "differences": differences(study, by_seed),
    }
    results = study.write(
        NAME,
        rows,
        aims=aims(rows),
        paper=published(__file__, {row.id for row in rows}),
        details=details,
        plots={"accuracy": bars(rows, SHOWN, "right answers, %")},
    )
    report = options.out / "report.md"
    text = report.read_text(encoding="utf-8")
    write_atomically(report, f"{text}\n{FORMS}\n".encode())
    return results


def differences(study: KvArithmeticStudy, by_seed: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return paired differences of the composition over every other row, in points: mean and interval over seeds."""
    compared: dict[str, Any] = {}
    for other in LABELS:
        if other == "composition":
            continue
        compared[f"composition - {other}"] = {}
        for name in COMPARED:
            values = []
            for run, rival in zip(by_seed["composition"], by_seed[other], strict=True):
                values.append(_points(study, run, name) - _points(study, rival, name))
            compared[f"composition - {other}"][name] = combine_seeds(values).model_dump()
    return compared


def _points(study: KvArithmeticStudy, run: Run, name: str) -> float:
    return metric(study.measured[run.id], name)


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Return the aims: the paper's figure for direct answers, the pipeline's less 2 for others, and low controls."""
    values = numbers_of(rows)
    if not LABELS.keys() <= values.keys():
        return []
    scratchpad, direct = COMPARED
    composed = values["composition"]
    shown = [
        aim(
            "composition, direct: at least the paper's",
            direct,
            84.3,
            composed[direct],
            operator.ge,
        ),
        aim(
            "composition, scratchpad: at least the pipeline's less 2",
            scratchpad,
            values["pipeline"][scratchpad] - 2,
            composed[scratchpad],
            operator.ge,
        ),
    ]
    for row in ("m_a", "m_b", "lora", "random_m_a"):
        text = f"{LABELS[row]}: under 5%"
        shown.extend(aim(text, name, 5.0, values[row][name]) for name in COMPARED)
    return shown


def _details(study: KvArithmeticStudy, by_seed: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    details: dict[str, Any] = {
        "size": study.size.model_dump(mode="json"),
        "settings": study.settings,
        "costs": {},
        "operations": {},
        "losses": {},
    }
    for row, runs in by_seed.items():
        first = study.measured[runs[0].id].details
        for name, key in (("costs", "cost"), ("operations", "operations"), ("losses", "losses")):
            if key in first:
                details[name][row] = first[key]
    return details
