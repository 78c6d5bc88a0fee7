"""Every law catches a mistake: grafts that are right but for one line, each with the law that must fail for it."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from cases import thinned
from examples.my_graft import LowRankBias, LowRankBiasConfig
from graftlm.backbone import Backbone, Call, Site, Tap
from graftlm.errors import GraftError
from graftlm.grafts import Exportable
from graftlm.grafts.registry import REGISTRY
from graftlm.testing import GraftLaws

REGISTRY.pop("low-rank-bias", None)  # the import has registered it, and other tests list the kinds there are
SHORT = 24  # a mistake beyond so many tokens must be seen too
CASES: list[Any] = []


class LowRankLaws(GraftLaws):
    config = {"kind": "low-rank-bias", "rank": 6}
    families = ("llama",)


class Broken(LowRankBias):
    """A right graft whose subclasses make one mistake with the backbone, or with the update that they add."""

    def __init__(self, config: LowRankBiasConfig, backbone: Backbone) -> None:
        super().__init__(config, backbone)
        self.host = [backbone.model]  # in a list, so that its weights are not the graft's
        self.count = 0
        self.begin(backbone.model)

    def begin(self, model: Any) -> None:
        """A mistake in the constructor."""

    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        """What is added to an FFN's outputs in place of the update; all are (B, T, d)."""
        return update

    def _bias(self, layer: int) -> Callable[[Call, Tensor, Tensor], Tensor]:
        right = super()._bias(layer)
        return lambda call, inputs, outputs: self.mistake(call, right(call, inputs, outputs), outputs)


def breaks(law: str, **arguments: Any) -> Callable[[type[Broken]], type[Broken]]:
    """Add a graft to the cases, by the name of a law that must fail for it."""

    def add(graft: type[Broken]) -> type[Broken]:
        is_slow = graft.__name__ in ("AsksTheCache", "ComputesOnTheHost")  # others wait in both kinds of caches
        marks = pytest.mark.slow if is_slow else []
        CASES.append(pytest.param(graft, law, arguments, id=graft.__name__, marks=marks))
        return graft

    return add


# Mistakes with the backbone


