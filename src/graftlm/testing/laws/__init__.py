"""The laws of grafts as a test class: subclass `GraftLaws`, and every law runs on tiny models of several families."""

from graftlm.testing.accelerator import decode_step_waits
from graftlm.testing.laws.artifact import ArtifactLaws
from graftlm.testing.laws.base import CLOSE, LENGTHS, LONG, LawsBase, decoders_only
from graftlm.testing.laws.decoding import DecodingLaws
from graftlm.testing.laws.frozen_backbone import FrozenBackboneLaws
from graftlm.testing.laws.independence import IndependenceLaws
from graftlm.testing.laws.training import TrainingLaws
from graftlm.testing.passes import (
    DOMAIN,
    NEW_TOKENS,
    attach_graft,
    generate,
    gradients,
    is_encoder,
    logits,
    losses_of,
    pad_rows,
    positions_of,
    prompts,
    randomise,
    recompute,
    seeded_logits,
    tiny_backbone_of,
)
from graftlm.testing.state import digest, state_of, tensors_of


class GraftLaws(
    FrozenBackboneLaws,
    TrainingLaws,
    ArtifactLaws,
    DecodingLaws,
    IndependenceLaws,
):
    """The laws that every graft keeps, as tests for a subclass that sets `config`.

    Every test also fails if it changes the backbone, as `backbone_stays` checks.

    Attributes:
        config: the graft's config as a recipe writes it.
        families: the families of tiny models to test on. A suffix selects half precision: `llama+bfloat16`,
            `llama+float16`.
        spread: standard deviation of the noise that replaces training; with more noise, violations of a law are larger.
        learning_rate: a learning rate at which the loss on one batch falls within 8 steps.
        start: maximum change of logits by an untrained graft; 0 if it must change no bit.
        exceptions: reasons why laws are skipped, by the name of a law without `test_`, a family, or `encoders`.
    """
