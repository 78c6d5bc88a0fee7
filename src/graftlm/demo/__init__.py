"""The demo: the main job on text that every Python installation carries."""

from graftlm.demo.run import run_demo

__all__ = ["run_demo"]
