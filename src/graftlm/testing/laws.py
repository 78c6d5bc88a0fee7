"""The laws of grafts as a test class: subclass `GraftLaws`, and every law runs on tiny models of several families.

Shape suffixes: B rows, T tokens, V the vocabulary.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.cache_utils import Cache
from transformers.masking_utils import create_masks_for_generate

from graftlm.backbone import Backbone, GenerationPrompt, Site, Sites
from graftlm.backbone.token_count import COUNT_KEY
from graftlm.errors import ArtifactError, RecipeError, WrongBackboneError
from graftlm.export import export_graft
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import Exportable, ExportsAdapter, Graft, HasHeads, build_graft, graft_config
from graftlm.store.artifact import graft_tensors, load_graft, save_graft
from graftlm.testing.tiny import ENCODERS, WINDOW, tiny_ids, tiny_model, tiny_tokenizer

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 5e-5}  # logits of about 5 in float32, added in another order
LONG = 130  # tokens, on the first family: more than any window or stride that a graft is likely to have
LENGTHS = (24, 13, 19)
NEW_TOKENS = 5
PASSES = 10
CHUNKS = (70, 1, 59)  # of a prompt of LONG tokens
DOMAIN = torch.tensor([0, 1])
DEVICE = torch.device("cuda", 0)  # the pretended accelerator's
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
ROUNDINGS = 8  # errors of half precision that may add up, each of the largest value times the dtype's precision
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "temperature": 1.5},
    "beam": {"do_sample": False, "num_beams": 3},
}


def decoders_only(law: Callable[..., None]) -> Callable[..., None]:
    """Mark a law that does not hold for encoders."""
    law.decoders_only = True
    return law


class GraftLaws:
    """The laws that every graft keeps, as tests; a subclass sets `config`.

    After every law, the backbone must be as it was before it, see `backbone_stays`.

    Attributes:
        config: the graft's config as a recipe writes it.
        families: the families of tiny models to test on, also in half precision: `llama+bfloat16`, `llama+float16`.
        spread: standard deviation of the noise that replaces training; larger breaks a law more visibly.
        learning_rate: a rate at which the loss on one batch falls within 8 steps.
        start: how much an untrained graft may change logits, for one that starts as the backbone but for rounding.
        exceptions: a law without `test_`, a family or `encoders` -> the reason why it is skipped.
    """

    config: ClassVar[Mapping[str, Any]]
    families: ClassVar[Sequence[str]] = ("llama", "gemma3", "gpt2", "bert", "llama+bfloat16")
    spread: ClassVar[float] = 0.2
    learning_rate: ClassVar[float] = 1e-2
    start: ClassVar[float] = 0.0
    exceptions: ClassVar[Mapping[str, str]] = {}

    def backbone(self, family: str) -> Backbone:
        """The backbone that stands for a family; the same object until `renew_backbones`."""
        return tiny_backbone_of(family)

    def renew_backbones(self) -> None:
        """Let `backbone` build fresh ones, since a law's test has changed one."""
        tiny_backbone_of.cache_clear()

    @pytest.fixture(autouse=True)
    def _backbone_stays(self, request: pytest.FixtureRequest) -> Iterator[None]:
        family = request.getfixturevalue("family") if "family" in request.fixturenames else self.families[0]
        with self.backbone_stays(family):
            yield

    @contextmanager
    def backbone_stays(self, family: str) -> Iterator[None]:
        """Fail where the block changes anything of the backbone; the laws after it get a fresh backbone."""
        before = state_of(self.backbone(family).model)
        try:
            yield
        finally:
            after = state_of(self.backbone(family).model)
            changed = [name for name in before if after[name] != before[name]]
            if changed:
                self.renew_backbones()
        assert not changed, f"the graft has changed the backbone's {', '.join(changed)}"

    def lengths(self, family: str) -> tuple[int, ...]:
        """The lengths of rows; the first family has a long one, for effects that begin late."""
        return (LONG if family == self.families[0] else LENGTHS[0], *LENGTHS[1:])

    def exception(self, law: str, family: str) -> str | None:
        """The reason why a law is skipped on a family; None where it holds."""
        keys = (law, family, "encoders" if is_encoder(family) else "")
        return next((f"{key}: {self.exceptions[key]}" for key in keys if key in self.exceptions), None)

    def param(self, law: str, family: str) -> Any:
        """A value of the parameter `family` with its marks."""
        reason = self.exception(law, family)
        return pytest.param(family, marks=[pytest.mark.skip(reason=reason)] if reason else [])

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "family" in metafunc.fixturenames:
            law = metafunc.function.__name__.removeprefix("test_")
            causal = getattr(metafunc.function, "decoders_only", False)
            names = [name for name in self.families if not (causal and is_encoder(name))]
            metafunc.parametrize("family", [self.param(law, name) for name in names])

    def attach(self, family: str, *, trained: bool = True) -> GraftedModel:
        """The graft on its backbone in eval mode, with noise in place of training; a `with` block detaches it."""
        model = attach_graft(self.backbone(family), self.config).eval()
        return randomise(model, self.spread) if trained else model

    def is_half(self, family: str) -> bool:
        """Whether the backbone computes in bfloat16 or float16."""
        return self.backbone(family).model.dtype.itemsize < 4

    def assert_close(self, family: str, actual: Tensor, expected: Tensor, name: str = "The two", **limits: Any) -> None:
        """Compare two computations of one thing; a backbone in half precision allows `ROUNDINGS` errors of its own."""
        actual, expected, limits = actual.float(), expected.float(), CLOSE | limits
        if self.is_half(family):
            precision = torch.finfo(self.backbone(family).model.dtype).eps
            limits = {"rtol": 0.0, "atol": ROUNDINGS * precision * expected.abs().max().item()}
        torch.testing.assert_close(actual, expected, **limits, msg=lambda text: f"{name}: {text}")

    def skip_copies(self, model: GraftedModel) -> None:
        """Skip a law on what a graft leaves to the backbone, for a graft that trains a copy of it."""
        if model.model is not model.backbone.model:
            pytest.skip("a graft that trains a copy of the model trains it in float32, and with its dropout")

    # 1: the backbone's weights, gradients, flags and modes never change

    def test_training_never_changes_the_backbone(self, family: str) -> None:
        own = tensors_of(self.backbone(family).model)
        before = digest(own)
        with self.attach(family) as model:
            parameters = list(model.train().trainable_parameters().values())
            optimiser = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
            for step in range(3):
                optimiser.zero_grad()
                model(tiny_ids(seed=step), labels=tiny_ids(seed=step), domain=DOMAIN).loss.backward()
                optimiser.step()
            assert all(tensor.grad is None for tensor in own.values())
            assert digest(own) == before

    def test_only_the_graft_trains_and_flags_and_modes_are_restored(self, family: str) -> None:
        live = self.backbone(family).model
        own, modules = list(live.parameters()), list(live.modules())
        flags = [parameter.requires_grad for parameter in own]
        for number, parameter in enumerate(own):
            parameter.requires_grad_(number % 2 == 0)
        live.base_model.train()
        try:
            with self.backbone_stays(family), attach_graft(self.backbone(family), self.config) as model:
                trainable = model.trainable_parameters().values()
                assert trainable
                assert {id(parameter) for parameter in own}.isdisjoint(map(id, trainable))
                assert not any(parameter.requires_grad for parameter in own)
                assert not any(module.training for module in modules)
        finally:
            live.eval()
            for parameter, flag in zip(own, flags, strict=True):
                parameter.requires_grad_(flag)

    def test_frozen_backbone_has_no_dropout_in_training_mode(self, family: str) -> None:
        with self.attach(family) as model:
            self.skip_copies(model)
            model.train().grafts.eval()  # without dropout of the graft's own
            first, second = (seeded_logits(model, tiny_ids(), seed) for seed in range(2))
            assert not any(module.training for module in self.backbone(family).model.modules())
        assert torch.equal(first, second)

    # 2 and 3: an untrained graft and a detached graft change no bit

    def test_untrained_graft_changes_no_bit(self, family: str) -> None:
        bare = logits(self.backbone(family).model, tiny_ids())
        with self.attach(family, trained=False) as model:
            if self.is_half(family):
                self.skip_copies(model)
            # The backbone's very same operations, and exact zeros are added; so wherever a law says equal.
            untrained = logits(model, tiny_ids())
        if self.start:
            return self.assert_close(family, untrained, bare, rtol=0.0, atol=self.start)
        assert torch.equal(untrained, bare)
        return None

    def test_untrained_graft_changes_nothing_in_training_mode(self, family: str) -> None:
        bare = logits(self.backbone(family).model, tiny_ids())
        with self.attach(family, trained=False) as model:
            self.skip_copies(model.train())
            # Other kernels may run where gradients are kept.
            self.assert_close(family, seeded_logits(model, tiny_ids()), bare)

    def test_logits_keep_the_backbones_dtype(self) -> None:
        backbone = Backbone.wrap(tiny_model(self.families[0], dtype=torch.bfloat16).bfloat16(), tiny_tokenizer())
        with attach_graft(backbone, self.config).eval() as model:
            self.skip_copies(model)
            assert logits(randomise(model, self.spread), tiny_ids()).dtype == torch.bfloat16

    def test_detached_graft_leaves_no_bit_and_can_be_attached_again(self, family: str) -> None:
        live = self.backbone(family).model
        bare = logits(live, tiny_ids())
        with self.attach(family) as model:
            graft, expected = model.grafts["graft"], logits(model, tiny_ids())
        change = (expected - bare).abs().max()
        assert change > 0.1, f"noise of {self.spread} changes logits by {change:.2g}, not by 0.1: raise `spread`"
        assert torch.equal(logits(live, tiny_ids()), bare)
        with GraftedModel(self.backbone(family), {"graft": graft}) as model:  # type: ignore[dict-item]
            assert torch.equal(logits(model.eval(), tiny_ids()), expected)

    def test_passes_leave_nothing_behind(self, family: str) -> None:
        ids = tiny_ids(length=5)
        with self.attach(family) as model:
            expected = logits(model, ids)
            for step in range(PASSES):
                logits(model, tiny_ids(1, length=2, seed=step))
            model.train()(ids, labels=ids, domain=DOMAIN).loss.backward()
            assert torch.equal(logits(model.eval(), ids), expected)

    def test_exception_in_a_pass_leaves_no_bit(self, family: str) -> None:
        live = self.backbone(family).model
        bare = logits(live, tiny_ids())
        with self.attach(family) as model:
            before = logits(model, tiny_ids())
            ffn = Sites(model.model).module(Site("ffn", 1))[0]
            with ffn.register_forward_pre_hook(lambda *_: 1 / 0), pytest.raises(ZeroDivisionError):
                logits(model, tiny_ids(seed=3))
            assert torch.equal(logits(model, tiny_ids()), before)
        assert torch.equal(logits(live, tiny_ids()), bare)

    # 4: the loss falls on one batch

    def test_loss_falls_on_one_batch(self, family: str) -> None:
        ids, losses = tiny_ids(), []
        with self.attach(family, trained=False) as model:
            optimiser = torch.optim.AdamW(model.train().trainable_parameters().values(), lr=self.learning_rate)
            for _ in range(8):
                output = model(ids, labels=ids, domain=DOMAIN)
                # An encoder sees the token that it predicts, so it learns to repeat the token.
                logits_V = output.logits.float().flatten(0, 1)
                loss = functional.cross_entropy(logits_V, ids.flatten()) if is_encoder(family) else output.loss
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.05, losses

    def test_every_parameter_gets_a_gradient(self, family: str) -> None:
        with self.attach(family) as model:
            parameters = model.train().trainable_parameters()
            for seed in range(4):
                torch.stack(list(losses_of(model, tiny_ids(seed=seed)))).sum().backward()
                grads = {name: parameter.grad for name, parameter in parameters.items()}
                dead = [name for name, grad in grads.items() if grad is None or not grad.count_nonzero()]
                if not dead:
                    break
        assert not dead, "these parameters are trained, but no loss reaches them"

    @decoders_only
    def test_losses_of_micro_batches_add_up(self, family: str) -> None:
        rows = [tiny_ids(1, length, seed=length)[0] for length in (24, 17)]
        ids, mask = pad_rows(rows, "right")
        labels, totals = ids.masked_fill(mask == 0, -100), torch.tensor([23.0 + 16, 24, 17])
        with self.attach(family) as model:
            expected = gradients(model, input_ids=ids, attention_mask=mask, labels=labels, domain=DOMAIN)
            parts = [
                gradients(model, input_ids=row[None], labels=row[None], domain=DOMAIN[i : i + 1], totals=totals)
                for i, row in enumerate(rows)
            ]
        assert expected
        for key, gradient in expected.items():
            total = torch.stack([part.get(key, torch.zeros_like(gradient)) for part in parts]).sum(0)
            self.assert_close(family, total, gradient, key, rtol=1e-3, atol=1e-5)

    # 5 and 11: a saved graft gives the same logits again, and a mistake gets one sentence

    def test_saved_graft_gives_the_same_logits(self, family: str, tmp_path: Path) -> None:
        backbone = self.backbone(family)
        with self.attach(family) as model:
            expected, graft = logits(model, tiny_ids()), model.grafts["graft"]
            save_graft(graft, backbone, tmp_path / "attached")  # type: ignore[arg-type]  # a ModuleDict holds modules
        save_graft(graft, backbone, tmp_path / "detached")  # type: ignore[arg-type]
        torch.manual_seed(1)  # what is drawn and not saved differs
        for saved in (load_graft(tmp_path / name, backbone) for name in ("attached", "detached")):
            with GraftedModel(backbone, {"graft": saved}) as model:
                assert torch.equal(logits(model.eval(), tiny_ids()), expected)

    def test_only_the_trained_tensors_are_saved(self, family: str) -> None:
        with self.attach(family) as model:
            saved = graft_tensors(model.grafts["graft"]).values()  # type: ignore[arg-type]
            trained = model.trainable_parameters().values()
            assert sum(tensor.numel() for tensor in saved) == sum(tensor.numel() for tensor in trained)

    def test_mistakes_get_one_sentence(self, tmp_path: Path) -> None:
        family = self.families[0]
        with self.attach(family) as model:
            folder = save_graft(model.grafts["graft"], self.backbone(family), tmp_path / "graft")  # type: ignore[arg-type]
        with pytest.raises(RecipeError, match="unknown key unheard_of"):
            graft_config({**self.config, "unheard_of": 1})
        other = Backbone.wrap(tiny_model("llama", seed=1, num_hidden_layers=4), tiny_tokenizer(), "other")
        with pytest.raises(WrongBackboneError, match=r"but other was given and its .* differ"):
            load_graft(folder, other)
        (folder / "graft.safetensors").write_bytes((folder / "graft.safetensors").read_bytes()[:-1])
        with pytest.raises(ArtifactError, match="copy it again, or train again"):
            load_graft(folder, self.backbone(family))

    # 12: an exported graft is a plain model with the same logits, or a sentence says why there is none

    def test_exported_graft_gives_the_same_logits(self, family: str, tmp_path: Path) -> None:
        backbone = self.backbone(family)
        with self.attach(family) as model:
            expected, graft = logits(model, tiny_ids()), model.grafts["graft"]
        assert isinstance(graft, Graft)
        try:
            folder = export_graft(graft, backbone, tmp_path / "model")
        except ArtifactError as error:
            refusal = str(error)
        else:
            has_code = any(folder.glob("*.py"))
            loader: Any = AutoModelForCausalLM if has_code else type(backbone.model)
            plain = loader.from_pretrained(folder, trust_remote_code=has_code)
            return self.assert_close(family, logits(plain, tiny_ids()), expected, rtol=1e-4, atol=1e-4)
        reasons = "is quantised|carries a PEFT adapter|change with the text|so the graft can't be exported"
        reasons = reasons if isinstance(graft, Exportable | ExportsAdapter) else "adds modules that"
        assert re.search(reasons, refusal), refusal
        return None

    # 6: cached decoding equals full recomputation

    @decoders_only
    @pytest.mark.parametrize("decoding", DECODING)
    def test_cached_decoding_equals_recomputation(self, family: str, decoding: str) -> None:
        ids, mask = prompts(LONG if decoding == "greedy" else 2 * WINDOW)
        with self.attach(family) as model:
            output = generate(model, ids, mask, **DECODING[decoding])
            steps = torch.stack(output.logits, 1)  # (running rows, NEW_TOKENS, V)
            rows = torch.arange(len(steps))[:, None].expand(-1, NEW_TOKENS)
            if decoding == "beam":
                rows = output.beam_indices[:, :NEW_TOKENS]
            expected = recompute(model, output.sequences, mask)
        self.assert_close(family, steps[rows, torch.arange(NEW_TOKENS)], expected, rtol=1e-4, atol=1e-4)

    @decoders_only
    def test_passes_on_one_cache_equal_one_pass(self, family: str) -> None:
        ids, mask = pad_rows([tiny_ids(1, length, seed=length)[0] for length in (LONG, LONG - 30)], "left")
        positions = positions_of(mask)
        outputs, end = [], 0
        with self.attach(family) as model, torch.no_grad():
            expected = logits(model, ids, attention_mask=mask, position_ids=positions)
            for chunk, position in zip(ids.split(CHUNKS, 1), positions.split(CHUNKS, 1), strict=True):
                end += chunk.shape[1]
                cache = outputs[-1].past_key_values if outputs else None
                outputs.append(model(chunk, mask[:, :end], position, past_key_values=cache, use_cache=True))
        actual = torch.cat([output.logits for output in outputs], 1)
        # Squared activations, as in Nemotron, make more of the rounding.
        self.assert_close(family, actual[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-3)

    # 7 and 8: no token sees a later one, and neither padding, other rows nor packed documents matter

    @decoders_only
    def test_no_logit_depends_on_a_later_token(self, family: str) -> None:
        with self.attach(family) as model:
            self.check_causality(family, model)

    @decoders_only
    def test_no_logit_depends_on_a_later_token_in_training(self, family: str) -> None:
        with self.attach(family) as model:
            self.check_causality(family, model.train())

    def test_no_row_depends_on_another_in_training(self, family: str) -> None:
        ids, other = tiny_ids(), tiny_ids(seed=1)
        other[0] = ids[0]
        with self.attach(family) as model:
            before, after = (seeded_logits(model.train(), rows) for rows in (ids, other))
        self.assert_close(family, after[0], before[0])

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_and_other_rows_change_nothing(self, family: str, side: str) -> None:
        lengths = self.lengths(family) if side == "left" else LENGTHS
        rows = [tiny_ids(1, length, seed=length)[0] for length in lengths]
        ids, mask = pad_rows(rows, side)
        first = 1 if "roberta" in family else 0  # RoBERTa counts from the padding token's id + 1
        positions = torch.where(mask == 1, positions_of(mask) + first, 0)
        with self.attach(family) as model:
            together = logits(model, ids, attention_mask=mask, position_ids=positions)
            for number, row in enumerate(rows):
                self.assert_close(family, together[number][mask[number] == 1], logits(model, row[None])[0])

    @decoders_only
    def test_packed_documents_do_not_meet(self, family: str) -> None:
        rows = [tiny_ids(1, length, seed=length)[0] for length in self.lengths(family)]
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
        with self.attach(family) as model:
            together = logits(model, torch.cat(rows)[None], position_ids=positions)[0]
            for row, part in zip(rows, together.split(self.lengths(family)), strict=True):
                self.assert_close(family, part, logits(model, row[None])[0])

    # 13: the host does not wait for an accelerator in a decode step

    @decoders_only
    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    def test_decode_step_waits_for_no_accelerator(self, family: str, cache: str) -> None:
        own = self.backbone(family)
        copied = Backbone.wrap(copy.deepcopy(own.model), own.tokenizer, family)  # it stays on the pretended device
        model = randomise(attach_graft(copied, self.config), self.spread).eval()
        assert not decode_step_waits(model, static=cache == "static")

    def check_causality(self, family: str, model: GraftedModel) -> None:
        """Fail unless another token changes the logits from its position on, and none before it."""
        length = self.lengths(family)[0]
        ids = tiny_ids(length=length)
        before = seeded_logits(model, ids)
        for position in (length - 1, length // 2):
            changed = ids.clone()
            changed[:, position] = (changed[:, position] + 1) % 250 + 4
            after = seeded_logits(model, changed)
            self.assert_close(family, after[:, :position], before[:, :position])
            difference = (after[:, position:] - before[:, position:]).abs().amax((0, 2))
            assert difference[:WINDOW].gt(1e-3).all(), "the change must show from its position on"


def is_encoder(family: str) -> bool:
    """Whether every token of a family sees all tokens."""
    return family.partition("+")[0] in ENCODERS


@functools.cache
def tiny_backbone_of(family: str) -> Backbone:
    """The tiny backbone of a family; one for the whole session, since no law may change it."""
    name, _, dtype = family.partition("+")
    model = tiny_model(name)
    return Backbone.wrap(model.to(getattr(torch, dtype)) if dtype else model, tiny_tokenizer(), family)


def attach_graft(backbone: Backbone, config: Mapping[str, Any]) -> GraftedModel:
    """A fresh, untrained graft on a backbone; its random values are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GraftedModel(backbone, {"graft": build_graft(graft_config(dict(config)), backbone)})


@torch.no_grad()
def randomise(model: GraftedModel, spread: float, seed: int = 1) -> GraftedModel:
    """Add noise to every tensor that trains, in place of training."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.trainable_parameters().values():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * spread)
    return model


@torch.no_grad()
def logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    """(B, T, V) of one pass without a cache."""
    return model(input_ids=ids, use_cache=False, **inputs).logits


def seeded_logits(model: GraftedModel, ids: Tensor, seed: int = 0) -> Tensor:
    """(B, T, V) of one pass in the model's mode; the seed fixes the dropout of grafts that train with it."""
    torch.manual_seed(seed)
    return model(ids, domain=DOMAIN).logits.detach()


def losses_of(model: GraftedModel, ids: Tensor) -> Iterator[Tensor]:
    """The training loss of one batch, and a loss of each task of a graft with heads."""
    yield model(ids, labels=ids, domain=DOMAIN).loss
    for graft in model.grafts.values():
        for task in range(len(graft.tasks()) if isinstance(graft, HasHeads) else 0):
            predictions = model.predict(ids, extras={"task": torch.full((len(ids),), task)})
            yield torch.stack([prediction.square().sum() for prediction in predictions]).sum()


def gradients(model: GraftedModel, **inputs: Any) -> dict[str, Tensor]:
    """The gradients of the training loss of one pass, without the parameters that it does not reach."""
    model.zero_grad(set_to_none=True)
    model(**inputs).loss.backward()
    grads = {name: p.grad.clone() for name, p in model.trainable_parameters().items() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return grads


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, the live objects."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and bytes, also of quantised tensors."""
    result = hashlib.sha256()
    for name, tensor in tensors.items():
        result.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        result.update(_bytes(tensor.detach()))
    return result.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    if type(tensor) is Tensor:
        return tensor.cpu().flatten().view(torch.uint8).numpy()
    torch.save(tensor, buffer := io.BytesIO())  # a quantised tensor has several parts
    return buffer.getvalue()


def state_of(model: Any) -> dict[str, Any]:
    """What a graft may not change for good, by its name: equal values mean an equal model."""
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    own = [(key, name, value) for key, module in modules.items() for name, value in vars(module).items()]
    return {
        "modules": {key: (module, type(module)) for key, module in modules.items()},
        "training modes": {key: module.training for key, module in modules.items()},
        "hooks": [(key, name, list(value.items())) for key, name, value in own if "hooks" in name and value],
        "methods": [(key, name, value) for key, name, value in own if callable(value)],
        "weights": digest(dict(sorted(tensors_of(model).items()))),  # their order is not kept by PEFT
        "tensors": {name: id(tensor) for name, tensor in tensors_of(model).items()},
        "gradients": [name for name, parameter in parameters.items() if parameter.grad is not None],
        "requires_grad flags": {name for name, parameter in parameters.items() if parameter.requires_grad},
        "config": model.config.to_dict(),
        "generation_config": model.generation_config.to_dict() if model.can_generate() else None,
    }


def pad_rows(rows: Iterable[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Rows of several lengths as one batch, and its mask; arbitrary tokens fill the padding."""
    rows = list(rows)
    length = max(len(row) for row in rows)
    ids = tiny_ids(len(rows), length, seed=99)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        columns = slice(length - len(row), None) if side == "left" else slice(None, len(row))
        ids[number, columns], mask[number, columns] = row, 1
    return ids, mask


def prompts(longest: int = 2 * WINDOW) -> tuple[Tensor, Tensor]:
    """Two prompts padded on the left, and their mask: one fills sliding windows, one is mostly padding."""
    return pad_rows([tiny_ids(1, length, seed=length)[0] for length in (longest, 5)], "left")


def generate(model: Any, ids: Tensor, mask: Tensor | None, **decoding: Any) -> Any:
    """Exactly `NEW_TOKENS` tokens for each row, with the logits that they were chosen by."""
    torch.manual_seed(7)
    fixed = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    outputs = {"return_dict_in_generate": True, "output_logits": True}
    return model.generate(ids, attention_mask=mask, **fixed, **outputs, **decoding)


def recompute(model: Any, sequences: Tensor, mask: Tensor) -> Tensor:
    """(rows, NEW_TOKENS, V): the logits that each new token was chosen by, from one pass over full sequences."""
    rows = len(sequences) // len(mask)
    new = torch.ones(len(sequences), NEW_TOKENS, dtype=mask.dtype)
    full = torch.cat([mask.repeat_interleave(rows, 0), new], 1)
    return logits(model, sequences, attention_mask=full, position_ids=positions_of(full))[:, -NEW_TOKENS - 1 : -1]


@torch.no_grad()
def decode_step_waits(model: GraftedModel, *, static: bool, rows: int = 20) -> list[str]:
    """The lines at which the second decode step of a padded batch waits, see `testing.accelerator`.

    The prompt is read on the CPU; the first step copies constants to the device.
    """
    ids, mask = pad_rows([tiny_ids(1, length, seed=length)[0] for length in range(5, 5 + rows)], "left")
    config, columns = model.config, ids.shape[1]
    cache = StaticCache(config=config, max_cache_len=columns + 4) if static else DynamicCache(config=config)
    with model._tap_hooks.generation(GenerationPrompt(columns)):
        model(ids, mask, positions_of(mask), past_key_values=cache, use_cache=True)
        with pretended_accelerator(model, cache) as move:
            new, full, lines = move(ids[:, :1]), move(mask), []
            for _ in range(2):
                full = torch.cat([full, torch.ones_like(new)], 1)
                positions = positions_of(full)[:, -1:]
                given: Any = full
                if static:  # as `generate` makes it
                    embedded = torch.empty(rows, 1, 1, device=DEVICE)
                    given = create_masks_for_generate(config, embedded, full, cache, positions)
                step = functools.partial(model, new, given, positions, past_key_values=cache, use_cache=True)
                lines = waits(step)
    return lines


def positions_of(mask: Tensor) -> Tensor:
    """(B, T) positions that count real tokens, as `generate` computes them."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


@contextmanager
def pretended_accelerator(model: nn.Module, cache: Cache) -> Iterator[Callable[[Tensor], Tensor]]:
    """Move a model and a cache to a pretended accelerator, for good; yields what moves a tensor there.

    It finds out where a pass waits for a real one; none is needed. Tensors have its device and no values. Code that
    reads a value fails: `.item()`, `.tolist()`, `bool(tensor)`, a boolean index, `nonzero` and the like. Copies between
    host and device wait as well, and are recorded.
    """
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():

        def move(tensor: Tensor) -> Tensor:
            return (tensor if isinstance(tensor, fake_tensor.FakeTensor) else mode.from_tensor(tensor)).to(DEVICE)

        model._apply(move)
        tokens = int(cache.get_seq_length())
        for layer in cache.layers:
            for name, value in list(vars(layer).items()):
                if isinstance(value, Tensor | torch.device):
                    setattr(layer, name, move(value) if isinstance(value, Tensor) else DEVICE)
        if isinstance(count := cache.get_seq_length(), Tensor):
            setattr(cache, COUNT_KEY, (tokens, count._version))  # as a prompt that was read on the device leaves it
        yield move


class _CopyRecorder(TorchDispatchMode):
    """Records the lines of code that wait for a copy between devices, without those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if func in _COPIES:
            source = args[func is _COPIES[1]]
            blocks = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            if blocks and source.device.type != result.device.type:
                self.lines += _line(traceback.extract_stack()[:-1])
        return result


def _line(frames: Iterable[traceback.FrameSummary]) -> list[str]:
    """The innermost line outside torch; none if it is transformers' own."""
    frame = [frame for frame in frames if "/torch/" not in frame.filename and frame.filename != __file__][-1]
    is_own = "/transformers/" in frame.filename
    return [] if is_own else [f"{frame.filename}:{frame.lineno}: {frame.line}"]


def waits(function: Callable[[], Any]) -> list[str]:
    """The lines of code at which a function waits for the pretended accelerator; it ends at the first value read."""
    with _CopyRecorder() as recorder:
        try:
            function()
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
            recorder.lines += _line(traceback.extract_tb(error.__traceback__)) or [str(error)]
    return recorder.lines
