"""Many documents: one in memory at a time, a bad one stops none, and an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
import resource
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli.tools import invoke
from graftlm.errors import DataError, RecipeError
from graftlm.pipelines.summarize import (
    LeadSelector,
    Summary,
    append_summaries,
    find_documents,
    pending_documents,
    summarize_many,
)
from graftlm.pipelines.summarize import batch as many
from graftlm.pipelines.summarize.selection import Extract
from graftlm.pipelines.summarize.writer import WriterOutput

pytest.importorskip("sentencex")
FORMS = {
    "txt": "INTRODUCTION\n\nTea {n} is good. Water is wet.\n\nRESULTS\n\nCup {n} was full. Nobody drank it.\n",
    "md": "# Introduction\n\nTea {n} is *good*. Water is wet.\n\n# Results\n\nCup {n} was full. Nobody drank it.\n",
    "html": "<h1>Introduction</h1><p>Tea {n} is <b>good</b>. Water is wet.</p><p>Cup {n} was full. Nobody drank it.",
    "tex": r"\section{{Introduction}} Tea {n} is \emph{{good}}. Water is wet. Cup {n} was full. Nobody drank it.",
}
BAD = {"empty.txt": b"", "bytes.txt": b"caf\xe9", "half.pdf": b"%PDF-1.4\n", "thai.txt": "สวัสดีครับ".encode()}
OPTIONS = {"budget": "2 sentences"}


def write_documents(folder: Path, count: int) -> list[Path]:
    paths = []
    for number in range(count):
        suffix = list(FORMS)[number % len(FORMS)]
        paths.append(folder / f"{number:04}.{suffix}")
        paths[-1].write_text(FORMS[suffix].format(n=number), encoding="utf-8")
    return paths


def rows_in(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_a_thousand_documents_stream_through(tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out.jsonl"
    folder.mkdir()
    write_documents(folder, 1000 - len(BAD))
    for name, data in BAD.items():
        (folder / name).write_bytes(data)
    invoke("summarize", str(folder / "0000.txt"), "--batch")  # what is imported and cached once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = invoke("summarize", str(folder), "--out", str(out), "--budget", "2")
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 50_000, "kilobytes: a document is forgotten when its row is written"
    rows = {Path(row["document"]).name: row for row in rows_in(out)}
    assert (done.code, len(rows)) == (2, 1000)
    assert f"{len(BAD)} of 1000" in done.err
    errors = {name: row["error"] for name, row in rows.items() if "error" in row}
    assert set(errors) == set(BAD)
    assert all(str(folder / name) in error and error.count("\n") == 0 for name, error in errors.items())
    for number in (1, 2, 3, 500, 995):
        row = next(row for name, row in rows.items() if name.startswith(f"{number:04}"))
        source = Path(row["document"]).read_text()
        sentences = row["extract"]["sentences"]
        assert len(sentences) == 2
        assert all(source[item["start"] : item["end"]] == item["source"] for item in sentences)


@pytest.mark.slow
def test_one_large_document_is_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "_LARGE_FILE", 50)
    write_documents(tmp_path, 4)
    held: list[weakref.ref] = []
    alive = 0
    for result in summarize_many(find_documents([tmp_path])):
        assert isinstance(result, Summary)
        held.append(weakref.ref(result.document))
        del result
        alive = max(alive, sum(item() is not None for item in held))
    assert (len(held), alive) == (4, 1)


class Stops:
    """A selector that is interrupted at some document."""

    name = "Lead"

    def __init__(self, at: int) -> None:
        self.left = at

    def rank(self, document):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return LeadSelector().rank(document)


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, out = write_documents(tmp_path, 9), tmp_path / "out" / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        list(append_summaries(out, pending_documents(out, paths, OPTIONS), OPTIONS, selector=Stops(5)))
    assert len(rows_in(out)) == 5
    out.write_bytes(out.read_bytes()[:-30])  # as a kill amid writing leaves it
    seen: list[Path] = []
    whole = many.summarize
    monkeypatch.setattr(many, "summarize", lambda path, **more: seen.append(path) or whole(path, **more))
    list(append_summaries(out, pending_documents(out, paths, OPTIONS), OPTIONS, selector=LeadSelector()))
    assert seen == paths[4:]
    at_once = tmp_path / "at-once.jsonl"
    list(append_summaries(at_once, pending_documents(at_once, paths, OPTIONS), OPTIONS, selector=LeadSelector()))
    assert rows_in(out) == rows_in(at_once)
    assert pending_documents(out, paths, OPTIONS) == []
    assert not list(out.parent.glob(".*"))


def test_what_failed_or_was_changed_is_done_again(tmp_path: Path) -> None:
    paths, out = write_documents(tmp_path, 3), tmp_path / "rows.jsonl"
    paths[0].write_text("")
    first = list(append_summaries(out, pending_documents(out, paths, OPTIONS), OPTIONS, selector=LeadSelector()))
    assert ["error" in row for row in first] == [True, False, False]
    paths[0].write_text("Tea is good. Water is wet.")
    paths[2].write_text("Coffee is better.")
    assert pending_documents(out, [paths[2], paths[0], paths[1]], OPTIONS) == [paths[2], paths[0]]
    list(append_summaries(out, [paths[2], paths[0]], OPTIONS, selector=LeadSelector()))
    result = {row["document"]: row.get("summary") for row in rows_in(out)}
    assert result[str(paths[2])] == "Coffee is better."
    assert len(result) == len(rows_in(out)) == 3
    assert pending_documents(out, [], OPTIONS) == []
    assert len(rows_in(out)) == 3, "rows of other documents stay"


def test_a_file_holds_summaries_of_one_kind(tmp_path: Path) -> None:
    paths, out = write_documents(tmp_path, 1), tmp_path / "rows.jsonl"
    list(append_summaries(out, paths, OPTIONS, selector=LeadSelector()))
    with pytest.raises(RecipeError) as error:
        pending_documents(out, paths, {"budget": "3 sentences"})
    assert "budget 2 sentences" in str(error.value)
    assert "budget 3 sentences" in str(error.value)
    done = invoke("summarize", str(paths[0]), "--out", str(out), "--budget", "3")
    assert (done.code, done.out) == (2, "")
    for line in ('{"a": 1}', "[1]", "tea"):
        out.write_text(line + "\n")
        with pytest.raises(DataError) as unreadable:
            pending_documents(out, paths, OPTIONS)
        assert "rows.jsonl line 1" in str(unreadable.value)
    with pytest.raises(DataError):
        list(append_summaries(tmp_path, paths, OPTIONS, selector=LeadSelector()))


def test_a_library_that_stumbles_stops_no_other_document(tmp_path: Path) -> None:
    class Stumbles:
        name = "stumbles"

        def rank(self, document):
            if "Tea 0" in document.sentences[0].text:
                raise RecursionError("maximum recursion depth exceeded\nin something")
            return LeadSelector().rank(document)

    first, second = summarize_many(write_documents(tmp_path, 2), selector=Stumbles())
    assert isinstance(first, many.SummaryFailure)
    assert "RecursionError: maximum recursion depth exceeded" in first.error
    assert "something" not in first.error, "only the first line of the message"
    assert isinstance(second, Summary)


class Together:
    """A writer that keeps how many documents it completed at once."""

    name = "together"
    reads_introduction = True

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def write_batch(self, extracts: Sequence[Extract]) -> list[WriterOutput]:
        self.sizes.append(len(extracts))
        return [WriterOutput(extract.text) for extract in extracts]


def test_a_writer_completes_several_documents_at_once(tmp_path: Path) -> None:
    paths, together = write_documents(tmp_path, 5), Together()
    results = list(summarize_many(paths, 2, writer=together))
    assert together.sizes == [2, 2, 1]
    assert [result.document.name for result in results if isinstance(result, Summary)] == list(map(str, paths))
    alone = [many.summarize(path, writer=Together()) for path in paths]
    assert [result.to_json() for result in results] == [summary.to_json() for summary in alone]
    paths[1].write_bytes(b"")
    results = list(summarize_many(paths, 3, writer=together))
    assert [isinstance(result, Summary) for result in results] == [True, False, True, True, True]


def test_documents_are_found_once_each(tmp_path: Path) -> None:
    paths = write_documents(tmp_path, 5)
    (tmp_path / "notes.docx").write_text("x")
    assert list(find_documents([paths[3], tmp_path])) == [paths[3], *(path for path in paths if path != paths[3])]
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError) as error:
        list(find_documents([tmp_path / "none"]))
    assert str(tmp_path / "none") in str(error.value)


def test_skipped_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    for name in ("a.md", "b.RST", "c.docx", "LICENSE", ".git/config"):
        (tmp_path / name).write_text("Tea is good. Water is wet.")
    warnings: list[str] = []
    documents = list(find_documents([tmp_path], warn=warnings.append))
    assert [path.name for path in documents] == ["a.md", "b.RST"]
    skipped = [warning.split(" ")[0] for warning in warnings]
    assert skipped == [str(tmp_path / "LICENSE"), str(tmp_path / "c.docx")]
    done = invoke("summarize", str(tmp_path), "--batch")
    assert f"warning: {warnings[1]}" in done.err.splitlines()
    assert "warning" not in invoke("summarize", str(tmp_path), "--batch", "--quiet").err


def test_a_batch_has_at_least_one_document(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        list(summarize_many(write_documents(tmp_path, 1), 0))
    assert "batch_size" in str(error.value)
