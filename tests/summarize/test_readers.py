"""What was read: sentences point at their characters in the source, whatever the form of the file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib as mpl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from graftlm.errors import DataError, MissingExtraError, RecipeError
from graftlm.pipelines.summarize import SourceDocument, read_document, read_text
from graftlm.pipelines.summarize import readers as reading
from graftlm.pipelines.summarize.document import BlockKind, TextBlock, TextSpan, normalize_title
from graftlm.pipelines.summarize.document_builder import build_document
from graftlm.pipelines.summarize.readers.pdf_layout import merge_divided
from graftlm.pipelines.summarize.text import MAX_SENTENCE, split_sentences
from summarize.tools import TEA, pdf_pages, write_pdf

pypdf = pytest.importorskip("pypdf")

# How a word may be written in each form, and what takes the markup away again.
WRITTEN = {
    ".txt": ["{}"],
    ".md": ["{}", "*{}*", "**{}**", "`{}`", "[{}](http://a.b/c.d)", "[{}](x 'a. b')", "<b>{}</b>", "~~{}~~"],
    ".html": ["{}", "<b>{}</b>", '<a href="a.b">{}</a>', "<!-- A. B. -->{}", "<em\nid=x>{}</em>"],
    ".rst": ["{}", "*{}*", "**{}**", "``{}``", "`{} <http://a.b/c.d>`_", ":strong:`{}`", ":func:`{}`"],
    ".xml": ["{}", "<italic>{}</italic>", '<xref rid="a.b">{}</xref>', "<!-- A. B. -->{}", "<bold\nid='x'>{}</bold>"],
    ".tex": ["{}", r"\textbf{{{}}}", r"{{\em {}}}", r"{}\cite{{a.b}}", r"\emph{{{}}}", "% A. B.\n{}"],
}
MARKUP = {
    ".txt": r"(?!)",
    ".md": r"\]\([^)]*\)|[*`\[~]|</?b>",
    ".html": r"<!--.*?-->|<[^>]*>",
    ".rst": r" <http://a\.b/c\.d>`_|:(?:strong|func):|[*`]",
    ".xml": r"<!--.*?-->|<[^>]*>",
    ".tex": r"\\cite\{[^}]*\}|\\(?:textbf|emph|em )|[{}]|% A\. B\.\n",
}
WORD = st.text("aeiounrtlmsdéßжд", min_size=4, max_size=9)
SENTENCE = st.lists(WORD, min_size=2, max_size=6)
SPACE = st.sampled_from([" ", " ", "  ", "\n", "\r\n"])


@st.composite
def written(draw, suffix: str) -> tuple[str, list[str]]:
    """A source, and its words."""
    source, words = "<article><body>\n" * (suffix == ".xml"), []
    for paragraph in draw(st.lists(st.lists(SENTENCE, min_size=1, max_size=3), min_size=1, max_size=3)):
        source += "<p>" if suffix in (".html", ".xml") else ""
        for sentence in paragraph:
            for index, word in enumerate(sentence):
                text = word.capitalize() if index == 0 else word + "." * (index == len(sentence) - 1)
                words.append(text)
                source += draw(st.sampled_from(WRITTEN[suffix])).format(text) + draw(SPACE)
        source += "</p>" * (suffix == ".xml") + "\n\n"
    return source + "</body></article>" * (suffix == ".xml"), words


def check_spans(document: SourceDocument) -> None:
    """Spans rise, and what they cut out of the source is what the sentence says."""
    behind = (0, 0)
    for sentence in document.sentences:
        page = document.pages[(sentence.page or 1) - 1]
        assert page[sentence.start : sentence.end] == sentence.source
        assert behind <= ((sentence.page or 1), sentence.start) < ((sentence.page or 1), sentence.end)
        behind = (sentence.page or 1), sentence.end


@pytest.mark.parametrize("suffix", WRITTEN)
@settings(max_examples=2 * settings.default.max_examples)
@given(data=st.data())
def test_every_sentence_is_its_span_without_the_markup(suffix: str, data) -> None:
    source, words = data.draw(written(suffix))
    document = read_text(source, suffix)
    check_spans(document)
    assert " ".join(sentence.text for sentence in document.sentences).split() == words
    for sentence in document.sentences:
        bare = re.sub(MARKUP[suffix], "", sentence.source, flags=re.DOTALL)
        assert " ".join(bare.split()) == sentence.text


@settings(max_examples=2 * settings.default.max_examples)
@given(st.text(max_size=200))
@pytest.mark.parametrize("suffix", [".txt", ".md", ".html", ".tex", ".rst", ".xml"])
def test_any_text_is_read_or_refused_in_a_sentence(suffix: str, text: str) -> None:
    try:
        check_spans(read_text(text, suffix))
    except DataError as refusal:
        message = str(refusal)
        assert "sentence" in message or "XML" in message


def passages(document: SourceDocument) -> list[tuple[str, str]]:
    """Kind and text of what is no sentence, in order."""
    check_spans(document)
    for passage in document.passages:
        assert document.pages[(passage.page or 1) - 1][passage.start : passage.end] == passage.source
    return [(passage.kind, passage.text) for passage in document.passages]


def test_rst_knows_what_is_no_prose() -> None:
    source = """PEP: 9
