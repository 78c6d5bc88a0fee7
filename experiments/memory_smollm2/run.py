"""SmolLM2 reads long documents with a window of 512 tokens: what a memory of the text before gives back.

Rows are trained on the same rows of long documents and of recall, each at the rate that its own search on validation
text chose. All are measured on whole documents, read in pieces on one cache.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from experiments import Options
from experiments.composed import PromptedRun
from experiments.keep_smollm2.run import MODEL
from experiments.memory_smollm2.texts import SOURCES, Sizes, read_ids, write_texts
from experiments.study import Study, aim, bars, check_files, numbers_of, over_seeds, training_config
from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Aim, Results, Row, combine_seeds, value_of
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
RATES = {"memory": (1e-3, 2e-3, 4e-3), "lora_window": (3e-4, 1e-3, 3e-3), "lora_full": (1e-3, 3e-3)}
TRAINED = tuple(RATES)
QUICK_SIZES = Sizes(row=64, document=96, pairs=2, tested=1, validated=1, recall=1, trained=6)
BATCH, TOGETHER = 4, 2  # rows of a step, and of a pass
CHUNK = 1024  # tokens of a pass over a long text
CHOSEN_BY = ("validation_nats_beyond", "validation_recall_nats")
PREFIXES = {"validation": "validation_", "test": ""}  # of metrics
COSTS = ("decode_step_ratio", "memory_bytes_ratio")


class LongTextRun(PromptedRun):
    """A row, measured on the long documents and the texts of recall of both parts.

    Args:
        texts: the folder of `write_texts`.
        window: tokens behind which `nats_beyond` begins.
        far: the cost of a step is measured behind so many tokens and behind a 32nd of them; 0 leaves it out.
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
        texts = [ids for ids, _ in read_ids(Path(self.texts) / f"{part}.jsonl")]
        nats = [scores(model, ids)[0] for ids in texts]
        within = [text[: self.window - 1].mean() for text in nats]
        beyond = [float(text[self.window - 1 :].mean()) for text in nats]
        far = [gain_of_far(model, ids, text, self.window) for ids, text in zip(texts, nats, strict=True)]
        metrics = {"nats_within": bootstrap(within), "nats_beyond": bootstrap(beyond), "gain_of_far": bootstrap(far)}
        return metrics | recall_of(model, Path(self.texts) / f"{part}-recall.jsonl"), beyond


