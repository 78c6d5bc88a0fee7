"""Arithmetic over memorised keys: SmolLM2 that computes, composed with SmolLM2 that knows the keys.

Both parents are SmolLM2 with a merged LoRA, and the same for all seeds. The searches use keys of their own.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from experiments import Options
from experiments.keys_smollm2.keys import KeySet, all_sums, arithmetic_documents, joint_documents, memory_documents
from experiments.keys_smollm2.rows import (
    COMPOSED,
    DECLARED,
    FULL,
    LABELS,
    LORA,
    M_A,
    M_B,
    MAJORITY,
    MIXTURE,
    MODEL,
    PIPELINE,
    PUBLISHED,
    QUICK,
    RATES,
    SEARCH_SEED,
    SEEDS,
    TRAINED,
    WEIGHTS,
)
from experiments.keys_smollm2.runs import AskedRun, Items, JointRun, Questions
from experiments.precision import training_precision
from experiments.protocol import (
    Condition,
    Evidence,
    RateSearch,
    conditions,
    decide,
    described,
    search_rate,
)
from experiments.study import Study, write_lines
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig, Document
from graftlm.evaluation import Metric, Results, Row, combine_seeds
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.export import export_graft
from graftlm.files.writing import fill_once
from graftlm.grafts import GraftConfig, graft_config
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import Run
from graftlm.runs.shared import load_shared
from graftlm.store.artifact import load_graft
from graftlm.training.config import TrainingConfig

NAME = "keys-smollm2"
__all__ = ["NAME", "SEEDS", "run"]
_EVALUATION = EvaluationConfig(own_tokens=0, decode_prompts=0)
_RECALLED = 0.9
_COMPUTED = 0.8
_ALONE = 0.2


class KeysStudy(Study):
    """The runs of the experiment.

    Args:
        options: options of the experiment.

    Attributes:
        size: how much is taught and asked.
        searches: the search of each trained row's rate, and of the mixture's weight.
        marks: for each row and seed, the judged answers by metric.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.size = QUICK if options.quick else FULL
        self.searches: dict[str, RateSearch] = {}
        self.marks: dict[str, dict[int, dict[str, Items]]] = {}
        self._model = BackboneConfig(
            name=options.backbone or MODEL, dtype="float32", device=options.device, attn_implementation="eager"
        )
        self._precision = training_precision(options.device)
        self._sums = all_sums()

    # Texts

    def _file(self, name: str, documents: Iterable[Document]) -> dict[str, str]:
        """Write documents, and return their source."""
        path = self.options.out / "texts" / f"{name}.jsonl"
        write_lines(path, ({"prompt": each.prompt, "text": each.text} for each in documents))
        return {"path": str(path), "prompt_column": "prompt"}

    def keys(self, seed: int) -> KeySet:
        """Return the keys as a seed uses them."""
        return KeySet(self.size.world, seed, is_search=seed == SEARCH_SEED)

    def questions(self, seed: int) -> Questions:
        """Return what the rows of a seed are asked; those of the search seed are asked the validation questions."""
        is_search = seed == SEARCH_SEED
        count = self.size.validated if is_search else self.size.asked
        return Questions(self.size.world, seed, count, is_search)

    # Parents

    def parents(self) -> None:
        """Train and merge m_B and m_A, which are the same for all seeds."""
        runs = [self._arithmetic(), self._memory()]
        self.execute(runs, "the parents")
        for run in runs:
            self.merged(run)

    def _arithmetic(self) -> GraftRun:
        documents = arithmetic_documents(self._sums["train"], self.size.sum_passes)
        return self._parent(M_B, self._file(M_B, documents), self.size.rates[1])

    def _memory(self) -> GraftRun:
        documents = memory_documents(KeySet(self.size.world, 0), self.size.memory_passes)
        return self._parent(M_A, self._file(M_A, documents), self.size.rates[0])

    def _parent(self, name: str, source: Mapping[str, str], rate: float) -> GraftRun:
        return GraftRun(
            id=name,
            backbone=self._model,
            graft=graft_config({"kind": "lora", "capacity": self.size.capacity}),
            data=self._data(source, 0),
            training=self._training(rate, 0),
            evaluation=_EVALUATION,
        )

    def _data(self, source: Mapping[str, str], seed: int) -> DataConfig:
        data = {"new": [source], "replay_fraction": 0, "length": self.size.length, "boundaries": "whole", "seed": seed}
        return DataConfig.parse(data)

    def _training(self, rate: float, seed: int) -> TrainingConfig:
        training = {
            "learning_rate": rate,
            "batch_size": self.size.batch_size,
            "warmup_steps": 1 if self.options.quick else 20,
            "seed": seed,
            "precision": self._precision,
            "checkpoint_every": 200,
            "keep_checkpoints": 1,
            **({"steps": 2} if self.options.quick else {"epochs": 1}),
        }
        return TrainingConfig.parse(training)

    def merged(self, run: GraftRun) -> BackboneConfig:
        """Return SmolLM2 with the merged LoRA of a run, which is written unless it exists."""
        backbone = load_shared(self._model)

        def fill(folder: Path) -> None:
            shutil.rmtree(folder / "model", ignore_errors=True)  # remains of a killed export
            export_graft(load_graft(self.runs / run.id / "graft", backbone), backbone, folder / "model")

        folder = self.options.out / "parents" / run.id
        fill_once(folder, {"id": run.id, "run": run.settings()}, fill)
        return self._model.model_copy(update={"name": str(folder / "model")})

    # Rows

    def asked(self, row: str, seed: int, weight: float = 0.5) -> AskedRun:
        """Return the run of a row that is not trained."""
        m_a = self.merged(self._memory())
        m_b = self.merged(self._arithmetic())
        fields: dict[str, Any] = {"backbone": m_a if row == M_A else m_b, "asked": self.questions(seed)}
        if row in (PIPELINE, MIXTURE):
            fields |= {"m_a": m_a, "rival": "pipeline" if row == PIPELINE else "mixture", "weight": weight}
        return AskedRun(id=f"{row}_w{weight:g}_s{seed}", **fields)

    def joint(self, row: str, seed: int, rate: float) -> JointRun:
        """Return the run of a trained row."""
        is_search = seed == SEARCH_SEED
        keys = self.keys(seed)
        count = self.size.searched if is_search else self.size.joint
        source = self._file(f"joint_s{seed}", joint_documents(keys, self._sums["train"], count))
        return JointRun(
            id=f"{row}_lr{rate:g}_s{seed}",
            backbone=self.merged(self._arithmetic()),
            graft=self._graft(row, seed),
            data=self._data(source, seed),
            training=self._training(rate, seed),
            evaluation=_EVALUATION,
            asked=self.questions(seed),
        )

    def _graft(self, row: str, seed: int) -> GraftConfig:
        if row == LORA:
            return graft_config({"kind": "lora", "capacity": self.size.compared})
        composed = COMPOSED[row]
        names = {
            "taught": self.merged(self._memory()).name,
            "vanilla": self._model.name,
            "random": "random",
        }
        model: dict[str, Any] = {"name": names[composed.reads]}
        if composed.reads == "random":
            model["seed"] = seed
        if self.options.quick:
            model["stride"] = 1  # for models of few layers
        return graft_config({"kind": "composition", "augmenting": {"memory": model}, **composed.graft})

    # Search and measurement

    def search(self) -> None:
        """Search the rate of every trained row and the weight of the mixture, on the validation questions."""
        quick = self.options.quick
        rates = {row: found[:1] if quick else found for row, found in RATES.items()}
        weights = WEIGHTS[:1] if quick else WEIGHTS
        first: list[Run] = [self.joint(row, SEARCH_SEED, rate) for row, found in rates.items() for rate in found]
        first += [self.asked(MIXTURE, SEARCH_SEED, weight) for weight in weights]
        self.execute(first, "search")
        for row, found in rates.items():
            score = partial(self._validation_score, row)
            self.searches[row] = search_rate(score, found, limit=1 if quick else 6)
        scores = {weight: self._share(self.asked(MIXTURE, SEARCH_SEED, weight)) for weight in weights}
        self.searches[MIXTURE] = RateSearch(scores)

    def _validation_score(self, row: str, rate: float) -> float:
        return self._share(self.joint(row, SEARCH_SEED, rate))

    def _share(self, run: Run) -> float:
        """Return the share of validation questions that a run answers right."""
        self.execute([run], "search")
        marks: Items = self.measured[run.id].details["marks"]["direct"]
        return sum(marks.values()) / len(marks)

    def measure(self, seed: int) -> None:
        """Measure all rows with a seed."""
        runs: dict[str, Run] = {row: self.asked(row, seed) for row in (M_A, M_B, PIPELINE)}
        runs[MIXTURE] = self.asked(MIXTURE, seed, self.searches[MIXTURE].best)
        for row in TRAINED:
            runs[row] = self.joint(row, seed, self.searches[row].best)
        self.execute(list(runs.values()), f"seed {seed}")
        for row, run in runs.items():
            self.marks.setdefault(row, {})[seed] = self.measured[run.id].details["marks"]
        self.marks.setdefault(MAJORITY, {})[seed] = self._majority(seed)

    def _majority(self, seed: int) -> dict[str, Items]:
        """Judge the answer that is the most frequent result of the joint data."""
        keys = self.keys(seed)
        joint = keys.questions("joint", self._sums["train"], keys.held_in, self.size.joint)
        ((most, _),) = Counter(question.sum.result for question in joint).most_common(1)
        marks = {}
        for name, questions in self.questions(seed).sets().items():
            marks[f"direct_{name}"] = {each.id: float(each.sum.result == most) for each in questions}
        return marks

    # Results

    def conditions(self, evidence: Evidence) -> list[Condition]:
        """Return what must hold so that the comparisons decide."""
        *_, searched, declared = conditions(evidence)
        return [self._taught(), self._neither(), searched, declared]

    def _taught(self) -> Condition:
        recalled = self.mean(M_A, "substitution_keys")
        computed = self.mean(M_B, "sums")
        return Condition(
            f"m_A writes {100 * _RECALLED:.0f}% of substitutions, and m_B computes {100 * _COMPUTED:.0f}% of sums",
            recalled >= _RECALLED and computed >= _COMPUTED,
            f"{100 * recalled:.1f}% and {100 * computed:.1f}%",
        )

    def _neither(self) -> Condition:
        shares = {row: self.mean(row, "direct_keys") for row in (M_A, M_B)}
        figures = ", ".join(f"{row} {100 * share:.1f}%" for row, share in shares.items())
        name = f"neither model alone answers {100 * _ALONE:.0f}% of the questions"
        return Condition(name, max(shares.values()) < _ALONE, figures)

    def mean(self, row: str, metric: str) -> float:
        """Return the mean share of right answers of a row over all seeds."""
        shares = [sum(marks[metric].values()) / len(marks[metric]) for marks in self.marks[row].values()]
        return sum(shares) / len(shares)

    def write_results(self) -> Results:
        """Write the results of all rows."""
        searches = {row: self.searches[row] for row in TRAINED}
        evidence = Evidence(
            nats=dict.fromkeys(TRAINED, 0.0),
            bigram_nats=0.0,
            searches=searches,
            declared=DECLARED,
            decisions=decide(DECLARED, self.marks),
        )
        judged = self.conditions(evidence)
        decided = all(condition.met for condition in judged)
        details = {
            "precision": self._precision,
            "size": json.loads(self.size.model_dump_json()),
            "search": {row: found.details() for row, found in self.searches.items()},
            "conditions": [asdict(condition) for condition in judged],
            "comparisons": [described(decision, is_decided=decided) for decision in evidence.decisions],
            "seconds": self.seconds,
        }
        rows = [self._row(name) for name in LABELS]
        return self.write(NAME, rows, seeds=tuple(self.marks[PUBLISHED]), details=details)

    def _row(self, name: str) -> Row:
        by_seed = list(self.marks[name].values())
        metrics: dict[str, Metric] = {}
        for metric in by_seed[0]:
            shares = [100 * sum(marks[metric].values()) / len(marks[metric]) for marks in by_seed]
            metrics[metric] = combine_seeds(shares)
        return Row(id=name, label=LABELS[name], metrics=metrics)


def run(options: Options) -> Results:
    """Train the parents, search on keys of their own, then measure all rows with every seed."""
    study = KeysStudy(options)
    study.parents()
    study.search()
    for seed in study.seeds:
        study.measure(seed)
        study.write_results()
    return study.write_results()
