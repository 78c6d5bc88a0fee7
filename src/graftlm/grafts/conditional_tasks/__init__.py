"""Conditional tasks (see README.md in this folder)."""

from graftlm.grafts.conditional_tasks.method import ConditionalTasks, ConditionalTasksConfig
