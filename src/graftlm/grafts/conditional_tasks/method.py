"""Conditional tasks: one frozen or partly frozen encoder for many tasks, which the task of each row adapts.

Every row of a batch has a task; every task has a head, a LoRA, and a trained vector z, by which FiLM adapts modules
that all tasks share (`modules.py`). Layers that train do so as a copy that shares all frozen weights with the backbone.

Shape suffixes: B rows, T tokens, U different tasks in the pass, D the backbone's width, Z a task embedding's width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, field_validator
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from graftlm.backbone import Backbone, Call, Fingerprint, Site, Sites, Tap
from graftlm.errors import ArtifactError, GraftError, RecipeError, WrongBackboneError
from graftlm.grafts.base import GraftConfig, HasHeads
from graftlm.grafts.conditional_tasks import modules
from graftlm.grafts.heads import Heads, Pooling, TaskSpec, task_key
from graftlm.grafts.trained_copy import TrainsCopy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ConditionalTasksConfig(GraftConfig):
    """Config of conditional tasks.

    The defaults are those that had the best validation rows in the experiment `conditional-tasks`: a LoRA for each task
    on a frozen encoder. With every module off and layers that train the method is multi-task fine-tuning; with one task
    and `frozen: 0` it is fine-tuning.

    Args:
        tasks: the tasks by name, in order; a run fills them in from its rows.
        frozen: share of the layers, from the first, that stay frozen; 0 trains the embedding and all layers, 1 nothing
            of the backbone.
        modulated: share of the layers, from the last, that have LoRA and conditional modules.
        lora_rank: rank of each task's LoRA beside the Linears of attention and dense FFN; 0 for none.
        attention: adds a learned matrix to the scores, in blocks along the diagonal or as one full block.
        block: width of a block in tokens.
        alignment: a matrix before a layer.
        aligned: the layer: the first one, or the first that trains, so that gradients stop there.
        norm: modulates the output of each norm.
        bottleneck: `base` is parallel to each modulated layer's FFN, `large` runs along all layers.
        bottleneck_width: inner width of the bottleneck.
        task_width: width of a task's vector.
        pooling: the vector that a row is predicted from: its first token, its last, or the mean.
        max_length: maximum number of tokens of a row with conditional attention.
        dropout: of the heads' inputs, in training.
        module_rate: the learning rate of LoRA, modules and embeddings over that of the backbone's weights.
        head_rate: the learning rate of heads over that of the backbone's weights.
        scaled_losses: divide each row's loss by its task's loss at chance, so that tasks of all types count alike.
        extends: folder of a trained graft, whose config and tensors are taken over; the new tasks train.
        adapts: with `extends`, what trains: `added` the new tasks' own tensors alone, `all` everything, as the
            graft without `extends` did; old tasks may then change.
        like: the trained task that new ones start from; by default the one of their type, labels and range that has
            the lowest loss on the run's rows, if that is below the loss at chance.
    """

    needs_tasks: ClassVar[bool] = True
    saved_keys: ClassVar[frozenset[str]] = frozenset({"module_rate"})  # before it, embeddings had any length

    kind: Literal["conditional-tasks"] = "conditional-tasks"
    tasks: dict[str, TaskSpec] = {}
    frozen: float = Field(1.0, ge=0, le=1)
    modulated: float = Field(1.0, ge=0, le=1)
    lora_rank: int = Field(3, ge=0)
    attention: Literal["none", "blocks", "full"] = "none"
    block: int = Field(32, ge=1)
    alignment: bool = False
    aligned: Literal["first", "trained"] = "first"
    norm: bool = False
    bottleneck: Literal["none", "base", "large"] = "none"
    bottleneck_width: int = Field(64, ge=1)
    task_width: int = Field(64, ge=1)
    pooling: Pooling = "first"
    max_length: int = Field(512, ge=1)
    dropout: float = Field(0.1, ge=0, lt=1)
    module_rate: float = Field(3.0, gt=0)
    head_rate: float = Field(10.0, gt=0)
    scaled_losses: bool = True
    extends: str | None = None
    adapts: Literal["added", "all"] = "added"
    like: str | None = None

    @field_validator("tasks")
    @classmethod
    def _names_are_valid(cls, value: dict[str, TaskSpec]) -> dict[str, TaskSpec]:
        for name in value:
            if not name or "." in name:
                raise ValueError(f"the task's name {name!r} can't be used: take one without dots, such as intents")
        return value

    def check_saved(self, values: Mapping[str, Any]) -> Self:
        saved = super().check_saved(values)
        return saved if "lora_rank" in values else saved.model_copy(update={"lora_rank": 0})  # before there was one

    @property
    def is_modulated(self) -> bool:
        """Whether there is a module that the tasks' vectors modulate."""
        return self.alignment or self.norm or self.bottleneck != "none" or self.attention != "none"

    def block_width(self) -> int:
        """Tokens of one block of conditional attention."""
        return self.max_length if self.attention == "full" else min(self.block, self.max_length)


