"""Extension of griffe: Sphinx roles in docstrings (``:class:`RagCache```) become plain code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|meth|func|mod|data|attr):`(~?)([^`]+)`")


def _plain(found: re.Match[str]) -> str:
    name = found[2].rpartition(".")[2] if found[1] else found[2].removeprefix("ragcachekit.")
    return f"`{name}`"


class Roles(griffe.Extension):
    """Rewrites the docstring of every object that was loaded."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the roles of one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(_plain, obj.docstring.value)
