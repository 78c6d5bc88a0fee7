"""vLLM as a test of exported models, in an environment of its own."""
