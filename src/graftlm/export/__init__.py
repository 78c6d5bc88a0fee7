"""Export a graft as a plain model: a folder that transformers loads without graftlm.

If the architecture is not part of transformers, its code is written next to the weights. The code needs only torch and
transformers.
"""

from graftlm.export.folder import check_model, export_graft, export_model

__all__ = ["check_model", "export_graft", "export_model"]
