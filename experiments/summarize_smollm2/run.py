"""SmolLM2 writes abstracts of technical proposals: is an extract useful in addition to the introduction?"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import Options
from experiments.study import Study, aim, check_files, over_seeds, training_config
from experiments.summarize.corpora import CORPORA, FILES
from experiments.summarize.run import FULL, QUICK
from experiments.summarize_smollm2.prompts import PromptSizes, write_prompts
from experiments.summarize_smollm2.tables import WRITTEN, rival_texts, tabulate, text_values
from graftlm import GraftedModel, graft_config, load_graft
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Aim, Results, Row, bootstrap
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.evaluation.measurement import Measurement
from graftlm.files.writing import fill_once
from graftlm.pipelines.summarize import LanguageModelWriter, SummaryDecoding
from graftlm.pipelines.summarize.writer import drop_partial_sentence
from graftlm.runs.graft_run import GraftRun
from graftlm.runs.run import Run, RunContext
from graftlm.runs.shared import load_shared

NAME = "summarize-smollm2"
MODEL = "smollm2-135m-instruct"
NOVELS = "lm_text/eltec_eng.jsonl"
RIVALS = {
    "extract": "the default selector",
    "introduction": "start of the introduction",
    "lead3": "Lead-3",
}
# The choice of the experiment keep-smollm2.
GRAFT = {
    "kind": "neutral-residues",
    "capacity": 0.1,
    "alpha": 10.0,
    "init": "he",
}
LORA = {"kind": "lora", "capacity": 0.1}
# Grafts and their learning rates.
SEARCHED: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "neutral": (GRAFT, (1.5e-3, 3e-3, 6e-3)),
    "lora": (LORA, (5e-4, 1e-3, 2e-3)),
}
BATCH = 2
SEARCH_STEPS = 12
# Documents of each collection that are scored, and that are summarized.
TEST = {
    "zero_shot": (30, 12),
    "grafted": (20, 6),
}
_QUICK_SIZES = PromptSizes(window=400, abstract=24, test=1, validation=2, train=4)


class WritingRun(Run):
    """Scores abstracts after the prompts of every layout, and writes summaries. It may depend on the run of a graft.

    Args:
        backbone: the model.
        path: file with the prompts.
        scored: number of documents that are scored.
        written: number of documents that are summarized.
        abstract: maximum number of tokens of a summary.
    """

    backbone: BackboneConfig
    path: str
    scored: int
    written: int
    abstract: int

    def measure(self, context: RunContext) -> Measurement:
        backbone = load_shared(self.backbone)
        rows = read_rows(Path(self.path))
        grafts = {name: load_graft(folder / "graft", backbone) for name, folder in context.dependencies.items()}
        with GraftedModel(backbone, grafts).eval() if grafts else nullcontext():
            nats = {row["id"]: abstract_nats(backbone.model, row) for row in rows[: self.scored]}
            decoding = SummaryDecoding(max_new_tokens=self.abstract, no_repeat_ngram_size=0)
            writer = LanguageModelWriter(backbone.model, backbone.need_tokenizer(), decoding=decoding)
            texts = {name: _summaries(writer, rows[: self.written], name) for name in WRITTEN}
        row = Row(
            id=self.id,
            label=self.id,
            metrics={"documents": len(nats), "summaries": len(texts["i"])},
        )
        return Measurement(row, {"nats": nats, "texts": texts})


def _summaries(writer: LanguageModelWriter, rows: Sequence[Mapping[str, Any]], layout: str) -> dict[str, str]:
    """Write a summary of each document with a layout."""
    prompts = [row["start"] + row["prompts"][layout] for row in rows]
    completions = writer.complete_batch(prompts)
    texts = {}
    for row, (text, truncated) in zip(rows, completions, strict=True):
        text = text.strip()
        texts[row["id"]] = drop_partial_sentence(text) if truncated else text
    return texts


@torch.inference_mode()
def abstract_nats(model: Any, row: Mapping[str, Any]) -> dict[str, float]:
    """Return −log p of a document's abstract after the prompt of each layout, in nats.

    The start that all prompts have in common is read once.
    """
    start = torch.tensor([row["start"]], device=model.device)
    cache = model(input_ids=start, use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(row["prompts"]))
    answer = torch.tensor(row["answer"], device=model.device)
    ids = [torch.tensor([*prompt, *row["answer"]], device=model.device) for prompt in row["prompts"].values()]
    output = model(
        input_ids=nn.utils.rnn.pad_sequence(ids, batch_first=True),
        past_key_values=cache,
        use_cache=True,
    )
    nats = {}
    for (name, prompt), logits_TV in zip(row["prompts"].items(), output.logits, strict=True):
        first = len(prompt) - 1
        predicted = logits_TV[first : first + len(answer)].float()
        loss = nn.functional.cross_entropy(predicted, answer, reduction="sum")
        nats[name] = float(loss)
    return nats


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of prompts."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


class SummaryStudy(Study):
    """The runs of the experiment, and the files of its prompts."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.sizes = _QUICK_SIZES if options.quick else PromptSizes()
        self.backbone = BackboneConfig(
            name=options.backbone or MODEL,
            dtype="bfloat16",
            device=options.device,
        )
        longdocs = str(options.data / "longdocs")
        split = QUICK if options.quick else FULL
        key: dict[str, Any] = {
            "longdocs": longdocs,
            "sizes": self.sizes._asdict(),
            "seeds": list(self.seeds),
            "split": split.model_dump(mode="json"),
            "backbone": self.backbone.model_dump(mode="json"),
        }
        write = partial(write_prompts, longdocs, split, self.sizes, self.seeds, self.backbone)
        self.prompts = fill_once(options.out / "prompts", key, write)

    def zero_shot_runs(self) -> list[WritingRun]:
        """Return the runs of the model without a graft, one for each collection."""
        return [self._writing_run("zero_shot", corpus, f"zero_shot_{corpus}") for corpus in CORPORA]

    def grafted_runs(self, seed: int) -> list[WritingRun]:
        """Return the runs of the model with the graft of a seed, one for each collection."""
        runs = []
        for corpus in CORPORA:
            run = self._writing_run("grafted", corpus, f"grafted_{corpus}_s{seed}", depends_on=(f"graft_s{seed}",))
            runs.append(run)
        return runs

    def _writing_run(self, variant: str, corpus: str, run_id: str, depends_on: tuple[str, ...] = ()) -> WritingRun:
        scored, written = TEST[variant]
        return WritingRun(
            id=run_id,
            backbone=self.backbone,
            path=str(self.prompts / f"test_{corpus}.jsonl"),
            scored=scored,
            written=written,
            abstract=self.sizes.abstract,
            depends_on=depends_on,
        )

    def search_run(self, graft: Mapping[str, Any], rate: float) -> GraftRun:
        """Return a run of the search, which learns from the first documents of the first seed."""
        return self._graft_run(f"search_lr{rate:g}", graft, rate, self.seeds[0], SEARCH_STEPS)

    def graft_run(self, rate: float, seed: int) -> GraftRun:
        """Return a run of the graft, which learns from each of its documents once."""
        return self._graft_run(f"graft_s{seed}", GRAFT, rate, seed, self.sizes.train)

    def _graft_run(self, run_id: str, graft: Mapping[str, Any], rate: float, seed: int, max_steps: int) -> GraftRun:
        steps = min(max_steps, self.sizes.train // BATCH)
        training = training_config(
            steps,
            BATCH,
            rate,
            seed,
            warmup_steps=steps // 10,
            precision="bf16",
        )
        evaluation = {
            "limit_tokens": 2048,
            "own_tokens": 0,
            "batch_size": 4,
            "precision": "bf16",
            "decode_prompts": 0,
        }
        return GraftRun(
            id=run_id,
            backbone=self.backbone,
            graft=graft_config(dict(graft)),
            data=DataConfig.parse(self._data(seed)),
            training=training,
            evaluation=EvaluationConfig.parse(evaluation),
        )

    def _data(self, seed: int) -> dict[str, Any]:
        """Return the data of a graft: prompts with abstracts as new text, and a novel as old text."""
        novel = {
            "path": str(self.options.data / NOVELS),
            "documents": "20:21",
            "limit_characters": 60_000,
        }
        return {
            "new": [self._chats(f"train_{seed}")],
            "test": {"new": [self._chats("validation")], "old": [novel]},
            "replay_fraction": 0.0,
            "seed": seed,
            "length": self.sizes.window + 16,
            "boundaries": "whole",
        }

    def _chats(self, name: str) -> dict[str, str]:
        return {
            "path": str(self.prompts / f"{name}.jsonl"),
            "messages_column": "messages",
        }

    def details(self, runs: Sequence[WritingRun]) -> list[Mapping[str, Any]]:
        """Return the details of measured runs."""
        return [self.measured[run.id].details for run in runs]


def run(options: Options) -> Results:
    """Measure the bare model, search for the graft's learning rate, then train and measure the graft of each seed."""
    check_files(options, (*FILES, NOVELS))
    study = SummaryStudy(options)
    study.execute(study.zero_shot_runs(), "zero-shot")
    rate = _search_rate(study)
    for seed in study.seeds:
        study.execute([study.graft_run(rate, seed), *study.grafted_runs(seed)], f"seed {seed}")
    documents = _documents(study)
    bare = study.details(study.zero_shot_runs())
    grafted = [study.details(study.grafted_runs(seed)) for seed in study.seeds]
    variants = {
        "zero_shot": ([bare], bare),
        "grafted": (grafted, grafted[0]),
        "zero_shot_same": ([bare], grafted[0]),
    }
    rows: list[Row] = []
    minus: dict[str, Any] = {}
    losses: dict[str, Any] = {}
    for variant, (by_seed, like) in variants.items():
        metrics, minus[variant], losses[variant] = tabulate(by_seed, documents, like)
        for layout, values in metrics.items():
            rows.append(Row(id=f"{layout}_{variant}", label=f"{layout}, {variant}", metrics=values))
    names = [name for details in bare for name in details["texts"]["i"]]
    rows.extend(_rival_row(rival, documents, names) for rival in RIVALS)
    grafts = over_seeds([study.measured[f"graft_s{seed}"] for seed in study.seeds], "graft", "the graft")
    details = {
        "minus": minus,
        "by_seed": losses,
        "graft": grafts.model_dump(mode="json")["metrics"],
        "rate": rate,
        "searched": study.searched,
        "counts": read_rows(study.prompts / "counts.json")[0],
        "seconds": study.seconds,
    }
    return study.write(NAME, rows, aims=aims(minus), details=details)


def _search_rate(study: SummaryStudy) -> float:
    """Return the learning rate of the graft with the lowest loss on the validation documents."""
    candidates = {}
    for name, (graft, rates) in SEARCHED.items():
        candidates[name] = [study.search_run(graft, rate) for rate in rates]
    best = study.choose(candidates, ("new",), "the rates")
    return best["neutral"].training.learning_rate


def _documents(study: SummaryStudy) -> dict[str, dict[str, Any]]:
    """Return the rows of all test documents by name."""
    documents = {}
    for corpus in CORPORA:
        for row in read_rows(study.prompts / f"test_{corpus}.jsonl"):
            documents[row["id"]] = row
    return documents


def _rival_row(rival: str, documents: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> Row:
    """Return the row of an extract with which the summaries are compared."""
    values = text_values([rival_texts(documents, names, rival)], documents)
    metrics = {name: bootstrap(column) for name, column in values.items()}
    return Row(id=rival, label=RIVALS[rival], metrics={**metrics})


def aims(minus: Mapping[str, Any]) -> list[Aim]:
    """Return the aims of each variant.

    With the selected sentences, the loss is lower, its interval is below 0, and the share of unsupported sentences is
    not larger.
    """
    made = []
    for variant in TEST:
        loss = minus[variant]["abstract_nll_i"]
        unsupported = minus[variant]["unsupported_share_i"]["high"]
        made.append(
            aim(f"nats, ie_selected less i, {variant}", "abstract_nll", -0.1, loss["mean"], operator.le),
        )
        made.append(
            aim(f"upper end of its interval, {variant}", "abstract_nll", 0.0, loss["high"]),
        )
        made.append(
            aim(
                f"upper end of unsupported, less i, {variant}",
                "unsupported_share",
                0.0,
                unsupported,
                operator.le,
            )
        )
    return made
