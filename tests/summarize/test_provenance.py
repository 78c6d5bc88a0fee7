"""Every sentence of an extract is its characters in a real file: PDF by two writers, HTML, Markdown, LaTeX."""

from __future__ import annotations

import html
import itertools
import pydoc_data.topics
import re
import shutil
import textwrap
from pathlib import Path

import pytest

from cases import thinned
from graftlm.pipelines.summarize import Budget, SourceDocument, read_document, read_text, summarize
from summarize.tools import pdf_pages, write_pdf

pytest.importorskip("pdfminer")
pytest.importorskip("sumy")
ROOT = Path(__file__).parents[2]
PROSE = read_text(pydoc_data.topics.topics["execmodel"], ".rst")  # Python's own reference: 4 pages of real prose
MARKDOWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
ARTICLE = r"""\documentclass{article}
\usepackage{graphicx} % for the figure
\title{Sorting cards by tea}
\begin{document}
\maketitle
\begin{abstract}
We study what tea does to attention~\cite{a.b}. Persons who drank it sorted 12\% more cards.
\end{abstract}
\section{Introduction}\label{sec:intro}
Tea is drunk by \emph{many} people, e.g.\ in Asia (see Fig.~\ref{fig:cup}).
Dr.~M\"uller asked in 1999 whether $a \leq b$ holds. % a remark. It ends.
Nobody answered\footnote{As far as we know. We looked.}.

\subsection*{Persons}
There were three groups:
\begin{itemize}
  \item Those who drank \textbf{tea}.
  \item Those who drank water, and sorted
    cards for 20 minutes.
\end{itemize}
\begin{figure}\includegraphics{cup.png}\caption{A cup. It is empty.}\end{figure}
\begin{equation} a_i = \sum_j b_{ij}. \end{equation}
The caf\'e was closed --- so they stayed ``at home''.
\end{document}
"""


def squeezed(text: str) -> str:
    return "".join(text.split())


def check_extract(path: Path, amount: int = 8) -> SourceDocument:
    """The extract of a file, sentence by sentence: the source has it at its place, and the file has that source."""
    summary = summarize(path, budget=Budget(amount=amount))
    pdf = path.suffix == ".pdf"
    pages = pdf_pages(path) if pdf else [path.read_bytes().decode()]
    rows = summary.to_json()["extract"]["sentences"]
    assert 0 < len(rows) <= amount
    for row in rows:
        assert ("page" in row) == pdf
        assert pages[row.get("page", 1) - 1][row["start"] : row["end"]] == row["source"]
        assert row["source"] == row["source"].strip()
    return summary.document


def check_prose(document: SourceDocument) -> None:
    """The sentences of a PDF are those of the text that it was made from, but for those that a page breaks.

    Nothing in a page's text ends a heading, an item or code without a full stop, so what is before and behind counts.
    """
    pairs = itertools.pairwise(PROSE.sentences)
    ended = [
        sentence
        for last, sentence in pairs
        if last.section == sentence.section and {last.text[-1], sentence.text[-1]} <= {*".?!"}
    ]
    known = {squeezed(sentence.text) for sentence in ended}
    assert len(known) > 50
    read = {squeezed(sentence.text) for sentence in document.sentences}
    assert len(document.pages) > 2
    assert {sentence.page for sentence in document.sentences} == set(range(1, len(document.pages) + 1))
    assert len(known - read) < len(document.pages), "all but those that a page breaks"


@pytest.mark.slow
def test_a_pdf_of_matplotlib(tmp_path: Path) -> None:
    paragraphs: list[str] = []
    for section in PROSE.sections:
        text = " ".join(sentence.text for sentence in PROSE.sentences[section.first : section.end])
        paragraphs += [section.title, "", *textwrap.wrap(text.replace("$", "S"), 90, break_on_hyphens=False), ""]
    pages = ["\n".join(paragraphs[first : first + 45]) for first in range(0, len(paragraphs), 45)]
    check_prose(check_extract(write_pdf(tmp_path / "a.pdf", *pages)))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium on the PATH")
def test_a_pdf_of_a_browser(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    sections = (
        f"<h2>{html.escape(section.title)}</h2>"
        + "".join(f"<p>{html.escape(sentence.text)}" for sentence in PROSE.sentences[section.first : section.end])
        for section in PROSE.sections
    )
    with playwright.sync_playwright() as running:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        page = browser.new_page()
        page.set_content(f"<body style='font: 14px serif'>{''.join(sections)}")
        page.pdf(path=str(tmp_path / "a.pdf"), format="A5")
        browser.close()
    document = check_extract(tmp_path / "a.pdf")
    check_prose(document)


def test_ligatures_and_soft_hyphens_are_read_as_letters() -> None:
    source = "A de\u00adﬁnition of \n an eﬃcient ofﬁce. Two."
    first = read_text(source).sentences[0]
    assert first.text == "A definition of an efficient office."
    assert source[first.start : first.end] == first.source == source[:-5]


def test_real_html() -> None:
    path = Path(html.__file__).parents[1] / "idlelib" / "help.html"  # of Python itself
    if not path.is_file():
        pytest.skip("this Python comes without idlelib/help.html")
    document = check_extract(path)
    for sentence in document.sentences:
        bare = html.unescape(re.sub(r"<[^>]*>", "", sentence.source))
        assert squeezed(bare) == squeezed(sentence.text)


@pytest.mark.parametrize("path", thinned(MARKDOWN, MARKDOWN[::5]), ids=lambda path: str(path.relative_to(ROOT)))
def test_real_markdown(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    document = read_document(path)
    for sentence in document.sentences:
        assert text[sentence.start : sentence.end] == sentence.source
        letters = iter(sentence.source)
        assert all(letter in letters for letter in squeezed(html.unescape(sentence.text)) if letter.isalnum())
    check_extract(path)


def test_an_article_in_latex(tmp_path: Path) -> None:
    path = tmp_path / "article.tex"
    path.write_text(ARTICLE, encoding="utf-8")
    document = check_extract(path, 20)
    assert [sentence.text for sentence in document.sentences] == [
        "We study what tea does to attention.",
        "Persons who drank it sorted 12% more cards.",
        r"Tea is drunk by many people, e.g. in Asia (see Fig. \ref{fig:cup}).",
        r"Dr. Müller asked in 1999 whether $a \leq b$ holds.",
        "Nobody answered.",
        "There were three groups:",
        "Those who drank tea.",
        "Those who drank water, and sorted cards for 20 minutes.",
        "The café was closed — so they stayed “at home”.",
    ]
    assert document.introduction == range(2, 9)
    assert document.sentences[4].source.startswith("Nobody answered\\footnote{")
