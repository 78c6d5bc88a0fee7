"""The one training loop: what a recipe runs, and what a killed run resumes from."""
# ruff: noqa: F401  # the names of this package

from graftlm.training.config import TrainingConfig
from graftlm.training.loop import TrainingSummary, train
