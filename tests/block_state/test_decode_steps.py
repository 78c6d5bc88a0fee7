"""A decode step is one compiled graph, waits for no accelerator, and leaves rows without a token as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from block_state import tools
from cases import thinned
from graftlm.backbone import compiled_decoding
from graftlm.backbone.slot_cache import has_slots
from graftlm.testing.accelerator import pretended_accelerator, waits

TOLERANCE = 1e-7
READS = ("item", "tolist", "nonzero")
COMPILED = [name for name, settings in tools.VARIANTS.items() if settings.get("kernel") != "unstructured"]
GENERATED: dict[str, Any] = {
    "max_new_tokens": 2 * tools.W + 2,  # so that windows end
    "do_sample": False,
    "pad_token_id": 0,
    "output_logits": True,
    "return_dict_in_generate": True,
}


@pytest.fixture
def _forget() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, :5] = 0
    mask[2, :2] = 0
    return tools.ids(3, 9), mask


def check_compiled_generation(model: Any, backend: Any) -> None:
    """Compiled logits are the eager ones, so tokens are the same unless two logits are nearly equal."""
    ids, mask = prompts()
    eager = model.generate(ids, attention_mask=mask, **GENERATED)
    options = compiled_decoding(model, GENERATED, prompt_tokens=ids.shape[1], wanted=True)
    config: Any = options["compile_config"]
    assert config.mode == "default", "CUDA graphs would overwrite the states"
    config.backend = backend
    config.mode = None
    config.fullgraph = True
    compiled = model.generate(ids, attention_mask=mask, **GENERATED, **options)
    assert compiled.past_key_values.is_compileable
    eager_logits = torch.stack(eager.logits)
    best, second = eager_logits.topk(2).values.unbind(-1)
    assert bool((best - second > TOLERANCE).all()), "the tokens are not decided"
    assert compiled.sequences.tolist() == eager.sequences.tolist()
    torch.testing.assert_close(torch.stack(compiled.logits), eager_logits, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.usefixtures("_forget")
@pytest.mark.parametrize("variant", COMPILED)
def test_generate_with_compiled_steps_gives_the_tokens_of_eager_steps(variant: str) -> None:
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        graphs.append([node for node in module.graph.nodes if node.target in READS])
        return module.forward

    check_compiled_generation(tools.model(variant), backend)
    assert graphs == [[]] * len(graphs), "the host would wait for an accelerator"
    assert 1 <= len(graphs) <= 2, "the second is for lengths that change"


@pytest.mark.slow
@pytest.mark.usefixtures("_forget")
def test_decode_steps_compile_to_machine_code() -> None:
    model = tools.model("sh-s4d", num_hidden_layers=1, mixer_layers=[0], positional_ssm=False)
    check_compiled_generation(model, "inductor")


@pytest.mark.parametrize("variant", thinned(COMPILED, {"slide", "recurrent", "mf-s4d", "sh-delta-reset"}))
def test_a_decode_step_waits_for_no_accelerator(variant: str) -> None:
    model = tools.model(variant)
    ids, mask = prompts()
    cache = DynamicCache()
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache, use_cache=True)
    lines: list[str] = []
    with pretended_accelerator(model, cache) as move:
        new = move(ids[:, :1])
        full_mask = move(mask)
        for _ in range(2):  # the first step may copy constants to the device
            full_mask = torch.cat([full_mask, torch.ones_like(new)], 1)
            given = full_mask
            lines = waits(lambda given=given: model(new, attention_mask=given, past_key_values=cache, use_cache=True))
    assert lines == []


@pytest.mark.parametrize("variant", tools.EXHAUSTIVE_VARIANTS)
def test_a_row_without_a_token_in_a_step_continues_later_as_if_nothing_were(variant: str) -> None:
    model = tools.model(variant)
    ids = tools.ids(2, 14)
    mask = torch.ones(2, 14, dtype=torch.long)
    mask[0, 9] = 0
    mask[1, 7:9] = 0  # in two decode steps, the first of which would end a window
    cache = DynamicCache()
    actual = []
    with torch.no_grad():
        for start, stop in pairwise((0, *range(7, 15))):
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
            actual.append(out.logits)
        expected = [model(ids[row : row + 1, mask[row].bool()], use_cache=False).logits[0] for row in range(2)]
    for row, logits in enumerate(torch.cat(actual, 1)):
        torch.testing.assert_close(logits[mask[row].bool()], expected[row], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("variant", ["sh-unstructured", "mf-unstructured"])
def test_unstructured_kernels_decode_eagerly(variant: str) -> None:
    assert compiled_decoding(tools.model(variant), {}, wanted=True) == {}


def test_a_model_with_states_has_no_slots_for_keys() -> None:
    assert not has_slots(tools.model("slide"))
