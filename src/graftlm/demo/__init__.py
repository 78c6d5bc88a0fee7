"""The demo: a real chat model learns text that every installation has."""

from graftlm.demo.run import run_chat_demo
