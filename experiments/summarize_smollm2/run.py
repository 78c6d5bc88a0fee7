"""SmolLM2 writes abstracts of technical proposals: does an extract help it beside the introduction?"""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from experiments import Options
from experiments.study import Study, aim, check_files, over_seeds, training_config
from experiments.summarize.corpora import CORPORA, FILES
from experiments.summarize.run import FULL, QUICK
from experiments.summarize_smollm2.prompts import PromptSizes, write_prompts
from graftlm import GraftedModel, graft_config, load_graft
from graftlm.backbone.load import BackboneConfig
from graftlm.data import DataConfig
from graftlm.evaluation import Aim, Metric, Results, Row, Scores, bootstrap, paired_difference
from graftlm.evaluation.evaluator import EvaluationConfig
from graftlm.evaluation.measurement import Measurement
from graftlm.files.writing import fill_once
from graftlm.pipelines.summarize import LanguageModelWriter, SummaryDecoding, read_text
from graftlm.pipelines.summarize.metrics import default_encoder, faithfulness, rouge
from graftlm.pipelines.summarize.summary import link_sentences
from graftlm.pipelines.summarize.text import ngrams, split_words
from graftlm.pipelines.summarize.writer import drop_partial_sentence
from graftlm.runs.graft_run import GraftRun, load_shared
from graftlm.runs.run import Run, RunContext

NAME, MODEL, NOVELS = "summarize-smollm2", "smollm2-135m-instruct", "lm_text/eltec_eng.jsonl"
LAYOUTS, WRITTEN = ("i", "ie_gold", "ie_selected", "ie_random", "i_long"), ("i", "ie_gold", "ie_selected")
RIVALS = {"extract": "the default selector", "introduction": "start of the introduction", "lead3": "Lead-3"}
GRAFT = {"kind": "neutral-residues", "capacity": 0.1, "alpha": 10.0, "init": "he"}  # as keep-smollm2 chose
SEARCHED = {"neutral": (GRAFT, (1.5e-3, 3e-3, 6e-3)), "lora": ({"kind": "lora", "capacity": 0.1}, (5e-4, 1e-3, 2e-3))}
BATCH, SEARCH_STEPS, TEST = 2, 12, {"zero_shot": (30, 12), "grafted": (20, 6)}  # scored, summarized a collection


class WritingRun(Run):
    """Scores the abstracts of `scored` documents behind every layout, and summarizes `written`, with a graft if any."""

    backbone: BackboneConfig
    path: str
    scored: int
    written: int
    abstract: int  # tokens of a summary at most

    def measure(self, context: RunContext) -> Measurement:
        backbone, rows, texts = load_shared(self.backbone), read_rows(Path(self.path)), dict[str, Any]()
        grafts = {name: load_graft(folder / "graft", backbone) for name, folder in context.dependencies.items()}
        with GraftedModel(backbone, grafts).eval() if grafts else nullcontext():
            nats = {row["id"]: abstract_nats(backbone.model, row) for row in rows[: self.scored]}
            decoding = SummaryDecoding(max_new_tokens=self.abstract, no_repeat_ngram_size=0)
            writer = LanguageModelWriter(backbone.model, backbone.need_tokenizer(), decoding=decoding)
            for name in WRITTEN:
                written = writer.complete_batch([row["start"] + row["prompts"][name] for row in rows[: self.written]])
                clean = (drop_partial_sentence(text.strip()) if cut else text.strip() for text, cut in written)
                texts[name] = {row["id"]: text for row, text in zip(rows, clean, strict=False)}
        row = Row(id=self.id, label=self.id, metrics={"documents": len(nats), "summaries": len(texts["i"])})
        return Measurement(row, {"nats": nats, "texts": texts})


@torch.inference_mode()
def abstract_nats(model: Any, row: Mapping[str, Any]) -> dict[str, float]:
    """-log p of a document's abstract behind each layout's prompt, in nats; the prompts' common start is read once."""
    cache = model(input_ids=torch.tensor([row["start"]], device=model.device), use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(row["prompts"]))
    answer, nats = torch.tensor(row["answer"], device=model.device), {}
    ids = [torch.tensor([*prompt, *row["answer"]], device=model.device) for prompt in row["prompts"].values()]
    logits_BTV = model(
        input_ids=nn.utils.rnn.pad_sequence(ids, batch_first=True), past_key_values=cache, use_cache=True
    ).logits
    for (name, prompt), logits_TV in zip(row["prompts"].items(), logits_BTV, strict=True):
        predicted = logits_TV[len(prompt) - 1 : len(prompt) + len(answer) - 1].float()
        nats[name] = float(nn.functional.cross_entropy(predicted, answer, reduction="sum"))
    return nats


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of prompts."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


