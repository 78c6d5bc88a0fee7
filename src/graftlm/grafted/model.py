"""`GraftedModel`, a backbone with its grafts attached: training, evaluation, generation and serving see it alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast, get_args
from weakref import WeakSet

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import ModelOutput

from graftlm.backbone import Backbone, Call, Sites, TapHooks, need_backbone
from graftlm.errors import BackboneError, GraftError, TapConflictError
from graftlm.grafts.base import Graft, HasHeads, ReplacesModel, Trace, Traceable
from graftlm.store.artifact import save_into

IGNORED, OLD_DOMAIN = -100, 0  # of labels, and of domains
OldObjective = Literal["replay", "distil"]
_CHECKPOINTING = {"use_reentrant": False, "every_n_layers": 1, "offload": False}.items()


@dataclass
class GraftedOutput(ModelOutput):
    """The output of a `GraftedModel`: transformers' fields, and the parts of the loss.

    `loss` = `lm_loss` + `auxiliary_loss`; both parts are detached.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    lm_loss: Tensor | None = None
    auxiliary_loss: Tensor | None = None
    past_key_values: Any = None
    hidden_states: Any = None
    attentions: Any = None


def _of_live_model(name: str, *default: Any) -> Any:
    """An attribute or a method that is the live model's."""
    return property(lambda self: getattr(self.model, name, *default))


