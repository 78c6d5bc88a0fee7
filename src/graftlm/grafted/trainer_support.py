"""What trainers of transformers, TRL and PEFT need of a `GraftedModel`, and what they may not do with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from graftlm.backbone import Backbone
from graftlm.errors import GraftError
from graftlm.grafted.checkpointing import LayerCheckpoints, checkpointed_modules
from graftlm.grafted.losses import IGNORED, Objectives
from graftlm.grafts.base import Graft
from graftlm.store.artifact import save_into

_PLAIN_CHECKPOINTS = {"use_reentrant": False, "every_n_layers": 1, "offload": False}
"""The options of gradient checkpoints that trainers may pass, with the only accepted values."""


class TrainerSupport(PreTrainedModel):
    """The part of `GraftedModel` that trainers use. Calls that would change the backbone or bypass grafts raise errors.

    Attributes:
        backbone: the frozen backbone.
        model: the live model.
        grafts: the grafts by name.
    """

    loss_type = "ForCausalLM"  # Trainers read here that the loss shifts the labels.
    backbone: Backbone
    model: PreTrainedModel
    grafts: nn.ModuleDict
    _by_name: dict[str, Graft]
    _objectives: Objectives
    _checkpoints: LayerCheckpoints

    def _get_name(self) -> str:
        """Return the name of the live model's class, by which a trainer with label smoothing shifts the labels."""
        return self.model._get_name()

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that train, by their name in this module."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}

    def save_pretrained(
        self, save_directory: str | Path, is_main_process: bool = True, state_dict: object = None
    ) -> None:
        """Write the graft as an artifact, and `model.safetensors`, from which a trainer resumes.

        Other files in the folder stay. Several grafts are written to subfolders with their names.

        Args:
            save_directory: the folder, which is created if it does not exist.
            is_main_process: whether this process writes; False does nothing.
            state_dict: not used, because the backbone is never written.

        Raises:
            ArtifactError: a tensor contains NaN or infinity, or the artifact can't be written.
        """
        if not is_main_process:
            return
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        for name, graft in self._by_name.items():
            target = folder if len(self._by_name) == 1 else folder / name
            save_into(graft, self.backbone, target)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self._own_tensors().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def _own_tensors(self) -> dict[str, Tensor]:
        """Return the trainable parameters, and the grafts' tensors, by name in this module."""
        return {**self.grafts.state_dict(prefix="grafts."), **self.trainable_parameters()}

    @property
    def _keys_to_ignore_on_save(self) -> set[str]:
        return set(self.state_dict()) - set(self._own_tensors())

    @property
    def base_model(self) -> nn.Module:
        """The model below its output layer, for trainers that compute their own loss.

        Raises:
            GraftError: the model is in training mode and would lose an auxiliary loss, or a graft acts on the output
                layer.
        """
        self._refuse_auxiliary_loss("this trainer computes its own loss")
        head = self.get_output_embeddings()
        if head is not None and (head._forward_hooks or head._forward_pre_hooks):
            raise GraftError(
                "A graft acts on the output layer, but this trainer computes the logits without it: use a trainer that "
                "calls the whole model, such as transformers.Trainer."
            )
        return self.model.base_model

    def tie_weights(self, *_: object, **__: object) -> None:
        """Do nothing: the backbone's tied weights stay tied."""

    def enable_gradient_checkpointing(self) -> None:
        """Recompute each layer in the backward pass instead of keeping its activations.

        Raises:
            GraftError: the backbone has other gradient checkpoints, or PEFT has put an adapter into it.
        """
        mode = self.training
        self.train()  # LayerCheckpoints reads from the modes which layers are frozen.
        self._checkpoints.enable(self.model)
        self.train(mode)

    def activation_checkpointing_enable(
        self, activation_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Call `enable_gradient_checkpointing`, under the name that trainers use.

        Args:
            activation_checkpointing_kwargs: options of the checkpoints. Only `use_reentrant=False`, `every_n_layers=1`
                and `offload=False` are accepted, which are the defaults.
            options: the same options by keyword.

        Raises:
            GraftError: an option has another value, or as in `enable_gradient_checkpointing`.
        """
        options.update(activation_checkpointing_kwargs or {})
        refused = [
            f"{name}={value!r}"
            for name, value in options.items()
            if name not in _PLAIN_CHECKPOINTS or value != _PLAIN_CHECKPOINTS[name]
        ]
        if refused:
            raise GraftError(
                f"The gradient checkpoints have the options {', '.join(refused)}, but taps can follow only plain "
                "checkpoints of all layers: omit these options, whose defaults are accepted."
            )
        self.enable_gradient_checkpointing()

    def _check_trainable(self, mode: bool) -> None:
        """Raise `GraftError` if other libraries changed the backbone so that this model can't train.

        Args:
            mode: whether training mode is being set; gradient checkpoints are checked only then.
        """
        if mode:
            self._checkpoints.check(self.model)
        if "peft_config" in vars(self):
            raise GraftError(
                "PEFT put an adapter into the frozen backbone below the grafts, which would change it: load the "
                "backbone again, and train the GraftedModel without peft_config, or the backbone without GraftedModel."
            )

    def _set_modes_inside_backbone(self, mode: bool) -> None:
        """Set the mode of the backbone's modules that act only in training mode. Dropout stays off."""
        for module in checkpointed_modules(self.model):
            module.training = mode
        embedding: Any = self.get_input_embeddings()
        if hasattr(embedding, "neftune_noise_alpha"):  # the noise that a trainer adds
            embedding.training = mode

    def _check_backbone_mode(self) -> None:
        """Raise `GraftError` if the backbone is in training mode, except for modules whose mode `train` sets."""
        backbone = self.backbone.model
        for module in (backbone, *backbone.children()):
            if not module.training or module is self.get_input_embeddings():
                continue
            if not getattr(module, "gradient_checkpointing", False):
                raise GraftError(
                    "GraftedModel.model was put into training mode, but the frozen backbone must stay in evaluation "
                    "mode: pass the GraftedModel itself to the trainer, or call its train()."
                )

    def _refuse_auxiliary_loss(self, problem: str) -> None:
        """Raise `GraftError` in training mode if the loss of rows depends on their domain, or a graft adds to it.

        Args:
            problem: why the trainer would lose this loss, as a main clause.
        """
        if not self.training:
            return
        source = "The loss of a row depends on its domain" if self._objectives.depends_on_domain else None
        for name, graft in self._by_name.items():
            if graft.config.has_auxiliary_loss and not is_frozen(graft):
                source = f"The graft {name} has an auxiliary loss"
                break
        if source is not None:
            raise GraftError(
                f"{source}, but {problem}: give every row a column `domain` (0 for old text, 1 for new) and derive the "
                "trainer's class from graftlm.training.trainers.DomainTrainer first, or turn that loss off."
            )

    def _check_trainer_batch(
        self,
        labels: Tensor | None,
        domain: Tensor | None,
        auxiliary_loss: Tensor | None,
        num_items_in_batch: Tensor | int,
    ) -> None:
        """Raise `GraftError` if a trainer that counts targets, but no domains, would lose an auxiliary loss."""
        if domain is None and auxiliary_loss is None:
            self._refuse_auxiliary_loss("the batches have no `domain`")
        elif labels is None:
            self._refuse_auxiliary_loss("this trainer computes its own loss")
        elif auxiliary_loss is not None:
            targets = (labels[:, 1:] != IGNORED).sum()
            if bool(targets != num_items_in_batch):
                self._refuse_auxiliary_loss("this trainer does not count the domains' tokens over accumulated batches")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move to a device.

        Args:
            args: a device, as in `nn.Module.to`.
            kwargs: `device` and `non_blocking`, as in `nn.Module.to`.

        Raises:
            GraftError: the arguments contain a dtype, to which the backbone's weights would be cast.
        """
        _, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]  # as nn.Module.to does
        if dtype is not None:
            self._refuse_cast()
        return super().to(*args, **kwargs)

    def _refuse_cast(self) -> NoReturn:
        raise GraftError(
            "A GraftedModel keeps its dtypes, because a cast would change the backbone: load the backbone in the dtype "
            "that you want, or compute under autocast (in a trainer bf16 or fp16, not bf16_full_eval)."
        )

    def half(self, *_: object) -> Self:
        """Raise `GraftError`, because a cast would change the backbone."""
        self._refuse_cast()

    def float(self, *_: object) -> Self:
        """Raise `GraftError`, because a cast would change the backbone."""
        self._refuse_cast()

    def double(self, *_: object) -> Self:
        """Raise `GraftError`, because a cast would change the backbone."""
        self._refuse_cast()

    def bfloat16(self, *_: object) -> Self:
        """Raise `GraftError`, because a cast would change the backbone."""
        self._refuse_cast()

    def add_adapter(self, *_: object, **__: object) -> NoReturn:
        """Raise `GraftError`, because a graft is the adapter."""
        raise GraftError(
            "A GraftedModel can't have a PEFT adapter below its grafts: attach the adapter as a graft of the kind peft."
        )

    def load_adapter(self, *_: object, **__: object) -> NoReturn:
        """Raise `GraftError`, because a graft is the adapter."""
        self.add_adapter()

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise GraftError(
            "A GraftedModel can't be copied, because its taps act on its own backbone: load the backbone a second "
            "time, and attach a copy of the graft to it."
        )


def is_frozen(graft: Graft) -> bool:
    """Return whether a graft has parameters, none of which requires gradients.

    The auxiliary loss of a frozen graft is not computed, because it could only train other grafts.
    """
    parameters = list(graft.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
