"""Answers and reports: plain frozen data, without torch, shown as text and in notebooks."""

from ragcachekit.reports.base import Records, Report, ShownPolicy
from ragcachekit.reports.engine import EncodingStats, QueueStats, ShadowReport
from ragcachekit.reports.requests import Answer, ChunkUse, GenerateReport, LinkReport

__all__ = [
    "Answer",
    "ChunkUse",
    "EncodingStats",
    "GenerateReport",
    "LinkReport",
    "QueueStats",
    "Records",
    "Report",
    "ShadowReport",
    "ShownPolicy",
]
