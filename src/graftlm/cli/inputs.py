"""The arguments and options of verbs, and those that several share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option


def argument(metavar: str, text: str, *, show_default: bool = False) -> Any:
    """An argument of a verb, and what its help says."""
    return Argument(metavar=metavar, help=text, show_default=show_default)


def option(metavar: str, text: str, *names: str, **limits: Any) -> Any:
    """An option with a value, and what its help says; `limits` are typer's, such as `min`."""
    return Option(*names, metavar=metavar, help=text, **limits)


def flag(name: str, text: str) -> Any:
    """An option without a value, and what its help says."""
    return Option(*name.split(), help=text)


DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "int4"]
RecipeFile = Annotated[Path, argument("RECIPE", "The recipe, a YAML file.")]
Settings = Annotated[list[str] | None, argument("KEY=VALUE", "Override recipe keys, as in training.steps=200.")]
RunFolder = Annotated[Path | None, option("DIR", "Output folder; by default the recipe's out.", "--out")]
GraftFolder = Annotated[Path, argument("GRAFT", "A graft's folder.")]
BackboneName = Annotated[
    str | None, option("NAME", "Model name or folder; by default the backbone that the graft records.", "--backbone")
]
Changes = Annotated[
    list[str] | None,
    option("KEY=VALUE", "Override keys of the graft's config, as in augmenting.french.name=DIR.", "--set"),
]
Device = Annotated[str | None, option("NAME", "Torch device, as in cuda:1; by default the fastest available.")]
Trust = Annotated[bool, flag("--trust-remote-code", "Run model code that comes with the backbone.")]
Column = Annotated[str, option("NAME", "Text column of JSON and parquet files.")]
AsJson = Annotated[bool, flag("--json", "Print one JSON document to stdout.")]
Quiet = Annotated[bool, flag("--quiet -q", "Print no progress and no notes.")]
