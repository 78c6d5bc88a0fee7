"""What a reader of results should know before the numbers, as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NotRequired, TypeAlias, TypedDict, cast

from graftlm.data.text_sets import TextSets
from graftlm.errors import first_of, shorten
from graftlm.evaluation.benchmarks.result import BenchmarkValues
from graftlm.evaluation.measurement import FrozenModel
from graftlm.evaluation.metric_text import SPEEDS, format_value
from graftlm.evaluation.results import Results, value_of
from graftlm.evaluation.scored_text import ScoredPart
from graftlm.evaluation.taught_answers import ClosedQuestions, closed_text

_ALL = 0.95  # share from which nearly all gates are open

_TOLERANCE = 0.05  # relative difference of parameters or tokens up to which rows count as equal
_BUDGETS = (  # metric, its name in sentences, and what makes it equal
    (
        "trainable_parameters",
        "The trainable parameters",
        "With capacity: match sizes are as near as a kind allows.",
    ),
    ("train_tokens", "The tokens read", "To give methods one budget, give them the same steps, rows and texts."),
)

_SHOWN = 10  # questions

ScoredParts: TypeAlias = Mapping[str, Sequence[ScoredPart]]
"""What was scored of each test set."""


class _MatchedSize(TypedDict):
    """The size that was chosen for a graft: its key and value, and the parameters that it has and should have."""

    key: str
    value: int
    parameters: int
    aim: int


class _AskedQuestions(TypedDict):
    """How many questions were asked and should have been, and those that have a name of the new text."""

    asked: int
    wanted: int
    about_new: NotRequired[list[str]]


def scored_text(results: Results) -> ScoredParts:
    """Return what was scored of each test set, which is the same for all rows; empty without test sets."""
    by_row = cast("Mapping[str, ScoredParts]", results.details.get("scored_text") or {})
    return next(iter(by_row.values()), {})


def text_sets(results: Results) -> TextSets:
    """Return the names of the sets of new and old text of all rows."""
    found = cast("dict[str, dict[str, list[str]]]", results.details.get("text_sets") or {})
    new = dict.fromkeys(name for sets in found.values() for name in sets["new"])
    old = dict.fromkeys(name for sets in found.values() for name in sets["old"])
    return TextSets(new=tuple(new), old=tuple(old))


def remarks(results: Results) -> list[str]:
    """Return what a reader of results should know, one sentence each.

    Args:
        results: the results with their details.
    """
    return [
        *_about_tests(results),
        *_about_own_text(results),
        *_about_benchmarks(results),
        *_about_questions(results),
        *_about_closed_questions(results),
        *_about_frozen_models(results),
        *_about_gates(results),
        *_about_speeds(results),
        *_about_sizes(results),
        *_about_budgets(results),
    ]


def _about_tests(results: Results) -> Iterator[str]:
    """Yield what was scored of each test set that has several sources, or documents that were not scored."""
    for name, parts in scored_text(results).items():
        is_whole = all(part["documents"] == part["of_documents"] for part in parts)
        if len(parts) > 1 or not is_whole:
            taken = ", ".join(_part_text(part) for part in parts)
            yield f"Scored of the test text {name}: {taken}."


def _about_own_text(results: Results) -> Iterator[str]:
    """Yield the numbers of texts behind own_kl and chat_kl, which are the same for all rows."""
    by_row = cast("Mapping[str, Mapping[str, int]]", results.details.get("own_text_counts") or {})
    for counts in list(by_row.values())[:1]:
        yield f"Own KL is over {counts['texts']:,} sampled texts, of which conversations: {counts['chats']:,}."


def _about_benchmarks(results: Results) -> Iterator[str]:
    """Yield the metric and the number of items of each benchmark, which are the same for all rows."""
    by_row = cast("Mapping[str, Mapping[str, BenchmarkValues]]", results.details.get("harness") or {})
    for label, result in next(iter(by_row.values()), {}).items():
        text = f"{label} is {result['metric']} over {len(result['values']):,} items."
        if result["left_out"]:
            text += f" Its data has {result['left_out']:,} more that need a language detector or a sentence splitter."
        yield text


def _about_questions(results: Results) -> Iterator[str]:
    """Yield how many questions were asked if there are fewer than there should be, and those that do not count."""
    by_row = cast("Mapping[str, _AskedQuestions]", results.details.get("asked_questions") or {})
    for counts in list(by_row.values())[:1]:
        if counts["asked"] < counts["wanted"]:
            yield fewer_questions(counts["asked"], counts["wanted"])
        about_new = counts.get("about_new", [])
        if about_new:
            yield left_out_questions(about_new, counts["asked"])


def fewer_questions(asked: int, wanted: int) -> str:
    """Return the remark that a model sampled fewer questions than were to be asked."""
    return (
        f"Questions that were asked: {asked} instead of {wanted}, since no more of the user's turns that the model "
        "sampled came to an end."
    )


def left_out_questions(about_new: Sequence[str], asked: int) -> str:
    """Return the remark that questions which have a name of the new text are left out.

    Args:
        about_new: these questions, at least one.
        asked: the number of all questions.
    """
    shown = first_of([repr(shorten(question)) for question in about_new], _SHOWN)
    return (
        f"Kept answers and spill leave out {len(about_new):,} of the {asked:,} questions, since they have names of the "
        f"new text, so that another answer may be right: {shown}."
    )


def _about_closed_questions(results: Results) -> Iterator[str]:
    """Yield the taught questions on which grafts do not act."""
    by_row = cast("Mapping[str, ClosedQuestions]", results.details.get("closed_questions") or {})
    for row in results.rows:
        if row.id in by_row:
            yield closed_text(row.label, by_row[row.id])


def _about_frozen_models(results: Results) -> Iterator[str]:
    """Yield the other models that grafts read, and why some have no row."""
    by_row = cast("Mapping[str, Sequence[FrozenModel]]", results.details.get("frozen_models") or {})
    for row in results.rows:
        for frozen in by_row.get(row.id, ()):
            size = format_value("parameters", frozen["parameters"])
            text = f"{row.label} also runs {frozen['name']}: {frozen['model']}, {size} parameters, frozen."
            if "problem" in frozen:
                text += f" It was not measured alone. {frozen['problem']}"
            yield text


def _about_gates(results: Results) -> Iterator[str]:
    """Yield the rows whose gates are open on nearly all old text."""
    statistics = cast(
        "Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]]", results.details.get("statistics") or {}
    )
    sets = text_sets(results)
    for row in results.rows:
        of_row = statistics.get(row.id) or {}
        by_set = of_row.get("open_share") or {}
        shares = [share for name in sets.of_domain("old", by_set) for share in by_set[name]]
        if shares and sum(shares) / len(shares) >= _ALL:
            share = sum(shares) / len(shares)
            yield (
                f"{row.label}: its gates are open on {share:.0%} of the old text, so they do not tell it from the new: "
                "whatever is kept there is not kept by the gates."
            )


def _about_speeds(results: Results) -> Iterator[str]:
    if any(SPEEDS.intersection(row.metrics) for row in results.rows):
        yield "Speeds are wall-clock figures of this run, with whatever else the machine did."


def _about_sizes(results: Results) -> Iterator[str]:
    """Yield the sizes that were chosen to match a number of parameters, and how near they are."""
    by_row = cast("Mapping[str, _MatchedSize]", results.details.get("matched_sizes") or {})
    sizes = []
    for row in results.rows:
        if row.id in by_row:
            matched = by_row[row.id]
            change = _change(matched["parameters"], matched["aim"])
            sizes.append(f"{row.label} {matched['key']} {matched['value']:,} ({change})")
    if sizes:
        aim = next(iter(by_row.values()))["aim"]
        yield f"Nearest sizes to {aim:,} trainable parameters: {', '.join(sizes)}."


def _about_budgets(results: Results) -> Iterator[str]:
    """Yield which methods of a comparison have other numbers of parameters, or read other numbers of tokens."""
    if results.name != "compare":
        return
    trained = [row for row in results.rows if "train_tokens" in row.metrics]
    for name, what, remedy in _BUDGETS:
        measured = [(row.label, value_of(row.metrics[name])) for row in trained if name in row.metrics]
        values = [value for _, value in measured]
        if values and max(values) > (1 + _TOLERANCE) * min(values):
            listed = ", ".join(f"{label} {format_value(name, value)}" for label, value in measured)
            yield f"{what} differ by more than {_TOLERANCE:.0%} between methods: {listed}. {remedy}"


def _change(value: float, expected: float) -> str:
    """Return a relative difference with its sign, such as -1.6%."""
    return f"{value / expected - 1:+.1%}" if expected else f"{value:+,.0f}"


def _part_text(part: ScoredPart) -> str:
    text = f"{part['tokens']:,} tokens"
    if part["source"]:
        text += f" of {part['source']}"
    if part["documents"] != part["of_documents"]:
        text += f" (its first {part['documents']:,} of {part['of_documents']:,} documents)"
    return text
