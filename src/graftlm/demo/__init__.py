"""The demos: the main job on a real chat model, and on a toy model from nothing; their texts are on every machine."""

from graftlm.demo.run import run_chat_demo, run_demo
