"""SmolLM2 reads long documents with a window of 512 tokens: how much does a memory of the earlier text recover?

All trained rows read the same rows of long documents and of recall, each at the learning rate that its own search on
validation text chose. All rows are measured on whole documents, which are read in pieces on one cache.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from experiments import Options
from experiments.composed import PromptedRun
from experiments.keep_smollm2.run import MODEL
from experiments.memory_smollm2.texts import SOURCES, Sizes, read_ids, write_texts
from experiments.study import (
    Study,
    aim,
    all_runs,
    bars,
    check_files,
    numbers_of,
    over_seeds,
    training_config,
)
from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Aim, Interval, Results, Row, combine_seeds
from graftlm.evaluation.cost import count_parameters
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.evaluation.inference import evaluation_mode
from graftlm.evaluation.intervals import bootstrap, share_interval
from graftlm.evaluation.measurement import Measurement
from graftlm.grafts import build_graft, graft_config

NAME = "memory-smollm2"
LABELS = {
    "full": "full attention (the bound)",
    "window": "window",
    "window_sinks": "window with sinks",
    "memory": "memory",
    "lora_window": "LoRA of equal size, window with sinks",
    "lora_full": "LoRA of equal size, full attention",
}
RATES = {
    "memory": (1e-3, 2e-3, 4e-3),
    "lora_window": (3e-4, 1e-3, 3e-3),
    "lora_full": (1e-3, 3e-3),
}
TRAINED = tuple(RATES)
QUICK_SIZES = Sizes(
    row=64,
    document=96,
    pairs=2,
    tested=1,
    validated=1,
    recall=1,
    trained=6,
)
BATCH = 4  # rows of a step
TOGETHER = 2  # rows of a forward pass
CHUNK = 1024  # tokens of a forward pass over a long text
DECODE_STEPS = 32  # decode steps of which the shortest is measured
CHOSEN_BY = ("validation_nats_beyond", "validation_recall_nats")
PREFIXES = {"validation": "validation_", "test": ""}  # prefixes of metrics, by part
COSTS = ("decode_step_ratio", "memory_bytes_ratio")


class LongTextRun(PromptedRun):
    """A row, measured on the long documents and the texts of recall of both parts.

    Args:
        texts: folder of `write_texts`.
        window: tokens after which `nats_beyond` begins.
        far: tokens after which the cost of a decode step is compared with the cost after a 32nd of them; 0 skips this.
    """

    texts: str
    window: int
    far: int = 0

    def add_tasks(self, measurement: Measurement, model: Any, tokenizer: Any) -> None:
        with evaluation_mode(model), torch.inference_mode():
            for part, prefix in PREFIXES.items():
                metrics, beyond = self._part(model, part)
                measurement.add_metrics({f"{prefix}{name}": value for name, value in metrics.items()})
                measurement.details[f"{prefix}nats_beyond"] = beyond
            if self.far:
                measurement.add_metrics(cost_of(model, self.far))

    def _part(self, model: Any, part: str) -> tuple[dict[str, Any], list[float]]:
        """Return the metrics of one part, and the nats beyond the window of each document."""
        folder = Path(self.texts)
        boundary = self.window - 1
        within = []
        beyond = []
        gains = []
        for ids, _ in read_ids(folder / f"{part}.jsonl"):
            nats, _ = scores(model, ids)
            within.append(nats[:boundary].mean())
            beyond.append(float(nats[boundary:].mean()))
            gains.append(gain_of_far(model, ids, nats, self.window))
        metrics = {
            "nats_within": bootstrap(within),
            "nats_beyond": bootstrap(beyond),
            "gain_of_far": bootstrap(gains),
            **recall_of(model, folder / f"{part}-recall.jsonl"),
        }
        return metrics, beyond


@torch.inference_mode()
def scores(model: Any, ids: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Score the tokens of a text, which is read in pieces on one cache.

    Args:
        model: a causal language model.
        ids: (1, T) token ids.

    Returns:
        (T - 1,) float64 nats of each token after the first, and (T - 1,) whether it is the most likely token.
    """
    cache = None
    nats = []
    hits = []
    ids = ids.to(model.device)
    next_ids = ids[0, 1:]
    for inputs, expected in zip(ids.split(CHUNK, dim=1), next_ids.split(CHUNK), strict=False):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits = output.logits[0, : len(expected)].float()
        log_probabilities = logits.log_softmax(-1)
        nats.append(-log_probabilities.gather(1, expected[:, None])[:, 0].double())
        hits.append(logits.argmax(-1) == expected)
    return torch.cat(nats).cpu().numpy(), torch.cat(hits).cpu().numpy()


