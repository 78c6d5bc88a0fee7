"""Composition: two or more frozen models that solve together what none can alone. See README.md."""

from graftlm.grafts.composition.config import AugmentingConfig, CompositionConfig
from graftlm.grafts.composition.method import Composition
