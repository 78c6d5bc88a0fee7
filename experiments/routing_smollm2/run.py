"""Four LoRA experts of SmolLM2 with short answers, mixed in every way, on fresh questions for each seed."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib.figure import Figure

from experiments import Options
from experiments.routing_smollm2.classifiers import classifier_rows, wilson
from experiments.routing_smollm2.fields import CLINC, read_fields
from experiments.routing_smollm2.programs import check_programs_allowed
from experiments.routing_smollm2.runs import Answered, AnswerRun, FreeAnswerRun, RouterRun, metrics_of
from experiments.routing_smollm2.texts import FILES, SOURCES, Parts, read_skills, write_skills
from experiments.study import Study, aim, bars, check_files, mini_lm, numbers_of, over_seeds
from experiments.token_routing.runs import ExpertRun, RoutingSizes, load_once
from experiments.token_routing.texts import DOMAINS
from graftlm.evaluation import Aim, Interval, Metric, Results, Row, combine_seeds, value_of
from graftlm.runs.run import Run

T = TypeVar("T")

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
TWENTY = {
    **{row: ROWS[row] for row in ("backbone", "uniform", "oracle", "routed_k2", "arrow", "ties")},
    "lora_all": "one LoRA trained on all twenty",
}
COLUMNS = {"accuracy": "right", "likelihood_accuracy": "chosen", "nll_average": "nll"}


class SkillStudy(Study):
    """The texts and the runs.

    Attributes:
        domains: domains of the experts and the questions.
        tuned: rows whose settings are chosen, in addition to the experts.
        expert_rates: learning rates of the experts that are tried.
        router_rates: learning rates of the router of X-LoRA that are tried.
        routings: configs of the routing that are tried, by name.
        targets: modules that an expert changes.
        examples: text of the training questions that is embedded for the centroids.
        answers_only: whether training predicts only the answers.
        generated: number of questions of each domain that the run of a row answers freely.
        rates: chosen learning rates: of the expert of each domain, of `all`, and of `xlora`.
        routing: the chosen config of the routing.
        density: the chosen density of TIES and of DARE.
    """

    domains: tuple[str, ...] = DOMAINS
    tuned: tuple[str, ...] = ("xlora", "routed_k2", *MERGES)
    expert_rates = (5e-4, 1.5e-3, 4.5e-3)
    router_rates = (1e-3, 5e-3, 2.5e-2)
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
        self.backbone = options.backbone or MODEL
        self.texts = options.out / "texts"
        self.dtype = "auto" if options.quick else "bfloat16"
        self.rates: dict[str, float] = {}
        self.routing: dict[str, Any] = {}
        self.density: dict[str, float] = {}
        self.set_up(options.quick)

    def set_up(self, quick: bool) -> None:
        """Choose the sizes, and write the texts."""
        if quick:
            self.generated = 2
            self.sizes = RoutingSizes(length=192, rank=2, steps=3, batch_size=2)
            self.counts = {"train": 12, "validation": 2, "test": 3}
            longest = {"prompt": 100, "answer": 48, "program": 90}
        else:
            self.sizes = RoutingSizes(length=192, rank=16, steps=18, batch_size=2)
            self.counts = {"train": 250, "validation": 16, "test": 84}
            longest = {"prompt": 128, "answer": 12, "program": 56}
        self.write_texts(read_skills(self.options.data), longest)

    def write_texts(self, skills: Mapping[str, Parts], longest: Mapping[str, int]) -> None:
        """Write the questions of all domains."""
        tokenizer = load_once(self.backbone, self.options.device, self.dtype).need_tokenizer()
        write_skills(
            skills,
            self.texts,
            tokenizer,
            counts=self.counts,
            seeds=self.seeds,
            longest=longest,
        )

    # The runs

    def shared(self, seed: int, domains: Sequence[str], sizes: Mapping[str, int] = {}) -> dict[str, Any]:
        """Return the fields that all runs have; `sizes` are changes of the sizes."""
        return {
            "backbone": self.backbone,
            "texts": str(self.texts),
            "domains": tuple(domains),
            "seed": seed,
            "sizes": self.sizes.model_copy(update=dict(sizes)),
            "device": self.options.device,
            "dtype": self.dtype,
            "answers_only": self.answers_only,
        }

    def _steps(self, rate: float | None) -> int:
        """Return the steps of a training; a learning rate that is only tried has a third of them."""
        if rate is None:
            return self.sizes.steps
        return max(1, self.sizes.steps // 3)

    def expert(self, name: str, seed: int, rate: float | None = None) -> ExpertRun:
        """Return the training of an expert.

        Args:
            name: a domain, or `all` for one expert of all domains with the ranks and the steps of all experts.
            seed: seed of the training.
            rate: learning rate to try in a shorter training; None for the chosen one.
        """
        domains = self.domains if name == ALL else (name,)
        sizes = {"rank": len(domains) * self.sizes.rank, "steps": len(domains) * self._steps(rate)}
        return ExpertRun(
            id=f"expert-{name}_s{seed}" if rate is None else f"try-{name}-{rate:g}",
            learning_rate=self.rates[name] if rate is None else rate,
            targets=self.targets,
            **self.shared(seed, domains, sizes),
        )

    def answers(
        self,
        name: str,
        seed: int,
        needs: Sequence[str],
        domains: Sequence[str] | None = None,
        **more: Any,
    ) -> AnswerRun:
        """Return a run that answers questions with a mixture of experts.

        Args:
            name: id of the run.
            seed: seed of the questions.
            needs: ids of the runs that train the experts.
            domains: domains of the experts; None for all.
            **more: other fields of the run.
        """
        domains = self.domains if domains is None else domains
        fields = {"asks": self.domains, **more}
        return AnswerRun(id=name, depends_on=tuple(needs), **self.shared(seed, domains), **fields)

    def router(self, seed: int, rate: float | None = None) -> RouterRun:
        """Return the training of the router of X-LoRA.

        Args:
            seed: seed of the training.
            rate: learning rate to try in a shorter training; None for the chosen one.
        """
        return RouterRun(
            id=f"router_s{seed}" if rate is None else f"try-router-{rate:g}",
            depends_on=self.trained(seed),
            learning_rate=self.rates["xlora"] if rate is None else rate,
            **self.shared(seed, self.domains, {"steps": self._steps(rate)}),
        )

    def trained(self, seed: int) -> tuple[str, ...]:
        """Return the ids of the runs that train the experts."""
        return tuple(self.expert(domain, seed).id for domain in self.domains)

    def measure(self, rows: Iterable[str], seed: int) -> None:
        """Train the models of one seed, and measure its rows."""
        runs: list[Run] = [self.expert(name, seed) for name in (*self.domains, ALL)]
        if "xlora" in self.tuned:
            runs.append(self.router(seed))
        answers = [self.row_run(row, seed) for row in rows]
        generating = [run for run in answers if run.generated]
        free_runs = [self.free_run(run) for run in generating]
        self.execute([*runs, *answers, *free_runs], f"seed {seed}")
        for run, free_run in zip(generating, free_runs, strict=True):
            measurement = self.measured[run.id]
            answered = measurement.details["answered"]
            for domain, values in answered.items():
                values["right"] += self.measured[free_run.id].details["answered"][domain]["right"]
            measurement.add_metrics(metrics_of(answered))

    def free_run(self, run: AnswerRun) -> FreeAnswerRun:
        """Return the run that freely answers the remaining questions of a run."""
        return FreeAnswerRun.model_validate(dict(run) | {"id": f"free-{run.id}"})

    # The search

    def search(self) -> None:
        """Choose the settings of every row on validation questions with the first seed, among three for each row."""
        seed = self.seeds[0]
        runs: dict[str, dict[Any, AnswerRun]] = {}
        needed: list[Run] = []
        for name in (*self.domains, ALL):
            asked = self.domains if name == ALL else (name,)
            runs[name] = {}
            for rate in self._few(self.expert_rates):
                expert = self.expert(name, seed, rate)
                needed.append(expert)
                runs[name][rate] = self.answers(f"{expert.id}-answers", seed, [expert.id], (name,), asks=asked)
        self.rates |= self._choose(runs, needed)
        self._search_mixtures(seed)

    def _few(self, settings: Iterable[T]) -> list[T]:
        """Return the settings to try: all of them, or every other one in a quick run."""
        return list(settings)[:: 2 if self.options.quick else 1]

    def _search_mixtures(self, seed: int) -> None:
        """Choose the settings of the rows that mix the experts."""
        trained = self.trained(seed)
        needed: list[Run] = [self.expert(name, seed) for name in self.domains]
        runs: dict[str, dict[Any, AnswerRun]] = {row: {} for row in self.tuned}
        for row in self.tuned:
            if row == "xlora":
                for rate in self._few(self.router_rates):
                    router = self.router(seed, rate)
                    needed.append(router)
                    needs = (*trained, router.id)
                    runs[row][rate] = self.answers(f"try-{row}-{rate}", seed, needs, mixture_kind="xlora")
            elif row == "routed_k2":
                for name in self._few(self.routings):
                    fields = {"routing": self.routings[name], "examples": self.examples}
                    runs[row][name] = self.answers(f"try-{row}-{name}", seed, trained, **fields)
            else:
                for density in self._few(DENSITIES):
                    fields = merge(row, density)
                    runs[row][density] = self.answers(f"try-{row}-{density}", seed, trained, **fields)
        best = self._choose(runs, needed)
        self.routing = self.routings[best.pop("routed_k2")]
        if "xlora" in best:
            self.rates["xlora"] = best.pop("xlora")
        self.density = best

    def _choose(self, runs: Mapping[str, Mapping[Any, AnswerRun]], needed: Sequence[Run]) -> dict[str, Any]:
        """Return the best setting of each row, by the log-perplexity of the right answers."""
        candidates = {row: list(row_runs.values()) for row, row_runs in runs.items()}
        chosen = self.choose(candidates, ["nll_average"], "choices on validation questions", needed)
        best = {}
        for row, best_run in chosen.items():
            for setting, run in runs[row].items():
                if run is best_run:
                    best[row] = setting
        return best

    # The rows

    def table(self, labels: Mapping[str, str]) -> tuple[list[Row], dict[str, Any]]:
        """Choose settings, and measure these rows with every seed."""
        self.search()
        for seed in self.seeds:
            self.measure(labels, seed)
        return tabulate(self, labels)

    def row_run(self, row: str, seed: int) -> AnswerRun:
        """Return the run of a row on the test questions of a seed."""
        needs = self.trained(seed)
        domains = self.domains
        fields: dict[str, Any] = {"part": f"test{seed}", "generated": self.generated}
        if row in ("backbone", "base"):
            needs = ()
            domains = ()
            fields["mixture_kind"] = "none"
        elif row == "lora_all":
            needs = (self.expert(ALL, seed).id,)
            domains = (ALL,)
        elif row in ("oracle", "arrow"):
            fields["mixture_kind"] = row
        elif row == "xlora":
            needs = (*needs, self.router(seed).id)
            fields["mixture_kind"] = row
        elif row in MERGES:
            fields |= merge(row, self.density[row])
        else:
            fields |= self.routed(row)
        return self.answers(f"{row}_s{seed}", seed, needs, domains, **fields)

    def routed(self, row: str) -> dict[str, Any]:
        """Return the fields that a row with a routing adds to its run."""
        if row == "uniform":
            share = 1 / len(self.domains)
            return {"routing": {"fixed": dict.fromkeys(self.domains, share)}}
        if row.startswith("published"):
            return self._published(row)
        change: dict[str, Any] = {"every": int(row[-1])} if row != "prompt_only" else {"reads": "prompt"}
        return {"routing": self.routing | change, "examples": self.examples}

    def _published(self, row: str) -> dict[str, Any]:
        """Return the fields of a row with the published system; its id may end with another boost."""
        embedder = "backbone"
        if not self.options.quick:
            embedder = mini_lm(self.options.data, "The paper's embedder")
        boost = row.partition("_boost")[2] or 4
        routing = {
            "policy": "nearest",
            "boost": float(boost),
            "combination": "linear",
            "embedder": {"name": embedder, "centre": False, "whiten": False},
        }
        return {"routing": routing, "questions": self.counts["test"] // 3, "examples": "whole"}


class FieldStudy(SkillStudy):
    """Twenty small experts, by likelihood alone."""

    tuned = ("routed_k2", "ties")
    expert_rates = (1.5e-3, 5e-3, 1.5e-2)
    generated = 0

    def __init__(self, options: Options) -> None:
        super().__init__(options.model_copy(update={"out": options.out / "twenty"}))

    def set_up(self, quick: bool) -> None:
        skills = read_fields(self.options.data)
        if quick:
            self.domains = tuple(skills)[::6]
            self.counts = {"train": 6, "validation": 2, "test": 2}
            self.sizes = RoutingSizes(length=192, rank=2, steps=3, batch_size=2)
            longest = {"prompt": 90, "answer": 90, "program": 90}
        else:
            self.domains = tuple(skills)
            self.counts = {"train": 50, "validation": 4, "test": 12}
            self.sizes = RoutingSizes(length=120, rank=4, steps=9, batch_size=2)
            longest = {"prompt": 72, "answer": 12, "program": 48}
        self.write_texts({name: skills[name] for name in self.domains}, longest)

    def short(self, row: Row) -> Row:
        """Return a row without the figures of single experts, but with their means over the experts of one skill."""
        kept = (*COLUMNS, "routing_accuracy")
        metrics: dict[str, Metric] = {name: value for name, value in row.metrics.items() if name in kept}
        skills = [domain.partition("_")[0] for domain in self.domains]
        for skill in dict.fromkeys(skills):
            prefix = f"routing_accuracy_{skill}_"
            values = [value_of(value) for name, value in row.metrics.items() if name.startswith(prefix)]
            if values:
                metrics[f"routing_accuracy_{skill}"] = float(np.mean(values))
        return Row(id=f"twenty_{row.id}", label=f"twenty: {row.label}", metrics=metrics)


def run(options: Options) -> Results:
    """Choose settings and measure the chosen tables, the one with twenty experts at the end."""
    tables = options.chosen(TABLES)
    check_files(options, (*FILES, *CLINC))
    rows: list[Row] = []
    aimed: list[Aim] = []
    plots: dict[str, Figure] = {}
    details: dict[str, Any] = {}
    labels: dict[str, str] = {}
    if "main" in tables:
        labels |= ROWS
    if "more" in tables:
        labels |= MORE
    if labels:
        check_programs_allowed()  # before anything is trained
        study = SkillStudy(options)
        rows, details = study.table(labels)
        aimed = aims(rows, details)
        columns = {"accuracy": "free answers", "likelihood_accuracy": "by likelihood"}
        plots["accuracy"] = bars(rows, columns, "percent")
        rows += classifier_rows(study.texts, study.domains, study.seeds)
    if "twenty" in tables:
        study = FieldStudy(options)
        twenty_rows, details["twenty"] = study.table(TWENTY)
        twenty_rows += classifier_rows(study.texts, study.domains, study.seeds)
        rows += [study.short(row) for row in twenty_rows]
    return Study(options).write(NAME, rows, aims=aimed, details=details, plots=plots)


def merge(row: str, density: float) -> dict[str, Any]:
    """Return the fields that a row with a merge of PEFT adds to its run."""
    return {"mixture_kind": "merge", "merge": {"combination_type": MERGES[row], "density": density}}


def tabulate(study: SkillStudy, labels: Mapping[str, str]) -> tuple[list[Row], dict[str, Any]]:
    """Return the measured rows and their details."""
    runs = {row: [study.row_run(row, seed) for seed in study.seeds] for row in labels}
    rows = [_row(study, row, labels[row], row_runs) for row, row_runs in runs.items()]
    ours = runs.get("routed_k2", [])
    minus = {}
    if ours:
        for row, row_runs in runs.items():
            if row != "routed_k2":
                minus[row] = differences(study, ours, row_runs)
    details = {
        **study.evidence(runs),
        "sources": {domain: list(parts) for domain, parts in SOURCES.items() if domain in study.domains},
        "counts": study.counts,
        "sizes": study.sizes.model_dump(mode="json"),
        "rates": study.rates,
        "routing": study.routing,
        "density": study.density,
        "confusion": confusion(study, ours) if ours else {},
        "routed_k2_minus": minus,
        "seconds": study.seconds,
    }
    return rows, details


def _row(study: SkillStudy, row: str, label: str, runs: Sequence[AnswerRun]) -> Row:
    """Combine a row over its seeds.

    The interval of the share of right experts is that of all questions, because the questions differ by seed.
    """
    combined = over_seeds([study.measured[run.id] for run in runs], row, label)
    led: list[int] = []
    for run in runs:
        for values in answered(study, run).values():
            led += values.get("led", ())
    if not led:
        return combined
    metrics = {**combined.metrics, "routing_accuracy": wilson(led)}
    return combined.model_copy(update={"metrics": metrics})


def answered(study: SkillStudy, run: AnswerRun) -> dict[str, Answered]:
    """Return the measurements of every question, by domain."""
    return study.measured[run.id].details["answered"]


def confusion(study: SkillStudy, runs: Sequence[AnswerRun]) -> dict[str, dict[str, int]]:
    """Count how often each expert led, by domain of the prompt."""
    counts = {}
    for domain in study.domains:
        leaders: Counter[str] = Counter()
        for run in runs:
            leaders.update(answered(study, run)[domain]["leader"])
        counts[domain] = dict(leaders)
    return counts


def differences(study: SkillStudy, ours: Sequence[AnswerRun], theirs: Sequence[AnswerRun]) -> dict[str, Any]:
    """Compute paired differences, ours minus theirs.

    Returns:
        For each column, Student's interval over seeds (`seeds`), and a normal one over all questions (`questions`).
    """
    result: dict[str, Any] = {}
    for name, column in COLUMNS.items():
        gaps: list[list[np.ndarray]] = []  # differences by domain and seed
        for domain in study.domains:
            domain_gaps = []
            for our_run, their_run in zip(ours, theirs, strict=True):
                our_values = answered(study, our_run)[domain][column]
                their_values = answered(study, their_run)[domain][column]
                domain_gaps.append(_gaps(our_values, their_values, name))
            gaps.append(domain_gaps)
        pooled = [np.concatenate(domain_gaps) for domain_gaps in gaps]
        if min(len(gap) for gap in pooled) < 2:
            continue
        by_seed = []
        for seed_gaps in zip(*gaps, strict=True):
            domain_means = [gap.mean() for gap in seed_gaps]
            by_seed.append(float(np.mean(domain_means)))
        result[name] = {
            "seeds": combine_seeds(by_seed).model_dump(),
            "questions": _normal_interval(pooled).model_dump(),
        }
    return result


def _normal_interval(pooled: Sequence[np.ndarray]) -> Interval:
    """Return the mean over domains of the mean differences, with a normal 95 % interval."""
    variance = sum(gap.var(ddof=1) / len(gap) for gap in pooled)
    error = float(np.sqrt(variance)) / len(pooled)
    middle = float(np.mean([gap.mean() for gap in pooled]))
    return Interval(mean=middle, low=middle - 1.96 * error, high=middle + 1.96 * error)


def _gaps(ours: Sequence[float], theirs: Sequence[float], name: str) -> np.ndarray:
    """Return differences on the questions that both answered; those of shares are in percentage points."""
    shared = min(len(ours), len(theirs))
    our_values = np.array(ours[:shared], float)
    their_values = np.array(theirs[:shared], float)
    unit = 1 if name == "nll_average" else 100
    return unit * (our_values - their_values)


def aims(rows: Sequence[Row], details: Mapping[str, Any]) -> list[Aim]:
    """Return the aims of the main table."""
    values = numbers_of(rows)
    if "lora_all" not in values:
        return []
    ours = values["routed_k2"]
    led = next(row for row in rows if row.id == "routed_k2").metrics["routing_accuracy"]
    assert isinstance(led, Interval)
    ratio = ours["accuracy"] / max(values["oracle"]["accuracy"], 1e-9)
    made = [
        aim("accuracy at k = 2 over that of each domain's own expert", "accuracy", 0.98, ratio, operator.ge),
        aim("right expert, percent", "routing_accuracy", 95.0, led.mean, operator.ge),
        aim("right expert, low end of the interval", "routing_accuracy", 92.0, led.low, operator.gt),
    ]
    for rival in ("arrow", "xlora", "uniform", "ties"):
        for name in ("accuracy", "likelihood_accuracy"):
            text = f"{name} at k = 2 minus that of {ROWS[rival]}, low end of the paired interval"
            low = details["routed_k2_minus"][rival][name]["questions"]["low"]
            made.append(aim(text, name, 0.0, low, operator.gt))
    gap = ours["accuracy"] - values["lora_all"]["accuracy"]
    text = f"accuracy at k = 2 minus that of {ROWS['lora_all']}"
    made.append(aim(text, "accuracy", -2.0, gap, operator.ge))
    return made
