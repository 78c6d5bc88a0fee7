"""Answers requests to one backbone and its grafts, many at a time."""

from graftlm.serving.engine.engine import BatchingEngine

__all__ = ["BatchingEngine"]
