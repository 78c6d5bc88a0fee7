"""Block expansion as the paper writes it, for Llama: a plain model with more layers and copied weights. Only for tests.

    φ(x) = φ_0 ∘ … ∘ φ_L,    Π x = x + MHSA(norm x) + FFN(norm(x + MHSA(norm x))),    W_O = W_down = 0 in a new block

The L blocks are partitioned into N groups of M = L / N blocks. For each group an identity copy of its top block is
stacked on the group (Wu et al., 2024, section 3.2). Nothing here calls the fast path.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def expand(model: LlamaForCausalLM, groups: int) -> tuple[LlamaForCausalLM, list[int]]:
    """A new model with `groups` more blocks, and the numbers of its new blocks; `groups` divides the layers."""
    old_config = model.config
    size = old_config.num_hidden_layers // groups
    values = old_config.to_dict()
    values["num_hidden_layers"] = old_config.num_hidden_layers + groups
    values.pop("layer_types", None)  # Llama has one type
    expanded = LlamaForCausalLM(LlamaConfig(**values))
    old, new, added = model.state_dict(), expanded.state_dict(), []
    for name in new:
        if ".layers." not in name:
            new[name] = old[name]
    at = 0
    for layer in range(old_config.num_hidden_layers):
        is_top = layer % size == size - 1
        for copy_number in range(2 if is_top else 1):
            for name in [name for name in new if name.startswith(f"model.layers.{at}.")]:
                weight = old[name.replace(f"layers.{at}.", f"layers.{layer}.")]
                is_output = "o_proj" in name or "down_proj" in name
                new[name] = torch.zeros_like(weight) if copy_number == 1 and is_output else weight
            if copy_number == 1:
                added.append(at)
            at += 1
    expanded.load_state_dict(new)
    return expanded.eval(), added
