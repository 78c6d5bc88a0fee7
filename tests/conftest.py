"""Fixtures for all tests. No test uses the network."""

from __future__ import annotations

import atexit
import functools
import gc
import os
import shutil
import signal
import ssl
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

# transformers copies the code of models to this folder.
_MODULES = tempfile.TemporaryDirectory(prefix="graftlm-modules-")
# These variables are set before torch and transformers are imported, and child processes inherit them.
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
# Each process uses the bytecode that another one compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: one thread is fastest

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from tiny import BackboneFolder

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets background processes ignore interruptions, and the commands that tests start would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests kill processes but not the machine, so nothing has to be flushed; on a busy disk that takes up to a second.
os.fsync = lambda descriptor: None
# No test uses TLS, but every client of HTTP reads the certificates.
ssl.create_default_context = functools.cache(ssl.create_default_context)

settings.register_profile("default", deadline=None, derandomize=True, max_examples=8)
settings.register_profile("slow", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=2_000)


# No cycle of imported modules and collected tests is garbage, and there are millions of objects to visit.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Try few examples of each property in a default run."""
    profile = "default" if "not slow" in config.option.markexpr else "slow"
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", profile))


def pytest_collection_finish() -> None:
    """Collect garbage rarely, since each full pass visits millions of objects of modules and tests."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_unconfigure() -> None:
    """Leave the full pass that libraries expect at the end to the interpreter: that of pytest would be one more."""
    gc.freeze()
    atexit.register(gc.unfreeze)
    gc.enable()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Run the whole suite in a process per core, at most four, and selected tests in this process."""
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    if not is_whole:
        return 0
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return min(4, cores)


@pytest.fixture(scope="session")
def tiny_backbone(tmp_path_factory: pytest.TempPathFactory) -> BackboneFolder:
    """`tiny_backbone(family)` returns a folder with a tiny model of the family and its tokenizer. Do not change it."""
    from tiny import save_tiny_backbone

    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = save_tiny_backbone(tmp_path_factory.mktemp(f"tiny-{family}"), family)
        return folders[family]

    return folder


@pytest.fixture(scope="session")
def tiny_chat_model(tiny_backbone: BackboneFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama with a chat template. Do not change it."""
    from transformers import AutoTokenizer

    model = tmp_path_factory.mktemp("tiny-chat") / "chat-model"
    shutil.copytree(tiny_backbone("llama"), model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + m['content'] + '<eos>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant' }}{% endif %}"
    )
    tokenizer.save_pretrained(model)
    return model


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real texts and models in GRAFTLM_DATA; tests that use it are skipped if there is none."""
    folder = os.environ.get("GRAFTLM_DATA")
    if not folder:
        pytest.skip("GRAFTLM_DATA, the folder with real texts and models, is not set")
    if not Path(folder).is_dir():
        pytest.skip(f"GRAFTLM_DATA is {folder}, which is not a folder")
    return Path(folder).resolve()


@pytest.fixture(autouse=True)
def _own_accelerator() -> None:
    """Reset the device and precision that a trainer of transformers sets for the whole process."""
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is not None:
        accelerate.AcceleratorState._reset_state()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same global seed, so that its result does not depend on earlier tests."""
    import torch  # imported here, since the process that distributes the tests does not need it

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        # `torch.manual_seed` also keeps the seed and a formatted stack for devices that are never initialized.
        torch.default_generator.manual_seed(0)


@pytest.fixture
def undrawn_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the figures of reports without drawing them, which takes longer than the training of a tiny model."""
    from graftlm.evaluation import plots
    from graftlm.files.writing import write_atomically

    monkeypatch.setattr(plots, "save", lambda figure, path: write_atomically(Path(path), b"\x89PNG\r\n\x1a\n"))
