"""The documentation. `python -m docs.generate` writes the generated regions of its pages."""
