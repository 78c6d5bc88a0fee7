"""The sizes, the rows, their searches and the declared comparisons."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from experiments.keys_smollm2.keys import World
from experiments.protocol import Comparison
from graftlm.config import Config

MODEL = "smollm2-135m-instruct"
M_A = "m_a"
M_B = "m_b"
PIPELINE = "pipeline"
MIXTURE = "probability-mixture"
PUBLISHED = "published"
OURS = "ours"
LORA = "lora"
MAJORITY = "majority"

Other = Literal["taught", "vanilla", "random"]
"""The model that a composition reads: the one that knows the keys, SmolLM2 as it is, or random weights."""


class Composed(Config):
    """A trained composition.

    Args:
        label: label of the row.
        reads: the model that it reads.
        graft: its config without the model.
    """

    label: str
    reads: Other = "taught"
    graft: dict[str, Any]


_PUBLISHED = {"preset": "calm"}
COMPOSED = {
    PUBLISHED: Composed(label="composition as published", graft=_PUBLISHED),
    OURS: Composed(label="composition with a mixture", graft={"readout": "mixture"}),
    "random": Composed(label="published form, random m_A", reads="random", graft=_PUBLISHED),
    "vanilla": Composed(label="published form, SmolLM2 itself as m_A", reads="vanilla", graft=_PUBLISHED),
    "encoder": Composed(label="published form, m_A reads the prompt only", graft={**_PUBLISHED, "refresh": "prompt"}),
}
LABELS = {
    MAJORITY: "the most frequent result",
    M_A: "m_A, keys",
    M_B: "m_B, sums",
    PIPELINE: "pipeline: m_A writes, m_B computes",
    MIXTURE: "mixture of probabilities",
    **{name: row.label for name, row in COMPOSED.items()},
    LORA: "LoRA on m_B, of the composition's size",
}
TRAINED = (*COMPOSED, LORA)
RATES = dict.fromkeys(TRAINED, (0.0003, 0.001, 0.003))
WEIGHTS = (0.25, 0.5, 0.75)
SEARCH_SEED = 101
"""The seed of the searches, which have keys of their own."""
SEEDS = (21, 22, 23)

DECLARED = (
    Comparison(PUBLISHED, "random", "direct_keys"),
    Comparison(PUBLISHED, "vanilla", "direct_keys"),
    Comparison(PUBLISHED, LORA, "direct_keys"),
    Comparison(PUBLISHED, PIPELINE, "direct_keys"),
    Comparison(OURS, PUBLISHED, "direct_keys"),
    Comparison(PUBLISHED, "random", "direct_values"),
)
"""The primary comparisons, which the README lists."""


class Size(Config):
    """How much is taught and asked.

    Args:
        world: the keys.
        asked: number of test questions of each set.
        validated: number of validation questions.
        memory_passes: how often m_A reads each key, alone and in a substitution.
        sum_passes: how often m_B reads each sum.
        joint: number of documents of the joint data.
        searched: the same of a search.
        length: tokens of a row of training.
        batch_size: rows of a step.
        rates: learning rates of the LoRA of m_A and m_B.
        capacity: size of that LoRA, as a share of SmolLM2.
        compared: size of the LoRA that the composition is compared with: that of the published composition.
    """

    world: World = Field(default_factory=World)
    asked: int = 200
    validated: int = 100
    memory_passes: int = 24
    sum_passes: int = 8
    joint: int = 4000
    searched: int = 2000
    length: int = 64
    batch_size: int = 4
    rates: tuple[float, float] = (1e-3, 1e-3)
    capacity: float = 0.1
    compared: float = 0.0863


FULL = Size()
QUICK = Size(
    world=World(keys=60),
    asked=3,
    validated=2,
    memory_passes=1,
    sum_passes=1,
    joint=8,
    searched=4,
    length=48,
    batch_size=2,
    capacity=0.02,
    compared=0.02,
)
