"""SmolLM2 learns German novels: what does it forget, by method, if its old text is not available?

Rates are searched for every row in the same way, on validation texts, with the first seed and a third of the steps. The
strength of WiSE-FT is chosen with them; its main runs are fine-tuning, measured with the weights moved back.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import Options
from experiments.keep_smollm2.behaviour import BehaviourRun, MovedBackRun, write_choices
from experiments.study import Study, aim, check_files, metric, numbers_of, over_seeds, training_config
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Aim, Results, Row, combine_seeds
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.evaluation.frontier import Frontier
from graftlm.evaluation.measurement import Measurement
from graftlm.grafts import graft_config
from graftlm.runs.graft_run import GraftRun
from graftlm.training import TrainingConfig

NAME = "keep-smollm2"
MODEL = "smollm2-135m-instruct"
GERMAN = "lm_text/eltec_deu.jsonl"
ENGLISH = "lm_text/eltec_eng.jsonl"
WIKITEXT = "lm_text/wikitext2_valid_test/test.txt"
SHAKESPEARE = "lm_text/tinyshakespeare/input.txt"
CODE = "routing/code/thealgorithms_py.jsonl"
TASKS = {
    "arc_easy": "routing/science/arc_easy/test.json",
    "openbookqa": "routing/science/openbookqa/test.json",
}
FILES = (GERMAN, ENGLISH, WIKITEXT, SHAKESPEARE, CODE, *TASKS.values())
SELF = "its own text"
REAL = "real novels"
STRENGTHS = [0.5]
VALIDATION_SEED = 7
# Other ways to sample the own text, measured on validation texts. A search reads 2,560 tokens of it.
SAMPLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("neutral_self_distil", {}),
    "replay": ("neutral_self_replay", {}),
    "temperature_0.7": ("neutral_self_distil", {"temperature": 0.7}),
    "temperature_1.3": ("neutral_self_distil", {"temperature": 1.3}),
    "top_p_0.9": ("neutral_self_distil", {"top_p": 0.9}),
    "free": ("neutral_self_distil", {"chat_fraction": 0.0}),
    "chat": ("neutral_self_distil", {"chat_fraction": 1.0}),
    "tokens_750": ("neutral_self_distil", {"tokens": 750}),
    "tokens_24000": ("neutral_self_distil", {"tokens": 24_000}),
}
CHOSEN_BY = ("new", "old", "own_kl")
MOVED_BACK = "WiSE-FT"
OURS = ("neutral_self_replay", "neutral_self_distil")
RIVALS = ("lora_replay", "lora_kl")
CONTROLS = ("adapter_kl",)


class KeepRow(NamedTuple):
    """A row.

    Attributes:
        label: label of the row.
        graft: config of its graft.
        rates: learning rates of the search.
        old: source of its old text: `SELF`, `REAL`, or empty.
        objective: objective on old text.
    """

    label: str
    graft: dict[str, Any]
    rates: tuple[float, ...]
    old: str = ""
    objective: str = "replay"


def _rows() -> dict[str, KeepRow]:
    lora = {"kind": "lora", "capacity": 0.1}
    lora_rates = (5e-4, 1e-3, 2e-3)
    adapter = {"kind": "adapter", "capacity": 0.1}
    adapter_rates = (5e-4, 1e-3, 2e-3)
    neutral = {"kind": "neutral-residues", "capacity": 0.1, "alpha": 10.0, "init": "he"}
    neutral_rates = (1.5e-3, 3e-3, 6e-3)
    return {
        "finetune": KeepRow("fine-tuning", {"kind": "finetune"}, (3e-5, 1e-4, 3e-4)),
        "lora": KeepRow("LoRA", lora, lora_rates),
        "lora_replay": KeepRow("LoRA, replay", lora, lora_rates, SELF),
        "lora_kl": KeepRow("LoRA, distilled", lora, lora_rates, SELF, "distil"),
        "oft": KeepRow("OFT", {"kind": "peft", "method": "OFT"}, (1e-3, 3e-3, 1e-2)),
        "osf": KeepRow("OSF", {"kind": "peft", "method": "OSF"}, (3e-5, 1e-4, 3e-4)),
        "llama_pro": KeepRow("LLaMA Pro", {"kind": "llama-pro", "capacity": 0.1}, (3e-4, 1e-3, 3e-3)),
        "adapter": KeepRow("adapter", adapter, adapter_rates),
        "adapter_kl": KeepRow("adapter, distilled", adapter, adapter_rates, SELF, "distil"),
        "neutral": KeepRow("neutral residues", neutral, neutral_rates),
        "neutral_real_replay": KeepRow("neutral residues, replay of novels", neutral, neutral_rates, REAL),
        "neutral_self_replay": KeepRow("neutral residues, replay", neutral, neutral_rates, SELF),
        "neutral_self_distil": KeepRow("neutral residues, distilled", neutral, neutral_rates, SELF, "distil"),
    }


ROWS = _rows()
# Settings other than the rate that were tried for the best rival and for ours, as many for each, at the middle rate.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "lora_kl": [{"scale": 2.0}, {"scale": 4.0}, {"scale": 0.5}],
    "neutral_self_distil": [{"alpha": 1.0}, {"alpha": 100.0}, {"init": "low-variance"}],
}
# Rows that take over the settings of a searched row.
SHARED = {
    "lora_kl": ("lora", "lora_replay"),
    "neutral_self_distil": tuple(name for name in ROWS if "neutral" in name),
}


class KeepStudy(Study):
    """The runs of the experiment.

    Attributes:
        grafts: config of each row's graft.
        rates: learning rate of each row that validation text chose.
        moved_back: learning rate and strength of the fine-tuned weights that validation text chose.
        backbone: config of the backbone.
        tasks: files of multiple-choice questions, by name.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.grafts = {name: dict(row.graft) for name, row in ROWS.items()}
        self.rates: dict[str, float] = {}
        self.moved_back = (0.0, 1.0)
        self.backbone = BackboneConfig(name=options.backbone or MODEL, dtype="bfloat16", device=options.device)
        questions = 4 if options.quick else 150
        self.tasks = write_choices(options.data, TASKS, options.out / "tasks", questions)

    def search_run(self, name: str, rate: float, own: Mapping[str, Any] = {}, **graft: Any) -> GraftRun:
        """Return the run of a row at one rate with a third of the steps, measured on validation texts.

        Args:
            name: name of the row.
            rate: learning rate.
            own: keys of the source of its own text.
            graft: keys of the graft that differ from the row's.
        """
        plain = ROWS[name].graft
        config = {**self.grafts[name], **graft}
        changed = [key for key in sorted(config) if config[key] != plain.get(key)]
        changes = "".join(f"_{key}-{config[key]}" for key in changed)
        tests = {
            "new": {"path": GERMAN, "documents": "20:21"},
            "old": {"path": SHAKESPEARE},
        }
        return GraftRun(
            id=f"search_{name}_lr{rate:g}{changes}",
            label=ROWS[name].label,
            backbone=self.backbone,
            graft=graft_config(config),
            data=self._data(name, self.seeds[0], tests, own),
            training=self._training(rate, self.seeds[0], shorter=3),
            evaluation=self._evaluation(
                1536,
                own_seed=VALIDATION_SEED,
                strengths=[0.25, 0.5, 0.75] if name == "finetune" else [],
            ),
        )

    def main_run(self, name: str, seed: int) -> GraftRun:
        """Return the run of a row at its chosen rate, measured on the test texts."""
        changes = {
            "id": f"{name}_s{seed}",
            "label": ROWS[name].label,
            "graft": graft_config(self.grafts[name]),
            "data": self._data(name, seed, self._tests()),
            "training": self._training(self.rates[name], seed),
        }
        return self.bare().model_copy(update=changes)

    def bare(self) -> BehaviourRun:
        """Return the run of the backbone without a graft."""
        return BehaviourRun(
            id="backbone",
            label="backbone",
            backbone=self.backbone,
            data=self._data("lora", self.seeds[0], self._tests()),
            training=self._training(1e-3, self.seeds[0]),
            evaluation=self._evaluation(strengths=STRENGTHS),
            choices=self.tasks,
            chats=2 if self.options.quick else 16,
        )

    def _tests(self) -> dict[str, dict[str, Any]]:
        return {
            "new": {"path": GERMAN, "documents": "21:22"},
            "old": {"path": WIKITEXT},
            "novels": {"path": ENGLISH, "documents": "20:21"},
            "code": {"path": CODE},
        }

    def _evaluation(self, tokens: int = 3072, **more: Any) -> EvaluationConfig:
        tokens = 200 if self.options.quick else tokens
        return EvaluationConfig(
            limit_tokens=tokens,
            own_tokens=tokens,
            batch_size=8,
            precision="bf16",
            decode_prompts=0,
            **more,
        )

    def _training(self, rate: float, seed: int, shorter: int = 1) -> TrainingConfig:
        steps = 3 if self.options.quick else 60 // shorter
        return training_config(
            steps,
            2,
            rate,
            seed,
            warmup_steps=steps // 10,
            precision="bf16",
        )

    def _data(
        self,
        name: str,
        seed: int,
        tests: Mapping[str, dict[str, Any]],
        own: Mapping[str, Any] = {},
    ) -> DataConfig:
        row = ROWS[name]
        quick = self.options.quick
        folder = self.options.data
        old: dict[str, list[dict[str, Any]]] = {
            SELF: [{"self": True, "tokens": 300 if quick else 24_000, **own}],
            REAL: [{"path": str(folder / ENGLISH), "documents": "0:4", "limit_characters": 100_000}],
            "": [],
        }
        new = {
            "path": str(folder / GERMAN),
            "documents": "0:20",
            "limit_characters": 2_000_000,
        }
        test = {}
        for key, values in tests.items():
            test[key] = [{**values, "path": str(folder / values["path"]), "limit_characters": 60_000}]
        return DataConfig.parse(
            {
                "new": [new],
                "old": old[row.old],
                "replay_fraction": 0.25 if row.old else 0.0,
                "old_objective": row.objective,
                "length": 128 if quick else 256,
                "test": test,
                "seed": seed,
            }
        )

    def choose_rates(self) -> None:
        """Choose settings, then every row's rate, by the sum of the losses on validation texts and the divergence."""
        if not self.options.quick:
            self._choose_settings()
        candidates = {}
        for name, row in ROWS.items():
            rates = row.rates[1:2] if self.options.quick else row.rates
            candidates[name] = [self.search_run(name, rate) for rate in rates]
        chosen = self.choose(candidates, CHOSEN_BY, "the rates")
        self.rates = {name: run.training.learning_rate for name, run in chosen.items()}
        self.moved_back = self._best_moved_back(candidates["finetune"])

    def _best_moved_back(self, runs: Sequence[GraftRun]) -> tuple[float, float]:
        """Return the rate and the strength below 1 with the lowest loss."""
        found = []
        for run in runs:
            rate = run.training.learning_rate
            for point in self.measured[run.id].details["strengths"]:
                strength = point["strength"]
                if strength < 1:
                    found.append((_loss(point["metrics"]), rate, strength))
        _, rate, strength = min(found)
        return rate, strength

    def _choose_settings(self) -> None:
        """Choose the settings other than the rate, and give them to the rows that share them."""
        candidates = {}
        for name, grafts in SETTINGS.items():
            middle = ROWS[name].rates[1]
            candidates[name] = [self.search_run(name, middle, **graft) for graft in ({}, *grafts)]
        for name, best in self.choose(candidates, CHOSEN_BY, "settings").items():
            assert best.graft is not None, "of a search run"
            for shared in (name, *SHARED[name]):
                self.grafts[shared] = best.graft.model_dump(mode="json", exclude_unset=True)

    def sampling_runs(self) -> list[GraftRun]:
        """Return the runs of neutral residues with own text that is sampled in other ways, as in the search."""
        runs = []
        for name, (row, own) in SAMPLINGS.items():
            sampled = {"tokens": 300} if self.options.quick else {"tokens": 3000, **own}
            run = self.search_run(row, self.rates[row], sampled)
            names = {"id": f"sampling_{name}", "label": f"sampling {name}".replace("_", " ")}
            runs.append(run.model_copy(update=names))
        return runs

    def moved_back_run(self, seed: int) -> MovedBackRun:
        """Return the run of fine-tuning at the chosen rate, measured at the chosen strength."""
        rate, strength = self.moved_back
        fields = {
            **dict(self.main_run("finetune", seed)),
            "id": f"wise_ft_s{seed}",
            "label": MOVED_BACK,
            "training": self._training(rate, seed),
            "evaluation": self._evaluation(strengths=[strength]),
        }
        return MovedBackRun(**fields)


