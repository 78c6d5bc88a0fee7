"""Token-level routing of LoRA experts, without gradients."""

from graftlm.grafts.token_routing.config import EmbedderConfig, ExpertConfig, TokenRoutingConfig
from graftlm.grafts.token_routing.method import TokenRouting
