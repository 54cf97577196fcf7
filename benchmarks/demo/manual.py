"""The manual of the running Python's standard library, cut into chunks: real documents without a download.

``pydoc`` renders every module as plain text. Rendering imports the modules, so a child process does
it: what an import leaves behind (warnings, signal handlers, patched names) stays there. Needs the
standard library only.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import itertools
import json
import os
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

MAX_WORDPIECES = 256

SKIPPED = frozenset(
    {
        *("antigravity", "this", "test", "turtle", "turtledemo", "tkinter", "idlelib"),  # open windows, print
        *("distutils", "ensurepip", "lib2to3", "venv"),  # patched by other packages, or for installers
        *("cgi", "cgitb"),  # gone from newer Pythons; cgi's signatures show the environment
        *("pydoc_data", "__main__"),
    }
)
"""Modules that are not imported, beside those whose names start with an underscore."""

SUBMODULES = (
    *("asyncio.queues", "asyncio.subprocess", "collections.abc", "concurrent.futures", "email.message"),
    *("html.parser", "http.client", "http.cookies", "http.server"),
    *("importlib.metadata", "importlib.resources"),
    *("json.decoder", "logging.config", "logging.handlers", "multiprocessing.pool", "os.path"),
    *("unittest.mock", "urllib.parse", "urllib.request", "wsgiref.simple_server", "xml.dom.minidom"),
    *("xml.etree.ElementTree", "xml.sax.handler", "zoneinfo"),
)
"""Modules inside packages that are documented too."""

# DATA shows os.environ, sys.path and the like; FILE shows where Python is installed.
_DROPPED = frozenset({"DATA", "FILE", "VERSION", "DATE", "AUTHOR", "CREDITS", "MODULE REFERENCE"})
_HEADING = re.compile(r"^[A-Z][A-Z ]+$")
_BARS = re.compile(r"^(?: *\|)+ ? ?")
_RULE = re.compile(r"^ *-{8,}$")  # a wordpiece for every hyphen
_ADDRESS = re.compile(r" at 0x(?:[0-9a-fA-F]+|\.\.\.)")
_NEEDED = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")  # to start Python at all
_SECONDS = 300


def chunks(
    count: Callable[[str], int], *, limit: int | None, size: int = MAX_WORDPIECES, names: Sequence[str] = ()
) -> tuple[str, ...]:
    """The manual in chunks of at most ``size`` wordpieces, in the order of modules and their texts.

    Each begins with the line of its module's dotted name. ``limit``: the first chunks of every module, in
    turn, so many in all; None: everything. ``names`` are the modules; default all. The same Python with the
    same tokenizer gives the same chunks.

    ``count`` gives the wordpieces of a text, special tokens included. It is asked about paragraphs, lines
    and words; what these count for, added up, must be no less than what they count for together.

    Raises RuntimeError if the documentation could not be rendered, ValueError if ``size`` is too small.
    """
    modules = [cut(module, text, count, size) for module, text in pages(*names)]
    taken: list[list[str]] = [[] for _ in modules]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*modules))
    found = (
        (text, at)
        for text, at in zip(in_turn, itertools.cycle(range(len(modules))), strict=False)
        if text is not None
    )
    for text, at in itertools.islice(found, limit):
        taken[at].append(text)
    # Some modules say the same twice.
    return tuple(dict.fromkeys(itertools.chain.from_iterable(taken)))


def pages(*names: str) -> list[tuple[str, str]]:
    """Name and documentation of these modules, or of all that this system has, rendered in a child process.

    RuntimeError if that fails.
    """
    # Next to nothing of our environment, which shows in default values; a fixed hash seed, because the
    # order of sets shows too.
    environment = {name: os.environ[name] for name in _NEEDED if name in os.environ}
    environment |= {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", __file__, *names],
        env=environment,
        cwd=os.path.abspath(os.sep),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"pydoc could not render the manual: {done.stderr.decode(errors='replace')[-500:]}"
        )
    return [(str(module), str(text)) for module, text in json.loads(done.stdout)]


def cut(module: str, text: str, count: Callable[[str], int], size: int) -> Iterator[str]:
    """Cut one module's documentation between paragraphs, else lines, else words.

    ValueError if ``size`` leaves no room beside the module's name.
    """
    special = count("")
    room = size - count(module)
    if room < 8:
        raise ValueError(f"chunks of {size} wordpieces have no room for text beside {module!r}")
    held, used = "", 0
    for part in _parts(text, lambda part: count(part) - special, room):
        needed = count(part) - special
        if held and used + needed > room:
            yield f"{module}\n{held.strip(chr(10))}"
            held, used = "", 0
        held, used = held + part, used + needed
    if held.strip():
        yield f"{module}\n{held.strip(chr(10))}"


def clean(text: str) -> str:
    """Return a page of pydoc without the sections about this machine, without bars and addresses."""
    kept: list[str] = []
    keep = True
    for line in text.splitlines():
        if _HEADING.match(line):
            keep = line not in _DROPPED
        line = _BARS.sub("", _ADDRESS.sub("", line)).rstrip()
        if keep and not _RULE.match(line):
            kept.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()


def _parts(text: str, cost: Callable[[str], int], room: int) -> Iterator[str]:
    """Paragraphs, each with the newlines before it; those that do not fit in pieces."""
    for paragraph in text.split("\n\n"):
        if cost(paragraph) <= room:
            yield f"\n\n{paragraph}"
            continue
        for line in paragraph.split("\n"):
            if cost(line) <= room:
                yield f"\n{line}"
                continue
            for word in line.split(" "):  # a word that is too long by itself is cut anywhere
                step = len(word) if cost(word) <= room else room
                for start in range(0, len(word), step or 1):
                    yield f"{' ' * (start == 0)}{word[start : start + step]}"


class _PlainText(pydoc.TextDoc):
    def bold(self, text: str) -> str:
        return text


def _render(name: str) -> str | None:
    """The module's page, or None where this system does not have the module."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    if not inspect.ismodule(module):
        return None
    page = clean(_PlainText().document(module, name))
    # platform's default values name the interpreter.
    return page.replace(sys.executable, "python").replace(os.path.realpath(sys.executable), "python")


def _names() -> list[str]:
    top = {n for n in sys.stdlib_module_names if not n.startswith("_") and n not in SKIPPED}
    return sorted(top | set(SUBMODULES))


def _main() -> None:
    """The child process: all pages as JSON on the standard output."""
    with contextlib.redirect_stdout(io.StringIO()):  # what modules print while they are imported
        rendered = [(name, _render(name)) for name in sys.argv[1:] or _names()]
    json.dump([(name, text) for name, text in rendered if text], sys.stdout)


if __name__ == "__main__":
    _main()
