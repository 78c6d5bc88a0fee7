"""Every command block and Python block of the README and the documentation runs on tiny data and models.

Blocks of a page run in order, in one folder. It holds tiny files and random models under the names that the pages use.
A YAML block whose first line is `# NAME.yaml` is saved under that name. Training gets SMALL as overrides. What can't
run here is listed with its reason, and its verb and options are checked instead.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from test_docs import PAGES, RECIPE, ROOT
from tiny import BackboneFolder, tiny_model, tiny_tokenizer

COMMAND_PAGES = [page for page in PAGES if page == ROOT / "README.md" or page.is_relative_to(ROOT / "docs")]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>bash|yaml|python)\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
SERVER = re.compile(r"http://(127\.0\.0\.1|localhost):8000|(?<=--endpoint )URL")
SMALL = {
    "graft": ["training.steps=2", "training.batch_size=4", "data.length=32", "evaluation.limit_tokens=200"]
    + [
        "evaluation.decode_prompts=0",
        "evaluation.own_tokens=200",
        "training.precision=fp32",
        "training.warmup_steps=0",
    ],
    "tasks": ["training.steps=2", "training.batch_size=4", "training.warmup_steps=0"],
    "language-model": ["training.steps=2", "training.batch_size=2", "data.length=32"]
    + ["model.hidden_size=32", "model.num_hidden_layers=3", "model.num_attention_heads=2"]
    + ["model.intermediate_size=32", "training.precision=fp32", "training.warmup_steps=0", "evaluation.lengths=[32]"],
}
SMALL_GRAFTS = {"composition": "stride=1", "memory": "window=8"}  # for tiny models and short rows
PARSED_ONLY = {  # regular expressions of commands, and why they do not run here
    r"graft .*augmenting\.french\.name=": "needs a model that was moved; tests/cli/test_composition.py runs it",
    r"graft chat runs/(danish|facts)": "needs a chat template; tests/test_chat.py runs it",
    r"graft push|graft generate me/": "needs the hub; tests/test_hub.py runs it",
    r"graft (train examples/teach-facts|generate runs/facts)": "needs a chat template; tests/test_demo.py trains by it",
    r"graft demo": "takes minutes; tests/test_demo.py runs it",
    r"graft eval .*--tasks": "downloads data sets; tests/evaluation/test_harness.py runs it",
    r"graft summarize .*--batch": "prints a batch; tests/summarize/test_batch.py runs it",
    r"graft summarize train-": "needs many documents; tests/summarize/test_training_verbs.py runs it",
    r"graft summarize .*runs/(selector|writer)/": "needs a trained one; tests/summarize/test_training_verbs.py runs it",
}
LOCAL_MODELS = ("french-gpt2", "smollm2-french", "code", "random", "some-model", "writer")
NOT_OURS = {  # the first words of commands of other programs, and why they do not run here
    "git": "downloads",
    "cd": "goes into the clone",
    "source": "activates the environment",
    "pip": "installs",
    "uv": "installs, or runs a command that is tested by itself",
    "accelerate": "starts processes; tests/training/test_processes.py runs it",
}
PYTHON_NOT_RUN = {  # page, what a block has in it, and why it does not run here
    ("docs/trainers.md", "SFTTrainer("): "needs trl and a chat template; tests/training/test_trainers.py runs it",
    ("docs/trainers.md", "simple_evaluate("): "downloads data sets; tests/evaluation/test_harness.py runs it",
    ("docs/cli.md", "ChatSession("): "needs a chat model; tests/test_chat.py runs it",
    ("docs/serving.md", "serve("): "stays; the command of the same page runs",
}


_SMALL_SELECTOR = 'kind="classifier", steps=2, evaluate_every=2, model={"embedding_size": 8, "hidden_size": 12})'


class Block(NamedTuple):
    """A code block of a page."""

    language: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page in order, without indentation."""
    return [
        Block(block["language"], re.sub(rf"^{block['indent']}", "", block["code"], flags=re.MULTILINE))
        for block in FENCE.finditer(page.read_text(encoding="utf-8"))
    ]


