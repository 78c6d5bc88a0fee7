"""Measure this project on a GPU: decoding, training, own text and the server.

    python benchmarks/gpu.py --minutes 8 --out DIR
    python benchmarks/gpu.py --cpu --out DIR          # tiny models on the CPU, to see that everything runs

Models have the shapes of Llama-3.2-1B and 3B, and of SmolLM2-135M for own text, with random weights that are made on
the device: nothing is downloaded. The most important items come first, and results are written after each. An item
that would not end in time is left out and named; the same command goes on with it. An item of which a part fails is
written with the error, and is measured again by the same command, after those that were left out.

It imports torch, transformers, peft and what these need; matplotlib, pydantic, rich, typer, ruamel.yaml and psutil; and
for the server fastapi, uvicorn, openai, llguidance and prometheus-client. Beside the first three these are 26 MB of
wheels. It does not need datasets, scipy, scikit-learn, sacrebleu or lm-eval, although graftlm installs or offers them.

Compilation takes most of the time, so each model is compiled once for a number of rows. `--only` names single items.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import transformers
from gpu_decoding import VARIANTS, Decoding, row_id, sentence
from gpu_models import CPU, FULL, SEED, Measured, Sizes
from gpu_serving import OwnText, Serving
from gpu_training import BOUND, COMPILED, LORA, NEUTRAL, OURS_LORA, Training
from pydantic import JsonValue
from turns import AT_LEAST, draw, made_aim

from graftlm.errors import EvaluationError, GraftError, did_you_mean
from graftlm.evaluation import Aim, Results, Row, value_of, write_report
from graftlm.evaluation.origin import source_commit
from graftlm.files.writing import write_atomically

NAME = "bench-gpu"
AIMS = {  # (row, metric): least value
    **{(row_id("neutral_closed", rows, model), "ratio"): 0.95 for model in ("1b", "3b") for rows in (1, 32)},
    **{(row_id("neutral_open", rows, model), "ratio"): 0.85 for model in ("1b", "3b") for rows in (1, 32)},
    (NEUTRAL, "ratio"): 1.0,
    (NEUTRAL, "mfu"): 0.35,
    ("own_text", "tokens_per_s"): 5000,
    ("server_1", "ratio_static_compiled"): 1.0,
    ("server_8", "ratio_static_compiled"): 1.0,
}
HOW = {
    "decode": "greedy, prompt included; ratio: over the bare model in the same round, both compiled; ratio_eager: "
    "neither compiled. Neutral residues, adapters and LoRA have `capacity` of the backbone's weights. Grafts are in "
    "its dtype, except routed experts, whose centroids stay in float32",
    "train": "an update without its data; ratio: over PEFT LoRA with the Trainer; mfu: see gpu_training.py; memory: "
    "what a training allocates, and the model's weights",
    "own_text": "the second call of sample_own_text; with compilation: the first. A bias makes each token the end with "
    "probability 1 / own_end, since random weights would never end a text",
    "server": "one request of each client over HTTP from another process; ratio: over `generate` of all prompts "
    "in one batch without further options; continuous: generate_batch with a kept manager",
}


class Item(NamedTuple):
    """A part of the plan, whose rows are measured together.

    Attributes:
        name: its name.
        seconds: how long it takes on an H200, roughly.
        open: makes its models. Successive items with an equal function share them.
        measure: measures with these models.
    """

    name: str
    seconds: float
    open: Callable[[], Any]
    measure: Callable[[Any], Measured]


def plan(sizes: Sizes, device: torch.device, folder: Path) -> list[Item]:
    """Return all items, the most important ones first.

    The estimates add up to 4.5 minutes for the items before the 3B model, and to 9.5 for those before the other
    variants.
    """
    trained = partial(Training, sizes, device, folder)

    def decode(variants: tuple[str, ...], rows: int, model: str, seconds: float) -> list[Item]:
        opened = partial(Decoding, sizes, model, rows, variants, device)
        return [Item(row_id(name, rows, model), seconds, opened, partial(_decode, name)) for name in variants]

    def serve(clients: int) -> Item:
        return Item(f"server_{clients}", 40, partial(Serving, sizes, clients, device), _measure)

    items = [
        *decode(VARIANTS[:1], 1, "1b", 50),
        *decode(VARIANTS[:1], 32, "1b", 45),
        Item("train", 45, trained, partial(_train, (LORA, NEUTRAL, OURS_LORA, BOUND))),
        Item("own_text", 60, partial(OwnText, sizes, device, folder), _measure),
        serve(1),
        serve(8),
        *decode(VARIANTS[:1], 1, "3b", 75),
        *decode(VARIANTS[:1], 32, "3b", 65),
        serve(32),
        serve(64),
    ]
    if sizes.compiles:
        items.append(Item("train_compiled", 75, trained, partial(_train, (LORA, COMPILED))))
    return (
        items + decode(VARIANTS[1:], 1, "1b", 25) + decode(VARIANTS[1:], 32, "1b", 25) + decode(VARIANTS, 8, "1b", 25)
    )


def _decode(variant: str, decoding: Decoding) -> Measured:
    return decoding.measure(variant)


def _train(names: tuple[str, ...], training: Training) -> Measured:
    return training.measure(names)


def _measure(models: Any) -> Measured:
    return models.measure()


class Bench:
    """Runs the items of a plan, and writes what is measured.

    Args:
        items: the items, the most important ones first.
        sizes: the sizes.
        device: the device.
        out: the folder of the results; those that it has are kept.

    Raises:
        EvaluationError: the folder has results of another form, machine or version.
    """

    def __init__(self, items: Sequence[Item], sizes: Sizes, device: torch.device, out: Path) -> None:
        self._items = {item.name: item for item in items}
        self._sizes = sizes
        self._device = device
        self._out = out
        self._environment = environment(sizes, device)
        self._rows: dict[str, list[Row]] = {}
        self._records: dict[str, Any] = {}
        self._opened: tuple[Callable[[], Any], Any] | None = None
        if (out / "results.json").exists():
            self._continue(Results.read(out))

    def _continue(self, earlier: Results) -> None:
        """Take over the rows of an earlier run."""
        details: Any = earlier.details
        before = details.get("environment", {})
        different = [key for key, value in self._environment.items() if before.get(key) != value]
        if different:
            raise EvaluationError(
                f"{self._out} has results of another run, in which {' and '.join(different)} had another value: name "
                "another folder."
            )
        for name, record in details["items"].items():
            self._records[name] = record
            self._rows[name] = [earlier.row(row) for row in record["rows"]]

    def run(self, names: Sequence[str], minutes: float) -> None:
        """Measure items that are not complete, as long as they will probably end in time.

        Args:
            names: the items, in order.
            minutes: the time limit of this call.
        """
        end = time.monotonic() + 60 * minutes
        left = sorted((name for name in names if not self._is_complete(name)), key=self._failed)
        taken = expected = 0.0
        try:
            for name in list(left):
                item = self._items[name]
                # Estimates hold for a GPU; on a CPU the first item tells how long the others take.
                slowness = taken / expected if expected else float(self._device.type == "cuda")
                if time.monotonic() + item.seconds * slowness > end:
                    continue
                start = time.monotonic()
                self._measure(item)
                taken += time.monotonic() - start
                expected += item.seconds
                left.remove(name)
                self._write(left)
        finally:
            self._write(left, with_plot=True)
            self._close()
        if left:
            print(f"not measured for lack of time: {', '.join(left)}; run the same command to go on", flush=True)

    def _failed(self, name: str) -> bool:
        return bool(self._records.get(name, {}).get("problems"))

    def _is_complete(self, name: str) -> bool:
        return bool(self._rows.get(name)) and not self._failed(name)

    def _measure(self, item: Item) -> None:
        start = time.monotonic()
        try:
            measured = item.measure(self._models(item))
        except Exception as error:  # out of memory, a failing compiler, a missing package: the next item goes on
            measured = Measured([], {item.name: sentence(error)}, {})
            self._close()
        duration = time.monotonic() - start
        rows = measured.rows or self._rows.get(item.name, [])  # those of an earlier run, if all have failed now
        self._rows[item.name] = rows
        self._records[item.name] = {
            "rows": [row.id for row in rows],
            "seconds": duration,
            "estimate": item.seconds,
            "problems": measured.problems,
            **measured.details,
        }
        print(f"{item.name}: {duration:.1f} s", flush=True)
        for row in measured.rows:
            print("  " + row.id + " " + ", ".join(f"{key} {value_of(value):.4g}" for key, value in row.metrics.items()))
        for name, problem in measured.problems.items():
            print(f"  {name} was not measured: {problem}", flush=True)

    def _models(self, item: Item) -> Any:
        """Return the models of an item, which are those of the item before if it shares them."""
        if self._opened is None or self._opened[0] is not item.open:
            self._close()
            self._opened = (item.open, item.open())
        return self._opened[1]

    def _close(self) -> None:
        """Free the models of the last item, and what was compiled for them."""
        if self._opened is None:
            return
        models = self._opened[1]
        self._opened = None
        if isinstance(models, Serving):
            models.close()
        del models
        if self._sizes.compiles:
            torch._dynamo.reset()
        gc.collect()
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # after an error of the device
                torch.cuda.empty_cache()

    def _write(self, left: Sequence[str], *, with_plot: bool = False) -> None:
        rows = [row for name in self._items for row in self._rows.get(name, [])]
        problems = dict.fromkeys(left, "there was no time left")
        for record in self._records.values():
            problems |= record["problems"]
        details: dict[str, JsonValue] = {
            "environment": self._environment,
            "sizes": _as_json(asdict(self._sizes)),
            "how": dict(HOW),
            "not_measured": dict(problems),
            "items": self._records,
        }
        judged = self._device.type == "cuda"
        results = Results.here(NAME, rows, seeds=[SEED], aims=aims_of(rows, judged=judged), details=details)
        plots = {}
        shown = [row for row in rows if "ratio" in row.metrics]
        if with_plot and shown:
            bounds = {row.id: AIMS.get((row.id, "ratio")) for row in shown}
            plots["ratios"] = draw(results.model_copy(update={"rows": shown}), bounds, "ratio")
        report = write_report(results, self._out, plots=plots)
        lines = [f"- {name}: {problem}" for name, problem in problems.items()]
        if lines:
            text = report.read_text(encoding="utf-8") + "\n## Not measured\n\n" + "\n".join(lines) + "\n"
            write_atomically(report, text.encode())


def aims_of(rows: Sequence[Row], *, judged: bool) -> list[Aim]:
    """Return all aims, and whether they are met where their rows were measured at full size."""
    metrics = {(row.id, name): value_of(value) for row in rows for name, value in row.metrics.items()}
    aims = []
    for (row, metric), least in AIMS.items():
        measured = metrics.get((row, metric)) if judged else None
        aims.append(made_aim(f"{metric} of {row}", metric, (AT_LEAST, least), measured))
    return aims


def environment(sizes: Sizes, device: torch.device) -> dict[str, JsonValue]:
    """Return what must be equal for results to be of one run."""
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "peft", "accelerate")}
    return {
        "form": "full" if sizes == FULL else "cpu",
        "dtype": sizes.dtype,
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "driver": _driver() if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        **versions,
        "python": platform.python_version(),
        "commit": source_commit(),
    }


def _driver() -> str | None:
    """Return the version of the driver; None if it is unknown."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(query, text=True, timeout=20).split()[0]
    return None


