"""Conditional tasks: one frozen or partly frozen encoder for many tasks, which adapts to the task of each row.

Every row of a batch has a task. Every task has a head, a LoRA, and a trained vector whose direction z adapts modules
that all tasks share, by FiLM (`modules.py`). Layers that train do so in a copy that shares all frozen weights with the
backbone.

Shape suffixes: B rows, T tokens, U different tasks in the pass, D the backbone's width, Z a task embedding's width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from graftlm.backbone import Backbone, Call, Site, Sites, Tap
from graftlm.errors import GraftError, RecipeError
from graftlm.grafts.base import GraftConfig, HasHeads
from graftlm.grafts.conditional_tasks import modules
from graftlm.grafts.conditional_tasks.config import ConditionalTasksConfig
from graftlm.grafts.conditional_tasks.extending import read_trained
from graftlm.grafts.conditional_tasks.trained_layers import modules_outside, share_of, trained_names, trained_roots
from graftlm.grafts.heads import Heads, TaskSpec, row_tasks, task_key
from graftlm.grafts.trained_copy import TrainsCopy

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ConditionalTasks(TrainsCopy, HasHeads):
    """Many tasks on one partly frozen encoder or decoder.

    Args:
        config: the config. With `extends`, the graft gets the trained graft's config and tensors, and the new tasks.
        backbone: the encoder or decoder.

    Raises:
        RecipeError: there is no task, the places of norms or the sizes of Linears that the config modulates are
            unknown, or the config does not fit the trained graft that it extends.
        ArtifactError: `extends` is not the folder of a complete graft of this kind.
        WrongBackboneError: the trained graft belongs to another backbone.
        GraftError: `like` is not a task of the trained graft.
    """

    Config: ClassVar[type[GraftConfig]] = ConditionalTasksConfig
    label = "conditional tasks"
    prefix = "copied."
    remedy = "set frozen to 1"
    config: ConditionalTasksConfig

    def __init__(self, config: ConditionalTasksConfig, backbone: Backbone) -> None:
        super().__init__()
        if not config.tasks:
            raise RecipeError(
                "A graft of the kind conditional-tasks has no tasks, but at least one is expected: name a task with "
                "its rows."
            )
        self.config = config
        trained_tensors: dict[str, Tensor] = {}
        if config.extends is not None:
            self.config, trained_tensors = read_trained(config, backbone)
        self._sites = backbone.sites
        self._build()
        self.to(backbone.device)
        self.copy_weights(backbone.model, trained_names(backbone.model, self.config.frozen))
        self._fixed: list[str] | None = None  # the trained tasks, if only added tasks train
        self._like = config.like
        self._adapts_all = config.adapts == "all"
        if config.extends is not None:
            self.load_tensors(trained_tensors)
            for name, spec in config.tasks.items():
                self.add_task(name, spec, config.like)

    # Construction

    def _build(self) -> None:
        config = self.config
        width = self._sites.width
        vectors = {task_key(name): torch.randn(config.task_width) for name in config.tasks}
        self.embeddings = nn.ParameterDict(vectors)
        self.heads = Heads(config.tasks, width, config.pooling, config.dropout)
        self.alignment = modules.Alignment(width, config.task_width) if config.alignment else None
        self.biases = nn.ModuleDict()
        self.norms = nn.ModuleDict()
        self.bottlenecks = nn.ModuleDict()
        self.loras = nn.ModuleDict()
        layers = self._sites.n_layers
        modulated = range(layers - share_of(config.modulated, layers), layers)
        if config.lora_rank:
            self._build_loras(modulated)
        if config.attention != "none":
            self._build_biases(modulated)
        if config.norm:
            self._build_norms(modulated)
        if config.bottleneck == "base":
            self._build_bottlenecks(modulated)
        elif config.bottleneck == "large":
            self._build_bottlenecks(range(layers))

    def _build_loras(self, layers: range) -> None:
        config = self.config
        for layer in layers:
            for path, (inputs, outputs) in self._sites.linears(layer).items():
                lora = modules.TaskLora(len(config.tasks), config.lora_rank, inputs, outputs)
                self.loras[path.replace(".", "/")] = lora
        if layers and not self.loras:
            raise RecipeError(
                f"lora_rank is {config.lora_rank}, but the sizes of this backbone's Linears are unknown: set lora_rank "
                "to 0."
            )

    def _build_biases(self, layers: range) -> None:
        config = self.config
        for layer in layers:
            bias = modules.ConditionalBias(config.max_length, config.block_width(), config.task_width)
            self.biases[str(layer)] = bias

    def _build_norms(self, layers: range) -> None:
        for layer in layers:
            sites = _norms(self._sites, layer)
            films = [modules.FiLM(self.config.task_width, self._sites.width) for _ in sites]
            self.norms[str(layer)] = nn.ModuleList(films)

    def _build_bottlenecks(self, layers: range) -> None:
        for layer in layers:
            self.bottlenecks[str(layer)] = modules.Bottleneck(
                width=self._sites.width,
                inner=self.config.bottleneck_width,
                task_width=self.config.task_width,
                activation=self._sites.activation,
                has_norm=self.config.bottleneck_norm,
            )

    # Taps

    @property
    def decodes_in_one_graph(self) -> bool:
        return False  # the tasks that a batch names are read on the host

    def taps(self) -> list[Tap]:
        taps: list[Tap] = []
        if self.alignment is not None:
            tap = Tap(
                site=Site("layer", self._aligned_layer()),
                when="before",
                act="add",
                function=self._align,
            )
            taps.append(tap)
        taps.extend(self._lora_taps())
        taps.extend(self._attention_taps())
        taps.extend(self._norm_taps())
        taps.extend(self._bottleneck_taps())
        return taps

    def _lora_taps(self) -> Iterator[Tap]:
        for path, lora in self.loras.items():
            yield Tap(
                site=Site("module", path=path.replace("/", ".")),
                when="after",
                act="add",
                function=partial(self._parallel, lora),
            )

    def _attention_taps(self) -> Iterator[Tap]:
        for name, bias in self.biases.items():
            layer = int(name)
            yield Tap(
                site=Site("attention", layer),
                when="before",
                act="bias",
                function=partial(self._attend, layer, bias),
            )

    def _norm_taps(self) -> Iterator[Tap]:
        for name, films in self.norms.items():
            assert isinstance(films, nn.ModuleList)
            sites = _norms(self._sites, int(name))
            for site, film in zip(sites, films, strict=True):
                yield Tap(
                    site=site,
                    when="after",
                    act="replace",
                    function=partial(self._normalize, film),
                )

    def _bottleneck_taps(self) -> Iterator[Tap]:
        for name, bottleneck in self.bottlenecks.items():
            layer = int(name)
            if self.config.bottleneck == "large":
                site = Site("layer", layer)
                function = partial(self._skip, layer, bottleneck)
            else:
                site = Site("ffn", layer)
                function = partial(self._parallel, bottleneck)
            yield Tap(
                site=site,
                when="after",
                act="add",
                function=function,
            )

    def _aligned_layer(self) -> int:
        """Return the layer before which the alignment acts."""
        if self.config.aligned == "first":
            return 0
        trained = share_of(self.config.frozen, self._sites.n_layers)
        return trained if trained < self._sites.n_layers else 0

    def _align(self, call: Call, x_BTD: Tensor) -> Tensor:
        assert self.alignment is not None, "the tap exists only with an alignment"
        working = x_BTD.to(call.working_dtype(self))
        change = self.alignment.change(working, self._tasks(call))
        return change.to(x_BTD.dtype)

    def _attend(self, layer: int, bias: nn.Module, call: Call, x_BTD: Tensor) -> Tensor:
        positions = call.scratch.get((self, "positions"))
        if positions is None:
            positions = modules.TokenPositions.of_call(call, x_BTD.shape[1], self.config.max_length)
        visible = positions.visible(call, layer)
        values = bias(self._tasks(call), positions, visible)
        return values.to(x_BTD.dtype)

    def _normalize(self, film: nn.Module, call: Call, _x: Tensor, y_BTD: Tensor) -> Tensor:
        return film(y_BTD, self._tasks(call))

    def _parallel(self, module: nn.Module, call: Call, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
        working = x_BTD.to(call.working_dtype(self))
        output = module(working, self._tasks(call))
        return output.to(y_BTD.dtype)

    def _skip(self, layer: int, bottleneck: nn.Module, call: Call, _x: Tensor, h_BTD: Tensor) -> Tensor | None:
        """Compute c_j = CFF_j(h_j + c_{j-1}); the last c is added to the last layer's output."""
        # Each layer has its own key, so that a layer that is recomputed in the backward pass reads the same value.
        before_BTD = call.scratch.get((self, "skip", layer - 1))
        working_BTD = h_BTD.to(call.working_dtype(self))
        inputs_BTD = working_BTD if before_BTD is None else working_BTD + before_BTD
        skip_BTD = bottleneck(inputs_BTD, self._tasks(call))
        call.scratch[self, "skip", layer] = skip_BTD
        is_last = layer == self._sites.n_layers - 1
        return skip_BTD.to(h_BTD.dtype) if is_last else None

    # The tasks of a pass

    def prepare(self, call: Call) -> None:
        self._tasks(call)
        ids = call.input_ids if call.input_ids is not None else call.token_mask
        if self.biases and ids is not None:
            positions = modules.TokenPositions.of_call(call, ids.shape[1], self.config.max_length)
            call.scratch[self, "positions"] = positions

    def _tasks(self, call: Call) -> modules.RowTasks:
        key = (self, "tasks")
        if key not in call.scratch:
            task_B: Any = call.extras.get("task")
            call.scratch[key] = self._read_tasks(task_B)
        return call.scratch[key]

    def _read_tasks(self, task_B: Tensor | None) -> modules.RowTasks:
        """Return the tasks of the rows of a pass; None stands for the only task."""
        zs = self._embeddings()
        if task_B is None:
            return self._only_task(zs)
        if torch.compiler.is_compiling():
            # A compiled graph can't depend on which tasks a batch has, so all tasks are computed.
            numbers = torch.arange(len(zs), device=zs.device)
            return modules.RowTasks(numbers, zs, task_B.to(zs.device))
        numbers_U, index_B = task_B.unique(return_inverse=True)
        numbers = numbers_U.tolist()
        unknown = [number for number in numbers if not 0 <= number < len(zs)]
        if unknown:
            raise GraftError(
                f"The batch has a row of task number {unknown[0]}, but the graft's tasks have the numbers 0 to "
                f"{len(zs) - 1}: give the row one of them."
            )
        numbers_U = numbers_U.to(zs.device, non_blocking=True)
        index = None if len(numbers) == 1 else index_B.to(zs.device, non_blocking=True)
        return modules.RowTasks(numbers_U, zs.index_select(0, numbers_U), index)

    def _only_task(self, zs: Tensor) -> modules.RowTasks:
        """Return the tasks of a pass without task indices; raise `GraftError` if the graft has several tasks."""
        if len(zs) > 1:
            names = ", ".join(self.config.tasks)
            raise GraftError(
                f"The graft has {len(zs)} tasks ({names}), but the batch does not specify the task of each row: pass "
                "extras={'task': indices}."
            )
        number = torch.zeros(1, dtype=torch.long, device=zs.device)
        return modules.RowTasks(number, zs[:1], None)

    def _embeddings(self) -> Tensor:
        """Return the embeddings (tasks, Z) at length 1, in the order of the tasks, which a ParameterDict loses."""
        vectors = [self.embeddings[task_key(name)] for name in self.config.tasks]
        return nn.functional.normalize(torch.stack(vectors))

    # Predictions

    def tasks(self) -> dict[str, TaskSpec]:
        return dict(self.config.tasks)

    def predict(self, call: Call, hidden: Tensor) -> list[Tensor]:
        extras = _extras(call)
        return self.heads(
            hidden,
            call.token_mask,
            extras.get("task"),
            parts=extras.get("parts"),
            marks_BT=extras.get("marks"),
        )

    def target_loss(self, call: Call, hidden: Tensor, targets: Sequence[Tensor]) -> Tensor:
        predictions = self.predict(call, hidden)
        extras = _extras(call)
        losses = self.heads.losses(
            predictions,
            targets,
            row_tasks(extras.get("task"), extras.get("parts")),
            scaled=self.config.scaled_losses,
        )
        count = len(losses) if call.totals is None else call.totals[0].clamp(min=1)
        return torch.stack(losses).sum() / count

    def describe(self, backbone: Backbone) -> dict[str, object]:
        """Return `embedding_cosines`, a matrix of the cosines between the tasks' embeddings in the order of the tasks.

        Without a module that reads the embeddings, the result is empty.

        Args:
            backbone: not used.
        """
        if not self.config.is_modulated:
            return {}
        z = self._embeddings().detach().float()
        return {"embedding_cosines": (z @ z.T).tolist()}

    # Added tasks

    def add_task(self, name: str, spec: TaskSpec, like: str | None = None) -> None:
        """Add a task, and freeze everything except the tensors of added tasks.

        Predictions of the other tasks then stay the same bit for bit. With `adapts: all` in the config, nothing is
        frozen.

        Args:
            name: the name of the new task.
            spec: its specification.
            like: the task whose embedding and LoRA the new task starts from, and whose head if the two specifications
                are equal; None starts from the mean embedding, a LoRA without effect and a new head.

        Raises:
            GraftError: the name is empty, contains a dot or belongs to another task, or no other task is called
                `like`.
        """
        if like is not None:
            self._check_like(name, like)
        mean = self._embeddings().mean(0)
        self.heads.add(name, spec).to(mean)
        self.embeddings[task_key(name)] = nn.Parameter(mean.detach().clone())
        for lora in self._task_loras():
            lora.add().to(mean)
        if self._fixed is None:
            self._fixed = list(self.config.tasks)
        tasks = {**self.config.tasks, name: spec}
        self.config = self.config.model_copy(update={"tasks": tasks})
        self._freeze()
        if like is not None:
            self.start_like(name, like)

    @torch.no_grad()
    def start_like(self, name: str, like: str) -> None:
        """Copy another task's embedding and LoRA, and its head if the two specifications are equal.

        Args:
            name: the task that changes, which must be a task of this graft.
            like: the task whose tensors are copied.

        Raises:
            GraftError: there is no other task called `like`.
        """
        self._check_like(name, like)
        tasks = self.config.tasks
        self.embeddings[task_key(name)].copy_(self.embeddings[task_key(like)])
        numbers = list(tasks)
        new = numbers.index(name)
        old = numbers.index(like)
        for lora in self._task_loras():
            lora.a[new].copy_(lora.a[old])
            lora.b[new].copy_(lora.b[old])
        if tasks[name] == tasks[like]:
            head = self.heads.linear(like).state_dict()
            self.heads.linear(name).load_state_dict(head)

    def _check_like(self, name: str, like: str) -> None:
        """Raise `GraftError` unless there is another task called `like`."""
        others = [task for task in self.config.tasks if task != name]
        if like not in others:
            raise GraftError(
                f"The task {name} is to start from {like!r}, but another task of this graft is expected: choose one of "
                f"these: {', '.join(others)}."
            )

    def _task_loras(self) -> list[modules.TaskLora]:
        return cast("list[modules.TaskLora]", list(self.loras.values()))

    def _freeze(self) -> None:
        """Freeze everything except the tensors of added tasks."""
        if self._fixed is None or self._adapts_all:
            return
        self.requires_grad_(False)
        for copied in self._copy:
            copied.requires_grad_(False)
        for name in self.config.tasks.keys() - self._fixed:
            self.embeddings[task_key(name)].requires_grad_(True)
            self.heads.linear(name).requires_grad_(True)
        for lora in self._task_loras():
            lora.a[len(self._fixed) :].requires_grad_(True)
            lora.b[len(self._fixed) :].requires_grad_(True)

    @torch.no_grad()
    def start_tasks(self, model: nn.Module, rows: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
        """Start each added task from the best trained task of equal specification, if that is better than chance.

        The best task is the one with the lowest loss on the added task's rows. Nothing changes if the config sets
        `like`.

        Args:
            model: the `GraftedModel` that this graft is attached to.
            rows: some rows of each task by its name, as the model's `forward` takes them, with `targets`.

        Returns:
            For each added task with a candidate, `like` (the chosen task or None), the candidates' `losses`, and the
            loss at `chance`.
        """
        trained = self._fixed or list(self.config.tasks)
        was_training = model.training
        model.eval()
        choices: dict[str, object] = {}
        for name, rows_of_task in rows.items():
            if name in trained:
                continue
            losses = self._losses_of_candidates(model, name, trained, rows_of_task)
            if losses:
                choices[name] = self._choose(name, losses)
        model.train(was_training)
        return choices

    def _losses_of_candidates(
        self,
        model: nn.Module,
        name: str,
        trained: Sequence[str],
        rows: Mapping[str, Any],
    ) -> dict[str, float]:
        """Return the loss of a new task's rows with each trained task of equal specification.

        The result is empty if the config sets `like`.
        """
        tasks = self.config.tasks
        if self._like:
            return {}
        losses: dict[str, float] = {}
        for task in trained:
            if tasks[task] != tasks[name]:
                continue
            number = torch.full((len(rows["input_ids"]),), list(tasks).index(task))
            extras = {**(rows.get("extras") or {}), "task": number}
            losses[task] = float(model(**{**rows, "extras": extras}).loss)
        return losses

    def _choose(self, name: str, losses: Mapping[str, float]) -> dict[str, object]:
        """Start a task like the candidate with the lowest loss, if that is below the loss at chance."""
        best = min(losses, key=losses.__getitem__)
        chance = 1.0 if self.config.scaled_losses else self.config.tasks[name].chance_loss
        is_better = losses[best] < chance
        if is_better:
            self.start_like(name, best)
        return {
            "like": best if is_better else None,
            "losses": losses,
            "chance": chance,
        }

    # Training of the copy

    def attach(self, model: PreTrainedModel) -> PreTrainedModel:
        live = super().attach(model)
        self._freeze()
        return live

    def eval_only_modules(self) -> Iterable[nn.Module]:
        only_added_tasks_train = self._fixed is not None and not self._adapts_all
        if not self._copy or only_added_tasks_train:
            return self._copy
        copied = self._copy[0]
        return modules_outside(copied, trained_roots(copied, self.config.frozen))

    def learning_rate_scales(self) -> dict[str, float]:
        """Return factors on the learning rate of the backbone's weights, by the name of the graft's parameter."""
        scales: dict[str, float] = {}
        for name, _ in self.named_parameters():
            is_head = name.startswith("heads.")
            scales[name] = self.config.head_rate if is_head else self.config.module_rate
        return scales


def _extras(call: Call) -> Mapping[str, Any]:
    """Return the values of a batch: `task`, `parts` and `marks`, as `Heads` takes them."""
    return call.extras


def _norms(sites: Sites, layer: int) -> list[Site]:
    """Return the sites of a layer's norms; raise `RecipeError` if they are unknown."""
    norms = sites.norms(layer)
    if not norms:
        raise RecipeError(
            f"norm is true, but GraftLM can't locate the norms of a {sites.model_type} model: set norm to false, or "
            "list the norms of the family with graftlm.backbone.register_family or the key backbone.family."
        )
    return norms
