"""The laws on a compiled backbone: hooks come and go after compilation, and compiled code must follow them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import PeftType
from torch._dynamo.exc import TorchDynamoException
from torch.nn import functional
from transformers import GenerationConfig, StaticCache

from graftlm.backbone import Backbone, compiled_decoding
from graftlm.errors import BackboneError, GraftError, RecipeError
from graftlm.grafted.model import GraftedModel
from graftlm.grafts import build_graft, graft_config
from graftlm.testing.laws import (
    digest,
    generate,
    gradients,
    logits,
    positions_of,
    prompts,
    randomise,
    recompute,
    tensors_of,
)
from laws.examples import EXPERTS, Example, examples
from laws.tools import FailingGraft, active_calls, graft_onto
from tiny import tiny_ids, tiny_model, tiny_tokenizer

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
GATED = next(example for example in examples() if example.kind == "neutral-residues")
REPLACING = next(example for example in examples() if example.kind == "lora")  # it replaces modules
DOMAIN = torch.tensor([0, 1])
BY_PROMPT = Example("token-routing", {"experts": EXPERTS, "reads": "prompt"}, name="routed-by-prompt")
WINDOWED = Example("memory", {"state": "none", "window": 6, "sinks": 2}, name="windowed")
NARROW = next(example for example in examples() if str(example) == "narrow-memory")  # tokens leave its window
# Conditional tasks compile as one graph, but read a value in it.
NOT_WHOLE = ("conditional-tasks",)
WHOLE = [BY_PROMPT, WINDOWED, NARROW, *(e for e in examples() if e.kind == str(e) and e.kind not in NOT_WHOLE)]
GENERATED = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
TOLERANCE = 1e-3
READS = ("item", "tolist", "nonzero")


def in_place(model: Any, backend: str) -> Any:
    model.compile(backend=backend)
    return model


def wrapped(model: Any, backend: str) -> Any:
    return torch.compile(model, backend=backend)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Compiled code of one test is not for the next."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def frozen(family: str) -> Any:
    """Without gradients from the start, so that nothing but the hooks tells compiled code that a graft came."""
    return tiny_model(family).requires_grad_(False)


def grafted(compiled: Any, example: Example) -> GraftedModel:
    host = Backbone.wrap(compiled, tiny_tokenizer())
    return randomise(graft_onto(host, example), example.spread).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "family", "way"),
    [
        (GATED, "llama", in_place),
        pytest.param(GATED, "gpt2", wrapped, marks=pytest.mark.slow),
        pytest.param(REPLACING, "llama", in_place, marks=pytest.mark.slow),
    ],
    ids=["gated-llama-in-place", "gated-gpt2-wrapped", "replacing-llama-in-place"],
)
def test_grafts_come_and_go_after_compilation(example: Example, family: str, way: Callable[[Any, str], Any]) -> None:
    ids = tiny_ids()
    bare = logits(frozen(family), ids)
    with grafted(frozen(family), example) as eager:
        expected = logits(eager, ids)
    model = frozen(family)
    before = digest(tensors_of(model))
    compiled = way(model, "eager")
    assert torch.equal(logits(compiled, ids), bare)
    untrained = graft_onto(Backbone.wrap(compiled), example).eval()
    assert torch.equal(logits(compiled, ids), bare), "untrained, but it changes bits"
    untrained.detach()
    with grafted(compiled, example) as live:
        torch.testing.assert_close(logits(compiled, ids), expected, **CLOSE)
        torch.testing.assert_close(logits(live, ids), expected, **CLOSE)
    assert torch.equal(logits(compiled, ids), bare), "detached, but compiled code does not know it"
    assert digest(tensors_of(model)) == before


@pytest.mark.slow
@pytest.mark.parametrize("example", [GATED, REPLACING], ids=str)
def test_gradients_and_losses_are_those_of_the_eager_model(example: Example) -> None:
    batch = {"input_ids": tiny_ids(), "labels": tiny_ids(), "domain": DOMAIN}
    with grafted(frozen("llama"), example) as eager:
        expected, wanted_loss = gradients(eager.train(), **batch), eager(**batch)
    with grafted(in_place(frozen("llama"), "aot_eager"), example) as model:
        compiled_gradients, loss = gradients(model.train(), **batch), model(**batch)
    torch.testing.assert_close(loss.loss, wanted_loss.loss, **CLOSE)
    torch.testing.assert_close(loss.auxiliary_loss, wanted_loss.auxiliary_loss, **CLOSE)
    assert compiled_gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(
            compiled_gradients[key], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_cached_decoding_equals_recomputation(family: str) -> None:
    with grafted(in_place(frozen(family), "eager"), GATED) as model:
        ids, mask = prompts()
        out = generate(model, ids, mask, do_sample=False)
        expected = recompute(model, out.sequences, mask)
    torch.testing.assert_close(torch.stack(out.logits, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_tokens_see_no_later_one_and_padding_does_not_matter() -> None:
    ids = tiny_ids()
    changed = ids.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 250 + 4
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with grafted(in_place(frozen("llama"), "eager"), GATED) as model:
        torch.testing.assert_close(logits(model, changed)[:, :12], logits(model, ids)[:, :12], **CLOSE)
        padded = logits(model, ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
        torch.testing.assert_close(padded[0, 5:], logits(model, ids[:1, 5:])[0], rtol=1e-5, atol=5e-5)


@pytest.mark.slow
def test_a_model_compiled_with_its_graft_is_bare_once_detached() -> None:
    bare = logits(frozen("llama"), tiny_ids())
    model = grafted(frozen("llama"), GATED)
    expected = logits(model, tiny_ids())
    live = in_place(model.model, "eager")
    torch.testing.assert_close(logits(live, tiny_ids()), expected, **CLOSE)
    model.detach()
    assert torch.equal(logits(live, tiny_ids()), bare)


@pytest.mark.slow
def test_an_exception_in_a_tap_leaves_no_trace() -> None:
    model = in_place(frozen("llama"), "eager")
    bare = logits(model, tiny_ids())
    host = Backbone.wrap(model)
    graft = build_graft(graft_config(GATED.values()), host)
    with GraftedModel(host, {"graft": graft, "failing": FailingGraft(passes=1)}) as live:
        with pytest.raises(ZeroDivisionError):
            logits(live.eval(), tiny_ids())
        assert torch.equal(logits(live, tiny_ids()), bare)
        assert not active_calls(live)
    assert torch.equal(logits(model, tiny_ids()), bare)


@pytest.mark.slow
@pytest.mark.parametrize(
    "example", [pytest.param(e, id=str(e), marks=[] if e is GATED else pytest.mark.slow) for e in WHOLE]
)
def test_decode_steps_compile_as_one_graph_that_reads_nothing(example: Example) -> None:
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append([node for node in module.graph.nodes if node.target in READS])
        return module.forward

    with grafted(frozen("llama"), example) as model:
        expected = decode(model, model)
        actual = decode(model, torch.compile(model, backend=backend, fullgraph=True))  # which raises at a break
    torch.testing.assert_close(actual, expected, **CLOSE)  # closed gates are computed, and not skipped
    assert graphs == [[]] * len(graphs), "the host would wait for an accelerator"
    assert len(graphs) <= 2, "the second is for lengths that change"


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(method.name for method in PeftType))
def test_methods_of_peft_compile_as_one_graph_or_say_that_they_do_not(method: str) -> None:
    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        return module.forward

    try:
        model = grafted(frozen("llama"), Example("peft", {"method": method}, name=method))
    except (RecipeError, BackboneError) as error:
        pytest.skip(f"no graft on this model: {error}")
    with model:
        expected = decode(model, model)
        if not model.decodes_in_one_graph:
            with pytest.raises(TorchDynamoException):
                decode(model, torch.compile(model, backend=backend, fullgraph=True))
            return
        actual = decode(model, torch.compile(model, backend=backend, fullgraph=True))
    torch.testing.assert_close(actual, expected, **CLOSE)


@pytest.mark.slow
def test_decode_steps_compile_to_machine_code() -> None:
    with grafted(frozen("llama"), GATED) as model:
        expected = decode(model, model)
        actual = decode(model, torch.compile(model, backend="inductor", fullgraph=True))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)  # its kernels add in another order


@pytest.mark.slow
@pytest.mark.parametrize("example", [e for e in examples() if e.kind in NOT_WHOLE and e.kind == str(e)], ids=str)
def test_other_grafts_decode_eagerly(example: Example) -> None:
    with grafted(frozen("llama"), example) as model:
        assert compiled_decoding(model, {}, wanted=True) == {}


def check_same_tokens(eager: Any, compiled: Any) -> None:
    """Tokens are equal up to the first at which the two best logits are nearly equal."""
    for row, (ours, theirs) in enumerate(zip(eager.sequences, compiled.sequences, strict=True)):
        start = len(ours) - len(eager.logits)
        for step, logits_BV in enumerate(eager.logits):
            best, second = logits_BV[row].topk(2).values
            if best - second < TOLERANCE:
                break
            assert ours[start + step] == theirs[start + step]
            torch.testing.assert_close(compiled.logits[step][row], logits_BV[row], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("example", "family"),
    [
        *(pytest.param(e, "llama", id=str(e), marks=[] if e is GATED else pytest.mark.slow) for e in WHOLE),
        pytest.param(GATED, "block-state", id="block-state", marks=pytest.mark.slow),
    ],
)
def test_generate_with_compiled_steps_gives_the_tokens_of_eager_steps(example: Example, family: str) -> None:
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    with grafted(frozen(family), example) as model:
        ids, mask = prompts()
        eager = model.generate(ids, attention_mask=mask, **GENERATED)
        options = compiled_decoding(model, GENERATED, prompt_tokens=ids.shape[1], wanted=True)
        options["compile_config"].backend = backend
        options["compile_config"].mode = None  # type: ignore[assignment]  # as torch.compile takes it
        options["compile_config"].fullgraph = True
        compiled = model.generate(ids, attention_mask=mask, **GENERATED, **options)
    assert 1 <= len(graphs) <= 3, "steps are compiled again and again"
    check_same_tokens(eager, compiled)


def test_a_bare_model_that_is_compiled_while_a_graft_is_attached_lends_it_no_code() -> None:
    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        return module.forward

    def generated(model: Any) -> Any:
        options = compiled_decoding(model, GENERATED, wanted=True)
        options["compile_config"].backend = backend  # one for both, since code of another backend is never reused
        options["compile_config"].mode = None
        return model.generate(ids, attention_mask=mask, **GENERATED, **options)

    with grafted(frozen("llama"), GATED) as model:
        ids, mask = prompts()
        eager = model.generate(ids, attention_mask=mask, **GENERATED)
        bare = model.backbone.bare_model
        eager_bare = bare.generate(ids, attention_mask=mask, **GENERATED)
        check_same_tokens(eager_bare, generated(bare))
        check_same_tokens(eager, generated(model))
        check_same_tokens(eager_bare, generated(bare))


@pytest.mark.slow
@pytest.mark.parametrize("example", [GATED, REPLACING, BY_PROMPT, NARROW], ids=str)
def test_a_model_that_is_asked_to_compiles_its_steps_to_machine_code(example: Example) -> None:
    with grafted(frozen("llama"), example) as model:
        ids, mask = prompts()
        eager = model.generate(ids, attention_mask=mask, **GENERATED)
        model.compiles_decoding = True
        compiled = model.generate(ids, attention_mask=mask, **GENERATED)
        assert isinstance(compiled.past_key_values, StaticCache)
    check_same_tokens(eager, compiled)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"use_cache": False},
        {"cache_implementation": "dynamic"},
        {"disable_compile": True},
        {"assistant_early_exit": 1},
        {"output_attentions": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_ways_to_decode_stay_as_they_are(options: dict[str, Any]) -> None:
    with grafted(frozen("llama"), GATED) as model:
        assert compiled_decoding(model, options, wanted=True) == {}
        assert compiled_decoding(model, {}) == {}, "on a CPU, steps are eager"


def test_a_memory_compiles_steps_only_where_its_sinks_stay_within_reach() -> None:
    def columns(tokens: int | None, **config: Any) -> object:
        example = Example("memory", {**NARROW.config, "reach": 40, **config})
        with graft_onto(Backbone.wrap(frozen("llama")), example) as model:
            options = compiled_decoding(model, {"max_new_tokens": 10}, prompt_tokens=tokens, wanted=True)
        return options.get("max_cache_len", bool(options))

    assert columns(30) == 40, "no more columns than the sinks may reach over"
    assert columns(31) is False, "with a growing cache, the sinks would move"
    assert columns(None) is False, "nobody knows how long the text becomes"
    assert columns(31, sinks=0) == 256
    assert columns(None, sinks=0) is True


@pytest.mark.slow
def test_a_static_cache_that_exceeds_the_reach_is_checked_in_compiled_steps() -> None:
    example = Example("memory", {**NARROW.config, "reach": 12})
    ids = tiny_ids(1, 9)
    with grafted(frozen("llama"), example) as model:
        options = {**compiled_decoding(model, {"max_new_tokens": 3}, prompt_tokens=9, wanted=True), "max_cache_len": 24}
        options["compile_config"].backend = "eager"
        options["compile_config"].mode = None  # type: ignore[assignment]  # as torch.compile takes it
        eager = model.generate(ids, **GENERATED | {"max_new_tokens": 4})
        check_same_tokens(eager, model.generate(ids, **GENERATED | {"max_new_tokens": 4}, **options))
        with pytest.raises(GraftError) as error:
            model.generate(ids, **GENERATED | {"max_new_tokens": 5}, **options)
    assert "13 tokens" in str(error.value)


@pytest.mark.parametrize("name", ["cache_implementation", "prompt_lookup_num_tokens"])
def test_other_ways_of_a_generation_config_stay_as_they_are(name: str) -> None:
    value = "quantized" if name == "cache_implementation" else 3
    with grafted(frozen("llama"), GATED) as model:
        model.compiles_decoding = True
        ids, mask = prompts()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.model, "generate", lambda *_, **options: options)
            positional = model.generate(ids, GenerationConfig(max_new_tokens=4, **{name: value}))
            assert "cache_implementation" not in positional
            assert "cache_implementation" in model.generate(ids, attention_mask=mask, max_new_tokens=4)
        setattr(model.model.generation_config, name, value)
        assert compiled_decoding(model, {"max_new_tokens": 4}) == {}


@torch.no_grad()
def decode(model: GraftedModel, step: Any, prompt: int = 9, steps: int = 3) -> torch.Tensor:
    """(B, steps, V) after a padded prompt, with a static cache and the masks that `generate` makes for it."""
    ids, mask = tiny_ids(2, prompt + steps), torch.ones(2, prompt, dtype=torch.long)
    mask[0, :3] = 0
    size = 3 * prompt  # as large as no other size: torch.compile takes equal ones for the same
    cache = StaticCache(config=model.config, max_cache_len=size)
    outputs = [model(ids[:, :prompt], mask, positions_of(mask), past_key_values=cache, use_cache=True)]
    for new in range(prompt, prompt + steps):
        mask = functional.pad(mask, (0, 1), value=1)
        columns = functional.pad(mask, (0, size - mask.shape[1])).bool()[:, None, None]
        position = positions_of(mask)[:, -1:]
        outputs.append(step(ids[:, new : new + 1], columns, position, past_key_values=cache, use_cache=True))
    return torch.cat([output.logits for output in outputs[1:]], 1)
