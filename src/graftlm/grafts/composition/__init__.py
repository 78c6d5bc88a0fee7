"""Composition: two or more frozen models that together solve what none of them can solve alone. See README.md."""

from graftlm.grafts.composition.config import AugmentingConfig, CompositionConfig
from graftlm.grafts.composition.method import Composition