Title: On tea
Author: A. Body

Abstract
========

Tea is :pep:`8` (see :ref:`this <x>`). It ends.

.. code-block:: python

    no.sentence()

An example::

    neither. This.

=====  =====
Cups   Cards
=====  =====
One.   Two.
=====  =====

.. math:: a. b

.. note:: Drink it hot.

.. unknown:: Not this.

.. A comment. Here.

References
==========

.. [1] A. Body. A book.
"""
    document = read_text(source, ".rst")
    assert [sentence.text for sentence in document.sentences] == [
        "Tea is PEP 8 (see this).", "It ends.", "An example:", "Drink it hot.",
    ]  # fmt: skip
    assert document.sentences[0].source == "Tea is :pep:`8` (see :ref:`this <x>`)."
    assert (document.title, document.abstract) == ("On tea", range(4))
    assert [kind for kind, _ in passages(document)] == [
        "field", "heading", "field", "heading", "code", "code", "table", "table", "table", "table", "formula",
        "heading", "reference",
    ]  # fmt: skip
    assert ("code", "no.sentence()") in passages(document)


def test_rst_reads_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("A secret is told here.")
    file = tmp_path / "secret.txt"
    source = f"One is here.\n\n.. include:: {file}\n\n.. raw:: html\n   :file: {file}\n"
    document = read_text(source, ".rst")
    assert "secret" not in " ".join(item.text for item in (*document.sentences, *document.passages))


JATS = """<?xml version="1.0" encoding="ISO-8859-1"?>
<!DOCTYPE article PUBLIC "-//NLM//DTD JATS//EN" "JATS.dtd">
<article><front><journal-meta><journal-title>No. Not this.</journal-title></journal-meta>
<article-meta><title-group><article-title>On tea</article-title></title-group>
<abstract><title>Abstract</title><sec><title>Background</title><p>Tea is &#100;runk &lt; water.</p></sec></abstract>
<abstract abstract-type="summary"><p>Not this one.</p></abstract></article-meta></front>
<body><sec><label>1</label><title>Introduction</title><p>Cafés sell <italic>tea</italic> [<xref>1</xref>].
<disp-formula>a. b</disp-formula></p>
<fig><label>Fig</label><caption><title>A cup.</title><p>It is empty.</p></caption></fig>
<table-wrap><caption><p>Cups.</p></caption><table><tr><td>One. Two.</td></tr></table></table-wrap></sec>
<sec><title>Method</title><sec><title>Cards</title><p>They sorted\r\ncards&nbsp;here.</p></sec></sec></body>
<back><ack><title>Thanks</title><p>We thank all. </p></ack><ref-list><title>References</title>
<ref><mixed-citation>A. Body. A book.</mixed-citation></ref></ref-list></back></article>"""


def test_jats_is_read_with_its_abstract() -> None:
    document = read_text(JATS, ".xml")
    assert [(sentence.text, document.sections[sentence.section].title) for sentence in document.sentences] == [
        ("Tea is drunk < water.", "Background"),
        ("Cafés sell tea [1].", "Introduction"),
        ("They sorted cards here.", "Cards"),
    ]
    assert document.sentences[0].source == "Tea is &#100;runk &lt; water."
    assert (document.abstract, document.introduction) == (range(1), range(1, 2))
    assert [(section.title, section.level) for section in document.sections[1:]] == [
        ("Abstract", 1), ("Background", 2), ("Introduction", 1), ("Method", 1), ("Cards", 2), ("References", 1),
    ]  # fmt: skip
    kinds = [kind for kind, _ in passages(document) if kind != "heading"]
    assert kinds == ["field", "formula", "caption", "caption", "caption", "table", "field", "field", "reference"]


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("<TEI><p>One is here.</p></TEI>", "<TEI>"),
        ("<article><p>One is here.</article>", "mismatched tag: line 1, column 26"),
        ("<article><body><p>1</p></body></article>" * 2, "line 1, column 40"),
        ("no tag at all", "line 1, column 0"),
    ],
)
def test_other_xml_is_refused(tmp_path: Path, source: str, cause: str) -> None:
    (tmp_path / "a.xml").write_text(source)
    with pytest.raises(DataError) as error:
        read_document(tmp_path / "a.xml")
    assert str(error.value).startswith(str(tmp_path / "a.xml"))
    assert cause in str(error.value)


def test_html_knows_its_navigation() -> None:
    source = """<body><div role="banner">A site. With a name.</div>
