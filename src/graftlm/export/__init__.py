"""Export a graft as a plain model: a folder that transformers loads without graftlm.

If the architecture is not part of transformers, its code is written next to the weights. The code needs only torch and
transformers. Grafts that can be merged into the backbone's weights can also be written as a GGUF file.
"""

from graftlm.export.folder import check_model, export_graft, export_model
from graftlm.export.gguf_file import export_gguf, export_model_gguf
from graftlm.export.many import export_many, export_peft

__all__ = [
    "check_model",
    "export_gguf",
    "export_graft",
    "export_many",
    "export_model",
    "export_model_gguf",
    "export_peft",
]