class ConditionalTasks(TrainsCopy, HasHeads):
    """Many tasks on one partly frozen encoder or decoder.

    With `extends` in its config, the graft has the trained graft's config and the new tasks.

    Raises RecipeError if there is no task, a new task has a trained one's name, or the family's norms are unknown,
    ArtifactError if `extends` names no complete graft of this kind, WrongBackboneError for another backbone's.
    """

    Config: ClassVar[type[GraftConfig]] = ConditionalTasksConfig
    label = "conditional tasks"
    prefix = "copied."
    remedy = "set frozen to 1"
    config: ConditionalTasksConfig
    loras: Any

    def __init__(self, config: ConditionalTasksConfig, backbone: Backbone) -> None:
        super().__init__()
        new = config.tasks
        if not new:
            raise RecipeError("A graft of the kind conditional-tasks has no tasks: name at least one, with its rows.")
        trained = None if config.extends is None else read_trained(config, backbone)
        self.config = config if trained is None else trained[0]
        self._sites = backbone.sites
        self._build()
        self.to(backbone.device)
        self.copy_weights(backbone.model, trained_names(backbone.model, self.config.frozen))
        self._fixed: list[str] | None = None  # the trained tasks, where only new ones train
        self._like, self._adapts_all = config.like, config.adapts == "all"
        if trained is not None:
            self.load_tensors(trained[1])
            for name, spec in new.items():
                self.add_task(name, spec, config.like)

    def _build(self) -> None:
        config, sites = self.config, self._sites
        width, z = sites.width, config.task_width
        modulated = range(sites.n_layers - share_of(config.modulated, sites.n_layers), sites.n_layers)
        self.embeddings = nn.ParameterDict({task_key(name): torch.randn(z) for name in config.tasks})
        self.heads = Heads(config.tasks, width, config.pooling, config.dropout)
        self.alignment = modules.Alignment(width, z) if config.alignment else None
        self.biases, self.norms, self.bottlenecks, self.loras = (nn.ModuleDict() for _ in range(4))
        for layer in modulated:
            for path, sizes in sites.linears(layer).items() if config.lora_rank else ():
                self.loras[path.replace(".", "/")] = modules.TaskLora(len(config.tasks), config.lora_rank, *sizes)
            if config.attention != "none":
                self.biases[str(layer)] = modules.ConditionalBias(config.max_length, config.block_width(), z)
            if config.norm:
                self.norms[str(layer)] = nn.ModuleList(modules.FiLM(z, width) for _ in _norms(sites, layer))
        if config.lora_rank and modulated and not self.loras:
            raise RecipeError("The sizes of the backbone's Linears are hidden, so they get no LoRA: set lora_rank: 0.")
        for layer in {"none": range(0), "base": modulated, "large": range(sites.n_layers)}[config.bottleneck]:
            self.bottlenecks[str(layer)] = modules.Bottleneck(width, config.bottleneck_width, z, sites.activation)

    def taps(self) -> list[Tap]:
        taps = [] if self.alignment is None else [Tap(Site("layer", self._aligned()), "before", "add", self._align)]
        for path, lora in self.loras.items():
            taps.append(Tap(Site("module", path=path.replace("/", ".")), "after", "add", partial(self._parallel, lora)))
        for layer, bias in self.biases.items():
            taps.append(Tap(Site("attention", int(layer)), "before", "bias", partial(self._attend, int(layer), bias)))
        for layer, films in self.norms.items():
            for site, film in zip(_norms(self._sites, int(layer)), films, strict=True):  # type: ignore[arg-type]  # a ModuleList
                taps.append(Tap(site, "after", "replace", partial(self._normalise, film)))
        for layer, bottleneck in self.bottlenecks.items():
            if self.config.bottleneck == "large":
                site, function = Site("layer", int(layer)), partial(self._skip, int(layer), bottleneck)
            else:
                site, function = Site("ffn", int(layer)), partial(self._parallel, bottleneck)
            taps.append(Tap(site, "after", "add", function))
        return taps

    def _aligned(self) -> int:
        """The layer that the alignment stands before."""
        trained = share_of(self.config.frozen, self._sites.n_layers)
        return trained if self.config.aligned == "trained" and trained < self._sites.n_layers else 0

    def prepare(self, call: Call) -> None:
        self._tasks(call)
        if self.biases:
            ids = call.input_ids if call.input_ids is not None else call.token_mask
            if ids is not None:
                positions = modules.TokenPositions.of_call(call, ids.shape[1], self.config.max_length)
                call.scratch[self, "positions"] = positions

    def _tasks(self, call: Call) -> modules.RowTasks:
        if (self, "tasks") not in call.scratch:
            call.scratch[self, "tasks"] = self._read_tasks(call.extras.get("task"))
        return call.scratch[self, "tasks"]

    def _read_tasks(self, task_B: Tensor | None) -> modules.RowTasks:
        zs = self._embeddings()
        if task_B is None:
            if len(zs) > 1:
                raise GraftError(
                    f"The graft has {len(zs)} tasks ({', '.join(self.config.tasks)}), and the batch does not say which "
                    "each row has: give extras={'task': indices}."
                )
            return modules.RowTasks(torch.zeros(1, dtype=torch.long, device=zs.device), zs[:1], None)
        if torch.compiler.is_compiling():  # a graph can't depend on which tasks there are
            return modules.RowTasks(torch.arange(len(zs), device=zs.device), zs, task_B.to(zs.device))
        numbers_U, index_B = task_B.unique(return_inverse=True)
        numbers = numbers_U.tolist()
        if unknown := [number for number in numbers if not 0 <= number < len(zs)]:
            raise GraftError(f"There is no task number {unknown[0]}: the graft has {len(zs)}, counted from 0.")
        numbers_U = numbers_U.to(zs.device, non_blocking=True)
        index = None if len(numbers) == 1 else index_B.to(zs.device, non_blocking=True)
        return modules.RowTasks(numbers_U, zs.index_select(0, numbers_U), index)

    def _embeddings(self) -> Tensor:
        """(tasks, Z): the embeddings at length 1, in the tasks' order, which a ParameterDict does not keep."""
        return nn.functional.normalize(torch.stack([self.embeddings[task_key(name)] for name in self.config.tasks]))

    def _align(self, call: Call, x_BTD: Tensor) -> Tensor:
        assert self.alignment is not None, "no tap without an alignment"
        working = x_BTD.to(call.working_dtype(self))
        return self.alignment.change(working, self._tasks(call)).to(x_BTD.dtype)

    def _attend(self, layer: int, bias: Any, call: Call, x_BTD: Tensor) -> Tensor:
        positions = call.scratch.get((self, "positions"))
        if positions is None:
            positions = modules.TokenPositions.of_call(call, x_BTD.shape[1], self.config.max_length)
        return bias(self._tasks(call), positions, positions.visible(call, layer)).to(x_BTD.dtype)

    def _normalise(self, film: Any, call: Call, _x: Tensor, y_BTD: Tensor) -> Tensor:
        return film(y_BTD, self._tasks(call))

    def _parallel(self, module: Any, call: Call, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
        return module(x_BTD.to(call.working_dtype(self)), self._tasks(call)).to(y_BTD.dtype)

    def _skip(self, layer: int, bottleneck: Any, call: Call, _x: Tensor, h_BTD: Tensor) -> Tensor | None:
        """c_j = CFF_j(h_j + c_{j-1}); the last is added to the last layer's output."""
        # One key for each layer, so that a layer that runs again in the backward pass reads the same.
        before = call.scratch.get((self, "skip", layer - 1))
        h = h_BTD.to(call.working_dtype(self))
        call.scratch[self, "skip", layer] = bottleneck(h if before is None else h + before, self._tasks(call))
        return call.scratch[self, "skip", layer].to(h_BTD.dtype) if layer == self._sites.n_layers - 1 else None

    def tasks(self) -> dict[str, TaskSpec]:
        return dict(self.config.tasks)

    def predict(self, call: Call, hidden: Tensor) -> list[Tensor]:
        return self.heads(hidden, call.token_mask, call.extras.get("task"))

    def target_loss(self, call: Call, hidden: Tensor, targets: Sequence[Tensor]) -> Tensor:
        predictions, scaled = self.predict(call, hidden), self.config.scaled_losses
        losses = torch.stack(self.heads.losses(predictions, targets, call.extras.get("task"), scaled=scaled))
        return losses.sum() / (len(losses) if call.totals is None else call.totals[0].clamp(min=1))

    def describe(self, backbone: Backbone) -> dict[str, Any]:
        """`embedding_cosines`: between the tasks' embeddings, in their order, where a module reads them."""
        z = self._embeddings().detach().float()
        return {"embedding_cosines": (z @ z.T).tolist()} if self.config.is_modulated else {}

    def add_task(self, name: str, spec: TaskSpec, like: str | None = None) -> None:
        """Add a task; only the added tasks' own tensors train from now on, and trained tasks stay the same to the bit.

        With `adapts: all` everything trains.

        Args:
            like: the trained task whose embedding and LoRA it starts from, and whose head where type and labels are
                the same; None starts from the mean embedding and a LoRA without effect.

        Raises GraftError if there is a task of that name, or none called `like`.
        """
        mean = self._embeddings().mean(0)
        self.heads.add(name, spec).to(mean)
        self.embeddings[task_key(name)] = nn.Parameter(mean.detach().clone())
        for lora in self.loras.values():
            lora.add().to(mean)
        self._fixed = list(self.config.tasks) if self._fixed is None else self._fixed
        self.config = self.config.model_copy(update={"tasks": {**self.config.tasks, name: spec}})
        self._freeze()
        if like is not None:
            self.start_like(name, like)

    @torch.no_grad()
    def start_like(self, name: str, like: str) -> None:
        """Give a task another's embedding, LoRA and, if type and labels agree, head; GraftError if it is unknown."""
        tasks = self.config.tasks
        if like not in (others := [task for task in tasks if task != name]):
            raise GraftError(f"There is no task {like} to start {name} from: name one of {', '.join(others)}.")
        self.embeddings[task_key(name)].copy_(self.embeddings[task_key(like)])
        new, old = (list(tasks).index(task) for task in (name, like))
        for lora in self.loras.values():
            lora.a[new].copy_(lora.a[old])
            lora.b[new].copy_(lora.b[old])
        if tasks[name] == tasks[like]:
            self.heads.linear(name).load_state_dict(self.heads.linear(like).state_dict())

    def _freeze(self) -> None:
        """Freeze everything but the added tasks' own tensors."""
        if self._fixed is None or self._adapts_all:
            return
        for module in (self, *self._copy):
            module.requires_grad_(False)
        for name in self.config.tasks.keys() - self._fixed:
            self.embeddings[task_key(name)].requires_grad_(True)
            self.heads.linear(name).requires_grad_(True)
        for lora in self.loras.values():
            lora.a[len(self._fixed) :].requires_grad_(True)
            lora.b[len(self._fixed) :].requires_grad_(True)

    @torch.no_grad()
    def start_tasks(self, model: Any, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Start each added task from that of equal specification with the lowest loss on its rows, if below chance."""
        tasks, choices = self.config.tasks, {}
        trained, was_training = self._fixed or list(tasks), model.training
        model.eval()
        for name in (name for name in rows if name not in trained):
            losses = {}
            for task in (task for task in trained if tasks[task] == tasks[name] and not self._like):
                number = torch.full((len(rows[name]["input_ids"]),), list(tasks).index(task))
                inputs = {**rows[name], "extras": {**(rows[name].get("extras") or {}), "task": number}}
                losses[task] = float(model(**inputs).loss)
            if losses:
                best, chance = min(losses, key=losses.__getitem__), tasks[name].chance_loss
                choices[name] = {"like": best, "losses": losses, "chance": 1.0 if self.config.scaled_losses else chance}
                if losses[best] < choices[name]["chance"]:
                    self.start_like(name, best)
                else:
                    choices[name]["like"] = None
        model.train(was_training)
        return choices

    def eval_only_modules(self) -> Iterable[nn.Module]:
        if not self._copy or (self._fixed is not None and not self._adapts_all):
            return self._copy
        return modules_outside(self._copy[0], trained_roots(self._copy[0], self.config.frozen))

    def learning_rate_scales(self) -> dict[str, float]:
        """The learning rate of own parameters over that of the backbone's weights, by name."""
        rates, heads = (self.config.module_rate, self.config.head_rate), "heads."
        return {name: rates[name.startswith(heads)] for name, _ in self.named_parameters()}

    def attach(self, model: PreTrainedModel) -> PreTrainedModel:
        live = super().attach(model)
        self._freeze()
        return live


def _norms(sites: Sites, layer: int) -> list[Site]:
    norms = sites.norms(layer)
    if not norms:
        raise RecipeError(
            f"GraftLM does not know where a {sites.model_type} model has its norms: set norm to false, or "
            "describe them in the family's row."
        )
    return norms


def read_trained(
    config: ConditionalTasksConfig, backbone: Backbone
) -> tuple[ConditionalTasksConfig, dict[str, Tensor]]:
    """Config and tensors of the graft in the folder that `config` extends; errors as of `ConditionalTasks`."""
    folder = Path(str(config.extends))
    try:
        manifest = json.loads((folder / "graft.json").read_text(encoding="utf-8"))
        kind, values = manifest["kind"], manifest["config"]
        tensors = load_file(folder / "graft.safetensors")
        fingerprint = Fingerprint(**manifest["backbone"]["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise ArtifactError(
            f"{folder}, which is to be extended, is not a whole graft ({type(error).__name__}): name a folder that "
            "graft train wrote."
        ) from None
    if kind != config.kind:
        raise ArtifactError(f"{folder}, which is to be extended, is a graft of the kind {kind}: name a {config.kind}.")
    if difference := fingerprint.difference(backbone.fingerprint):
        raise WrongBackboneError(
            f"{folder}, which is to be extended, was trained on another backbone than {backbone.name}: {difference}."
        )
    trained = ConditionalTasksConfig.parse({**values, "kind": kind}, where=str(folder)).check_saved(values)
    given = config.model_fields_set - {"kind", "tasks", "extends", "adapts", "like"}
    if others := sorted(key for key in given if getattr(config, key) != getattr(trained, key)):
        raise RecipeError(
            f"{folder} was trained with {others[0]} {getattr(trained, others[0])!r}, and what extends it says "
            f"{getattr(config, others[0])!r}: leave {others[0]} out, since the settings are those of the trained graft."
        )
    if config.adapts == "all" and not (trained.is_modulated or trained_names(backbone.model, trained.frozen)):
        raise RecipeError(f"adapts is all, but the tasks of {folder} share nothing that trains: leave adapts out.")
    if both := sorted(set(trained.tasks) & set(config.tasks)):
        raise RecipeError(f"The graft {folder} has a task {both[0]} already: name the new one another way.")
    return trained, tensors


def share_of(share: float, layers: int) -> int:
    """The number of layers that a share is, halves rounded up."""
    return math.floor(share * layers + 0.5)


def trained_roots(model: PreTrainedModel, frozen: float) -> list[nn.Module]:
    """The modules that train: the upper layers and the norm after them, or the whole base model; never a head."""
    if frozen == 0:
        return [model.base_model]
    sites = Sites(model)
    layers = list(sites.layers)[share_of(frozen, sites.n_layers) :]
    norm = [model.base_model.get_submodule(sites.family.norm)] if sites.family.norm and layers else []
    return [*layers, *norm]


def trained_names(model: PreTrainedModel, frozen: float) -> list[str]:
    """The names of the model's weights that train; those of a pooler do not, since nothing reads it."""
    roots = trained_roots(model, frozen)
    pooler = getattr(model.base_model, "pooler", None)
    unread = {id(p) for p in pooler.parameters()} if isinstance(pooler, nn.Module) else set()
    trained = {id(parameter) for root in roots for parameter in root.parameters()} - unread
    return [name for name, parameter in model.named_parameters() if id(parameter) in trained]


def modules_outside(model: nn.Module, roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """The largest modules of `model` that neither contain one of `roots` nor lie in one."""
    for child in model.children():
        if set(roots).isdisjoint(child.modules()):
            yield child
        elif child not in roots:
            yield from modules_outside(child, roots)
