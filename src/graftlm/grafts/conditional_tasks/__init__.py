"""Conditional tasks (see README.md in this folder)."""
# ruff: noqa: F401  # the names of this package

from graftlm.grafts.conditional_tasks.method import ConditionalTasks, ConditionalTasksConfig
