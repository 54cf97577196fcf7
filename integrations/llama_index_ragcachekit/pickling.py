"""Components that LlamaIndex would pickle without what they work with."""

from __future__ import annotations

from typing import NoReturn


class NotPickled:
    """Base of components that hold an engine or an index: pickling raises TypeError.

    LlamaIndex's own components drop what cannot be pickled with a warning, and would fail later.
    """

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} holds an engine or open files, and cannot be pickled: make one in each "
            "process"
        )