<ul class="site-nav"><li><a href="a">One is here.</a></ul>
<main><h1 class="toc">Tea</h1><p><a href="b">Next: water</a> <a href="c">Up</a><p>Tea is good.
<div id="toc"><div>In it.</div> Not here.</div><p>Read <a href="d">this book about tea and water</a>.
<figure><pre>code. x</pre><figcaption>A cup. Empty.</figcaption></figure>
<h2>Use<a class="headerlink">#</a></h2><dl><dt>tea<dd>It is a plant.</dl>
</main><p>This is outside. <footer>The end.</footer>"""
    document = read_text(source, ".html")
    assert [sentence.text for sentence in document.sentences] == [
        "Tea is good.", "Read this book about tea and water.", "It is a plant.",
    ]  # fmt: skip
    assert [section.title for section in document.sections if section.level] == ["Tea", "Use"]
    assert [kind for kind, _ in passages(document)] == [
        "furniture", "furniture", "heading", "furniture", "furniture", "furniture", "code", "caption", "heading",
        "field", "furniture", "furniture",
    ]  # fmt: skip


def test_no_sentence_is_long_and_code_does_not_end_one() -> None:
    document = read_text("We call await! and go on. Now " + "word, " * 700 + "end. " + "x" * 3000)
    check_spans(document)
    assert document.sentences[0].text == "We call await! and go on."
    assert max(len(sentence.text) for sentence in document.sentences) == MAX_SENTENCE
    assert all(sentence.text.endswith(",") for sentence in document.sentences[1:5])


def test_only_whole_sentences_are_selected_where_there_are_enough() -> None:
    text = "Tea is drunk by many.\n\n- a cup of tea\n\nWater is drunk by all. Yes. 1 + 2 = 3 and 4 (5).\n\nof the cup."
    document = read_text(text)
    assert [document.sentences[index].text for index in document.selectable] == [
        "Tea is drunk by many.", "Water is drunk by all.",
    ] or len(document.selectable) == 6  # fmt: skip
    informal = read_text("tea is good. water is wet.")
    assert informal.selectable == [0, 1]


def test_divided_sentences_are_counted_in_a_note() -> None:
    (note,) = read_text("Short. " + "word, " * 700 + "end. " + "x" * 3000).notes
    assert "1,000" in note
    assert "(2 in all)" in note
    assert read_text("Short. " + "word " * 150 + "end.").notes == ()


@pytest.mark.parametrize("code", ["de", "pt-BR", "no", "gsw"])
def test_codes_of_languages(code: str) -> None:
    assert read_text("One is here.", language=code).language == code.lower()


@pytest.mark.parametrize("code", ["english", "th", "km", "xx", "xx-de"])
def test_a_language_that_can_t_be_split_by(code: str) -> None:
    with pytest.raises(RecipeError) as error:
        read_text("One is here.", language=code)
    assert repr(code) in str(error.value)


def write_columns(path: Path) -> Path:
    """Three pages with running heads and numbers, two columns, a heading, a caption, code and a divided word."""
    left = (
        "Tea is drunk by many peo-\nple of the world. They are\nwell-known for it. The left\ncolumn ends in the middle"
    )
    right = "of a sentence. The right one\nhas a well-\nknown end.\n\nFigure 1. A cup. It is empty."
    with mpl.rc_context({"pdf.fonttype": 42}), PdfPages(path) as pdf:
        for number in range(1, 4):
            figure = Figure(figsize=(8, 11))
            figure.text(0.1, 0.95, f"Studies of tea, {number}", fontsize=8)
            figure.text(0.5, 0.03, str(number), fontsize=8)
            figure.text(0.1, 0.8, "On cups", fontsize=16)
            figure.text(0.1, 0.7, left, va="top", fontsize=10)
            figure.text(0.55, 0.7, right, va="top", fontsize=10)
            figure.text(0.1, 0.3, "x = tea(cup). Not prose.", family="monospace", fontsize=10)
            pdf.savefig(figure)
    return path


def test_a_pdf_has_columns_heads_and_divided_words(tmp_path: Path) -> None:
    document = read_document(write_columns(tmp_path / "a.pdf"))
    assert [sentence.text for sentence in document.sentences if sentence.page == 2] == [
        "Tea is drunk by many people of the world.",
        "They are well-known for it.",
        "The left column ends in the middle of a sentence.",
        "The right one has a well-known end.",
    ]
    assert {section.title for section in document.sections if section.level} == {"On cups"}
    kinds = sorted(kind for kind, _ in passages(document) if kind != "heading")
    assert kinds == sorted(3 * ["furniture", "furniture", "caption", "code"])


def test_markdown_leaves_out_what_is_no_prose() -> None:
    source = "---\ntitle: No. Not this.\n---\n\nOne &amp; two\\*.\n\n| a. | b. |\n|---|---|\n| c. | d. |\n\n"
    source += "```\ncode. x\n```\n\n"
    source += "> - Three ![alt. x](i.png) `fo\n>   ur` five.\n"
    found = [(sentence.text, sentence.source) for sentence in read_text(source, ".md").sentences]
    assert found == [
        ("One & two*.", "One &amp; two\\*."),
        ("Three fo ur five.", "Three ![alt. x](i.png) `fo\n>   ur` five."),
    ]


def test_html_leaves_out_what_is_no_prose() -> None:
    source = "<head><title>No.</title></head><script>x. y</script><h2>Head</h2>"
    source += "Caf&eacute; is&nbsp;1 &lt 2.<table><td>T.</table><p>B"
    document = read_text(source, ".html")
    assert [sentence.text for sentence in document.sentences] == ["Café is 1 < 2.", "B"]
    assert document.sentences[0].source == "Caf&eacute; is&nbsp;1 &lt 2."
    assert [section.title for section in document.sections] == ["Head"]


def test_latex_reads_what_is_printed() -> None:
    source = r"""\documentclass{article}\title{No.}\begin{document}\begin{abstract}We do it.\end{abstract}
