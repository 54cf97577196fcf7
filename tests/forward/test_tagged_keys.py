"""Tags pass to what is computed from tagged keys, and to nothing else."""

from __future__ import annotations

import torch

from ragcachekit.forward.attention import TaggedKeys, tagged


def tag_of(tensor):
    return getattr(tensor, "tag", None)


def test_tags_survive_what_models_do_to_keys():
    note = object()
    keys = tagged(torch.arange(24.0).view(1, 2, 3, 4), note)
    expanded = torch.nn.Linear(4, 6, bias=False)(keys).view(1, 2, 3, 6).transpose(1, 2)
    first, second = torch.split(expanded, [2, 4], -1)
    joined = torch.cat((torch.ones(1, 3, 2, 1), second), -1)
    fresh = keys.new_empty(2, 2)
    fresh[:, :1].copy_(torch.ones(2, 1))
    for made in (expanded, first, joined, fresh, keys.repeat(1, 2, 1, 1), keys.to(torch.float64)):
        assert tag_of(made) is note


def test_the_original_and_plain_tensors_stay_untagged():
    plain = torch.ones(2, 3)
    keys = tagged(plain, "note")
    assert tag_of(plain) is None
    assert keys.data_ptr() == plain.data_ptr()
    assert tag_of(torch.ones(3) + 1) is None


def test_two_tags_do_not_mix():
    one, other = tagged(torch.ones(2), "one"), tagged(torch.ones(2), "other")
    assert tag_of(one * 2) == "one"
    assert tag_of(other * 2) == "other"
    assert TaggedKeys.tag is None
