"""Does a question and its answer make SmolLM2 find the right form of a translation likelier, bare and with grafts?

Table 4.2's order on contrastive pairs. Rates are chosen on parallel text of another source than the tests, with the
first seed and eight steps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import groupby, islice, product
from typing import Any

from experiments import Options
from experiments.clarify_smollm2.measures import CONDITIONS, calibration, reliability, values_of
from experiments.clarify_smollm2.pairs import BIBLE, COCOA, GENEVAL, GROUPS, NTREX, build_pairs, training_rows
from experiments.clarify_smollm2.scoring import PairRun
from experiments.study import Study, aim, bars, check_files, training_config, write_lines
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Aim, Results, Row
from graftlm.grafts import graft_config
from graftlm.pipelines.summarize.metrics import bootstrap
from graftlm.runs.graft_run import EvaluationConfig

NAME = "clarify-smollm2"
MODEL = "smollm2-135m-instruct"
COUNTS = {"test": 64, "clear": 24, "dev": 20, "dev_clear": 10}  # pairs of a group, for the bare model
GRAFT_COUNTS = {"test": 20, "clear": 8, "dev": 10, "dev_clear": 5}  # the first of them, for grafts
LORA, RATES = {"kind": "lora", "capacity": 0.1, "scale": 2.0}, (1e-3, 2e-3)
COMPARED = ("right_form_context", "right_form_answer", "moved_context", "moved_answer")
GRAFTS = {"question": "graft, questions", "plain": "graft, plain translation"}


class ClarifyStudy(Study):
    """The runs of the experiment."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.backbone = BackboneConfig(name=options.backbone or MODEL, dtype="bfloat16", device=options.device)
        pairs = list(build_pairs(options.data, dict.fromkeys(COUNTS, 2) if options.quick else COUNTS))
        known = {text for pair in pairs for text in (*pair.forms, pair.told["nothing"].split("\n")[0][6:])}
        write_lines(options.out / "pairs.jsonl", (pair._asdict() for pair in pairs))
        of_part = groupby(pairs, key=lambda pair: (pair.group, pair.part))
        first = [pair for (_, part), each in of_part for pair in islice(each, GRAFT_COUNTS[part])]
        write_lines(options.out / "graft-pairs.jsonl", (pair._asdict() for pair in first))
        for name, rows in training_rows(options.data, known).items():
            write_lines(options.out / f"{name}.jsonl", rows)

    def run(self, name: str, rate: float, seed: int, *, search: bool = False) -> PairRun:
        """A graft at one rate: scored on its pairs, or on validation text alone after eight steps."""
        steps = 3 if self.options.quick else 8 if search else 32
        new = {"new": [self._source(name)], "replay_fraction": 0.0, "length": 320, "boundaries": "whole", "seed": seed}
        return PairRun(
            id=f"search_{name}_lr{rate:g}" if search else f"{name}_s{seed}",
            label=GRAFTS[name],
            backbone=self.backbone,
            graft=graft_config(LORA),
            data=DataConfig.parse(new | {"test": {"new": [self._source(f"validation_{name}", 24)]}}),
            training=training_config(steps, 2, rate, seed, warmup_steps=steps // 10, precision="bf16"),
            evaluation=EvaluationConfig(precision="bf16", own_tokens=0, decode_prompts=0, batch_size=8),
            pairs="" if search else str(self.options.out / "graft-pairs.jsonl"),
        )

    def bare(self) -> PairRun:
        """The model without a graft, on more pairs."""
        test = {"length": 320, "test": {"new": [self._source("validation_plain", 60)]}}
        changes = {"id": "bare", "label": "bare", "graft": None, "pairs": str(self.options.out / "pairs.jsonl")}
        return self.run("plain", RATES[0], 0).model_copy(update=changes | {"data": DataConfig.parse(test)})

    def _source(self, name: str, limit: int | None = None) -> dict[str, Any]:
        limit = 4 if self.options.quick and limit else limit
        path = str(self.options.out / f"{name}.jsonl")
        return {"path": path, "messages_column": "messages", "limit_documents": limit}


def run(options: Options) -> Results:
    """Score the bare model, search, then train and score the grafts."""
    check_files(options, (COCOA, GENEVAL, NTREX, BIBLE))
    study = ClarifyStudy(options)
    study.execute([study.bare()], "bare")
    rates = RATES[:1] if options.quick else RATES
    searched = {name: [study.run(name, rate, study.seeds[0], search=True) for rate in rates] for name in GRAFTS}
    chosen = {n: r.training.learning_rate for n, r in study.choose(searched, ("new",), "the rates").items()}
    for seed in study.seeds:
        study.execute([study.run(name, chosen[name], seed) for name in GRAFTS], f"seed {seed}")
    ids = {"bare": ["bare"]} | {name: [f"{name}_s{seed}" for seed in study.seeds] for name in GRAFTS}
    scored = {name: [study.measured[each].details["pairs"] for each in of_model] for name, of_model in ids.items()}
    labels, same = {"bare": "bare"} | GRAFTS, [pair["id"] for pair in scored["question"][0]]
    rows = []
    for name, group in product(scored, ("", *GROUPS)):
        values = values_of(scored[name], group)
        for other, measure in product([each for each in scored if name == "question" != each], COMPARED):
            values[f"{measure}_over_{other}"] = values[measure] - values_of(scored[other], group, same)[measure]
        metrics: dict[str, Any] = {each: bootstrap(value.tolist()) for each, value in values.items()}
        metrics["pairs"] = len(values["moved_answer"])
        rows.append(Row(id=f"{name}_{group or 'all'}", label=f"{labels[name]}: {group or 'all'}", metrics=metrics))
    asking = [Row(id=f"{n}_asking", label=f"{labels[n]}: asking", metrics=calibration(of)) for n, of in scored.items()]
    alone = {name: [values_of([of_run], "") for of_run in runs] for name, runs in scored.items()}
    by_seed = {n: {each: [float(v[each].mean()) for v in of] for each in COMPARED} for n, of in alone.items()}
    shown = {f"moved_{each}": each for each in CONDITIONS[1:4]}
    plots = {
        "moved": bars(rows[:: len(GROUPS) + 1], shown, "pairs in which it moves the forms the right way, %"),
        "reliability": reliability({labels[name]: runs for name, runs in scored.items()}),
    }
    details = {"rates": chosen, "searched": study.searched, "seconds": study.seconds, "by_seed": by_seed}
    rows += asking
    return study.write(NAME, rows, aims=_aims({row.id: row.metrics for row in rows}), details=details, plots=plots)


def _aims(metrics: Mapping[str, Mapping[str, Any]]) -> list[Aim]:
    """Each aim is met where the low end of an interval is above 0."""
    steps = ("right_form_answer_minus_context", "right_form_context_minus_nothing")
    aims = [(f"{model}_all", step) for model in ("bare", *GRAFTS) for step in steps]
    aims += [("question_all", f"{what}_answer_over_plain") for what in ("right_form", "moved")]
    aims += [("question_asking", "rank_all"), ("question_asking", "f1_minus_always")]
    return [aim(f"low end of {name}, {row}", name, 0.0, metrics[row][name].low, operator.gt) for row, name in aims]
