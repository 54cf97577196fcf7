"""A small corpus in a folder, the embedding model loaded once, and the command line in this process."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app as proofs_app
from benchmarks.world.reader_folder import READER
from benchmarks.world.world import make_world
from ragcachekit.commands.app import app
from ragcachekit.commands.ask import open_session
from ragcachekit.commands.embedding import MiniLM
from ragcachekit.commands.workspace import OwnFiles
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.entry import read_key


@pytest.fixture(scope="session")
def world():
    return make_world(3, people=6, companies=3, towns=3)


@pytest.fixture(scope="session")
def corpus(world, tmp_path_factory):
    """One text file per article; with 34 words to a chunk, a chunk of an article is a chunk of the file."""
    folder = tmp_path_factory.mktemp("corpus")
    for article in world.articles:
        (folder / f"{article.title.replace(' ', '_')}.txt").write_text("\n\n".join(article.chunks))
    return folder


@pytest.fixture(scope="session")
def minilm():
    return MiniLM()


@pytest.fixture(scope="session")
def prepared(corpus, minilm, tmp_path_factory):
    """A cache folder with the corpus's index and the reader's digests, but no KV; to be copied."""
    folder = tmp_path_factory.mktemp("prepared")
    settings = OwnFiles(str(corpus), READER, cache=str(folder), chunk_tokens=34)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ragcachekit.commands.embedding.MiniLM", lambda: minilm)
        with open_session(settings):
            pass
    shutil.rmtree(folder / "kv")
    return folder


@pytest.fixture
def one_minilm(minilm, monkeypatch):
    """Commands share the loaded embedding model."""
    monkeypatch.setattr("ragcachekit.commands.embedding.MiniLM", lambda: minilm)
    monkeypatch.setattr("benchmarks.query_cache.workload.MiniLM", lambda: minilm)
    return minilm


@pytest.fixture
def command():
    """Run a command line; the result has exit_code, output (both streams) and stdout."""
    return lambda *arguments, **options: _run(app, arguments, **options)


@pytest.fixture
def proofs():
    """As ``command``, of ``python -m benchmarks``."""
    return lambda *arguments, **options: _run(proofs_app, arguments, **options)


def _run(app, arguments, **options):
    result = CliRunner().invoke(app, [str(a) for a in arguments], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def reader_copy(tmp_path):
    """The reader's folder without what is named; ``template`` replaces the chat template."""

    def copy(template: str | None) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        for file in Path(READER).iterdir():
            if file.name != "chat_template.jinja":
                (folder / file.name).write_bytes(file.read_bytes())
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return folder

    return copy


def kv_of(folder):
    """The KV of every entry in the folder of a disk tier."""
    with closing(DiskStore(folder, 1 << 40)) as store:
        for path in sorted(folder.glob("*.safetensors")):
            yield store.get(read_key(path)).kv
