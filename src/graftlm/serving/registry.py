"""The backbone and the grafts of an engine by name, and the check of requests against them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

from graftlm.backbone import Backbone
from graftlm.backbone.taps import check_conflicts
from graftlm.errors import BackboneError, GraftError, TapConflictError
from graftlm.grafted.graft_set import GraftSet, supports_row_groups
from graftlm.grafts import Graft
from graftlm.grafts.low_rank_taps import LowRankTaps
from graftlm.grafts.stack import Stack
from graftlm.grafts.sums import check_weight
from graftlm.serving.protocol import (
    ContextLengthError,
    EngineLimits,
    GenerationRequest,
    ServingError,
    check_model,
    check_prompt,
    context_limit,
)


class ModelRegistry:
    """The backbone and the grafts of an engine by name. All methods are thread-safe.

    Args:
        backbone: a backbone of the engine's `kind`: a causal language model, unless a subclass sets another kind.
        grafts: grafts for this backbone, by name.
        name: name of the backbone in requests; None uses `backbone.name`.
        limits: the limits of the engine; None uses the defaults of `EngineLimits`.

    Raises:
        BackboneError: the backbone is of another kind.
        GraftError: a graft's name can't be used, or a graft can't share a batch.
    """

    kind = "causal-lm"
    shares_batches = False
    """Accept only grafts that can act on some rows of a batch."""

    def __init__(
        self,
        backbone: Backbone,
        grafts: Mapping[str, Graft] | None = None,
        name: str | None = None,
        limits: EngineLimits | None = None,
    ) -> None:
        self._check_kind(backbone)
        self.name = name or backbone.name
        self.limits = limits or EngineLimits()
        self._backbone = backbone
        self._context = context_limit(backbone, self.limits)
        self._vocabulary = int(backbone.config.vocab_size)
        self._grafts: dict[str, Graft] = {}  # replaced as a whole, so that readers need no lock
        self._lock = threading.Lock()
        for graft_name, graft in (grafts or {}).items():
            self.replace(graft_name, graft)

    def _check_kind(self, backbone: Backbone) -> None:
        is_bidirectional = self.kind == "causal-lm" and not backbone.sites.family.causal
        if backbone.kind != self.kind or is_bidirectional:
            raise BackboneError(self._kind_problem(backbone))

    def _kind_problem(self, backbone: Backbone) -> str:
        model = f"The backbone {backbone.name} ({backbone.sites.model_type})"
        if self.kind == "causal-lm":
            return f"{model} can't generate text: serve a causal language model, or a graft that was trained on tasks."
        return (
            f"{model} is a model of the kind {backbone.kind}, but this engine serves the kind {self.kind}: serve it "
            "with an engine of its kind."
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The backbone's name, followed by the grafts' names."""
        return (self.name, *self._grafts)

    def replace(self, name: str, graft: object | None) -> None:
        """Register a graft under a name, or remove the name with None. LoRA acts by taps instead of its own modules.

        Raises:
            GraftError: the name can't be used, the object is not a graft, or the graft can't share a batch.
        """
        self._check_name(name)
        if graft is not None:
            if not isinstance(graft, Graft):
                raise GraftError(
                    f"{name} is of type {type(graft).__name__}, but a graft is expected: pass one, such as the result "
                    "of load_graft."
                )
            if graft.token_rows is not None:
                raise GraftError(
                    f"The graft {name} has rows of added tokens, but all models of a server share the backbone's "
                    "vocabulary: write backbone and graft as one model (graft export) and serve that as a backbone, or "
                    "use the graft with graft generate."
                )
            if self.shares_batches and not supports_row_groups(graft):
                graft = LowRankTaps.of(graft, self._backbone)
            if graft is None:
                raise GraftError(
                    f"The graft {name} replaces or adds modules of the model, so that it would act on the requests of "
                    "other models in the batch: write backbone and graft as one model (graft export) and serve that as "
                    "a backbone, or use the graft with graft generate."
                )
        with self._lock:
            grafts = dict(self._grafts)
            if graft is None:
                grafts.pop(name, None)
            else:
                grafts[name] = graft
            self._grafts = grafts

    def _check_name(self, name: str) -> None:
        if name == self.name:
            problem = "is the name of the backbone"
        elif not name:
            problem = "is empty"
        elif "+" in name or ":" in name:
            problem = "has a + or a colon, which join the names and the weights of a mixture"
        else:
            return
        raise GraftError(f"The graft's name {name!r} {problem}: choose another name.")

    def fits(self, graft: object | None) -> bool:
        """Return whether an object is a graft that was built for this backbone."""
        return isinstance(graft, Graft) and graft._fingerprint == self._backbone.fingerprint

    def holds(self, grafts: Iterable[tuple[str, Graft]]) -> bool:
        """Return whether all of these (name, graft) pairs are still registered."""
        known = self._grafts
        return all(known.get(name) is graft for name, graft in grafts)

    def graft_set(self, request: GenerationRequest) -> GraftSet:
        """Return the grafts of a request with their weights, after a check of the request; see `check`.

        Raises:
            ServingError: the request can't be served.
        """
        grafts = self.check(request)
        if not grafts:
            return GraftSet()
        return GraftSet.of(grafts, check_model(tuple(grafts), request.model))

    def check(self, request: GenerationRequest) -> dict[str, Graft]:
        """Return the grafts of a request by name; an empty mapping for the backbone.

        Raises:
            UnknownModelError: a name in the request's model is unknown.
            ContextLengthError: the request exceeds the context or the maximum number of new tokens.
            ServingError: a mixture is impossible, the prompt is empty or has an unknown token, or fewer than the
                minimum of new tokens are requested.
        """
        grafts = self._grafts_of(request.model)
        fewest_tokens = 0 if request.embed else 1
        if request.max_tokens < fewest_tokens:
            raise ServingError(
                f"max_tokens is {request.max_tokens}, but at least {fewest_tokens} is expected: request more."
            )
        check_prompt(request.prompt, self._vocabulary)
        if request.max_tokens > self.limits.max_tokens:
            raise ContextLengthError(
                f"{request.max_tokens} new tokens were requested, but this server generates at most "
                f"{self.limits.max_tokens}: request fewer."
            )
        length = len(request.prompt)
        total = length + request.max_tokens
        if total > self._context:
            remedy = "shorten the prompt"
            if length + fewest_tokens <= self._context:
                remedy += ", or request fewer new tokens"
            raise ContextLengthError(
                f"The prompt has {length} tokens and {request.max_tokens} new ones are to be generated, {total} in "
                f"all, but the context has at most {self._context} tokens: {remedy}."
            )
        return grafts

    def _grafts_of(self, model: str) -> dict[str, Graft]:
        if model == self.name:
            return {}
        registered = self._grafts
        weights = check_model((self.name, *registered), model)
        if self.name in weights:
            raise ServingError(
                f"The mixture {model!r} names the backbone {self.name}, which is part of every mixture: leave it out."
            )
        grafts = {name: registered[name] for name in weights}
        try:
            for name, graft in grafts.items():
                check_weight(name, graft, weights[name])
        except GraftError as error:
            raise ServingError(str(error), "model") from None
        if len(grafts) > 1:
            self._check_mixture(grafts)
        return grafts

    def _check_mixture(self, grafts: Mapping[str, Graft]) -> None:
        for name, graft in grafts.items():
            if isinstance(graft, Stack):
                raise ServingError(
                    f"{name} is a stage, which contains the grafts of earlier stages and can't be part of a sum: "
                    "request it alone."
                )
            if not supports_row_groups(graft):
                raise ServingError(
                    f"The graft {name} replaces or adds modules of the model and can't be part of a mixture: request "
                    "it without other grafts."
                )
        try:
            check_conflicts(self._backbone.sites, {name: graft.taps() for name, graft in grafts.items()})
        except TapConflictError as error:
            raise ServingError(str(error)) from error
