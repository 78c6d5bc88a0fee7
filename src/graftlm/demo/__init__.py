"""The demo, which teaches a chat model invented facts and shows what became of its other answers."""

from graftlm.demo.run import run_demo as run_demo