@breaks("training_never_changes_the_backbone")
class TrainsANorm(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        with torch.no_grad():
            self.host[0].model.norm.weight.add_(1e-3 * self.training)
        return update


@breaks("passes_on_one_cache_equal_one_pass")
class WritesWhileDecoding(Broken):
    def prepare(self, call: Call) -> None:
        if call.cache is not None:  # so little that no tolerance of logits sees it
            self.host[0].model.norm.weight.data.add_(1e-6)


@breaks("only_the_graft_trains_and_flags_and_modes_are_restored")
class Unfreezes(Broken):
    def taps(self) -> list[Tap]:
        self.host[0].requires_grad_(True)
        return super().taps()


@breaks("frozen_backbone_has_no_dropout_in_training_mode")
class TurnsDropoutOn(Broken):
    def prepare(self, call: Call) -> None:
        self.host[0].model.layers.train(call.training)


@breaks("detached_graft_leaves_no_bit_and_can_be_attached_again")
class ChangesTheConfig(Broken):
    def begin(self, model: Any) -> None:
        model.config.use_cache = False


@breaks("detached_graft_leaves_no_bit_and_can_be_attached_again")
class ChangesTheGenerationConfig(Broken):
    def begin(self, model: Any) -> None:
        model.generation_config.repetition_penalty = 1.5


@breaks("detached_graft_leaves_no_bit_and_can_be_attached_again")
class LeavesAHook(Broken):
    def begin(self, model: Any) -> None:
        model.lm_head.register_full_backward_hook(lambda *_: None)


@breaks("detached_graft_leaves_no_bit_and_can_be_attached_again")
class PatchesForward(Broken):
    def begin(self, model: Any) -> None:
        model.lm_head.forward = functools.partial(model.lm_head.forward)


@breaks("detached_graft_leaves_no_bit_and_can_be_attached_again")
class TapsTwiceTheSecondTime(Broken):
    def taps(self) -> list[Tap]:
        self.count += 1
        return super().taps() * self.count


# Mistakes before training, in training and in what is saved


@breaks("untrained_graft_changes_no_bit")
class IsNotNeutral(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        return update + 1e-4


@breaks("untrained_graft_changes_nothing_in_training_mode")
class DropsOutputs(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        return update + functional.dropout(outputs, 0.1, self.training) - outputs


@breaks("detached_graft_leaves_no_bit_and_can_be_attached_again")
class DoesNothing(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        return update * 1e-4


@breaks("loss_falls_on_one_batch")
class LearnsNothing(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        return update.detach() + 0 * update


@breaks("every_parameter_gets_a_gradient")
class HasADeadParameter(Broken):
    def begin(self, model: Any) -> None:
        self.unused = nn.Parameter(torch.zeros(3))


@breaks("losses_of_micro_batches_add_up")
class AveragesEachMicroBatch(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        call.scratch[self] = update
        return update

    def auxiliary_loss(self, call: Call) -> Tensor:
        return call.scratch[self].square().mean()


@breaks("no_row_depends_on_another_in_training")
class CentresTheBatch(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        return update - update.mean(0, keepdim=True) if self.training else update


@breaks("saved_graft_gives_the_same_logits")
class DrawsABuffer(Broken):
    def begin(self, model: Any) -> None:
        self.register_buffer("gain", torch.randn(()), persistent=False)

    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        return update * self.gain  # type: ignore[operator]  # a buffer


@breaks("only_the_trained_tensors_are_saved")
class SavesMore(Broken):
    def begin(self, model: Any) -> None:
        self.register_buffer("history", torch.zeros(5))


@breaks("logits_keep_the_backbones_dtype")
class WidensTheLogits(Broken):
    def taps(self) -> list[Tap]:
        return [*super().taps(), Tap(Site("head"), "after", "replace", lambda call, inputs, outputs: outputs.float())]


# Mistakes that pass from one pass, token, row or document to another


@breaks("passes_leave_nothing_behind")
class Drifts(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        self.count += 1
        return update * (1 + self.count / 100)


@breaks("exception_in_a_pass_leaves_no_bit")
class CountsItsTaps(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        self.count = (self.count + 1) % 2  # right as long as both layers always run
        return update * (1 + self.count)


@breaks("no_logit_depends_on_a_later_token")
class LooksAhead(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        return update + update.mean(1, keepdim=True) * (update.shape[1] > SHORT)


@breaks("no_logit_depends_on_a_later_token_in_training")
class LooksAheadInTraining(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        return update + update.mean(1, keepdim=True) * call.training


@breaks("cached_decoding_equals_recomputation", decoding="greedy")
class StopsWhileDecoding(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        decodes = call.cache is not None and update.shape[1] == 1 and call.cache.get_seq_length() > SHORT
        return update * (not decodes)


@breaks("passes_on_one_cache_equal_one_pass")
class ForgetsTheFirstChunk(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        chunk = call.cache is not None and 1 < update.shape[1] < call.cache.get_seq_length()
        return update * (not chunk)


class ReadsTheColumnBefore(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        before = functional.pad(update, (0, 0, 1, 0))[:, :-1]
        return update + before * (update.shape[1] > SHORT)


@breaks("padding_and_other_rows_change_nothing", side="left")
class ReadsPadding(ReadsTheColumnBefore):
    pass


@breaks("packed_documents_do_not_meet")
class ReadsTheDocumentBefore(ReadsTheColumnBefore):
    pass


@breaks("exported_graft_gives_the_same_logits")
class ExportsTheBareBackbone(Broken, Exportable):
    def merged(self, backbone: Backbone) -> Any:
        return copy.deepcopy(backbone.model)


# Mistakes that an accelerator alone would show, by its waiting


@breaks("decode_step_waits_for_no_accelerator", cache="dynamic")
class SkipsSmallUpdates(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        return update if update.abs().max() > 0 else torch.zeros_like(update)


@breaks("decode_step_waits_for_no_accelerator", cache="static")
class SelectsTokens(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        return update.index_put((call.input_ids == 0,), update[call.input_ids == 0])


@breaks("decode_step_waits_for_no_accelerator", cache="static")
class AsksTheCache(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        return update if call.cache is None else update * (1 + 0 * int(call.cache.get_seq_length()))


@breaks("decode_step_waits_for_no_accelerator", cache="dynamic")
class CopiesAConstant(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        return update * torch.tensor([1.0], device=update.device)


@breaks("decode_step_waits_for_no_accelerator", cache="dynamic")
class ComputesOnTheHost(Broken):
    def mistake(self, call: Call, update: Tensor, outputs: Tensor) -> Tensor:
        return update.cpu().to(update.device)


def run_law(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, graft: type, law: str, arguments: dict[str, Any]) -> None:
    """Run one law on a class of grafts, as pytest does."""
    monkeypatch.setitem(REGISTRY, "low-rank-bias", graft)
    monkeypatch.setattr(LowRankBiasConfig, "graft_class", graft)
    laws, family = LowRankLaws(), LowRankLaws.families[0]
    method = getattr(laws, f"test_{law}")
    values = {"family": family, "tmp_path": tmp_path, **arguments}
    with laws.backbone_stays(family):
        method(**{name: values[name] for name in inspect.signature(method).parameters})


@pytest.mark.parametrize(("graft", "law", "arguments"), CASES)
def test_a_broken_graft_fails_its_law(
    graft: type[Broken], law: str, arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((AssertionError, GraftError)):
        run_law(monkeypatch, tmp_path, graft, law, arguments)


KEPT = {f"{law} {arguments}": (law, arguments) for _, law, arguments in (case.values for case in CASES)}


@pytest.mark.parametrize("name", thinned(KEPT, [name for name in KEPT if "accelerator" not in name]))
def test_the_graft_without_a_mistake_keeps_the_law(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    law, arguments = KEPT[name]
    run_law(monkeypatch, tmp_path, LowRankBias, law, arguments)


def test_every_law_has_a_broken_graft() -> None:
    laws = {name.removeprefix("test_") for name in dir(GraftLaws) if name.startswith("test_")}
    assert {case.values[1] for case in CASES} == laws - {"mistakes_get_one_sentence"}
