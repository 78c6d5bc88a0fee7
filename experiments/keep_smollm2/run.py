"""SmolLM2 learns German novels: what does it forget, by method, where its old text is not at hand?

Rates are searched for every row alike, on validation texts, with the first seed and a third of the steps. The
strength of WiSE-FT is chosen with them; its main runs are fine-tuning again, measured with the weights moved back.
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

NAME = "keep-smollm2"
MODEL = "smollm2-135m-instruct"
GERMAN, ENGLISH = "lm_text/eltec_deu.jsonl", "lm_text/eltec_eng.jsonl"
WIKITEXT, SHAKESPEARE = "lm_text/wikitext2_valid_test/test.txt", "lm_text/tinyshakespeare/input.txt"
CODE = "routing/code/thealgorithms_py.jsonl"
TASKS = {name: f"routing/science/{name}/test.json" for name in ("arc_easy", "openbookqa")}
FILES = (GERMAN, ENGLISH, WIKITEXT, SHAKESPEARE, CODE, *TASKS.values())
SELF, REAL = "its own text", "real novels"
STRENGTHS = [0.5]
VALIDATION_SEED = 7
# Other ways to sample the own text, on validation texts: 2,560 tokens of it are read in the search's steps.
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
OURS, RIVALS, CONTROLS = ("neutral_self_replay", "neutral_self_distil"), ("lora_replay", "lora_kl"), ("adapter_kl",)


class KeepRow(NamedTuple):
    """A row: its label, its graft, the rates that are searched, and where its old text comes from."""

    label: str
    graft: dict[str, Any]
    rates: tuple[float, ...]
    old: str = ""
    objective: str = "replay"


def _rows() -> dict[str, KeepRow]:
    lora, lora_rates = {"kind": "lora", "capacity": 0.1}, (5e-4, 1e-3, 2e-3)
    neutral = {"kind": "neutral-residues", "capacity": 0.1, "alpha": 10.0, "init": "he"}
    neutral_rates = (1.5e-3, 3e-3, 6e-3)
    adapter = {"kind": "adapter", "capacity": 0.1}
    return {
        "finetune": KeepRow("fine-tuning", {"kind": "finetune"}, (3e-5, 1e-4, 3e-4)),
        "lora": KeepRow("LoRA", lora, lora_rates),
        "lora_replay": KeepRow("LoRA, replay", lora, lora_rates, SELF),
        "lora_kl": KeepRow("LoRA, distilled", lora, lora_rates, SELF, "distil"),
        "oft": KeepRow("OFT", {"kind": "peft", "method": "OFT"}, (1e-3, 3e-3, 1e-2)),
        "osf": KeepRow("OSF", {"kind": "peft", "method": "OSF"}, (3e-5, 1e-4, 3e-4)),
        "llama_pro": KeepRow("LLaMA Pro", {"kind": "llama-pro", "capacity": 0.1}, (3e-4, 1e-3, 3e-3)),
        "adapter": KeepRow("adapter", adapter, (5e-4, 1e-3, 2e-3)),
        "adapter_kl": KeepRow("adapter, distilled", adapter, (5e-4, 1e-3, 2e-3), SELF, "distil"),
        "neutral": KeepRow("neutral residues", neutral, neutral_rates),
        "neutral_real_replay": KeepRow("neutral residues, replay of novels", neutral, neutral_rates, REAL),
        "neutral_self_replay": KeepRow("neutral residues, replay", neutral, neutral_rates, SELF),
        "neutral_self_distil": KeepRow("neutral residues, distilled", neutral, neutral_rates, SELF, "distil"),
    }


ROWS = _rows()
# Settings beside the rate that were tried for the best rival and for ours, as many for each, at the middle rate.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "lora_kl": [{"scale": 2.0}, {"scale": 4.0}, {"scale": 0.5}],
    "neutral_self_distil": [{"alpha": 1.0}, {"alpha": 100.0}, {"init": "low-variance"}],
}
SHARED = {"lora_kl": ("lora", "lora_replay"), "neutral_self_distil": tuple(n for n in ROWS if "neutral" in n)}


class KeepStudy(Study):
    """The runs of the experiment.

    Attributes:
        grafts: the settings of each row's graft.
        rates: the rate that validation text chose for each row.
        moved_back: the rate and the strength of fine-tuned weights that it chose.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.grafts = {name: dict(row.graft) for name, row in ROWS.items()}
        self.rates: dict[str, float] = {}
        self.moved_back = (0.0, 1.0)
        self.backbone = BackboneConfig(name=options.backbone or MODEL, dtype="bfloat16", device=options.device)
        self.tasks = write_choices(options.data, TASKS, options.out / "tasks", 4 if options.quick else 150)

    def search_run(self, name: str, rate: float, own: Mapping[str, Any] = {}, **graft: Any) -> GraftRun:
        """A row at one rate, a third of the steps, measured on validation texts; `own` are keys of its own text."""
        config = {**self.grafts[name], **graft}
        plain = ROWS[name].graft
        changed = "".join(f"_{key}-{config[key]}" for key in sorted(config) if config[key] != plain.get(key))
        evaluation = self._evaluation(
            1536, own_seed=VALIDATION_SEED, strengths=[0.25, 0.5, 0.75] if name == "finetune" else []
        )
        novel, play = {"path": GERMAN, "documents": "20:21"}, {"path": SHAKESPEARE}
        return GraftRun(
            id=f"search_{name}_lr{rate:g}{changed}",
            label=ROWS[name].label,
            backbone=self.backbone,
            graft=graft_config(config),
            data=self._data(name, self.seeds[0], {"new": novel, "old": play}, own),
            training=self._training(rate, self.seeds[0], shorter=3),
            evaluation=evaluation,
        )

    def main_run(self, name: str, seed: int) -> GraftRun:
        """A row at its chosen rate, measured on the test texts."""
        changes = {
            "id": f"{name}_s{seed}",
            "label": ROWS[name].label,
            "graft": graft_config(self.grafts[name]),
            "data": self._data(name, seed, self._tests()),
            "training": self._training(self.rates[name], seed),
        }
        return self.bare().model_copy(update=changes)

    def bare(self) -> BehaviourRun:
        """The backbone's own scores."""
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
        sizes = {"limit_tokens": tokens, "own_tokens": tokens, "batch_size": 8}
        return EvaluationConfig.parse(sizes | {"precision": "bf16", "decode_prompts": 0} | more)

    def _training(self, rate: float, seed: int, shorter: int = 1) -> Any:
        steps = 3 if self.options.quick else 60 // shorter
        return training_config(steps, 2, rate, seed, warmup_steps=steps // 10, precision="bf16")

    def _data(
        self, name: str, seed: int, tests: Mapping[str, dict[str, Any]], own: Mapping[str, Any] = {}
    ) -> DataConfig:
        def source(values: dict[str, Any]) -> dict[str, Any]:
            return values | {"path": str(self.options.data / values["path"]), "limit_characters": 60_000}

        row, quick = ROWS[name], self.options.quick
        old: dict[str, list[dict[str, Any]]] = {
            SELF: [{"self": True, "tokens": 300 if quick else 24_000, **own}],
            REAL: [{"path": str(self.options.data / ENGLISH), "documents": "0:4", "limit_characters": 100_000}],
            "": [],
        }
        return DataConfig.parse(
            {
                "new": [{"path": str(self.options.data / GERMAN), "documents": "0:20", "limit_characters": 2_000_000}],
                "old": old[row.old],
                "replay_fraction": 0.25 if row.old else 0.0,
                "old_objective": row.objective,
                "length": 128 if quick else 256,
                "test": {key: [source(values)] for key, values in tests.items()},
                "seed": seed,
            }
        )

    def choose_rates(self) -> None:
        """Choose settings, then every row's rate: the lowest loss on validation texts, old and new, plus divergence."""
        settings = {
            name: [self.search_run(name, ROWS[name].rates[1], **graft) for graft in ({}, *grafts)]
            for name, grafts in ({} if self.options.quick else SETTINGS).items()
        }
        for name, best in self.choose(settings, CHOSEN_BY, "settings").items():
            assert best.graft is not None, "of a search run"
            for shared in (name, *SHARED[name]):
                self.grafts[shared] = best.graft.model_dump(mode="json", exclude_unset=True)
        rates = {
            name: [self.search_run(name, rate) for rate in (row.rates[1:2] if self.options.quick else row.rates)]
            for name, row in ROWS.items()
        }
        chosen = self.choose(rates, CHOSEN_BY, "the rates")
        self.rates = {name: run.training.learning_rate for name, run in chosen.items()}
        self.moved_back = min(
            (_loss(point["metrics"]), run.training.learning_rate, point["strength"])
            for run in rates["finetune"]
            for point in self.measured[run.id].details["strengths"]
            if point["strength"] < 1
        )[1:]

    def sampling_runs(self) -> dict[str, GraftRun]:
        """Neutral residues with own text that is sampled in other ways, as in the search, by the row's id."""
        runs = {}
        for name, (row, own) in SAMPLINGS.items():
            sized = {"tokens": 300} if self.options.quick else {"tokens": 3000} | own
            runs[f"sampling_{name}"] = self.search_run(row, self.rates[row], sized)
        return {row: run.model_copy(update={"id": row, "label": row.replace("_", " ")}) for row, run in runs.items()}

    def moved_back_run(self, seed: int) -> BehaviourRun:
        """Fine-tuning at the rate that its chosen strength had, measured there."""
        rate, strength = self.moved_back
        fields = dict(self.main_run("finetune", seed)) | {
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
    sampled = study.execute(list(study.sampling_runs().values()), "sampling")
    labels = {name: row.label for name, row in ROWS.items()} | {"wise_ft": MOVED_BACK}
    measured = {name: [study.measured[f"{name}_s{seed}"] for seed in study.seeds] for name in labels}
    for of_row in measured.values():
        for measurement in of_row:
            measurement.add_metrics(
                {f"forgotten_{text}": metric(measurement, text) - metric(bare, text) for text in ("novels", "code")}
            )
    differences = add_equal_learning({name: measured[name] for name in ROWS})
    rows = [bare.row, *(over_seeds(measured[name], name, label) for name, label in labels.items())]
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


def add_equal_learning(measured: Mapping[str, Sequence[Measurement]]) -> dict[str, dict[str, Any]]:
    """Add `own_kl_at_equal` and `forgotten_at_equal` to each row's seeds, at nine tenths of what every row learned.

    Returns:
        By row of ours and rival or control, our own_kl at that level minus theirs: `seeds` has the mean and Student's
        interval over seeds, `windows` each seed's paired interval over windows of text.
    """
    by_seed = [
        Frontier({name: [of_row[number].details["strengths"]] for name, of_row in measured.items()})
        for number in range(len(measured["lora"]))
    ]
    differences: dict[str, dict[str, Any]] = {}
    for number, frontier in enumerate(by_seed):
        level = frontier.level()
        for name, values in frontier.at_level(level).items():
            metrics = {f"{loss}_at_equal": value for loss, value in values.items()}
            measured[name][number].add_metrics(metrics | {"equal_learned": level})
    for ours in OURS:
        for rival in (*RIVALS, *CONTROLS):
            windows = [each.difference(ours, rival, "own_kl", each.level()) for each in by_seed]
            differences.setdefault(ours, {})[rival] = {
                "seeds": combine_seeds(windows).model_dump(),
                "windows": [each.model_dump() for each in windows],
            }
    return differences


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Those of the better of ours, which is the one that diverges less at equal learning."""
    values = numbers_of(rows)
    ours = min(OURS, key=lambda name: values[name]["own_kl_at_equal"])
    rival, control = (min(group, key=lambda name: values[name]["own_kl_at_equal"]) for group in (RIVALS, CONTROLS))
    ratio, to_control = (values[ours]["own_kl_at_equal"] / values[name]["own_kl_at_equal"] for name in (rival, control))
    points = 100 * abs(values[ours]["arc_easy"] - values["backbone"]["arc_easy"])
    third = "own_kl at equal learning of"
    return [
        aim(
            f"learned by {ours}, LoRA's without replay",
            "learned",
            values["lora"]["learned"],
            values[ours]["learned"],
            operator.ge,
        ),
        aim(f"forgotten on WikiText by {ours}", "forgotten", 0.01, values[ours]["forgotten"], operator.le),
        aim(f"{third} {ours} over that of {rival}", "own_kl_at_equal", 1 / 3, ratio, operator.le),
        aim(f"{third} {ours} over that of {control}, plain adapters", "own_kl_at_equal", 1.0, to_control),
        aim(f"arc_easy of {ours}, points from the backbone", "arc_easy", 1.0, points, operator.le),
    ]
