"""Four LoRA experts of SmolLM2 with short answers, mixed in every way, on fresh questions for each seed."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import Options
from experiments.routing_smollm2.classifiers import classifier_rows, wilson
from experiments.routing_smollm2.fields import CLINC, read_fields
from experiments.routing_smollm2.runs import AnswerRun, FreeAnswerRun, RouterRun, metrics_of
from experiments.routing_smollm2.texts import FILES, SOURCES, read_skills, write_skills
from experiments.study import Study, aim, bars, check_files, mini_lm, numbers_of, over_seeds
from experiments.token_routing.runs import ExpertRun, RoutingSizes, load_once
from experiments.token_routing.texts import DOMAINS
from graftlm.evaluation import Aim, Interval, Results, Row, combine_seeds, value_of

NAME = "routing-smollm2"
MODEL = "smollm2-135m-instruct"
DENSITIES = (0.2, 0.5, 0.8)
ALL = "all"
TABLES = ("main", "more", "twenty")
MERGES = {"ties": "ties", "dare": "dare_ties"}  # PEFT's combination types
ROWS = {
    "backbone": "backbone",
    "uniform": "uniform mixture",
    "oracle": "each domain's own expert",
    "routed_k2": "routed, k = 2",
    "prompt_only": "routed by the prompt alone",
    "xlora": "X-LoRA (PEFT)",
    "arrow": "Arrow (PEFT)",
    "ties": "TIES (PEFT)",
    "lora_all": "one LoRA trained on all four",
}
MORE = {
    **{f"routed_k{k}": f"routed, k = {k}" for k in (1, 3, 4)},
    "dare": "DARE-TIES (PEFT)",
    "published": "as published",
}
TWENTY = {row: ROWS[row] for row in ("backbone", "uniform", "oracle", "routed_k2", "arrow", "ties")} | {
    "lora_all": "one LoRA trained on all twenty"
}
COLUMNS = {"accuracy": "right", "likelihood_accuracy": "chosen", "nll_average": "nll"}


class SkillStudy(Study):
    """The texts and the runs.

    Attributes:
        domains: of the experts and the questions.
        tuned: the rows with settings to choose, beside the experts.
        rates: learning rates that validation text chose: of each domain's expert, of `all`, and of `xlora`.
        routing: the routing that it chose, and `density` of TIES and DARE.
    """

    domains: tuple[str, ...] = DOMAINS
    tuned: tuple[str, ...] = ("xlora", "routed_k2", *MERGES)
    expert_rates, router_rates = (5e-4, 1.5e-3, 4.5e-3), (1e-3, 5e-3, 2.5e-2)
    routings: Mapping[str, dict[str, Any]] = {
        "cosines": {},
        "discriminant": {"policy": "discriminant"},
        "clusters": {"embedder": {"centroids": 4}},
    }
    targets: tuple[str, ...] = ("q_proj", "v_proj", "down_proj")
    examples = "prompt"
    answers_only = True
    generated = 24

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.backbone, self.texts = options.backbone or MODEL, options.out / "texts"
        self.dtype = "auto" if options.quick else "bfloat16"
        self.rates: dict[str, float] = {}
        self.routing: dict[str, Any] = {}
        self.density: dict[str, float] = {}
        self.set_up(options.quick)

    def set_up(self, quick: bool) -> None:
        """Decide sizes, and write the texts."""
        self.sizes = RoutingSizes(length=192, rank=2 if quick else 16, steps=3 if quick else 18, batch_size=2)
        self.counts = {"train": 250, "validation": 16, "test": 84}
        longest = {"prompt": 128, "answer": 12, "program": 56}
        if quick:
            self.counts = {"train": 12, "validation": 2, "test": 3}
            longest, self.generated = {"prompt": 100, "answer": 48, "program": 90}, 2
        tokenizer = load_once(self.backbone, self.options.device, self.dtype).need_tokenizer()
        write_skills(read_skills(self.options.data), self.texts, tokenizer, self.counts, self.seeds, longest)

    def shared(self, seed: int, domains: Sequence[str], sizes: Mapping[str, int] = {}) -> dict[str, Any]:
        """What all runs have; `sizes` are changes."""
        shared = {"backbone": self.backbone, "texts": str(self.texts), "domains": tuple(domains), "seed": seed}
        shared |= {"sizes": self.sizes.model_copy(update=dict(sizes)), "device": self.options.device}
        return shared | {"dtype": self.dtype, "answers_only": self.answers_only}

    def expert(self, name: str, seed: int, rate: float | None = None) -> ExpertRun:
        """A domain's expert, or one of all with the rank and the steps of all; with a `rate` to try, shorter."""
        domains = self.domains if name == ALL else (name,)
        times, steps = len(domains), self.sizes.steps if rate is None else max(1, self.sizes.steps // 3)
        sizes = {"rank": times * self.sizes.rank, "steps": times * steps}
        rate, run_id = (self.rates[name], f"expert-{name}_s{seed}") if rate is None else (rate, f"try-{name}-{rate:g}")
        fields = self.shared(seed, domains, sizes)
        return ExpertRun(id=run_id, learning_rate=rate, targets=self.targets, **fields)

    def answers(
        self, name: str, seed: int, needs: Sequence[str], domains: Sequence[str] | None = None, **more: Any
    ) -> AnswerRun:
        """The questions, answered by a mixture of the experts that the runs `needs` train."""
        fields = self.shared(seed, self.domains if domains is None else domains)
        return AnswerRun(id=name, depends_on=tuple(needs), **fields, **{"asks": self.domains, **more})

    def router(self, seed: int, rate: float | None = None) -> RouterRun:
        """X-LoRA's router; a third of the steps with a `rate` to try."""
        steps = self.sizes.steps if rate is None else max(1, self.sizes.steps // 3)
        rate, name = (self.rates["xlora"], f"router_s{seed}") if rate is None else (rate, f"try-router-{rate:g}")
        fields = self.shared(seed, self.domains, {"steps": steps})
        return RouterRun(id=name, depends_on=self.trained(seed), learning_rate=rate, **fields)

    def trained(self, seed: int) -> tuple[str, ...]:
        """The ids of the experts' runs."""
        return tuple(self.expert(domain, seed).id for domain in self.domains)

    def measure(self, rows: Iterable[str], seed: int) -> None:
        """Train what one seed needs, and measure its rows."""
        needed: list[Any] = [self.expert(name, seed) for name in (*self.domains, ALL)]
        needed += [self.router(seed)] if "xlora" in self.tuned else []
        runs = [self.row_run(row, seed) for row in rows]
        free = [self.free_run(run) for run in runs if run.generated]
        self.execute([*needed, *runs, *free], f"seed {seed}")
        for run in free:
            row, more = (self.measured[name] for name in (run.id.removeprefix("free-"), run.id))
            for domain, values in row.details["answered"].items():
                values["right"] += more.details["answered"][domain]["right"]
            row.add_metrics(metrics_of(row.details["answered"]))

    def free_run(self, run: AnswerRun) -> FreeAnswerRun:
        """The free answers to the rest of a run's questions."""
        return FreeAnswerRun.model_validate(dict(run) | {"id": f"free-{run.id}"})

    def search(self) -> None:
        """Choose every row's settings on validation questions with the first seed, three settings for each."""
        seed, few = self.seeds[0], slice(None, None, 2 if self.options.quick else 1)
        domains_of = {**{name: (name,) for name in self.domains}, ALL: self.domains}
        tried = {name: [self.expert(name, seed, rate) for rate in self.expert_rates[few]] for name in domains_of}
        runs: dict[str, dict[Any, AnswerRun]] = {
            name: {
                run.learning_rate: self.answers(f"{run.id}-answers", seed, [run.id], (name,), asks=domains_of[name])
                for run in of_name
            }
            for name, of_name in tried.items()
        }
        self.rates |= self._choose(runs, [run for of_name in tried.values() for run in of_name])
        self._search_mixtures(seed, few)

    def _search_mixtures(self, seed: int, few: slice) -> None:
        """Choose what the rows that mix the experts have to tune."""
        trained, needs = self.trained(seed), [self.expert(name, seed) for name in self.domains]
        routers = [self.router(seed, rate) for rate in self.router_rates[few]] if "xlora" in self.tuned else []
        settings: dict[str, dict[Any, dict[str, Any]]] = {
            "xlora": {run.learning_rate: {"mixture_kind": "xlora", "needs": (*trained, run.id)} for run in routers},
            "routed_k2": {
                name: {"routing": self.routings[name], "examples": self.examples} for name in list(self.routings)[few]
            },
            **{row: {density: merge(row, density) for density in DENSITIES[few]} for row in MERGES},
        }
        runs = {
            row: {
                key: self.answers(f"try-{row}-{key}", seed, **{"needs": trained, **fields})
                for key, fields in settings[row].items()
            }
            for row in self.tuned
        }
        best = self._choose(runs, [*needs, *routers])
        self.routing = self.routings[best.pop("routed_k2")]
        self.rates |= {row: best.pop(row) for row in ("xlora",) if row in best}
        self.density = best

    def _choose(self, runs: Mapping[str, Mapping[Any, AnswerRun]], needed: Sequence[Any]) -> dict[str, Any]:
        """The best setting of each row, by the right answers' log-perplexity."""
        candidates = {row: list(of_row.values()) for row, of_row in runs.items()}
        chosen = self.choose(candidates, ["nll_average"], "choices on validation questions", needed)
        return {row: next(key for key, run in runs[row].items() if run is best) for row, best in chosen.items()}

    def table(self, labels: Mapping[str, str]) -> tuple[list[Row], dict[str, Any]]:
        """Choose settings, and measure these rows with every seed."""
        self.search()
        for seed in self.seeds:
            self.measure(labels, seed)
        return tabulate(self, labels)

    def row_run(self, row: str, seed: int) -> AnswerRun:
        """One row on one seed's test questions."""
        needs, domains = self.trained(seed), self.domains
        fields: dict[str, Any] = {"part": f"test{seed}", "generated": self.generated}
        if row in ("backbone", "base"):
            needs, domains, fields["mixture_kind"] = (), (), "none"
        elif row == "lora_all":
            needs, domains = (self.expert(ALL, seed).id,), (ALL,)
        elif row in ("oracle", "arrow", "xlora"):
            needs, fields["mixture_kind"] = (*needs, *([self.router(seed).id] if row == "xlora" else [])), row
        elif row in MERGES:
            fields |= merge(row, self.density[row])
        else:
            fields |= self.routed(row)
        return self.answers(f"{row}_s{seed}", seed, needs, domains, **fields)

    def routed(self, row: str) -> dict[str, Any]:
        """What a row that routes adds to its run."""
        if row == "uniform":
            return {"routing": {"fixed": dict.fromkeys(self.domains, 1 / len(self.domains))}}
        if row.startswith("published"):
            name = "backbone" if self.options.quick else mini_lm(self.options.data, "The paper's embedder")
            embedder = {"name": name, "centre": False, "whiten": False}
            routing = {"policy": "nearest", "boost": float(row.partition("_boost")[2] or 4), "combination": "linear"}
            questions = self.counts["test"] // 3
            return {"routing": {**routing, "embedder": embedder}, "questions": questions, "examples": "whole"}
        change = {"reads": "prompt"} if row == "prompt_only" else {"every": int(row[-1])}
        return {"routing": self.routing | change, "examples": self.examples}


class FieldStudy(SkillStudy):
    """Twenty small experts, by likelihood alone."""

    tuned = ("routed_k2", "ties")
    expert_rates = (1.5e-3, 5e-3, 1.5e-2)
    generated = 0

    def __init__(self, options: Options) -> None:
        super().__init__(options.model_copy(update={"out": options.out / "twenty"}))

    def set_up(self, quick: bool) -> None:
        skills = read_fields(self.options.data)
        self.domains = tuple(skills)[:: 6 if quick else 1]
        length, longest = 120, {"prompt": 72, "answer": 12, "program": 48}
        self.counts = {"train": 50, "validation": 4, "test": 12}
        if quick:
            length, longest = 192, dict.fromkeys(longest, 90)
            self.counts = {"train": 6, "validation": 2, "test": 2}
        self.sizes = RoutingSizes(length=length, rank=2 if quick else 4, steps=3 if quick else 9, batch_size=2)
        tokenizer = load_once(self.backbone, self.options.device, self.dtype).need_tokenizer()
        chosen = {name: skills[name] for name in self.domains}
        write_skills(chosen, self.texts, tokenizer, self.counts, self.seeds, longest)

    def short(self, row: Row) -> Row:
        """A row without the figures of single experts; for those of one skill their means."""
        metrics = {name: value for name, value in row.metrics.items() if name in (*COLUMNS, "routing_accuracy")}
        for group in dict.fromkeys(name.partition("_")[0] for name in self.domains):
            of = [value_of(v) for name, v in row.metrics.items() if name.startswith(f"routing_accuracy_{group}_")]
            metrics |= {f"routing_accuracy_{group}": float(np.mean(of))} if of else {}
        return Row(id=f"twenty_{row.id}", label=f"twenty: {row.label}", metrics=metrics)


def run(options: Options) -> Results:
    """Choose settings and measure the chosen tables, the one with twenty experts at the end."""
    tables = options.chosen(TABLES)
    check_files(options, (*FILES, *CLINC))
    rows, aimed, plots = [], [], {}
    details: dict[str, Any] = {}
    if labels := (ROWS if "main" in tables else {}) | (MORE if "more" in tables else {}):
        study = SkillStudy(options)
        rows, details = study.table(labels)
        aimed = aims(rows, details)
        bar = {"accuracy": "free answers", "likelihood_accuracy": "by likelihood"}
        plots = {"accuracy": bars(rows, bar, "percent")}
        rows += classifier_rows(study.texts, study.domains, study.seeds)
    if "twenty" in tables:
        study = FieldStudy(options)
        of_twenty, details["twenty"] = study.table(TWENTY)
        of_twenty += classifier_rows(study.texts, study.domains, study.seeds)
        rows += [study.short(row) for row in of_twenty]
    return Study(options).write(NAME, rows, aims=aimed, details=details, plots=plots)


def merge(row: str, density: float) -> dict[str, Any]:
    """What a row that PEFT merges adds to its run."""
    return {"mixture_kind": "merge", "merge": {"combination_type": MERGES[row], "density": density}}


def tabulate(study: SkillStudy, labels: Mapping[str, str]) -> tuple[list[Row], dict[str, Any]]:
    """The measured rows, and what stands beside them."""
    runs = {row: [study.row_run(row, seed) for seed in study.seeds] for row in labels}
    rows = [_row(study, row, labels[row], of_row) for row, of_row in runs.items()]
    ours = runs.get("routed_k2", [])
    return rows, study.evidence(runs) | {
        "sources": {domain: list(of_parts) for domain, of_parts in SOURCES.items() if domain in study.domains},
        "counts": study.counts,
        "sizes": study.sizes.model_dump(mode="json"),
        "rates": study.rates,
        "routing": study.routing,
        "density": study.density,
        "confusion": confusion(study, ours) if ours else {},
        "routed_k2_minus": {
            row: differences(study, ours, of_row) for row, of_row in runs.items() if ours and row != "routed_k2"
        },
        "seconds": study.seconds,
    }


def _row(study: SkillStudy, row: str, label: str, runs: Sequence[AnswerRun]) -> Row:
    """A row over its seeds. The share of right experts has the interval of all questions, which differ by seed."""
    made = over_seeds([study.measured[run.id] for run in runs], row, label)
    led = [value for run in runs for values in answered(study, run).values() for value in values.get("led", ())]
    if not led:
        return made
    return made.model_copy(update={"metrics": {**made.metrics, "routing_accuracy": wilson(led)}})


def answered(study: SkillStudy, run: AnswerRun) -> dict[str, dict[str, list[Any]]]:
    """What was measured on each question, by domain."""
    return study.measured[run.id].details["answered"]


def confusion(study: SkillStudy, runs: Sequence[AnswerRun]) -> dict[str, dict[str, int]]:
    """By domain of the prompt: how often each expert led."""
    return {
        domain: dict(Counter(leader for run in runs for leader in answered(study, run)[domain]["leader"]))
        for domain in study.domains
    }


def differences(study: SkillStudy, ours: Sequence[AnswerRun], theirs: Sequence[AnswerRun]) -> dict[str, Any]:
    """Ours minus theirs, paired: Student's interval over seeds, and a normal one over all questions."""
    result: dict[str, Any] = {}
    for name, column in COLUMNS.items():
        pairs = [[answered(study, run) for run in pair] for pair in zip(ours, theirs, strict=True)]
        gaps = [[_gaps(a[domain][column], b[domain][column], name) for a, b in pairs] for domain in study.domains]
        pooled = [np.concatenate(of_domain) for of_domain in gaps]
        if min(map(len, pooled)) < 2:
            continue
        error = float(np.sqrt(sum(gap.var(ddof=1) / len(gap) for gap in pooled))) / len(study.domains)
        middle = float(np.mean([gap.mean() for gap in pooled]))
        by_seed = [float(np.mean([of_domain[n].mean() for of_domain in gaps])) for n in range(len(ours))]
        questions = Interval(mean=middle, low=middle - 1.96 * error, high=middle + 1.96 * error)
        result[name] = {"seeds": combine_seeds(by_seed).model_dump(), "questions": questions.model_dump()}
    return result


def _gaps(ours: Sequence[float], theirs: Sequence[float], name: str) -> np.ndarray:
    """Differences on the questions that both answered, in percentage points where they are shares."""
    shared = min(len(ours), len(theirs))
    return (1 if name == "nll_average" else 100) * (np.array(ours[:shared], float) - np.array(theirs[:shared], float))


def aims(rows: Sequence[Row], details: Mapping[str, Any]) -> list[Aim]:
    """Of the main table."""
    values = numbers_of(rows)
    if "lora_all" not in values:
        return []
    ours, led = values["routed_k2"], next(row for row in rows if row.id == "routed_k2").metrics["routing_accuracy"]
    assert isinstance(led, Interval)
    ratio, behind = ours["accuracy"] / max(values["oracle"]["accuracy"], 1e-9), details["routed_k2_minus"]
    made = [
        aim("accuracy at k = 2 over that of each domain's own expert", "accuracy", 0.98, ratio, operator.ge),
        aim("right expert, percent", "routing_accuracy", 95.0, led.mean, operator.ge),
        aim("right expert, low end of the interval", "routing_accuracy", 92.0, led.low, operator.gt),
    ]
    for rival in ("arrow", "xlora", "uniform", "ties"):
        for name in ("accuracy", "likelihood_accuracy"):
            text = f"{name} at k = 2 minus that of {ROWS[rival]}, low end of the paired interval"
            made.append(aim(text, name, 0.0, behind[rival][name]["questions"]["low"], operator.gt))
    gap = ours["accuracy"] - values["lora_all"]["accuracy"]
    return [*made, aim(f"accuracy at k = 2 minus that of {ROWS['lora_all']}", "accuracy", -2.0, gap, operator.ge)]
