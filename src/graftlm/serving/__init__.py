"""An OpenAI-compatible server for backbones and their grafts, and a page that shows the activity of grafts."""
