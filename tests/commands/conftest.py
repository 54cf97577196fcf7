"""The command line over a small corpus: shared fixtures."""

import shutil

import pytest
import torch

from benchmarks.world.reader_folder import READER
from command_fixtures import (  # noqa: F401
    command,
    corpus,
    minilm,
    one_minilm,
    prepared,
    proofs,
    reader_copy,
    world,
)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory):
    """The reader's folder with a tiny Qwen3.5 of random weights in it."""
    from snapshots_kit import hybrid_speaker

    folder = tmp_path_factory.mktemp("models") / "hybrid"
    shutil.copytree(READER, folder)
    (folder / "model.safetensors").unlink()
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048}
    hybrid_speaker(vocab_size=1099, **tokens).save_pretrained(folder)
    return folder


@pytest.fixture
def learned_positions(request):
    """The reader's folder with a GPT-2 in it, whose chunks cannot be linked."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = request.getfixturevalue("reader_copy")(None)
    (folder / "model.safetensors").unlink()
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=256, vocab_size=1099)
    config.bos_token_id, config.eos_token_id = 1, 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder
