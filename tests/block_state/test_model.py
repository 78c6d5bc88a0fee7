"""The architecture as a Hugging Face model, and its errors for invalid settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from block_state import tools
from graftlm.errors import GraftError, RecipeError
from graftlm.models.block_state import BlockStateConfig, BlockStateForCausalLM
from graftlm.models.block_state.grid import WindowGrid
from graftlm.models.block_state.presets import PRESETS
from graftlm.models.block_state.sequence_ssm import TokenSSM, WindowEndSSM
from graftlm.models.block_state.state_space import S4DKernel
from graftlm.training.config import TrainingConfig
from graftlm.training.optimizer import declared, make_optimizer


def assert_same_weights(loaded: torch.nn.Module, model: torch.nn.Module) -> None:
    state = loaded.state_dict()
    expected = model.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize("variant", tools.EXHAUSTIVE_VARIANTS)
def test_a_saved_model_loads_with_the_same_weights(variant: str, tmp_path: Path) -> None:
    model = tools.model(variant).float()
    ids = tools.ids(1, 9)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_weights(loaded, model)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    assert AutoConfig.from_pretrained(tmp_path).mixer == tools.config(variant).mixer
    assert not list(tmp_path.glob("*.bin"))


@pytest.mark.slow
def test_register_makes_the_architecture_known_in_a_new_process(tmp_path: Path) -> None:
    tools.model("sh-s4d").float().save_pretrained(tmp_path)
    lines = (
        "import sys, graftlm.models, transformers",
        "graftlm.models.register()",
        "print(type(transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])).__name__)",
    )
    process = subprocess.run(
        [sys.executable, "-c", "\n".join(lines), tmp_path], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "BlockStateForCausalLM"


@pytest.mark.parametrize(
    ("values", "labels", "expected"),
    [
        ({"num_labels": 3}, torch.tensor([2, 0]), lambda x, y: -x.log_softmax(-1)[[0, 1], y].mean()),
        ({"num_labels": 1}, torch.tensor([0.5, -1.0]), lambda x, y: ((x[:, 0] - y) ** 2).mean()),
        (
            {"num_labels": 2, "problem_type": "multi_label_classification"},
            torch.tensor([[1.0, 0.0], [1.0, 1.0]]),
            lambda x, y: -(y * x.sigmoid().log() + (1 - y) * (1 - x.sigmoid()).log()).mean(),
        ),
    ],
    ids=["classes", "number", "several"],
)
def test_a_classifiers_loss_is_that_of_its_problem(values: dict, labels: torch.Tensor, expected: Any) -> None:
    torch.manual_seed(0)
    config = tools.config("sh-s4d", bidirectional=True, **values)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    output = model(tools.ids(2, 9), labels=labels, output_hidden_states=True)
    torch.testing.assert_close(output.loss, expected(output.logits, labels), rtol=1e-4, atol=1e-6)
    assert len(output.hidden_states) == config.num_hidden_layers + 1


@pytest.mark.parametrize("variant", tools.default_cases(tools.BIDIRECTIONAL))
def test_a_bidirectional_classifier_ignores_padding(variant: str, tmp_path: Path) -> None:
    model = tools.classifier(variant)
    ids = tools.ids(3, 11)
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, :5] = mask[2, 7:] = 0
    actual = model(ids, attention_mask=mask).logits
    for row in range(3):
        expected = model(ids[row][mask[row].bool()][None]).logits[0]
        torch.testing.assert_close(actual[row], expected, rtol=1e-8, atol=1e-8)
    model.float().save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert_same_weights(loaded, model)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    "variant", tools.default_cases(name for name in tools.BIDIRECTIONAL if name not in ("slide", *tools.RESET))
)
def test_a_bidirectional_model_reads_later_tokens_beyond_its_windows(variant: str) -> None:
    model = tools.classifier(variant).model
    embeds = model.get_input_embeddings()(tools.ids(1, 4 * tools.W)).detach().requires_grad_()
    hidden = model(inputs_embeds=embeds, use_cache=False).last_hidden_state
    (gradient,) = torch.autograd.grad(hidden[0, 0].sum(), embeds)
    assert float(gradient[0, -1].abs().sum()) > 1e-8


@pytest.mark.parametrize("variant", tools.EXHAUSTIVE_VARIANTS)
def test_gradient_checkpointing_changes_no_gradient(variant: str) -> None:
    model = tools.model(variant).train()
    ids = tools.ids(2, 11)
    model(ids, labels=ids).loss.backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name])
    with pytest.raises(GraftError) as error:
        model(ids, use_cache=True)
    assert "checkpointing" in str(error.value)


@pytest.mark.parametrize("variant", ["slide", "sh-s4d", "mf-unstructured"])
def test_half_precision_is_close_to_single_precision(variant: str) -> None:
    model = tools.model(variant, initializer_range=0.1).float()
    ids = tools.ids(2, 11)
    expected = model(ids).logits.detach()
    with torch.autocast("cpu", torch.bfloat16):
        actual = model(ids).logits.float().detach()
    assert float((actual - expected).abs().max()) < 0.05 * float(expected.abs().max())


def test_a_model_in_half_precision_keeps_its_state_spaces_in_float32(tmp_path: Path) -> None:
    tools.model("sh-s4d").float().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = {name: weight.dtype for name, weight in model.named_parameters()}
    assert {dtype for name, dtype in dtypes.items() if "kernels" in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "kernels" not in name} == {torch.bfloat16}
    assert torch.isfinite(model(tools.ids(1, 9)).logits).all()


@pytest.mark.parametrize("ssm_class", [TokenSSM, WindowEndSSM])
@pytest.mark.parametrize("kernel", ["s4d", "unstructured"])
def test_autocast_leaves_state_spaces_in_float32(ssm_class: type[torch.nn.Module], kernel: str) -> None:
    config = tools.config(f"mf-{kernel}")
    ssm = TokenSSM(config, 2, "state") if ssm_class is TokenSSM else WindowEndSSM(config, "state")
    ssm.kernels.reset_parameters()
    u = torch.randn(2, 4 * config.window, config.state_width)
    grid = WindowGrid.build(u, None, None, config.window)
    expected = ssm(u, grid, None)
    with torch.autocast("cpu", torch.bfloat16):
        actual = ssm(u, grid, None)
    torch.testing.assert_close(actual, expected)
    assert actual.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
def test_a_compiled_model_has_the_same_logits() -> None:
    model = tools.model("sh-s4d").float()
    ids = tools.ids(2, 12)
    expected = model(ids, use_cache=False).logits
    traced = torch.compile(model, backend="aot_eager")  # with gradients; compiling both would take minutes
    torch.testing.assert_close(traced(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()
    compiled = torch.compile(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids, use_cache=True).logits, expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["sh-s4d", "mf-s4d", "sh-unstructured"])
def test_a_pass_on_the_meta_device_has_shapes(variant: str) -> None:
    with torch.device("meta"):
        model = BlockStateForCausalLM(tools.config(variant))
        ids = torch.zeros(2, 12, dtype=torch.long)
    assert model(ids, use_cache=True).logits.shape == (2, 12, model.config.vocab_size)


@pytest.mark.parametrize("kernel", ["s4d", "unstructured"])
def test_positions_have_no_effect_before_training_but_gradients(kernel: str) -> None:
    torch.manual_seed(0)
    model = BlockStateForCausalLM(tools.config(f"sh-{kernel}"))
    ids = tools.ids(2, 9)
    outputs = model(ids, labels=ids, use_cache=False)
    positional_ssm = model.model.positional_ssm
    model.model.positional_ssm = None
    torch.testing.assert_close(outputs.logits, model(ids, use_cache=False).logits)
    outputs.loss.backward()
    assert positional_ssm is not None
    assert positional_ssm.out_proj.weight.grad is not None
    assert float(positional_ssm.out_proj.weight.grad.abs().min()) > 0


def test_state_spaces_have_no_weight_decay(tmp_path: Path) -> None:
    tools.model("mf-s4d").save_pretrained(tmp_path)
    names = AutoModelForCausalLM.from_pretrained(tmp_path).parameters_without_decay()
    assert {name.rpartition(".")[2] for name in names} == {"log_dt", "log_decay", "frequency", "c", "d"}


def test_each_kind_of_parameter_of_structured_kernels_has_its_rate() -> None:
    """The rates reach the optimizer's groups, as factors; all other parameters have the common rate."""
    model = tools.model("mf-s4d", a_rate=0.1, c_rate=0.5, dt_rate=0.2)
    parameters = dict(model.named_parameters())
    scales = declared(model, "learning_rate_scales")
    optimizer = make_optimizer(parameters, TrainingConfig(steps=1), scales=scales)
    groups = {id(weight): group["scale"] for group in optimizer.param_groups for weight in group["params"]}
    expected = {"log_decay": 0.1, "frequency": 0.1, "c": 0.5, "log_dt": 0.2}
    for name, parameter in parameters.items():
        rate = expected.get(name.rpartition(".")[2], 1.0) if ".kernels." in name else 1.0
        assert groups[id(parameter)] == rate, name


