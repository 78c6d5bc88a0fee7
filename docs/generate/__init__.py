"""Generated regions of the documentation.

A region of a Markdown file begins with `<!-- generated: NAME ARGUMENTS -->` and ends with `<!-- end -->`. Its content
comes from the code, or from a committed `results.json`. `python -m docs.generate` writes all regions, and
`python -m docs.generate --check` reports the files whose regions are out of date.
"""