def _loss(metrics: Mapping[str, Mapping[str, float]]) -> float:
    return sum(metrics[name]["mean"] for name in CHOSEN_BY)


def run(options: Options) -> Results:
    """Search every row's rate with the first seed, then run all seeds."""
    check_files(options, FILES)
    study = KeepStudy(options)
    bare = study.execute([study.bare()], "the backbone")["backbone"]
    study.choose_rates()
    for seed in study.seeds:
        runs = [study.main_run(name, seed) for name in ROWS]
        study.execute([*runs, study.moved_back_run(seed)], f"seed {seed}")
    sampled = study.execute(study.sampling_runs(), "sampling")
    labels = {name: row.label for name, row in ROWS.items()}
    labels["wise_ft"] = MOVED_BACK
    measured = {name: [study.measured[f"{name}_s{seed}"] for seed in study.seeds] for name in labels}
    for of_row in measured.values():
        for measurement in of_row:
            _add_forgotten(measurement, bare)
    differences = add_equal_learning({name: measured[name] for name in ROWS})
    rows = [bare.row]
    rows += [over_seeds(measured[name], name, label) for name, label in labels.items()]
    rows += [measurement.row for measurement in sampled.values()]
    details = {
        "rates": study.rates,
        "wise_ft": list(study.moved_back),
        "settings": study.grafts,
        "searched": study.searched,
        "own_kl_at_equal_minus": differences,
        "seconds": study.seconds,
    }
    return study.write(NAME, rows, aims=aims(rows), details=details)