def test_the_step_sizes_of_all_structured_kernels_have_the_configs_range() -> None:
    torch.manual_seed(0)
    config = tools.config("mf-s4d", dt_min=1e-4, dt_max=1e-3, state_width=400)
    steps = [module.log_dt.exp() for module in BlockStateForCausalLM(config).modules() if isinstance(module, S4DKernel)]
    assert len(steps) == 3  # after the embeddings, and in two layers
    for dt in steps:
        assert float(dt.detach().min()) == pytest.approx(1e-4, rel=0.05)
        assert float(dt.detach().max()) == pytest.approx(1e-3, rel=0.05)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_published_sizes(name: str) -> None:
    """Section 5.4.1 of the thesis; its layers {1, 7, 9} and {1, 5, 7, 9} are counted from 1."""
    config = BlockStateConfig(preset=name)
    is_large = name.endswith("-l")
    assert (config.hidden_size, config.num_hidden_layers, config.hidden_act) == (1024, 12, "relu")
    assert (config.window, config.state_size, config.head_dim) == (512, 16, 128)
    assert config.intermediate_size == (8192 if is_large else 4096)
    assert config.num_attention_heads == (12 if is_large else 8)
    assert config.mixer_layers == ([0, 4, 6, 8] if is_large else [0, 6, 8])
    assert config.context == name.split("-")[1]
    assert config.kernel == ("unstructured" if "unstruct" in name else "s4d")
    is_multi_filter = config.context == "mf"
    assert config.state_width == (128 if is_multi_filter else 256)
    if is_multi_filter:
        assert config.filters == (64 if is_large else 32)


