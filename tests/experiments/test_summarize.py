"""Summaries of technical proposals at their smallest: documents and their parts, rows, results, and errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from experiments import Options, reproduce, summarize
from experiments.summarize.corpora import CORPORA, FILES, CorpusSizes, in_time, load, sample_of
from experiments.summarize.learned import copy_curve
from experiments.summarize.oracles import best_sentences, longest_runs
from experiments.summarize.pointer_generator import (
    END,
    START,
    UNKNOWN,
    CopyExample,
    PointerGenerator,
    encode_examples,
    frequent_words,
    train,
)
from experiments.summarize.run import ADDED, LABELS
from experiments.summarize.runs import WRITTEN
from experiments.summarize.weights import COMMAND, LEADS, SETTINGS
from graftlm.errors import DataError
from graftlm.evaluation import Results, value_of
from graftlm.pipelines.summarize.default_selector import packaged_model
from proposals import proposal

pytest.importorskip("sentencex")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "longdocs").mkdir()
    for corpus in CORPORA:
        lines = (json.dumps(proposal(corpus, number)) + "\n" for number in reversed(range(8)))
        (folder / "longdocs" / f"{corpus}.jsonl").write_text("".join(lines))
    return folder


def options(data: Path, out: Path, **changes: object) -> Options:
    return Options.parse({"data": data, "out": out, "quick": True, "jobs": 1, "seeds": (0,)} | changes)


def test_documents_have_no_abstract_and_no_header() -> None:
    sample = sample_of("eips", proposal("eips", 2))
    text = " ".join(sentence.text for sentence in sample.document.sentences)
    assert sample.abstract == ("The window of eips gets a new handle.", "It costs 5 coins.")
    assert sample.abstract[0] not in text
    assert "created" not in text
    assert text.startswith("Every window")


@pytest.mark.parametrize(
    ("corpus", "head"),
    [
        ("peps", "PEP: 7\nTitle: A long\n title\nPost-History:\n\n"),
        ("rust_rfcs", "- Feature Name: `x`\n- Start Date: 2020-01-01\n\n"),
        ("keps", "- [Summary](#summary)\n  - [Goals](#goals)\n"),
    ],
)
def test_front_matter_headers_and_contents_are_left_out(corpus: str, head: str) -> None:
    row = {"id": "7", "abstract": "Short.", "abstract_span": [len(head), len(head)], "text": f"{head}A body. With two."}
    assert [sentence.text for sentence in sample_of(corpus, row).document.sentences] == ["A body.", "With two."]


def test_time_splits_each_corpus_and_no_document_is_in_two_parts(data: Path) -> None:
    parts = load(str(data / "longdocs"), CorpusSizes(validation=0.2, test=0.2))
    ids = [sample.id for samples in parts.values() for sample in samples]
    assert len(set(ids)) == len(ids) == 8 * len(CORPORA)
    for corpus in CORPORA:
        own = {part: [sample.id for sample in samples if sample.corpus == corpus] for part, samples in parts.items()}
        assert all(own.values())
        assert max(own["train"]) < min(own["validation"]) <= max(own["validation"]) < min(own["test"])


def test_documents_are_ordered_by_date_and_by_number_without_a_date() -> None:
    dates = {"1": "Created: 2021-05-05\n", "2": "", "3": "Created: 01-Jan-2020\n", "10": "created: (fill me in)\n"}
    rows = [{"id": f"x/{number}.md", "text": text} for number, text in dates.items()]
    assert [row["id"] for row in in_time(rows)] == ["x/3.md", "x/10.md", "x/1.md", "x/2.md"]


def test_a_proposal_that_moved_is_taken_once(data: Path, tmp_path: Path) -> None:
    (tmp_path / "longdocs").mkdir()
    for corpus in CORPORA:
        rows = [proposal(corpus, number) for number in range(8)]
        rows[7]["title"] = "The One"
        (tmp_path / "longdocs" / f"{corpus}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parts = load(str(tmp_path / "longdocs"), CorpusSizes(validation=0.2, test=0.2))
    kept = [sample.id for samples in parts.values() for sample in samples if "0007" in sample.id]
    assert kept == [f"{next(iter(CORPORA))}/0007.md"]


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="lacks longdocs/peps.jsonl"):
        reproduce("summarize", options(tmp_path, tmp_path))


@pytest.mark.slow
def test_real_proposals() -> None:
    folder = os.environ.get("GRAFTLM_DATA")
    if not folder or not (Path(folder) / FILES[0]).exists():
        pytest.skip("GRAFTLM_DATA names no folder with longdocs")
    parts = load(str(Path(folder) / "longdocs"), CorpusSizes(max_documents=8))
    for sample in (sample for samples in parts.values() for sample in samples):
        text = " ".join(sentence.text for sentence in sample.document.sentences)
        assert len(text) > 1000
        assert sample.summary[:200] not in text


@pytest.mark.slow
def test_selectors_at_equal_words(data: Path, tmp_path: Path) -> None:
    results = reproduce("summarize", options(data, tmp_path))
    check_selectors(results, seeds=1)
    for row in results.rows:
        words = [value_of(row.metrics[f"words_lead{count}"]) for count in LEADS]
        lead = [value_of(results.row("lead").metrics[f"words_lead{count}"]) for count in LEADS]
        assert row.id in ("fragments", *WRITTEN) or all(own <= most for own, most in zip(words, lead, strict=True))


def check_selectors(results: Results, seeds: int) -> None:
    assert [row.id for row in results.rows] == list(LABELS)
    assert len(results.seeds) == seeds
    assert len(results.details["search"]) == len(SETTINGS) == 48
    assert [aim.aim for aim in results.aims] == [4] * 6
    assert results.details["default_less"].keys() == {*ADDED}
    assert {kind: len(rows) for kind, rows in results.details["copy"].items()} == dict.fromkeys(WRITTEN, seeds) | {
        "human": 1
    }
    for kind in WRITTEN:
        metrics = results.row(kind).metrics
        assert metrics["words_lead3"] == metrics["words_lead10"]
    for name, aim in zip(results.details["differences"]["default"]["peps"], results.aims, strict=True):
        assert aim.metric == name
        above = [corpus[name]["low"] > 0 for corpus in results.details["differences"]["default"].values()]
        assert (aim.measured, aim.met) == (sum(above), sum(above) >= 4)


def test_the_committed_selectors_and_the_packaged_weights() -> None:
    folder = Path(summarize.__file__).parent
    results = Results.read(folder)
    check_selectors(results, seeds=3)
    kept = results.details["kept"]["default"]
    best = max(results.details["search"], key=lambda row: row["validation"])
    assert {name: best[name] for name in kept} == kept
    assert packaged_model().redundancy == kept["redundancy"]
    assert packaged_model().source == COMMAND


def test_the_oracle_adds_what_helps_and_fragments_are_runs_of_the_document() -> None:
    row = proposal("eips", 2) | {"abstract": "The new handle of eips is made of oak and people complain."}
    sample = sample_of("eips", row)
    first = best_sentences(sample, 100)[0]
    assert sample.document.sentences[first].text == "The new handle of eips is made of oak."
    assert best_sentences(sample, 9) == [first]
    assert longest_runs(sample) == ["the new handle of eips is made of oak", "people complain"]


WORDS = frequent_words([["a", "b", "c", "d", "."]], 9)
PAIRS = [
    (["a", "quokka", "b", "zyx", "a", "quokka"], ["b", "quokka", ".", "a"]),
    (["c", "d", "a"], ["zyx", "d"]),
]


def network(*, has_copy: bool = True) -> tuple[PointerGenerator, list[CopyExample]]:
    torch.manual_seed(3)
    model = PointerGenerator(len(WORDS), 5, has_copy=has_copy)
    torch.nn.init.normal_(model.coverage_weight)
    model.has_coverage = True
    return model, encode_examples(WORDS, PAIRS, 100)


@torch.inference_mode()
def teacher_forced(model: PointerGenerator, example: CopyExample) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Distribution and attention of each step of one document, without batch or padding."""
    memory, state = model.encode([example])
    steps = []
    for word in [START, *example.target[:-1]]:
        previous = model.embed(torch.tensor([word]))
        attention, state = model.step(previous, state, memory)
        steps.append((model.distribution(previous, attention, state, memory)[0], attention[0]))
    return steps


