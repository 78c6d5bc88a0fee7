"""Sources of text, packed into rows of tokens and mixed into training batches by fixed shares."""

from graftlm.data.mixture import Mixture, TokenBlocks, build_mixture, pack
from graftlm.data.rows import NEW, OLD, Batch
from graftlm.data.sources import DataConfig, Document, SelfSourceConfig, SourceConfig, build_documents, read_documents
from graftlm.data.streams import RowPacker, StreamingBlocks