def gain_of_far(model: Any, ids: Tensor, nats: np.ndarray, window: int) -> float:
    """Return the nats per token that a text costs more if it is read in pieces of two windows, each with a new cache.

    Only the second half of each piece counts, and the first piece does not, because it is read in the same way.

    Args:
        model: a causal language model.
        ids: (1, T) token ids.
        nats: (T - 1,) nats of `scores`.
        window: tokens of a window.
    """
    piece = 2 * window
    complete = ids.shape[1] // piece * piece
    nats_of_tokens = np.append(0.0, nats)  # the first token has no prediction
    pieces = nats_of_tokens[:complete].reshape(-1, piece)
    whole = pieces[1:, window:]
    parts = ids[:, piece:complete].reshape(-1, piece).to(model.device)
    all_logits = model(input_ids=parts, use_cache=False).logits
    logits = all_logits[:, window - 1 : -1].float()
    targets = parts[:, window:]
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
    return float(loss) - float(whole.mean())


def recall_of(model: Any, path: Path) -> dict[str, Interval]:
    """Return the percentage of answers whose every token is the most likely one, and nats per answer."""
    right = []
    nats_of_answers = []
    for ids, values in read_ids(path):
        nats, hits = scores(model, ids)
        for start, stop in values["answers"]:
            tokens = slice(start - 1, stop - 1)
            right.append(bool(hits[tokens].all()))
            nats_of_answers.append(nats[tokens].sum())
    share = share_interval(sum(right), len(right))
    percent = share.model_copy(
        update={
            "mean": 100 * share.mean,
            "low": 100 * share.low,
            "high": 100 * share.high,
        }
    )
    return {
        "recall_16_windows": percent,
        "recall_nats": bootstrap(nats_of_answers),
    }


def lookup_of(path: Path, window: int) -> dict[str, float]:
    """Return the percentage of answers that a table of bigrams gives.

    The table predicts the successor of the last two tokens at their last joint occurrence more than a window before.
    """
    right = []
    for (ids,), values in read_ids(path):
        for start, stop in values["answers"]:
            length = stop - start
            pairs = ids[: start - window - length].unfold(0, 2, 1)
            occurs = (pairs == ids[start - 2 : start]).all(-1)
            positions = occurs.nonzero()[:, 0].tolist()
            if not positions:
                right.append(False)
                continue
            after = positions[-1] + 2
            right.append(ids[after : after + length].tolist() == ids[start:stop].tolist())
    return {"recall_16_windows": 100 * sum(right) / len(right)}


