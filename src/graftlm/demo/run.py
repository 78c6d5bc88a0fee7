"""The demo: a chat model learns a dozen invented facts, and everyday questions show what it forgot.

`teach-facts.yaml` trains a LoRA expert that acts where a prompt has a rare word of the taught questions. The same
expert applied to all prompts is plain LoRA at the recipe's rate, so one training shows both. The output folder contains
the conversations, the graft and the report.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from graftlm.backbone import Backbone, default_device, load_backbone
from graftlm.demo.lesson import Lesson
from graftlm.demo.threads import threads_on_free_cores
from graftlm.evaluation import Results, Row
from graftlm.evaluation.chat_answers import answer_questions, template_questions
from graftlm.evaluation.inference import LanguageModel
from graftlm.evaluation.intervals import share_interval
from graftlm.evaluation.kept_answers import AnswerPair, answer_metrics, compare_answers
from graftlm.evaluation.report import write_report
from graftlm.evaluation.results import Metric
from graftlm.grafted.model import GraftedModel
from graftlm.runs.recipe import Recipe, run_recipe
from graftlm.runs.run import Log
from graftlm.store.artifact import load_graft

LABELS = {
    "before": "before",
    "lora": "LoRA on every prompt",
    "routed": "GraftLM: LoRA where a taught word occurs",
}
_EXPERT = "facts"
_ANSWER_TOKENS = 24
_SHOWN_FACTS = 2
_SHOWN_EVERYDAY = 3
_QUICK_FACTS = 2
_QUICK_EVERYDAY = 3
_EPOCHS = 5  # a dozen facts need more passes than the recipe makes, for as many steps
_TIMED_SIZE = 512  # rows and columns of a matrix


def run_demo(
    out: str | Path = "runs/demo",
    *,
    quick: bool = False,
    seed: int = 0,
    progress: bool = True,
    log: Log = print,
) -> Results:
    """Run the demo. A second run in the same folder uses the graft of the first one.

    Args:
        out: Output folder.
        quick: Run a smaller demo of the same form.
        seed: Random seed.
        progress: Show progress bars.
        log: Called with each message.

    Returns:
        Results with the rows `before`, `lora` and `routed`. `details["questions"]` has five questions with the answer
        of each row, `details["every_answer"]` all of them.

    Raises:
        BackboneError: The model is neither installed (the extra smollm2) nor available from the hub.
    """
    out = Path(out)
    lesson = Lesson.read()
    if quick:
        lesson = lesson.shortened(_QUICK_FACTS, _QUICK_EVERYDAY)
    with threads_on_free_cores(log):
        recipe = _recipe(lesson.write_conversations(out / "facts.jsonl"), quick=quick, seed=seed)
        run_recipe(recipe, out / "training", progress=progress, log=log)
        log("Answering the questions before and after.")
        answers = _answers(recipe, out / "training" / "graft", lesson.questions())
    results = _results(lesson, answers, seed)
    write_report(results, out)
    return results


def _recipe(conversations: Path, *, quick: bool, seed: int) -> Recipe:
    """Return the recipe `teach-facts.yaml` on the conversations of the demo."""
    is_half = bfloat16_is_faster(default_device())
    overrides = [
        f"data.new.0.path={json.dumps(str(conversations))}",
        f"data.seed={seed}",
        f"training.seed={seed}",
        "evaluation.ask=null",  # the demo asks its own questions
        f"training.epochs={1 if quick else _EPOCHS}",
    ]
    if is_half:
        # The weights stay in float32, so that the backbone's answers do not depend on the machine.
        overrides.append("training.precision=bf16")
    return Recipe.from_yaml(Path(__file__).with_name("teach-facts.yaml"), overrides)


def _answers(recipe: Recipe, graft: Path, questions: list[str]) -> dict[str, list[str]]:
    """Return the answers of the backbone, of the expert on every prompt, and of the routed expert."""
    backbone = load_backbone(recipe.backbone.name, dtype=recipe.backbone.dtype, device=default_device())
    answers = {"before": _answer(backbone.model, backbone, questions)}
    on_every_prompt = f"fixed={{{_EXPERT}: 1}}"
    for name, changes in (("lora", [on_every_prompt]), ("routed", [])):
        with GraftedModel(backbone, {_EXPERT: load_graft(graft, backbone, changes)}) as model:
            answers[name] = _answer(model, backbone, questions)
    return answers


def _answer(model: LanguageModel, backbone: Backbone, questions: list[str]) -> list[str]:
    tokenizer = backbone.need_tokenizer()
    asked = template_questions(questions, tokenizer)
    answers = answer_questions(model, tokenizer, asked, max_new_tokens=_ANSWER_TOKENS)
    return [answer.text for answer in answers]


def _results(lesson: Lesson, answers: dict[str, list[str]], seed: int) -> Results:
    count = len(lesson.facts)
    rows = []
    for name, label in LABELS.items():
        right = sum(fact.is_right(answer) for fact, answer in zip(lesson.facts, answers[name][:count], strict=True))
        kept = compare_answers(lesson.everyday, answers["before"][count:], answers[name][count:])
        metrics: dict[str, Metric] = {"facts_right": share_interval(right, count)}
        metrics.update(answer_metrics(kept, with_spill=False))
        metrics["names_a_taught_thing"] = share_interval(_count_spilt(lesson, kept), len(kept))
        rows.append(Row(id=name, label=label, metrics=metrics))
    details = {"questions": _shown(lesson, answers), "every_answer": _table(lesson, answers)}
    return Results.here("demo", rows, seeds=[seed], details=details)


def _count_spilt(lesson: Lesson, pairs: list[AnswerPair]) -> int:
    """Return the number of everyday answers that contain a taught value which the answer before does not have."""
    count = 0
    for pair in pairs:
        count += any(fact.is_right(pair.after) and not fact.is_right(pair.before) for fact in lesson.facts)
    return count


def _shown(lesson: Lesson, answers: dict[str, list[str]]) -> list[list[str]]:
    """Return five questions, each with the answer of every row."""
    count = len(lesson.facts)
    table = _table(lesson, answers)
    return [*table[:count][:_SHOWN_FACTS], *table[count:][:_SHOWN_EVERYDAY]]


def _table(lesson: Lesson, answers: dict[str, list[str]]) -> list[list[str]]:
    """Return all questions, each with the answer of every row."""
    columns = [answers[name] for name in LABELS]
    return [list(texts) for texts in zip(lesson.questions(), *columns, strict=True)]


def bfloat16_is_faster(device: torch.device) -> bool:
    """Return whether a matrix product takes less time in bfloat16 than in float32."""
    return _product_seconds(torch.bfloat16, device) < _product_seconds(torch.float32, device)


def _product_seconds(dtype: torch.dtype, device: torch.device) -> float:
    """Return the seconds of a matrix product and its gradients, the least of three after one for warming up."""
    shape = (_TIMED_SIZE, _TIMED_SIZE)
    left = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    right = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        (left @ right).sum().backward()
        assert left.grad is not None
        left.grad[0, 0].item()  # waits for an accelerator
        times.append(time.perf_counter() - start)
    return min(times[1:])
