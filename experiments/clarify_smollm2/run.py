"""Does a question and its answer make SmolLM2 prefer the right form of a translation, bare and with grafts?

Table 4.2's order on contrastive pairs. Learning rates are chosen on parallel text of another source than the tests,
with the first seed and eight steps.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from experiments import Options
from experiments.clarify_smollm2.measures import Pairs, calibration, median_nats, reliability, values_of
from experiments.clarify_smollm2.pairs import BIBLE, COCOA, GENEVAL, NTREX, build_pairs, training_rows
from experiments.clarify_smollm2.scoring import PairRun
from experiments.study import Study, aim, check_files, training_config, write_lines
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Aim, Metric, Results, Row, bootstrap
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.grafts import graft_config

NAME = "clarify-smollm2"
MODEL = "smollm2-135m-instruct"
COUNTS = {"test": 64, "clear": 24, "dev": 20, "dev_clear": 10}  # pairs of a group, for the bare model
GRAFT_COUNTS = {"test": 20, "clear": 8, "dev": 10, "dev_clear": 5}  # the first of these pairs, for grafts
LORA = {"kind": "lora", "capacity": 0.1, "scale": 2.0}
RATES = (1e-3, 2e-3)
STEPS = 32
SEARCH_STEPS = 8
QUICK_STEPS = 3
GROUPS = ("all", "formality_de", "formality_it", "gender_de", "gender_es", "gender_fr")
GRAFTS = {"question": "graft, questions", "plain": "graft, plain translation"}
LABELS = {"bare": "bare", **GRAFTS}
COMPARED = ("right_form_context", "right_form_answer", "moved_context", "moved_answer")
# Rows and metrics; an aim is met if the low end of the metric's interval is above 0.
AIMS = [
    ("bare_all", "right_form_answer_minus_context"),
    ("bare_all", "right_form_context_minus_nothing"),
    ("question_all", "right_form_answer_minus_context"),
    ("question_all", "right_form_context_minus_nothing"),
    ("plain_all", "right_form_answer_minus_context"),
    ("plain_all", "right_form_context_minus_nothing"),
    ("question_all", "right_form_answer_over_plain"),
    ("question_all", "moved_answer_over_plain"),
    ("question_asking", "rank_all"),
    ("question_asking", "f1_minus_always"),
]

Scored = Mapping[str, Sequence[Pairs]]  # the scored pairs of each run, by model


def _write_data(options: Options) -> None:
    """Write the pairs and the conversations to train on."""
    counts = dict.fromkeys(COUNTS, 2) if options.quick else COUNTS
    pairs = list(build_pairs(options.data, counts))
    known = set()
    for pair in pairs:
        text = pair["told"]["nothing"].split("\n")[0].removeprefix("Text: ")
        known.update([text, *pair["forms"]])
    files = {
        "pairs": pairs,
        "graft-pairs": _first_pairs(pairs),
        **training_rows(options.data, known),
    }
    for name, rows in files.items():
        write_lines(options.out / f"{name}.jsonl", rows)


def _first_pairs(pairs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first pairs of each group and part, for the grafts."""
    seen: Counter[tuple[str, str]] = Counter()
    first = []
    for pair in pairs:
        key = (pair["group"], pair["part"])
        if seen[key] < GRAFT_COUNTS[pair["part"]]:
            first.append(pair)
        seen[key] += 1
    return first


def _data_config(options: Options, name: str, seed: int, *, limit: int) -> DataConfig:
    """Return the config of the conversations, with a limit of validation documents."""
    new = {"path": str(options.out / f"{name}.jsonl"), "messages_column": "messages"}
    test = {"path": str(options.out / f"validation_{name}.jsonl"), "messages_column": "messages"}
    values = {
        "new": [new],
        "test": {"new": [{**test, "limit_documents": limit}]},
        "length": 320,
        "boundaries": "whole",
        "replay_fraction": 0.0,
        "seed": seed,
    }
    return DataConfig.parse(values)