def commands_of(code: str) -> list[str]:
    """The commands of a bash block; lines that end with a backslash are joined."""
    joined = re.sub(r"(?<=\|)\n\s*|\\\n\s*", " ", code)
    return [part.strip() for line in joined.splitlines() for part in line.split(" && ") if part.strip()]


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, tiny_backbone: BackboneFolder) -> Path:
    """A folder with everything that the pages name."""
    folder = tmp_path_factory.mktemp("reader")
    _write_models(folder, tiny_backbone)
    _write_texts(folder)
    _write_adapters(folder)
    _write_rows(folder)
    with contextlib.chdir(folder):
        _run("graft train danish.yaml --quiet")
        (folder / "tasks.yaml").write_text(
            "backbone: {name: sentence-transformers/all-MiniLM-L6-v2}\n"
            "graft: {kind: conditional-tasks, max_length: 64}\nlength: 64\ntraining: {steps: 2, batch_size: 4}\n"
            "tasks:\n  intents: {type: classification, train: intents.csv, test: intents.csv}\n"
            "  names: {type: tagging, train: names.conll, test: names.conll}\nout: runs/tasks\n"
        )
        _run("graft train tasks.yaml --quiet")
        _run("graft train danish.yaml 'graft={kind: lora}' out=runs/lora --quiet")
        for name in ("router/graft", "served/danish"):
            shutil.copytree("runs/danish/graft", Path("runs") / name)
        _write_selector()
    return folder


def _write_selector() -> None:
    """The selector that a tutorial trains, which other pages use."""
    tutorial = ROOT / "docs" / "tutorials" / "summarize-papers.md"
    (code,) = (block.code for block in blocks_of(tutorial) if "train_selector" in block.code)
    _run_python(code, {}, str(tutorial))


def _write_adapters(folder: Path) -> None:
    """LoRA adapters of the tiny backbone."""
    from peft import LoraConfig, get_peft_model

    for name in ("maths", "code", "support"):
        model = tiny_model("llama", max_position_embeddings=4096)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        get_peft_model(model, config).save_pretrained(folder / "adapters" / name)  # type: ignore[arg-type]


def _write_models(folder: Path, tiny_backbone: BackboneFolder) -> None:
    """Random models under the names of the pages. Causal models have 4,096 positions, for clarify's prompts."""
    names = ["google/gemma-2-2b", "HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-1.7B"]
    for seed, name in enumerate([*names, *(f"models/{name}" for name in LOCAL_MODELS)]):
        tiny_model("llama", seed, max_position_embeddings=4096).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    chat = tiny_tokenizer()
    chat.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + m['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a' }}{% endif %}"
    )
    tiny_model("llama", max_position_embeddings=4096).save_pretrained(folder / "HuggingFaceTB/SmolLM2-135M-Instruct")
    chat.save_pretrained(folder / "HuggingFaceTB/SmolLM2-135M-Instruct")
    for name in ("sentence-transformers/all-MiniLM-L6-v2", "bert-base-uncased"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(tiny_backbone("bert"))


def _write_texts(folder: Path) -> None:
    from summarize.tools import TEA, write_pdf

    texts = {"english": "The quick brown fox jumps over the lazy dog. ", "danish": "Det var en mørk aften. "}
    texts["french"] = "Le renard brun saute par-dessus le chien. "
    for name, sentence in texts.items():
        for part in (name, f"{name}-test", f"{name}-train"):
            (folder / "text" / part).mkdir(parents=True)
            (folder / "text" / part / "one.txt").write_text(sentence * 60, encoding="utf-8")
    for name in ("maths", "code", "novels", "books"):
        rows = [
            {"text": f"{name} {number} plus {number} is {2 * number}, says the text of {name}."} for number in range(40)
        ]
        for part in (name, f"{name}-test", f"{name}-train"):
            (folder / "text" / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("letters.txt", "prompt.txt", "requests.txt", "questions.txt", "texts.txt"):
        (folder / name).write_text("Are you sure it is pretty?\nThe quick brown fox.\n")
    for name in ("papers", "reports"):
        (folder / name).mkdir()
        for number in range(4):
            (folder / name / f"{number}.md").write_text(TEA.replace("12%", f"{number + 3}%"))
            if name == "papers":
                (folder / name / f"{number}.summary").write_text("Persons who drank tea sorted more cards.\n")
    write_pdf(folder / "paper.pdf", "Tea is drunk by many people. Most of them live in Asia.", "Tea is good.")
    (folder / "thesis.tex").write_text(
        "\\begin{document}Tea is drunk by many people. Most live in Asia.\\end{document}"
    )
    danish = RECIPE.read_text(encoding="utf-8")
    small = {"steps: 2000": "steps: 2", "batch_size: 32": "batch_size: 4", "length: 512": "length: 32"}
    small |= {"bf16": "fp32", "warmup_steps: 100": "warmup_steps: 0", "budget: 0.02": "budget: 100"}
    for before, after in small.items():
        assert before in danish, before
        danish = danish.replace(before, after)
    for name in ("danish.yaml", "recipe.yaml"):
        (folder / name).write_text(danish, encoding="utf-8")
    shutil.copytree(folder / "text" / "english", folder / "more")


def _write_rows(folder: Path) -> None:
    rows = [(f"the fox runs {number} times", ("weather", "alarm")[number % 2]) for number in range(12)]
    table = "\n".join(["text,label", *(f"{text},{label}" for text, label in rows)])
    for name in ("intents", "intents-test", "intents-new", "urgent", "urgent-test"):
        (folder / f"{name}.csv").write_text(table + "\n")
    (folder / "keys.txt").write_text(f"bob:{'k' * 32}\n")
    (folder / "questions.csv").write_text("body\nthe fox runs\n")
    for name in ("names", "names-test", "names-new"):
        (folder / f"{name}.conll").write_text("Ada\tB-person\nwrote\tO\nit\tO\n\n" * 8)
    pairs = [{"english": "fox", "danish": "ræv", "prompt": "fox:", "answer": " ræv"}] * 6
    for name in ("pairs", "pairs-test"):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, pairs)))


