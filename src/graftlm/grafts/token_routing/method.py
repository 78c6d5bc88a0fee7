"""Token-level routing: LoRA experts mixed anew every k tokens, without gradients.

At token i, with e(i) the embedding of the text that its route reads (see `reading.py`) and c_j the centroid of expert
j's examples, the weights are

    w(i) = policy(cos(e(i), c_1), ..., cos(e(i), c_E))                      (`policy.py`)

and every module that experts change gives  W x + sum over j of w_j(i) s_j B_j A_j x   (`mixture.py`).

Shape suffixes: B rows, T tokens of this pass, E experts, d the embedding's width. Weights have E + 1 entries, of which
the last is the bare backbone's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.errors import ArtifactError, GraftError, RecipeError
from graftlm.grafts.base import FitsOnText, Graft, GraftConfig, HasTensors, Trace, Traceable, check_tensors
from graftlm.grafts.token_routing.config import TokenRoutingConfig
from graftlm.grafts.token_routing.embedders import PROBE, Embedder, Memo, load_embedder
from graftlm.grafts.token_routing.experts import Factors, new_factors, place_of, read_adapter, write_adapter
from graftlm.grafts.token_routing.history import History, Rewriting
from graftlm.grafts.token_routing.mixture import Mixture, Routes
from graftlm.grafts.token_routing.policy import cosines, weigh
from graftlm.grafts.token_routing.reading import Before, Reading, read
from graftlm.grafts.token_routing.whitening import spread_of

BARE = "none"


class TokenRouting(Graft, FitsOnText, Traceable, HasTensors):
    """LoRA experts, their centroids, and the routes between them.

    Args:
        config: its config; the hashes of adapters are written into the graft's own copy.
        backbone: the one that the experts were trained on.

    Raises:
        ArtifactError: an adapter is damaged, pickled, or no plain LoRA.
        WrongBackboneError: an adapter is of another backbone.
        GraftError: the backbone lacks a module that a new expert is to change, or states that are to be embedded.
    """

    Config: ClassVar[type[GraftConfig]] = TokenRoutingConfig
    label = "token routing"
    config: TokenRoutingConfig
    centroids: Tensor
    probe: Tensor
    spread: Tensor

    def __init__(self, config: TokenRoutingConfig, backbone: Backbone) -> None:
        super().__init__()
        self.names = list(config.experts)
        self._backbone = [backbone]  # in a list, so that it is no module of this graft's
        own = config.embedder.name == "backbone"
        self._embedder: Embedder | None = load_embedder(config.embedder, backbone) if own else None
        self._checked = False  # whether the embedder is the one that the centroids were made with
        self._causal = backbone.sites.family.causal
        self._rewriting = Rewriting(backbone)
        experts, factors = {}, {}
        for name, expert in config.experts.items():
            found, digest = _factors_of(name, expert, config.bundle, backbone)
            factors[name], experts[name] = found, expert.model_copy(update={"sha256": digest})
        self.config = config.model_copy(update={"experts": experts})
        self.mixtures = nn.ModuleDict()
        self._mix(factors)
        for name in ("centroids", "probe", "spread"):
            self.register_buffer(name, torch.zeros(0, device=backbone.device), persistent=False)

    def _mix(self, factors: Mapping[str, Mapping[str, Factors]]) -> None:
        """Make a mixture at every module that an expert changes, from factors by expert and module path."""
        backbone = self._backbone[0]
        trained = frozenset(n for n, name in enumerate(self.names) if self.config.experts[name].path is None)
        for path, module in backbone.model.named_modules():
            own = {
                number: _moved(factors[name][path], backbone, trained=number in trained)
                for number, name in enumerate(self.names)
                if path in factors[name]
            }
            if own:
                if self.config.combination == "linear":
                    _check_ranks(path, own)
                self.mixtures[path.replace(".", "/")] = Mixture(
                    own, place_of(module, path), self.config.combination, trained
                )

    def _mixtures(self) -> Iterator[tuple[str, Mixture]]:
        for key, mixture in self.mixtures.items():
            assert isinstance(mixture, Mixture)
            yield key.replace("/", "."), mixture

    # One pass

    def taps(self) -> list[Tap]:
        taps = [Tap(Site("module", path=path), "after", "add", _apply(self, one)) for path, one in self._mixtures()]
        return taps + (self._rewriting.taps() if self._rewrites else [])

    def prepare(self, call: Call) -> None:
        forced = self._rewriting.forced()
        if forced is not None:
            call.scratch[self] = self._routes(forced)
            return
        if call.input_ids is None:
            raise GraftError("A routing reads token ids, and the model was given embeddings: pass input_ids.")
        if not call.input_ids.shape[1]:
            raise GraftError("A routing was given no token to route by: begin with at least one.")
        history = History.of(call, self, self._backbone[0].sites.n_layers)
        before = None if history is None else history.before()
        begins = history is not None and before is None
        reading = read(call, self.config, before, whole=call.training or not self._causal, begins=begins)
        memo = None if history is None else history.layer.memo
        weights_BTE = self._weigh(call, reading, before, memo)
        if history is not None:
            history.add(reading, weights_BTE)
        if self._rewrites and not call.training:
            weights_BTE = self._rewriting.rewrite(call, reading, weights_BTE, before)
        call.scratch[self] = self._routes(weights_BTE)
        call.scratch[self, "weights"] = weights_BTE

    @property
    def _rewrites(self) -> bool:
        return self.config.cache == "recompute" and self._causal

    def _routes(self, weights_BTE: Tensor) -> Routes:
        sparse = self.config.top is not None or self.config.threshold is not None
        return Routes.of(weights_BTE[..., :-1], sparse=sparse)

    def _weigh(self, call: Call, reading: Reading, before: Before | None, memo: Memo | None) -> Tensor:
        """(B, T, E + 1) the weights of every token of this pass; older ones than the pass are the last token's."""
        found_BTE = self._weights_of(call, reading, memo)
        last_B1E = torch.zeros_like(found_BTE[:, :1]) if before is None else before.weights[:, -1:]
        columns = (reading.until - reading.past).clamp(min=-1) + 1
        known = torch.cat([last_B1E, found_BTE], dim=1)
        return known.gather(1, columns[..., None].expand(-1, -1, known.shape[-1]))

    def _weights_of(self, call: Call, reading: Reading, memo: Memo | None) -> Tensor:
        """(B, T, E + 1) the weights of routes up to each token that any reads up to; in training, the nearest's."""
        wanted_BT, experts = reading.anew, len(self.names)
        if not wanted_BT.any():
            return torch.zeros(*wanted_BT.shape, experts + 1, device=wanted_BT.device)
        if experts == 1 and (self.config.threshold is None or call.training):
            return torch.tensor([1.0, 0.0], device=wanted_BT.device).expand(*wanted_BT.shape, 2)
        self._need_centroids()
        vectors = self._need_embedder().prefixes(call, reading, wanted_BT, self.config.window, memo)
        spread = self.spread if self.config.embedder.whiten else None
        found = cosines(vectors, self.centroids, self._centre(self.centroids), spread)
        if call.training:
            nearest = nn.functional.one_hot(found.argmax(-1), experts + 1)
            return nearest.to(found.dtype)
        return weigh(found, self.config)

    def cache_trace(self, cache: Cache) -> Trace | None:
        history = History.found(cache, self)
        before = None if history is None else history.before()
        return None if before is None else Trace([*self.names, BARE], before.weights)

    def observe(self, call: Call) -> dict[str, Tensor]:
        """`weights`: the mean over tokens, one value for each expert, and the bare backbone's."""
        weights = call.scratch[self, "weights"].expand(-1, 1 if call.input_ids is None else call.input_ids.shape[1], -1)
        return {"weights": weights.flatten(0, 1).mean(0)}

    # The centroids

    def sources(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        return {name: expert.sources for name, expert in self.config.experts.items() if expert.sources}

    def fit(self, texts: Mapping[str, Sequence[str]]) -> None:
        """Set every expert's centroid: the mean of the embeddings of its examples, those of the config among them.

        Raises:
            RecipeError: an expert has no examples.
            GraftError: examples have no direction, or two experts have the same.
        """
        if len(self.names) == 1 and self.config.threshold is None:
            return
        embedder = self._need_embedder()
        rows = []
        for name, expert in self.config.experts.items():
            examples = [*expert.texts, *texts.get(name, ())]
            if not examples:
                raise RecipeError(
                    f"The expert {name} has no examples, and without them there is no centroid to route by: give some "
                    "under texts or sources."
                )
            rows.append(embedder.texts(examples))
        spread = spread_of(rows) if self.config.embedder.whiten else None
        self._set_centroids(torch.stack([row.mean(0) for row in rows]), embedder.texts([PROBE])[0], spread)

    def _set_centroids(self, centroids_Ed: Tensor, probe_d: Tensor, spread_Kd: Tensor | None) -> None:
        device = self._backbone[0].device
        centroids_Ed = centroids_Ed.to(device, torch.float32)
        norms = (
            (centroids_Ed - self._centre(centroids_Ed)).norm(dim=-1)
            if len(centroids_Ed)
            else torch.ones(len(self.names))
        )
        for name, norm in zip(self.names, norms.tolist(), strict=True):
            if not norm > 1e-6:
                raise GraftError(
                    f"The centroid of the expert {name} has no direction (its norm is {norm:.1g}): give it examples of "
                    "other text than the others have."
                )
        self.centroids, self.probe = centroids_Ed, probe_d.to(device, torch.float32)
        if spread_Kd is not None:
            self.spread = spread_Kd.to(device, torch.float32)

    def _centre(self, centroids_Ed: Tensor) -> Tensor:
        """(d,) what is taken off every vector."""
        centred = self.config.embedder.centres and len(centroids_Ed) > 1
        return centroids_Ed.mean(0) if centred else torch.zeros_like(centroids_Ed[0])

    def _need_embedder(self) -> Embedder:
        if self._embedder is None:
            self._embedder = load_embedder(self.config.embedder, self._backbone[0])
        if not self._checked and len(self.probe):
            self._check_embedder(self._embedder)
        self._checked = True
        return self._embedder

    def _check_embedder(self, embedder: Embedder) -> None:
        """Raise unless the embedder gives what it gave when the centroids were made."""
        now = embedder.texts([PROBE])[0].to(self.probe)
        if now.shape != self.probe.shape or torch.cosine_similarity(now, self.probe, dim=0) < 0.99:
            raise ArtifactError(
                f"The embedder {self.config.embedder.name} is not the one that the centroids were made with: pass that "
                "one (--set embedder.name=DIR), or make the graft anew."
            )

    def _need_centroids(self) -> None:
        """Raise unless there is something to route by; a config's own examples are read now."""
        if not len(self.centroids):
            self.fit({})

    # The artefact

    def factors(self, name: str) -> dict[str, Factors]:
        """One expert's factors by module path."""
        number = self.names.index(name)
        return {path: one.factors(number) for path, one in self._mixtures() if number in one.layout.experts}

    def write_adapter(self, name: str, folder: str | Path) -> Path:
        """Write one expert as a folder that PEFT reads."""
        return write_adapter(self.factors(name), Path(folder), self._backbone[0].name)

    def tensors(self) -> dict[str, Tensor]:
        """Centroids, the spread where it is used, and the factors of experts that are trained here or bundled."""
        self._need_centroids()
        spread = {"spread": self.spread} if self.config.embedder.whiten else {}
        return {"centroids": self.centroids, "probe": self.probe} | spread | self._own_factors()

    def _own_factors(self) -> dict[str, Tensor]:
        found = {}
        for name, expert in self.config.experts.items():
            if self.config.bundle or expert.path is None:
                for path, one in self.factors(name).items():
                    found |= {f"{name}.{path}.a": one.a.detach(), f"{name}.{path}.b": one.b.detach()}
                    found[f"{name}.{path}.scale"] = torch.tensor(float(one.scale))
        return found

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        tensors = dict(tensors)
        saved = {name: tensors.pop(name) for name in ("centroids", "probe", "spread") if name in tensors}
        self._check_saved(saved)
        self._take_absent(tensors)
        own = self._own_factors()
        check_tensors(own, tensors)
        with torch.no_grad():
            for key, value in own.items():
                value.copy_(tensors[key])
        self._set_centroids(saved["centroids"], saved["probe"], saved.get("spread"))
        self._checked = False

    def _check_saved(self, saved: Mapping[str, Tensor]) -> None:
        """Raise `ArtifactError` unless centroids are of these experts, and what belongs to them has their width."""
        expected = {"centroids", "probe"} | ({"spread"} if self.config.embedder.whiten else set())
        count = len(saved.get("centroids", ()))
        fits = saved.keys() == expected and count in (0, len(self.names))
        if not fits or (count and len({one.shape[-1] for one in saved.values()}) > 1):
            raise ArtifactError(
                "The graft's tensor file lacks the centroids, or what belongs to them, or has them for other experts: "
                "it is damaged or of another config; copy or make the graft again."
            )

    def _take_absent(self, tensors: Mapping[str, Tensor]) -> None:
        """Mix anew with the bundled experts whose folders are gone."""
        factors: dict[str, dict[str, Factors]] = {name: self.factors(name) for name in self.names}
        absent = [name for name, found in factors.items() if not found]
        for name in absent:
            for key in tensors:
                if key.startswith(f"{name}.") and key.endswith(".a"):
                    path = key[len(name) + 1 : -2]
                    a, b, scale = (tensors.get(f"{name}.{path}.{part}", torch.zeros(0)) for part in ("a", "b", "scale"))
                    factors[name][path] = Factors(a, b, float(scale) if scale.numel() == 1 else 1.0)
        if absent:
            self.mixtures.clear()
            self._mix(factors)


def _factors_of(name: str, expert: Any, bundled: bool, backbone: Backbone) -> tuple[dict[str, Factors], str | None]:
    """An expert's factors by module path, none for a bundled one whose folder is gone, and its file's hash."""
    if expert.path is None:
        return new_factors(name, expert, backbone), None
    if bundled and expert.sha256 is not None and not Path(expert.path).expanduser().exists():
        return {}, expert.sha256
    return read_adapter(name, expert, backbone)


def _moved(factors: Factors, backbone: Backbone, *, trained: bool) -> Factors:
    """Factors where the backbone is, in its dtype; in single precision where they are trained."""
    dtype = torch.float32 if trained else backbone.model.dtype
    a, b = (one.detach().to(backbone.device, dtype) for one in (factors.a, factors.b))
    return Factors(a, b, factors.scale)


def _check_ranks(path: str, factors: Mapping[int, Factors]) -> None:
    ranks = sorted({one.a.shape[0] for one in factors.values()})
    if len(ranks) > 1:
        raise RecipeError(
            f"combination: linear sums factors, and at {path} they have the ranks {', '.join(map(str, ranks))}: take "
            "experts of one rank, or combination: exact."
        )


def _apply(graft: TokenRouting, mixture: Mixture) -> Callable[[Call, Tensor, Tensor], Tensor | None]:
    def add(call: Call, inputs: Tensor, outputs: Tensor) -> Tensor | None:
        routes: Routes | None = call.scratch.get(graft)
        delta = None if routes is None else mixture(inputs, routes)
        return None if delta is None else delta.to(outputs.dtype)

    return add
