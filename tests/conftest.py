"""Fixtures that every test may use. Nothing here, and no test, touches the network."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

_MODULES = tempfile.TemporaryDirectory(prefix="graftlm-modules-")  # where transformers copies code of models
# Before torch and transformers are first imported, and inherited by the processes that tests start.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_MODULES_CACHE=_MODULES.name,
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
    WANDB_MODE="disabled",
)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what one process compiles, the others find
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: one thread is fastest

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tiny import BackboneFolder

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background deaf to interruptions, and so would be the commands that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests kill processes, and never the machine. On a busy disk each flush would take up to a second.
os.fsync = lambda descriptor: None

settings.register_profile("default", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("slow", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2_000)


def pytest_configure(config: pytest.Config) -> None:
    """A default run tries few examples of each property."""
    profile = "default" if "not slow" in config.option.markexpr else "slow"
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", profile))


def pytest_collection_finish() -> None:
    """Collect garbage rarely: the modules and tests alone are millions of objects, and each full pass reads them."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_unconfigure() -> None:
    """What was left out goes at the end, as libraries expect."""
    gc.unfreeze()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """The whole suite runs in one process per core, at most four; a few chosen tests run in this one, at once."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(4, cores) if whole else 0


@pytest.fixture(scope="session")
def tiny_backbone(tmp_path_factory: pytest.TempPathFactory) -> BackboneFolder:
    """`tiny_backbone(family)` gives a folder with a tiny model of that family and its tokenizer, to be read only."""
    from tiny import save_tiny_backbone

    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = save_tiny_backbone(tmp_path_factory.mktemp(f"tiny-{family}"), family)
        return folders[family]

    return folder


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real text and models that GRAFTLM_DATA names; a test that asks for it skips where there is none."""
    folder = os.environ.get("GRAFTLM_DATA")
    if not folder:
        pytest.skip("GRAFTLM_DATA is not set: it names the folder with real text and models")
    if not Path(folder).is_dir():
        pytest.skip(f"GRAFTLM_DATA names {folder}, which is not a folder")
    return Path(folder).resolve()


@pytest.fixture(autouse=True)
def _own_accelerator() -> None:
    """Forget the device and precision that a trainer of transformers has set for its whole process."""
    if (accelerate := sys.modules.get("accelerate.state")) is not None:
        accelerate.AcceleratorState._reset_state()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test starts from the same global seed, so that its result does not depend on the tests before it."""
    import torch  # which the process that hands out the tests does not need

    torch.manual_seed(0)
