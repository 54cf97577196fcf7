"""Frozen configuration dataclasses; every field is validated when it is set."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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


@dataclass(frozen=True)
class ShadowConfig:
    """How much of the traffic is answered a second time in full, to see what reuse does to answers.

    Attributes
    ----------
    share : float
        Share of requests that are drawn, 0 to 1; 0 turns shadow mode off.
    when : {"background", "after"}
        Whether the full prefill runs in a thread behind the answer, or before the answer is returned.
    window : int
        How many of the last compared requests the bound is about.
    bound : float
        Warn when more than ``bound * window`` of the last ``window`` answers differed from those of full.
    fall_back : bool
        From then on compute further prompts of that namespace in full, until ``rag.shadow.reset()``.
    seed : int
        Which requests are drawn: the same seed draws the same ones.
    """

    share: float
    when: Literal["background", "after"] = "background"
    window: int = 50
    bound: float = 0.1
    fall_back: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("share", "bound"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.when not in ("background", "after"):
            raise ValueError(f"when must be 'background' or 'after', got {self.when!r}")
        if self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
