"""The tests that docs/langchain.md names as its proof are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:tests/sample/)?test_\w+\.py)?(?:::)?(\w+)?`")


def test_every_named_test_is_there():
    lines = (ROOT / "docs/langchain.md").read_text().partition("## What proves it")[2].splitlines()
    named = []
    for line in lines:
        source = ""
        for file, name in NAMED.findall(line.split("|")[3]) if line.startswith("|") else ():
            if file:
                source = (ROOT / (file if "/" in file else f"tests/integrations/{file}")).read_text()
            if name:
                assert re.search(rf"^(async def|def|class) {name}\b", source, re.MULTILINE), (line, name)
            named.append(file or name)
    assert len(named) >= 25
