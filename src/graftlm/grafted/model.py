"""`GraftedModel`: a backbone with grafts attached, as training, evaluation, generation and serving use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.utils import ModelOutput

from graftlm.backbone import (
    Backbone,
    Call,
    OutputLayer,
    Sites,
    Tap,
    TapHooks,
    TokenRows,
    TokenSelection,
    answer_end_ids,
    compiled_decoding,
    decodes_in_one_graph,
    need_backbone,
)
from graftlm.errors import BackboneError, GraftError, TapConflictError, WrongBackboneError
from graftlm.grafted.backbone_state import BackboneState
from graftlm.grafted.checkpointing import LayerCheckpoints
from graftlm.grafted.chunked_losses import DomainLosses, Predictions, loss_of_targets, predict_targets
from graftlm.grafted.losses import (
    NewObjective,
    Objectives,
    OldObjective,
    Targets,
    language_modelling_loss,
    loss_parts,
)
from graftlm.grafted.traces import cache_traces, forward_traces
from graftlm.grafted.trainer_support import TrainerSupport, is_frozen
from graftlm.grafts.base import Graft, HasHeads, ReplacesModel, Trace
from graftlm.grafts.sums import check_weight, weighted_taps


@dataclass
class GraftedOutput(ModelOutput):
    """The output of a `GraftedModel`: transformers' fields, and the parts of the loss.

    Attributes:
        loss: `lm_loss` + `auxiliary_loss`; only this sum has gradients.
        logits: (B, T, V); None in a pass with `return_logits=False`.
        lm_loss: the loss of the labels, or of the heads' targets.
        auxiliary_loss: the sum of the grafts' losses; None if no graft has one.
        past_key_values: the cache, if it was used.
        hidden_states: a tuple of (B, T, d), the embeddings and the output of each layer, if they were requested.
        attentions: a tuple of the attention weights of each layer, if they were requested.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    lm_loss: Tensor | None = None
    auxiliary_loss: Tensor | None = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None


def _live_attribute(name: str, *default: object) -> Any:
    """Return a property that reads an attribute or a method of the live model."""

    def read(self: GraftedModel) -> Any:
        return getattr(self.model, name, *default)

    return property(read)


