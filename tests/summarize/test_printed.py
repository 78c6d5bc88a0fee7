"""Readers show what is printed: no more, no less, and a note tells what they leave out."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from graftlm.errors import DataError
from graftlm.pipelines.summarize import SourceDocument, read_document, read_text, summarize
from graftlm.pipelines.summarize.readers import latex_state
from graftlm.pipelines.summarize.text import split_sentences
from summarize.test_readers import check_spans


def sentences(document: SourceDocument) -> list[str]:
    check_spans(document)
    return [sentence.text for sentence in document.sentences]


def latex(body: str, preamble: str = "") -> SourceDocument:
    return read_text(
        f"\\documentclass{{article}}{preamble}\\begin{{document}}\n{body}\n\\end{{document}}", ".tex", "doc"
    )


@pytest.mark.parametrize(
    ("body", "printed"),
    [
        (r"Tea is old. \iffalse Beer is new. \fi It is hot.", ["Tea is old.", "It is hot."]),
        ("Tea is\n\\iffalse\n\nBeer.\n\n\\fi\nold.", ["Tea is old."]),
        ("Tea is old.\n\n\\if 0\nBeer is new.\n\\fi\n\nIt is hot.", ["Tea is old.", "It is hot."]),
        (r"\if11 Tea is old. \else Beer is new. \fi", ["Tea is old."]),
        (r"\ifdefined\draft Beer is new. \else Tea is old. \fi", ["Tea is old."]),
        (r"\newcommand{\draft}{}\ifdefined\draft Tea is old. \else Beer. \fi", ["Tea is old."]),
        (r"\newif\iflong \longtrue \iflong Tea is old. \else Beer. \fi", ["Tea is old."]),
        (r"\newif\iflong \iflong Beer. \iftrue Wine. \else Mead. \fi Ale. \else Tea is old. \fi", ["Tea is old."]),
        (r"\ifx\draft\undefined Tea is old. \else Beer. \fi", ["Tea is old."]),
        (r"\unless\iffalse Tea is old.\fi", ["Tea is old."]),
        (r"\newtoggle{long}\toggletrue{long}\iftoggle{long}{Tea is old.}{Beer.}", ["Tea is old."]),
        (r"\newboolean{x}\setboolean{x}{true}\ifthenelse{\boolean{x}}{Tea is old.}{Beer.}", ["Tea is old."]),
        ("Tea is old. % \\iffalse\nIt is hot.", ["Tea is old.", "It is hot."]),
        (r"Tea is \verb|\iffalse| old.", [r"Tea is \iffalse old."]),
        ("Tea is old.\n\\begin{comment}\nBeer.\n\\end{comment}\nIt is hot.", ["Tea is old.", "It is hot."]),
        (r"\excludecomment{secret}Tea is old. \begin{secret}Beer.\end{secret}", ["Tea is old."]),
        ("Tea is old.\n\\endinput\nBeer is new.", ["Tea is old."]),
    ],
)
def test_latex_reads_the_branches_that_are_taken(body: str, printed: list[str]) -> None:
    document = latex(body)
    assert sentences(document) == printed
    assert document.notes == ()


def test_a_conditional_that_is_not_known_is_noted() -> None:
    document = latex(r"Tea is old. \ifnum\year>2000 Beer. \else Wine. \fi It is hot. \iftoggle{x}{Mead.}{Ale.}")
    assert sentences(document) == ["Tea is old.", "It is hot."]
    (note,) = document.notes
    assert "\\ifnum 1, \\iftoggle 1" in note
    with pytest.raises(DataError, match="iffalse|conditional"):
        latex(r"\iffalse Beer is new.")


@pytest.mark.parametrize(
    ("body", "printed"),
    [
        (r"We call it \method here, \method.", "We call it Tea-X here, Tea-X."),
        (r"It is \added{\emph{very}} old.", "It is very old."),
        (r"It is \says{old} and \says[I]{hot}.", "It is [You: old] and [I: hot]."),
        (r"It is \old{} here.", "It is quite old here."),
        (r"It is $\R^2$ here.", r"It is $\R^2$ here."),
        (r"It is \hidden{not this} here.", "It is here."),
        (r"See \href{http://a.b/c%20d_e#f}{the page} here.", "See the page here."),
        (
            r"A \textcolor{red}{dead} hive weighs \SI{5}{kg} or \qty{6}{kg} less.",
            "A dead hive weighs 5 kg or 6 kg less.",
        ),
        (r"It weighs \SI{5}{\kilo\gram} less.", r"It weighs \SI{5}{\kilo\gram} less."),
        (r"It is 10\textsuperscript{6} and CO\textsubscript{2}.", "It is 10⁶ and CO₂."),
        (r"We use \LaTeX\ in \S~2 \copyright\ us.", "We use LaTeX in § 2 © us."),
        (r"It is \texorpdfstring{$x$}{x} here.", "It is $x$ here."),
        (r"See Figure~\ref{fig:a} of it.", r"See Figure \ref{fig:a} of it."),
        (r"It is old\todo{Ask Ola.} here. \todo[inline]{Is it?}", "It is old here."),
        (r"\vskip 0.2in It is old.", "It is old."),
    ],
)
def test_latex_reads_macros_as_they_are_defined(body: str, printed: str) -> None:
    preamble = r"""\newcommand{\method}{Tea-X\xspace}