class GraftedModel(PreTrainedModel):
    """A backbone with grafts attached; trainers and other tools take it as a transformers model.

    Its trainable parameters are those of the grafts. `model` is the live transformers model with the grafts' taps in
    place; it can be read from, but a trainer needs the `GraftedModel`.

    Args:
        backbone: the frozen backbone. `detach` restores its weights, flags and mode.
        grafts: grafts by name, built for this backbone.
        old_objective: the loss of rows of the old domain: `replay` predicts their tokens as in other rows; `distil` is
            the divergence KL(bare backbone || model) at each of their tokens, which costs a pass of the backbone.

    Raises TapConflictError if two grafts replace the same activation, or the backbone carries grafts already.
    """

    loss_type = "ForCausalLM"  # tells trainers that the loss shifts the labels
    config, device, dtype = (_of_live_model(name) for name in ("config", "device", "dtype"))
    generation_config: Any = _of_live_model("generation_config", None)
    get_input_embeddings, get_output_embeddings = map(_of_live_model, ("get_input_embeddings", "get_output_embeddings"))
    can_generate, prepare_inputs_for_generation = map(_of_live_model, ("can_generate", "prepare_inputs_for_generation"))
    _get_name = _of_live_model("_get_name")  # by which a trainer with label smoothing shifts the labels
    _supports_logits_to_keep = _of_live_model("_supports_logits_to_keep")  # what an assistant model is asked
    _with_grafts: ClassVar[WeakSet[PreTrainedModel]] = WeakSet()

    def __init__(
        self, backbone: Backbone, grafts: Mapping[str, Graft] | None = None, *, old_objective: OldObjective = "replay"
    ) -> None:
        nn.Module.__init__(self)  # that of PreTrainedModel would change the backbone's config
        _check_grafts(need_backbone(backbone), {} if grafts is None else grafts)
        self.backbone, self.name_or_path = backbone, backbone.name
        if backbone.model in self._with_grafts:
            raise TapConflictError(
                f"The backbone {backbone.name} carries grafts already, and more would act on top of them unseen: "
                "detach those first, or attach all of them in one GraftedModel."
            )
        self._flags = {name: p.requires_grad for name, p in backbone.model.named_parameters()}
        self._modes = {module: module.training for module in backbone.model.modules()}
        configs = filter(None, (backbone.model.config, getattr(backbone.model, "generation_config", None)))
        self._settings = [(config, dict(vars(config))) for config in configs]
        backbone.model.requires_grad_(False).eval()
        self.grafts = nn.ModuleDict(dict(grafts or {}))
        self._by_name: dict[str, Graft] = dict(grafts or {})
        self._replacing: list[ReplacesModel] = []
        if old_objective not in get_args(OldObjective):
            raise GraftError(f"There is no objective {old_objective!r} of old rows: give replay or distil.")
        self._distils = old_objective == "distil"
        if self._distils or any(isinstance(graft, ReplacesModel) for graft in self._by_name.values()):
            with suppress(BackboneError):  # made before a graft replaces modules; its next reader gets the error
                _ = backbone.bare_model
        self._checkpoint_functions: list[Any] = []
        try:
            self.model: PreTrainedModel = backbone.model
            for graft in self._by_name.values():
                if isinstance(graft, ReplacesModel):
                    if self._replacing and self._replacing[-1].sites(self.model).layers is not Sites(self.model).layers:
                        raise TapConflictError(
                            f"Of the grafts {', '.join(self._by_name)}, one adds layers to the backbone, and another "
                            "changes its modules, which then have other numbers: attach one of them."
                        )
                    self.model, below = graft.attach(self.model), self.model
                    self._replacing.append(graft)
                    if self.model is not below is not backbone.model:
                        raise TapConflictError(
                            f"Two of the grafts {', '.join(self._by_name)} train a copy of the backbone each, and only "
                            "one can run: attach one of them."
                        )
            taps = {name: graft.taps() for name, graft in self._by_name.items()}
            sites = self._replacing[-1].sites(self.model) if self._replacing else Sites(self.model)
            self._tap_hooks = TapHooks(self.model, sites, taps, self._prepare)
            if taps:
                self._tap_hooks.mark_prompts()
        except BaseException:
            self._restore_backbone()
            raise
        self._with_grafts.add(backbone.model)
        self._detached = False

    def _prepare(self, call: Call) -> None:
        if torch.is_grad_enabled() and any(  # but what `train` sets: modules with checkpoints, and the embedding
            m.training and not getattr(m, "gradient_checkpointing", False) and m is not self.get_input_embeddings()
            for m in (self.backbone.model, *self.backbone.model.children())
        ):
            raise GraftError(
                "GraftedModel.model was put into training mode, in which the frozen backbone would drop activations "
                "and no auxiliary loss is added: give the trainer the GraftedModel itself."
            )
        self._check_documents(call)
        self._tap_hooks.check_cache(call)
        call.training = self.training and torch.is_grad_enabled()
        for graft in self._by_name.values():
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
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> GraftedOutput:
        """One forward pass.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, T), 1 for real tokens.
            position_ids: (B, T). Without a mask, positions that restart inside a row begin a new document, and
                attention stays inside each document.
            labels: (B, T) aligned with `input_ids`, -100 for tokens that are not predicted; the shift happens here.
            domain: (B,) domain marks, 0 old and 1 new.
            token_mask: (B, T) True for tokens that are not padding, where no `attention_mask` is given.
            totals: (1 + domains,) counts over the whole optimiser step, see `Call`; None takes those of this pass.
            prompt: (B, T) True for the tokens of the prompt.
            extras: other inputs of grafts, by name.
            targets: one for each row, for the heads of a graft. The language-model head does not run, and `lm_loss` is
                the loss of the heads.
            num_items_in_batch: the number of targets of the whole optimiser step, which trainers give for `totals`.
            kwargs: passed to the model. `use_cache` defaults to whether the caller gives a cache, since with a new
                cache transformers ignores where documents begin.

        Raises:
            GraftError: targets without one graft with heads, a trainer's pass that would lose an auxiliary loss, or a
                row of several documents that the backbone can't keep apart.
        """
        call_values = {"domain": domain, "token_mask": token_mask, "totals": totals, "prompt": prompt}
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        call = Call(input_ids, attention_mask, position_ids, kwargs.get("past_key_values"))
        self._check_documents(call)
        if targets is not None:
            heads = self._graft_with_heads()
            call, hidden = self._last_hidden(extras, call_values, **inputs, **kwargs)
            return GraftedOutput(**_loss_parts(heads.target_loss(call, hidden, targets), self._auxiliary_loss(call)))
        kwargs.setdefault("use_cache", kwargs.get("past_key_values") is not None)
        if kwargs["use_cache"] and kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = DynamicCache(config=self.config)  # made here, so that grafts see it
        as_tuple = kwargs.pop("return_dict", None) is False
        with self._tap_hooks.announce(**call_values, extras=dict(extras or {})) as calls:
            output = self.model(**inputs, **kwargs)
        auxiliary_loss = self._auxiliary_loss(calls[0]) if labels is not None and calls else None
        if num_items_in_batch is not None and totals is None:
            if domain is None and auxiliary_loss is None:
                self._refuse_trainer("the batches have no `domain`")
            elif labels is None:
                self._refuse_trainer("this trainer has a loss of its own")
            elif auxiliary_loss is not None and bool((labels[:, 1:] != IGNORED).sum() != num_items_in_batch):
                self._refuse_trainer("this trainer does not count the domains' tokens over accumulated batches")
            totals = torch.as_tensor(num_items_in_batch, device=output.logits.device).reshape(1)
        lm_loss = None if labels is None else self._lm_loss(output.logits, labels, inputs, domain, totals)
        fields = ("logits", "past_key_values", "hidden_states", "attentions")
        losses = _loss_parts(lm_loss, auxiliary_loss)
        if num_items_in_batch is not None:  # a trainer takes all but the loss for predictions
            losses = {"loss": losses["loss"]}
        grafted = GraftedOutput(**losses, **{name: output.get(name) for name in fields})
        return grafted.to_tuple() if as_tuple else grafted  # type: ignore[return-value]  # as transformers' models

    def _lm_loss(
        self, logits: Tensor, labels: Tensor, inputs: dict[str, Any], domain: Tensor | None, totals: Tensor | None
    ) -> Tensor:
        """The loss of all targets; where the model distils, old rows follow the backbone's distributions instead."""
        if not self._distils or not self.training:
            return language_modelling_loss(logits, labels, totals)
        if domain is None:
            self._refuse_trainer("the batches have no `domain`")
        assert domain is not None, "refused"
        totals = (labels[:, 1:] != IGNORED).sum()[None] if totals is None else totals
        old = (domain == OLD_DOMAIN).nonzero().squeeze(-1)
        new_labels = labels.index_fill(0, old, IGNORED)
        loss = language_modelling_loss(logits, new_labels, totals)
        if len(old):
            rows = {name: None if value is None else value[old] for name, value in inputs.items()}
            with torch.no_grad():
                taught = self.backbone.bare_model(**rows, use_cache=False).logits
            loss = loss + distillation_loss(logits[old], taught, labels[old], totals)
        return loss

    def _keep_documents(self, inputs: dict[str, Any]) -> None:
        """Make no new cache for several documents in a row: with one, transformers ignores where they begin."""
        if inputs.get("position_ids") is not None and self.backbone.sites.family.causal:
            inputs.setdefault("use_cache", inputs.get("past_key_values") is not None)

    def _check_documents(self, call: Call) -> None:
        if not self.backbone.sites.family.separates_documents and call.document_numbers() is not None:
            raise GraftError(
                f"A row holds several documents, which a {self.config.model_type} model can't keep apart: set "
                "data.boundaries to joined, or give each document a row."
            )

    def _refuse_trainer(self, problem: str) -> None:
        """Raise `GraftError` if old rows have a loss of their own in training: of a graft, or as the model distils."""
        losses = [
            f"The graft {name} has an auxiliary loss"
            for name, graft in self._by_name.items()
            if graft.config.has_auxiliary_loss and not _is_frozen(graft)
        ]
        losses += ["The model distils old rows"] if self._distils else []
        if losses and self.training:
            raise GraftError(
                f"{losses[0]}, but {problem}: give every row a column `domain`, 0 for old text and 1 for new, and put "
                "graftlm.training.trainers.DomainTrainer before the trainer's class; or do without that loss."
            )

    def predict(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        extras: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Tensor]:
        """The prediction of each row by the heads of a graft, see `grafts.heads`; gradients are kept.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, T), 1 for real tokens; padding may be on either side.
            extras: other inputs of grafts, by name: `task` (B,) where the graft has several tasks.
            kwargs: passed to the model, such as `token_type_ids`.

        Raises GraftError if the number of grafts with heads is not one.
        """
        heads = self._graft_with_heads()
        call, hidden = self._last_hidden(extras, input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        return heads.predict(call, hidden)

    def encode(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        extras: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """(B, T, d): the last hidden states, which heads read; arguments as those of `predict`."""
        return self._last_hidden(extras, input_ids=input_ids, attention_mask=attention_mask, **kwargs)[1]

    def _last_hidden(
        self, extras: Mapping[str, Any] | None, call_values: Mapping[str, Any] | None = None, **inputs: Any
    ) -> tuple[Call, Tensor]:
        """One pass without the language-model head: its call, and (B, T, d)."""
        mask = inputs.get("attention_mask")
        if inputs.get("position_ids") is None and mask is not None:
            inputs["position_ids"] = self.backbone.sites.positions(mask)
        self._keep_documents(inputs)
        with self._tap_hooks.announce(**(call_values or {}), extras=dict(extras or {})) as calls:
            output = self.model.base_model(**{name: value for name, value in inputs.items() if value is not None})
        return calls[0], output[0]

    def _graft_with_heads(self) -> HasHeads:
        grafts = [graft for graft in self._by_name.values() if isinstance(graft, HasHeads)]
        if len(grafts) != 1:
            names = ", ".join(self.grafts) or "none"
            raise GraftError(
                f"{len(grafts) or 'None'} of the attached grafts ({names}) {'have' if grafts else 'has'} heads to "
                "predict with, but one is expected: attach one that was trained on tasks."
            )
        return grafts[0]

    def _auxiliary_loss(self, call: Call) -> Tensor | None:
        learning = [graft for graft in self._by_name.values() if not _is_frozen(graft)]
        losses = [loss for graft in learning if (loss := graft.auxiliary_loss(call)) is not None]
        return sum(losses[1:], losses[0]) if losses else None

    @torch.no_grad()
    def observe(self, **inputs: Any) -> dict[str, dict[str, Tensor]]:
        """The statistics of one pass by the graft's name, see `Graft.observe`."""
        call_values = {key: inputs.pop(key, None) for key in ("domain", "token_mask", "prompt")}
        self._keep_documents(inputs)
        with self._tap_hooks.announce(**call_values, observing=True) as calls:
            self.model(**inputs)
        return {name: graft.observe(calls[0]) for name, graft in self._by_name.items()}

    def generate(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """transformers' own `generate`, as `model.generate`; grafts know which tokens are the prompt."""
        return self.model.generate(inputs, *args, **kwargs)  # type: ignore[operator]  # a mixin's method

    def cache_traces(self, cache: Cache) -> dict[str, Trace]:
        """What each graft did at each token of the generation that `cache` belongs to, by the graft's name."""
        return _collect_traces(self._by_name, lambda graft: graft.cache_trace(cache))

    def forward_traces(self, **inputs: Any) -> tuple[Any, dict[str, Trace]]:
        """The model's output of one pass, and what each graft did at each of its tokens, by the graft's name."""
        self._keep_documents(inputs)
        with self._tap_hooks.announce() as calls:
            output = self.model(**inputs)
        return output, forward_traces(self._by_name, calls[0]) if calls else {}

    def train(self, mode: bool = True) -> Self:
        """Set the grafts' mode; the frozen backbone stays in evaluation mode, without dropout."""
        flagged = [module for module in self.model.modules() if getattr(module, "gradient_checkpointing", False)]
        if mode and any(m._gradient_checkpointing_func not in self._checkpoint_functions for m in flagged):
            raise GraftError(
                "The backbone's layers have gradient checkpoints that taps can't follow: call its "
                "gradient_checkpointing_disable(), and GraftedModel.enable_gradient_checkpointing()."
            )
        if "peft_config" in vars(self):
            raise GraftError(
                "PEFT put an adapter into the frozen backbone below the grafts: load the backbone again, and train "
                "the GraftedModel without peft_config, or the backbone without GraftedModel."
            )
        super().train(mode)
        self.backbone.model.eval()
        for module in (module for graft in self._replacing for module in graft.eval_only_modules()):
            module.eval()
        for module in flagged:
            # transformers checkpoints layers in training mode only. The flag of a layer does not turn on its dropout.
            module.training = mode
        embedding: Any = self.get_input_embeddings()
        if hasattr(embedding, "neftune_noise_alpha"):  # a trainer's noise acts in training mode only
            embedding.training = mode
        return self

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that train, by their name in this module."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device. `GraftError` for a dtype: the backbone's weights would change, and stay so."""
        # As nn.Module.to reads its arguments.
        if torch._C._nn._parse_to(*args, **kwargs)[1] is not None:  # type: ignore[attr-defined]  # no stub
            raise GraftError(
                "A GraftedModel keeps its dtypes, as a cast would change the backbone: load the backbone in the dtype "
                "that you want, or compute under autocast (in a trainer bf16 or fp16, not bf16_full_eval)."
            )
        return super().to(*args, **kwargs)

    def half(self, *_: Any) -> Self:
        return self.to(torch.float16)

    float = double = bfloat16 = half  # `to` refuses every cast

    def add_adapter(self, *_: Any, **__: Any) -> None:
        """Always `GraftError`: a graft is the adapter."""
        raise GraftError("A GraftedModel takes no PEFT adapter below its grafts: attach it as a graft instead.")

    load_adapter: Any = add_adapter

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise GraftError(
            "A GraftedModel can't be copied, as its taps act on its own backbone: load the backbone a second time, "
            "and attach a copy of the graft to that."
        )

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in the backward pass instead of keeping its activations."""
        mode = self.training
        self.train()
        layers = (module for module in self.model.modules() if isinstance(module, GradientCheckpointingLayer))
        frozen: list[Any] = [layer for layer in layers if not layer.training]
        self.model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": self._tap_hooks.checkpoint_contexts}
        )
        self.model.disable_input_require_grads()  # transformers' hook on the embedding, for reentrant checkpoints alone
        for layer in frozen:
            layer._gradient_checkpointing_func = _in_evaluation(layer, layer._gradient_checkpointing_func)
        flagged = (module for module in self.model.modules() if getattr(module, "gradient_checkpointing", False))
        self._checkpoint_functions = [cast("Any", module)._gradient_checkpointing_func for module in flagged]
        self.train(mode)

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Any = None, **options: Any) -> None:
        """What trainers call for `enable_gradient_checkpointing`; `GraftError` if they ask for another way."""
        if {**options, **(activation_checkpointing_kwargs or {})}.items() - _CHECKPOINTING:
            raise GraftError("Taps follow plain checkpoints of all layers: leave out use_reentrant and other options.")
        self.enable_gradient_checkpointing()

    def save_pretrained(self, save_directory: str | Path, is_main_process: bool = True, state_dict: Any = None) -> None:
        """Write the graft as an artefact, and `model.safetensors`, from which a trainer resumes; other files stay.

        Several grafts are written to folders of their names. `state_dict` is not used: the backbone is never written.
        """
        if not is_main_process:
            return
        (folder := Path(save_directory)).mkdir(parents=True, exist_ok=True)
        for name, graft in self._by_name.items():
            save_into(graft, self.backbone, folder if len(self._by_name) == 1 else folder / name)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self._own_tensors().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def _own_tensors(self) -> dict[str, Tensor]:
        """What trains, and the grafts' buffers, by name in this module."""
        return {**self.grafts.state_dict(prefix="grafts."), **self.trainable_parameters()}

    @property
    def _keys_to_ignore_on_save(self) -> set[str]:
        return set(self.state_dict()) - set(self._own_tensors())

    @property
    def base_model(self) -> nn.Module:
        """The model below its output layer, for trainers with a loss of their own; `GraftError` where that is wrong."""
        self._refuse_trainer("this trainer has a loss of its own")
        head = self.get_output_embeddings()
        if head is not None and (head._forward_hooks or head._forward_pre_hooks):
            raise GraftError("A graft acts on the output layer, which this trainer bypasses: use transformers.Trainer.")
        return self.model.base_model

    def tie_weights(self, *_: Any, **__: Any) -> None:
        """Do nothing: the backbone's tied weights stay tied."""

    def detach(self) -> Backbone:
        """Remove every tap and return the backbone as it was; a second call does nothing."""
        if not self._detached:
            self._detached = True
            self._tap_hooks.remove()
            self._restore_backbone()
            self._with_grafts.discard(self.backbone.model)
        return self.backbone

    def _restore_backbone(self) -> None:
        for graft in reversed(self._replacing):
            graft.detach(self.backbone.model)
        self._replacing.clear()
        if self._checkpoint_functions:
            self.model.gradient_checkpointing_disable()
            for module in self.model.modules():  # transformers leaves the function, which holds the grafts
                vars(module).pop("_gradient_checkpointing_func", None)
        for name, parameter in self.backbone.model.named_parameters():
            parameter.requires_grad_(self._flags.get(name, parameter.requires_grad))
        for module, mode in self._modes.items():
            module.training = mode
        for config, values in self._settings:  # trainers write to them
            vars(config).clear()
            vars(config).update(values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _is_frozen(graft: Graft) -> bool:
    """Whether a graft has weights and none trains: its loss would reach the grafts below it, and teach them."""
    parameters = list(graft.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _check_grafts(backbone: Backbone, grafts: Any) -> None:
    """Raise `GraftError` unless these are grafts by name, built for this backbone."""
    if not isinstance(grafts, Mapping):
        raise GraftError(f"Grafts are given as {type(grafts).__name__}: give a dict of them, {{'name': graft}}.")
    for name, graft in grafts.items():
        if not isinstance(graft, Graft):
            raise GraftError(f"{name!r} is a {type(graft).__name__}, no graft: make one by build_graft or load_graft.")
        if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict, name):
            raise GraftError(f"A graft can't have the name {name!r}, by which a module holds it: take a plain word.")
        backbone.check_graft(str(name), graft._fingerprint)


def _in_evaluation(layer: nn.Module, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's checkpoint function with evaluation mode inside: some layers apply dropout by their own mode."""

    def evaluated(function: Callable[..., Any], *inputs: Any) -> Any:
        mode, layer.training = layer.training, False
        try:
            return function(*inputs)
        finally:
            layer.training = mode

    return lambda function, *args, **options: checkpoint(partial(evaluated, function), *args, **options)


def forward_traces(grafts: Mapping[str, Graft], call: Call) -> dict[str, Trace]:
    """What each graft did at each token of a pass, by the graft's name; grafts without a trace are left out."""
    return _collect_traces(grafts, lambda graft: graft.forward_trace(call))


def _collect_traces(grafts: Mapping[str, Graft], read: Callable[[Traceable], Trace | None]) -> dict[str, Trace]:
    traces = {name: read(graft) for name, graft in grafts.items() if isinstance(graft, Traceable)}
    return {name: trace for name, trace in traces.items() if trace is not None}


def _loss_parts(lm_loss: Tensor | None, auxiliary_loss: Tensor | None) -> dict[str, Tensor | None]:
    loss = lm_loss if lm_loss is None or auxiliary_loss is None else lm_loss + auxiliary_loss
    parts = {"lm_loss": lm_loss, "auxiliary_loss": auxiliary_loss}
    return {"loss": loss, **{name: None if part is None else part.detach() for name, part in parts.items()}}


def language_modelling_loss(logits: Tensor, labels: Tensor, totals: Tensor | None = None) -> Tensor:
    """Log-perplexity in nats: the sum of -log p(label at t | text before t), divided by the number of targets.

    Args:
        logits: (B, T, V).
        labels: (B, T), aligned with the inputs; -100 is not predicted.
        totals: the first entry is the divisor; None counts the targets of `labels`.
    """
    targets = labels[:, 1:].reshape(-1)
    predictions = logits[:, :-1].reshape(-1, logits.shape[-1]).float()
    nats = functional.cross_entropy(predictions, targets, ignore_index=IGNORED, reduction="sum")
    count = (targets != IGNORED).sum() if totals is None else totals[0]
    return nats / count.clamp(min=1)


def distillation_loss(logits: Tensor, taught: Tensor, labels: Tensor, totals: Tensor) -> Tensor:
    """The sum of KL(teacher || model) over the targets, in nats, divided by the first of `totals`.

    Args:
        logits: (B, T, V), of the model.
        taught: (B, T, V), of the teacher.
        labels: (B, T), aligned with the inputs; the position before each label other than -100 is a target.
        totals: the number of targets of the step, and more.
    """
    targets = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
    own, other = logits[:, :-1][targets].float().log_softmax(-1), taught[:, :-1][targets].float().log_softmax(-1)
    return functional.kl_div(own, other, reduction="sum", log_target=True) / totals[0].clamp(min=1)
