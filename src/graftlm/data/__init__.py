"""Sources of text, packed into rows of tokens and mixed into training batches by fixed shares."""

from graftlm.data.packing import NEW, OLD, Batch, Mixture, RowPacker, StreamingBlocks, TokenBlocks, build_mixture, pack
from graftlm.data.sources import DataConfig, Document, SelfSourceConfig, SourceConfig, build_documents, read_documents