def test_words_of_the_source_alone_have_ids_behind_the_vocabulary() -> None:
    first, second = encode_examples(WORDS, PAIRS, 100)
    assert [[*WORDS, *first.extra][index] for index in first.source] == PAIRS[0][0]
    assert first.target == [WORDS.index("b"), len(WORDS), WORDS.index("."), WORDS.index("a"), END]
    assert second.target == [UNKNOWN, WORDS.index("d"), END]  # its source lacks the word


@torch.inference_mode()
def test_probabilities_sum_to_1_and_copies_go_to_the_places_of_their_words() -> None:
    model, examples = network()
    for example in examples:
        memory, state = model.encode([example])
        previous = model.embed(torch.tensor([START]))
        attention, state = model.step(previous, state, memory)
        _, logits, gate = model.output(previous, state.hidden, state.context)
        wanted = dict(enumerate((gate * logits[0].softmax(0)).tolist()))
        for place, word in enumerate(example.source):
            wanted[word] = wanted.get(word, 0.0) + ((1 - gate) * attention[0, place]).item()
        distribution = model.distribution(previous, attention, state, memory)[0].tolist()
        assert sum(distribution) == pytest.approx(1, abs=1e-5)
        assert distribution == pytest.approx([wanted[word] for word in range(len(distribution))], abs=1e-6)


