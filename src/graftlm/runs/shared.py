"""What the runs of one process share: loaded backbones, their evaluators, and batches."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from graftlm.backbone import Backbone
from graftlm.backbone.load import BackboneConfig, LearnedTokensConfig
from graftlm.data import DataConfig, Document, Mixture
from graftlm.data.learned_tokens import learn_tokens
from graftlm.data.own_text import read_own_text
from graftlm.data.sources import first_texts
from graftlm.data.text_sets import TextSets
from graftlm.evaluation.benchmarks import Benchmark, HarnessTaskConfig, load_benchmarks
from graftlm.evaluation.benchmarks.result import read_results
from graftlm.evaluation.evaluator import BackboneEvaluator, EvaluationConfig, load_tests

BatchesKey: TypeAlias = tuple[BackboneConfig, str, int]
NotesKey: TypeAlias = tuple[BackboneConfig, bool, Sequence[Document]]

_CACHED_BATCHES = 4
_BATCHES: OrderedDict[BatchesKey, Mixture] = OrderedDict()
"""The batches used last, from the oldest to the newest."""
_NOTES: deque[tuple[NotesKey, Sequence[str]]] = deque(maxlen=2)


@lru_cache(maxsize=2)
def load_shared(backbone: BackboneConfig) -> Backbone:
    """Return a loaded backbone, which the runs of one process share; the last two are kept.

    Raises:
        GraftError: see `load_backbone`.
    """
    return backbone.load()


@lru_cache(maxsize=2)
def load_shared_benchmarks(
    configs: tuple[HarnessTaskConfig, ...], confirm_unsafe_code: bool = False
) -> Sequence[Benchmark]:
    """Return loaded benchmarks, which the runs of one process share; those of the last two calls are kept.

    Args:
        configs: what to load.
        confirm_unsafe_code: whether tasks that execute generated code are loaded.

    Raises:
        GraftError: see `load_benchmarks`.
    """
    return load_benchmarks(configs, confirm_unsafe_code=confirm_unsafe_code)


@lru_cache(maxsize=2)
def load_shared_extended(backbone: BackboneConfig, new: str) -> Backbone:
    """Return a loaded backbone with its added tokens, which the runs of one process share; the last two are kept.

    Args:
        backbone: the config of the backbone, which shares its model with that of `load_shared`.
        new: a `DataConfig` as JSON, from whose new texts tokens are learned; empty if none are.

    Raises:
        GraftError: see `load_backbone` and `Backbone.with_tokens`; or the new texts can't be read.
    """
    loaded = load_shared(backbone.without_tokens)
    tokens = backbone.add_tokens
    if tokens is None:
        return loaded
    if not isinstance(tokens, LearnedTokensConfig):
        return loaded.with_tokens(tokens)
    sources = DataConfig.model_validate_json(new).new
    texts = first_texts(sources, tokens.characters)
    return loaded.with_tokens(learn_tokens(loaded.need_tokenizer(), texts, tokens.learn, name=loaded.name))


@lru_cache(maxsize=2)
def load_shared_evaluator(
    backbone: BackboneConfig,
    new: str,
    tests: str,
    evaluation: str,
    length: int,
    own_text: Path | None,
    sets: TextSets,
    bare_results: Path | None = None,
) -> BackboneEvaluator:
    """Return the evaluator of a backbone, which the runs of one process share; the last two are kept.

    Args:
        backbone: the config of the backbone.
        new: see `load_shared_extended`.
        tests: a `DataConfig` as JSON; only its test section is used.
        evaluation: an `EvaluationConfig` as JSON.
        length: tokens per window.
        own_text: file of the texts that the backbone sampled; None measures no divergence on them.
        sets: the named sets of new and old text.
        bare_results: file of the backbone's results on the benchmarks; None measures the backbone on them.

    Raises:
        GraftError: the backbone, the test texts, the tasks or the sampled texts can't be read.
    """
    sources = DataConfig.model_validate_json(tests).test
    settings = EvaluationConfig.model_validate_json(evaluation)
    samples = [] if own_text is None else read_own_text(own_text)
    benchmarks = load_shared_benchmarks(tuple(settings.benchmarks()), settings.confirm_unsafe_code)
    bare = None if bare_results is None else read_results(bare_results)
    return BackboneEvaluator(
        load_shared_extended(backbone, new),
        load_tests(sources),
        settings,
        length,
        samples,
        sets=sets,
        benchmarks=benchmarks,
        bare_benchmarks=bare,
    )


def shared_batches(key: BatchesKey, build: Callable[[], Mixture]) -> Mixture:
    """Return the batches of a key, which the runs of one process share; the last four are kept.

    Batches are built anew if those that are kept have a position in their texts (`state_dict` is not empty).

    Args:
        key: the backbone, the data section as JSON and how it is packed, and the batch size.
        build: builds the batches.
    """
    batches = _BATCHES.pop(key, None)
    if batches is None or batches.state_dict():
        batches = build()
    while len(_BATCHES) >= _CACHED_BATCHES:
        _BATCHES.popitem(last=False)
    _BATCHES[key] = batches
    return batches


def shared_notes(key: NotesKey, build: Callable[[], Iterable[str]]) -> Sequence[str]:
    """Return notes on conversations, which the runs of one process share; those of the last two keys are kept.

    Args:
        key: the backbone, whether the report has answers, and the conversations.
        build: yields the notes.
    """
    for known, notes in _NOTES:
        if known == key:
            return notes
    built = tuple(build())
    _NOTES.append((key, built))
    return built


def release_shared() -> None:
    """Free everything that the runs of this process share."""
    load_shared.cache_clear()
    load_shared_extended.cache_clear()
    load_shared_evaluator.cache_clear()
    load_shared_benchmarks.cache_clear()
    _BATCHES.clear()
    _NOTES.clear()
