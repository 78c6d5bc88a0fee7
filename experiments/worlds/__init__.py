"""Four worlds of invented facts, one LoRA each: does routing by token answer questions of two worlds at once?"""
