"""An OpenAI-compatible server for backbones and their grafts, with a web page that shows the activity of grafts."""
