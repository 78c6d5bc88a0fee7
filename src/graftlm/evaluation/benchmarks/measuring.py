"""Measure a model on benchmarks, item by item.

Answers are generated greedily in batches by the package's own generation; log-likelihoods, prompts, filters and metrics
are those of lm-evaluation-harness.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from graftlm.backbone import answer_end_ids, end_ids, leading_bos, max_sequence_length, read_stops
from graftlm.errors import DataError, EvaluationError
from graftlm.evaluation.benchmarks.loading import Benchmark
from graftlm.evaluation.benchmarks.result import BenchmarkResult, Sample
from graftlm.evaluation.examples import continue_rows
from graftlm.evaluation.harness import harness_model, quiet_harness
from graftlm.evaluation.harness_tasks import PURPOSE, allowed_code
from graftlm.evaluation.harness_types import HarnessModel, Request, StockTask, Values
from graftlm.evaluation.inference import LanguageModel, evaluation_mode
from graftlm.files.extras import import_extra
from graftlm.progress import SHARE, progress_bar

_MAX_TOKENS = 256  # of an answer, as in lm-evaluation-harness
_SHOT_SEED = 1234
_SAMPLES = 3
_SHOWN_CHARACTERS = 2000
_METRICS = ("acc_norm", "prompt_level_strict_acc", "exact_match", "acc")
"""The metrics that are preferred where a task has several, the first most."""
_FILTERS = ("flexible-extract", "get-answer", "remove_whitespace", "none")
"""The filters of answers that are preferred where a task has several, the first most."""


class _Value(NamedTuple):
    """A metric of one item: its name in the harness, the filter of the answer, and the value."""

    metric: str
    answer_filter: str
    value: object


def measure_benchmarks(
    model: LanguageModel,
    tokenizer: PreTrainedTokenizerBase,
    benchmarks: Sequence[Benchmark],
    *,
    batch_size: int = 16,
    progress: bool = False,
) -> dict[str, BenchmarkResult]:
    """Measure a model on benchmarks.

    Args:
        model: a `GraftedModel` or any transformers model.
        tokenizer: the model's tokenizer.
        benchmarks: the loaded benchmarks. All models get the same items and solved examples.
        batch_size: rows per batch that are scored, half of those that are generated; it affects speed and memory only.
        progress: whether to show progress bars.

    Returns:
        The results by the benchmarks' labels.

    Raises:
        DataError: a benchmark is to be asked in a chat template, but there is none.
        EvaluationError: a task has no metric for each item, or an answer leaves no room for its prompt.
    """
    if not benchmarks:
        return {}
    results = {}
    with evaluation_mode(model), quiet_harness():
        adapter = harness_model(model, tokenizer, batch_size)
        for benchmark in benchmarks:
            runner = _Runner(model, tokenizer, adapter, benchmark, batch_size, progress)
            with allowed_code(allow=benchmark.runs_code):
                results[benchmark.label] = runner.run()
    return results


class _Runner:
    """Measures a model on one benchmark."""

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        adapter: HarnessModel,
        benchmark: Benchmark,
        batch_size: int,
        progress: bool,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.adapter = adapter
        self.benchmark = benchmark
        self.batch_size = batch_size
        self.progress = progress

    def run(self) -> BenchmarkResult:
        """Ask all items, score the answers, and return the result."""
        for chosen in self.benchmark.tasks:
            self._build_requests(chosen.task, chosen.items)
        requests: dict[str, list[Request]] = defaultdict(list)
        for chosen in self.benchmark.tasks:
            for instance in chosen.task.instances:
                requests[instance.request_type].append(instance)
        for kind, instances in requests.items():
            self._answer(kind, instances)
        items: list[list[_Value]] = []
        samples: list[Sample] = []
        for chosen in self.benchmark.tasks:
            chosen.task.apply_filters()
            for instances in _by_item(chosen.task):
                values = _values_of(chosen.task, instances)
                items.append(values)
                samples.append(_sample(instances, _chosen_value(values, self.benchmark.label)))
        return self._result(items, samples)

    def _build_requests(self, task: StockTask, items: list[int]) -> None:
        task.set_fewshot_seed(_SHOT_SEED)  # The same examples for every model.
        is_chat = self._is_chat()
        with _no_bars():
            task.build_all_requests(
                samples=items,
                apply_chat_template=is_chat,
                fewshot_as_multiturn=is_chat,
                chat_template=self.adapter.apply_chat_template if is_chat else None,
                tokenizer_name=self.adapter.tokenizer_name if is_chat else "",
            )

    def _is_chat(self) -> bool:
        has_template = bool(self.tokenizer.chat_template)
        if self.benchmark.is_chat and not has_template:
            raise DataError(
                f"The tokenizer has no chat template, but chat of {self.benchmark.label} is true: set it to false, or "
                "name a chat model."
            )
        return has_template if self.benchmark.is_chat is None else self.benchmark.is_chat

    def _answer(self, kind: str, instances: list[Request]) -> None:
        """Add the model's answers to requests of one kind."""
        if kind == "generate_until" and not any(_samples(instance) for instance in instances):
            self._generate(instances)
            return
        if kind == "loglikelihood":
            rows = [self._prompt_ids(f"{instance.args[0]}{instance.args[1]}") for instance in instances]
            self._check_room(rows, max_sequence_length(self.model), "nothing")
        repeated = [instance for instance in instances for _ in range(instance.repeats or 1)]
        answers = getattr(self.adapter, kind)(repeated, disable_tqdm=True)
        for instance, answer in zip(repeated, answers, strict=True):
            instance.resps.append(answer)

    def _generate(self, instances: list[Request]) -> None:
        """Generate answers greedily; requests with equal settings share batches."""
        groups: dict[tuple[tuple[str, ...], int], list[Request]] = defaultdict(list)
        for instance in instances:
            groups[_stops_of(instance), _length_of(instance)].append(instance)
        title = f"answering {self.benchmark.label}"
        with progress_bar(title, len(instances), SHARE, show=self.progress) as update:
            for (stops, length), group in groups.items():
                answers = self._continue(group, stops, length, lambda count: update(advance=count))
                for instance, answer in zip(group, answers, strict=True):
                    instance.resps.append(answer)

    def _continue(
        self, instances: list[Request], stops: tuple[str, ...], length: int, on_batch: Callable[[int], None]
    ) -> list[str]:
        room = max_sequence_length(self.model) - length
        if room < 1:
            raise EvaluationError(
                f"Answers of {length} tokens to {self.benchmark.label} leave no room for a prompt in the model's "
                f"{room + length} positions: lower max_tokens."
            )
        rows = [self._prompt_ids(instance.args[0]) for instance in instances]
        self._check_room(rows, room, f"answers of {length} tokens")
        ends = end_ids(self.model, self.tokenizer)
        if self._is_chat():
            ends |= answer_end_ids(self.model, self.tokenizer)
        return continue_rows(
            self.model,
            self.tokenizer,
            rows,
            ends,
            _usable_stops(self.tokenizer, stops),
            max_new_tokens=length,
            batch_size=2 * self.batch_size,
            on_batch=on_batch,
        )

    def _check_room(self, rows: Sequence[Sequence[int]], room: int, besides: str) -> None:
        """Raise `EvaluationError` if a row is too long, which the harness would cut at its beginning.

        Args:
            rows: token ids.
            room: maximum number of tokens.
            besides: what takes the other positions.
        """
        longest = max(len(row) for row in rows)
        if longest > room:
            raise EvaluationError(
                f"A prompt of {self.benchmark.label} has {longest:,} tokens, but besides {besides} the model's "
                f"positions have room for {room:,}: lower max_tokens or shots, or leave the task out."
            )

    def _prompt_ids(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt, with one BOS token if the tokenizer puts one before texts."""
        bos = leading_bos(self.tokenizer)
        ids = list(self.tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"])
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _result(self, items: list[list[_Value]], samples: list[Sample]) -> BenchmarkResult:
        by_name: dict[str, list[float]] = defaultdict(list)
        for values in items:
            for metric, answer_filter, value in values:
                if isinstance(value, int | float):
                    by_name[_full_name(metric, answer_filter)].append(float(value))
        metric, answer_filter, _ = _chosen_value(items[0], self.benchmark.label)
        name = _full_name(metric, answer_filter)
        complete = {each: values for each, values in by_name.items() if len(values) == len(items)}
        if name not in complete:
            raise EvaluationError(
                f"The tasks of {self.benchmark.label} have no metric in common: measure them one by one."
            )
        further = {each: sum(values) / len(values) for each, values in complete.items() if each != name}
        return BenchmarkResult(name, complete[name], further, self.benchmark.left_out, samples[:_SAMPLES])


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hide the harness' own progress bars in a `with` block."""
    module = import_extra("harness", "lm_eval.api.task", PURPOSE)
    bar = module.tqdm
    module.tqdm = partial(bar, disable=True)
    try:
        yield
    finally:
        module.tqdm = bar


def _settings(instance: Request) -> Values:
    """Return the settings of a request that generates."""
    return instance.args[1]


def _samples(instance: Request) -> bool:
    return bool(_settings(instance).get("do_sample")) or (instance.repeats or 1) > 1


def _stops_of(instance: Request) -> tuple[str, ...]:
    until = _settings(instance).get("until") or []
    return (until,) if isinstance(until, str) else tuple(until)


def _length_of(instance: Request) -> int:
    settings = _settings(instance)
    names = ("max_gen_toks", "max_new_tokens", "max_tokens")
    return int(next((settings[name] for name in names if settings.get(name)), _MAX_TOKENS))


def _usable_stops(tokenizer: PreTrainedTokenizerBase, stops: Sequence[str]) -> list[str]:
    """Return the stop strings that the tokenizer can write; those of a task may belong to another model."""
    usable = []
    for stop in stops:
        try:
            read_stops(tokenizer, [stop])
        except DataError:
            continue
        usable.append(stop)
    return usable


def _by_item(task: StockTask) -> list[list[Request]]:
    """Return the requests of each item, in order."""
    by_item: dict[int, list[Request]] = defaultdict(list)
    for instance in task.instances:
        by_item[instance.doc_id].append(instance)
    return [sorted(by_item[item], key=lambda instance: instance.idx) for item in sorted(by_item)]


def _values_of(task: StockTask, instances: list[Request]) -> list[_Value]:
    """Return all metrics of an item, with each filter of its answers."""
    values = []
    for name in instances[0].filtered_resps:
        answers = [instance.filtered_resps[name] for instance in instances]
        for metric, value in task.process_results(instances[0].doc, answers).items():
            values.append(_Value(metric, name, value))
    return values


def _chosen_value(values: Sequence[_Value], label: str) -> _Value:
    """Return the metric that is reported: the most preferred one that is a number."""
    numbers = [value for value in values if isinstance(value.value, int | float)]
    if not numbers:
        raise EvaluationError(
            f"{label} has no metric that is a number for each item, such as a share of right answers, so a change has "
            "no paired interval: name another task, or run it with graft eval --tasks."
        )

    def rank(value: _Value) -> tuple[int, int]:
        metric = _METRICS.index(value.metric) if value.metric in _METRICS else len(_METRICS)
        answer_filter = _FILTERS.index(value.answer_filter) if value.answer_filter in _FILTERS else len(_FILTERS)
        return metric, answer_filter

    return min(numbers, key=rank)


def _full_name(metric: str, answer_filter: str) -> str:
    return metric if answer_filter == "none" else f"{metric}, {answer_filter}"


def _sample(instances: list[Request], value: _Value) -> Sample:
    instance = instances[0]
    answer = instance.resps[0]
    return {
        "prompt": str(instance.args[0])[-_SHOWN_CHARACTERS:],
        "answer": answer if isinstance(answer, str) else "",
        "value": float(value.value),  # type: ignore[arg-type]
    }
