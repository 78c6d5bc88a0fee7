"""The laws of grafts as a test class: subclass `GraftLaws`, and every law runs on tiny models of several families.

Shape suffixes: B rows, T tokens, V the vocabulary.
"""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from graftlm.artifact import graft_tensors, load_graft, save_graft
from graftlm.backbone import Backbone, Site, Sites
from graftlm.errors import ArtifactError, RecipeError, WrongBackboneError
from graftlm.grafts import GraftedModel, build_graft, graft_config
from graftlm.testing.tiny import ENCODERS, WINDOW, tiny_ids, tiny_model, tiny_tokenizer

CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 2e-5}  # for logits of about 5, computed in another order in float32
LENGTHS = (24, 13, 19)
NEW_TOKENS = 6
DOMAIN = torch.tensor([0, 1])
DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "num_return_sequences": 2, "temperature": 1.5},
    "beam": {"do_sample": False, "num_beams": 3},
}


def decoders_only(law: Callable[..., None]) -> Callable[..., None]:
    """Mark a law that does not hold for encoders."""
    law.excluded = ENCODERS
    return law


class GraftLaws:
    """The laws that every graft keeps, as tests; a subclass sets `config`.

    Attributes:
        config: the graft's config as a recipe writes it.
        families: the families of tiny models to test on.
        spread: standard deviation of the noise that replaces training; larger breaks a law more visibly.
        learning_rate: a rate at which the loss on one batch falls within 8 steps.
        exceptions: a law without `test_`, a family or `encoders` -> the reason why it is skipped.
    """

    config: ClassVar[Mapping[str, Any]]
    families: ClassVar[Sequence[str]] = ("llama", "gemma3", "gpt2", "bert")
    spread: ClassVar[float] = 0.2
    learning_rate: ClassVar[float] = 1e-2
    exceptions: ClassVar[Mapping[str, str]] = {}

    def backbone(self, family: str) -> Backbone:
        """The backbone that stands for a family; the same object at every call."""
        return tiny_backbone_of(family)

    def exception(self, law: str, family: str) -> str | None:
        """The reason why a law is skipped on a family; None where it holds."""
        keys = (law, family, "encoders" if family in ENCODERS else "")
        return next((f"{key}: {self.exceptions[key]}" for key in keys if key in self.exceptions), None)

    def param(self, law: str, family: str) -> Any:
        """A value of the parameter `family` with its marks."""
        reason = self.exception(law, family)
        return pytest.param(family, marks=[pytest.mark.skip(reason=reason)] if reason else [])

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "family" in metafunc.fixturenames:
            law, excluded = metafunc.function.__name__.removeprefix("test_"), getattr(metafunc.function, "excluded", ())
            metafunc.parametrize("family", [self.param(law, name) for name in self.families if name not in excluded])

    def attach(self, family: str, *, trained: bool = True) -> GraftedModel:
        """The graft on its backbone in eval mode, trained or not; a `with` block detaches it."""
        bare = logits(self.backbone(family).model, tiny_ids())
        model = attach_graft(self.backbone(family), self.config).eval()
        if trained:
            change = (logits(randomise(model, self.spread), tiny_ids()) - bare).abs().max()
            if not change > 0.1:
                model.detach()
                pytest.fail(f"Noise of {self.spread} changes logits by {change:.2g}, not by 0.1: raise `spread`.")
        return model

    # 1: the backbone's weights, gradients, flags and modes never change

    def test_training_never_changes_the_backbone(self, family: str) -> None:
        live = self.backbone(family).model
        own, before = tensors_of(live), digest(tensors_of(live))
        with self.attach(family) as model:
            parameters = list(model.train().trainable_parameters().values())
            optimiser = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
            for step in range(3):
                optimiser.zero_grad()
                model(tiny_ids(seed=step), labels=tiny_ids(seed=step), domain=DOMAIN).loss.backward()
                optimiser.step()
            assert all(tensor.grad is None for tensor in own.values())
            assert digest(own) == before
        assert list(tensors_of(live)) == list(own)
        assert all(tensor is own[name] for name, tensor in tensors_of(live).items())

    def test_only_the_graft_trains_and_flags_and_modes_are_restored(self, family: str) -> None:
        live = self.backbone(family).model
        flags = {name: number % 2 == 0 for number, (name, _) in enumerate(live.named_parameters())}
        own = {id(parameter) for parameter in live.parameters()}
        for name, parameter in live.named_parameters():
            parameter.requires_grad_(flags[name])
        live.base_model.train()
        modes = {module: module.training for module in live.modules()}
        with attach_graft(self.backbone(family), self.config) as model:
            trainable = model.trainable_parameters().values()
            assert trainable
            assert own.isdisjoint(map(id, trainable))
            assert not any(p.requires_grad for p in live.parameters() if id(p) in own)
            assert not any(module.training for module in modes)
        assert {name: parameter.requires_grad for name, parameter in live.named_parameters()} == flags
        assert {module: module.training for module in live.modules()} == modes
        live.eval()

    # 2 and 3: an untrained graft and a detached graft change no bit

    def test_untrained_graft_changes_no_bit(self, family: str) -> None:
        bare = logits(self.backbone(family).model, tiny_ids())
        with self.attach(family, trained=False) as model:
            assert torch.equal(logits(model, tiny_ids()), bare)

    def test_detached_graft_leaves_no_bit(self, family: str) -> None:
        live = self.backbone(family).model
        bare = logits(live, tiny_ids())
        self.attach(family).detach()
        assert torch.equal(logits(live, tiny_ids()), bare)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in live.modules())

    def test_exception_in_a_pass_leaves_no_bit(self, family: str) -> None:
        live = self.backbone(family).model
        bare = logits(live, tiny_ids())
        with self.attach(family) as model:
            before = logits(model, tiny_ids())
            ffn = Sites(model.model).module(Site("ffn", 1))[0]
            with ffn.register_forward_pre_hook(_fail), pytest.raises(ZeroDivisionError):
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
                encoder = family in ENCODERS
                loss = functional.cross_entropy(output.logits.flatten(0, 1), ids.flatten()) if encoder else output.loss
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
        assert losses[-1] < losses[0] - 0.05, losses

    # 5 and 11: a saved graft gives the same logits again, and a mistake gets one sentence

    def test_saved_graft_gives_the_same_logits(self, family: str, tmp_path: Path) -> None:
        backbone = self.backbone(family)
        with self.attach(family) as model:
            expected, graft = logits(model, tiny_ids()), model.grafts["graft"]
            save_graft(graft, backbone, tmp_path / "attached")  # type: ignore[arg-type]  # a ModuleDict holds modules
        save_graft(graft, backbone, tmp_path / "detached")  # type: ignore[arg-type]
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
        with pytest.raises(ArtifactError, match="copy or train the graft again"):
            load_graft(folder, self.backbone(family))

    # 6: cached decoding equals full recomputation

    @decoders_only
    @pytest.mark.parametrize("decoding", DECODING)
    def test_cached_decoding_equals_recomputation(self, family: str, decoding: str) -> None:
        ids, mask = prompts()
        with self.attach(family) as model:
            output = generate(model, ids, mask, **DECODING[decoding])
            steps = torch.stack(output.logits, 1)  # (running rows, NEW_TOKENS, V)
            rows = torch.arange(len(steps))[:, None].expand(-1, NEW_TOKENS)
            if decoding == "beam":
                rows = output.beam_indices[:, :NEW_TOKENS]
            expected = recompute(model, output.sequences, mask)
        torch.testing.assert_close(steps[rows, torch.arange(NEW_TOKENS)], expected, rtol=1e-4, atol=1e-4)

    # 7 and 8: no token sees a later one, and neither padding, other rows nor packed documents matter

    @decoders_only
    @pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
    def test_no_logit_depends_on_a_later_token(self, family: str, training: bool) -> None:
        ids = tiny_ids()
        with self.attach(family) as model:
            torch.manual_seed(0)  # the same dropout twice, for grafts that train with it
            before = logits(model.train(training), ids)
            for position in (23, 12):
                changed = ids.clone()
                changed[:, position] = (changed[:, position] + 1) % 250 + 4
                torch.manual_seed(0)
                after = logits(model, changed)
                torch.testing.assert_close(after[:, :position], before[:, :position], **CLOSE)
                difference = (after[:, position:] - before[:, position:]).abs().amax((0, 2))
                assert difference.gt(1e-3).all(), "the change must show from its position on"

    @pytest.mark.parametrize("side", ["left", "right"])
    def test_padding_and_other_rows_change_nothing(self, family: str, side: str) -> None:
        rows = [tiny_ids(1, length, seed=length)[0] for length in LENGTHS]
        ids, mask = pad_rows(rows, side)
        first = 1 if "roberta" in family else 0  # RoBERTa counts from the padding token's id + 1
        positions = torch.where(mask == 1, positions_of(mask) + first, 0)
        with self.attach(family) as model:
            together = logits(model, ids, attention_mask=mask, position_ids=positions)
            for number, row in enumerate(rows):
                torch.testing.assert_close(together[number][mask[number] == 1], logits(model, row[None])[0], **CLOSE)

    @decoders_only
    def test_packed_documents_do_not_meet(self, family: str) -> None:
        rows = [tiny_ids(1, length, seed=length)[0] for length in LENGTHS]
        positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
        with self.attach(family) as model:
            together = logits(model, torch.cat(rows)[None], position_ids=positions)[0]
            for row, part in zip(rows, together.split(LENGTHS), strict=True):
                torch.testing.assert_close(part, logits(model, row[None])[0], **CLOSE)


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


@functools.cache
def tiny_backbone_of(family: str) -> Backbone:
    """The tiny backbone of a family; one for the whole session, since no law may change it."""
    return Backbone.wrap(tiny_model(family), tiny_tokenizer(), family)


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


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, the live objects."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and bytes, also of quantised tensors."""
    torch.save({name: tensor.detach() for name, tensor in tensors.items()}, buffer := io.BytesIO())
    return hashlib.sha256(buffer.getvalue()).hexdigest()


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


def prompts() -> tuple[Tensor, Tensor]:
    """Two prompts padded on the left, and their mask: one fills a sliding window twice, one is mostly padding."""
    return pad_rows([tiny_ids(1, length, seed=length)[0] for length in (2 * WINDOW, 5)], "left")


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


def positions_of(mask: Tensor) -> Tensor:
    """(B, T) positions that count real tokens, as `generate` computes them."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)
