"""Sample tokens from a model's own distribution, with random numbers that depend only on a seed and a batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from numpy.random import SeedSequence

from graftlm.backbone import Backbone, generate_rows
from graftlm.backbone.patching import replaced_attributes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TokenSampler:
    """Sample tokens after prompts.

    Args:
        backbone: the backbone; grafts that are attached to it are not active.
        seed: the seed of all batches.
        model: a model that samples instead of the bare backbone, such as a `GraftedModel` on it.

    Raises:
        BackboneError: the backbone has no tokenizer.
    """

    def __init__(self, backbone: Backbone, seed: int, model: PreTrainedModel | None = None) -> None:
        self._tokenizer = backbone.need_tokenizer()
        self._model = backbone.bare_model if model is None else model
        # The module whose generation config `generate` reads.
        self._configured = self._model if model is None else backbone.model
        self._seed = seed

    @contextmanager
    def seeded(self, number: int) -> Iterator[None]:
        """Return a context manager inside which `sample` uses the random numbers of a batch.

        It also replaces the generation config of the checkpoint by the default one, and restores both at its end.

        Args:
            number: the number of the batch, from 0.
        """
        from transformers import GenerationConfig  # imports the models

        device = self._model.device
        devices = [] if device.type == "cpu" else [device]
        seed = int(SeedSequence([self._seed, number]).generate_state(1)[0])
        # The settings of the checkpoint's generation config, such as its penalties, are not used.
        plain = replaced_attributes(self._configured, generation_config=GenerationConfig())
        with torch.random.fork_rng(devices, device_type=device.type), plain:
            if device.type == "cpu":
                # `torch.manual_seed` would also keep the seed of every batch for devices that are never initialized.
                torch.default_generator.manual_seed(seed)
            else:
                torch.manual_seed(seed)
            yield

    @torch.no_grad()
    def sample(
        self,
        prompts: list[list[int]],
        ends: Collection[int],
        max_new_tokens: int,
        *,
        temperature: float,
        top_p: float,
    ) -> list[list[int]]:
        """Sample tokens after each prompt, up to and including the first end.

        Args:
            prompts: token ids of each prompt.
            ends: ids of the tokens that end a text.
            max_new_tokens: maximum number of sampled tokens.
            temperature: divides the logits.
            top_p: total probability of the tokens to sample from.

        Returns:
            The new token ids of each prompt. They have no end if `max_new_tokens` is reached first, and are empty if
            `max_new_tokens` is below 1.
        """
        if not prompts or max_new_tokens < 1:
            return [[] for _ in prompts]
        return generate_rows(
            self._model,
            self._tokenizer,
            prompts,
            ends,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=0,
            do_sample=True,
        )