def cost_of(model: Any, far: int) -> dict[str, float]:
    """Return the cost of a decode step and the size of the cache after `far` tokens, over those after a 32nd of them.

    The time of a step is the shortest of 32.
    """
    ids = torch.arange(far, device=model.device)[None] % 97 + 3
    cache = None
    times = []
    sizes = []
    for number, chunk in enumerate(ids.split(far // 32, dim=1)):
        cache = model(input_ids=chunk, past_key_values=cache, use_cache=True).past_key_values
        if number in (0, 31):
            sizes.append(cache_bytes(cache))
            times.append(min(_step(model, cache) for _ in range(DECODE_STEPS)))
    return {
        "decode_step_ratio": times[1] / times[0],
        "memory_bytes_ratio": sizes[1] / sizes[0],
    }


def _step(model: Any, cache: Any) -> float:
    """Return the seconds of one decode step."""
    token = torch.tensor([[5]], device=model.device)
    start = time.perf_counter()
    logits = model(input_ids=token, past_key_values=cache, use_cache=True).logits
    logits.argmax(-1).tolist()  # waits for the device
    return time.perf_counter() - start


def cache_bytes(cache: Any) -> int:
    """Return the bytes of all tensors in a cache."""
    tensors = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            if isinstance(value, Tensor):
                tensors[id(value)] = value  # layers may share a tensor
    return sum(tensor.nbytes for tensor in tensors.values())


class MemoryStudy(Study):
    """The runs of the experiment.

    Args:
        options: options of the experiment.
        window: tokens of the window.
        sizes: sizes of texts.
        steps: training steps.

    Attributes:
        backbone: config of the backbone.
        texts: folder of `write_texts`.
        grafts: config of each row's graft; None for the backbone without one.
    """

    def __init__(self, options: Options, window: int, sizes: Sizes, steps: int) -> None:
        super().__init__(options)
        self.window = window
        self.sizes = sizes
        self.steps = steps
        self.backbone = BackboneConfig(name=options.backbone or MODEL, dtype="bfloat16", device=options.device)
        loaded = self.backbone.load()
        self.texts = write_texts(options.data, options.out / "texts", loaded.need_tokenizer(), sizes, window)
        self.grafts = self._grafts(loaded)

    def _grafts(self, backbone: Backbone) -> dict[str, dict[str, Any] | None]:
        window: dict[str, Any] = {"kind": "memory", "window": self.window, "state": "none"}
        memory: dict[str, Any] = {"kind": "memory", "window": self.window}
        if self.options.quick:
            memory["head_width"] = 8
            memory["heads"] = 2
        added = count_parameters(build_graft(graft_config(memory), backbone).parameters())
        lora = {"kind": "lora", "capacity": added / count_parameters(backbone.model.parameters())}
        return {
            "full": None,
            "window": {**window, "sinks": 0},
            "window_sinks": window,
            "memory": memory,
            "lora_window": lora,
            "lora_full": lora,
        }

    def cell(self, row: str, rate: float = 1e-3, seed: int = 0) -> LongTextRun:
        """Return the run of a row at one rate with one seed."""
        graft = self.grafts[row]
        is_trained = row in TRAINED
        steps = self.steps if is_trained else 0
        source = {
            "path": str(self.texts / "train.jsonl"),
            "prompt_column": "prompt",
        }
        data = {
            "new": [source],
            "replay_fraction": 0.0,
            "length": self.sizes.row,
            "boundaries": "whole",
            "seed": seed,
        }
        return LongTextRun(
            id=f"{row}_lr{rate:g}_s{seed}" if is_trained else row,
            label=LABELS[row],
            backbone=self.backbone,
            graft=None if graft is None else graft_config(graft),
            data=DataConfig.parse(data),
            training=training_config(
                steps,
                BATCH,
                rate,
                seed,
                precision="bf16",
                warmup_steps=min(16, steps // 3),
                checkpoint_every=max(1, steps),
                micro_batch_size=TOGETHER,
            ),
            evaluation=EvaluationConfig(decode_prompts=0, own_tokens=0, precision="bf16"),
            texts=str(self.texts),
            window=self.window,
            depends_on=("window_sinks",) if row == "lora_window" else (),
            far=self._far(row, seed),
        )

    def _far(self, row: str, seed: int) -> int:
        """Return after how many tokens the cost of a step is measured; only the first seed measures it."""
        if row.startswith("lora") or seed != self.seeds[0]:
            return 0
        return 32 * (24 if self.options.quick else 1024)

    def bare(self) -> dict[str, list[LongTextRun]]:
        """Return the runs of the rows that are not trained."""
        return {row: [self.cell(row)] for row in LABELS if row not in TRAINED}


def run(options: Options) -> Results:
    """Search every trained row's rate, and measure all rows."""
    check_files(options, tuple(SOURCES.values()))
    if options.quick:
        study = MemoryStudy(options, window=16, sizes=QUICK_SIZES, steps=2)
    else:
        study = MemoryStudy(options, window=512, sizes=Sizes(), steps=128)
    runs = study.bare()
    candidates = {}
    for row, rates in RATES.items():
        tried = rates[:1] if options.quick else rates
        candidates[row] = [study.cell(row, rate) for rate in tried]
    chosen = study.choose(candidates, CHOSEN_BY, "the search", needs=all_runs(runs))
    best = {row: chosen[row].training.learning_rate for row in TRAINED}
    for row in TRAINED:
        runs[row] = [study.cell(row, best[row], seed) for seed in study.seeds]
    study.execute(all_runs(runs), NAME)
    measured = {row: [study.measured[run.id] for run in runs[row]] for row in LABELS}
    rows = [*rows_of(measured), _lookup_row(study)]
    tried_rows = []
    for run_of_search in all_runs(candidates):
        row = study.measured[run_of_search.id].row
        tried_rows.append(row.model_copy(update={"id": run_of_search.id}))
    details = {
        **study.evidence(runs),
        "rates": best,
        "seconds": study.seconds,
        "sizes": study.sizes._asdict(),
        "differences": differences(measured),
        "by_rate": numbers_of(tried_rows),
    }
    shown = {
        "nats_within": "within the window",
        "nats_beyond": "beyond it",
    }
    plots = {"nats": bars(rows, shown, "nats per token")}
    return study.write(NAME, rows, plots=plots, details=details, aims=aims(rows))


def _lookup_row(study: MemoryStudy) -> Row:
    """Return the row of a table of bigrams, without a model."""
    metrics: dict[str, Any] = {}
    for part, prefix in PREFIXES.items():
        for name, value in lookup_of(study.texts / f"{part}-recall.jsonl", study.window).items():
            metrics[f"{prefix}{name}"] = value
    return Row(id="lookup", label="a table of what followed two tokens, no model", metrics=metrics)


def rows_of(measured: Mapping[str, Sequence[Measurement]]) -> list[Row]:
    """Return the rows over their seeds, with the cost of a step, which only the first seed measures."""
    rows = []
    for name, measurements in measured.items():
        row = over_seeds(measurements, name, LABELS[name])
        first = measurements[0].row.metrics
        row.metrics.update({cost: first[cost] for cost in COSTS if cost in first})
        rows.append(row)
    return rows


def differences(measured: Mapping[str, Sequence[Measurement]]) -> dict[str, Any]:
    """Return nats beyond the window of `memory` less another row's, by seed and with an interval over documents."""
    values = {}
    for row, measurements in measured.items():
        values[row] = [np.array(measurement.details["nats_beyond"]) for measurement in measurements]
    compared: dict[str, Any] = {}
    for other in ("window_sinks", "lora_window", "full"):
        pairs = []
        for index, memory in enumerate(values["memory"]):
            rival = values[other][index % len(values[other])]  # an untrained row has one measurement for all seeds
            pairs.append(memory - rival)
        by_seed = [float(pair.mean()) for pair in pairs]
        compared[other] = {
            "by_seed": by_seed,
            "over_seeds": combine_seeds(by_seed).model_dump(),
            "over_documents": bootstrap(np.mean(pairs, axis=0)).model_dump(),
        }
    return compared


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Return the aims: half of the gap beyond the window, recall, and constant cost."""
    values = numbers_of(rows)
    memory = values["memory"]
    sinks = values["window_sinks"]["nats_beyond"]
    full = values["full"]["nats_beyond"]
    share = (sinks - memory["nats_beyond"]) / (sinks - full)
    recall = "recall_16_windows"
    shown = [
        aim("memory closes at least half of the gap to full attention", "nats_beyond", 0.5, share, operator.ge),
        aim("memory recalls at least 90%", recall, 90.0, memory[recall], operator.ge),
    ]
    costs = [aim(f"memory: {name}", name, 1.1, memory[name], operator.le) for name in COSTS]
    return [*shown, *costs]
