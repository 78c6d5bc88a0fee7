"""The laws of `graftlm.testing` and further ones, for every example of a graft on every tiny backbone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from graftlm.backbone import Backbone, Site, Sites
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config, kinds
from graftlm.testing import GraftLaws, decoders_only, logits, randomise
from graftlm.testing.laws import DOMAIN, NEW_TOKENS, gradients
from laws import cover
from laws.examples import Example, backbone, examples
from laws.tools import FailingGraft, active_calls
from tiny import tiny_ids


class ExampleLaws(GraftLaws):
    """The laws of one example."""

    example: ClassVar[Example]

    def backbone(self, family: str) -> Backbone:
        return backbone(family)

    def renew_backbones(self) -> None:
        backbone.cache_clear()

    def exception(self, law: str, family: str) -> str | None:
        return self.example.exception(family, law)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Leave out most cases that are not asked for: collecting the matrix takes minutes, and slow ones seconds."""
        law = metafunc.function.__name__.removeprefix("test_")
        unwanted = [
            getattr(pytest.mark, mark) for mark in ("matrix", "slow") if not cover.is_wanted(metafunc.config, mark)
        ]
        families = [name for name in type(self).families if not any(mark in unwanted for mark in self._tier(law, name))]
        self.families = families or type(self).families[:1]  # one case, so that the law is collected and deselected
        super().pytest_generate_tests(metafunc)

    def _tier(self, law: str, family: str) -> list[Any]:
        decoders_only = getattr(getattr(self, f"test_{law}"), "decoders_only", False)
        return cover.marks(self.example, family, law, decoders_only=decoders_only)

    def param(self, law: str, family: str) -> Any:
        values = super().param(law, family)
        return pytest.param(family, marks=[*values.marks, *self._tier(law, family)])

    def test_exception_in_a_tap_ends_the_pass(self, family: str) -> None:
        with self._with_failing_graft(family, passes=1) as model:
            with pytest.raises(ZeroDivisionError):
                logits(model.eval(), tiny_ids())
            assert not active_calls(model), "a call stayed on the stack, with its cache"

    @decoders_only
    def test_exception_in_generate_leaves_no_bit(self, family: str) -> None:
        live = self.backbone(family).model
        bare = logits(live, tiny_ids())
        with pytest.raises(ZeroDivisionError), self._with_failing_graft(family, passes=4) as model:
            model.generate(tiny_ids(), max_new_tokens=8, min_new_tokens=8)
        assert torch.equal(logits(live, tiny_ids()), bare)

    def _with_failing_graft(self, family: str, passes: int) -> GraftedModel:
        graft = build_graft(graft_config(dict(self.config)), self.backbone(family))
        grafts = {"graft": graft, "failing": FailingGraft(passes)}
        return randomise(GraftedModel(self.backbone(family), grafts), self.spread)

    @decoders_only
    def test_recomputed_activations_change_no_gradient(self, family: str) -> None:
        batch = {"input_ids": tiny_ids(), "labels": tiny_ids(), "domain": DOMAIN}
        with self.attach(family) as model:
            expected = _seeded_gradients(model.train(), batch)
            model.enable_gradient_checkpointing()
            ffn = Sites(model.model).module(Site("ffn", -1))[0]  # layers before a graft's first need no second run
            runs: list[bool] = []
            with ffn.register_forward_pre_hook(lambda *_: runs.append(True)):
                actual = _seeded_gradients(model, batch)
        assert len(runs) == 2, "the last layer did not run again in the backward pass"
        assert actual.keys() == expected.keys()
        for key, gradient in expected.items():
            self.assert_close(family, actual[key], gradient, key, rtol=1e-5, atol=1e-7)

    @decoders_only
    def test_checkpointing_ends_with_the_graft(self, family: str) -> None:
        with self.attach(family, trained=False) as model:
            model.train().enable_gradient_checkpointing()
        assert not self.backbone(family).model.is_gradient_checkpointing

    @decoders_only
    def test_speculative_decoding_crops_the_cache(self, family: str) -> None:
        ids = tiny_ids(1, 6).repeat(1, 3)  # a repetitive prompt, so that its tokens are useful drafts
        lengths: list[int] = []
        with self.attach(family) as model:
            plain = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
            embedding = model.model.get_input_embeddings()
            with embedding.register_forward_hook(lambda _module, inputs, _output: lengths.append(inputs[0].shape[1])):
                drafted = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, prompt_lookup_num_tokens=3)
        assert plain.tolist() == drafted.tolist()
        assert lengths[0] > ids.shape[1] or max(lengths[1:]) > 1, "no draft was tried"

    @decoders_only
    def test_interleaved_generations_do_not_mix(self, family: str) -> None:
        starts = [tiny_ids(1, 9, seed=1), tiny_ids(1, 14, seed=2)]
        with self.attach(family) as model:
            alone = [list(islice(greedy(model, start), 3)) for start in starts]
            generations = [greedy(model, start) for start in starts]
            steps = [[next(generation) for generation in generations] for _ in range(3)]
        assert [list(tokens) for tokens in zip(*steps, strict=True)] == alone

    @decoders_only
    def test_threads_do_not_mix(self, family: str) -> None:
        starts = [tiny_ids(1, 9 + 4 * i, seed=i) for i in range(2)]
        decoding = {"do_sample": False, "min_new_tokens": NEW_TOKENS // 2, "max_new_tokens": NEW_TOKENS // 2}
        together: dict[int, Any] = {}
        with self.attach(family) as model:
            alone = [model.generate(start, **decoding).tolist() for start in starts]

            def run(number: int) -> None:
                together[number] = model.generate(starts[number], **decoding).tolist()

            threads = [threading.Thread(target=run, args=(number,)) for number in range(len(starts))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert [together.get(number) for number in range(len(starts))] == alone


def greedy(model: Any, ids: Tensor) -> Iterator[int]:
    """The tokens of greedy decoding of one row, one at each `next`."""
    cache = None
    while True:
        with torch.no_grad():
            output = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
        yield int(ids)


def _seeded_gradients(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients and both parts of the loss; the seed fixes the dropout of grafts that train with it."""
    outputs: list[Any] = []
    torch.manual_seed(0)
    with model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output)):
        grads = gradients(model, **batch)
    auxiliary = outputs[0].auxiliary_loss
    return grads | {"loss": outputs[0].lm_loss} | ({} if auxiliary is None else {"auxiliary loss": auxiliary})


def _law_class(example: Example) -> type[ExampleLaws]:
    fields = ("spread", "learning_rate", "start")
    attributes = {field: getattr(example, field) for field in fields} | {"example": example, "config": example.values()}
    attributes["families"] = example.backbones()
    return type(f"Test_{example}".replace("-", "_"), (ExampleLaws,), {**attributes, "__module__": __name__})


globals().update({law_class.__name__: law_class for law_class in map(_law_class, examples())})


def test_every_registered_kind_has_an_example() -> None:
    assert {example.kind for example in examples()} == set(kinds())