class GraftedModel(TrainerSupport):
    """A backbone with grafts attached, which trainers and other tools use as a transformers model.

    Its trainable parameters are those of the grafts. `model` is the live transformers model with the grafts' taps. It
    can generate and be read from, but a trainer needs the `GraftedModel`.

    Args:
        backbone: the backbone, which is frozen until `detach` restores its flags and mode. Its weights never change.
        grafts: grafts by name, built for this backbone; None for no grafts. They act in the order of the dict.
        old_objective: the loss of training rows of the old domain. `replay` predicts their tokens as in other rows;
            `distil` is the divergence KL(bare backbone || model) at each of their tokens, which needs a pass of the
            bare backbone.
        new_objective: the loss of other training rows. `cross-entropy` predicts their tokens; `dft` weights the loss of
            each token by its probability.
        anchor: weight of the divergence KL(bare backbone || model) at each token of other training rows, which is added
            to their loss and needs a pass of the bare backbone.
        weights: weights of grafts by name, by which what they add is multiplied; 1 for others.

    Attributes:
        backbone: the backbone.
        model: the live model, which may be a copy of the backbone's model.
        grafts: the grafts by name.
        weights: weights of the grafts that were given one, by name.
        compiles_decoding: whether `generate` compiles its steps; None does so on accelerators.

    Raises:
        TapConflictError: two grafts replace the same activation or can't change the model together, the backbone has
            other grafts or a PEFT adapter already, or not exactly one graft has the rows of its added tokens.
        TapError: a graft has a tap that the backbone does not support.
        GraftError: the grafts are not a dict of grafts, a name can't be that of a submodule, the objective is unknown,
            or a weight is 0, not finite, or of a kind of graft that takes none.
        BackboneError: the backbone is not a `Backbone`, or a graft that changes or copies it can't do so, for example
            because its weights are quantized.
        WrongBackboneError: a graft was built for another backbone, or for other added tokens than the backbone has.
    """

    config = _live_attribute("config")
    device = _live_attribute("device")
    dtype = _live_attribute("dtype")
    generation_config = _live_attribute("generation_config", None)
    get_input_embeddings = _live_attribute("get_input_embeddings")
    get_output_embeddings = _live_attribute("get_output_embeddings")
    can_generate = _live_attribute("can_generate")
    prepare_inputs_for_generation = _live_attribute("prepare_inputs_for_generation")
    _supports_logits_to_keep = _live_attribute("_supports_logits_to_keep")  # Assisted generation calls it.
    compiles_decoding: bool | None = None
    can_omit_logits: ClassVar[bool] = True
    """Whether `forward` takes `return_logits`, for the training loop, which needs only the loss."""
    _with_grafts: ClassVar[WeakSet[PreTrainedModel]] = WeakSet()

    def __init__(
        self,
        backbone: Backbone,
        grafts: Mapping[str, Graft] | None = None,
        *,
        old_objective: OldObjective = "replay",
        new_objective: NewObjective = "cross-entropy",
        anchor: float = 0.0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        nn.Module.__init__(self)  # PreTrainedModel.__init__ would change the backbone's config.
        grafts = {} if grafts is None else grafts
        _check_grafts(need_backbone(backbone), grafts)
        objectives = Objectives(old_objective, new_objective, anchor)
        for name, weight in (weights or {}).items():
            check_weight(name, grafts[name], weight)
        if backbone.model in self._with_grafts:
            raise TapConflictError(
                f"The backbone {backbone.name} is part of another GraftedModel, whose grafts would act below the new "
                "ones: detach that model first, or attach all grafts in one GraftedModel."
            )
        self._token_rows = _rows_of_added_tokens(backbone, grafts)
        if self._token_rows and objectives.anchor:
            raise GraftError(
                "anchor lets the bare backbone read new text, whose added tokens it lacks: set anchor to 0, or use "
                "backbone.without_tokens."
            )
        self.backbone = backbone
        self.name_or_path = backbone.name
        self.grafts = nn.ModuleDict(dict(grafts))
        self._by_name = dict(grafts)
        self._objectives = objectives
        self.weights = dict(weights or {})
        self._replacing: list[ReplacesModel] = []
        self._backbone_state = BackboneState(backbone.model)
        backbone.model.requires_grad_(False).eval()
        self.model = backbone.model
        try:
            self._attach()
        except BaseException:
            self._restore_backbone()
            raise
        self._with_grafts.add(backbone.model)
        self._detached = False

    @property
    def decodes_in_one_graph(self) -> bool:
        """Whether a decode step can be compiled as one graph, as the live model and all grafts can."""
        return decodes_in_one_graph(self.model) and all(graft.decodes_in_one_graph for graft in self._by_name.values())

    @property
    def max_static_columns(self) -> int | None:
        """The largest number of columns of a static cache with which a decode step is one graph; None for any."""
        limits = [graft.max_static_columns for graft in self._by_name.values()]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def has_decode_state(self) -> bool:
        """Whether the live model or a graft reads its own tensors from the decode step before."""
        of_model: bool = getattr(self.model, "has_decode_state", False)
        return of_model or any(graft.has_decode_state for graft in self._by_name.values())

    @property
    def body(self) -> nn.Module:
        """The live model below its output layer, with the grafts' taps."""
        return self.model.base_model

    @property
    def reads_bare_model(self) -> bool:
        """Whether training also runs the bare backbone, which can't be sharded together with this model."""
        return self._objectives.reads_bare_model

    def _attach(self) -> None:
        """Put the grafts' modules and taps into place."""
        replacing = [graft for graft in self._by_name.values() if isinstance(graft, ReplacesModel)]
        if self._objectives.reads_bare_model or replacing:
            # The bare model is made before a graft replaces modules. Its next reader gets the error.
            with suppress(BackboneError):
                _ = self.backbone.bare_model
        for graft in replacing:
            self._replace_model(graft)
        taps = self._all_taps()
        sites = self._replacing[-1].sites(self.model) if self._replacing else Sites(self.model)
        self._tap_hooks = TapHooks(self.model, sites, taps, self._prepare)
        self._checkpoints = LayerCheckpoints(self._tap_hooks.checkpoint_contexts)
        self._output_layer = None
        if not self._tap_hooks.acts_after_body:
            rows = [parameter for rows in self._token_rows for parameter in rows.after_body]
            self._output_layer = OutputLayer.of(self.model, sites, rows)
        if taps:
            self._tap_hooks.mark_prompts()

    def _all_taps(self) -> dict[str, list[Tap]]:
        """Return the taps by owner. The other grafts see embeddings with those of added tokens, and old logits."""
        taps = {name: self._taps(name, graft) for name, graft in self._by_name.items()}
        for rows in self._token_rows:
            taps = {"embeddings.added": rows.input_taps(), **taps, "logits.added": rows.output_taps()}
        return taps

    def _taps(self, name: str, graft: Graft) -> list[Tap]:
        """Return the taps of a graft with its weight."""
        weight = self.weights.get(name, 1.0)
        return graft.taps() if weight == 1 else weighted_taps(graft, lambda _: weight)

    def _replace_model(self, graft: ReplacesModel) -> None:
        """Let a graft replace or change the live model."""
        names = ", ".join(self._by_name)
        if self._replacing:
            layers = self._replacing[-1].sites(self.model).layers
            if layers is not Sites(self.model).layers:
                raise TapConflictError(
                    f"Of the grafts {names}, one adds layers to the backbone, which changes the layer numbers by which "
                    "another finds the modules that it changes: attach only one of the two."
                )
        below = self.model
        self.model = graft.attach(below)
        self._replacing.append(graft)
        is_copy = self.model is not below
        if is_copy and below is not self.backbone.model:
            raise TapConflictError(
                f"Two of the grafts {names} each replace the model by a copy, but only one copy can run: attach only "
                "one of the two."
            )

    def detach(self) -> Backbone:
        """Remove all taps, and return the unchanged backbone. A second call does nothing."""
        if not self._detached:
            self._detached = True
            self._tap_hooks.remove()
            self._checkpoints.disable(self.model)
            self._restore_backbone()
            self._with_grafts.discard(self.backbone.model)
        return self.backbone

    def _restore_backbone(self) -> None:
        for graft in reversed(self._replacing):
            graft.detach(self.backbone.model)
        self._replacing.clear()
        self._backbone_state.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def train(self, mode: bool = True) -> Self:
        """Set the grafts' mode. The frozen backbone stays in evaluation mode, without dropout.

        Args:
            mode: True for training mode, False for evaluation mode.

        Returns:
            This model.

        Raises:
            GraftError: PEFT has put an adapter into the backbone, or the backbone has gradient checkpoints other than
                those of `enable_gradient_checkpointing`.
        """
        self._check_trainable(mode)
        super().train(mode)
        self.backbone.model.eval()
        for graft in self._replacing:
            for module in graft.eval_only_modules():
                module.eval()
        self._set_modes_inside_backbone(mode)
        return self

    def _prepare(self, call: Call) -> None:
        """Check a pass, and prepare the grafts for it."""
        if torch.is_grad_enabled():
            self._check_backbone_mode()
        self._check_documents(call)
        self._tap_hooks.check_cache(call)
        call.training = self.training and torch.is_grad_enabled()
        for graft in self._by_name.values():
            graft.prepare(call)

    def forward(  # noqa: PLR0913  # the fields of a batch, which trainers pass by name
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        domain: Tensor | None = None,
        token_mask: Tensor | None = None,
        totals: Tensor | None = None,
        prompt: Tensor | None = None,
        extras: Mapping[str, object] | None = None,
        targets: Sequence[Tensor] | None = None,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool = True,
        **kwargs: Any,
    ) -> GraftedOutput:
        """Run one forward pass.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, T), 1 for real tokens.
            position_ids: (B, T). Without a mask, positions that restart inside a row begin a new document, and
                attention stays inside each document.
            labels: (B, T) aligned with `input_ids`, -100 for tokens that are not predicted. They are shifted here.
            domain: (B,) domain of each row, 0 for old and 1 for new.
            token_mask: (B, T), True for tokens that are not padding, if there is no `attention_mask`.
            totals: (1 + domains,) counts over the whole optimizer step, see `Call`; None takes those of this pass.
            prompt: (B, T), True for the tokens of the prompt.
            extras: other inputs of grafts, by name.
            targets: the target of each row for the heads of a graft. The output layer does not run then, `labels` are
                ignored, and `lm_loss` is the loss of the heads.
            num_items_in_batch: number of targets of the whole optimizer step, which trainers pass instead of `totals`.
            return_logits: False omits the logits from the output. With `labels`, the output layer then runs only for
                the tokens before targets, a few of them at a time, and the gradients of the loss can be taken once.
            kwargs: passed to the model. By default, `use_cache` is true only if the caller passes a cache, because
                transformers ignores where documents begin if it makes a new cache. With `return_dict=False` a tuple is
                returned.

        Returns:
            The losses and the model's outputs. If `num_items_in_batch` is given, the parts of the loss are None,
            because trainers take all other fields for predictions.

        Raises:
            GraftError: targets without exactly one graft with heads, a pass in training mode that would lose an
                auxiliary loss or, with objectives that depend on it, has no `domain`, a row of several documents that
                the backbone can't keep separate, or inputs that a graft does not accept.
            TapError: the cache contains tokens that were read without these grafts.
            BackboneError: with `distil` or an anchor, the bare backbone can't run without the hooks of another library.
        """
        call_values = {"domain": domain, "token_mask": token_mask, "totals": totals, "prompt": prompt}
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        self._check_documents(Call(**inputs, cache=kwargs.get("past_key_values")))
        as_tuple = kwargs.pop("return_dict", None) is False
        if targets is not None:
            grafted = self._forward_heads(targets, extras, call_values, {**inputs, **kwargs})
        else:
            self._set_cache(kwargs)
            given = {**inputs, **kwargs}
            values = {**call_values, "extras": dict(extras or {})}
            predictions = None
            if labels is None or return_logits:
                output, calls = self._run(None, given, values)
            else:
                output, calls, predictions = self._predict_targets(Targets(labels), given, values)
            grafted = GraftedOutput(
                **self._losses(calls, output, labels, {**inputs, **call_values}, predictions, num_items_in_batch),
                logits=output.get("logits") if return_logits else None,
                past_key_values=output.get("past_key_values"),
                hidden_states=output.get("hidden_states"),
                attentions=output.get("attentions"),
            )
        return grafted.to_tuple() if as_tuple else grafted  # type: ignore[return-value]  # as transformers' models

    def logits_at(self, is_selected: Tensor, prompt: Tensor | None = None, **inputs: object) -> Tensor:
        """Return the logits (N, V) of some tokens of one pass, row by row, without those of other tokens.

        Args:
            is_selected: bool (B, T), True for the tokens whose logits are returned.
            prompt: (B, T), True for the tokens of the prompt.
            inputs: inputs of the model, such as `input_ids` and `attention_mask`.

        Raises:
            TapError: the cache contains tokens that were read without these grafts.
            GraftError: a row has several documents that the backbone can't keep separate, or a graft does not accept
                the inputs.
        """
        selection = TokenSelection(is_selected)
        self._set_cache(inputs)
        output, _ = self._run(selection, inputs, {"prompt": prompt})
        return selection.logits(output["logits"])

    def _run(
        self,
        selection: TokenSelection | None,
        inputs: Mapping[str, object],
        call_values: Mapping[str, object],
    ) -> tuple[ModelOutput, list[Call]]:
        """Run the live model, with logits of the selected tokens only; returns its output and its calls."""
        if selection is None or not self._tap_hooks.takes_selection:
            with self._tap_hooks.announce(**call_values) as calls:
                return self.model(**inputs), calls
        with self._tap_hooks.announce(**call_values, selection=selection) as calls, selection.before_head(self.model):
            return self.model(**inputs), calls

    def _predict_targets(
        self,
        targets: Targets,
        inputs: Mapping[str, object],
        call_values: Mapping[str, object],
    ) -> tuple[ModelOutput, list[Call], Predictions]:
        """Run the live model without the logits of other tokens.

        Returns:
            The output, the calls, and the predictions before the targets. These are hidden states, unless a graft acts
            after the body.
        """
        if self._output_layer is None:
            output, calls = self._run(targets, inputs, call_values)
            return output, calls, Predictions(targets.logits(output["logits"]))
        with self._tap_hooks.announce(**call_values) as calls:
            output, predictions = predict_targets(self.model, self._output_layer, targets, inputs)
        return output, calls, predictions

    def _forward_heads(
        self,
        targets: Sequence[Tensor],
        extras: Mapping[str, object] | None,
        call_values: Mapping[str, object],
        inputs: Mapping[str, object],
    ) -> GraftedOutput:
        """Run one forward pass without the output layer, and compute the loss of the heads."""
        heads = self._graft_with_heads()
        call, hidden = self._last_hidden(extras, call_values, **inputs)
        loss = heads.target_loss(call, hidden, targets)
        return GraftedOutput(**loss_parts(loss, self._auxiliary_loss(call)))

    def _set_cache(self, options: dict[str, object]) -> None:
        """Set `use_cache`, and make a new cache here rather than in the model, so that grafts receive it."""
        cache = options.get("past_key_values")
        options.setdefault("use_cache", cache is not None)
        if options["use_cache"] and cache is None:
            options["past_key_values"] = DynamicCache(config=self.config)

    def _losses(
        self,
        calls: Sequence[Call],
        output: ModelOutput,
        labels: Tensor | None,
        batch: Mapping[str, Tensor | None],
        predictions: Predictions | None,
        num_items_in_batch: Tensor | int | None,
    ) -> dict[str, Tensor | None]:
        """Return the losses of a pass by their names in `GraftedOutput`; without labels there are none.

        Args:
            calls: the calls of the pass.
            output: the output of the pass.
            labels: (B, T)
            batch: the inputs of the pass, with `domain` and `totals`.
            predictions: what was predicted before the targets; None if the output has the logits of all tokens.
            num_items_in_batch: see `forward`.
        """
        auxiliary_loss = None
        if labels is not None and calls:
            auxiliary_loss = self._auxiliary_loss(calls[0])
        domain, totals = batch["domain"], batch["totals"]
        if num_items_in_batch is not None and totals is None:
            self._check_trainer_batch(labels, domain, auxiliary_loss, num_items_in_batch)
            totals = torch.as_tensor(num_items_in_batch, device=self.model.device).reshape(1)
        if labels is None:
            return {}
        by_domain = self._objectives.depends_on_domain and self.training
        if by_domain and domain is None:
            self._refuse_auxiliary_loss("the batches have no `domain`")
        if predictions is None and not by_domain:
            lm_loss = language_modelling_loss(output["logits"], labels, totals)
        else:
            targets = Targets(labels)
            predictions = predictions or Predictions(targets.take(output["logits"]))
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
            losses_of_rows = None
            if by_domain and domain is not None:
                losses_of_rows = DomainLosses(self._objectives, self.backbone, inputs, domain)
            lm_loss = loss_of_targets(predictions, targets, totals, losses_of_rows)
        losses = loss_parts(lm_loss, auxiliary_loss)
        if num_items_in_batch is not None:  # A trainer uses all other fields as predictions.
            losses = {"loss": losses["loss"]}
        return losses

    def _auxiliary_loss(self, call: Call) -> Tensor | None:
        """Return the sum of the auxiliary losses of the grafts that train; None without one."""
        total = None
        for graft in self._by_name.values():
            loss = None if is_frozen(graft) else graft.auxiliary_loss(call)
            if loss is not None:
                total = loss if total is None else total + loss
        return total

    def _keep_documents(self, inputs: dict[str, object]) -> None:
        """Make no new cache for several documents in a row: with a new one, transformers ignores where they begin."""
        if inputs.get("position_ids") is not None and self.backbone.sites.family.causal:
            inputs.setdefault("use_cache", inputs.get("past_key_values") is not None)

    def _check_documents(self, call: Call) -> None:
        """Raise `GraftError` for several documents in a row that the backbone can't keep separate."""
        if self.backbone.sites.family.separates_documents:
            return
        if call.document_numbers() is not None:
            raise GraftError(
                f"A row contains several documents, which a {self.config.model_type} model can't keep separate: set "
                "data.boundaries to joined, or give each document a row."
            )

    def predict(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        extras: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> list[Tensor]:
        """Predict each row with the heads of a graft. Gradients are recorded, and the mode stays as it is.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, T), 1 for real tokens; padding may be on either side. None when all tokens are real.
            extras: other inputs of grafts, by name: `task` (B,), the index of each sequence's task, if the graft has
                several tasks; `parts` and `marks` of `grafts.heads` for rows of several sequences and marked rows.
            kwargs: passed to the model, such as `token_type_ids`.

        Returns:
            A prediction per row. `grafts.heads` lists the shapes of each type of task.

        Raises:
            GraftError: the number of attached grafts with heads is not one, or rows have a wrong task or none.
        """
        heads = self._graft_with_heads()
        call, hidden = self._last_hidden(extras, input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        return heads.predict(call, hidden)

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        extras: Mapping[str, object] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Compute the last hidden states, which heads read. Gradients are recorded.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, T), 1 for real tokens; padding may be on either side. None when all tokens are real.
            extras: other inputs of grafts, by name.
            kwargs: passed to the model, such as `token_type_ids`.

        Returns:
            (B, T, d)
        """
        _, hidden = self._last_hidden(extras, input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        return hidden

    def _last_hidden(
        self,
        extras: Mapping[str, object] | None,
        call_values: Mapping[str, object] | None = None,
        **inputs: Any,
    ) -> tuple[Call, Tensor]:
        """Run one pass without the output layer, and return its call and the last hidden states (B, T, d)."""
        mask = inputs.get("attention_mask")
        if inputs.get("position_ids") is None and mask is not None:
            inputs["position_ids"] = self.backbone.sites.positions(mask)
        self._keep_documents(inputs)
        given = {name: value for name, value in inputs.items() if value is not None}
        with self._tap_hooks.announce(**(call_values or {}), extras=dict(extras or {})) as calls:
            output = self.model.base_model(**given)
        return calls[0], output[0]

    def _graft_with_heads(self) -> HasHeads:
        """Return the only graft with heads; raise `GraftError` unless there is exactly one."""
        grafts = [graft for graft in self._by_name.values() if isinstance(graft, HasHeads)]
        if len(grafts) != 1:
            names = ", ".join(self.grafts) or "none"
            raise GraftError(
                f"The number of attached grafts that have heads is {len(grafts)}, but exactly one is expected "
                f"(attached: {names}): attach one that was trained on tasks."
            )
        return grafts[0]

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Generate with transformers' own `generate` of `model`. Grafts see which tokens are the prompt.

        On an accelerator the step of each token is compiled, see `compiled_decoding`, and a returned cache has a fixed
        number of columns; `disable_compile=True` or a cache of the caller prevents it. If the tokenizer has a chat
        template, a text also ends with the tokens that end an answer; see `answer_end_ids`.

        Args:
            inputs: (B, T) token ids of the prompts; padding is on the left.
            args: further arguments of transformers' `generate`.
            kwargs: further arguments of transformers' `generate`. An `eos_token_id` or a `generation_config` replaces
                the tokens that end a text.

        Returns:
            The result of transformers' `generate`.
        """
        tokenizer = self.backbone.tokenizer
        has_ends = bool(args) or not {"eos_token_id", "generation_config"}.isdisjoint(kwargs)
        if not has_ends and tokenizer is not None and tokenizer.chat_template:
            kwargs["eos_token_id"] = sorted(answer_end_ids(self.model, tokenizer)) or None
        if not args:  # A generation config may be among them.
            ids = kwargs.get("input_ids") if inputs is None else inputs
            prompt_tokens = ids.shape[1] if isinstance(ids, Tensor) and ids.dim() == 2 else None
            kwargs |= compiled_decoding(self, kwargs, prompt_tokens=prompt_tokens)
        return self.model.generate(inputs, *args, **kwargs)  # type: ignore[operator]  # a mix-in's method

    @torch.no_grad()
    def observe(self, **inputs: object) -> dict[str, dict[str, Tensor]]:
        """Run one pass, and return the statistics of `Graft.observe`.

        No logits are computed unless a graft acts on the output layer: with a large vocabulary they need gigabytes.

        Args:
            inputs: inputs of the body of the model, and `domain`, `token_mask` and `prompt` as in `forward`.

        Returns:
            The statistics of each graft, by its name.
        """
        call_values = {key: inputs.pop(key, None) for key in ("domain", "token_mask", "prompt")}
        self._keep_documents(inputs)
        model = self.model if self._tap_hooks.acts_after_body else self.model.base_model
        with self._tap_hooks.announce(**call_values, observing=True) as calls:
            model(**inputs)
        return {name: graft.observe(calls[0]) for name, graft in self._by_name.items()}

    def cache_traces(self, cache: Cache) -> dict[str, Trace]:
        """Return the grafts' traces of all tokens in a cache, by the graft's name.

        Grafts without a trace are omitted.

        Args:
            cache: the cache of a generation of this model.
        """
        return cache_traces(self._by_name, cache)

    def forward_traces(self, **inputs: object) -> tuple[Any, dict[str, Trace]]:
        """Run one pass, and return the model's output and the grafts' traces of its tokens.

        Args:
            inputs: inputs of the model.

        Returns:
            The model's output, and the traces by the graft's name; grafts without a trace are omitted.
        """
        self._keep_documents(inputs)
        with self._tap_hooks.announce() as calls:
            output = self.model(**inputs)
        traces = forward_traces(self._by_name, calls[0]) if calls else {}
        return output, traces


def _check_grafts(backbone: Backbone, grafts: object) -> None:
    """Raise `GraftError` unless these are grafts by name, and `WrongBackboneError` for grafts of another backbone."""
    if not isinstance(grafts, Mapping):
        raise GraftError(
            f"The grafts are of type {type(grafts).__name__}, but a dict is expected: pass {{'name': graft}}, for "
            "example."
        )
    for name, graft in grafts.items():
        if not isinstance(graft, Graft):
            raise GraftError(
                f"The graft {name!r} is of type {type(graft).__name__}, but a Graft is expected: make one with "
                "build_graft or load_graft."
            )
        if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict, name):
            raise GraftError(
                f"A graft has the name {name!r}, but the name of a submodule is expected, which has no dots and is not "
                "an attribute of nn.ModuleDict: choose another name."
            )
        backbone.check_graft(name, graft._fingerprint)


def _rows_of_added_tokens(backbone: Backbone, grafts: Mapping[str, Graft]) -> tuple[TokenRows, ...]:
    """Return the rows of the backbone's added tokens, which exactly one graft must have; none without added tokens.

    The result is a tuple, because the rows are a submodule of their graft already.
    """
    owners = {name: graft.token_rows for name, graft in grafts.items() if graft.token_rows is not None}
    if backbone.extended is None and not owners:
        return ()
    if backbone.extended is None:
        raise WrongBackboneError(
            f"The graft {min(owners)} has rows of added tokens, which the backbone {backbone.name} lacks: attach it to "
            "the backbone for which it was built (Backbone.with_tokens), or to that of backbone_of(FOLDER)."
        )
    if len(owners) != 1:
        found = " and ".join(owners) or "no attached graft"
        raise TapConflictError(
            f"The backbone {backbone.name} has added tokens, whose rows {found} has, but exactly one graft must have "
            "them: attach one graft that was built for this backbone, or use backbone.without_tokens."
        )
    ((name, rows),) = owners.items()
    if rows.extended.added != backbone.extended.added:
        raise WrongBackboneError(
            f"The graft {name} has rows of other added tokens than the backbone {backbone.name} has: attach it to the "
            "backbone for which it was built, or to that of backbone_of(FOLDER)."
        )
    return (rows,)