def _run(
    options: Options,
    run_id: str,
    name: str,
    *,
    label: str,
    rate: float = RATES[0],
    seed: int = 0,
    steps: int = STEPS,
    pairs: str = "graft-pairs",
) -> PairRun:
    """Return a run that trains a graft.

    Args:
        options: the options of the experiment.
        run_id: id of the run.
        name: the conversations to train on, `question` or `plain`.
        label: label of the run.
        rate: the learning rate.
        seed: the seed.
        steps: number of training steps; fewer in a quick run.
        pairs: the file of pairs to score; empty for none.
    """
    if options.quick:
        steps = QUICK_STEPS
    return PairRun(
        id=run_id,
        label=label,
        backbone=BackboneConfig(name=options.backbone or MODEL, dtype="bfloat16", device=options.device),
        graft=graft_config(LORA),
        data=_data_config(options, name, seed, limit=24),
        training=training_config(steps, 2, rate, seed, warmup_steps=steps // 10, precision="bf16"),
        evaluation=EvaluationConfig(precision="bf16", own_tokens=0, decode_prompts=0, batch_size=8),
        pairs=str(options.out / f"{pairs}.jsonl") if pairs else "",
    )


def _bare_run(options: Options) -> PairRun:
    run = _run(options, "bare", "plain", label="bare", pairs="pairs")
    data = _data_config(options, "plain", seed=0, limit=60)
    return run.model_copy(update={"graft": None, "data": data})


def _search_run(options: Options, name: str, rate: float, seed: int) -> PairRun:
    return _run(
        options,
        f"search_{name}_lr{rate:g}",
        name,
        label="search",
        rate=rate,
        seed=seed,
        steps=SEARCH_STEPS,
        pairs="",
    )


def _graft_run(options: Options, name: str, rate: float, seed: int) -> PairRun:
    return _run(options, f"{name}_s{seed}", name, label=name, rate=rate, seed=seed)


def run(options: Options) -> Results:
    """Score the bare model, search for the learning rates, then train and score the grafts."""
    check_files(options, (COCOA, GENEVAL, NTREX, BIBLE))
    _write_data(options)
    study = Study(options)
    study.execute([_bare_run(options)], "bare")
    rates = _choose_rates(study, options)
    for seed in study.seeds:
        runs = [_graft_run(options, name, rates[name], seed) for name in GRAFTS]
        study.execute(runs, f"seed {seed}")
    scored = _scored_pairs(study)
    rows = _group_rows(scored) + _asking_rows(scored)
    details = {
        "rates": rates,
        "searched": study.searched,
        "seconds": study.seconds,
        "by_seed": {name: _by_seed(runs) for name, runs in scored.items()},
        "median_nats": {name: median_nats(runs) for name, runs in scored.items()},
    }
    plots = {"reliability": reliability({LABELS[name]: runs for name, runs in scored.items()})}
    return study.write(NAME, rows, aims=_aims(rows), details=details, plots=plots)


def _choose_rates(study: Study, options: Options) -> dict[str, float]:
    """Return the learning rate with the lowest validation loss, by graft."""
    rates = RATES[:1] if options.quick else RATES
    candidates = {}
    for name in GRAFTS:
        candidates[name] = [_search_run(options, name, rate, study.seeds[0]) for rate in rates]
    best = study.choose(candidates, ("new",), "the rates")
    return {name: run.training.learning_rate for name, run in best.items()}


def _scored_pairs(study: Study) -> dict[str, list[Pairs]]:
    scored = {"bare": [study.measured["bare"].details["pairs"]]}
    for name in GRAFTS:
        scored[name] = [study.measured[f"{name}_s{seed}"].details["pairs"] for seed in study.seeds]
    return scored


def _group_rows(scored: Scored) -> list[Row]:
    """Return a row per model and group; the graft with questions is compared with the other models."""
    same_pairs = [pair["id"] for pair in scored["question"][0]]
    rows = []
    for name, group in product(scored, GROUPS):
        values = values_of(scored[name], group)
        if name == "question":
            for other in ("bare", "plain"):
                others = values_of(scored[other], group, same_pairs)
                for measure in COMPARED:
                    values[f"{measure}_over_{other}"] = values[measure] - others[measure]
        metrics: dict[str, Metric] = {measure: bootstrap(value.tolist()) for measure, value in values.items()}
        metrics["pairs"] = len(values["moved_answer"])
        rows.append(Row(id=f"{name}_{group}", label=f"{LABELS[name]}: {group}", metrics=metrics))
    return rows


def _asking_rows(scored: Scored) -> list[Row]:
    """Return a row per model about its decisions to ask."""
    return [
        Row(id=f"{name}_asking", label=f"{LABELS[name]}: asking", metrics=calibration(runs))
        for name, runs in scored.items()
    ]


def _by_seed(runs: Sequence[Pairs]) -> dict[str, list[float]]:
    """Return the means of the compared measures in each run."""
    values = [values_of([pairs], "all") for pairs in runs]
    return {measure: [float(of_run[measure].mean()) for of_run in values] for measure in COMPARED}


def _aims(rows: Sequence[Row]) -> list[Aim]:
    metrics = {row.id: row.metrics for row in rows}
    aims = []
    for row, name in AIMS:
        low = getattr(metrics[row][name], "low", 0.0)
        aims.append(aim(f"low end of {name}, {row}", name, 0.0, low, operator.gt))
    return aims
