"""Importing the index libraries, which are extras."""

from __future__ import annotations

import importlib
from typing import Any


def load_library(module: str, extra: str) -> Any:
    """The module, or ImportError saying which extra installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"this index needs {module}: pip install 'ragcachekit[{extra}]'"
        raise ImportError(message) from error
