"""Audit: what a change of a model broke, measured on text that the unchanged model samples itself."""

from graftlm.evaluation.audit.auditor import audit
from graftlm.evaluation.audit.comparison import TokenComparison, compare_windows
from graftlm.evaluation.audit.config import AuditConfig
from graftlm.evaluation.audit.loading import AuditedModel, load_pair
from graftlm.evaluation.audit.passages import Passage
from graftlm.evaluation.audit.result import PAGE_NAME, Audit, print_audit
