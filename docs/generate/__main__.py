"""Write the generated regions and the figure, or check them."""

from __future__ import annotations

import argparse
import sys

from docs.generate.figure import FIGURE, draw_figure
from docs.generate.regions import ROOT, generated_pages, outdated_pages


def main() -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="report outdated files, and write nothing")
    options = parser.parse_args()
    outdated = outdated_pages()
    if options.check:
        for page in outdated:
            print(f"{page.relative_to(ROOT)} is out of date: run python -m docs.generate", file=sys.stderr)
        return 1 if outdated else 0
    for page, text in outdated.items():
        page.write_text(text, encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)}")
    draw_figure(FIGURE)
    print(f"checked {len(generated_pages())} pages, drew {FIGURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