class SummaryStudy(Study):
    """The runs of the experiment."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.sizes = PromptSizes(400, 24, 1, 2, 4) if options.quick else PromptSizes()
        self.backbone = BackboneConfig(name=options.backbone or MODEL, dtype="bfloat16", device=options.device)
        longdocs, split = str(options.data / "longdocs"), QUICK if options.quick else FULL
        values: dict[str, Any] = {"longdocs": longdocs, "sizes": self.sizes._asdict(), "seeds": list(self.seeds)}
        values |= {"split": split.model_dump(mode="json"), "backbone": self.backbone.model_dump(mode="json")}
        write = partial(write_prompts, longdocs, split, self.sizes, self.seeds, self.backbone)
        self.prompts = fill_once(options.out / "prompts", values, write)

    def writing_runs(self, variant: str, seed: int) -> list[WritingRun]:
        """One for each collection."""
        (scored, written), grafted = TEST[variant], variant == "grafted"
        fields: dict[str, Any] = {"backbone": self.backbone, "scored": scored, "written": written}
        fields |= {"abstract": self.sizes.abstract, "depends_on": (f"graft_s{seed}",) if grafted else ()}
        paths = {f"{variant}_{name}": str(self.prompts / f"test_{name}.jsonl") for name in CORPORA}
        return [WritingRun(id=f"{n}_s{seed}" if grafted else n, path=path, **fields) for n, path in paths.items()]

    def graft_run(self, graft: dict[str, Any], rate: float, seed: int, *, search: bool = False) -> GraftRun:
        """A graft that reads its documents once; a search reads the first of them."""
        steps = min(SEARCH_STEPS if search else self.sizes.train, self.sizes.train // BATCH)
        files = (self.prompts / f"{name}.jsonl" for name in (f"train_{seed}", "validation"))
        train, validation = ({"path": str(file), "messages_column": "messages"} for file in files)
        novel = {"path": str(self.options.data / NOVELS), "documents": "20:21", "limit_characters": 60_000}
        data = {"new": [train], "test": {"new": [validation], "old": [novel]}, "replay_fraction": 0.0, "seed": seed}
        data |= {"length": self.sizes.window + 16, "boundaries": "whole"}
        evaluation = {"limit_tokens": 2048, "own_tokens": 0, "batch_size": 4, "precision": "bf16", "decode_prompts": 0}
        parts: dict[str, Any] = {"data": DataConfig.parse(data), "evaluation": EvaluationConfig.parse(evaluation)}
        parts |= {"backbone": self.backbone, "graft": graft_config(graft)}
        parts["training"] = training_config(steps, BATCH, rate, seed, warmup_steps=steps // 10, precision="bf16")
        return GraftRun(id=f"search_lr{rate:g}" if search else f"graft_s{seed}", **parts)


def run(options: Options) -> Results:
    """Measure the model as it is, search the graft's rate, then train and measure each seed's."""
    check_files(options, (*FILES, NOVELS))
    study = SummaryStudy(options)
    study.execute(study.writing_runs("zero_shot", 0), "zero-shot")
    searched = {n: [study.graft_run(g, r, study.seeds[0], search=True) for r in rs] for n, (g, rs) in SEARCHED.items()}
    rate = study.choose(searched, ("new",), "the rates")["neutral"].training.learning_rate
    for seed in study.seeds:
        study.execute([study.graft_run(GRAFT, rate, seed), *study.writing_runs("grafted", seed)], f"seed {seed}")
    documents = {row["id"]: row for name in CORPORA for row in read_rows(study.prompts / f"test_{name}.jsonl")}
    rows, details = list[Row](), dict[str, Any](minus={}, by_seed={})
    bare = [study.measured[run.id].details for run in study.writing_runs("zero_shot", 0)]
    runs = [[study.measured[run.id].details for run in study.writing_runs("grafted", seed)] for seed in study.seeds]
    variants = {"zero_shot": ([bare], bare), "grafted": (runs, runs[0]), "zero_shot_same": ([bare], runs[0])}
    for variant, (of_seeds, like) in variants.items():
        metrics, details["minus"][variant], details["by_seed"][variant] = tabulate(of_seeds, documents, like)
        rows += [Row(id=f"{n}_{variant}", label=f"{n}, {variant}", metrics=values) for n, values in metrics.items()]
    for rival, label in RIVALS.items():
        texts = {name: " ".join(documents[name]["rivals"][rival]) for of in bare for name in of["texts"]["i"]}
        values = text_values([texts], documents)
        rows.append(Row(id=rival, label=label, metrics={name: bootstrap(of) for name, of in values.items()}))
    grafts = over_seeds([study.measured[f"graft_s{seed}"] for seed in study.seeds], "graft", "the graft")
    details |= {"graft": grafts.model_dump(mode="json")["metrics"], "rate": rate, "searched": study.searched}
    details |= {"counts": read_rows(study.prompts / "counts.json")[0], "seconds": study.seconds}
    return study.write(NAME, rows, aims=aims(details["minus"]), details=details)


def tabulate(runs: Sequence[Any], documents: Mapping[str, Any], like: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Metrics by layout, `ie_selected` less others, and losses by seed.

    All are over the documents of `like`, each with the mean of its seeds; `runs` are details by seed and collection.
    """
    scored, written = [n for run in like for n in run["nats"]], {n for run in like for n in run["texts"]["i"]}
    tokens = np.array([len(documents[name]["answer"]) for name in scored])
    texts = {n: [{k: v for r in of for k, v in r["texts"][n].items() if k in written} for of in runs] for n in WRITTEN}
    values = {name: text_values(of, documents) for name, of in texts.items()}
    extracts = {name: " ".join(documents[name]["rivals"]["extract"]) for name in texts["i"][0]}
    extract = text_values([extracts], documents)
    by_seed = [{name: nats for run in of for name, nats in run["nats"].items()} for of in runs]
    nats = {n: np.array([[each[name][n] for name in scored] for each in by_seed]) for n in LAYOUTS}
    scores = {n: Scores(sums.mean(axis=0), tokens, tokens, np.arange(len(tokens))) for n, sums in nats.items()}
    metrics, minus = dict[str, dict[str, Metric]](), dict[str, Any]()
    for name in LAYOUTS:
        shares = {metric: bootstrap(of) for metric, of in values.get(name, {}).items()}
        metrics[name] = {"abstract_nll": scores[name].interval(), **shares}
        minus[f"abstract_nll_{name}"] = paired_difference(scores["ie_selected"], scores[name]).model_dump()
    for metric, own in values["ie_selected"].items():
        for name, other in (("i", values["i"]), ("extract", extract)):
            minus[f"{metric}_{name}"] = bootstrap(own - other[metric]).model_dump()
    return metrics, minus, {name: (sums.sum(axis=1) / tokens.sum()).round(4).tolist() for name, sums in nats.items()}


