"""The code of docs/llama_index.md runs as it stands, on a tiny model."""

import re
from pathlib import Path

import pytest
from integration_kit import FACTS
from llama_index.core import VectorStoreIndex
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.schema import TextNode
from llama_kit import Embedder, seeing

from llama_index_ragcachekit import ChunkReuseEvent
from ragcachekit import RagCache

PAGE = (Path(__file__).parents[2] / "docs" / "llama_index.md").read_text()


@pytest.fixture
def dispatcher():
    found = get_dispatcher()
    before = list(found.event_handlers)
    yield found
    found.event_handlers[:] = before


def test_the_code_of_the_page_runs_and_reuses(rag, dispatcher, monkeypatch, capsys):
    monkeypatch.setattr(RagCache, "from_pretrained", lambda name: rag)
    embedder = Embedder(asked=[])
    nodes = [TextNode(text=text, metadata={"window": f"{text} Or so it is said."}) for text in FACTS]
    names = {"embed_model": embedder, "index": VectorStoreIndex(nodes, embed_model=embedder)}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        with seeing(ChunkReuseEvent) as seen:
            exec(compile(block.replace("max_tokens=64", "max_tokens=4"), "llama_index.md", "exec"), names)
            names["engine"].query("Where was Ada Lind born?")
    assert len(names["response"].source_nodes) == 4
    assert seen.events[-1].hits
    assert "cached" in capsys.readouterr().out
