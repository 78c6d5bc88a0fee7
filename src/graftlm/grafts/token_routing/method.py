"""Token-level routing: LoRA experts mixed with new weights every k tokens, without gradients.

At token i, let e(i) be the embedding of the text that its route depends on (`routing_state.py`), and c_j the centroid
of expert j's examples. The weights are

    w(i) = policy(score(e(i), c_1), ..., score(e(i), c_E))                  (`policy.py`)

and every module that experts change returns W x + sum over j of w_j(i) s_j B_j A_j x   (`mixture.py`).

Shape suffixes: B rows, T tokens of this pass, E experts, M centroids, d embedding width. Weights have E + 1
entries; the last is the weight of the bare backbone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, Self, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from graftlm.backbone import Backbone, Call, Site, Tap, may_read
from graftlm.errors import ArtifactError, GraftError, RecipeError
from graftlm.grafts.base import (
    FitsOnText,
    Graft,
    GraftConfig,
    HasTensors,
    ReadsPeft,
    Trace,
    Traceable,
    TrainsOnSets,
    check_tensors,
)
from graftlm.grafts.exports import ChoosesByPrompt, Exportable, ExportsLowRank, LowRankUpdate
from graftlm.grafts.sizes import HasSizes, Sizes
from graftlm.grafts.token_routing.adapters import read_adapter
from graftlm.grafts.token_routing.config import ExpertConfig, TokenRoutingConfig
from graftlm.grafts.token_routing.embedders import PROBE, Embedder, load_embedder
from graftlm.grafts.token_routing.expert_sources import read_expert, restore_factors, saved_factors
from graftlm.grafts.token_routing.expert_store import ExpertStore
from graftlm.grafts.token_routing.experts import Factors, rank_sizes, write_adapter
from graftlm.grafts.token_routing.merging import merge_experts
from graftlm.grafts.token_routing.mixture import Projection, RouteWeights
from graftlm.grafts.token_routing.policy import ScoredCentroids, best_scores, expert_weights
from graftlm.grafts.token_routing.projections import (
    count_stored,
    low_rank_updates,
    projections_in_memory,
    stored_experts,
    stored_projections,
)
from graftlm.grafts.token_routing.recompute import Recompute
from graftlm.grafts.token_routing.router import (
    ROUTER_TENSORS,
    centre_of,
    check_router,
    direction_problem,
    fit_router,
    needed_tensors,
)
from graftlm.grafts.token_routing.routing_state import (
    RouteSpans,
    RoutingCacheLayer,
    RunningSum,
    cache_owner,
    check_inputs,
    repeat_weights,
    route_spans,
    routing_layer,
)
from graftlm.grafts.token_routing.set_training import experts_of_sets, notes_on_training

BARE = "none"
"""The label of the bare backbone in traces."""


class TokenRouting(
    Graft,
    FitsOnText,
    TrainsOnSets,
    Traceable,
    Exportable,
    ExportsLowRank,
    ChoosesByPrompt,
    HasTensors,
    HasSizes,
    ReadsPeft,
):
    """LoRA experts, their centroids, and the routes between them.

    Args:
        config: configuration; the graft keeps a copy with the hashes of the adapters.
        backbone: the backbone.

    Raises:
        ArtifactError: an adapter is damaged, pickled, not plain LoRA, or has changed since the graft was saved.
        WrongBackboneError: an adapter belongs to another backbone.
        RecipeError: factors of different ranks are to be combined with `combination: linear`.
        GraftError: the backbone lacks a target module of a new expert, or the hidden states to embed; or an expert
            changes a module that is neither linear nor an embedding, or that also reads relative positions.
        TapError: a new expert has the target `ffn`, but an FFN is a mixture of experts.
    """

    Config: ClassVar[type[GraftConfig]] = TokenRoutingConfig
    accepts_added_tokens: ClassVar[bool] = False
    has_decode_state = True
    takes_weight = True
    label = "token routing"
    several_adapters: ClassVar[str] = (
        "for several adapters: list each under experts, with examples of what it is for (texts or sources)"
    )
    config: TokenRoutingConfig
    centroids: Tensor
    probe: Tensor
    whitener: Tensor
    variance: Tensor
    owners: Tensor

    def __init__(self, config: TokenRoutingConfig, backbone: Backbone) -> None:
        super().__init__()
        self.names = list(config.experts)
        self._backbone = [backbone]  # a list, so that the embedder is not registered as a submodule
        self._embedder: Embedder | None = None
        if config.embedder.name == "backbone":
            self._embedder = load_embedder(config.embedder, backbone)
        self._embedder_checked = False
        self._scored: ScoredCentroids | None = None
        self._causal = backbone.sites.family.causal
        self._recomputation = Recompute(backbone)
        self.mixtures = nn.ModuleDict()
        self.store: ExpertStore | None = None
        self.config = self._read_experts(config)
        self.register_buffer("_expert_of_set", torch.zeros(0, dtype=torch.long), persistent=False)
        for name in ROUTER_TENSORS:
            self.register_buffer(name, torch.zeros(0, device=backbone.device), persistent=False)

    @classmethod
    def sizes(cls, config: GraftConfig, backbone: Backbone) -> Sizes:
        return rank_sizes(cast("TokenRoutingConfig", config), backbone)

    def _read_experts(self, config: TokenRoutingConfig) -> TokenRoutingConfig:
        """Read the experts, build their projections, and return the config with the hashes of the adapters."""
        backbone = self._backbone[0]
        digests: dict[str, str | None] = dict.fromkeys(config.experts)
        if config.experts_in_memory is not None:
            stored = stored_experts(config, backbone)
            digests |= {expert.name: expert.sha256 for expert in stored.values()}
            self.store = ExpertStore(stored, config.experts_in_memory, backbone)
            self._set_mixtures(stored_projections(config, backbone, self.store))
        else:
            factors: dict[str, dict[str, Factors]] = {}
            for name, expert in config.experts.items():
                factors[name], digests[name] = read_expert(name, expert, backbone, is_bundled=config.bundle)
            self._set_mixtures(projections_in_memory(config, backbone, factors))
        experts = {name: expert.model_copy(update={"sha256": digests[name]}) for name, expert in config.experts.items()}
        return config.model_copy(update={"experts": experts})

    @property
    def stored_parameters(self) -> int:
        return 0 if self.store is None else count_stored(self._mixtures_by_path())

    def _set_mixtures(self, projections: Mapping[str, Projection]) -> None:
        """Use the projections of the experts, by module path."""
        self.mixtures.clear()
        for path, projection in projections.items():
            self.mixtures[path.replace(".", "/")] = projection

    def _mixtures_by_path(self) -> Iterator[tuple[str, Projection]]:
        for key, mixture in self.mixtures.items():
            assert isinstance(mixture, Projection)
            yield key.replace("/", "."), mixture

    @classmethod
    def adapter_section(cls, name: str, folder: Path) -> dict[str, object]:
        expert = ExpertConfig(path=str(folder))
        config = TokenRoutingConfig(experts={name: expert})
        read_adapter(name, expert, None)
        return {"kind": config.kind, **config.model_dump(mode="json", exclude_defaults=True)}

    # One pass

    @property
    def decodes_in_one_graph(self) -> bool:
        reads_no_text = self.config.reads == "prompt" or self.config.embedder.name == "backbone"
        return reads_no_text and not self._uses_newest_weights and self.store is None

    def taps(self) -> list[Tap]:
        model = self._backbone[0].model
        body = set(model.base_model.modules())
        taps = []
        for path, mixture in self._mixtures_by_path():
            # With `cache: recompute`, modules after the body are not run again for earlier tokens.
            is_in_body = model.get_submodule(path) in body
            key = self if is_in_body else (self, "head")
            tap = Tap(
                site=Site("module", path=path),
                when="after",
                act="add",
                function=partial(self._add, mixture, key),
                takes_selection=True,
            )
            taps.append(tap)
        if self._uses_newest_weights:
            taps.append(self._recomputation.tap())
        return taps

    def _add(
        self,
        mixture: Projection,
        key: Hashable,
        call: Call,
        inputs: Tensor,
        outputs: Tensor,
    ) -> Tensor | None:
        """Return the weighted sum of the updates at one module; None if no expert acts."""
        routes: RouteWeights | None = call.scratch.get(key)
        if routes is None:
            return None
        if key is not self and call.selection is not None and call.selection.is_applied:
            assert call.input_ids is not None, "`prepare` refuses embeddings"
            weights_BTE = routes.weights.expand(*call.input_ids.shape, -1)
            routes = RouteWeights(call.at_head(weights_BTE, inputs.shape[1]), routes.active, routes.held)
        delta = mixture(inputs, routes)
        if delta is None:
            return None
        return delta.to(outputs.dtype)

    def prepare(self, call: Call) -> None:
        forced_B1E = self._recomputation.forced_weights()
        if forced_B1E is not None:
            call.scratch[self] = self._routes(forced_B1E)
            return
        check_inputs(call)
        layer = routing_layer(call, self, self._backbone[0].sites.n_layers)
        state = None if layer is None else layer.state
        spans = route_spans(call, self.config, state, causal=self._causal)
        weights_BTE = self._token_weights(call, spans, layer)
        routes = self._routes(weights_BTE)
        if layer is not None:
            layer.append(spans, weights_BTE)
        call.scratch[self, "weights"] = weights_BTE
        # The head is not run again, so it always applies each token's own weights.
        call.scratch[self, "head"] = routes
        if self._uses_newest_weights and not call.training:
            newest_B1E = self._recomputation(call, spans, weights_BTE, state)
            routes = self._routes(newest_B1E)
        call.scratch[self] = routes

    @property
    def _uses_newest_weights(self) -> bool:
        """Whether the keys and values of all tokens are those of the newest weights."""
        return self.config.cache == "recompute" and self._causal

    def _routes(self, weights_BTE: Tensor) -> RouteWeights:
        may_be_zero = self.config.top is not None or self.config.threshold is not None
        sparse = self.store is not None or (may_be_zero and may_read(weights_BTE))
        routes = RouteWeights.of(weights_BTE[..., :-1], sparse=sparse)
        if self.store is not None:
            routes.held = self.store.hold(routes.active)
        return routes

    def _token_weights(
        self,
        call: Call,
        spans: RouteSpans,
        layer: RoutingCacheLayer | None,
    ) -> Tensor:
        """Return the weights of every token, (B, T, E + 1); in training, 1 for the expert of the row's set, if any."""
        text_set = call.extras.get("text_set")
        if not (call.training and len(self._expert_of_set) and isinstance(text_set, Tensor)):
            return self._weights_by_text(call, spans, layer)
        set_B = text_set.to(spans.end.device)
        has_set_B = set_B >= 0
        expert_B = self._expert_of_set.to(set_B.device)[set_B.clamp(min=0)]
        own_BE = nn.functional.one_hot(expert_B, len(self.names) + 1).float()
        own_BTE = own_BE[:, None].expand(*spans.end.shape, -1)
        if may_read(has_set_B) and has_set_B.all():
            return own_BTE
        return torch.where(has_set_B[:, None, None], own_BTE, self._weights_by_text(call, spans, layer))

    def _weights_by_text(
        self,
        call: Call,
        spans: RouteSpans,
        layer: RoutingCacheLayer | None,
    ) -> Tensor:
        """Return the weights of every token, (B, T, E + 1): those computed at the end of its span."""
        fixed = self._fixed_weights()
        if fixed is None and call.training and len(self.names) == 1:
            fixed = [1.0]
        if fixed is not None:
            return repeat_weights(fixed, spans.end)
        running_sum = None if layer is None else layer.running_sum
        new_BTE = self._updated_weights(call, spans, running_sum)
        if layer is None or layer.state is None:
            last_B1E = torch.zeros_like(new_BTE[:, :1])
        else:
            last_B1E = layer.state.weights[:, -1:]
        weights = torch.cat([last_B1E, new_BTE], dim=1)
        columns = spans.columns[..., None].expand(-1, -1, weights.shape[-1])
        return weights.gather(1, columns)

    def _updated_weights(self, call: Call, spans: RouteSpans, running_sum: RunningSum | None) -> Tensor:
        """Return new weights at the ends of spans, (B, T, E + 1); in training, 1 for the nearest expert."""
        updates_BT = spans.updates
        if may_read(updates_BT) and not updates_BT.any():
            return torch.zeros(*updates_BT.shape, len(self.names) + 1, device=updates_BT.device)
        experts = len(self.names)
        if not len(self.centroids):
            self._fit_to_config()
        scores = self._need_embedder().scores(call, spans, running_sum, self._scores)
        if call.training:
            return nn.functional.one_hot(scores.argmax(-1), experts + 1).to(scores.dtype)
        return expert_weights(scores, self.config)

    @torch.compiler.disable(recursive=True)
    def _fit_to_config(self) -> None:
        self.fit({})

    def _scores(self, vectors: Tensor) -> Tensor:
        """Return the score of each expert, (..., E), for vectors (..., d)."""
        assert self._scored is not None, "`_updated_weights` computes absent centroids"
        scores = self._scored.scores(vectors)
        if self.config.embedder.centroids == 1:
            return scores
        return best_scores(scores, self.owners, len(self.names))

    def _fixed_weights(self) -> list[float] | None:
        """Return the weights of the experts if they are the same for all texts, otherwise None."""
        if self.config.fixed is not None:
            return [self.config.fixed.get(name, 0.0) for name in self.names]
        if len(self.names) == 1 and self.config.threshold is None:
            return [1.0]
        return None

    def cache_trace(self, cache: Cache) -> Trace | None:
        indices = getattr(cache, "_graft_slots", {}).get(cache_owner(self))
        if indices is None:
            return None
        layer = cache.layers[indices[0]]
        if not isinstance(layer, RoutingCacheLayer) or layer.state is None:
            return None
        return Trace([*self.names, BARE], layer.state.weights)

    def observe(self, call: Call) -> dict[str, Tensor]:
        """Return the mean weight of each expert over the real tokens.

        Returns:
            `weight_<expert>`, (1,), for each expert, and `weight_none` for the bare backbone.
        """
        weights_NE = call.scratch[self, "weights"].flatten(0, 1)
        if call.token_mask is not None:
            weights_NE = weights_NE[call.token_mask.flatten()]
        means = weights_NE.mean(0).split(1)
        return {f"weight_{name}": mean for name, mean in zip([*self.names, BARE], means, strict=True)}

    def train_on_sets(self, sets: Sequence[str]) -> list[str]:
        numbers = experts_of_sets(self.config, sets)
        self._expert_of_set = torch.tensor(numbers, dtype=torch.long, device=self._backbone[0].device)
        return notes_on_training(self.config, sets)

    # The centroids

    @property
    def learns_from_prompts(self) -> bool:
        return self.config.reads == "prompt"

    def sources(self) -> Mapping[str, Sequence[Mapping[str, object]]]:
        sources = {}
        for name, expert in self.config.experts.items():
            reads_new_text = expert.is_new and not expert.texts
            if expert.sources or reads_new_text:
                sources[name] = expert.sources
        return sources

    def check_examples(self, names: Collection[str]) -> None:
        if self._fixed_weights() is not None:
            return
        for name, expert in self.config.experts.items():
            if not expert.texts and name not in names:
                raise RecipeError(
                    f"The expert {name} has no examples, so it has no centroid: give some under its texts or sources, "
                    "or give all experts the same weights for every text (fixed)."
                )

    def fit(self, texts: Mapping[str, Sequence[str]]) -> list[str]:
        """Compute the centroids of every expert from the embeddings of its examples.

        Nothing is computed if the weights are the same for all texts.

        Args:
            texts: examples by expert, in addition to those of the config.

        Returns:
            What the user should know about the examples, as sentences.

        Raises:
            RecipeError: an expert has no examples.
            GraftError: a centroid has no direction, an expert has too few examples for the policy, or the examples do
                not differ although they are to be whitened.
            ArtifactError: the embedder is not the one that the saved centroids were made with.
        """
        if self._fixed_weights() is not None:
            return []
        self.check_examples([name for name, examples in texts.items() if examples])
        embedder = self._need_embedder()
        groups = []
        notes = []
        for name, expert in self.config.experts.items():
            examples = [*expert.texts, *texts.get(name, ())]
            groups.append(embedder.examples(examples))
            notes += [f"Expert {name}: {note}" for note in embedder.notes_on(examples)]
        router = fit_router(self.config, groups)
        router["probe"] = embedder.texts([PROBE])[0]
        self._set_router(router)
        return notes

    def _set_router(self, router: Mapping[str, Tensor]) -> None:
        """Use other routing tensors, on the device of the backbone."""
        device = self._backbone[0].device
        for name in ROUTER_TENSORS:
            if name in router:
                dtype = torch.long if name == "owners" else torch.float32
                setattr(self, name, router[name].to(device, dtype))
        if self.config.embedder.centroids == 1:
            self.owners = torch.arange(len(self.centroids), device=device)
        problem = direction_problem(self.config, self.centroids, self.owners)
        if problem:
            self.centroids = self.centroids[:0]
            raise GraftError(problem)
        self._prepare_centroids()

    def _prepare_centroids(self) -> None:
        """Compute what is the same for all vectors that are compared with the centroids."""
        self._scored = None
        if len(self.centroids):
            self._scored = ScoredCentroids.of(
                self.centroids,
                centre_of(self.config, self.centroids, self.owners),
                self.whitener if self.config.whitens else None,
                self.variance if self.config.policy == "discriminant" else None,
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        applied = super()._apply(fn, recurse)
        self._prepare_centroids()  # which are on another device now, or have another dtype
        if self.store is not None:
            self.store.clear()
        return applied

    def _need_embedder(self) -> Embedder:
        """Return the embedder, which is loaded and compared with the embedder of the centroids on first use."""
        if self._embedder is None:
            self._embedder = load_embedder(self.config.embedder, self._backbone[0])
        if not self._embedder_checked and len(self.probe):
            probe = self._embedder.texts([PROBE])[0].to(self.probe)
            if probe.shape != self.probe.shape or torch.cosine_similarity(probe, self.probe, dim=0) < 0.99:
                raise ArtifactError(
                    f"The embedder {self.config.embedder.name} gives other vectors than the one that the centroids "
                    "were made with: set embedder.name to that one, or build the graft again."
                )
        self._embedder_checked = True
        return self._embedder

    # The artifact and the exported model

    def merged(self, backbone: Backbone) -> PreTrainedModel:
        return merge_experts(backbone, self._mixtures_by_path(), self._need_fixed_weights())

    def low_rank_updates(self, backbone: Backbone) -> dict[str, LowRankUpdate]:
        return self._updates(self._need_fixed_weights())

    @property
    def is_fixed(self) -> bool:
        return self._fixed_weights() is not None

    def choices(self, backbone: Backbone) -> dict[str, dict[str, LowRankUpdate]]:
        config = self.config
        if config.reads != "prompt":
            problem = "its route follows the text (reads: all)"
        elif len(self.names) > 1 and config.top != 1:
            problem = "it mixes its experts (top is not 1)"
        elif config.embedder.name == "backbone":
            problem = "the backbone's states embed the prompt (embedder.name: backbone)"
        else:
            adapters = [name for name, expert in config.experts.items() if not expert.bare]
            return {name: self._updates([float(own == name) for own in self.names]) for name in adapters}
        raise ArtifactError(
            f"The graft does not choose one expert for a whole prompt by its text, since {problem}: serve it with "
            "GraftLM's own engine (graft serve without --engine)."
        )

    @torch.no_grad()
    def choose(self, prompt: Sequence[int]) -> str | None:
        ids = torch.tensor([list(prompt)], device=self._backbone[0].device)
        call = Call(input_ids=ids, prompt=torch.ones_like(ids, dtype=torch.bool))
        self.prepare(call)
        weights = call.scratch[self, "weights"][0, -1].tolist()
        best = max(range(len(weights)), key=weights.__getitem__)
        name = self.names[best] if best < len(self.names) else BARE
        return None if name == BARE or self.config.experts[name].bare else name

    def _updates(self, weights: Sequence[float]) -> dict[str, LowRankUpdate]:
        """Return the updates of the experts with the same weights for all texts."""
        if self.store is not None:
            self.store.hold([number for number, weight in enumerate(weights) if weight])
        return low_rank_updates(self._mixtures_by_path(), weights)

    def _need_fixed_weights(self) -> list[float]:
        """Return the weights of the experts.

        Raises:
            ArtifactError: they are not the same for all texts.
        """
        weights = self._fixed_weights()
        if weights is None:
            equal = f"{1 / len(self.names):.2g}"
            example = ", ".join(f"{name}: {equal}" for name in self.names)
            raise ArtifactError(
                "The weights of the experts change with the text, but those of a plain model can't: fix them "
                f"(--set 'fixed={{{example}}}'), or serve the graft with graft serve."
            )
        return weights

    def factors(self, name: str) -> dict[str, Factors]:
        """Return the factors of one expert by module path.

        Args:
            name: name of the expert, which must be one of the config.
        """
        number = self.names.index(name)
        factors = {}
        for path, mixture in self._mixtures_by_path():
            if number in mixture.layout.experts:
                factors[path] = mixture.factors(number)
        return factors

    def write_adapter(self, name: str, folder: str | Path) -> Path:
        """Write one expert as a folder that PEFT reads.

        Args:
            name: name of the expert, which must be one of the config.
            folder: folder to write to; it is created if it does not exist.

        Returns:
            The folder.
        """
        return write_adapter(self.factors(name), Path(folder), self._backbone[0])

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that routes need, and the factors of new or bundled experts, by name.

        Centroids that do not exist yet are first computed from the examples of the config.

        Raises:
            RecipeError: an expert without centroids has no examples in the config.
            GraftError: the examples do not give usable centroids, as in `fit`.
        """
        if not len(self.centroids):
            self.fit({})  # computes the centroids from the examples of the config
        router = {name: getattr(self, name) for name in needed_tensors(self.config)}
        return router | saved_factors(self.config, self.factors)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        remaining = dict(tensors)
        router = {name: remaining.pop(name) for name in ROUTER_TENSORS if name in tensors}
        check_router(self.config, router)
        self._restore_bundled(remaining)
        own = saved_factors(self.config, self.factors)
        check_tensors(own, remaining)
        with torch.no_grad():
            for key, value in own.items():
                value.copy_(remaining[key])
        self._set_router(router)
        self._embedder_checked = False

    def _restore_bundled(self, tensors: Mapping[str, Tensor]) -> None:
        """Build the mixtures again with bundled experts whose folders no longer exist."""
        if self.store is not None:
            return
        factors = {name: self.factors(name) for name in self.names}
        if restore_factors(factors, tensors):
            self._set_mixtures(projections_in_memory(self.config, self._backbone[0], factors))
