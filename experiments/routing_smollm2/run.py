"""Four LoRA experts of SmolLM2 with short answers, mixed in every way, on fresh questions for each seed."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import binomtest

from experiments import Options
from experiments.routing_smollm2.runs import AnswerRun, FreeAnswerRun, RouterRun, metrics_of
from experiments.routing_smollm2.texts import FILES, SOURCES, write_skills
from experiments.study import Study, aim, bars, check_files, mini_lm, numbers_of, over_seeds
from experiments.token_routing.runs import ExpertRun, RoutingSizes, load_once
from experiments.token_routing.texts import DOMAINS
from graftlm.evaluation import Aim, Interval, Results, Row, combine_seeds

NAME = "routing-smollm2"
MODEL = "smollm2-135m-instruct"
DENSITIES = (0.2, 0.5, 0.8)
ALL = "all"
TABLES = ("main", "more")
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
COLUMNS = {"accuracy": "right", "likelihood_accuracy": "chosen", "nll_average": "nll"}


class SkillStudy(Study):
    """The texts and the runs.

    Attributes:
        rates: learning rates that validation text chose: of each domain's expert, of `all`, and of `xlora`.
        routing: the routing that it chose, and `density` of TIES and DARE.
    """

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
        write_skills(self.options.data, self.texts, tokenizer, self.counts, self.seeds, longest)

    def shared(self, seed: int, domains: Sequence[str], sizes: Mapping[str, int] = {}) -> dict[str, Any]:
        """What all runs have; `sizes` are changes."""
        shared = {"backbone": self.backbone, "texts": str(self.texts), "domains": tuple(domains), "seed": seed}
        shared |= {"sizes": self.sizes.model_copy(update=dict(sizes)), "device": self.options.device}
        return shared | {"dtype": self.dtype, "answers_only": self.answers_only}

    def expert(self, name: str, seed: int, rate: float | None = None) -> ExpertRun:
        """A domain's expert, or with four times the rank and the steps one of all; with a `rate` to try, shorter."""
        domains = DOMAINS if name == ALL else (name,)
        times, steps = len(domains), self.sizes.steps if rate is None else max(1, self.sizes.steps // 3)
        sizes = {"rank": times * self.sizes.rank, "steps": times * steps}
        rate, run_id = (self.rates[name], f"expert-{name}_s{seed}") if rate is None else (rate, f"try-{name}-{rate:g}")
        fields = self.shared(seed, domains, sizes)
        return ExpertRun(id=run_id, learning_rate=rate, targets=self.targets, **fields)

    def answers(
        self, name: str, seed: int, needs: Sequence[str], domains: Sequence[str] = DOMAINS, **more: Any
    ) -> AnswerRun:
        """The questions, answered by a mixture of the experts that the runs `needs` train."""
        return AnswerRun(id=name, depends_on=tuple(needs), **self.shared(seed, domains), **more)

    def router(self, seed: int, rate: float | None = None) -> RouterRun:
        """X-LoRA's router; a third of the steps with a `rate` to try."""
        steps = self.sizes.steps if rate is None else max(1, self.sizes.steps // 3)
        rate, name = (self.rates["xlora"], f"router_s{seed}") if rate is None else (rate, f"try-router-{rate:g}")
        fields = self.shared(seed, DOMAINS, {"steps": steps})
        return RouterRun(id=name, depends_on=self.trained(seed), learning_rate=rate, **fields)

    def trained(self, seed: int) -> tuple[str, ...]:
        """The ids of the experts' runs."""
        return tuple(self.expert(domain, seed).id for domain in DOMAINS)

    def measure(self, rows: Iterable[str], seed: int) -> None:
        """Train what one seed needs, and measure its rows."""
        needed: list[Any] = [self.expert(name, seed) for name in (*DOMAINS, ALL)]
        runs = [self.row_run(row, seed) for row in rows]
        free = [self.free_run(run) for run in runs if run.generated]
        self.execute([*needed, self.router(seed), *runs, *free], f"seed {seed}")
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
        tried: dict[str, dict[str, Any]] = {}  # by row: run id -> setting
        experts = {name: [self.expert(name, seed, rate) for rate in self.expert_rates[few]] for name in (*DOMAINS, ALL)}
        runs: dict[str, list[AnswerRun]] = {}
        for name, of_name in experts.items():
            tried[name] = {f"{run.id}-answers": run.learning_rate for run in of_name}
            domains = DOMAINS if name == ALL else (name,)
            runs[name] = [self.answers(f"{run.id}-answers", seed, [run.id], (name,), asks=domains) for run in of_name]
        best = self._choose(runs, tried, [run for of_name in experts.values() for run in of_name])
        self.rates |= {name: best[name] for name in experts}
        main = [self.expert(name, seed) for name in DOMAINS]
        needs = self.trained(seed)
        routers = [self.router(seed, rate) for rate in self.router_rates[few]]
        candidates: dict[str, dict[Any, dict[str, Any]]] = {
            "xlora": {run.learning_rate: {"mixture_kind": "xlora", "needs": run.id} for run in routers},
            "routed_k2": {
                name: {"routing": routing, "examples": self.examples}
                for name, routing in list(self.routings.items())[few]
            },
        }
        for row, kind in MERGES.items():
            merges = {density: {"combination_type": kind, "density": density} for density in DENSITIES[few]}
            candidates[row] = {density: {"mixture_kind": "merge", "merge": merge} for density, merge in merges.items()}
        runs, tried = {}, {}
        for row, settings in candidates.items():
            tried[row] = {f"try-{row}-{setting}": setting for setting in settings}
            runs[row] = [
                self.answers(
                    f"try-{row}-{setting}", seed, [*needs, *([more.pop("needs")] if "needs" in more else [])], **more
                )
                for setting, more in settings.items()
            ]
        best = self._choose(runs, tried, [*main, *routers])
        self.rates["xlora"], self.routing = best["xlora"], self.routings[best["routed_k2"]]
        self.density = {row: best[row] for row in MERGES}

    def _choose(self, runs: Any, tried: Mapping[str, Mapping[str, Any]], needed: Sequence[Any]) -> dict[str, Any]:
        """The best setting of each row, by the right answers' log-perplexity."""
        chosen = self.choose(runs, ["nll_average"], "choices on validation questions", needed)
        return {row: tried[row][run.id] for row, run in chosen.items()}

    def row_run(self, row: str, seed: int) -> AnswerRun:
        """One row on one seed's test questions."""
        needs, domains = self.trained(seed), DOMAINS
        fields: dict[str, Any] = {"part": f"test{seed}", "generated": self.generated}
        if row in ("backbone", "base"):
            needs, domains, fields["mixture_kind"] = (), (), "none"
        elif row == "lora_all":
            needs, domains = (self.expert(ALL, seed).id,), (ALL,)
        elif row in ("oracle", "arrow", "xlora"):
            needs, fields["mixture_kind"] = (*needs, *([self.router(seed).id] if row == "xlora" else [])), row
        elif row in MERGES:
            merge = {"combination_type": MERGES[row], "density": self.density[row]}
            fields |= {"mixture_kind": "merge", "merge": merge}
        else:
            fields |= self.routed(row)
        return self.answers(f"{row}_s{seed}", seed, needs, domains, **fields)

    def routed(self, row: str) -> dict[str, Any]:
        """What a row that routes adds to its run."""
        if row == "uniform":
            return {"routing": {"fixed": dict.fromkeys(DOMAINS, 1 / len(DOMAINS))}}
        if row.startswith("published"):
            name = "backbone" if self.options.quick else mini_lm(self.options.data, "The paper's embedder")
            embedder = {"name": name, "centre": False, "whiten": False}
            routing = {"policy": "nearest", "boost": float(row.partition("_boost")[2] or 4), "combination": "linear"}
            questions = self.counts["test"] // 3
            return {"routing": {**routing, "embedder": embedder}, "questions": questions, "examples": "whole"}
        change = {"reads": "prompt"} if row == "prompt_only" else {"every": int(row[-1])}
        return {"routing": self.routing | change, "examples": self.examples}


def run(options: Options) -> Results:
    """Choose settings, then measure the chosen tables, seed by seed; the results grow with the seeds."""
    tables = options.chosen(TABLES)
    check_files(options, FILES)
    study = SkillStudy(options)
    study.search()
    labels = (ROWS if "main" in tables else {}) | (MORE if "more" in tables else {})
    results = None
    for number, seed in enumerate(study.seeds):
        study.measure(labels, seed)
        rows, details = tabulate(study, labels, study.seeds[: number + 1])
        plots = {
            "accuracy": bars(rows, {"accuracy": "free answers", "likelihood_accuracy": "by likelihood"}, "percent")
        }
        seeds = list(study.seeds[: number + 1])
        results = study.write(NAME, rows, seeds=seeds, aims=aims(rows, details), details=details, plots=plots)
    assert results is not None, "there is a seed"
    return results


def tabulate(study: SkillStudy, labels: Mapping[str, str], seeds: Sequence[int]) -> tuple[list[Row], dict[str, Any]]:
    """Rows of the seeds that are measured, and what stands beside them."""
    runs = {row: [study.row_run(row, seed) for seed in seeds] for row in labels}
    rows = [_row(study, row, labels[row], of_row) for row, of_row in runs.items()]
    ours = runs.get("routed_k2", [])
    return rows, study.evidence(runs) | {
        "sources": {domain: list(of_parts) for domain, of_parts in SOURCES.items()},
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
    interval = binomtest(sum(led), len(led)).proportion_ci(method="wilson")
    share = Interval(mean=100 * sum(led) / len(led), low=100 * interval.low, high=100 * interval.high)
    return made.model_copy(update={"metrics": {**made.metrics, "routing_accuracy": share}})


def answered(study: SkillStudy, run: AnswerRun) -> dict[str, dict[str, list[Any]]]:
    """What was measured on each question, by domain."""
    return study.measured[run.id].details["answered"]


def confusion(study: SkillStudy, runs: Sequence[AnswerRun]) -> dict[str, dict[str, int]]:
    """By domain of the prompt: how often each expert led."""
    return {
        domain: dict(Counter(leader for run in runs for leader in answered(study, run)[domain]["leader"]))
        for domain in DOMAINS
    }


def differences(study: SkillStudy, ours: Sequence[AnswerRun], theirs: Sequence[AnswerRun]) -> dict[str, Any]:
    """Ours minus theirs, paired: Student's interval over seeds, and a normal one over all questions."""
    result: dict[str, Any] = {}
    for name, column in COLUMNS.items():
        pairs = [[answered(study, run) for run in pair] for pair in zip(ours, theirs, strict=True)]
        gaps = [[_gaps(a[domain][column], b[domain][column], name) for a, b in pairs] for domain in DOMAINS]
        pooled = [np.concatenate(of_domain) for of_domain in gaps]
        if min(map(len, pooled)) < 2:
            continue
        error = float(np.sqrt(sum(gap.var(ddof=1) / len(gap) for gap in pooled))) / len(DOMAINS)
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
