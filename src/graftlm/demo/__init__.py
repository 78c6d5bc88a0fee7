"""The demos: the main job on a real chat model, and on a toy model from nothing; their texts are on every machine."""

from graftlm.demo.chat_model import run_chat_demo
from graftlm.demo.run import run_demo