def test_keys_that_are_given_override_those_of_a_preset(tmp_path: Path) -> None:
    """Also where a given value is the default of a model without a preset, and after saving and loading."""
    config = BlockStateConfig(preset="bst-mf-l", window=128, num_hidden_layers=9, kernel="dss")
    config.save_pretrained(tmp_path)
    for actual in (config, AutoConfig.from_pretrained(tmp_path)):
        assert (actual.window, actual.num_hidden_layers, actual.kernel) == (128, 9, "dss")
        assert (actual.num_attention_heads, actual.head_dim, actual.filters) == (12, 128, 64)
        assert actual.mixer_layers == [0, 4, 6, 8]


def test_a_config_without_later_keys_is_written_as_before() -> None:
    """Otherwise the fingerprint of every model that was trained before would change."""
    later = {"preset", "head_dim", "dt_min", "dt_max", "a_rate", "c_rate", "dt_rate"}
    assert not later & BlockStateConfig().to_dict().keys()
    changed = BlockStateConfig(head_dim=64, dt_min=1e-4, a_rate=0.1).to_dict()
    assert later & changed.keys() == {"head_dim", "dt_min", "a_rate"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_attention_heads": 3, "hidden_size": 16}, ["num_attention_heads", "hidden_size"]),
        ({"window": 0}, ["window is 0"]),
        ({"window": "wide"}, ["window is 'wide'"]),
        ({"mixer": "lstm"}, ["mixer is 'lstm'", "block-state, state-space"]),
        ({"context": "xx"}, ["context is 'xx'", "sh, mh, mf"]),
        ({"context": "mh", "kernel": "delta"}, ["kernel is delta", "context"]),
        ({"context": "mf", "filters": 0}, ["filters is 0"]),
        ({"state_size": 5}, ["state_size is 5"]),
        ({"mixer_layers": [6], "num_hidden_layers": 6}, ["mixer_layers", "layer 6", "0 to 5"]),
        ({"mixer_layers": 3}, ["mixer_layers is 3"]),
        ({"state_space_layers": 3}, ["state_space_layers is 3"]),
        ({"state_space_layers": [6], "mixer": "slide"}, ["state_space_layers", "layer 6", "0 to 5"]),
        ({"state_space_layers": [2, 3]}, ["layer 3", "mixer_layers", "state_space_layers"]),
        ({"mixer_layers": ["first"]}, ["mixer_layers", "'first'"]),
        ({"hidden_act": "relo"}, ["hidden_act is 'relo'", "did you mean relu"]),
        ({"hidden_size": "wide"}, ["hidden_size is 'wide'"]),
        ({"state_width": 0}, ["state_width is 0"]),
        ({"dropout": 1.5}, ["dropout is 1.5"]),
        ({"kernel_length": 100, "kernel_limit": 50}, ["kernel_limit is 50", "kernel_length, 100"]),
        ({"bidirectional": "false"}, ["bidirectional is 'false'"]),
        ({"positional_ssm": 1}, ["positional_ssm is 1"]),
        ({"reset_states": True}, ["reset_states", "kernel is s4d"]),
        ({"reset_states": True, "kernel": "delta", "mixer": "slide"}, ["reset_states"]),
        ({"reset_states": True, "kernel": "delta", "mixer_layers": []}, ["reset_states"]),
        ({"reset_states": True, "kernel": "delta"}, ["reset_states", "positional_ssm"]),
        ({"reset_states": "yes", "kernel": "delta"}, ["reset_states is 'yes'"]),
        ({"bidirectional": True, "mixer": "recurrent"}, ["bidirectional", "mixer recurrent"]),
        ({"relative_buckets": 2}, ["relative_buckets is 2"]),
        ({"head_dim": 0}, ["head_dim is 0"]),
        ({"dt_min": 0}, ["dt_min is 0"]),
        ({"dt_max": "long"}, ["dt_max is 'long'"]),
        ({"dt_min": 0.1, "dt_max": 0.01}, ["dt_min is 0.1", "dt_max, 0.01"]),
        ({"a_rate": 0.0}, ["a_rate is 0.0"]),
        ({"c_rate": True}, ["c_rate is True"]),
        ({"dt_rate": float("inf")}, ["dt_rate is inf"]),
        ({"dt_max": 0.01, "kernel": "unstructured"}, ["dt_max is 0.01", "kernel"]),
        ({"a_rate": 0.1, "mixer": "recurrent"}, ["a_rate is 0.1"]),
        ({"dt_rate": 0.1, "kernel": "delta", "positional_ssm": False}, ["dt_rate is 0.1"]),
        ({"preset": "bst-sh-xl"}, ["preset is 'bst-sh-xl'", "bst-sh-l"]),
        ({"preset": 3}, ["preset is 3"]),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(RecipeError) as error:
        BlockStateConfig(**settings)
    for part in named:
        assert part in str(error.value)


def test_lengths_that_the_model_cannot_use_are_refused() -> None:
    for variant in ("mf-s4d", "recurrent"):
        with pytest.raises(RecipeError) as error:
            tools.model(variant).check_lengths(4, 100)
        assert "data.length" in str(error.value)
    unstructured = tools.model("sh-unstructured")
    gated = tools.model("slide", kernel="unstructured", state_space_layers=[1])
    for model in (unstructured, gated):
        with pytest.raises(RecipeError) as error:
            model.check_lengths(16, 4097)
        assert "kernel_limit" in str(error.value)
        assert "4,097" in str(error.value)
    unstructured.check_lengths(16, 4096)
    tools.model("sh-s4d").check_lengths(16, 10**9)
    tools.model("slide").check_lengths(2, 10**9)


@pytest.mark.parametrize("mask", [torch.tensor([[1, 0, 1, 1, 1]]), torch.ones(1, 1, 5, 5)], ids=["gap", "dimensions"])
def test_masks_with_gaps_or_four_dimensions_are_refused(mask: torch.Tensor) -> None:
    with pytest.raises(GraftError) as error:
        tools.model("sh-s4d")(tools.ids(1, 5), attention_mask=mask)
    assert "attention_mask" in str(error.value)


def test_a_bidirectional_model_does_not_generate() -> None:
    with pytest.raises(GraftError) as error:
        tools.model("sh-s4d", bidirectional=True)
    assert "bidirectional" in str(error.value)
    with pytest.raises(GraftError) as error:
        tools.classifier("sh-s4d").model(tools.ids(1, 5), use_cache=True)
    assert "use_cache" in str(error.value)


def test_a_row_without_tokens_has_finite_logits_and_no_effect() -> None:
    model = tools.model("sh-s4d")
    ids = tools.ids(2, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    actual = model(ids, attention_mask=mask).logits
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual[0], model(ids[:1]).logits[0])


def test_hidden_states_include_the_input_of_each_layer_and_the_output() -> None:
    model = tools.model("sh-s4d")
    ids = tools.ids(2, 9)
    actual = model(ids, output_hidden_states=True)
    assert len(actual.hidden_states) == model.config.num_hidden_layers + 1
    torch.testing.assert_close(model.lm_head(actual.hidden_states[-1]), actual.logits)
    assert model(ids).hidden_states is None


@pytest.mark.parametrize(("context", "name"), [("mf", "context_ids"), ("mh", "kv_per_head")])
def test_free_parameters_have_the_deviation_of_the_config(context: str, name: str) -> None:
    torch.manual_seed(0)
    config = BlockStateConfig(
        vocab_size=50,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=1,
        mixer_layers=[0],
        num_attention_heads=4,
        context=context,
        filters=32,
        initializer_range=0.05,
    )
    parameters = {key.rpartition(".")[2]: value for key, value in BlockStateForCausalLM(config).named_parameters()}
    assert float(parameters[name].detach().std()) == pytest.approx(0.05, rel=0.05)


def test_a_first_key_of_zero_has_small_gradients() -> None:
    """The first key of a text mixes no token, so it is zero."""
    torch.manual_seed(0)
    model = BlockStateForCausalLM(tools.config("sh-delta", initializer_range=0.1))
    ids = torch.randint(0, 30, (2, 12))
    model(ids, labels=ids).loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert any("mix" in name for name in gradients)
    assert max(float(gradient.norm()) for gradient in gradients.values()) < 100


def test_an_untrained_delta_state_answers_with_what_followed_a_token() -> None:
    """A key is the query of the token before: after u_1 and u_2, a query q reads b (q k(u_1)) v(u_2)."""
    torch.manual_seed(0)
    ssm = BlockStateForCausalLM(tools.config("sh-delta", initializer_range=1.0)).model.layers[0].mixer.context.ssm
    u = torch.randn(1, 2, ssm.sizes[-1])
    q, k, v = (u @ ssm.qkv.weight.T).split(ssm.sizes, dim=-1)
    torch.testing.assert_close(k, q)
    lengths = ((q[0, 1] @ q[0, 1] + 0.01) * (k[0, 0] @ k[0, 0] + 0.01)).sqrt()
    cosine = q[0, 1] @ k[0, 0] / lengths
    y = ssm(u, WindowGrid.build(u, None, None, tools.W), None)
    assert torch.equal(y[0, 0], torch.zeros_like(y[0, 0]))
    torch.testing.assert_close(y[0, 1, :, 0], 0.5 * cosine * v[0, 1])
