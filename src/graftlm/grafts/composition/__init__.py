"""Composition: frozen models that solve tasks together that none of them can solve alone."""

from graftlm.grafts.composition.config import AugmentingConfig, CompositionConfig
from graftlm.grafts.composition.method import Composition
