"""Read texts, tasks and prompts that are named on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graftlm.errors import DataError

# Models and training take seconds to import, so functions that need them import them.
if TYPE_CHECKING:
    from graftlm.data import Document
    from graftlm.evaluation import TaskConfig
    from graftlm.evaluation.benchmarks import HarnessTaskConfig

_MESSAGES = "messages"


def read_texts(named: Sequence[str], *, text_column: str = "text") -> dict[str, list[Document]]:
    """Read documents by name.

    Args:
        named: paths, or `NAME=PATH`; a path without a name is named by its stem.
        text_column: the column of tables that contains the text.

    Returns:
        The documents of each path by name; a folder or a table has several.

    Raises:
        DataError: a path can't be read, two texts have the same name, or a name or a path is empty.
    """
    from graftlm.data import SourceConfig, build_documents

    texts = {}
    for name, path in files_by_name(named, "texts", "--text").items():
        source = SourceConfig(path=path, text_column=text_column)
        texts[name] = build_documents([source])
    return texts


def read_tasks(named: Sequence[str], **settings: object) -> dict[str, TaskConfig]:
    """Return the configs of tasks, whose examples are in files, by name. The files are not read.

    Args:
        named: files, or `NAME=FILE`; a file without a name is named by its stem.
        settings: values of keys of `TaskConfig` for all of these tasks, such as `metric`, which is required if there
            are files; None leaves a key at its default.

    Raises:
        DataError: there are files but no metric or the reverse, two files have the same name, or a name or a path is
            empty.
        RecipeError: a setting is invalid.
    """
    from graftlm.evaluation import TaskConfig

    values = {key: value for key, value in settings.items() if value is not None}
    if ("metric" in values) != bool(named):
        given = "a file of examples" if named else "a metric"
        raise DataError(
            f"Examples and their metric are expected together, but only {given} was given: write --examples sums=FILE "
            "--metric exact-match, or another metric (chrf, chrf1, log-perplexity)."
        )
    files = files_by_name(named, "files of examples", "--examples")
    return {name: TaskConfig.parse(values | {"path": path}, where=f"--examples {name}") for name, path in files.items()}


def read_harness(named: Sequence[str]) -> list[HarnessTaskConfig]:
    """Return the configs of tasks of lm-evaluation-harness.

    Args:
        named: `TASK`, or `TASK,KEY=VALUE` with keys of `HarnessTaskConfig`.

    Raises:
        RecipeError: a key is unknown, or its value is invalid.
    """
    from graftlm.evaluation.benchmarks import HarnessTaskConfig
    from graftlm.yaml_text import load_yaml

    configs = []
    for text in named:
        task, *pairs = text.split(",")
        values: dict[str, object] = {"task": task}
        for pair in pairs:
            key, _, value = pair.partition("=")
            values[key] = value if key in ("data", "name") else load_yaml(value)
        configs.append(HarnessTaskConfig.parse(values, where=f"--harness {text}"))
    return configs


def new_sources(paths: Sequence[Path], *, text_column: str = "text") -> list[dict[str, str]]:
    """Return the sources of new text: tables with a column `messages` as conversations, all others as text.

    Args:
        paths: files or folders.
        text_column: the column of other tables that contains the text.
    """
    sources = []
    for path in paths:
        if _has_conversations(path):
            sources.append({"path": str(path), "messages_column": _MESSAGES})
        else:
            sources.append({"path": str(path), "text_column": text_column})
    return sources


def _has_conversations(path: Path) -> bool:
    """Return whether the first row of a table has messages; False for what can't be read as a table."""
    from graftlm.data.table_files import is_table, read_values

    if not path.is_file() or not is_table(path):
        return False
    try:
        return next(read_values(path, {"messages_column": _MESSAGES}), None) is not None
    except DataError:
        return False


def files_by_name(named: Sequence[str], what: str, option: str) -> dict[str, str]:
    """Return paths by name.

    Args:
        named: paths, or `NAME=PATH`; a path without a name is named by its stem.
        what: a plural noun for the files, such as `texts`, for the error message.
        option: the option of the command line, such as `--text`, for the error message.

    Raises:
        DataError: two files have the same name, or a name or a path is empty.
    """
    paths: dict[str, str] = {}
    for argument in named:
        name, equals, path = argument.partition("=")
        if not equals or Path(argument).exists():
            name = Path(argument).stem
            path = argument
        if not name or not path:
            raise DataError(f"{option} is {argument!r}, but a path or NAME=PATH is expected: add the missing part.")
        if name in paths:
            raise DataError(f"Two {what} are called {name}: give them different names, as in {option} first=FILE.")
        paths[name] = path
    return paths