def text_values(texts: Sequence[Mapping[str, str]], documents: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of summaries as arrays (documents,), each the mean over the seeds' texts."""
    values = [[text_scores(text, documents[name]) for name, text in of.items()] for of in texts]
    return {name: np.mean([[v[name] for v in of_seed] for of_seed in values], axis=0) for name in values[0][0]}


def text_scores(text: str, document: Mapping[str, Any]) -> dict[str, float]:
    """ROUGE; shares of unsupported sentences, of pairs of words and of repeated runs of four.

    Support is looked for in what all rows of the document read together, so more text in a row is no advantage. A text
    without a sentence counts as unsupported.
    """
    read = "\n\n".join([*document["read"].values(), *map(" ".join, document["rivals"].values())])
    source, words = read_text(read, ".txt", document["id"], "en"), split_words(text)
    links = link_sentences(text, source, range(len(source.sentences)), default_encoder())
    scores, runs = rouge([link.text for link in links], document["abstract"]), ngrams(words, 4)
    pairs = faithfulness(text, document["source"]).bigrams
    unsupported = sum(link.mark == "unsupported" for link in links) / len(links) if links else 1.0
    shares = {"unsupported_share": unsupported}
    shares |= {"new_pairs": 0.0 if pairs is None else 1 - pairs, "words": float(len(words))}
    shares["repeated_share"] = 1 - len({*runs}) / len(runs) if runs else 0.0
    return {name: scores[name] for name in ("rouge1", "rouge2", "rougeL")} | shares


def aims(minus: Mapping[str, Any]) -> list[Aim]:
    """Of each variant: a lower loss with the selected sentences, surely so, and no more that is unsupported."""
    made = []
    for variant in TEST:
        loss, more = minus[variant]["abstract_nll_i"], minus[variant]["unsupported_share_i"]["high"]
        made.append(aim(f"nats, ie_selected less i, {variant}", "abstract_nll", -0.1, loss["mean"], operator.le))
        made.append(aim(f"upper end of its interval, {variant}", "abstract_nll", 0.0, loss["high"]))
        made.append(aim(f"upper end of unsupported, less i, {variant}", "unsupported_share", 0.0, more, operator.le))
    return made
