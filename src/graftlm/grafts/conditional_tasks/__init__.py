"""Conditional tasks: many tasks on one frozen or partly frozen encoder."""

from graftlm.grafts.conditional_tasks.config import ConditionalTasksConfig
from graftlm.grafts.conditional_tasks.method import ConditionalTasks
