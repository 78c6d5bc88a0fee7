"""Scripts that run inside the sandbox; they use the standard library alone, and nothing imports them."""
