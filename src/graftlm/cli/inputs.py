"""Arguments and options of verbs, and those that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option


def argument(metavar: str, text: str, *, show_default: bool = False) -> Any:
    """Declare a positional argument of a verb.

    Args:
        metavar: name of the argument in the help.
        text: description in the help.
        show_default: show the default value in the help.
    """
    return Argument(metavar=metavar, help=text, show_default=show_default)


def option(metavar: str, text: str, *names: str, **settings: Any) -> Any:
    """Declare an option of a verb that takes a value.

    Args:
        metavar: name of the value in the help.
        text: description in the help.
        names: names of the option, such as `--out`; without any, the name is that of the function's parameter.
        settings: further settings of `typer.Option`, such as `min`.
    """
    return Option(*names, metavar=metavar, help=text, **settings)


def flag(names: str, text: str) -> Any:
    """Declare an option of a verb that takes no value.

    Args:
        names: names of the option, separated by spaces; `--on/--off` declares a pair.
        text: description in the help.
    """
    return Option(*names.split(), help=text)


DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["int8", "int4"]
RecipeFile = Annotated[Path, argument("RECIPE", "The recipe, a YAML file.")]
Settings = Annotated[
    list[str] | None,
    argument("KEY=VALUE", "Override keys of the recipe, as in training.steps=200."),
]
RunFolder = Annotated[
    Path | None,
    option("DIR", "Output folder; by default the recipe's out.", "--out"),
]
GraftFolder = Annotated[Path, argument("GRAFT", "Folder of a graft.")]
BackboneName = Annotated[
    str | None,
    option("NAME", "Name or folder of the model; by default the backbone that the graft records.", "--backbone"),
]
Changes = Annotated[
    list[str] | None,
    option("KEY=VALUE", "Override keys of the graft's config, as in augmenting.french.name=DIR.", "--set"),
]
Device = Annotated[
    str | None,
    option("NAME", "Torch device, as in cuda:1; by default the fastest available one."),
]
Trust = Annotated[bool, flag("--trust-remote-code", "Run model code that comes with the backbone.")]
Column = Annotated[str, option("NAME", "Text column of JSON and parquet files.")]
CompileSteps = Annotated[
    bool, flag("--compile", "Compile the step of a token: a minute at first, then faster on a GPU.")
]
PresetOption = Annotated[
    Literal["retention"] | None,
    option("NAME", "retention: items of IFEval, BIG-Bench Hard and NQ-open.", "--preset"),
]
EvalData = Annotated[
    Path | None,
    option("DIR", "Folder of the preset's data; by default $GRAFTLM_EVAL_DATA, or the hub.", "--eval-data"),
]
UnsafeCode = Annotated[bool, flag("--confirm-unsafe-code", "Run tasks that execute code which the model writes.")]
AsJson = Annotated[bool, flag("--json", "Print one JSON document to stdout.")]
Quiet = Annotated[bool, flag("--quiet -q", "Print no progress and no notes.")]
