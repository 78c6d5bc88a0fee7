"""A Llama with an adapter next to every FFN: the template of exported models.

`FFN(x)` of the original architecture becomes `FFN(x) + adapter(x)`. The exporter replaces the names of Llama's classes
and modules by those of the exported architecture, and `Adapter` by the adapter of the graft. This file is ordinary
code, so that linters and type checkers read it; it must not import graftlm.
"""

from torch import nn
from transformers import __version__ as transformers_version
from transformers.activations import ACT2FN
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel

if int(transformers_version.partition(".")[0]) < 5:  # which names weights and rotary positions in other ways
    raise ImportError(f"This model needs transformers 5 or later, but found {transformers_version}: upgrade it.")


class GraftedLlamaConfig(LlamaConfig):
    """`LlamaConfig` with the inner width of the adapters, `adapter_width`."""

    model_type = "grafted_llama"
    adapter_width: int = 64


class Adapter(nn.Module):
    """A placeholder for the adapter of the graft."""

    def __init__(self, config):
        super().__init__()
        width = config.get_text_config().hidden_size
        self.w_i = nn.Linear(width, config.adapter_width, bias=False)
        self.act = ACT2FN["relu"]
        self.w_o = nn.Linear(config.adapter_width, width, bias=False)

    def forward(self, hidden_states):
        """Return the adapter's output (batch, tokens, width) for the FFN's input of the same shape."""
        return self.w_o(self.act(self.w_i(hidden_states)))


class FFNWithAdapter(nn.Module):
    """An FFN with an adapter in parallel: FFN(x) + adapter(x)."""

    def __init__(self, ffn, config):
        super().__init__()
        self.ffn = ffn
        self.adapter = Adapter(config)

    def forward(self, hidden_states, *args, **kwargs):
        """Return the sum of the FFN's and the adapter's output; other outputs of the FFN are unchanged."""
        output = self.ffn(hidden_states, *args, **kwargs)
        adapted = self.adapter(hidden_states)
        if isinstance(output, tuple):  # Some mixtures of experts also return the choices of their router.
            return (output[0] + adapted, *output[1:])
        return output + adapted


class GraftedLlamaModel(LlamaModel):
    """`LlamaModel` with adapters, which keep the float32 in which they were trained."""

    config_class = GraftedLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.mlp = FFNWithAdapter(layer.mlp, config)
        # Of the instance, since transformers 4 refuses names of modules that do not exist yet.
        self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), "adapter"}
        self.post_init()


class GraftedLlamaForCausalLM(LlamaForCausalLM):
    """`LlamaForCausalLM` on `GraftedLlamaModel`."""

    config_class = GraftedLlamaConfig
    # The paths of the modules, for GraftLM if it loads this model as a backbone.
    graft_sites = {}

    def __init__(self, config):
        super().__init__(config)
        self.model = GraftedLlamaModel(config)
        self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), "adapter"}
        self.post_init()
