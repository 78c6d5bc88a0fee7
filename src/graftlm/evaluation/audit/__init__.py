"""Audit: what a change of a model broke, measured on text that the model before it samples itself."""

from graftlm.evaluation.audit.comparison import Passage, TokenComparison, compare_windows
from graftlm.evaluation.audit.models import AuditedModel, load_pair
from graftlm.evaluation.audit.run import PAGE_NAME, Audit, AuditConfig, audit, print_audit
