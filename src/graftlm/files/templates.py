"""HTML pages from Jinja templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def fill_page(path: Path, **values: Any) -> str:
    """An HTML page from a template of Jinja's; values are escaped."""
    from jinja2 import Environment, StrictUndefined  # which torch and chat templates need

    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.policies["json.dumps_kwargs"] = {}  # keys keep their order
    return environment.from_string(path.read_text(encoding="utf-8")).render(values)
