"""The experiment that audits SmolLM2."""
