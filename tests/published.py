"""Small files in the forms in which GLUE, SuperGLUE, MRQA, SNLI and WNUT2017 are published; the sentences are ours."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

COPA = {
    "premise": "The lamp broke.",
    "choice1": "It fell.",
    "choice2": "It shone.",
    "question": "cause",
    "label": 0,
    "idx": 0,
}
WIC = {
    "word": "bank",
    "sentence1": "A bank of sand.",
    "sentence2": "The bank lends.",
    "idx": 0,
    "label": False,
    "start1": 2,
    "start2": 4,
    "end1": 6,
    "end2": 8,
    "version": 1.1,
}
WSC = {
    "text": "Anna thanked Mary Ann, because she had helped.",
    "target": {"span2_index": 5, "span1_index": 2, "span1_text": "Mary Ann", "span2_text": "she"},
    "idx": 0,
    "label": True,
}
MULTIRC = {
    "idx": 0,
    "passage": {
        "text": "The boat left at noon.",
        "questions": [
            {
                "question": "When did it leave?",
                "idx": 0,
                "answers": [{"text": "Noon", "idx": 0, "label": 1}, {"text": "Night", "idx": 1, "label": 0}],
            }
        ],
    },
}
RECORD = {
    "source": "news",
    "idx": 0,
    "passage": {
        "text": "Rome beat Paris. Rome won.",
        "entities": [{"start": 0, "end": 3}, {"start": 10, "end": 14}, {"start": 17, "end": 20}],
    },
    "qas": [
        {
            "query": "The loser was @placeholder.",
            "idx": 0,
            "answers": [{"start": 10, "end": 14, "text": "Paris"}],
        }
    ],
}
MRQA = {
    "id": "x",
    "context": "The moon is round. The moon is old.",
    "context_tokens": [["The", 0]],
    "qas": [
        {
            "qid": "1",
            "question": "What is round?",
            "question_tokens": [["What", 0]],
            "answers": ["Moon", "the moon"],
            "detected_answers": [{"text": "moon", "char_spans": [[4, 7], [23, 26]], "token_spans": [[1, 1], [6, 6]]}],
        }
    ],
}
HEADER = {"header": {"dataset": "SQuAD", "split": "train"}}
SNLI = {"gold_label": "neutral", "sentence1": "A man sits.", "sentence2": "A man waits.", "captionID": "1"}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write lines of JSON, compressed if the name ends in .gz, and return the path."""
    text = "\n".join(json.dumps(row) for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path
