"""Does a question and its answer make SmolLM2 find the right form of a translation likelier, bare and with grafts?

Table 4.2's order on contrastive pairs. Rates are chosen on parallel text of another source than the tests, with the
first seed and eight steps.
"""

from __future__ import annotations

import operator
from itertools import groupby, islice, product
from typing import Any

from experiments import Options
from experiments.clarify_smollm2.measures import calibration, median_nats, reliability, values_of
from experiments.clarify_smollm2.pairs import BIBLE, COCOA, GENEVAL, NTREX, build_pairs, training_rows
from experiments.clarify_smollm2.scoring import PairRun
from experiments.study import Study, aim, check_files, training_config, write_lines
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Results, Row, bootstrap
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.grafts import graft_config

NAME, MODEL = "clarify-smollm2", "smollm2-135m-instruct"
COUNTS = {"test": 64, "clear": 24, "dev": 20, "dev_clear": 10}  # pairs of a group, for the bare model
GRAFT_COUNTS = {"test": 20, "clear": 8, "dev": 10, "dev_clear": 5}  # the first of them, for grafts
LORA, RATES = {"kind": "lora", "capacity": 0.1, "scale": 2.0}, (1e-3, 2e-3)
GROUPS = ("all", "formality_de", "formality_it", "gender_de", "gender_es", "gender_fr")
GRAFTS = {"question": "graft, questions", "plain": "graft, plain translation"}
LABELS = {"bare": "bare", **GRAFTS}
COMPARED = ("right_form_context", "right_form_answer", "moved_context", "moved_answer")
STEPS = ("right_form_answer_minus_context", "right_form_context_minus_nothing")
# Each aim is met where the low end of an interval is above 0.
AIMS = [*product(("bare_all", "question_all", "plain_all"), STEPS), ("question_all", "right_form_answer_over_plain")]
AIMS += [("question_all", "moved_answer_over_plain"), ("question_asking", "rank_all")]
AIMS += [("question_asking", "f1_minus_always")]


def _write_data(options: Options) -> None:
    pairs = list(build_pairs(options.data, dict.fromkeys(COUNTS, 2) if options.quick else COUNTS))
    first = groupby(pairs, key=lambda pair: (pair["group"], pair["part"]))
    of_grafts = [pair for (_, part), each in first for pair in islice(each, GRAFT_COUNTS[part])]
    known = {text for pair in pairs for text in (*pair["forms"], pair["told"]["nothing"].split("\n")[0][6:])}
    for name, rows in {"pairs": pairs, "graft-pairs": of_grafts, **training_rows(options.data, known)}.items():
        write_lines(options.out / f"{name}.jsonl", rows)


def _run(options: Options, name: str, rate: float, seed: int, part: str = "") -> PairRun:
    """A graft with its pairs; `part` search has none, bare has no graft and more pairs."""
    texts = {each: str(options.out / f"{each}.jsonl") for each in (name, f"validation_{name}", "pairs", "graft-pairs")}
    limit, steps = 60 if part == "bare" else 24, 3 if options.quick else 8 if part == "search" else 32
    new, test = ({"path": texts[each], "messages_column": "messages"} for each in (name, f"validation_{name}"))
    data = {"new": [new], "test": {"new": [test | {"limit_documents": limit}]}, "length": 320, "boundaries": "whole"}
    return PairRun(
        id={"search": f"search_{name}_lr{rate:g}"}.get(part, part or f"{name}_s{seed}"),
        label=part or name,
        backbone=BackboneConfig(name=options.backbone or MODEL, dtype="bfloat16", device=options.device),
        graft=None if part == "bare" else graft_config(LORA),
        data=DataConfig.parse(data | {"replay_fraction": 0.0, "seed": seed}),
        training=training_config(steps, 2, rate, seed, warmup_steps=steps // 10, precision="bf16"),
        evaluation=EvaluationConfig(precision="bf16", own_tokens=0, decode_prompts=0, batch_size=8),
        pairs={"search": "", "bare": texts["pairs"]}.get(part, texts["graft-pairs"]),
    )


def run(options: Options) -> Results:
    """Score the bare model, search, then train and score the grafts."""
    check_files(options, (COCOA, GENEVAL, NTREX, BIBLE))
    _write_data(options)
    study, rates = Study(options), RATES[:1] if options.quick else RATES
    study.execute([_run(options, "plain", RATES[0], 0, "bare")], "bare")
    search = {name: [_run(options, name, rate, study.seeds[0], "search") for rate in rates] for name in GRAFTS}
    chosen = {n: r.training.learning_rate for n, r in study.choose(search, ("new",), "the rates").items()}
    for seed in study.seeds:
        study.execute([_run(options, name, chosen[name], seed) for name in GRAFTS], f"seed {seed}")
    ids = {name: [f"{name}_s{seed}" for seed in study.seeds] if name in GRAFTS else [name] for name in LABELS}
    scored = {name: [study.measured[each].details["pairs"] for each in of_model] for name, of_model in ids.items()}
    same = [pair["id"] for pair in scored["question"][0]]
    rows = []
    for name, group in product(scored, GROUPS):
        values = values_of(scored[name], group)
        for other, measure in product(("bare", "plain") if name == "question" else (), COMPARED):
            values[f"{measure}_over_{other}"] = values[measure] - values_of(scored[other], group, same)[measure]
        metrics: dict[str, Any] = {each: bootstrap(value.tolist()) for each, value in values.items()}
        metrics["pairs"] = len(values["moved_answer"])
        rows.append(Row(id=f"{name}_{group}", label=f"{LABELS[name]}: {group}", metrics=metrics))
    for name, runs in scored.items():
        rows.append(Row(id=f"{name}_asking", label=f"{LABELS[name]}: asking", metrics=calibration(runs)))
    alone = {name: [values_of([of_run], "all") for of_run in runs] for name, runs in scored.items()}
    by_seed = {n: {each: [float(v[each].mean()) for v in of] for each in COMPARED} for n, of in alone.items()}
    by_row = {row.id: row.metrics for row in rows}
    lows = {(row, name): getattr(by_row[row][name], "low", 0.0) for row, name in AIMS}
    aims = [aim(f"low end of {n}, {row}", n, 0.0, low, operator.gt) for (row, n), low in lows.items()]
    details = {"rates": chosen, "searched": study.searched, "seconds": study.seconds, "by_seed": by_seed}
    details |= {"median_nats": {name: median_nats(runs) for name, runs in scored.items()}}
    plots = {"reliability": reliability({LABELS[name]: runs for name, runs in scored.items()})}
    return study.write(NAME, rows, aims=aims, details=details, plots=plots)
