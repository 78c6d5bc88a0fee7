"""Tests of exported models in the real vLLM, which has its own environment."""