def _as_json(value: Any) -> Any:
    """Return values of a dataclass as JSON."""
    if isinstance(value, dict):
        return {key: _as_json(entry) for key, entry in value.items()}
    return list(value) if isinstance(value, tuple) else value


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are raised."""

    def error(self, message: str) -> NoReturn:
        """Raise the error."""
        raise EvaluationError(f"{message}: see --help.")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line.

    Raises:
        EvaluationError: an option is unknown or has a value that can't be used.
    """
    parser = _Parser(description="Measure this project on a GPU: decoding, training, own text and the server.")
    parser.add_argument("--out", type=Path, default=Path("runs") / NAME, help="folder of the results")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="time limit; items that would exceed it are left out"
    )
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU, to see that everything runs")
    parser.add_argument("--only", nargs="+", metavar="ITEM", help="measure only these items")
    chosen = parser.parse_args(arguments)
    if not (math.isfinite(chosen.minutes) and chosen.minutes > 0):
        raise EvaluationError(
            f"--minutes is {chosen.minutes:g}, but a number above 0 is expected: pass 8, for example."
        )
    if chosen.out.exists() and not chosen.out.is_dir():
        raise EvaluationError(f"--out names the file {chosen.out}, but a folder is expected: name another path.")
    if not re.fullmatch(r"cuda(:\d+)?", chosen.device):
        raise EvaluationError(
            f"--device is {chosen.device}, but cuda or cuda:N is expected: name a GPU, or pass --cpu instead."
        )
    return chosen


