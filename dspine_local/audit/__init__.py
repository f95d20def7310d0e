"""How verification in batches differs from decoding one by one, measured on this machine (docs/lossless.md)."""

from __future__ import annotations

from dspine_local.audit.cases import Case, chat_cases, deep_cases
from dspine_local.audit.measure import measure
from dspine_local.audit.result import AuditResult, BatchResult, BlockCount

__all__ = ["AuditResult", "BatchResult", "BlockCount", "Case", "chat_cases", "deep_cases", "measure"]
