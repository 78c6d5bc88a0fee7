"""Documents that can't be summarized are refused in one sentence; odd ones are summarized with one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from cli.tools import invoke
from graftlm.pipelines.summarize import Budget, Extract, LeadSelector, read_text, summarize
from graftlm.pipelines.summarize.writer import WriterOutput
from summarize.tools import TEA, write_pdf

pypdf = pytest.importorskip("pypdf")
pytest.importorskip("sumy")


def refused(path: Path) -> str:
    """The one line that `graft summarize` says, with exit code 2 and nothing on stdout."""
    done = invoke("summarize", str(path))
    assert (done.code, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith(f"error: {path} ")
    assert line.endswith(".")
    return line


def test_an_encrypted_pdf(tmp_path: Path) -> None:
    writer = pypdf.PdfWriter(clone_from=write_pdf(tmp_path / "a.pdf", "One. Two."))
    writer.encrypt("secret", algorithm="RC4-128")
    writer.write(tmp_path / "locked.pdf")
    assert "encrypted" in refused(tmp_path / "locked.pdf")


def test_a_scanned_pdf(tmp_path: Path) -> None:
    with PdfPages(tmp_path / "scan.pdf") as pdf:
        for _ in range(2):
            figure = Figure(figsize=(4, 5))
            figure.figimage([[index * row % 7 for index in range(200)] for row in range(200)])
            pdf.savefig(figure)
    line = refused(tmp_path / "scan.pdf")
    assert "pages: 2" in line
    assert "OCR" in line


@pytest.mark.parametrize("suffix", [".txt", ".md", ".html", ".tex", ".rst", ".xml"])
def test_200_mb_of_text(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"long{suffix}"
    with path.open("wb") as file:
        file.truncate(200_000_000)  # refused before it is read
    line = refused(path)
    assert "200,000,000" in line
    assert "80,000,000" in line


def test_a_script_without_marks(tmp_path: Path) -> None:
    (tmp_path / "thai.txt").write_text("สวัสดีครับ ผมชื่อสมชาย", encoding="utf-8")
    assert "Thai" in refused(tmp_path / "thai.txt")


def test_utf_16(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Tea is good.".encode("utf-16"))
    assert "UTF-16" in refused(tmp_path / "a.txt")


def test_xml_that_is_not_jats(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text("<TEI><text><p>Tea is good.</p></text></TEI>")
    assert "<TEI>" in refused(tmp_path / "a.xml")


def test_a_language_that_the_splitter_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Tea is good.")
    done = invoke("summarize", str(tmp_path / "a.txt"), "--language", "english")
    assert (done.code, done.out) == (2, "")
    assert "'english'" in done.err


def test_an_abstract_of_its_own_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# Tea\n\n## Abstract\n\nTea is good. Water is wet.\n\n## Method\n\nWe drank.")
    summary = summarize(tmp_path / "a.md")
    assert summary.to_json()["abstract"] == ["Tea is good.", "Water is wet."]
    assert any("20–46" in note for note in summary.notes)


def test_a_document_of_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("Tea is good.")
    done = invoke("summarize", str(tmp_path / "one.txt"))
    assert done.code == 0
    assert done.out.splitlines()[0] == "Tea is good. [1]"
    assert f"note: {tmp_path / 'one.txt'} " in done.err


def test_an_extract_as_long_as_the_document() -> None:
    summary = summarize(
        read_text(TEA, ".md"), selector=LeadSelector(), budget=Budget(amount=100_000, unit="characters")
    )
    assert len(summary.extract.indices) == 9, "all but the reference"
    whole = summarize(read_text("Tea is good. Water is wet."), selector=LeadSelector(), budget=Budget(amount=10))
    assert len(whole.notes) == 1


class Says:
    """A writer that writes what a test tells it."""

    name = "says"
    reads_introduction = True

    def __init__(self, text: str) -> None:
        self.text = text

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def write_batch(self, extracts: Sequence[Extract]) -> list[WriterOutput]:
        return [WriterOutput(self.text) for _ in extracts]


def test_a_written_summary_longer_than_its_document() -> None:
    short = "# Introduction\n\nTea is good. Water is wet."
    notes = summarize(read_text(short, ".md"), selector=LeadSelector(), writer=Says("Tea is good. " * 3)).notes
    assert len(notes) == 2
    assert len(summarize(read_text(short, ".md"), selector=LeadSelector(), writer=Says("Tea.")).notes) == 1


def test_a_document_without_an_introduction() -> None:
    summary = summarize(read_text("One is here. Two is. Three."), selector=LeadSelector(), writer=Says("One."))
    assert any("introduction" in note for note in summary.notes)
    assert (
        summarize(read_text(TEA, ".md"), selector=LeadSelector(), writer=Says("One."), budget=Budget(amount=2)).notes
        == ()
    )


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("هذا اختبار طويل. هل هذا صحيح؟ نعم، إنه كذلك.", ["هذا اختبار طويل.", "هل هذا صحيح؟", "نعم، إنه كذلك."]),
        ("یہ ایک جملہ ہے۔ یہ دوسرا ہے۔ تیسرا یہاں۔", ["یہ ایک جملہ ہے۔", "یہ دوسرا ہے۔", "تیسرا یہاں۔"]),
        ('ד"ר כהן בא. הוא הלך הביתה. מה שלומך?', ['ד"ר כהן בא.', "הוא הלך הביתה.", "מה שלומך?"]),
        ("他在 2019 年发布\n了 v3.5 版。真的\r\n吗？是。", ["他在 2019 年发布了 v3.5 版。", "真的吗？", "是。"]),
        ("これは\nテストです。次の文です！本当ですか？", ["これはテストです。", "次の文です！", "本当ですか？"]),
        ("이것은 시험입니다. 두 번째\n문장입니다! 맞나요?", ["이것은 시험입니다.", "두 번째 문장입니다!", "맞나요?"]),
    ],
    ids=["arabic", "urdu", "hebrew", "chinese", "japanese", "korean"],
)
def test_right_to_left_and_cjk_are_split_at_their_marks(tmp_path: Path, text: str, sentences: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    summary = summarize(path, budget=Budget(amount=3))
    assert [sentence.text for sentence in summary.extract.sentences] == sentences
    assert [text[sentence.start : sentence.end] for sentence in summary.extract.sentences] == [
        sentence.source for sentence in summary.extract.sentences
    ]
    assert summary.text == " ".join(sentences)
    assert summary.faithfulness.words == 1


GERMAN = "Die Bundesregierung hat beschlossen, den Ausbau der Windkraft an der Küste zu fördern. " * 5


def test_a_text_that_does_not_look_english_is_told(tmp_path: Path) -> None:
    (tmp_path / "de.txt").write_text(GERMAN)
    english = "The house of the king is in the old town, and it is as good as that of a queen. " * 5
    (tmp_path / "en.txt").write_text(english)

    def notes(name: str, language: str | None = None) -> str:
        return " ".join(summarize(tmp_path / name, language=language).notes)

    assert "English" in notes("de.txt")
    assert "English" not in notes("de.txt", "de") + notes("en.txt")


def test_options_without_effect_and_two_forms_of_json_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Tea is good for all people.")
    assert "--writer" in invoke("summarize", str(tmp_path / "a.txt"), "--length", "5").err
    assert "--writer" not in invoke("summarize", str(tmp_path / "a.txt")).err
    done = invoke("summarize", str(tmp_path / "a.txt"), "--json", "--out", str(tmp_path / "o.jsonl"))
    assert done.code == 2
    assert "--json" in done.err
