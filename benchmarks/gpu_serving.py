"""The rows of the GPU benchmark that sample many texts: own text, and the server beside batches of transformers."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from gpu_decoding import alternate, seconds_of
from gpu_models import SEED, Measured, Sizes, random_ids, random_llama, shared_copy, wrap
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from turns import interval, seconds

from graftlm.backbone import compiled_decoding
from graftlm.data.own_text_sampling import sample_own_text
from graftlm.data.source_config import SelfSourceConfig
from graftlm.evaluation import Metric, Row

CLIENTS = (1, 8, 32, 64)
RIVALS = ("static", "continuous", "static_compiled")
SERVED = "backbone"
CONTINUOUS_SECONDS = 60  # time limit of an answer of continuous batching
CACHE_BLOCKS = 4  # for each request in the cache of continuous batching, each of 256 tokens


class OwnText:
    """Sampling of own text by a random model of SmolLM2's shape whose texts end.

    Args:
        sizes: the sizes.
        device: the device.
        folder: a folder for the texts.
    """

    def __init__(self, sizes: Sizes, device: torch.device, folder: Path) -> None:
        self._sizes = sizes
        self._device = device
        self._folder = folder
        model = random_llama(sizes.own_text, sizes.dtype, device)
        self._backbone = wrap(model)
        end = self._backbone.need_tokenizer().eos_token_id
        assert isinstance(end, int)
        end_texts(model, end, sizes.own_end)

    def measure(self) -> Measured:
        """Sample twice: the first time includes compilation, and the second is a steady state."""
        texts: list[int] = []
        cold = self._speed(0, texts)
        warm = self._speed(1, texts)
        metrics: dict[str, Metric] = {"tokens_per_s": warm, "tokens_with_compilation_per_s": cold}
        label = f"own text of SmolLM2's shape, {self._sizes.own_tokens:,} tokens"
        mean = sum(texts) / len(texts)
        details: dict[str, Any] = {"texts": len(texts), "mean_tokens_of_a_text": mean}
        return Measured([Row(id="own_text", label=label, metrics=metrics)], {}, details)

    def _speed(self, seed: int, texts: list[int]) -> float:
        """Sample, note the tokens of each text, and return the tokens per second."""
        config = SelfSourceConfig(
            self=True,
            tokens=self._sizes.own_tokens,
            length=self._sizes.own_length,
            chat_fraction=0.0,
            seed=seed,
        )
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            path = Path(folder) / "own.jsonl"
            sampled: list[int] = []

            def work() -> None:
                texts = sample_own_text(self._backbone, config, self._sizes.own_length, path, progress=False)
                sampled.extend(text.tokens for text in texts)

            duration = seconds(work, self._device)
        texts += sampled
        return sum(sampled) / duration


@torch.no_grad()
def end_texts(model: PreTrainedModel, end: int, mean: int) -> None:
    """Give a model's output layer a bias with which texts end, since those of random weights never do.

    A random model gives every token about the same probability; the bias raises that of the end to 1 / mean.

    Args:
        model: a model with random weights.
        end: id of the token that ends a text.
        mean: mean number of tokens of a text.
    """
    layer = model.get_output_embeddings()
    assert isinstance(layer, nn.Linear)
    bias = torch.zeros(layer.out_features, dtype=layer.weight.dtype, device=layer.weight.device)
    bias[end] = math.log((layer.out_features - 1) / (mean - 1))
    layer.bias = nn.Parameter(bias, requires_grad=False)


class Serving:
    """Our server beside static batches, eager and compiled, and a continuous batch of transformers.

    Args:
        sizes: the sizes.
        clients: number of clients, each with one request.
        device: the device.
    """

    def __init__(self, sizes: Sizes, clients: int, device: torch.device) -> None:
        self._sizes = sizes
        self._clients = clients
        self._device = device
        self._shape = sizes.models["1b"]
        base = random_llama(self._shape, sizes.dtype, device)
        self._served = wrap(shared_copy(base))
        self._static = cast("Any", shared_copy(base))
        self._continuous = cast("Any", shared_copy(base))
        self._waits: list[dict[str, float]] = []

    def measure(self) -> Measured:
        """Measure all turns; a system that does not run is noted, and the others go on."""
        from graftlm.serving.batching import BatchingEngine
        from graftlm.serving.protocol import EngineLimits
        from serving import served

        limits = EngineLimits(batch_size=max(CLIENTS), queue=max(CLIENTS))
        problems: dict[str, str] = {}
        with served(self._served, BatchingEngine(self._served, {}, SERVED, limits)) as url:
            turns: dict[str, Callable[[], float]] = {
                "ours": partial(self._ours, url),
                "static": partial(self._run_static, compiled=False),
                "continuous": self._run_continuous,
            }
            if self._sizes.compiles:
                turns["static_compiled"] = partial(self._run_static, compiled=True)
            ready = {}
            for name, turn in turns.items():
                problem_name = self._id if name == "ours" else f"{self._id}, transformers {name}"
                if seconds_of(turn, self._device, problems, problem_name) is not None:
                    ready[name] = turn
            self._waits.clear()
            speeds = alternate(ready, self._sizes.server_rounds)
        label = f"server, {self._clients} client{'s' if self._clients > 1 else ''}, 1B; ratio: over a static batch"
        rows = [Row(id=self._id, label=label, metrics=self._metrics(speeds))] if speeds else []
        details: dict[str, Any] = {"tokens_per_s": dict(speeds), "seconds_to_first_text": list(self._waits)}
        return Measured(rows, problems, details)

    @property
    def _id(self) -> str:
        return f"server_{self._clients}"

    def _metrics(self, speeds: dict[str, list[float]]) -> dict[str, Metric]:
        metrics: dict[str, Metric] = {}
        for other in RIVALS:
            if "ours" in speeds and other in speeds:
                pairs = zip(speeds["ours"], speeds[other], strict=True)
                metrics["ratio" if other == "static" else f"ratio_{other}"] = interval(
                    [ours / others for ours, others in pairs]
                )
        if "ours" in speeds:
            metrics["tokens_per_s"] = interval(speeds["ours"])
            metrics["ttft_p50"] = interval([wait["ttft_p50"] for wait in self._waits])
        for other in RIVALS:
            if other in speeds:
                metrics[f"{other}_tokens_per_s"] = interval(speeds[other])
        return metrics

    def _prompts(self) -> list[list[int]]:
        """Return prompts of which no two begin alike, and which differ from those of earlier turns."""
        chance = random.Random(f"{SEED} {self._clients} {time.monotonic_ns()}")
        vocabulary = self._shape.vocabulary
        return [[chance.randrange(2, vocabulary) for _ in range(self._sizes.prompt)] for _ in range(self._clients)]

    def _ours(self, url: str) -> float:
        from serving_clients import Load

        from serving import run_load

        load = Load(
            url=url,
            models=[SERVED],
            prompts=self._prompts(),
            clients=self._clients,
            max_tokens=self._sizes.new,
            extra={"ignore_eos": True},
        )
        figures = run_load(load)
        self._waits.append({name: value for name, value in figures.items() if name != "tokens_per_s"})
        return figures["tokens_per_s"]

    def _run_static(self, *, compiled: bool) -> float:
        """Return the tokens per second of `generate` without further options, or with a compiled step."""
        ids = random_ids(self._shape, self._clients, self._sizes.prompt, self._device)
        options: dict[str, Any] = {"max_new_tokens": self._sizes.new, "do_sample": False, "pad_token_id": 0}
        if compiled:
            options |= compiled_decoding(self._static, options, prompt_tokens=self._sizes.prompt, wanted=True)
        mask = torch.ones_like(ids)
        work = partial(self._static.generate, input_ids=ids, attention_mask=mask, **options)
        return self._clients * self._sizes.new / seconds(work, self._device)

    def _run_continuous(self) -> float:
        """Return the tokens per second of transformers' continuous batching, whose manager and graphs are kept."""
        from transformers import ContinuousBatchingConfig  # Other versions may lack it; the other turns go on.

        prompts = self._prompts()
        generation = GenerationConfig(max_new_tokens=self._sizes.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        config = ContinuousBatchingConfig(
            num_blocks=CACHE_BLOCKS * max(CLIENTS),
            max_requests_per_batch=self._clients,
        )
        running = self._continuous.continuous_batching_context_manager(
            generation_config=generation,
            continuous_batching_config=config,
            persistent_manager=True,
            timeout=CONTINUOUS_SECONDS,
        )
        with running as manager:
            work = partial(answer_all, manager, prompts, self._sizes.new)
            return self._clients * self._sizes.new / seconds(work, self._device)

    def close(self) -> None:
        """End the thread of continuous batching and free its memory."""
        self._continuous.destroy_cached_continuous_batching_manager()


def answer_all(manager: Any, prompts: list[list[int]], new: int) -> None:
    """Let a manager of continuous batching answer prompts.

    Args:
        manager: the running manager.
        prompts: token ids of each prompt.
        new: number of new tokens of each answer.

    Raises:
        RuntimeError: the manager stopped, takes too long, or made other numbers of tokens.
    """
    manager.add_requests(inputs=prompts, max_new_tokens=new)
    end = time.monotonic() + CONTINUOUS_SECONDS
    finished = 0
    while finished < len(prompts):
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None or len(result.generated_tokens) != new:
                raise RuntimeError(f"an answer has {len(result.generated_tokens)} of {new} tokens ({result.error})")
            finished += 1
        elif not manager.is_running() or time.monotonic() > end:
            raise RuntimeError(f"only {finished} of {len(prompts)} answers were finished")