def _add_forgotten(measurement: Measurement, bare: Measurement) -> None:
    """Add the forgetting of novels and code."""
    for text in ("novels", "code"):
        forgotten = metric(measurement, text) - metric(bare, text)
        measurement.add_metrics({f"forgotten_{text}": forgotten})


def add_equal_learning(measured: Mapping[str, Sequence[Measurement]]) -> dict[str, dict[str, Any]]:
    """Add `own_kl_at_equal` and `forgotten_at_equal` to the seeds of every row.

    They are measured at nine tenths of the learning that all rows reached.

    Returns:
        By row of ours and rival or control, our own_kl at that level minus theirs: `seeds` has the mean and Student's
        interval over seeds, `windows` each seed's paired interval over windows of text.
    """
    by_seed = []
    for number in range(len(measured["lora"])):
        strengths = {name: [of_row[number].details["strengths"]] for name, of_row in measured.items()}
        by_seed.append(Frontier(strengths))
    for number, frontier in enumerate(by_seed):
        level = frontier.level()
        for name, values in frontier.at_level(level).items():
            metrics = {f"{loss}_at_equal": value for loss, value in values.items()}
            metrics["equal_learned"] = level
            measured[name][number].add_metrics(metrics)
    differences: dict[str, dict[str, Any]] = {}
    for ours in OURS:
        differences[ours] = {}
        for rival in (*RIVALS, *CONTROLS):
            windows = [frontier.difference(ours, rival, "own_kl", frontier.level()) for frontier in by_seed]
            differences[ours][rival] = {
                "seeds": combine_seeds(windows).model_dump(),
                "windows": [interval.model_dump() for interval in windows],
            }
    return differences


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Return the aims for the row of ours that diverges less at equal learning."""
    values = numbers_of(rows)

    def divergence(name: str) -> float:
        return values[name]["own_kl_at_equal"]

    ours = min(OURS, key=divergence)
    rival = min(RIVALS, key=divergence)
    control = min(CONTROLS, key=divergence)
    points = 100 * abs(values[ours]["arc_easy"] - values["backbone"]["arc_easy"])
    ratio_text = f"own_kl at equal learning of {ours} over that of"
    return [
        aim(
            f"learned by {ours}, LoRA's without replay",
            "learned",
            values["lora"]["learned"],
            values[ours]["learned"],
            operator.ge,
        ),
        aim(
            f"forgotten on WikiText by {ours}",
            "forgotten",
            0.01,
            values[ours]["forgotten"],
            operator.le,
        ),
        aim(
            f"{ratio_text} {rival}",
            "own_kl_at_equal",
            1 / 3,
            divergence(ours) / divergence(rival),
            operator.le,
        ),
        aim(
            f"{ratio_text} {control}, plain adapters",
            "own_kl_at_equal",
            1.0,
            divergence(ours) / divergence(control),
        ),
        aim(
            f"arc_easy of {ours}, points from the backbone",
            "arc_easy",
            1.0,
            points,
            operator.le,
        ),
    ]
