"""Beginnings of prompts, computed ahead: what ``precompute`` does where chunks cannot be linked."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.filesize import decimal as size
from tqdm.auto import tqdm

from ragcachekit.commands.ask import corpus_index
from ragcachekit.commands.console import counted
from ragcachekit.commands.corpus import Corpus
from ragcachekit.commands.estimate import retrieved
from ragcachekit.commands.manifest import Manifest
from ragcachekit.commands.questions import SEPARATOR, PromptMaker, read_questions
from ragcachekit.commands.workspace import OwnFiles
from ragcachekit.config import StoreConfig
from ragcachekit.engine.rag_cache import RagCache
from ragcachekit.errors import RagCacheError, StoreError
from ragcachekit.model.snapshots import SnapshotLayout
from ragcachekit.plan.link_plan import PromptRequest
from ragcachekit.prefix_tree.nodes import key_of
from ragcachekit.prompt.segments import TokenSegment


@dataclass(frozen=True)
class Beginning:
    """The first text of a prompt with its first ``chunks``, in order.

    ``request`` computes it, ``start`` is the end of the beginning before it, ``uses`` the number of prompts
    that begin so.
    """

    request: PromptRequest
    chunks: int
    start: int
    uses: int = 0

    @property
    def tokens(self) -> int:
        """Those after the beginning before it."""
        return len(self.request.token_ids) - 2 - self.start


def count_beginnings(requests: Iterable[PromptRequest], min_uses: int = 1) -> list[Beginning]:
    """Beginnings of at least ``min_uses`` prompts, hottest first, none before the one that it goes on from.

    The text before the chunks is always among them.
    """
    found = dict[tuple[tuple[str, ...], ...], Beginning]()
    for request in requests:
        root, path = request.place or (None, ())
        places = [i for i, segment in enumerate(request.segments) if segment.is_chunk and segment.token_ids]
        steps = [i for i, step in enumerate(path) if step.document]
        ends = [(places[0], steps[0])] if steps and steps[0] else []
        ends += [(place + 1, step + 1) for place, step in zip(places, steps, strict=False)]
        start, before = 0, len(steps) and not steps[0]
        for chunks, (place, step) in enumerate(ends, int(before)):
            assert root is not None
            key = tuple(one.ids for one in path[:step])
            after = TokenSegment(request.token_ids[-1:] * 2, True)  # a prompt's last two tokens are no step
            segments = (*request.segments[:place], after)
            part = replace(request, segments=segments, place=(root, path[:step]))
            known = found.get(key) or Beginning(part, chunks, start)
            found[key] = replace(known, uses=known.uses + 1)
            start = len(part.token_ids) - 2
    hot = [one for one in found.values() if one.uses >= min_uses or not one.chunks]
    return sorted(hot, key=lambda one: (-one.uses, one.chunks))


@contextmanager
def open_beginnings(
    settings: OwnFiles,
    engine: RagCache,
    corpus: Corpus,
    log: Path | None = None,
    *,
    min_uses: int = 2,
    keep_gone: bool = False,
    dry: bool = False,
) -> Iterator[BeginningsRun]:
    """A run over the model of an engine of grade prefix; ``dry``: the cache folder is not touched.

    RagCacheError where nothing can be reused; ValueError, CorpusError for a wrong log.
    """
    if engine.components.grade.layout is None:
        why = engine.components.grade.why
        raise RagCacheError(f"nothing is reused on this model, and there is nothing to precompute: {why}")
    with tempfile.TemporaryDirectory(prefix="ragcachekit-") as scratch:
        own = replace(settings, cache=scratch) if dry else settings
        with RagCache(
            engine.model,
            engine.tokenizer,
            policy="prefix",
            store=StoreConfig(host_bytes=0, disk_path=own.folder.kv, disk_bytes=settings.disk_bytes),
            namespace=settings.namespace,
            cold="now",
            cache_dir=own.folder.path,
        ) as rag:
            yield BeginningsRun(own, rag, corpus, log, min_uses, keep_gone)


class BeginningsRun:
    """The hottest beginnings of a log's prompts that fit into the disk budget, ready to be computed.

    Without a log it is the system text alone. ``todo`` are those to compute, ``left_out`` has no room.
    """

    unit = "beginning"

    def __init__(
        self,
        settings: OwnFiles,
        rag: RagCache,
        corpus: Corpus,
        log: Path | None,
        min_uses: int,
        keep_gone: bool,
    ) -> None:
        self._settings, self._rag, self.corpus = settings, rag, corpus
        ids = rag.encode(corpus.texts)  # registers them
        self._manifest = Manifest.of(settings, rag, settings.folder.manifests, "prefix")
        self.gone = self._manifest.replace(dict.fromkeys(ids, 0), keep_gone=keep_gone)
        maker, orders = PromptMaker(rag.tokenizer), [tuple(corpus.texts[:1])]
        if log is not None:
            asked = read_questions(log, ["question"])
            orders = [tuple(texts) for _, texts, _ in retrieved(settings, asked, corpus)]
            rag.register([text for texts in orders for text in texts])
        prompts = (maker.filled(SEPARATOR.join(texts), "Why?") for texts in orders)
        every = count_beginnings((rag.prepare(prompt) for prompt in prompts), min_uses)
        if log is None:
            every = [one for one in every if not one.chunks]
        self._log = "none (--log): the system text alone"
        if log is not None:
            self._log = f"{counted(len(orders), 'prompt')}; beginnings of {min_uses} or more"
        new = [one for one in every if not self._is_stored(one)]
        room, self.todo = sum(record.budget - record.nbytes for record in rag.stats()), list[Beginning]()
        for one in new:
            room -= self.nbytes(one)
            if room < 0:
                break
            self.todo.append(one)
        self.kept, self.left_out = len(every) - len(new), len(new) - len(self.todo)

    @property
    def rows(self) -> dict[str, str]:
        """What there is to do, for people."""
        left = f", {self.left_out} have no room (--disk-gb)" if self.left_out else ""
        amount = f"{self.todo_tokens} tokens, {size(self.todo_bytes)}{left}"
        return {
            "grade": f"prefix ({self._rag.components.grade.why}): exact beginnings",
            "log": self._log,
            "to compute": f"{counted(len(self.todo), self.unit)}, {amount}",
        }

    @property
    def changes(self) -> str:
        """The numbers of beginnings to compute and stored, and of chunks to forget, for people."""
        return f"{len(self.todo)} new, {self.kept} kept, {len(self.gone)} forgotten"

    @property
    def todo_tokens(self) -> int:
        """Tokens to compute."""
        return sum(one.tokens for one in self.todo)

    @property
    def todo_bytes(self) -> int:
        """Bytes to be stored."""
        return sum(map(self.nbytes, self.todo))

    def nbytes(self, one: Beginning) -> int:
        """Bytes of the rows and of the state of one beginning, and the ids of its tokens for ``forget``."""
        layout, (_, path) = self._rag.components.grade.layout, one.request.place or (None, ())
        assert isinstance(layout, SnapshotLayout)
        ids, end = 0, 0
        for step in path:
            end += step.tokens
            ids += end if end > one.start else 0
        return one.tokens * layout.token_bytes + layout.state_bytes + 4 * ids

    def run(self, *, progress: bool = False) -> float:
        """Forget what is gone, compute what is missing, hottest first, embed what the index of ``ask`` lacks.

        Returned are the seconds of the beginnings. What was computed stays if this is interrupted.
        """
        from ragcachekit.commands.embedding import MiniLM

        if self.gone:
            self._rag.forget(self.gone)
        self._manifest.write()
        started_at = time.perf_counter()
        with tqdm(total=self.todo_tokens, unit="tok", desc="beginnings", disable=not progress) as bar:
            for one in self.todo:
                self._rag.compute_beginning(one.request)
                bar.update(one.tokens)
        seconds = time.perf_counter() - started_at
        if lost := sum(not self._is_stored(one) for one in self.todo):
            raise StoreError(
                f"{lost} of {counted(len(self.todo), 'beginning')} could not be stored; free some space and "
                "run the same command again"
            )
        corpus_index(self._settings, self.corpus, MiniLM())
        return seconds

    def estimated_seconds(self) -> None:
        """None: the time of beginnings is not predicted."""

    def _is_stored(self, one: Beginning) -> bool:
        tree, place = self._rag.components.tree, one.request.place
        return tree is not None and place is not None and key_of(*place) in tree.disk.store
