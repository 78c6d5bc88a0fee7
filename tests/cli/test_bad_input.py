"""What the user can mend: exit code 2, and one sentence with what was found, what was expected and what to do."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.tools import Graft

TRAIN = ("train", "recipe.yaml", "out=runs/bad", "--quiet")


def spoil(home: Path) -> None:
    """Everything a user may have got wrong, below `bad`."""
    bad = home / "bad"
    (bad / "empty").mkdir(parents=True)
    (bad / "binary.txt").write_bytes(b"a\0b" * 100)
    (bad / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (bad / "rows.jsonl").write_text('{"text": "a b c"}\n{"body": "d e f"}\n')
    (bad / "typo.yaml").write_text((home / "recipe.yaml").read_text().replace("alpha:", "capcity:"))
    shutil.copytree(home / "llama", bad / "mute", ignore=shutil.ignore_patterns("*token*"))


@pytest.fixture(scope="module")
def bad(home: Path, trained: str) -> Path:
    spoil(home)
    for name in ("truncated", "moved", "foreign"):
        shutil.copytree(home / trained, home / "bad" / name)
    tensors = home / "bad/truncated/graft.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    edit(home / "bad/moved/graft.json", lambda values: values["backbone"].update(name="./gone/llama"))
    edit(home / "bad/foreign/graft.json", lambda values: values.update(kind="neutral-resides"))
    return home / "bad"


def edit(path: Path, change: Callable[[dict], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


CASES = {
    "an empty folder": (
        (*TRAIN, "data.new.0.path=bad/empty"),
        "The folder bad/empty has no files ending in .txt .text .md .rst .tex .py .jsonl .ndjson .json .parquet "
        "(or .gz): put text there, or set the source's pattern.",
    ),
    "a binary file": (
        (*TRAIN, "data.new.0.path=bad/binary.txt"),
        "bad/binary.txt is a binary file (a NUL byte at byte 1), but UTF-8 text is expected: "
        "convert it, or leave it out by the source's pattern.",
    ),
    "broken UTF-8": (
        (*TRAIN, "data.new.0.path=bad/latin.txt"),
        "bad/latin.txt is not UTF-8 text (byte 3 is 0xe9): convert it to UTF-8 first.",
    ),
    "a row without text": (
        (*TRAIN, "data.new.0.path=bad/rows.jsonl"),
        "bad/rows.jsonl: line 2 has no column 'text' (found: body): set the source's text_column.",
    ),
    "a typo in a recipe": (
        ("train", "bad/typo.yaml"),
        "graft: unknown key capcity (did you mean capacity?).",
    ),
    "a typo in an override": (
        (*TRAIN, "training.step=3"),
        "The override 'training.step=3': unknown key training.step (did you mean steps?).",
    ),
    "no recipe": (
        ("train", "nothing.yaml"),
        "There is no file nothing.yaml: name an existing one, or write it (see `graft schema`).",
    ),
    "a recipe with methods alone": (
        (*TRAIN, "graft=null", "methods={lora: {graft: {kind: lora}}}"),
        "The recipe has methods to compare and no graft section: run graft compare, or add a graft section.",
    ),
    "a backbone without a tokenizer": (
        (*TRAIN, "backbone.name=bad/mute"),
        "The backbone bad/mute has no tokenizer, but text needs one: put tokenizer.json and "
        "tokenizer_config.json beside its weights, or pass a tokenizer.",
    ),
    "a graft for another backbone": (
        ("generate", "GRAFT", "x", "--backbone", "gpt2"),
        "The graft GRAFT was trained on llama, but gpt2 was given and its architecture differs: "
        "pass the backbone that it was trained on.",
    ),
    "a backbone that is elsewhere now": (
        ("generate", "bad/moved", "x"),
        "There is no folder ./gone/llama: give a model's folder, or its name on the hub; "
        "the graft bad/moved was trained on that backbone, so say where it is now (--backbone).",
    ),
    "a truncated file of tensors": (
        ("inspect", "bad/truncated"),
        "bad/truncated/graft.safetensors is not a whole safetensors file (Error while deserializing header: incomplete "
        "metadata, file not fully covered): copy it again, or train again.",
    ),
    "an export into a folder that holds something": (
        ("export", "GRAFT", "--to", "old"),
        "old is not an empty folder, so it is left alone: name a new one.",
    ),
    "a graft of an unknown kind": (
        ("inspect", "bad/foreign"),
        "The graft was written by graftlm 0.1.0, and this is 0.1.0: There is no graft of the kind "
        "'neutral-resides' (did you mean neutral-residues?).",
    ),
    "a folder with neither graft nor report": (
        ("inspect", "bad/empty"),
        "bad/empty has no graft.json and no results.json: name a folder that graft train wrote.",
    ),
    "nothing to measure": (
        ("eval", "GRAFT"),
        "There is nothing to measure: name a text (--text new=FILE), examples (--examples sums=FILE) "
        "or a task (--tasks NAME).",
    ),
    "two texts of one name": (
        ("eval", "GRAFT", "--text", "old/test.txt", "--text", "new/test.txt"),
        "Two texts are called test",
    ),
    "examples without a metric": (
        ("eval", "GRAFT", "--examples", "bad/rows.jsonl"),
        "Examples need a metric",
    ),
    "a metric without examples": (
        ("eval", "GRAFT", "--text", "new/test.txt", "--metric", "chrf"),
        "Examples need a metric",
    ),
    "a metric that does not exist": (
        ("eval", "GRAFT", "--examples", "sums=bad/rows.jsonl", "--metric", "bleu"),
        "--examples sums: metric: the value should be 'exact-match', 'chrf' or 'log-perplexity', but found 'bleu'.",
    ),
    "two files of examples of one name": (
        ("eval", "GRAFT", "--examples", "a=bad/rows.jsonl", "--examples", "a=bad/rows.jsonl", "--metric", "chrf"),
        "Two files of examples are called a",
    ),
    "examples without prompts": (
        ("eval", "GRAFT", "--examples", "bad/rows.jsonl", "--metric", "chrf"),
        "bad/rows.jsonl: line 1 has no column 'prompt' (found: text): set the task's prompt_column.",
    ),
    "prompts in plain text": (
        (*TRAIN, "data.new.0.prompt_column=prompt"),
        "new/train.txt is plain text, but the source has a prompt_column: name a JSON, parquet or CSV file, "
        "or leave the prompt_column out.",
    ),
    "windows that are too long": (
        ("eval", "GRAFT", "--text", "new/test.txt", "--length", "600"),
        "Windows of 600 tokens do not fit the model, which has 512 positions: "
        "set length (--length, or data.length of a recipe) to 512 or less.",
    ),
    "an empty prompt": (
        ("generate", "GRAFT", ""),
        "The prompt has no tokens: give at least one word to continue.",
    ),
    "more text than the model has positions": (
        ("generate", "GRAFT", "x", "--max-new-tokens", "600"),
        "The prompt and 600 new tokens make 601 tokens, but the model has 512 positions",
    ),
    "a temperature without sampling": (
        ("generate", "GRAFT", "x", "--temperature", "2"),
        "graft generate: temperature and top_p",
    ),
    "an impossible temperature": (
        ("generate", "GRAFT", "x", "--sample", "--temperature", "0"),
        "graft generate: temperature: the value should be greater than 0, but found 0.0.",
    ),
    "no such device": (
        ("generate", "GRAFT", "x", "--device", "meat"),
        "The device meat can't be used (",
    ),
    "a file where a folder is to be": (
        ("train", "recipe.yaml", "--out", "old/test.txt", "--quiet"),
        "old/test.txt can't be written (File exists): name another folder.",
    ),
    "a folder where a file is to be": (
        ("schema", "--out", "old"),
        "old can't be written (Is a directory): free some space or name another folder.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_gets_one_sentence(graft: Graft, trained: str, bad: Path, case: str) -> None:
    arguments, sentence = CASES[case]
    outcome = graft(*(trained if argument == "GRAFT" else argument for argument in arguments))
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith(f"error: {sentence.replace('GRAFT', trained)}")
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith(".\n")


@pytest.mark.parametrize("part", ["new", "old"])
def test_texts_are_read_before_the_backbone_is_measured(graft: Graft, bad: Path, part: str) -> None:
    outcome = graft("train", "recipe.yaml", f"data.{part}.0.path=bad/binary.txt", "out=runs/unread")
    assert outcome.code == 2
    assert outcome.err.startswith("error: bad/binary.txt is a binary file")
    assert not (bad.parent / "runs/unread").exists()


def test_a_missing_recipe_is_refused_before_torch_is_imported() -> None:
    code = (
        "import sys\nfrom graftlm.cli import main\nsys.argv = ['graft', 'train', 'missing.yaml']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    status = end.code\n"
        "print(status, sorted({'torch', 'transformers', 'peft', 'datasets', 'matplotlib'} & {*sys.modules}))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stderr.startswith("error: There is no file missing.yaml: ")
    assert child.stdout == "2 []\n"


def test_a_prompt_that_is_not_utf_8(graft: Graft, trained: str) -> None:
    outcome = graft("generate", trained, "-", stdin=b"caf\xe9")
    assert outcome == (2, "", "error: The prompt is not UTF-8 text (byte 3 is 0xe9): convert it to UTF-8 first.\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("tran",), "No such command 'tran'"),
        (("train",), "Missing argument 'RECIPE'"),
        (("train", "recipe.yaml", "--steps", "3"), "No such option: --steps"),
        (("generate", "GRAFT", "x", "--num-beams", "0"), "Invalid value for '--num-beams'"),
    ],
)
def test_a_command_that_does_not_exist(graft: Graft, arguments: tuple[str, ...], sentence: str) -> None:
    outcome = graft(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert sentence in outcome.err


def test_a_budget_that_is_exceeded_fails_the_run_and_keeps_it(graft: Graft, home: Path) -> None:
    outcome = graft("train", "recipe.yaml", "evaluation.forgetting_budget=-9", "out=runs/budget", "--quiet", "--json")
    assert outcome.code == 2
    assert outcome.err.startswith("error: The run forgot ")
    assert "and the budget is -9.0: raise" in outcome.err
    assert json.loads(outcome.out)["results"]["aims"][0]["met"] is False
    assert (home / "runs/budget/graft/graft.json").exists()


@pytest.fixture
def small_disk(home: Path) -> Iterator[Callable[[int], Path]]:
    """`small_disk(kilobytes)` gives a folder on a disk of that size, the same one again if it is there."""
    folder = home / "disk"

    def disk(kilobytes: int) -> Path:
        again = "remount," if folder.is_mount() else ""
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"{again}size={kilobytes}k", "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("a small disk can be mounted by root alone, and not everywhere")
        return folder

    yield disk
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("kilobytes", "sentence"),
    [
        (
            4,
            r"disk/run/\S+.json can't be written \(No space left on device\): free some space",
        ),
        (
            64,
            r"The checkpoint disk/run/checkpoints/step-000002 can't be written \(.*\), .*: free space or mend",
        ),
        (
            400,
            r"The graft could not be written to disk/run/graft \(the disk is full\): free space or name another folder",
        ),
        (480, r"disk/run/\S+.png can't be written \(No space left on device\): free some space or name another folder"),
    ],
)
def test_a_full_disk_gets_one_sentence_and_the_same_command_goes_on(
    graft: Graft, small_disk: Callable[[int], Path], kilobytes: int, sentence: str
) -> None:
    # The sizes leave room for: the recipe; no checkpoint; all checkpoints but no graft; the graft, but not the report.
    folder = small_disk(kilobytes)
    command = ("train", "recipe.yaml", "out=disk/run", "training.steps=4", "training.checkpoint_every=2", "--quiet")
    command += ("evaluation.own_tokens=0",)
    outcome = graft(*command)
    assert outcome.code == 2
    assert re.match(f"error: {sentence}", outcome.err)
    assert outcome.err.count("\n") == 1
    left = {path.name for path in folder.rglob("*")}
    assert not [name for name in left if name.endswith((".tmp", ".part")) or name.startswith(".graft")], (
        "torn files stay"
    )
    if kilobytes in (64, 480):
        small_disk(4000)
        assert graft(*command).code == 0
        assert (folder / "run/graft/graft.json").exists()


def test_a_file_that_may_not_grow_gets_one_sentence(graft: Graft) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        outcome = graft("train", "recipe.yaml", "out=runs/limited", "evaluation.own_tokens=0", "--quiet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert outcome.code == 2
    assert outcome.err.startswith("error: The checkpoint runs/limited/checkpoints/step-000003 can't be written (")
    assert outcome.err.count("\n") == 1


def test_a_path_that_may_not_be_written(graft: Graft, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "somewhere/else")

    monkeypatch.setattr("graftlm.runs.recipe.run_recipe", refuse)
    monkeypatch.delitem(__import__("graftlm").__dict__, "run_recipe", raising=False)
    outcome = graft("train", "recipe.yaml")
    sentence = "error: somewhere/else can't be read or written (Permission denied): fix that, or name another path.\n"
    assert outcome == (2, "", sentence)


def test_our_own_mistakes_keep_their_traceback(graft: Graft, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("graftlm.generation.methods.methods", fail)
    with pytest.raises(ZeroDivisionError):
        graft("methods")
