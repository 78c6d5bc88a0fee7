"""The fingerprint: the same however a backbone is run, another for another backbone."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model

from cases import rotated
from graftlm.backbone import Backbone, Fingerprint, fingerprint, load_backbone
from tiny import FAMILIES, BackboneFolder, tiny_model

SOME = ("llama", "gemma3", "gpt2", "bert")


@pytest.mark.parametrize(("family", "dtype"), rotated(FAMILIES, [torch.bfloat16, torch.float16, torch.float64]))
def test_same_in_every_dtype(family: str, dtype: torch.dtype) -> None:
    plain = fingerprint(tiny_model(family))
    assert plain.difference(fingerprint(tiny_model(family).to(dtype))) is None
    assert plain.difference(fingerprint(tiny_model(family))) is None


@pytest.mark.parametrize("family", SOME)
def test_same_when_loaded_as_when_in_memory(family: str, tiny_backbone: BackboneFolder) -> None:
    kind = "masked-lm" if family == "bert" else "causal-lm"
    wanted = fingerprint(tiny_model(family))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        loaded = load_backbone(tiny_backbone(family), kind=kind, dtype=dtype)
        assert wanted.difference(loaded.fingerprint) is None
        assert loaded.fingerprint.difference(wanted) is None
    assert loaded.fingerprint.architecture == wanted.architecture


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_same_with_another_attention_kernel(attention: str) -> None:
    other = fingerprint(tiny_model("llama", attn_implementation=attention))
    assert fingerprint(tiny_model("llama")).difference(other) is None


@pytest.mark.parametrize("family", SOME)
def test_same_when_quantised(family: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    plain, packed = fingerprint(tiny_model(family)), tiny_model(family)
    quantize_(packed, Int8WeightOnlyConfig())
    assert plain.difference(fingerprint(packed)) is None
    assert fingerprint(packed).difference(plain) is None
    other = tiny_model(family, seed=1)
    quantize_(other, Int8WeightOnlyConfig())
    assert plain.difference(fingerprint(other)) == "its weights differ", "norms and embedding still tell them apart"


@pytest.mark.parametrize("family", [*SOME, "tied"])
def test_a_quantised_model_has_as_many_parameters(family: str) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = tiny_model("llama", tie_word_embeddings=True) if family == "tied" else tiny_model(family)
    kind = "causal-lm" if model.can_generate() else "encoder"
    count = Backbone.wrap(model, kind=kind).parameter_count
    assert count == sum(parameter.numel() for parameter in model.parameters())
    quantize_(model, Int8WeightOnlyConfig())
    assert Backbone.wrap(model, kind=kind).parameter_count == count
    assert family != "tied" or count < sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", SOME)
def test_same_beside_a_users_adapter(family: str) -> None:
    plain = fingerprint(tiny_model(family))
    targets = {"gpt2": ["c_attn", "c_fc"], "bert": ["query", "dense"]}.get(family, ["q_proj", "down_proj"])
    adapted = get_peft_model(tiny_model(family), LoraConfig(target_modules=targets, fan_in_fan_out=family == "gpt2"))
    assert plain.difference(Backbone.wrap(adapted).fingerprint) is None


def test_same_when_compiled() -> None:
    plain = fingerprint(tiny_model("llama"))
    assert plain.difference(Backbone.wrap(torch.compile(tiny_model("llama"), backend="eager")).fingerprint) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_another_seed_is_another_backbone(family: str) -> None:
    found = fingerprint(tiny_model(family)).difference(fingerprint(tiny_model(family, seed=1)))
    assert found == "its weights differ"


@pytest.mark.parametrize("change", [{"num_hidden_layers": 3}, {"rms_norm_eps": 1e-3}, {"vocab_size": 320}])
def test_another_config_is_another_backbone(change: dict[str, float]) -> None:
    found = fingerprint(tiny_model("llama")).difference(fingerprint(tiny_model("llama", **change)))
    assert found == "its architecture differs"


@pytest.mark.parametrize("place", [0, -1])
def test_one_sampled_weight_is_enough(place: int) -> None:
    plain = fingerprint(tiny_model("llama"))
    names = [name for name, _ in tiny_model("llama").named_parameters()]
    for name in names:
        model = tiny_model("llama")
        with torch.no_grad():
            model.get_parameter(name).view(-1)[place] *= 1.1
        assert plain.difference(fingerprint(model)) == "its weights differ", name


def test_touches_few_weights_of_many_tensors() -> None:
    deep = fingerprint(tiny_model("llama", num_hidden_layers=12))
    assert len(deep.samples) < 400
    model = tiny_model("llama", num_hidden_layers=12)
    assert deep.difference(fingerprint(model)) is None
    for parameter in model.model.layers[7].parameters():
        parameter.data.mul_(1.1)
    assert deep.difference(fingerprint(model)) == "its weights differ"


def test_the_short_name_is_for_people() -> None:
    first, second = fingerprint(tiny_model("llama")), fingerprint(tiny_model("llama", seed=1))
    assert len(first.id) == 12
    assert first.id != second.id
    assert Fingerprint(first.architecture, first.samples).id == first.id


@pytest.mark.parametrize("size", [1, 2, 3, 1000, 2**24 - 1, 2**24 + 3, 32_000 * 768])
def test_the_first_and_the_last_weight_of_a_tensor_of_any_size_count(size: int) -> None:
    class Large(torch.nn.Module):
        def __init__(self, places: dict[int, float]) -> None:
            super().__init__()
            values = torch.zeros(size, dtype=torch.float16)
            for place, value in places.items():
                values[place] = value
            self.weight = torch.nn.Parameter(values, requires_grad=False)
            self.config = tiny_model("llama").config

    def of(places: dict[int, float]) -> Fingerprint:
        return fingerprint(Large(places))  # type: ignore[arg-type]  # it has what a fingerprint reads of a model

    one, other, same = of({}), of({-1: 1.0}), of({-1: 1.0})
    assert one.difference(other) == "its weights differ"
    assert other.difference(same) is None
    assert one.difference(of({0: 1.0})) == "its weights differ"