\newcommand{\added}[1]{\textcolor{blue}{#1}}
\newcommand*{\says}[2][You]{[#1: #2]}
\def\old{quite old}
\newcommand\hidden[1]{}
\newcommand{\R}{\mathbb{R}}
\newcommand{\be}{\begin{equation}}
\DeclareMathOperator{\argmax}{arg\,max}
"""
    document = latex(body, preamble)
    assert sentences(document) == [printed]
    assert document.notes == ()


def test_arguments_reach_a_formula_through_two_macros() -> None:
    definitions = r"\newcommand{\value}[1]{the value $#1^2$}\newcommand{\both}[2]{\value{#1} and \value{#2+#1}}"
    (read,) = sentences(latex(r"We see \both{x}{y} here.", definitions))
    assert read.replace("{", "").replace("}", "") == "We see the value $x^2$ and the value $y+x^2$ here."


def test_text_of_macros_alone_has_a_place() -> None:
    definitions = r"""\newcommand{\two}{One is here. Two is.}
\newcommand{\three}[1]{Now #1

Then three. Last}"""
    document = latex("\\two{} It is \\three{One.\n\nTwo.} here.", definitions)
    check_spans(document)
    assert document.text == "One is here. Two is. It is Now One. Two. Then three. Last here."


def test_a_macro_inside_a_macro_leaves_the_places_of_arguments() -> None:
    definitions = r"\newcommand{\note}{Note this.}\newcommand{\said}[1]{\note{} #1}"
    document = latex(r"\said{One is here. Two is here.}", definitions)
    check_spans(document)
    assert sentences(document) == ["Note this.", "One is here.", "Two is here."]
    # The first sentence has no text in the file, and its place is one character of the call.
    assert [sentence.source for sentence in document.sentences] == ["\\", "One is here.", "Two is here."]


def test_labels_of_latex_items_are_fields() -> None:
    document = latex(r"\begin{description}\item[Tea] It is old. \item[Water] is wet.\end{description}")
    assert sentences(document) == ["It is old.", "Water is wet."]
    assert [(passage.kind, passage.text) for passage in document.passages] == [("field", "Tea")]


def test_two_sentences_of_an_argument_have_their_own_places() -> None:
    document = latex(r"\new{One is here. Two is here.} Three.", r"\newcommand{\new}[1]{\textbf{#1}}")
    assert sentences(document) == ["One is here.", "Two is here.", "Three."]
    assert [sentence.source for sentence in document.sentences] == ["One is here.", "Two is here.", "Three."]


def test_what_is_not_known_in_latex_stays_and_is_noted() -> None:
    document = latex(r"A \hive{big}[x]{y} is \gone. \begin{odd}{2}It is odd.\end{odd}")
    assert sentences(document) == [r"A \hive{big}[x]{y} is \gone.", "It is odd."]
    assert any("\\hive 1, \\gone 1" in note for note in document.notes)
    assert any("odd 1" in note for note in document.notes)


@pytest.mark.parametrize(
    ("body", "printed"),
    [
        (r"See \url{http://a.b/c%20d&e~f\_g#h}. It is old.", ["See http://a.b/c%20d&e~f_g#h.", "It is old."]),
        (r"See \path{a%b} or \nolinkurl|c%d|. It is old.", ["See a%b or c%d.", "It is old."]),
        ("See \\url{http://a.b/%\n  c} here.", ["See http://a.b/c here."]),
        (r"Tea.\footnote{See \url{http://a.b/c%20d}.} It is old.", ["Tea.", "It is old."]),
        (r"See \url{a%20b}\iffalse Beer. \fi. It is old.", ["See a%20b.", "It is old."]),
        (r"\newcommand{\at}[1]{\url{a%20#1}}See \at{b}. It is old.", ["See a%20b.", "It is old."]),
        (r"\newcommand{\at}{\href[x=y]{a%20b}{the page}}See \at. It is old.", ["See the page.", "It is old."]),
        (
            r"A. \begin{thebibliography}{9}\bibitem{a} \url{a%20b}.\end{thebibliography}\section{X} It is old.",
            ["A.", "It is old."],
        ),
        ("A.\n\\begin{lstlisting}\nif (x) { % {\n\\end{lstlisting}\nIt is old.", ["A.", "It is old."]),
    ],
)
def test_verbatim_latex_goes_to_its_end(body: str, printed: list[str]) -> None:
    document = latex(body)
    assert sentences(document) == printed
    assert document.notes == ()


@pytest.mark.parametrize(
    "body",
    [
        "See \\url{a%20b it is.\n\nTea is old.",
        "See \\textbf{it is.\n\nTea is old.",
        "See \\begin{quote}it is.\n\nTea is old.",
    ],
)
def test_what_is_not_closed_in_latex_is_noted(body: str) -> None:
    document = latex(body)
    assert sentences(document)[-1] == "Tea is old."
    (note,) = document.notes
    assert "(in line 2; 1 in all)" in note


@pytest.mark.parametrize(
    ("body", "printed"),
    [
        (r"\begin{minipage}[t]{0.4\linewidth}Tea is old.\end{minipage}", ["Tea is old."]),
        (r"\begin{minipage}{3cm}{\em Tea} is old.\end{minipage}", ["Tea is old."]),
        (r"\begin{center}{\large Tea is old.}\end{center}", ["Tea is old."]),
        ("\\begin{quote}\n[Tea] is old.\\end{quote}", ["[Tea] is old."]),
        (r"\begin{adjustwidth}{1cm}{2cm}Tea is old.\end{adjustwidth}", ["Tea is old."]),
        (r"A. \begin{tabbing}B \= c\\ d \> e\end{tabbing} Tea is old.", ["A.", "Tea is old."]),
        (r"They say \enquote{tea is \enquote{old}} or \enquote*{hot}.", ["They say “tea is ‘old’” or ‘hot’."]),
        (r"It is \MakeUppercase{tea $x$ \emph{of} Old} \lowercase{TEA}.", ["It is TEA $x$ OF OLD tea."]),
        (r"Tea is \linebreak[4] old\parencite*{a}.", ["Tea is old."]),
    ],
)
def test_arguments_of_latex_are_not_read_as_text(body: str, printed: list[str]) -> None:
    document = latex(body)
    assert sentences(document) == printed
    assert document.notes == ()


@pytest.mark.parametrize(
    ("body", "passages"),
    [
        (r"\begin{frame}<1->[fragile]{Of tea}Tea is old.\end{frame}", [("heading", "Of tea")]),
        (r"\begin{frame}\frametitle{Of tea}Tea is old.\end{frame}", [("heading", "Of tea")]),
        (r"\begin{proof}[Of tea]Tea is old.\end{proof}", [("field", "Of tea")]),
        (r"\newtheorem{thm}{Theorem}\begin{thm}[Of tea]Tea is old.\end{thm}", [("field", "Of tea")]),
        (r"\begin{multicols}{2}[Of tea]Tea is old.\end{multicols}", [("field", "Of tea")]),
    ],
)
def test_printed_arguments_of_latex_environments_are_read(body: str, passages: list[tuple[str, str]]) -> None:
    document = latex(body)
    assert sentences(document) == ["Tea is old."]
    assert [(passage.kind, passage.text) for passage in document.passages] == passages


@pytest.mark.parametrize(
    ("definition", "use", "printed"),
    [
        (
            r"\newenvironment{hint}[1]{\textbf{Hint on #1.} }{ Good luck.}",
            r"\begin{hint}{tea}Drink it.\end{hint} It is old.",
            ["Hint on tea.", "Drink it.", "Good luck.", "It is old."],
        ),
        (
            "\\newenvironment*{hint}[1][Hint]%\n  {\\begin{quote}#1: }% as text\n  {\\end{quote}}",
            r"\begin{hint}tea is old.\end{hint}\begin{hint}[Note]It is. Now.\end{hint}",
            ["Hint: tea is old.", "Note: It is.", "Now."],
        ),
        (
            r"\newenvironment{a}{Out. }{ End.}\newenvironment{b}{\begin{a}In. }{ Stop.\end{a}}",
            r"\begin{b}Tea. \begin{a}Old.\end{a}\end{b}",
            ["Out.", "In.", "Tea.", "Out.", "Old.", "End.", "Stop.", "End."],
        ),
        (r"\NewDocumentEnvironment{hint}{O{Tea} m}{#1 #2 }{}", r"\begin{hint}{is}old.\end{hint}", ["Tea is old."]),
        (r"\NewEnviron{hint}{Tea is \BODY.}", r"\begin{hint}old\end{hint}", ["Tea is old."]),
        (
            r"\newenvironment{grid}{\begin{tabular}{ll}}{\end{tabular}}",
            r"Tea. \begin{grid}a & b\end{grid} It is old.",
            ["Tea.", "It is old."],
        ),
    ],
)
def test_latex_reads_environments_as_they_are_defined(definition: str, use: str, printed: list[str]) -> None:
    document = latex(use, definition)
    assert sentences(document) == printed
    assert document.notes == ()


def test_unknown_macros_in_the_definition_of_an_environment_are_noted() -> None:
    definition = r"\newenvironment{hint}{\hive{2}\wasp=1cm\list{}{}}{\endlist}"
    document = latex(r"\begin{hint}Tea is old.\end{hint}", definition)
    assert sentences(document) == ["Tea is old."]
    (note,) = document.notes
    assert "\\hive 1, \\wasp 1" in note


def test_an_argument_that_is_printed_twice_is_read_twice() -> None:
    document = latex(r"\both{\hive{a} b}.", r"\newcommand{\both}[1]{#1 and #1}")
    assert sentences(document) == [r"\hive{a} b and \hive{a} b."]


DEEPER = [rf"\{name}" for name in "bcdefgh"]


@pytest.mark.parametrize(
    "definitions",
    [
        r"\newcommand{\tea}{x\tea}",
        "".join(f"\\def\\{name}{{{10 * body}}}" for name, body in zip("abcdefg", DEEPER, strict=True))
        + r"\def\tea{\a}",
    ],
)
def test_macros_without_end_are_refused(definitions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latex_state, "_MAX_REPLACED", 10_000)
    with pytest.raises(DataError, match="doc"):
        latex(r"We drink \tea here.", definitions)


def write_parts(folder: Path, **parts: str) -> Path:
    for name, text in parts.items():
        path = folder / f"{name.replace('_', '/')}.tex"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "main.tex"


def test_latex_reads_its_parts_with_their_places(tmp_path: Path) -> None:
    main = write_parts(
        tmp_path,
        macros=r"\newcommand{\tea}{green tea}",
        parts_one="\\section{One}\nWe drink \\tea{} here. \\input{parts/two.tex}",
        parts_two="It is hot.\n\nWe count \\input parts/count \n cups.",
        parts_count="12",
        main=r"\input{macros}\begin{document}Tea is old. \include{parts/one} Last is this.\end{document}",
    )
    document = read_document(main)
    assert [sentence.text for sentence in document.sentences] == [
        "Tea is old.", "We drink green tea here.", "It is hot.", "We count 12 cups.", "Last is this.",
    ]  # fmt: skip
    assert [sentence.file for sentence in document.sentences] == [
        "main.tex", "parts/one.tex", "parts/two.tex", "parts/two.tex", "main.tex",
    ]  # fmt: skip
    assert document.notes == ()
    second = document.sentences[1].to_json()
    assert second["file"] == "parts/one.tex"
    assert "page" not in second
    assert (tmp_path / "parts" / "one.tex").read_text()[second["start"] : second["end"]] == second["source"]


def test_what_latex_does_not_include_is_noted(tmp_path: Path) -> None:
    (tmp_path / "secret.tex").write_text("A secret is told.")
    folder = tmp_path / "paper"
    folder.mkdir()
    names = ["../secret", str(tmp_path / "secret.tex"), "gone", "main"]
    main = write_parts(folder, main="Tea is old. " + " ".join(f"\\input{{{name}}}" for name in names))
    document = read_document(main)
    assert sentences(document) == ["Tea is old."]
    assert len(document.notes) == 4
    assert all(name in " ".join(summarize(document).notes) for name in names)
    (note,) = read_text(r"Tea is old. \input{parts/one}", ".tex").notes
    assert "parts/one" in note


FRACTION = "<mfrac><mn>1</mn><mrow><mn>2</mn><mo>+</mo><mi>x</mi></mrow></mfrac>"


@pytest.mark.parametrize(
    ("formula", "line"),
    [
        ("<mi>m</mi><mo>=</mo><mn>2</mn>", "m = 2"),
        (FRACTION, "1/(2 + x)"),
        ("<msup><mi>x</mi><mn>2</mn></msup><mo>&#x2062;</mo><msub><mi>a</mi><mi>i</mi></msub>", "x^2a_i"),
        ("<msqrt><mo>-</mo><mi>x</mi></msqrt>", "√(-x)"),
        (f"<semantics><mrow>{FRACTION}</mrow><annotation>\\frac{{1}}{{2+x}}</annotation></semantics>", "1/(2 + x)"),
        ("<munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mi>n</mi></munderover>", "∑_(i = 1)^n"),
    ],
)
def test_a_formula_is_a_part_of_its_sentence(formula: str, line: str) -> None:
    sentence = "<p>The mass is {} kg. It is 5.</p>"
    html = read_text(sentence.format(f"<math>{formula}</math>"), ".html")
    prefixed = formula.replace("<m", "<mml:m").replace("</m", "</mml:m")
    for name in ("semantics", "annotation"):
        prefixed = prefixed.replace(f"<{name}", f"<mml:{name}").replace(f"</{name}", f"</mml:{name}")
    inline = f'<inline-formula><mml:math xmlns:mml="http://a">{prefixed}</mml:math></inline-formula>'
    jats = read_text(f"<article><body>{sentence.format(inline)}</body></article>", ".xml")
    for document in (html, jats):
        assert sentences(document) == [f"The mass is {line} kg.", "It is 5."]
        assert "</" in document.sentences[0].source


@pytest.mark.parametrize(
    ("inline", "text", "notes"),
    [
        (
            "<alternatives><tex-math>\\begin{document}$$m=2$$\\end{document}</tex-math><graphic/></alternatives>",
            "$$m=2$$",
            0,
        ),
        ("<italic>m</italic> = 2", "m = 2", 0),
        ("<inline-graphic/>", "[formula]", 1),
    ],
)
def test_a_formula_of_jats_without_mathml(inline: str, text: str, notes: int) -> None:
    source = f"<article><body><p>It is <inline-formula>{inline}</inline-formula> here.</p></body></article>"
    document = read_text(source, ".xml")
    assert sentences(document) == [f"It is {text} here."]
    assert len(document.notes) == notes


DISPLAYED = {
    ".tex": ("The mass is\n\\[ m = 2 \\]\nfor all. It is\n\\[ n. \\]\nNext is this.", ("\\[ m = 2 \\]", "\\[ n. \\]")),
    ".md": ("The mass is\n\n$$ m = 2 $$\n\nfor all. It is\n\n$$ n. $$\n\nNext is this.", ("$$ m = 2 $$", "$$ n. $$")),
    ".rst": ("The mass is\n\n.. math:: m = 2\n\nfor all. It is\n\n.. math:: n.\n\nNext is this.", ("m = 2", "n.")),
    ".html": (
        '<p>The mass is <math display="block"><mi>m</mi><mo>=</mo><mn>2</mn></math> for all. It is '
        '<math display="block"><mi>n</mi><mo>.</mo></math> Next is this.</p>',
        ("m = 2", "n."),
    ),
    ".xml": (
        "<article><body><p>The mass is <disp-formula><label>(1)</label><tex-math>m = 2</tex-math></disp-formula> for "
        "all. It is <disp-formula><tex-math>n.</tex-math></disp-formula> Next is this.</p></body></article>",
        ("m = 2", "n."),
    ),
}


@pytest.mark.parametrize("suffix", DISPLAYED)
def test_a_displayed_formula_is_a_part_of_its_sentence(suffix: str) -> None:
    source, (first, second) = DISPLAYED[suffix]
    document = read_text(source, suffix)
    assert sentences(document) == [f"The mass is {first} for all.", f"It is {second}", "Next is this."]


def test_no_sentence_ends_in_a_formula() -> None:
    assert sentences(latex("It is $f(x). Y = 2$ here. Then.")) == ["It is $f(x). Y = 2$ here.", "Then."]


def test_numbers_keep_their_place() -> None:
    html = read_text(
        "<p>It is 10<sup>6</sup> kg of CO<sub>2</sub>.<sup>1,2</sup> The 1<sup>st</sup> is here.</p>", ".html"
    )
    assert sentences(html) == ["It is 10⁶ kg of CO₂.¹,²", "The 1st is here."]
    jats = read_text("<article><body><p>It is 10<sup>-6</sup> kg.</p></body></article>", ".xml")
    assert sentences(jats) == ["It is 10⁻⁶ kg."]


@pytest.mark.parametrize(
    "concealed",
    [
        "<span hidden>{}</span>",
        '<span style="color: red; display:none">{}</span>',
        '<b style="visibility: hidden">{}</b>',
        '<span class="x sr-only">{}</span>',
    ],
)
def test_html_does_not_read_what_is_hidden(concealed: str) -> None:
    document = read_text(f"<p>Tea is {concealed.format('Not. This')}old.</p>", ".html", "doc")
    assert sentences(document) == ["Tea is old."]
    (note,) = document.notes
    assert "(9 characters)" in note


@pytest.mark.parametrize(
    "unprinted",
    [
        "<script>Not. This</script>",
        "<template><b>Not. This</b></template>",
        "<style>a.b</style>",
        "<noscript>Not. This</noscript>",
        "<svg><text>Not. This</text></svg>",
        "<!-- Not. This -->",
        "<button>Not. This</button>",
        "<select><option>Not. This</option></select>",
        "<textarea>Not. This</textarea>",
    ],
)
def test_html_goes_on_after_what_is_not_printed(unprinted: str) -> None:
    document = read_text(f"<p>Tea is {unprinted}old.</p><div hidden><p>Beer.</p></div>", ".html")
    assert sentences(document) == ["Tea is old."]


def test_html_reads_the_text_of_a_form() -> None:
    source = '<p>Tea is old.</p><form><input value="Beer."><div><p>It is hot.</p><button>Buy.</button></div></form>'
    assert sentences(read_text(source, ".html")) == ["Tea is old.", "It is hot."]


@pytest.mark.parametrize("suffix", [".html", ".md"])
def test_quotations_keep_their_marks(suffix: str) -> None:
    document = read_text("<p>They say <q>tea</q> is <span hidden><q>no</q> </span>old.</p>", suffix)
    assert sentences(document) == ["They say “tea” is old."]


def test_html_reads_what_a_browser_shows() -> None:
    source = """<details><summary>Tea is old.</summary><p>It is hot.</p></details>
<p><span aria-hidden="true">Seen</span> is read.</p><dialog>Beer.</dialog><dialog open>Open is read.</dialog>
<p><ruby>漢字<rp>(</rp><rt>kanji</rt><rp>)</rp></ruby> is read.</p>"""
    assert sentences(read_text(source, ".html")) == [
        "Tea is old.", "It is hot.", "Seen is read.", "Open is read.", "漢字 is read.",
    ]  # fmt: skip


def test_the_two_forms_of_a_formula_are_read_once() -> None:
    math = "<math><semantics><mi>m</mi><annotation>m</annotation></semantics></math>"
    katex = f'<span class="katex"><span class="katex-mathml">{math}</span><span class="katex-html">m</span></span>'
    mathjax = f'<span><nobr aria-hidden="true">m</nobr><span class="MJX_Assistive_MathML">{math}</span></span>'
    newer = f"<mjx-container><mjx-math></mjx-math><mjx-assistive-mml>{math}</mjx-assistive-mml></mjx-container>"
    for form in (katex, mathjax, newer):
        assert sentences(read_text(f"<p>The mass {form} is read.</p>", ".html")) == ["The mass m is read."]


def test_an_element_without_an_end_drops_no_text_before_it() -> None:
    for element in ("<span hidden>", "<template>", "<svg>", "<script>"):
        assert sentences(read_text(f"<p>Tea is old.{element}Beer.", ".html")) == ["Tea is old."]


def test_a_formula_without_an_end_drops_nothing() -> None:
    document = read_text("<p>It is <math><mi>m</mi> here.<p>Tea is old.</p>", ".html")
    assert "Tea is old." in sentences(document)
    assert sentences(read_text("<p>It is <math><mi>m</mi>", ".html")) == ["It is m"]


def test_a_footnote_of_jats_does_not_divide_its_sentence() -> None:
    source = """<article><body><p>Tea<fn><p>A note. Two.</p></fn> is old. See<fig><caption><p>A cup.</p></caption></fig>
it. It is <disp-formula><tex-math>m</tex-math></disp-formula> here.</p><p><fig><caption><p>Two.</p></caption></fig></p>
</body></article>"""
    document = read_text(source, ".xml")
    assert sentences(document) == ["Tea is old.", "See it.", "It is m here."]
    assert [(passage.kind, passage.text) for passage in document.passages] == [
        ("field", "A note. Two."), ("caption", "A cup."), ("caption", "Two."),
    ]  # fmt: skip


def test_entities_of_jats_are_read_or_noted() -> None:
    document = read_text("<article><body><p>Caf&eacute; &alpha; &odd; here.</p></body></article>", ".xml")
    assert sentences(document) == ["Café α &odd; here."]
    (note,) = document.notes
    assert "&odd;" in note


def test_html_in_markdown_is_read() -> None:
    source = (
        '# Tea\n\n<p align="center">Tea is <b>old</b>.</p>\n\n<!-- Beer. -->\n\nIt is hot.\n\n<div hidden>Wine.</div>\n'
    )
    document = read_text(source, ".md")
    assert sentences(document) == ["Tea is old.", "It is hot."]
    assert len(document.notes) == 1


def test_html_around_markdown_decides_what_is_shown() -> None:
    document = read_text(
        "Tea is old.\n\n<div hidden>\n\nBeer is *new*.\n\n    code\n\n</div>\n\nIt is hot.\n\n"
        "<nav>\n\nHome is here.\n\n</nav>\n\nWe say <q>it</q> is <span hidden>not</span> good.<br>Is it? "
        "<i hidden>No.\n\n"
        "<table><tr><td>\n\nA cell.\n\n</td></tr></table>\n",
        ".md",
        "doc",
    )
    shown = ["Tea is old.", "It is hot.", "We say “it” is good.", "Is it?"]
    assert sentences(document) == shown
    assert [(passage.kind, passage.text) for passage in document.passages] == [
        ("furniture", "Home is here."),
        ("table", "A cell."),
    ]
    (note,) = document.notes
    assert "(21 characters)" in note


def test_items_of_a_task_list_are_sentences() -> None:
    document = read_text("- [x] Tea is old.\n- [ ] Beer is new.\n", ".md")
    assert sentences(document) == ["[x] Tea is old.", "[ ] Beer is new."]


def test_rst_reads_topics_and_notes_other_directives() -> None:
    source = "Tea is old.\n\n.. topic:: Cups\n\n   They are hot.\n\n.. versionadded:: 2 Beer.\n\n.. include:: a.txt\n"
    document = read_text(source, ".rst")
    assert sentences(document) == ["Tea is old.", "They are hot."]
    (note,) = document.notes
    assert "versionadded 1, include 1" in note


LINES = [
    "Tea is drunk by many people",
    "of the world every day. Most",
    "of them live in cities. They",
    "buy their tea in small shops",
    "and drink it with 2 friends.",
    "2019 was a good year for it.",
]


def write_manuscript(path: Path, numbering: str) -> Path:
    """Two pages whose lines are numbered in the way that is named."""
    with mpl.rc_context({"pdf.fonttype": 42}), PdfPages(path) as pdf:
        for page in range(2):
            figure = Figure(figsize=(8, 11))
            for index, line in enumerate(LINES):
                number = 8 + 6 * page + index
                height = 0.8 - 0.02 * index
                text = f"{number} {line}" if numbering == "joined" else line
                figure.text(0.15, height, text, fontsize=10)
                if numbering == "left":
                    figure.text(0.11, height, str(number), fontsize=7, ha="right")
                if numbering == "right":
                    figure.text(0.9, height, str(number), fontsize=7)
            pdf.savefig(figure)
    return path


@pytest.mark.parametrize("numbering", ["joined", "left", "right", "none"])
def test_line_numbers_of_a_manuscript_are_not_read(tmp_path: Path, numbering: str) -> None:
    document = read_document(write_manuscript(tmp_path / "a.pdf", numbering))
    assert sentences(document)[:4] == [
        "Tea is drunk by many people of the world every day.",
        "Most of them live in cities.",
        "They buy their tea in small shops and drink it with 2 friends.",
        "2019 was a good year for it.",
    ]
    assert not [passage for passage in document.passages if passage.text.strip().isdecimal()]
    if numbering == "none":
        assert document.notes == ()
    else:
        assert "12 in all" in document.notes[0]


def test_numbers_of_a_list_are_no_line_numbers(tmp_path: Path) -> None:
    with mpl.rc_context({"pdf.fonttype": 42}), PdfPages(tmp_path / "a.pdf") as pdf:
        figure = Figure(figsize=(8, 11))
        for index in range(30):
            text = f"{index} cups of tea are here." if index < 4 else "Tea is drunk by many people."
            figure.text(0.15, 0.9 - 0.02 * index, text, fontsize=10)
        pdf.savefig(figure)
    document = read_document(tmp_path / "a.pdf")
    assert document.notes == ()
    assert "3 cups of tea are here." in document.text


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("It is in pythonX.Y of it. And more.", ["It is in pythonX.Y of it.", "And more."]),
        ("It equals ((p := x), y).) Then go.", ["It equals ((p := x), y).)", "Then go."]),
        ("Use ASP.NET or os.Path here. Then.", ["Use ASP.NET or os.Path here.", "Then."]),
        ("See v2.X or a?B=C for it. Then.", ["See v2.X or a?B=C for it.", "Then."]),
        ("Tea is good.¹ Water is wet.²,³ It is.", ["Tea is good.¹", "Water is wet.²,³", "It is."]),
        ("Tea is good.[1] Water is wet.", ["Tea is good.[1]", "Water is wet."]),
    ],
)
def test_no_sentence_ends_inside_a_word(text: str, parts: list[str]) -> None:
    assert [text[start:end] for start, end in split_sentences(text)] == parts


def test_marks_of_scripts_without_spaces_end_a_sentence() -> None:
    text = "你好。我叫「李明。」你呢？是。"
    assert [text[start:end] for start, end in split_sentences(text, "zh")] == [
        "你好。",
        "我叫「李明。」",
        "你呢？",
        "是。",
    ]
