"""Conditional tasks: one partly frozen encoder for many tasks, its modules modulated by each task's embedding.

Every row of a batch has a task, every task a trained vector z and a head. Modules that all tasks share (`modules.py`)
are turned by FiLM into each task's own. The upper layers train as a copy, which shares all frozen weights with the
backbone (`copying.py`).

Shape suffixes: B rows, T tokens, D the backbone's width, Z a task embedding's width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.errors import GraftError, RecipeError
from graftlm.grafts.base import Graft, GraftConfig, HasHeads, HasTensors, ReplacesModel, check_tensors
from graftlm.grafts.conditional_tasks.adding import choose, read_trained
from graftlm.grafts.conditional_tasks.config import ConditionalTasksConfig
from graftlm.grafts.conditional_tasks.copying import outside, share, sharing_copy, trained_names, trained_roots
from graftlm.grafts.conditional_tasks.modules import Alignment, Bottleneck, ConditionalBias, FiLM, Places, TaskBatch
from graftlm.grafts.heads import Heads, TaskSpec, task_key

_COPIED = "copied."


class ConditionalTasks(Graft, HasHeads, ReplacesModel, HasTensors):
    """Many tasks on one partly frozen encoder, by modules that each task's embedding modulates."""

    Config: ClassVar[type[GraftConfig]] = ConditionalTasksConfig
    label = "conditional tasks"
    config: ConditionalTasksConfig

    def __init__(self, config: ConditionalTasksConfig, backbone: Backbone) -> None:
        super().__init__()
        new = config.tasks
        if not new:
            raise RecipeError("A graft of the kind conditional-tasks has no tasks: name at least one, with its rows.")
        trained = None if config.extends is None else read_trained(config, backbone)
        self.config = config if trained is None else trained.config
        self._sites = backbone.sites
        self._build()
        self.to(backbone.device)
        names = trained_names(backbone.model, self.config.frozen)
        parameters = dict(backbone.model.named_parameters())
        self._originals = {name: parameters[name] for name in names}  # in a dict, which no Module registers
        self._copy: list[PreTrainedModel] = []
        self._pending: dict[str, Tensor] | None = None
        self._fixed: set[str] | None = None  # the old tasks, where only new ones train
        self._told = config.like
        if trained is not None:
            self.load_tensors(trained.tensors)
            for name, spec in new.items():
                self.add_task(name, spec, config.like)

    def _build(self) -> None:
        config, sites = self.config, self._sites
        width, z = sites.width, config.task_width
        self._modulated = range(sites.n_layers - share(config.modulated, sites.n_layers), sites.n_layers)
        self.embeddings = nn.ParameterDict({task_key(name): torch.randn(z) for name in config.tasks})
        self.heads = Heads(config.tasks, width, config.pooling, config.dropout)
        self.alignment = Alignment(width, z) if config.alignment else None
        self.biases, self.norms, self.bottlenecks = nn.ModuleDict(), nn.ModuleDict(), nn.ModuleDict()
        for layer in self._modulated:
            if config.attention != "none":
                self.biases[str(layer)] = ConditionalBias(config.max_length, config.block_width(), z)
            if config.norm:
                self.norms[str(layer)] = nn.ModuleList(FiLM(z, width) for _ in _norms(sites, layer))
        for layer in {"none": range(0), "base": self._modulated, "large": range(sites.n_layers)}[config.bottleneck]:
            self.bottlenecks[str(layer)] = Bottleneck(width, config.bottleneck_width, z, sites.activation)

    def taps(self) -> list[Tap]:
        taps = [] if self.alignment is None else [Tap(Site("layer", 0), "before", "add", self._align)]
        for layer, bias in self.biases.items():
            taps.append(Tap(Site("attention", int(layer)), "before", "bias", self._attend(int(layer), bias)))
        for layer, films in self.norms.items():
            for site, film in zip(_norms(self._sites, int(layer)), films, strict=True):  # type: ignore[arg-type]  # a ModuleList
                taps.append(Tap(site, "after", "add", self._normalise(film)))
        for layer, bottleneck in self.bottlenecks.items():
            beside = (
                self._skip(int(layer), bottleneck) if self.config.bottleneck == "large" else self._beside(bottleneck)
            )
            taps.append(
                Tap(Site("layer" if self.config.bottleneck == "large" else "ffn", int(layer)), "after", "add", beside)
            )
        return taps

    def prepare(self, call: Call) -> None:
        self._tasks(call)
        if self.biases:
            ids = call.input_ids if call.input_ids is not None else call.token_mask
            if ids is not None:
                call.scratch[self, "places"] = Places.of(call, ids.shape[1], self.config.max_length)

    def _tasks(self, call: Call) -> TaskBatch:
        """The tasks of a pass."""
        key = (self, "tasks")
        if key not in call.scratch:
            call.scratch[key] = self._read_tasks(call.extras.get("task"))
        return call.scratch[key]

    def _read_tasks(self, task_B: Tensor | None) -> TaskBatch:
        zs = self._embeddings()
        if task_B is None:
            if len(zs) > 1:
                raise GraftError(
                    f"The graft has {len(zs)} tasks ({', '.join(self.config.tasks)}), and the batch does not say which "
                    "each row has: give extras={'task': indices}."
                )
            return TaskBatch(zs[0][None], None)
        found, which_B = task_B.unique(return_inverse=True)
        numbers = found.tolist()
        if wrong := [number for number in numbers if not 0 <= number < len(zs)]:
            raise GraftError(f"There is no task number {wrong[0]}: the graft has {len(zs)}, counted from 0.")
        z_UZ = torch.stack([zs[number] for number in numbers])
        return TaskBatch(z_UZ, None if len(found) == 1 else which_B.to(z_UZ.device))

    def _embeddings(self) -> list[Tensor]:
        """Each task's, in the tasks' order, which a ParameterDict does not keep."""
        return [self.embeddings[task_key(name)] for name in self.config.tasks]

    def _align(self, call: Call, x_BTD: Tensor) -> Tensor:
        assert self.alignment is not None, "no tap without an alignment"
        working = x_BTD.to(call.working_dtype(self))
        return self.alignment.change(working, self._tasks(call)).to(x_BTD.dtype)

    def _attend(self, layer: int, bias: Any) -> Callable[..., Tensor]:
        def add(call: Call, x_BTD: Tensor) -> Tensor:
            places = call.scratch.get((self, "places")) or Places.of(call, x_BTD.shape[1], self.config.max_length)
            return bias(self._tasks(call), places, places.window(call, layer)).to(x_BTD.dtype)

        return add

    def _normalise(self, film: Any) -> Callable[..., Tensor]:
        return lambda call, _x, y_BTD: film.change(y_BTD, self._tasks(call))

    def _beside(self, bottleneck: Any) -> Callable[..., Tensor]:
        def add(call: Call, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
            return bottleneck(x_BTD.to(call.working_dtype(self)), self._tasks(call)).to(y_BTD.dtype)

        return add

    def _skip(self, layer: int, bottleneck: Any) -> Callable[..., Tensor | None]:
        """c_j = CFF_j(h_j + c_{j-1}); the last is added to the last layer's output."""

        def remember(call: Call, _x: Tensor, h_BTD: Tensor) -> Tensor | None:
            # A key for each layer: a layer that is computed again in the backward pass reads the same.
            before = call.scratch.get((self, "skip", layer - 1))
            h = h_BTD.to(call.working_dtype(self))
            call.scratch[self, "skip", layer] = bottleneck(h if before is None else h + before, self._tasks(call))
            last = layer == self._sites.n_layers - 1
            return call.scratch[self, "skip", layer].to(h_BTD.dtype) if last else None

        return remember

    def tasks(self) -> dict[str, TaskSpec]:
        return dict(self.config.tasks)

    def predict(self, call: Call, hidden: Tensor) -> list[Tensor]:
        return self.heads(hidden, call.token_mask, self._task_rows(call, hidden))

    def target_loss(self, call: Call, hidden: Tensor, targets: Sequence[Tensor]) -> Tensor:
        tasks = self._task_rows(call, hidden)
        losses = torch.stack(self.heads.losses(self.heads(hidden, call.token_mask, tasks), targets, tasks))
        return losses.sum() / (len(losses) if call.totals is None else call.totals[0].clamp(min=1))

    def _task_rows(self, call: Call, hidden: Tensor) -> Tensor:
        task_B = call.extras.get("task")
        return torch.zeros(len(hidden), dtype=torch.long) if task_B is None else task_B

    def describe(self, backbone: Backbone) -> dict[str, Any]:
        """`embedding_cosines`: between the tasks' embeddings, in their order."""
        z = nn.functional.normalize(torch.stack([z.detach().float() for z in self._embeddings()]), dim=-1)
        return {"embedding_cosines": (z @ z.T).tolist()}

    def add_task(self, name: str, spec: TaskSpec, like: str | None = None) -> None:
        """Add a task; from now on only what belongs to added tasks trains, and old ones stay as they are to the bit.

        Args:
            name: its name.
            spec: what its head says.
            like: the old task whose embedding it starts from, and whose head where both say the same; None starts from
                the mean embedding.

        Raises:
            GraftError: there is a task of that name, or none called `like`.
        """
        mean = torch.stack(self._embeddings()).mean(0)
        self.heads.add(name, spec).to(mean.device)
        self.embeddings[task_key(name)] = nn.Parameter(mean.detach().clone())
        self._fixed = set(self.config.tasks) if self._fixed is None else self._fixed
        self.config = self.config.model_copy(update={"tasks": {**self.config.tasks, name: spec}})
        self._freeze()
        if like is not None:
            self.start_like(name, like)

    @torch.no_grad()
    def start_like(self, name: str, like: str) -> None:
        """Give a task another's embedding and, where both say the same, its head.

        Raises:
            GraftError: there is no task called `like`.
        """
        tasks = self.config.tasks
        if like not in tasks:
            raise GraftError(f"There is no task {like} to start {name} from: name one of {', '.join(tasks)}.")
        self.embeddings[task_key(name)].copy_(self.embeddings[task_key(like)])
        if tasks[name] == tasks[like]:
            self.heads.linear(name).load_state_dict(self.heads.linear(like).state_dict())

    def _freeze(self) -> None:
        """Hold everything but the added tasks' own."""
        if self._fixed is None:
            return
        self.requires_grad_(False)
        for name in self.config.tasks:
            if name not in self._fixed:
                self.embeddings[task_key(name)].requires_grad_(True)
                self.heads.linear(name).requires_grad_(True)
        for model in self._copy:
            model.requires_grad_(False)

    def start_tasks(self, model: Any, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Choose the old task that each added one starts from, see `adding.choose`."""
        added = [name for name in rows if self._fixed is not None and name not in self._fixed]
        if self._told is not None:
            return {name: {"like": self._told, "by": "the config"} for name in added}
        found = {}
        for name in added:
            others = [task for task in self.config.tasks if task in (self._fixed or ())]
            found[name] = choose(model, self.tasks(), self.config.pooling, name, others, rows[name])
            self.start_like(name, found[name]["like"])
        return found

    def eval_only_modules(self) -> Iterable[nn.Module]:
        if not self._copy:
            return ()
        copied = self._copy[0]
        return [copied] if self._fixed is not None else outside(copied, trained_roots(copied, self.config.frozen))

    def changes_all_rows(self) -> bool:
        return bool(self._originals)

    def attach(self, model: PreTrainedModel) -> PreTrainedModel:
        if not self._originals:
            return model
        self._copy = [sharing_copy(model, list(self._originals))]
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._load_copied(pending)
        self._freeze()
        return self._copy[0]

    def detach(self, model: PreTrainedModel) -> None:
        if self._copy:
            self._pending = self._copied()
            copied = self._copy.pop()
            if copied.device != model.device:  # the weights that both share went there
                model.to(copied.device)  # type: ignore[arg-type]  # its decorator hides the overloads

    def tensors(self) -> dict[str, Tensor]:
        copied = {_COPIED + name: tensor for name, tensor in self._copied().items()}
        return dict(self.state_dict()) | copied

    def _copied(self) -> dict[str, Tensor]:
        if not self._copy:
            return self._pending or {name: parameter.detach() for name, parameter in self._originals.items()}
        parameters = dict(self._copy[0].named_parameters())
        return {name: parameters[name].detach() for name in self._originals}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        own = dict(self.state_dict())
        check_tensors(own | {_COPIED + name: tensor for name, tensor in self._originals.items()}, tensors)
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(tensors[name])
        self._load_copied({name: tensors[_COPIED + name] for name in self._originals})

    def _load_copied(self, tensors: Mapping[str, Tensor]) -> None:
        if not self._copy:
            self._pending = dict(tensors)
            return
        parameters = dict(self._copy[0].named_parameters())
        with torch.no_grad():
            for name, tensor in tensors.items():
                parameters[name].copy_(tensor)


def _norms(sites: Any, layer: int) -> list[Site]:
    """A layer's norms.

    Raises:
        RecipeError: the family's row tells none.
    """
    found = sites.norms(layer)
    if not found:
        raise RecipeError(
            f"GraftLM does not know where a {sites.model_type} model has its norms: set norm to false, or "
            "describe them in the family's row."
        )
    return found


__all__ = ["ConditionalTasks"]
