"""Trackers of training runs, through Accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from graftlm.errors import MissingExtraError, TrainingError, did_you_mean, first_line


def check_tracker(name: str | None) -> None:
    """Check that a tracker can be imported.

    Args:
        name: name of the tracker, which is also that of its module; None for no tracker.

    Raises:
        TrainingError: Accelerate does not support the tracker, or its package is not installed.
        MissingExtraError: the package of TensorBoard is not installed.
    """
    if name is None:
        return
    known = {str(tracker) for tracker in LOGGER_TYPE_TO_CLASS}
    if name not in known:
        raise TrainingError(
            f"Accelerate has no tracker {name!r}{did_you_mean(name, known)}: set training.tracker to one that "
            "it has, or leave it out."
        )
    try:
        import_module(name)
    except ImportError:
        if name == "tensorboard":
            raise MissingExtraError(name, "trackers", "Logging to a tracker") from None
        package = name.replace("_", "-")
        raise TrainingError(
            f"The tracker {name} needs the package {package}, which is not installed: run `pip install {package}`."
        ) from None


def start_tracker(accelerator: Accelerator, name: str, settings: Mapping[str, object]) -> None:
    """Begin a run of the tracker, in a project with the name graftlm.

    Args:
        accelerator: the accelerator of the training run.
        name: name of the tracker, for messages.
        settings: settings of the run; the tracker receives the numbers and strings among them.

    Raises:
        TrainingError: the tracker can't begin a run, for example because nobody is logged in.
    """
    shown = {key: value for key, value in settings.items() if isinstance(value, int | float | str)}
    try:
        accelerator.init_trackers("graftlm", config=shown)
    except Exception as error:  # Every tracker raises another class.
        raise TrainingError(
            f"The tracker {name} can't begin a run ({first_line(error)}): log in or configure it, or leave "
            "training.tracker out."
        ) from error
