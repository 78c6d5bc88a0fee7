"""Routing between LoRA experts of a real chat model."""
