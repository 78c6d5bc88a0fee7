"""Sources of text, packed into domain-marked batches and mixed by fixed shares."""

from graftlm.data.batch import Batch
from graftlm.data.build import DataConfig, build_mixture
from graftlm.data.documents import Document
from graftlm.data.mixture import NEW, OLD, Mixture
from graftlm.data.packing import TokenBlocks, pack
from graftlm.data.sources import SourceConfig, build_documents, read_documents
from graftlm.data.streaming import StreamingBlocks

__all__ = [
    "NEW",
    "OLD",
    "Batch",
    "DataConfig",
    "Document",
    "Mixture",
    "SourceConfig",
    "StreamingBlocks",
    "TokenBlocks",
    "build_documents",
    "build_mixture",
    "pack",
    "read_documents",
]
