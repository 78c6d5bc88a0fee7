"""What an engine serves, and which requests it takes on."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from graftlm.backbone import UNLIMITED, Backbone, max_sequence_length
from graftlm.backbone.taps import check_conflicts
from graftlm.errors import BackboneError, GraftError, TapConflictError, did_you_mean
from graftlm.grafts import Graft
from graftlm.grafts.base import supports_row_groups
from graftlm.serving.protocol import Ask, Limits, ServingError, TooLongError, UnknownModelError

Chosen = dict[str, Graft]
"""The grafts that answer a request together, by name; none for the bare backbone."""


class Catalogue:
    """The backbone's name and the grafts by theirs. All methods may be called from any thread.

    Args:
        backbone: a causal language model.
        grafts: built for it.
        name: what the backbone is called; by default its own name.
        limits: of one request.
        together: whether only grafts are taken that can act on some rows of a batch.

    Raises:
        BackboneError: the backbone does not write text.
        GraftError: a name can't be asked for.
    """

    def __init__(
        self,
        backbone: Backbone,
        grafts: Mapping[str, Graft],
        name: str | None = None,
        limits: Limits | None = None,
        *,
        together: bool = False,
    ) -> None:
        if backbone.kind != "causal-lm" or not backbone.sites.family.causal:
            raise BackboneError(
                f"The backbone {backbone.name} ({backbone.sites.model_type}) writes no text: serve a causal language "
                "model."
            )
        self.backbone = backbone
        self.name = name or backbone.name
        self.limits = limits or Limits()
        self._together = together
        self._lock = threading.Lock()
        self._grafts: dict[str, Graft] = {}
        for graft_name, graft in grafts.items():
            self.replace(graft_name, graft)

    @property
    def names(self) -> tuple[str, ...]:
        """The backbone's name first, then the grafts'."""
        with self._lock:
            return (self.name, *self._grafts)

    def replace(self, name: str, graft: object | None) -> None:
        """Let a name stand for this graft from now on, or for nothing.

        Raises:
            GraftError: the name is the backbone's, or can't be asked for; or it is no graft.
        """
        if name == self.name or not name or "+" in name:
            why = (
                "is the backbone's" if name == self.name else "is empty" if not name else "holds a +, which joins names"
            )
            raise GraftError(f"The name {name!r} {why}: give the graft another.")
        if graft is not None and not isinstance(graft, Graft):
            raise GraftError(
                f"{type(graft).__name__} is no graft, which is expected under {name!r}: build or load one."
            )
        if self._together and graft is not None and not supports_row_groups(graft):
            raise GraftError(
                f"The graft {name} brings modules of its own into the model, which would act on the requests of others "
                "too: use it with graft generate, which answers one at a time."
            )
        with self._lock:
            if graft is None:
                self._grafts.pop(name, None)
            else:
                self._grafts[name] = graft

    def holds(self, grafts: Iterable[tuple[str, Graft]]) -> bool:
        """Whether all of these can be asked for."""
        with self._lock:
            return all(self._grafts.get(name) is graft for name, graft in grafts)

    def check(self, ask: Ask) -> Chosen:
        """The grafts that are to answer a request.

        Raises:
            ServingError: it can't be answered.
        """
        chosen = self._choose(ask.model)
        if ask.max_tokens < 1:
            raise ServingError(f"max_tokens is {ask.max_tokens}, but 1 at least is expected.")
        self._check_prompt(ask)
        self._check_length(ask)
        return chosen

    def _choose(self, model: str) -> Chosen:
        with self._lock:
            known = dict(self._grafts)
        if model == self.name:
            return {}
        names = model.split("+")
        for name in names:
            if name == self.name:
                raise ServingError(f"The backbone {name} is in every mixture already: leave it out of {model!r}.")
            if name not in known:
                raise UnknownModelError(f"There is no model {name!r}{did_you_mean(name, (self.name, *known))}.")
            if names.count(name) > 1:
                raise ServingError(f"The mixture {model!r} names {name} twice: leave one out.")
        chosen = {name: known[name] for name in names}
        self._check_mixture(chosen)
        return chosen

    def _check_mixture(self, chosen: Chosen) -> None:
        if len(chosen) == 1:
            return
        alone = [name for name, graft in chosen.items() if not supports_row_groups(graft)]
        if alone:
            raise ServingError(
                f"The graft {alone[0]} brings modules of its own into the model, so that it acts alone: leave out the "
                "others, or this one."
            )
        try:
            check_conflicts(self.backbone.sites, {name: graft.taps() for name, graft in chosen.items()})
        except TapConflictError as error:
            raise ServingError(str(error)) from error

    def _check_prompt(self, ask: Ask) -> None:
        if not ask.prompt:
            raise ServingError("The prompt has no tokens: give at least one word to continue.")
        vocabulary = int(self.backbone.sites.config.vocab_size)
        foreign = next((token for token in ask.prompt if not 0 <= token < vocabulary), None)
        if foreign is not None:
            raise ServingError(f"The prompt holds the token id {foreign}, but the model knows 0 to {vocabulary - 1}.")

    def _check_length(self, ask: Ask) -> None:
        if ask.max_tokens > self.limits.max_tokens:
            raise TooLongError(
                f"max_tokens is {ask.max_tokens}, but this server writes {self.limits.max_tokens} at most: ask "
                "for fewer."
            )
        context, total = self.context, len(ask.prompt) + ask.max_tokens
        if context is not None and total > context:
            raise TooLongError(
                f"The prompt has {len(ask.prompt)} tokens, which with {ask.max_tokens} new ones makes {total}, but "
                f"{context} is the most here: shorten the prompt, or ask for fewer."
            )

    @property
    def context(self) -> int | None:
        """Tokens of a prompt and its continuation; None for no limit."""
        limit = min(max_sequence_length(self.backbone), self.limits.context or UNLIMITED)
        return None if limit == UNLIMITED else limit


def ends_of(backbone: Backbone) -> frozenset[int]:
    """The token ids that end a text: those that the checkpoint's generation config names, and the tokenizer's."""
    configured = getattr(getattr(backbone.model, "generation_config", None), "eos_token_id", None)
    found = list(configured) if isinstance(configured, list | tuple) else [configured]
    if backbone.tokenizer is not None:
        found.append(backbone.tokenizer.eos_token_id)
    return frozenset(token for token in found if isinstance(token, int))
