"""Generate with vLLM: reads jobs, prints a line of JSON per job. Runs where vLLM is installed and graftlm is not.

`python generate.py JOBS.json`: a list of jobs, each an object with

    name            printed with the result
    model           the model's folder
    prompts         a list of lists of token ids
    loras           a LoRA folder or null for each prompt; without it no prompt has one
    tokens          number of tokens to generate, 12 by default; generation is greedy and has no end token
    engine          further arguments of `vllm.LLM`, such as tensor_parallel_size, enable_lora, max_loras,
                    max_lora_rank, lora_target_modules, enable_prefix_caching
    environment     environment variables during the job

A result is `{"name", "seconds", "outputs": [{"tokens", "logprobs", "cached"}]}` with one output for each prompt: the
generated tokens, the log-probability of each, and the number of the prompt's tokens that were in the prefix cache. Or
it is `{"name", "seconds", "error"}` with the first line of what vLLM raised. A line starts with `RESULT`, since vLLM
prints other lines. `{"started": NAME}` precedes each job, so that the reader knows which job ended the process.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PREFIX = "RESULT "
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with other programs
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,  # without compiling, which takes longer than the test
    "max_model_len": 128,
    "max_num_seqs": 8,
    "model_impl": "transformers",
    "skip_tokenizer_init": True,
    "trust_remote_code": True,
}


def generate(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Build an engine, generate, and remove the engine.

    Args:
        job: see the module.

    Returns:
        The outputs, one for each prompt.
    """
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    sampling = SamplingParams(
        max_tokens=job.get("tokens", 12),
        temperature=0,
        logprobs=0,  # of the chosen tokens alone
        ignore_eos=True,
        detokenize=False,
    )
    loras = lora_requests(job.get("loras") or [None] * len(prompts))
    with engine(job["model"], job.get("engine") or {}) as llm:
        answers = llm.generate(prompts, sampling, lora_request=loras, use_tqdm=False)
    outputs = []
    for answer in answers:
        (completion,) = answer.outputs
        tokens = list(completion.token_ids)
        logprobs = [step[token].logprob for token, step in zip(tokens, completion.logprobs, strict=True)]
        outputs.append({"tokens": tokens, "logprobs": logprobs, "cached": answer.num_cached_tokens or 0})
    return outputs


@contextmanager
def engine(model: str, options: dict[str, Any]) -> Iterator[Any]:
    """Yield an engine, and remove it so that another one can be built in the process."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    if options.get("enable_lora"):
        keep_experts_of_cpus()
    llm = None
    try:
        llm = LLM(model, **{**ENGINE, **options})
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def keep_experts_of_cpus() -> None:
    """Make vLLM on a CPU compute mixtures of experts with LoRA as it does without.

    vLLM 0.32 would choose code in Triton, which its build for CPUs lacks, even if no adapter changes the experts.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.platforms import current_platform

    choose = method.select_unquantized_moe_backend
    if not current_platform.is_cpu() or choose.__name__ == "choose_without_lora":
        return

    def choose_without_lora(moe_config: Any) -> Any:
        return choose(dataclasses.replace(moe_config, is_lora_enabled=False))

    method.select_unquantized_moe_backend = choose_without_lora


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables in a block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()  # vLLM sets variables too
        os.environ.update(before)


def lora_requests(folders: Sequence[str | None]) -> list[Any]:
    """Return vLLM's request of each LoRA folder; equal folders have the same number."""
    from vllm.lora.request import LoRARequest

    numbers: dict[str, int] = {}
    requests = []
    for folder in folders:
        if folder is None:
            requests.append(None)
            continue
        number = numbers.setdefault(folder, len(numbers) + 1)
        requests.append(LoRARequest(f"lora{number}", number, folder))
    return requests


def first_line(error: BaseException) -> str:
    """Return the class and the first line of an error, or the line with the cause in errors of a config."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    is_list = "validation error" in lines[0] and len(lines) > 1
    line = lines[1].partition(" [type=")[0] if is_list else lines[0]
    return f"{type(error).__name__}: {line}"


def say(result: dict[str, Any]) -> None:
    """Print a result as a line."""
    sys.stdout.write(f"{PREFIX}{json.dumps(result)}\n")
    sys.stdout.flush()


def main() -> None:
    """Run the jobs of the file that the command names."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        say({"started": job["name"]})
        start = time.monotonic()
        try:
            with environment(job.get("environment") or {}):
                result = {"outputs": generate(job)}
        except Exception as error:  # A model of transformers may raise anything.
            traceback.print_exc()
            result = {"error": first_line(error)}
        say({"name": job["name"], "seconds": round(time.monotonic() - start, 1), **result})


if __name__ == "__main__":
    main()
