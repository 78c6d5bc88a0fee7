"""HTML pages from Jinja templates."""

from __future__ import annotations

from pathlib import Path


def fill_page(path: Path, **values: object) -> str:
    """Return an HTML page that is rendered from a Jinja template.

    Args:
        path: the template.
        values: values of the names in the template; they are escaped.

    Raises:
        jinja2.UndefinedError: the template uses a name without a value.
    """
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