@pytest.mark.parametrize("has_copy", [True, False])
@torch.inference_mode()
def test_the_losses_of_a_padded_batch_are_those_of_a_loop_over_words_and_places(has_copy: bool) -> None:
    model, examples = network(has_copy=has_copy)
    losses, overlaps = [], []
    for example in examples:
        covered = [0.0] * len(example.source)
        for (distribution, attention), word in zip(teacher_forced(model, example), example.target, strict=True):
            known = word if has_copy or word < len(WORDS) else UNKNOWN
            losses.append(-float(distribution[known].log()))
            overlap = 0.0
            for place, value in enumerate(attention.tolist()):
                overlap += min(value, covered[place])
                covered[place] += value
            overlaps.append(overlap)
    loss, overlap = model(examples)
    assert float(loss) == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert float(overlap) == pytest.approx(sum(overlaps) / len(overlaps), abs=1e-5)


@pytest.mark.slow
def test_a_word_outside_the_vocabulary_is_learned_and_written_by_copying_alone() -> None:
    pairs = [(["a", name, "b", "."], [name, "."]) for name in ("quokka", "zyx", "emu", "gnu")]
    unseen, texts = encode_examples(WORDS, [(["a", "okapi", "b", "."], [])], 100), dict[bool, str]()
    for has_copy in (True, False):
        model, _ = network(has_copy=has_copy)
        train(model, encode_examples(WORDS, pairs, 100), epochs=60, rate=0.02, seed=0)
        (texts[has_copy],) = model.write(WORDS, unseen, 5)
    assert texts[True] == "okapi ."
    assert "okapi" not in texts[False]
    assert "<unknown>" not in texts[False]


def test_copy_curves_tell_what_was_read_from_the_rest() -> None:
    sample = sample_of(
        "eips", proposal("eips", 2) | {"text": "One two three. " * 200 + "Four five six."} | {"abstract_span": [0, 0]}
    )
    curve = copy_curve([sample], {sample.id: "two three seven four five"})
    assert curve["read"] == [40.0, 25.0, 0.0, 0.0, 0.0]
    assert curve["rest"] == [40.0, 25.0, 0.0, 0.0, 0.0]
