"""SmolLM2 and three copies of it that were trained on German, French and code, composed at once."""
