"""Names of grafts in requests and in folders of several grafts."""

from __future__ import annotations

import re

GRAFT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_RULE = "at most 64 letters, digits, dots, dashes and underscores, with a letter or digit at the beginning"
