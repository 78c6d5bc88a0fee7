"""Conditional tasks (see README.md in this folder)."""

from graftlm.grafts.conditional_tasks.config import ConditionalTasksConfig
from graftlm.grafts.conditional_tasks.covariance import covariance_similarity
from graftlm.grafts.conditional_tasks.method import ConditionalTasks

__all__ = ["ConditionalTasks", "ConditionalTasksConfig", "covariance_similarity"]
