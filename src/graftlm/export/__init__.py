"""A graft as a plain model: a folder that transformers loads where graftlm is not installed.

If transformers lacks the architecture, its code is written next to the weights. It needs torch and transformers only.
"""

from graftlm.export.folder import export_graft, export_model

__all__ = ["export_graft", "export_model"]