def _verbs() -> dict[str, Any]:
    from graftlm.cli import app

    return typer.main.get_command(app).commands  # type: ignore[attr-defined]


def _overrides(words: list[str]) -> list[str]:
    """SMALL for the kind of the recipe that a command trains."""
    if words[1] not in ("train", "compare", "grow"):
        return []
    if {"danish.yaml", "recipe.yaml"} & {*words}:  # made small by the fixture
        return [
            "training.steps=2",
            "evaluation.decode_prompts=0",
            "evaluation.limit_tokens=200",
            "evaluation.own_tokens=200",
        ]
    recipe = Path(words[2]).read_text(encoding="utf-8")
    if "kind: language-model" in recipe:
        tokenizer = [] if any(word.startswith("tokenizer=") for word in words) else ["tokenizer.vocab_size=300"]
        small = (
            SMALL["language-model"] if tokenizer else [word for word in SMALL["language-model"] if "model." not in word]
        )
        if tokenizer and "model_type: block-state" in recipe:
            small = [*small, "model.window=8", "model.mixer_layers=[0]"]
        return small + tokenizer
    if "tasks:" in recipe:
        return SMALL["tasks"]
    steps = ["training.steps=0"] if "steps: 0" in recipe else []
    budget = ["evaluation.forgetting_budget=100"] if "forgetting_budget" in recipe else []
    small = [
        f"{where}.{SMALL_GRAFTS[graft['kind']]}"
        for where, graft in _grafts_of(yaml.safe_load(recipe)).items()
        if graft["kind"] in SMALL_GRAFTS
    ]
    return SMALL["graft"] + steps + budget + small


