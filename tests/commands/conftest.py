"""The command line over a small corpus: shared fixtures."""

import pytest
import torch

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


@pytest.fixture
def learned_positions(request):
    """The reader's folder with a GPT-2 in it, which engines refuse."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = request.getfixturevalue("reader_copy")(None)
    (folder / "model.safetensors").unlink()
    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=256, vocab_size=1099)
    config.bos_token_id, config.eos_token_id = 1, 2
    with torch.random.fork_rng():
        torch.manual_seed(0)
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder
