"""Token-level routing: LoRA experts mixed with new weights every k tokens, without gradients.

At token i, let e(i) be the embedding of the text that its route depends on (`routing_state.py`), and c_j the centroid
of expert j's examples. The weights are

    w(i) = policy(score(e(i), c_1), ..., score(e(i), c_E))                  (`policy.py`)

and every module that experts change returns W x + sum over j of w_j(i) s_j B_j A_j x   (`mixture.py`).

Shape suffixes: B rows, T tokens of this pass, E experts, M centroids, d embedding width. Weights have E + 1
entries, the last being the bare backbone's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.pytorch_utils import Conv1D

from graftlm.backbone import Backbone, Call, Site, Tap, may_read
from graftlm.errors import ArtifactError, GraftError, RecipeError
from graftlm.grafts.base import (
    Exportable,
    FitsOnText,
    Graft,
    GraftConfig,
    HasTensors,
    ReadsPeft,
    Trace,
    Traceable,
    check_tensors,
)
from graftlm.grafts.token_routing.config import ExpertConfig, TokenRoutingConfig
from graftlm.grafts.token_routing.embedders import PROBE, Embedder, load_embedder
from graftlm.grafts.token_routing.experts import ExpertTarget, Factors, new_factors, read_adapter, write_adapter
from graftlm.grafts.token_routing.mixture import MixedProjection, RouteWeights
from graftlm.grafts.token_routing.policy import best_scores, cluster, expert_weights, fit_whitener, scores_of
from graftlm.grafts.token_routing.routing_state import (
    Recompute,
    RouteSpans,
    RoutingCacheLayer,
    RoutingState,
    RunningSum,
    cache_owner,
    route_spans,
    routing_layer,
)

_ROUTER = ("centroids", "probe", "whitener", "variance", "owners")
BARE = "none"  # the label of the bare backbone in traces


class TokenRouting(Graft, FitsOnText, Traceable, Exportable, HasTensors, ReadsPeft):
    """LoRA experts, their centroids, and the routes between them; its config is a copy with the adapters' hashes.

    Raises ArtifactError if an adapter is damaged, pickled, or not plain LoRA, and WrongBackboneError if an adapter
    belongs to another backbone, and GraftError if the backbone lacks a target module of a new expert, or the hidden
    states to embed.
    """

    Config: ClassVar[type[GraftConfig]] = TokenRoutingConfig
    label = "token routing"
    config: TokenRoutingConfig
    centroids: Tensor
    probe: Tensor
    whitener: Tensor
    variance: Tensor
    owners: Tensor

    def __init__(self, config: TokenRoutingConfig, backbone: Backbone) -> None:
        super().__init__()
        self.names = list(config.experts)
        self._backbone = [backbone]  # in a list, so that it is not registered as a submodule
        is_backbone = config.embedder.name == "backbone"
        self._embedder: Embedder | None = load_embedder(config.embedder, backbone) if is_backbone else None
        self._embedder_checked = False
        self._causal = backbone.sites.family.causal
        self._recompute = Recompute(backbone)
        experts, factors = {}, {}
        for name, expert in config.experts.items():
            if expert.path is None:
                factors[name], digest = new_factors(name, expert, backbone), None
            elif config.bundle and expert.sha256 is not None and not Path(expert.path).expanduser().exists():
                factors[name], digest = {}, expert.sha256  # `load_tensors` restores its factors
            else:
                factors[name], digest = read_adapter(name, expert, backbone)
            experts[name] = expert.model_copy(update={"sha256": digest})
        self.config = config.model_copy(update={"experts": experts})
        self.mixtures = nn.ModuleDict()
        self._build_mixtures(factors)
        for name in _ROUTER:
            self.register_buffer(name, torch.zeros(0, device=backbone.device), persistent=False)

    def _build_mixtures(self, factors: Mapping[str, Mapping[str, Factors]]) -> None:
        """Build a mixture for every module that an expert changes, from factors by expert and module path."""
        backbone, combination = self._backbone[0], self.config.combination
        trained = frozenset(n for n, name in enumerate(self.names) if self.config.experts[name].path is None)
        for path, module in backbone.model.named_modules():
            own = {
                number: _placed(factors[name][path], backbone)
                for number, name in enumerate(self.names)
                if path in factors[name]
            }
            ranks = sorted({len(expert.a) for expert in own.values()})
            if combination == "linear" and len(ranks) > 1:
                raise RecipeError(
                    f"combination: linear sums factors of equal rank, but at {path} they have the ranks "
                    f"{', '.join(map(str, ranks))}: use experts of one rank, or combination: exact."
                )
            if own and backbone.sites.reads_positions(path):
                raise GraftError(
                    f"An expert changes {path}, which in a {backbone.sites.model_type} model also reads relative "
                    "positions without a route: use experts of other modules, such as the target ffn."
                )
            if own:
                mixture = MixedProjection(own, ExpertTarget.of(module, path), combination, trained)
                self.mixtures[path.replace(".", "/")] = mixture

    def _mixtures_by_path(self) -> Iterator[tuple[str, MixedProjection]]:
        for key, mixture in self.mixtures.items():
            assert isinstance(mixture, MixedProjection)
            yield key.replace("/", "."), mixture

    @classmethod
    def adapter_section(cls, name: str, folder: Path) -> dict[str, Any]:
        config = TokenRoutingConfig(experts={name: ExpertConfig(path=str(folder))})
        read_adapter(name, config.experts[name], None)
        return {"kind": config.kind, **config.model_dump(mode="json", exclude_defaults=True)}

    # One pass

    def taps(self) -> list[Tap]:
        model = self._backbone[0].model
        body = set(model.base_model.modules())
        taps = []
        for path, mixture in self._mixtures_by_path():
            # `cache: recompute` does not run what is behind the body again for earlier tokens.
            key = self if model.get_submodule(path) in body else (self, "head")
            taps.append(Tap(Site("module", path=path), "after", "add", partial(self._add, mixture, key)))
        return [*taps, self._recompute.tap()] if self._recomputes else taps

    def _add(self, mixture: MixedProjection, key: Any, call: Call, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        routes: RouteWeights | None = call.scratch.get(key)
        delta = None if routes is None else mixture(inputs, routes)
        return None if delta is None else delta.to(outputs.dtype)

    def prepare(self, call: Call) -> None:
        forced = self._recompute.forced_weights()
        if forced is not None:
            call.scratch[self] = self._routes(forced)
            return
        if call.input_ids is None:
            raise GraftError("Token routing needs token ids, and the model was given embeddings: pass input_ids.")
        if not call.input_ids.shape[1]:
            raise GraftError("Token routing was given an empty sequence: pass at least one token.")
        layer = routing_layer(call, self, self._backbone[0].sites.n_layers)
        state, running_sum = (None, None) if layer is None else (layer.state, layer.running_sum)
        spans = route_spans(call, self.config, state, causal=self._causal)
        weights_BTE = self._token_weights(call, spans, state, running_sum)
        if layer is not None:
            layer.append(spans, weights_BTE)
        call.scratch[self] = call.scratch[self, "head"] = self._routes(weights_BTE)
        if self._recomputes and not call.training:
            weights_BTE = self._recompute(call, spans, weights_BTE, state)
            call.scratch[self] = self._routes(weights_BTE)
        call.scratch[self, "weights"] = weights_BTE

    @property
    def _recomputes(self) -> bool:
        return self.config.cache == "recompute" and self._causal

    def _routes(self, weights_BTE: Tensor) -> RouteWeights:
        sparse = (self.config.top is not None or self.config.threshold is not None) and may_read(weights_BTE)
        return RouteWeights.of(weights_BTE[..., :-1], sparse=sparse)

    def _token_weights(
        self, call: Call, spans: RouteSpans, state: RoutingState | None, running_sum: RunningSum | None
    ) -> Tensor:
        """(B, T, E + 1) the weights of every token: those computed at the end of its span."""
        new_BTE = self._updated_weights(call, spans, running_sum)
        last_B1E = torch.zeros_like(new_BTE[:, :1]) if state is None else state.weights[:, -1:]
        weights = torch.cat([last_B1E, new_BTE], dim=1)
        return weights.gather(1, spans.columns[..., None].expand(-1, -1, weights.shape[-1]))

    def _updated_weights(self, call: Call, spans: RouteSpans, running_sum: RunningSum | None) -> Tensor:
        """(B, T, E + 1) new weights at the ends of spans; in training, 1 for the nearest expert."""
        updates_BT, experts = spans.updates, len(self.names)
        if may_read(updates_BT) and not updates_BT.any():
            return torch.zeros(*updates_BT.shape, experts + 1, device=updates_BT.device)
        fixed = [1.0] if experts == 1 and call.training else self._fixed_weights()
        if fixed is not None:  # each filled on the device, as the copy of a list to a GPU would wait for it
            columns = [torch.full((1,), weight, device=updates_BT.device) for weight in (*fixed, 1 - sum(fixed))]
            return torch.cat(columns).expand(*updates_BT.shape, experts + 1)
        if not len(self.centroids):
            self.fit({})
        vectors = self._need_embedder().prefixes(call, spans, running_sum)
        scores = self._scores(vectors)
        if call.training:
            return nn.functional.one_hot(scores.argmax(-1), experts + 1).to(scores.dtype)
        return expert_weights(scores, self.config)

    def _scores(self, vectors: Tensor) -> Tensor:
        """(..., E) each expert's score for vectors (..., d)."""
        whitener = self.whitener if self.config.whitens else None
        variance = self.variance if self.config.policy == "discriminant" else None
        scores = scores_of(self.centroids, vectors, self._centre(self.centroids), whitener, variance)
        return scores if self.config.embedder.centroids == 1 else best_scores(scores, self.owners, len(self.names))

    def _fixed_weights(self) -> list[float] | None:
        """The experts' weights, if they are the same for all texts."""
        if self.config.fixed is not None:
            return [self.config.fixed.get(name, 0.0) for name in self.names]
        return [1.0] if len(self.names) == 1 and self.config.threshold is None else None

    def cache_trace(self, cache: Cache) -> Trace | None:
        indices = getattr(cache, "_graft_slots", {}).get(cache_owner(self))
        layer = None if indices is None else cache.layers[indices[0]]
        state = layer.state if isinstance(layer, RoutingCacheLayer) else None
        return None if state is None else Trace([*self.names, BARE], state.weights)

    def observe(self, call: Call) -> dict[str, Tensor]:
        """`weights`: the mean over tokens for each expert, then for the bare backbone."""
        weights = call.scratch[self, "weights"].expand(-1, 1 if call.input_ids is None else call.input_ids.shape[1], -1)
        return {"weights": weights.flatten(0, 1).mean(0)}

    # The centroids

    def sources(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        return {name: expert.sources for name, expert in self.config.experts.items() if expert.sources}

    def fit(self, texts: Mapping[str, Sequence[str]]) -> None:
        """Set every expert's centroids from the embeddings of its examples: the given ones and those of the config.

        Raises RecipeError if an expert has no examples, and GraftError if a centroid has no direction, or the examples
        do not differ where they are to be whitened.
        """
        if self._fixed_weights() is not None:
            return
        embedder = self._need_embedder()
        groups = []
        for name, expert in self.config.experts.items():
            examples = [*expert.texts, *texts.get(name, ())]
            if not examples:
                raise RecipeError(
                    f"The expert {name} has no examples, so it has no centroid: give some under texts or sources."
                )
            groups.append(embedder.texts(examples))
        whitener, variance = self._fit_whitener(groups)
        clusters = [cluster(group, self.config.embedder.centroids) for group in groups]
        owners = torch.tensor([n for n, group in enumerate(clusters) for _ in group])
        router = {"centroids": torch.cat(clusters), "owners": owners, "probe": embedder.texts([PROBE])[0]}
        self._set_router(router | {"whitener": whitener, "variance": variance})

    def _fit_whitener(self, groups: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(K, d) and a t; no rows, which change no vector, where no vector is whitened."""
        for name, group in zip(self.names, groups, strict=True):
            if self.config.policy == "discriminant" and len(group) < 2:
                raise GraftError(
                    f"policy: discriminant needs several examples of each expert, but {name} has one: give it more, or "
                    "use policy: softmax."
                )
        if not self.config.whitens or (self.config.embedder.whiten is None and max(map(len, groups)) < 2):
            return groups[0].new_zeros(0, groups[0].shape[1]), groups[0].new_ones(())
        return fit_whitener(groups)

    def _set_router(self, router: Mapping[str, Tensor]) -> None:
        device = self._backbone[0].device
        for name in _ROUTER:
            if name in router:
                setattr(self, name, router[name].to(device, torch.long if name == "owners" else torch.float32))
        if self.config.embedder.centroids == 1:
            self.owners = torch.arange(len(self.centroids), device=device)
        if len(self.centroids):
            norms = (self.centroids - self._centre(self.centroids)).norm(dim=-1)
            for number, norm in zip(self.owners.tolist(), norms.tolist(), strict=True):
                if not norm > 1e-6:
                    name, self.centroids = self.names[number], self.centroids[:0]
                    raise GraftError(
                        f"The centroid of the expert {name} has no direction (its norm is {norm:.1g}): give it "
                        "examples that differ from those of the other experts."
                    )

    def _centre(self, centroids_Md: Tensor) -> Tensor:
        """(d,) the vector that is subtracted from all vectors: the mean over experts of their centroids' means."""
        embedder = self.config.embedder
        centred = embedder.name == "backbone" if embedder.centre is None else embedder.centre
        if not centred or len(self.names) < 2:
            return torch.zeros_like(centroids_Md[0])
        if embedder.centroids == 1:
            return centroids_Md.mean(0)
        own_EM = nn.functional.one_hot(self.owners, len(self.names)).T.to(centroids_Md.dtype)
        return (own_EM @ centroids_Md / own_EM.sum(1, keepdim=True)).mean(0)

    def _need_embedder(self) -> Embedder:
        """The embedder, loaded on first use and checked against the one that the centroids were made with."""
        if self._embedder is None:
            self._embedder = load_embedder(self.config.embedder, self._backbone[0])
        if not self._embedder_checked and len(self.probe):
            probe = self._embedder.texts([PROBE])[0].to(self.probe)
            if probe.shape != self.probe.shape or torch.cosine_similarity(probe, self.probe, dim=0) < 0.99:
                raise ArtifactError(
                    f"The embedder {self.config.embedder.name} is not the one that the centroids were made with: pass "
                    "that one (--set embedder.name=DIR), or build the graft again."
                )
        self._embedder_checked = True
        return self._embedder

    # The artefact and the exported model

    @torch.no_grad()
    def merged(self, backbone: Backbone) -> PreTrainedModel:
        weights = self._fixed_weights()
        if weights is None:
            example = ", ".join(f"{name}: {1 / len(self.names):.2g}" for name in self.names)
            raise ArtifactError(
                "The weights of the experts change with the text, and those of a plain model can't: fix them "
                f"(--set 'fixed={{{example}}}'), or serve the graft with graft serve."
            )
        model: Any = copy.deepcopy(backbone.model)
        routes = RouteWeights(torch.tensor([[weights]], device=backbone.device))
        for path, mixture in self._mixtures_by_path():
            module = model.get_submodule(path)
            if sum(getattr(other, "weight", None) is module.weight for other in model.modules()) > 1:
                raise ArtifactError(
                    f"An expert changes {path}, whose weight another module of the backbone shares, so a plain model "
                    "can't have one change alone: serve the graft with graft serve."
                )
            sizes = torch.arange(mixture.target.inputs, device=backbone.device)
            rows = sizes if mixture.target.is_embedding else torch.eye(len(sizes), device=backbone.device)
            change = mixture(rows[None], routes)[0] / mixture.target.scale  # (inputs, outputs)
            module.weight += change if isinstance(module, Conv1D | nn.Embedding) else change.T
        return model.eval()

    def factors(self, name: str) -> dict[str, Factors]:
        """One expert's factors by module path."""
        number = self.names.index(name)
        mixtures = self._mixtures_by_path()
        return {path: mixture.factors(number) for path, mixture in mixtures if number in mixture.layout.experts}

    def write_adapter(self, name: str, folder: str | Path) -> Path:
        """Write one expert as a folder that PEFT reads."""
        return write_adapter(self.factors(name), Path(folder), self._backbone[0])

    def tensors(self) -> dict[str, Tensor]:
        """What routes need, and the factors of new or bundled experts."""
        if not len(self.centroids):
            self.fit({})  # from the config's own examples
        return {name: getattr(self, name) for name in self._router_names()} | self._saved_factors()

    def _router_names(self) -> list[str]:
        """The names of the tensors that the config's routes need."""
        config = self.config
        needs = [True, True, config.whitens, config.policy == "discriminant", config.embedder.centroids != 1]
        return [name for name, need in zip(_ROUTER, needs, strict=True) if need]

    def _saved_factors(self) -> dict[str, Tensor]:
        tensors = {}
        for name, expert in self.config.experts.items():
            if self.config.bundle or expert.path is None:
                for path, factors in self.factors(name).items():
                    tensors |= {f"{name}.{path}.a": factors.a.detach(), f"{name}.{path}.b": factors.b.detach()}
                    tensors[f"{name}.{path}.scale"] = torch.tensor(float(factors.scale))
        return tensors

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        tensors = dict(tensors)
        router = {name: tensors.pop(name) for name in _ROUTER if name in tensors}
        self._check_router(router)
        self._restore_bundled(tensors)
        own = self._saved_factors()
        check_tensors(own, tensors)
        with torch.no_grad():
            for key, value in own.items():
                value.copy_(tensors[key])
        self._set_router(router)
        self._embedder_checked = False

    def _check_router(self, router: Mapping[str, Tensor]) -> None:
        """Raise `ArtifactError` unless the centroids fit the experts, and the other tensors fit the centroids."""
        experts, centroids = range(len(self.names)), router.get("centroids", torch.zeros(0))
        owners = router.get("owners", torch.arange(len(experts)))
        fits = router.keys() == set(self._router_names()) and len(centroids) in (0, len(owners))
        widths = {router[name].shape[-1] for name in ("centroids", "probe", "whitener") if name in router}
        if not fits or (len(centroids) and (len(widths) > 1 or set(owners.tolist()) != set(experts))):
            raise ArtifactError(
                "The graft's tensor file lacks centroids, probe or whitener, or has them for other experts: it is "
                "damaged or of another config; copy or build the graft again."
            )

    def _restore_bundled(self, tensors: Mapping[str, Tensor]) -> None:
        """Rebuild the mixtures with bundled experts whose folders no longer exist."""
        factors: dict[str, dict[str, Factors]] = {name: self.factors(name) for name in self.names}
        absent = [name for name, own in factors.items() if not own]
        for key in tensors:
            name, _, path = key.removesuffix(".a").partition(".")
            if name in absent and key.endswith(".a"):
                a, b, scale = (tensors.get(f"{name}.{path}.{part}", torch.zeros(0)) for part in ("a", "b", "scale"))
                factors[name][path] = Factors(a, b, float(scale) if scale.numel() == 1 else 1.0)
        if absent:
            self.mixtures.clear()
            self._build_mixtures(factors)


def _placed(factors: Factors, backbone: Backbone) -> Factors:
    """Factors on the backbone's device; in float32 on a backbone in half precision, as PEFT has them."""
    dtype = torch.promote_types(backbone.model.dtype, torch.float32)
    a, b = (tensor.detach().to(backbone.device, dtype) for tensor in (factors.a, factors.b))
    return Factors(a, b, factors.scale)
