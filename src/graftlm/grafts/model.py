"""The one object that training, evaluation, generation and serving see: a backbone with its grafts attached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from graftlm.backbone import Backbone, Call, Sites, Wiring
from graftlm.errors import GraftError, TapConflictError
from graftlm.grafts.base import Graft, Trace

_Found = TypeVar("_Found")


@dataclass
class GraftedOutput(ModelOutput):
    """What a `GraftedModel` returns: as transformers, with the parts of the loss.

    `loss` = `lm_loss` + `auxiliary_loss`; both parts are detached.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    lm_loss: Tensor | None = None
    auxiliary_loss: Tensor | None = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None


class GraftedModel(nn.Module):
    """A backbone with grafts attached.

    Its trainable parameters are the grafts' alone. `model` is the live transformers model with the grafts' taps in
    place: give it to any tool that takes a transformers model.

    Args:
        backbone: the frozen backbone; its weights, flags and mode are given back by `detach`.
        grafts: grafts by name, built for this backbone.

    Raises:
        TapConflictError: two grafts claim one place, or the backbone carries grafts already.
    """

    _carrying: ClassVar[WeakSet[PreTrainedModel]] = WeakSet()

    def __init__(self, backbone: Backbone, grafts: Mapping[str, Graft] | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        if backbone.model in self._carrying:
            raise TapConflictError(
                f"The backbone {backbone.name} carries grafts already, and more would act on top of them unseen: "
                "detach those first, or attach all of them in one GraftedModel."
            )
        self._flags = {name: p.requires_grad for name, p in backbone.model.named_parameters()}
        self._modes = {module: module.training for module in backbone.model.modules()}
        backbone.model.requires_grad_(False)
        backbone.model.eval()
        self.grafts = nn.ModuleDict(dict(grafts or {}))
        self._attached: list[Graft] = []
        self._checkpoints_layers = False
        try:
            model = backbone.model
            for graft in self._each():
                model = graft.attach(model)
                self._attached.append(graft)
            self.model: PreTrainedModel = model
            taps = {name: graft.taps() for name, graft in zip(self.grafts, self._each(), strict=True)}
            self._wiring = Wiring(model, Sites(model), taps, self._prepare)
        except BaseException:
            self._give_back()
            raise
        self._carrying.add(backbone.model)
        self._detached = False

    def _each(self) -> Iterator[Graft]:
        for graft in self.grafts.values():
            assert isinstance(graft, Graft), f"{type(graft).__name__} is not a Graft"
            yield graft

    def _prepare(self, call: Call) -> None:
        call.training = self.training and torch.is_grad_enabled()
        for graft in self._each():
            graft.prepare(call)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        domain: Tensor | None = None,
        token_mask: Tensor | None = None,
        totals: Tensor | None = None,
        prompt: Tensor | None = None,
        extras: Mapping[str, Any] | None = None,
        targets: Sequence[Tensor] | None = None,
        **kwargs: Any,
    ) -> GraftedOutput:
        """One pass.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, T), 1 for real tokens.
            position_ids: (B, T); where they restart inside a row and there is no mask, attention stays inside each
                document.
            labels: (B, T) aligned with `input_ids`, -100 where nothing is predicted; the shift happens here.
            domain: (B,) domain marks, 0 old and 1 new.
            token_mask: (B, T) True for tokens that are not padding, where `attention_mask` does not say it.
            totals: (1 + domains,) counts over the whole optimiser step, see `Call`; None takes this pass's own.
            prompt: (B, T) True for tokens that were given rather than to be predicted.
            extras: whatever else the batch says, by name.
            targets: what a graft's heads are to predict, one a row; the language-model head is then left out, and
                `lm_loss` is the heads' loss.
            kwargs: handed on to the model. Without a cache of the caller's none is made unless `use_cache` asks for it:
                it would make transformers forget where documents begin.

        Raises:
            GraftError: there are targets, and no graft has heads, or two have.
        """
        said: dict[str, Any] = {"domain": domain, "token_mask": token_mask, "totals": totals, "prompt": prompt}
        said["extras"] = dict(extras or {})
        if targets is not None:
            inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
            return self._on_targets(targets, said, inputs | kwargs)
        kwargs.setdefault("use_cache", kwargs.get("past_key_values") is not None)
        if kwargs["use_cache"] and kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = DynamicCache(config=self.config)  # made here, so that grafts see it
        with self._wiring.announce(**said) as calls:
            output = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        lm_loss = None if labels is None else language_modelling_loss(output.logits, labels, totals)
        auxiliary = self._auxiliary_loss(calls[0]) if labels is not None and calls else None
        loss = lm_loss if lm_loss is None or auxiliary is None else lm_loss + auxiliary
        return GraftedOutput(
            loss=loss,
            logits=output.get("logits"),
            lm_loss=None if lm_loss is None else lm_loss.detach(),
            auxiliary_loss=None if auxiliary is None else auxiliary.detach(),
            past_key_values=output.get("past_key_values"),
            hidden_states=output.get("hidden_states"),
            attentions=output.get("attentions"),
        )

    def _on_targets(self, targets: Sequence[Tensor], said: dict[str, Any], inputs: dict[str, Any]) -> GraftedOutput:
        """The loss of the heads of a graft."""
        call, hidden = self._last_hidden(said, inputs)
        target_loss = self._only([graft.target_loss(call, hidden, targets) for graft in self._each()])
        auxiliary = self._auxiliary_loss(call)
        return GraftedOutput(
            loss=target_loss if auxiliary is None else target_loss + auxiliary,
            lm_loss=target_loss.detach(),
            auxiliary_loss=None if auxiliary is None else auxiliary.detach(),
        )

    def predict(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        extras: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Tensor]:
        """What the heads of a graft say to each row, see `grafts.heads`; whether with gradients is the caller's choice.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, T), 1 for real tokens; on which side padding stands changes nothing.
            extras: whatever else the batch says; `task` (B,) where the graft has several.
            kwargs: handed on to the model, such as `token_type_ids`.

        Raises:
            GraftError: no graft has heads, or two have.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": None}
        call, hidden = self._last_hidden({"extras": dict(extras or {})}, inputs | kwargs)
        return self._only([graft.predict(call, hidden) for graft in self._each()])

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        extras: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B, T, d): the last hidden states, of which heads are; arguments as those of `predict`."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": None}
        return self._last_hidden({"extras": dict(extras or {})}, inputs | kwargs)[1]

    def _last_hidden(self, said: dict[str, Any], inputs: dict[str, Any]) -> tuple[Call, Tensor]:
        """One pass without the language-model head: its call, and (B, T, d)."""
        mask = inputs.get("attention_mask")
        if inputs["position_ids"] is None and mask is not None:
            inputs["position_ids"] = self.backbone.sites.positions(mask)
        with self._wiring.announce(**said) as calls:
            output = self.model.base_model(**{name: value for name, value in inputs.items() if value is not None})
        return calls[0], output[0]

    def _only(self, found: list[_Found | None]) -> _Found:
        """What the one graft with heads gave."""
        given = [one for one in found if one is not None]
        if len(given) != 1:
            carrying = ", ".join(self.grafts) or "none"
            raise GraftError(
                f"{len(given) or 'None'} of the attached grafts ({carrying}) {'have' if given else 'has'} heads to "
                "predict with, but one is expected: attach one that was trained on tasks."
            )
        return given[0]

    def _auxiliary_loss(self, call: Call) -> Tensor | None:
        losses = [loss for graft in self._each() if (loss := graft.auxiliary_loss(call)) is not None]
        return sum(losses[1:], losses[0]) if losses else None

    @torch.no_grad()
    def observe(self, **inputs: Any) -> dict[str, dict[str, Tensor]]:
        """Run one pass and return what each graft saw in it, by the graft's name."""
        said = {key: inputs.pop(key, None) for key in ("domain", "token_mask", "prompt")}
        with self._wiring.announce(**said, observing=True) as calls:
            self.model(**inputs)
        return {name: graft.observe(calls[0]) for name, graft in zip(self.grafts, self._each(), strict=True)}

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' own `generate` on the grafted model."""
        return self.model.generate(*args, **kwargs)  # type: ignore[operator]  # a mixin's method

    def traces(self, cache: Cache) -> dict[str, Trace]:
        """What the grafts did at each token of a generation, by the graft's name, from its cache."""
        found = {name: graft.trace(cache) for name, graft in zip(self.grafts, self._each(), strict=True)}
        return {name: trace for name, trace in found.items() if trace is not None}

    def traced(self, **inputs: Any) -> tuple[Any, dict[str, Trace]]:
        """The live model's output in one pass, and what the grafts did at each of its tokens, by the graft's name."""
        with self._wiring.announce() as calls:
            output = self.model(**inputs)
        found = {name: graft.traced(calls[0]) for name, graft in zip(self.grafts, self._each(), strict=True)}
        return output, {name: trace for name, trace in found.items() if trace is not None}

    def train(self, mode: bool = True) -> Self:
        """Set the grafts' mode; a frozen backbone stays in evaluation mode, without dropout."""
        super().train(mode)
        self.backbone.model.eval()
        for graft in self._attached:
            for module in graft.still():
                module.eval()
        for module in self.model.modules():
            # transformers checkpoints layers in training mode only; a layer's own flag does not wake its dropout.
            if getattr(module, "gradient_checkpointing", False):
                module.training = mode
        return self

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The grafts' parameters by their name in this module."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in the backward pass instead of keeping its activations."""
        self.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": self._wiring.checkpoint_contexts}
        )
        self.model.disable_input_require_grads()  # transformers' hook on the embedding, for reentrant checkpoints alone
        self._checkpoints_layers = True
        self.train(self.training)

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def detach(self) -> Backbone:
        """Take every tap off and give the backbone back as it was; once detached, nothing more happens."""
        if not self._detached:
            self._detached = True
            self._wiring.remove()
            self._give_back()
            self._carrying.discard(self.backbone.model)
        return self.backbone

    def _give_back(self) -> None:
        for graft in reversed(self._attached):
            graft.detach(self.backbone.model)
        self._attached.clear()
        if self._checkpoints_layers:
            self.model.gradient_checkpointing_disable()
        for name, parameter in self.backbone.model.named_parameters():
            parameter.requires_grad_(self._flags.get(name, parameter.requires_grad))
        for module, mode in self._modes.items():
            module.training = mode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def language_modelling_loss(logits: Tensor, labels: Tensor, totals: Tensor | None = None) -> Tensor:
    """Log-perplexity in nats: the sum of -log p(label at t | text before t), over the number of targets.

    Args:
        logits: (B, T, V).
        labels: (B, T), aligned with the inputs; -100 is not predicted.
        totals: its first entry is the number of targets to divide by; None counts those of `labels`.
    """
    targets = labels[:, 1:].reshape(-1)
    predictions = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    nats = functional.cross_entropy(predictions, targets, ignore_index=-100, reduction="sum")
    count = (targets != -100).sum() if totals is None else totals[0]
    return nats / count.clamp(min=1)


@contextmanager
def grafted(backbone: Backbone, **grafts: Graft) -> Iterator[GraftedModel]:
    """Attach grafts for the length of a block."""
    if not grafts:
        raise GraftError("No graft was given: name at least one, as in grafted(backbone, danish=graft).")
    model = GraftedModel(backbone, grafts)
    try:
        yield model
    finally:
        model.detach()
