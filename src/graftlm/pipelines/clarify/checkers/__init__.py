"""Which form a text takes: formal or informal, feminine or masculine; by tables of rules, one for each language."""

from graftlm.pipelines.clarify.checkers.matcher import (
    KINDS,
    Checker,
    CheckerKind,
    Marker,
    Verdict,
    checker,
    languages,
)

__all__ = ["KINDS", "Checker", "CheckerKind", "Marker", "Verdict", "checker", "languages"]
