"""Mistakes of users: exit code 2, and one sentence with what was found, what was expected and what to do."""

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

import graftlm
from cli.tools import Graft

TRAIN = ("train", "recipe.yaml", "out=runs/bad", "--quiet")


def spoil(home: Path) -> None:
    """Write texts, recipes and models with mistakes below `bad`."""
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
    for name in ("truncated", "moved", "foreign", "unmarked"):
        shutil.copytree(home / trained, home / "bad" / name)
    tensors = home / "bad/truncated/graft.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    edit(home / "bad/moved/graft.json", lambda values: values["backbone"].update(name="./gone/llama"))
    edit(home / "bad/foreign/graft.json", lambda values: values.update(kind="neutral-resides"))
    edit(home / "bad/unmarked/graft.json", lambda values: values["backbone"].update(fingerprint={}))
    return home / "bad"


def edit(path: Path, change: Callable[[dict], object]) -> None:
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


# Arguments, and what the sentence must name: what was found, and the key or the option that mends it.
CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "an empty folder": (
        (*TRAIN, "data.new.0.path=bad/empty"),
        ("bad/empty", ".txt", ".parquet", "pattern"),
    ),
    "a binary file": (
        (*TRAIN, "data.new.0.path=bad/binary.txt"),
        ("bad/binary.txt", "byte 1", "pattern"),
    ),
    "broken UTF-8": (
        (*TRAIN, "data.new.0.path=bad/latin.txt"),
        ("bad/latin.txt", "byte 3", "0xe9", "UTF-8"),
    ),
    "a row without text": (
        (*TRAIN, "data.new.0.path=bad/rows.jsonl"),
        ("bad/rows.jsonl", "line 2", "'text'", "body", "text_column"),
    ),
    "a typo in a recipe": (
        ("train", "bad/typo.yaml"),
        ("graft", "capcity", "did you mean capacity?"),
    ),
    "a typo in an override": (
        (*TRAIN, "training.step=3"),
        ("'training.step=3'", "did you mean steps?"),
    ),
    "no recipe": (
        ("train", "nothing.yaml"),
        ("nothing.yaml", "graft schema"),
    ),
    "a recipe with methods alone": (
        (*TRAIN, "graft=null", "methods={lora: {graft: {kind: lora}}}"),
        ("methods", "graft compare"),
    ),
    "a backbone without a tokenizer": (
        (*TRAIN, "backbone.name=bad/mute"),
        ("bad/mute", "tokenizer.json"),
    ),
    "a graft for another backbone": (
        ("generate", "GRAFT", "x", "--backbone", "gpt2"),
        ("GRAFT", "llama", "gpt2", "architecture"),
    ),
    "a backbone that is elsewhere now": (
        ("generate", "bad/moved", "x"),
        ("./gone/llama", "bad/moved", "--backbone"),
    ),
    "a truncated file of tensors": (
        ("inspect", "bad/truncated"),
        ("bad/truncated/graft.safetensors",),
    ),
    "an export into a folder that is not empty": (
        ("export", "GRAFT", "--to", "old"),
        ("old", "empty"),
    ),
    "a graft of an unknown kind": (
        ("inspect", "bad/foreign"),
        ("'neutral-resides'", "did you mean neutral-residues?"),
    ),
    "a record without a fingerprint": (
        ("generate", "bad/unmarked", "x"),
        ("bad/unmarked/graft.json", "backbone", "fingerprint"),
    ),
    "a folder with neither graft nor report": (
        ("inspect", "bad/empty"),
        ("bad/empty", "graft.json", "results.json", "graft train"),
    ),
    "nothing to measure": (
        ("eval", "GRAFT"),
        ("--text", "--examples", "--tasks"),
    ),
    "two texts of one name": (
        ("eval", "GRAFT", "--text", "old/test.txt", "--text", "new/test.txt"),
        ("test", "--text first=FILE"),
    ),
    "a text without a path": (
        ("eval", "GRAFT", "--text", "new="),
        ("--text", "'new='", "NAME=PATH"),
    ),
    "examples without a metric": (
        ("eval", "GRAFT", "--examples", "bad/rows.jsonl"),
        ("metric", "--examples", "--metric"),
    ),
    "a metric without examples": (
        ("eval", "GRAFT", "--text", "new/test.txt", "--metric", "chrf"),
        ("metric", "--examples", "--metric"),
    ),
    "a metric that does not exist": (
        ("eval", "GRAFT", "--examples", "sums=bad/rows.jsonl", "--metric", "bleu"),
        ("--examples sums", "metric", "'bleu'", "'chrf'"),
    ),
    "two files of examples of one name": (
        ("eval", "GRAFT", "--examples", "a=bad/rows.jsonl", "--examples", "a=bad/rows.jsonl", "--metric", "chrf"),
        ("--examples first=FILE",),
    ),
    "examples without prompts": (
        ("eval", "GRAFT", "--examples", "bad/rows.jsonl", "--metric", "chrf"),
        ("bad/rows.jsonl", "line 1", "'prompt'", "prompt_column"),
    ),
    "prompts in plain text": (
        (*TRAIN, "data.new.0.prompt_column=prompt"),
        ("new/train.txt", "prompt_column"),
    ),
    "windows that are too long": (
        ("eval", "GRAFT", "--text", "new/test.txt", "--length", "600"),
        ("600", "512", "--length"),
    ),
    "an empty prompt": (
        ("generate", "GRAFT", ""),
        ("prompt",),
    ),
    "more text than the model has positions": (
        ("generate", "GRAFT", "x", "--max-new-tokens", "600"),
        ("600", "601", "512"),
    ),
    "a temperature without sampling": (
        ("generate", "GRAFT", "x", "--temperature", "2"),
        ("graft generate", "temperature", "sample"),
    ),
    "an impossible temperature": (
        ("generate", "GRAFT", "x", "--sample", "--temperature", "0"),
        ("graft generate", "temperature", "0.0"),
    ),
    "no such device": (
        ("generate", "GRAFT", "x", "--device", "meat"),
        ("meat",),
    ),
    "a file instead of a folder": (
        ("train", "recipe.yaml", "--out", "old/test.txt", "--quiet"),
        ("old/test.txt", "File exists"),
    ),
    "a folder instead of a file": (
        ("schema", "--out", "old"),
        ("old", "Is a directory"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_gets_one_sentence(graft: Graft, trained: str, bad: Path, case: str) -> None:
    arguments, named = CASES[case]
    outcome = graft(*(trained if argument == "GRAFT" else argument for argument in arguments))
    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.startswith("error: ")
    for text in named:
        assert text.replace("GRAFT", trained) in outcome.err
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith(".\n")


@pytest.mark.parametrize("part", ["new", "old"])
def test_texts_are_read_before_the_backbone_is_measured(graft: Graft, bad: Path, part: str) -> None:
    outcome = graft("train", "recipe.yaml", f"data.{part}.0.path=bad/binary.txt", "out=runs/unread")
    assert outcome.code == 2
    assert "bad/binary.txt" in outcome.err
    assert not (bad.parent / "runs/unread").exists()


MISSING_RECIPE = """
import sys
from graftlm.cli import main

sys.argv = ["graft", "train", "missing.yaml"]
try:
    main()
except SystemExit as end:
    status = end.code
print(status, sorted({"torch", "transformers", "peft", "datasets", "matplotlib"} & {*sys.modules}))
"""


def test_a_missing_recipe_is_refused_before_torch_is_imported() -> None:
    child = subprocess.run([sys.executable, "-c", MISSING_RECIPE], capture_output=True, text=True, check=True)
    assert child.stderr.startswith("error: ")
    assert "missing.yaml" in child.stderr
    assert child.stdout == "2 []\n"


def test_a_prompt_that_is_not_utf_8(graft: Graft, trained: str) -> None:
    outcome = graft("generate", trained, "-", stdin=b"caf\xe9")
    assert (outcome.code, outcome.out) == (2, "")
    assert "byte 3" in outcome.err
    assert "0xe9" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("tran",), "'tran'"),
        (("train",), "'RECIPE'"),
        (("train", "recipe.yaml", "--steps", "3"), "--steps"),
        (("generate", "GRAFT", "x", "--num-beams", "0"), "'--num-beams'"),
        (("demo", "--tiny"), "--tiny"),
    ],
)
def test_a_command_that_does_not_exist(graft: Graft, arguments: tuple[str, ...], name: str) -> None:
    outcome = graft(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert name in outcome.err


@pytest.mark.usefixtures("undrawn_figures")
def test_a_budget_that_is_exceeded_fails_the_run_and_keeps_it(graft: Graft, home: Path) -> None:
    outcome = graft("train", "recipe.yaml", "evaluation.forgetting_budget=-9", "out=runs/budget", "--quiet", "--json")
    assert outcome.code == 2
    assert "the budget is -9" in outcome.err
    assert json.loads(outcome.out)["results"]["aims"][0]["met"] is False
    assert (home / "runs/budget/graft/graft.json").exists()


@pytest.fixture
def small_disk(home: Path) -> Iterator[Callable[[int], Path]]:
    """`small_disk(kilobytes)` returns a folder on a disk of that size. A second call resizes the same disk."""
    folder = home / "disk"

    def disk(kilobytes: int) -> Path:
        options = f"size={kilobytes}k"
        if folder.is_mount():
            options = f"remount,{options}"
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
            pytest.skip("only root can mount a small disk, and not everywhere")
        return folder

    yield disk
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(
    ("kilobytes", "path"),
    [
        (4, r"disk/run/\S+.json"),  # no room for the recipe
        (64, "disk/run/checkpoints/step-000002"),  # room for no checkpoint
        (400, "disk/run/graft"),  # room for the checkpoints
        (480, r"disk/run/\S+.png"),  # room for the graft, but not for the report
    ],
)
def test_a_full_disk_gets_one_sentence_and_the_same_command_goes_on(
    graft: Graft,
    small_disk: Callable[[int], Path],
    kilobytes: int,
    path: str,
) -> None:
    folder = small_disk(kilobytes)
    command = (
        "train",
        "recipe.yaml",
        "out=disk/run",
        "training.steps=4",
        "training.checkpoint_every=2",
        "evaluation.own_tokens=0",
        "--quiet",
    )
    outcome = graft(*command)
    assert outcome.code == 2
    assert re.match(rf"error: .*{path}\b", outcome.err)
    assert outcome.err.count("\n") == 1
    names = {file.name for file in folder.rglob("*")}
    torn = [name for name in names if name.endswith((".tmp", ".part")) or name.startswith(".graft")]
    assert torn == []
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
    assert "runs/limited/checkpoints/step-000003" in outcome.err
    assert outcome.err.count("\n") == 1


def test_a_path_that_may_not_be_written(graft: Graft, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "somewhere/else")

    monkeypatch.setattr("graftlm.runs.recipe.run_recipe", refuse)
    monkeypatch.delitem(vars(graftlm), "run_recipe", raising=False)
    outcome = graft("train", "recipe.yaml")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: somewhere/else ")
    assert "Permission denied" in outcome.err


def test_our_own_mistakes_keep_their_traceback(graft: Graft, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("graftlm.generation.methods.methods", fail)
    with pytest.raises(ZeroDivisionError):
        graft("methods")