def find_device(name: str) -> torch.device:
    """Return a GPU, which is the only one that libraries see from now on.

    Args:
        name: `cuda` or `cuda:N`.

    Raises:
        EvaluationError: there is no such GPU.
    """
    count = torch.cuda.device_count()
    if count == 0:
        raise EvaluationError("torch finds no GPU, but one is needed: pass --cpu for the small form.")
    number = int(name.partition(":")[2] or 0)
    if number >= count:
        raise EvaluationError(f"--device is {name}, but the last GPU is cuda:{count - 1}: name one that exists.")
    if count > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(index) for index in range(count))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number]
    return torch.device("cuda", 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status: 2 for wrong input, 130 after an interruption."""
    threads = torch.get_num_threads()
    try:
        chosen = parse(arguments)
        if chosen.cpu:
            torch.set_num_threads(1)  # With more, tiny models wait for busy cores.
        device = torch.device("cpu") if chosen.cpu else find_device(chosen.device)
        sizes = CPU if chosen.cpu else FULL
        with tempfile.TemporaryDirectory() as folder:
            items = plan(sizes, device, Path(folder))
            names = [item.name for item in items]
            for name in chosen.only or []:
                if name not in names:
                    raise EvaluationError(f"There is no item {name}{did_you_mean(name, names)}: name one of the plan.")
            transformers.logging.set_verbosity_error()
            warnings.simplefilter("ignore", FutureWarning)
            Bench(items, sizes, device, chosen.out).run(chosen.only or names, chosen.minutes)
    except GraftError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command to go on", file=sys.stderr)
        return 130
    finally:
        torch.set_num_threads(threads)
    print(f"written to {chosen.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
