"""Scripts that run inside the sandbox, with the standard library only; no module imports them."""
