"""Frozen configuration dataclasses; every field is validated when it is set."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

DEFAULT_HOST_BYTES = 4 << 30
DEFAULT_DISK_BYTES = 64 << 30


@dataclass(frozen=True)
class StoreConfig:
    """Which tiers hold chunk KV and how many bytes each may take.

    Attributes
    ----------
    host_bytes : int
        Budget of the host memory tier in bytes; 0 turns the tier off.
    disk_path : path or None
        Folder of the disk tier; None turns the tier off.
    disk_bytes : int
        Budget of the disk tier in bytes.
    """

    host_bytes: int = DEFAULT_HOST_BYTES
    disk_path: str | os.PathLike[str] | None = None
    disk_bytes: int = DEFAULT_DISK_BYTES

    def __post_init__(self) -> None:
        if self.host_bytes < 0:
            raise ValueError(f"host_bytes must be >= 0, got {self.host_bytes}")
        if self.disk_bytes <= 0:
            raise ValueError(
                f"disk_bytes must be > 0, got {self.disk_bytes}; use disk_path=None for no disk tier"
            )
        if self.disk_path is not None:
            object.__setattr__(self, "disk_path", Path(self.disk_path).expanduser())
