"""Block-state transformers beside their baselines: one size, the same tokens, bits per byte by corpus and length.

Table `1` has every row with the first seed: about half an hour of a core. `longer` has some rows for every seed, with
five times the tokens and one layer of context states in the middle. `placement`, `number` and `state` are the ablations
of Tables 5.2 to 5.4 at the size of Table 1, with the first seed and single-head S4D.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from pydantic import Field
from transformers import AutoTokenizer

from experiments import Options
from experiments.block_state.corpora import CORPORA, Corpus, make_corpora
from experiments.sequence_rows import BLOCK_STATE, LABELS, model_config
from experiments.study import Study, TableRow, over_seeds, published
from graftlm.config import Config
from graftlm.data import SourceConfig
from graftlm.evaluation import Aim, Results, Row, value_of
from graftlm.evaluation.plots import by_length
from graftlm.runs.language_run import LanguageDataConfig, LanguageModelRun, LengthsConfig, TokenizerConfig
from graftlm.training import TrainingConfig

NAME = "block-state"
MIN_SPEEDUP = 1.5
LONGER = ("slide", "block_recurrent", "bst_sh_s4d", "bst_mf_unstructured")
FIRST_SEED_ONLY = ("bst_mf_unstructured",)  # of LONGER


class LongTextConfig(Config):
    """Sizes of models, texts and training.

    Args:
        shape: the keys of the model config that all rows share.
        parameters: of every row's model, up to rounding.
        length: tokens of a row of training.
        lengths: tokens of the windows that are measured.
        training: of table 1; warm-up and checkpoints follow from the steps.
        longer: factor on the steps of the table `longer`.
    """

    corpus: Corpus = Field(default_factory=Corpus)
    shape: dict[str, Any]
    parameters: int
    length: int = 1024
    lengths: tuple[int, ...] = (256, 1024, 4096, 16_384, 65_536)
    training: TrainingConfig
    longer: int = 5


FULL = LongTextConfig(
    corpus=Corpus(vocab_size=512),
    shape={
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "window": 128,
        "mixer_layers": [0, 1],
        "state_size": 16,
        "filters": 32,
        "initializer_range": 0.1,  # 1 / sqrt(width): with 0.02 the attention of small models is too uniform to learn
    },
    parameters=460_000,
    training=TrainingConfig(steps=260, batch_size=4, learning_rate=3e-3, weight_decay=0.1, keep_checkpoints=1),
)
QUICK = LongTextConfig(
    corpus=Corpus(vocab_size=300, characters=20_000, test_characters=2_000),
    shape=FULL.shape
    | {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"window": 16, "mixer_layers": [0], "filters": 4},
    parameters=18_000,
    length=64,
    lengths=(32, 64, 128),
    training=TrainingConfig(steps=2, batch_size=2, learning_rate=3e-3, weight_decay=0.1, keep_checkpoints=1),
    longer=2,
)


class LongTextStudy(Study):
    """Builds the runs of all tables. Runs with equal settings have equal ids, so tables share them."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.config = QUICK if options.quick else FULL
        self.evaluation = LengthsConfig(
            lengths=list(self.config.lengths),
            limit_tokens=max(self.config.lengths) - 1,
            tokens_per_pass=max(4096, self.config.length),
        )
        self.layers = range(self.config.shape["num_hidden_layers"])
        self.corpora = make_corpora(options, options.out / "corpora", self.config.corpus)
        self.vocab_size = len(AutoTokenizer.from_pretrained(self.corpora / "tokenizer"))

    def run(self, row: str, seed: int, *, times: int = 1, **changes: Any) -> LanguageModelRun:
        """One row for one seed, with `times` the steps; `changes` are to the shape."""
        config = self.config
        changes = {name: value for name, value in changes.items() if config.shape[name] != value}
        shape = config.shape | {"kernel_length": config.length, "vocab_size": self.vocab_size} | changes
        steps = times * config.training.steps
        training = {"steps": steps, "warmup_steps": max(1, steps // 20), "checkpoint_every": max(1, steps // 4)}
        training["seed"] = seed
        parts = [re.sub(r"\W+", "-", f"{name} {value}").strip("-") for name, value in changes.items()]
        return LanguageModelRun(
            id="_".join([row, *parts, f"{steps}-steps", f"s{seed}"]),
            label=LABELS[row],
            model=model_config(row, shape, config.parameters),
            tokenizer=TokenizerConfig(name=str(self.corpora / "tokenizer")),
            data=LanguageDataConfig(
                train=self._sources("train", *CORPORA),
                test={name: self._sources("test", name) for name in CORPORA},
                length=config.length,
                seed=seed,
            ),
            training=config.training.model_copy(update=training),
            evaluation=self.evaluation,
            device=self.options.device,
        )

    def _sources(self, split: str, *corpora: str) -> list[SourceConfig]:
        return [SourceConfig(path=str(self.corpora / f"{name}-{split}.jsonl")) for name in corpora]


def run(options: Options) -> Results:
    """Run the requested tables, by default the first, and write `results.json`, `report.md` and plots.

    Raises:
        RecipeError: there is no such table.
        DataError: the data folder lacks a file.
    """
    tables = options.chosen(tuple(TABLES), ("1",))
    study = LongTextStudy(options)
    table_rows = [row for table in tables for row in TABLES[table](study)]
    measured = study.execute([run for row in table_rows for run in row.runs], NAME)
    rows = [over_seeds([measured[run.id] for run in row.runs], row.id, row.label) for row in table_rows]
    ids = {row.id for row in table_rows}
    plotted = ids & LABELS.keys() or ids  # the main table if it is there; ablations are in the report only
    first = {row.id: row.runs[0] for row in table_rows}
    details = {
        "wall_s": study.seconds,
        "config": study.config.model_dump(mode="json"),
        "tokens": {name: run.training.steps * run.training.batch_size * run.data.length for name, run in first.items()},
        "losses": {name: measured[run.id].details["losses"] for name, run in first.items() if name in plotted},
    }
    plots = _plots(study.config, [row for row in rows if row.id in plotted])
    return study.write(NAME, rows, aims=aims(rows), paper=published(__file__, ids), details=details, plots=plots)


def main_table(study: LongTextStudy) -> list[TableRow]:
    """Every row, with the first seed."""
    return [TableRow(row, label, [study.run(row, study.seeds[0])]) for row, label in LABELS.items()]


def longer(study: LongTextStudy) -> list[TableRow]:
    """Some rows with more tokens and the mixer in the middle layer, most of them for every seed."""
    times, middle = study.config.longer, [len(study.layers) // 2]
    rows = []
    for row in LONGER:
        seeds = study.seeds[: 1 if row in FIRST_SEED_ONLY else None]
        label = f"{LABELS[row]}, {times} times the tokens, one layer"
        row_runs = [study.run(row, seed, times=times, mixer_layers=middle) for seed in seeds]
        rows.append(TableRow(f"longer-{row}", label, row_runs))
    return rows


def placement(study: LongTextStudy) -> list[TableRow]:
    """One block-state layer at each index (Table 5.2)."""
    return [_ablation(study, f"placement-{i}", f"one BST layer, index {i}", mixer_layers=[i]) for i in study.layers]


def number(study: LongTextStudy) -> list[TableRow]:
    """The number of block-state layers (Table 5.3), from the middle outwards."""
    order = sorted(study.layers, key=lambda i: (abs(i - len(study.layers) // 2), i))
    return [
        _ablation(study, f"number-{n}", f"BST layers: {n}", mixer_layers=sorted(order[:n]))
        for n in range(1, len(order) + 1)
    ]


def state(study: LongTextStudy) -> list[TableRow]:
    """The state size of a channel (Table 5.4)."""
    return [_ablation(study, f"state-{n}", f"state size {n}", state_size=n) for n in (8, 16, 32, 64)]


def _ablation(study: LongTextStudy, name: str, label: str, **changes: Any) -> TableRow:
    return TableRow(name, label, [study.run("bst_sh_s4d", study.seeds[0], **changes)])


TABLES: dict[str, Callable[[LongTextStudy], list[TableRow]]] = {
    "1": main_table,
    "longer": longer,
    "placement": placement,
    "number": number,
    "state": state,
}


def aims(rows: Sequence[Row]) -> list[Aim]:
    """On every corpus, the best block-state row is below the sliding window and block-recurrent; and it is faster."""
    by_id = {row.id: row for row in rows}
    tables = {"": tuple(LABELS), "longer-": LONGER}
    return [
        aim
        for prefix, names in tables.items()
        if {prefix + row for row in names} <= by_id.keys()
        for aim in _table_aims({row: by_id[prefix + row] for row in names})
    ]


def _table_aims(rows: Mapping[str, Row]) -> list[Aim]:
    """The aims of one table, given its rows by model."""
    table_aims = []
    for corpus in CORPORA:
        metric = f"bpb_{corpus}"
        values = {name: value_of(row.metrics[metric]) for name, row in rows.items()}
        best = min((name for name in rows if name in BLOCK_STATE), key=values.__getitem__)
        for other in ("slide", "block_recurrent"):
            relation = "below the sliding window" if other == "slide" else "no worse than block-recurrent"
            met = values[best] < values[other] or (other != "slide" and values[best] == values[other])
            text = f"{corpus}: the best BST ({rows[best].label}) is {relation}"
            table_aims.append(Aim(text=text, metric=metric, aim=values[other], measured=values[best], met=met))
    speed = value_of(rows["bst_sh_s4d"].metrics["train_tokens_per_s"])
    ratio, aim = speed / value_of(rows["block_recurrent"].metrics["train_tokens_per_s"]), MIN_SPEEDUP
    text = f"{rows['bst_sh_s4d'].label} trains at least {aim:g} times as fast as block-recurrent"
    return [*table_aims, Aim(text=text, metric="train_tokens_per_s", aim=aim, measured=ratio, met=ratio >= aim)]


def _plots(config: LongTextConfig, rows: Sequence[Row]) -> dict[str, Figure]:
    """Bits per byte by length, one figure for each corpus."""
    return {
        f"length-{corpus}": by_length(
            {row.label: [(n, row.metrics[f"bpb_{corpus}_at_{n}"]) for n in config.lengths] for row in rows},
            trained=config.length,
            title=corpus,
        )
        for corpus in CORPORA
    }
