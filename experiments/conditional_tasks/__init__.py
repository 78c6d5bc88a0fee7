"""Conditional tasks against single-task and multi-task fine-tuning and adapters (see README.md in this folder)."""