@torch.inference_mode()
def scores(model: Any, ids: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(T - 1,) nats of each token of a text (1, T) behind its first, float64, and whether it is the likeliest.

    The text is read in pieces on one cache.
    """
    cache, nats, hits = None, [], []
    ids = ids.to(model.device)
    for inputs, expected in zip(ids.split(CHUNK, dim=1), ids[0, 1:].split(CHUNK), strict=False):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[0, : len(expected)].float()
        nats.append(-logits.log_softmax(-1).gather(1, expected[:, None])[:, 0].double())
        hits.append(logits.argmax(-1) == expected)
    return torch.cat(nats).cpu().numpy(), torch.cat(hits).cpu().numpy()


def gain_of_far(model: Any, ids: torch.Tensor, nats: np.ndarray, window: int) -> float:
    """Nats per token that a text (1, T) has more when it is read in pieces of two windows, each from an empty cache.

    The second half of each piece counts, but not that of the first, which is the same. `nats` are those of `scores`.
    """
    whole = np.append(0.0, nats)[: ids.shape[1] // (2 * window) * 2 * window].reshape(-1, 2 * window)[1:, window:]
    parts = ids[:, 2 * window :][:, : 2 * whole.size].reshape(-1, 2 * window).to(model.device)
    logits = model(input_ids=parts, use_cache=False).logits[:, window - 1 : -1].float()
    return float(cross_entropy(logits.flatten(0, 1), parts[:, window:].flatten())) - float(whole.mean())


def recall_of(model: Any, path: Path) -> dict[str, Any]:
    """Percent of answers whose every token is the likeliest, and nats of an answer."""
    right, answered = [], []
    for ids, values in read_ids(path):
        nats, hits = scores(model, ids)
        for start, stop in values["answers"]:
            right.append(bool(hits[start - 1 : stop - 1].all()))
            answered.append(nats[start - 1 : stop - 1].sum())
    share = share_interval(sum(right), len(right))
    percent = share.model_copy(update={key: 100 * getattr(share, key) for key in ("mean", "low", "high")})
    return {"recall_16_windows": percent, "recall_nats": bootstrap(answered)}


def lookup_of(path: Path, window: int) -> dict[str, float]:
    """Percent of answers that follow the last two tokens where these last stood together, more than a window before."""
    right = []
    for (ids,), values in read_ids(path):
        for start, stop in values["answers"]:
            seen = ids[: start - window - (stop - start)].unfold(0, 2, 1)
            at = (seen == ids[start - 2 : start]).all(-1).nonzero()[-1:, 0] + 2
            right += [bool(len(at)) and ids[at : at + stop - start].tolist() == ids[start:stop].tolist()]
    return {"recall_16_windows": 100 * sum(right) / len(right)}


def cost_of(model: Any, far: int) -> dict[str, float]:
    """Shortest of 32 decode steps, and bytes of the cache behind `far` tokens, over those behind a 32nd of them."""
    ids, cache, times, sizes = torch.arange(far, device=model.device)[None] % 97 + 3, None, [], []
    for number, chunk in enumerate(ids.split(far // 32, dim=1)):
        cache = model(input_ids=chunk, past_key_values=cache, use_cache=True).past_key_values
        if number in (0, 31):
            sizes.append(cache_bytes(cache))
            times.append(min(_step(model, cache) for _ in range(32)))
    return {"decode_step_ratio": times[1] / times[0], "memory_bytes_ratio": sizes[1] / sizes[0]}


def _step(model: Any, cache: Any) -> float:
    token, start = torch.tensor([[5]], device=model.device), time.perf_counter()
    model(input_ids=token, past_key_values=cache, use_cache=True).logits.argmax(-1).tolist()  # waits for the device
    return time.perf_counter() - start


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors in a cache."""
    values = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in {id(value): value for value in values}.values())


