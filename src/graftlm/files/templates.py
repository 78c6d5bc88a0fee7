"""HTML pages from Jinja templates."""

from __future__ import annotations

from pathlib import Path


def fill_page(path: Path, **values: object) -> str:
    """Render an HTML page from a Jinja template. Values are escaped; an unknown name in the template is an error."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {}  # Jinja sorts keys by default.
    template = environment.from_string(path.read_text(encoding="utf-8"))
    return template.render(values)
