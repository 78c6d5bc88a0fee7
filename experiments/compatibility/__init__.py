"""Support of every graft on every family of models (see README.md in this folder)."""