def _grafts_of(recipe: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The graft sections of a recipe by their keys."""
    methods = {f"methods.{name}.graft": method["graft"] for name, method in recipe.get("methods", {}).items()}
    return methods | ({"graft": recipe["graft"]} if "graft" in recipe else {})


def _run(command: str) -> None:
    """Run a `graft` command in this process, as the shell would."""
    from graftlm.cli import app

    words = shlex.split(command, comments=True)
    out, stdin = None, None
    if ">" in words:
        words, out = words[: words.index(">")], words[words.index(">") + 1]
    if "<" in words:
        words, stdin = words[: words.index("<")], Path(words[words.index("<") + 1]).read_bytes()
    if words[1] == "generate" and "--max-new-tokens" not in words:
        words += ["--max-new-tokens", "4"]
    if words[1] == "clarify":
        words += ["--max-new-tokens", "8"]
    if words[1] == "train":
        _remove_run(words)
    result = CliRunner().invoke(app, [*words[1:], *_overrides(words)], input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    asks_nothing = words[1] == "clarify" and "is finished, so nothing is left to answer" in result.stderr
    assert result.exit_code == 0 or asks_nothing, f"{command}: {result.stderr}"  # the toy model may ask nothing
    if out is not None:
        Path(out).write_text(result.stdout, encoding="utf-8")


def _remove_run(words: list[str]) -> None:
    """Remove the output folder of a command: another block has used it with other settings."""
    recipe = re.search(r"^out: (\S+)", Path(words[2]).read_text(encoding="utf-8"), re.MULTILINE)
    given = [word.removeprefix("out=") for word in words if word.startswith("out=")]
    given += [words[words.index("--out") + 1]] if "--out" in words else []
    shutil.rmtree(given[0] if given else recipe[1] if recipe else "runs/graft", ignore_errors=True)


def _check_foreign(command: str, words: list[str]) -> None:
    """A command of another program has its reason; extras, scripts and experiments that it names exist."""
    for name in re.findall(r"graftlm\[([\w,]+)\]", " ".join(words)):
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert all(re.search(rf"^{extra} = ", text, re.MULTILINE) for extra in name.split(",")), name
    if words[0] in ("python", "python3"):
        if words[1] == "-m":
            assert words[2] == "experiments", words
            from experiments import EXPERIMENTS
            from experiments.__main__ import app

            assert words[3] in EXPERIMENTS
            typer.main.get_command(app).make_context("experiments", words[3:])
        elif words[1] == "-c":
            subprocess.run(command.replace(words[0], sys.executable, 1), shell=True, check=True, timeout=100)
        else:
            assert (ROOT / words[1]).exists(), words
        return
    assert words[0] in NOT_OURS, f"{shlex.join(words)}: run it, or give the reason in NOT_OURS"


def run_command(command: str) -> None:
    """Run a command of the documentation, or check it where it can't run."""
    command = re.sub(r"^(uv run |accelerate launch -m )(graft)(lm\.cli|lm)?(?= )", r"\2", command)
    words = shlex.split(command, comments=True)
    if not words:
        return
    if words[0] in ("curl", "jq"):
        _run_shell(command)
    elif words[0] != "graft":
        _check_foreign(command, words)
    elif any(re.match(pattern, command) for pattern in PARSED_ONLY) or "accelerate" in command:
        stop = min([words.index(mark) for mark in ("<", ">") if mark in words], default=len(words))
        verbs = _verbs()
        count = 2 if " ".join(words[1:3]) in verbs else 1
        verb = " ".join(words[1 : 1 + count])
        verbs[verb].make_context(verb, words[1 + count : stop])
    elif words[1].startswith("--"):
        return
    else:
        _run(command)


def _serve(command: str, servers: contextlib.ExitStack) -> str:
    """Start the server of a `graft serve` command on a free port; returns its address."""
    from graftlm.serving import server
    from graftlm.serving.settings import ServerSettings
    from serving.web import running

    services: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "serve", lambda service, on_ready: services.append(service))
        patch.setattr(ServerSettings, "check_address", lambda settings: None)  # tests beside this one take ports too
        _run(command)
    servers.close()  # the one before
    return servers.enter_context(running(services[0]))


def _run_shell(command: str) -> None:
    """Run `curl` and `jq` where they are installed. An HTTP error fails."""
    if all(shutil.which(program) for program in ("bash", "curl", "jq")):
        shell = ["bash", "-o", "pipefail", "-c", command]
        printed = subprocess.run(shell, check=True, timeout=100, capture_output=True).stdout
        answer = json.loads(printed or Path("turn.json").read_bytes())
        assert "question" in answer.get("error", {"message": "question"})["message"], "a random model may ask nothing"


def _run_python(code: str, names: dict[str, Any], where: str) -> None:
    if not any(where.endswith(page) and mark in code for page, mark in PYTHON_NOT_RUN):
        small = re.sub(r'kind="classifier"(, steps=\d+)?\)', _SMALL_SELECTOR, code)
        assert "SelectorTrainingConfig(" not in code or "steps=2," in small, "the tutorial's selector is made small"
        exec(compile(small, where, "exec"), names)


@pytest.fixture
def folder(reader: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the reader's folder, as the working folder."""
    shutil.copytree(reader, tmp_path / "reader", symlinks=True)
    monkeypatch.chdir(tmp_path / "reader")
    return tmp_path / "reader"


@pytest.mark.slow
@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_run(page: Path, folder: Path) -> None:
    names: dict[str, Any] = {}
    with contextlib.ExitStack() as servers:
        address = None
        for language, code in blocks_of(page):
            if language == "yaml":
                title = re.match(r"# ([\w-]+\.yaml)\n", code)
                if title and title[1] != "danish.yaml":
                    (folder / title[1]).write_text(code, encoding="utf-8")
                continue
            for part in commands_of(code) if language == "bash" else [code]:
                if "graft serve " in part:
                    address = _serve(part, servers)
                    continue
                if SERVER.search(part):
                    address = address or _serve("graft serve --backbone models/some-model", servers)
                    part = part.replace("--endpoint URL --model NAME", f"--endpoint {address}/v1 --model some-model")
                    part = SERVER.sub(address, part)
                if language == "bash":
                    run_command(part)
                else:
                    _run_python(part, names, str(page))


def test_a_wrong_command_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # none of them is right in any folder
    for command in ("graft generat runs/danish/graft x", "make docs", "python -m experiments neutral --data DIR"):
        with pytest.raises((AssertionError, KeyError)):
            run_command(command)
