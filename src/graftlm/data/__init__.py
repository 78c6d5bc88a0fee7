"""Sources of text, packed into rows of tokens and mixed into training batches by fixed shares."""

from graftlm.data.config import DataConfig
from graftlm.data.mixture import Mixture, TokenBlocks, build_mixture, pack
from graftlm.data.rows import NEW, OLD, Batch
from graftlm.data.source_config import SelfSourceConfig, SourceConfig
from graftlm.data.sources import Document, build_documents, read_documents
from graftlm.data.streams import RowPacker, StreamingBlocks