\section{On \emph{tea}}\label{s. t} It's caf\'e~$x^2$ --- 5\% more\footnote{A. B.}.
\begin{equation}a. b\end{equation} \begin{itemize}\item One.\item Two.\end{itemize}\end{document}"""
    document = read_text(source, ".tex")
    assert [sentence.text for sentence in document.sentences] == [
        "We do it.", "It's café $x^2$ — 5% more.", "One.", "Two.",
    ]  # fmt: skip
    assert document.sentences[1].source == r"It's caf\'e~$x^2$ --- 5\% more\footnote{A. B.}."
    assert [section.title for section in document.sections] == ["Abstract", "On tea"]
    check_spans(document)


def test_plain_text_has_headings_and_items() -> None:
    source = "\ufeffTitle\n=====\n\nOne is\nhere.\n- two\n- three\n\n2.1 Methods\n\nFour.\n\nRESULTS\n\nFive."
    source = source.replace("\n", "\r\n")
    document = read_text(source, ".txt")
    check_spans(document)
    assert [sentence.text for sentence in document.sentences] == ["One is here.", "two", "three", "Four.", "Five."]
    assert [(section.title, section.level) for section in document.sections] == [
        ("Title", 1), ("2.1 Methods", 2), ("RESULTS", 1),
    ]  # fmt: skip


def test_a_pdf_tells_the_page(tmp_path: Path) -> None:
    document = read_document(write_pdf(tmp_path / "a.pdf", "1 Introduction\n\nOne is\nhere. Two.", "2 Method\nThree."))
    check_spans(document)
    assert [(sentence.text, sentence.page) for sentence in document.sentences] == [
        ("One is here.", 1), ("Two.", 1), ("Three.", 2),
    ]  # fmt: skip
    pages = pdf_pages(tmp_path / "a.pdf")
    third = document.sentences[2]
    assert pages[1][third.start : third.end] == "Three."
    assert document.introduction == range(2)


def test_introduction_and_what_may_be_selected() -> None:
    document = read_text(TEA, ".md")
    assert document.introduction == range(3)
    assert document.selectable == list(range(9))  # not the reference
    assert read_text("No heading at all. None.").introduction is None
    nested = read_text("# Introduction\n\n## Why\n\nOne. Two.\n\n# Method\n\nThree.", ".md")
    assert nested.introduction == range(2)


@pytest.mark.parametrize(
    ("title", "plain"),
    [
        ("2.1 Background:", "background"),
        ("IV. Results", "results"),
        ("Appendix A. Proofs", "proofs"),
        ("Introduction", "introduction"),
        ("Proposal", "proposal"),
        ("A proposal", "a proposal"),
    ],
)
def test_headings_lose_their_number(title: str, plain: str) -> None:
    assert normalize_title(title) == plain


@pytest.mark.parametrize(
    ("text", "language", "count"),
    [
        ("你好。我叫李明！你呢？", "zh", 3),
        ("これはテストです。次の文です。", "ja", 2),
        ("هذا اختبار. هل هذا صحيح؟ نعم.", "ar", 3),
        ("שלום לך. מה שלומך? טוב.", "he", 3),
        ("यह एक वाक्य है। यह दूसरा है।", "hi", 2),
        ("Это тест. Вот второй.", "ru", 2),
        ("See e.g. Fig. 2 of the U.S. report. It costs $3.50.", "en", 2),
    ],
)
def test_scripts_are_split_by_their_marks(text: str, language: str, count: int) -> None:
    document = read_text(text)
    check_spans(document)
    assert (document.language, len(document.sentences)) == (language, count)


def test_a_script_without_marks_is_refused() -> None:
    with pytest.raises(DataError, match="Thai"):
        read_text("สวัสดีครับ ผมชื่อสมชาย")


def test_a_line_break_is_a_space_to_the_splitter() -> None:
    assert len(list(split_sentences("It was Dr.\nSmith who came. He left."))) == 2


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.docx", b"x", ".docx"),
        ("a.txt", b"caf\xe9", "UTF-8"),
        ("a.txt", b"a\0b", "NUL"),
        ("a.txt", b" \n--- \n", "no sentence"),
        ("a.md", b"```\nx\n```", "no sentence"),
        ("a.pdf", b"hello", "PDF"),
        ("a.pdf", b"", "PDF"),
    ],
)
def test_what_can_not_be_read_is_told_in_a_sentence(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as error:
        read_document(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)
    assert message in str(error.value)
    with pytest.raises(DataError) as missing:
        read_document(tmp_path / "none.txt")
    assert str(tmp_path / "none.txt") in str(missing.value)


def test_encrypted_and_scanned_pdfs_are_refused(tmp_path: Path) -> None:
    whole = write_pdf(tmp_path / "a.pdf", "One. Two.")
    for name, password in (("locked", "secret"), ("open", "")):
        writer = pypdf.PdfWriter(clone_from=whole)
        writer.encrypt(password, owner_password="owner", algorithm="RC4-128")
        writer.write(tmp_path / f"{name}.pdf")
    assert len(read_document(tmp_path / "open.pdf").sentences) == 2  # protected against changes alone
    with pytest.raises(DataError):
        read_document(tmp_path / "locked.pdf")
    picture = Path(mpl.get_data_path()) / "images" / "home.pdf"
    with pytest.raises(DataError, match="OCR"):
        read_document(picture)
    (tmp_path / "half.pdf").write_bytes(whole.read_bytes()[:300])
    with pytest.raises(DataError) as error:
        read_document(tmp_path / "half.pdf")
    assert str(tmp_path / "half.pdf") in str(error.value)


def test_a_file_of_200_mb_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(200_000_000)
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("was read"))
    with pytest.raises(DataError) as error:
        read_document(tmp_path / "a.txt")
    assert "200,000,000" in str(error.value)


def test_too_much_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_CHARACTERS", 20)
    with pytest.raises(DataError) as long_text:
        read_text("x" * 21)
    assert "21 characters" in str(long_text.value)
    with pytest.raises(DataError) as long_pdf:
        read_document(write_pdf(tmp_path / "a.pdf", "One two three.", "Four five six."))
    assert "20 characters" in str(long_pdf.value)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "markdown_it", None)
    with pytest.raises(MissingExtraError) as error:
        build_document("x", ["x"], reading.markdown_blocks("x", []))
    assert "markdown-it-py" in str(error.value)
    assert "graftlm[summarize]" in str(error.value)


@pytest.mark.parametrize(("name", "suffix"), [("eips", ".md"), ("keps", ".md"), ("peps", ".rst")])
def test_real_documents_keep_their_places(data_dir: Path, name: str, suffix: str) -> None:
    with (data_dir / "longdocs" / f"{name}.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(next(file)) for _ in range(10)]
    for row in rows:
        document = read_text(row["text"], suffix, row["id"])
        check_spans(document)
        for sentence in document.sentences:
            if "&" in sentence.source or "\\" in sentence.source:
                continue
            rest = iter(sentence.source.lower())  # a role such as :pep:`8` is read as PEP 8
            assert all(letter in rest for letter in sentence.text.lower() if letter != " "), row["id"]


@pytest.mark.parametrize("suffix", [".txt", ".md", ".rst", ".html", ".tex"])
def test_a_paragraph_with_the_number_of_a_figure_is_a_caption(suffix: str) -> None:
    texts = ["Cats are good animals.", "Table 1: Results of all runs.", "Table 1 has results of all runs."]
    body = "".join(f"<p>{text}</p>" for text in texts) if suffix == ".html" else "\n\n".join(texts)
    document = read_text(body, suffix)
    assert [sentence.text for sentence in document.sentences] == [texts[0], texts[2]]
    assert [(passage.text, passage.kind) for passage in document.passages] == [(texts[1], "caption")]


def test_the_abbreviation_of_an_equation_ends_no_sentence() -> None:
    text = "We show in Eq. (2) that cats sleep. See Figs. 3 and 4."
    assert [sentence.text for sentence in read_text(text).sentences] == [
        "We show in Eq. (2) that cats sleep.",
        "See Figs. 3 and 4.",
    ]


def test_an_accent_on_a_question_mark_begins_no_sentence() -> None:
    document = read_text(r"Hello \r? There.", ".tex")
    check_spans(document)


def test_a_text_of_an_unknown_form_is_refused() -> None:
    for suffix in (".docx", ".pdf", ""):
        with pytest.raises(DataError) as error:
            read_text("One. Two.", suffix)
        assert repr(suffix) in str(error.value)


def test_blocks_that_divide_a_paragraph_follow_it_and_others_keep_their_place() -> None:
    def block(text: str, kind: BlockKind = "prose", level: int = 0) -> TextBlock:
        return TextBlock((TextSpan(text, 0, len(text)),), level, 1, kind)

    heading = block("Tea", level=1)
    table = block("1 2", "table")
    first = block("A paragraph that a note")
    note = block("*", "note")
    second = block("divides.")
    merged = [found.text for found in merge_divided([table, heading, table, first, note, second, table])]
    assert merged == ["1 2", "Tea", "1 2", "A paragraph that a notedivides.", "*", "1 2"]
