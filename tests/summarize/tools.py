"""Documents for tests."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

TEA = """# A study of tea

## 1. Introduction

Tea is drunk by *many* people. Most of them live in Asia. We ask what tea does to attention, in 3 groups of 40 persons.

## 2. Method

Persons drank tea or water. They then sorted cards for 20 minutes. Nobody knew what was in the cup until the end.

## 3. Results

Those who drank tea sorted 12% more cards. Attention rose in all groups of persons who drank tea. It fell with water.

## References

Persons who drank tea sorted more cards, 1999.
"""


def write_pdf(path: Path, *pages: str) -> Path:
    """A PDF with a text on each page."""
    with mpl.rc_context({"pdf.fonttype": 42}), PdfPages(path) as pdf:
        for page in pages:
            figure = Figure(figsize=(8, 11))
            figure.text(0.08, 0.95, page, va="top", fontsize=9)
            pdf.savefig(figure)
    return path


def pdf_pages(path: Path) -> list[str]:
    """The text of each page as pdfminer.six writes it."""
    from pdfminer.high_level import extract_text
    from pdfminer.layout import LAParams

    return extract_text(str(path), laparams=LAParams(all_texts=True)).split("\f")[:-1]
