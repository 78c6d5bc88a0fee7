"""Train a language model from a recipe, measure it on texts that it has not read, and leave both in a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from graftlm.backbone import fingerprint
from graftlm.data import Document, Mixture, SourceConfig, TokenBlocks, build_documents, build_mixture
from graftlm.data.build import build_blocks
from graftlm.data.sources import read_some
from graftlm.errors import RecipeError
from graftlm.evaluation import Interval, Metric, Results, Row, score
from graftlm.evaluation.metrics import MemoryWatch
from graftlm.evaluation.report import write_report
from graftlm.io import write_atomically
from graftlm.runs.bench import Measurement, count_weights
from graftlm.training.lanes import Lanes
from graftlm.training.language_model import (
    LanguageModel,
    check_rows,
    check_stream,
    new_model,
    read_model,
    read_tokenizer,
    save_model,
)
from graftlm.runs.language_recipe import LanguageModelRecipe, LengthsConfig
from graftlm.training.loop import train
from graftlm.training.pieces import train_pieces

MODEL, TOKENIZER, MEASURED = "model", "tokenizer", "measurement.json"


def train_language_model(
    recipe: LanguageModelRecipe, out: Path, *, progress: bool = True, say: Callable[[str], None] = print
) -> Results:
    """Train the recipe's model and report; the model is in `out/model`, and a finished run is read back.

    Raises:
        RecipeError: the model does not fit the recipe, or the tokenizer the model.
        DataError: a text can't be read.
    """
    main = PartialState().is_main_process
    if main:
        write_atomically(out / "recipe.yaml", recipe.to_yaml().encode())
    tokenizer = find_tokenizer(recipe, out)
    model = _model(recipe, tokenizer)
    mixture = _mixture(recipe, tokenizer)
    tests = {name: build_documents(sources) for name, sources in recipe.data.test.items()}
    identity = _identity(recipe, model, mixture)
    say(f"A {model.config.model_type} model of {count_weights(model.parameters()):,} parameters.")
    step = recipe.training.batch_size * recipe.data.length
    say(f"Training it for {recipe.training.steps:,} steps of {step:,} tokens.")
    measured = _run(recipe, model, tokenizer, mixture, tests, identity, out, progress)
    results = _results(recipe, measured)
    if main:
        write_report(results, out, plots=_plots(recipe, measured))
    return results


def find_tokenizer(recipe: LanguageModelRecipe, out: Path) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer: one that is there, or one that is learned, once, into `out/tokenizer`."""
    wanted = recipe.tokenizer
    if wanted is None:
        assert isinstance(recipe.model, str), "a recipe's own check"
        return read_tokenizer(recipe.model)
    if wanted.name is not None:
        return read_tokenizer(wanted.name)
    with PartialState().main_process_first():
        if not (out / TOKENIZER / "tokenizer.json").exists():
            assert wanted.pieces is not None, "a config's own check"
            texts = _texts(recipe.data.train, wanted.characters)
            train_pieces(texts, wanted.pieces).save_pretrained(out / TOKENIZER)
        return read_tokenizer(str(out / TOKENIZER))