class MemoryStudy(Study):
    """The runs of the experiment."""

    def __init__(self, options: Options, window: int, sizes: Sizes, steps: int) -> None:
        super().__init__(options)
        self.window, self.sizes, self.steps = window, sizes, steps
        self.backbone = BackboneConfig(name=options.backbone or MODEL, dtype="bfloat16", device=options.device)
        loaded = self.backbone.load()
        self.texts = write_texts(options.data, options.out / "texts", loaded.need_tokenizer(), sizes, window)
        self.grafts = self._grafts(loaded)

    def _grafts(self, backbone: Backbone) -> dict[str, dict[str, Any] | None]:
        window: dict[str, Any] = {"kind": "memory", "window": self.window, "state": "none"}
        memory = {"kind": "memory", "window": self.window}
        memory |= {"head_width": 8, "heads": 2} if self.options.quick else {}
        extra = count_parameters(build_graft(graft_config(memory), backbone).parameters())
        lora = {"kind": "lora", "capacity": extra / count_parameters(backbone.model.parameters())}
        read = {"full": None, "window": window | {"sinks": 0}, "window_sinks": window}
        return read | {"memory": memory, "lora_window": lora, "lora_full": lora}

    def cell(self, row: str, rate: float = 1e-3, seed: int = 0) -> LongTextRun:
        """A row at one rate, for one seed."""
        graft, steps = self.grafts[row], self.steps if row in TRAINED else 0
        train = [{"path": str(self.texts / "train.jsonl"), "prompt_column": "prompt"}]
        data = {"new": train, "replay_fraction": 0.0, "length": self.sizes.row, "boundaries": "whole", "seed": seed}
        more = {"warmup_steps": min(16, steps // 3), "checkpoint_every": max(1, steps), "micro_batch_size": TOGETHER}
        return LongTextRun(
            id=f"{row}_lr{rate:g}_s{seed}" if row in TRAINED else row,
            label=LABELS[row],
            backbone=self.backbone,
            graft=None if graft is None else graft_config(graft),
            data=DataConfig.parse(data),
            training=training_config(steps, BATCH, rate, seed, precision="bf16", **more),
            evaluation=EvaluationConfig(decode_prompts=0, own_tokens=0, precision="bf16"),
            texts=str(self.texts),
            window=self.window,
            depends_on=("window_sinks",) if row == "lora_window" else (),
            far=self._far(row, seed),
        )

    def _far(self, row: str, seed: int) -> int:
        measured = not row.startswith("lora") and seed == self.seeds[0]
        return 32 * (24 if self.options.quick else 1024) * measured

    def bare(self) -> dict[str, list[LongTextRun]]:
        """The rows that are not trained."""
        return {row: [self.cell(row)] for row in LABELS if row not in TRAINED}


def run(options: Options) -> Results:
    """Measure all rows."""
    check_files(options, tuple(SOURCES.values()))
    quick = options.quick
    study = MemoryStudy(options, 16 if quick else 512, QUICK_SIZES if quick else Sizes(), 2 if quick else 128)
    bare = study.bare()
    rates = {row: of[:1] if quick else of for row, of in RATES.items()}
    candidates = {row: [study.cell(row, rate) for rate in rates[row]] for row in TRAINED}
    chosen = study.choose(candidates, CHOSEN_BY, "the search", needs=[run for of in bare.values() for run in of])
    best = {row: chosen[row].training.learning_rate for row in TRAINED}
    runs = bare | {row: [study.cell(row, best[row], seed) for seed in study.seeds] for row in TRAINED}
    study.execute([run for of_row in runs.values() for run in of_row], NAME)
    measured = {row: [study.measured[run.id] for run in runs[row]] for row in LABELS}
    parts = {prefix: lookup_of(study.texts / f"{part}-recall.jsonl", study.window) for part, prefix in PREFIXES.items()}
    known: dict[str, Any] = {prefix + name: value for prefix, of in parts.items() for name, value in of.items()}
    rows = [*rows_of(measured), Row(id="lookup", label="a table of what followed two tokens, no model", metrics=known)]
    details = study.evidence(runs) | {"rates": best, "seconds": study.seconds, "sizes": study.sizes._asdict()}
    tried = [study.measured[run.id].row.model_copy(update={"id": run.id}) for of in candidates.values() for run in of]
    details |= {"differences": differences(measured), "by_rate": numbers_of(tried)}
    shown = {"nats_within": "within the window", "nats_beyond": "beyond it"}
    plots = {"nats": bars(rows, shown, "nats per token")}
    return study.write(NAME, rows, plots=plots, details=details, aims=aims(rows))


def rows_of(measured: Mapping[str, Sequence[Measurement]]) -> list[Row]:
    """The rows over their seeds, with what a step costs, which the first seed alone measures."""
    rows = [over_seeds(of_row, row, LABELS[row]) for row, of_row in measured.items()]
    for row in rows:
        first = measured[row.id][0].row.metrics
        row.metrics.update({name: first[name] for name in COSTS if name in first})
    return rows


def differences(measured: Mapping[str, Sequence[Measurement]]) -> dict[str, Any]:
    """Nats beyond the window, `memory` less another row: of each seed, and the interval over documents."""
    values = {row: [np.array(of.details["nats_beyond"]) for of in of_row] for row, of_row in measured.items()}
    over: dict[str, Any] = {}
    for other in ("window_sinks", "lora_window", "full"):
        pairs = [a - values[other][i % len(values[other])] for i, a in enumerate(values["memory"])]
        over[other] = {
            "by_seed": [float(pair.mean()) for pair in pairs],
            "over_seeds": combine_seeds([float(pair.mean()) for pair in pairs]).model_dump(),
            "over_documents": bootstrap(np.mean(pairs, axis=0)).model_dump(),
        }
    return over


def aims(rows: Sequence[Row]) -> list[Aim]:
    """Half of the gap beyond the window, recall, and constant cost."""
    value = {row.id: {name: value_of(metric) for name, metric in row.metrics.items()} for row in rows}
    sinks, memory, full = (value[row]["nats_beyond"] for row in ("window_sinks", "memory", "full"))
    share, recall = (sinks - memory) / (sinks - full), "recall_16_windows"
    shown = [aim("memory closes at least half of the gap to full attention", "nats_beyond", 0.5, share, operator.ge)]
    shown.append(aim("memory recalls at least 90%", recall, 90.0, value["memory"][recall], operator.ge))
    return shown + [aim(f"memory: {name}", name, 1.1, value["memory"][name], operator.le) for name in COSTS]
