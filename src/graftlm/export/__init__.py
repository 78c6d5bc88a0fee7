"""Export a graft as a plain model: a folder that transformers loads without graftlm.

If the architecture is not part of transformers, its code is written next to the weights. The code needs only torch and
transformers.
"""

from graftlm.export.folder import check_model, export_graft, export_model
from graftlm.export.many import export_many, export_peft

__all__ = ["check_model", "export_graft", "export_many", "export_model", "export_peft"]
