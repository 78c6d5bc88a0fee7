"""Questions to a chat model: those of a file, or those that the model asks itself.

To ask itself a question, the model samples the user's turn after the beginning of its chat template.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from graftlm.backbone import Backbone, end_ids, max_sequence_length
from graftlm.data.own_text_sampling import check_backbone, split_template
from graftlm.data.token_sampler import TokenSampler
from graftlm.errors import DataError
from graftlm.files.reading import read_text
from graftlm.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 40
_BATCH = 16
_MAX_BATCHES = 8
_MIN_WORDS = 3
_REMEDY = "name questions of your own"


def read_questions(path: str | Path) -> list[str]:
    """Read a file of questions, one per line. Empty lines are skipped, and white space around questions is removed.

    Args:
        path: a UTF-8 text file, which may be gzipped.

    Raises:
        DataError: the file can't be read, or has no question.
    """
    path = Path(path).expanduser()
    lines = [line.strip() for line in read_text(path).splitlines()]
    questions = [line for line in lines if line]
    if not questions:
        raise DataError(f"{path} has no questions, but one per line is expected: write at least one.")
    return questions


def sample_questions(
    backbone: Backbone,
    count: int,
    seed: int,
    model: PreTrainedModel | None = None,
    *,
    progress: bool = False,
) -> list[str]:
    """Sample different questions of at most 40 tokens and at least three words from the unmodified distribution.

    Args:
        backbone: the backbone; grafts that are attached to it are not active.
        count: maximum number of questions.
        seed: the seed of the questions.
        model: a model that samples instead of the bare backbone, such as a `GraftedModel` on it.
        progress: whether to show a progress bar.

    Returns:
        The questions. There are fewer than `count`, or none, if 128 sampled turns have fewer that end.

    Raises:
        BackboneError: the backbone has no tokenizer.
        DataError: the backbone is not a causal language model, or has too few positions; or its chat template is
            missing or can't be used.
    """
    tokenizer = backbone.need_tokenizer()
    parts = split_template(tokenizer, max_sequence_length(backbone.model), backbone.name, remedy=_REMEDY)
    check_backbone(backbone, len(parts.before) + _TOKENS, _REMEDY)
    sampler = TokenSampler(backbone, seed, model)
    turn_end = parts.after[0]
    ends = end_ids(backbone.model, tokenizer) | {turn_end}
    questions: dict[str, None] = {}  # an ordered set
    with progress_bar("sampling questions", count, show=progress) as update:
        for number in range(_MAX_BATCHES):
            if len(questions) >= count:
                break
            with sampler.seeded(number):
                turns = sampler.sample([parts.before] * _BATCH, ends, _TOKENS, temperature=1.0, top_p=1.0)
            for turn in turns:
                text = str(tokenizer.decode(turn, skip_special_tokens=True)).strip()
                is_whole = bool(turn) and turn[-1] == turn_end
                if is_whole and len(text.split()) >= _MIN_WORDS:
                    questions[text] = None
            update(completed=min(len(questions), count))
    return list(questions)[:count]