def bits_per_byte(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    tests: Mapping[str, Sequence[Document]],
    lengths: Sequence[int],
    settings: LengthsConfig,
) -> dict[str, dict[int, Interval]]:
    """Bits per byte of each test set in windows of each length; the same tokens of text are scored at every length."""
    return {
        name: {
            length: score(
                model,
                tokenizer,
                documents,
                length=length,
                batch_size=max(1, settings.tokens_per_pass // length),
                precision=settings.precision,
                limit_tokens=settings.limit_tokens,
            ).interval("bits_per_byte")
            for length in lengths
        }
        for name, documents in tests.items()
    }


def metrics_by_length(found: Mapping[str, Mapping[int, Interval]], trained: int) -> dict[str, Metric]:
    """`bpb_<set>` at the length of training and, where there are more, `bpb_<set>_at_<length>`."""
    metrics: dict[str, Metric] = {}
    for name, by_length in found.items():
        if trained in by_length:
            metrics[f"bpb_{name}"] = by_length[trained]
        if len(by_length) > 1:
            metrics |= {f"bpb_{name}_at_{length}": value for length, value in by_length.items()}
    return metrics


def _texts(sources: Sequence[SourceConfig], characters: int) -> Iterator[str]:
    """The start of every source's text, alike of each."""
    for source in sources:
        left = -(-characters // len(sources))
        for document in read_some(source):
            yield document.whole[:left]
            left -= len(document.whole)
            if left <= 0:
                break


def _model(recipe: LanguageModelRecipe, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The recipe's model, untrained or as it was left, on its device."""
    if isinstance(recipe.model, str):
        model = read_model(recipe.model, tokenizer)
    else:
        model = new_model(recipe.model, tokenizer, recipe.training.seed)
    if recipe.data.stream:
        check_stream(model, recipe.training)
    check_rows(model, length=recipe.data.length, longest=max(recipe.lengths), boundaries=recipe.data.boundaries)
    device = recipe.device or PartialState().device
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise RecipeError(f"The device {device} can't be used ({reason}): name another, such as cpu.") from None


def _mixture(recipe: LanguageModelRecipe, tokenizer: PreTrainedTokenizerBase) -> Mixture:
    """The rows of every step."""
    size, data = recipe.training.batch_size, recipe.data.packed()
    if not recipe.data.stream:
        return build_mixture(data, tokenizer, size)
    blocks = build_blocks(recipe.data.train, data, tokenizer)
    assert isinstance(blocks, TokenBlocks), "a config's own check"
    return Lanes(blocks, size)


def _identity(recipe: LanguageModelRecipe, model: Any, mixture: Mixture) -> dict[str, Any]:
    """What must be the same when the run resumes."""
    start = fingerprint(model).id if isinstance(recipe.model, str) else recipe.model
    return {"model": start, "data": mixture.fingerprint()}


def _run(
    recipe: LanguageModelRecipe,
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    mixture: Mixture,
    tests: Mapping[str, Sequence[Document]],
    identity: Mapping[str, Any],
    out: Path,
    progress: bool,
) -> Measurement:
    """Train, save and measure, or read back what was measured."""
    key = _key(recipe, identity, tests)
    kept = _read(out, key)
    if kept is not None:
        return kept
    with MemoryWatch() as memory:
        summary = train(LanguageModel(model), mixture, recipe.training, out, identity=identity, progress=progress)
    row = Row(
        id=model.config.model_type, label=_label(recipe), metrics={"parameters": count_weights(model.parameters())}
    )
    measured = Measurement(row)
    if not PartialState().is_main_process:
        return measured
    save_model(model, tokenizer, out / MODEL)
    found = bits_per_byte(model, tokenizer, tests, recipe.lengths, recipe.evaluation)
    metrics = metrics_by_length(found, recipe.data.length) | row.metrics
    measured.row = row.model_copy(update={"metrics": metrics})
    measured.add_training(summary, memory.peak)
    write_atomically(out / MEASURED, json.dumps({"key": key} | measured.to_json()).encode())
    return measured


def _key(recipe: LanguageModelRecipe, identity: Mapping[str, Any], tests: Mapping[str, Sequence[Document]]) -> str:
    """What must be the same for a finished run to be read back."""
    read = [[name, [document.text for document in documents]] for name, documents in tests.items()]
    settings = [recipe.training.model_dump_json(), recipe.evaluation.model_dump_json(), recipe.lengths]
    return hashlib.sha256(json.dumps([identity, settings, read], sort_keys=True).encode()).hexdigest()


def _read(out: Path, key: str) -> Measurement | None:
    try:
        values = json.loads((out / MEASURED).read_text(encoding="utf-8"))
        whole = values["key"] == key and (out / MODEL / "config.json").exists()
        return Measurement.from_json(values) if whole else None
    except (OSError, ValueError, KeyError):
        return None


def _label(recipe: LanguageModelRecipe) -> str:
    return recipe.model if isinstance(recipe.model, str) else str(recipe.model["model_type"])


def _results(recipe: LanguageModelRecipe, measured: Measurement) -> Results:
    losses = {measured.row.id: measured.losses}
    return Results.here("train", [measured.row], seeds=[recipe.training.seed], details={"losses": losses})


def _plots(recipe: LanguageModelRecipe, measured: Measurement) -> dict[str, Any]:
    from graftlm.evaluation import plots  # matplotlib takes half a second

    names = [name for name in recipe.data.test if f"bpb_{name}_at_{recipe.data.length}" in measured.row.metrics]
    curves = {n: [(at, measured.row.metrics[f"bpb_{n}_at_{at}"]) for at in recipe.lengths] for n in names}
    return {"bits-per-byte-by-length": plots.by_length(curves, trained=recipe.data.length)} if curves else {}


__all__ = ["bits_per_byte", "find_tokenizer", "metrics_by_length", "train_language_model"]
