"""Configs of the attention kernel: defaults, how many splits, and tuning files."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from ragcachekit_kernels.attention import configs
from ragcachekit_kernels.attention.configs import Case, Config, config_for, default_config, splits_for

ONE = Config(32, 16, 4, 1)


def file_of(**found):
    """As the tuner writes it."""
    entries = {key: asdict(config) for key, config in found.items()}
    return json.dumps({"schema": 1, "sparse_attention": entries})


def smem(config, dtype, width):
    """Bytes that the query tile and the stages of keys and values take."""
    return (config.block_m + 2 * config.stages * config.block_n) * width * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize(("capability", "room"), [((9, 0), 227), ((8, 0), 163), ((8, 9), 99), ((12, 0), 99)])
def test_defaults_fit_into_shared_memory(dtype, width, capability, room):
    padded = {64: 64, 80: 128, 96: 128, 112: 128, 128: 128, 192: 256, 256: 256}[width]
    for table in (False, True):
        config = default_config(Case(torch.device("cuda"), dtype, width, 64, table), capability)
        assert smem(config, dtype, padded) <= room * 1024
        assert not (config.descriptors and (table or capability < (9, 0)))


class TestSplits:
    """An H100: 132 programs, 8 KV heads."""

    def test_many_tiles_are_not_split(self):
        assert splits_for(154, 2, 8, 132, 256) == 1

    def test_few_tiles_fill_the_grid_once(self):
        assert splits_for(2, 2, 8, 132, 256) == 8  # 16 tiles, 128 items

    def test_a_single_tile_takes_what_there_is(self):
        assert splits_for(1, 1, 1, 132, 256) == 32

    def test_never_more_parts_than_blocks_of_keys(self):
        assert 1 < splits_for(1, 1, 1, 132, 12) <= 12
        assert splits_for(1, 1, 1, 132, 1) == 1

    @pytest.mark.parametrize("blocks", [1, 2, 5, 10, 34])
    def test_splitting_never_costs_more_than_it_gives(self, blocks):
        def longest(splits):  # one item after the other to the program with the least to do
            loads = [0.0] * 132
            lengths = [64.0] * min(2, blocks) + [64.0 * i / blocks for i in range(max(blocks - 2, 0), 0, -1)]
            for length in lengths:
                for _ in range(8 * splits):
                    loads[loads.index(min(loads))] += length / splits
            return max(loads)

        chosen = splits_for(blocks, 2, 8, 132, 64)
        assert longest(chosen) <= longest(1)


class TestFile:
    def test_there_and_back(self):
        both = {"a/b": ONE, "c/d": Config(128, 64, 8, 3, descriptors=True, resident=0)}
        assert configs.loads(file_of(**both)) == both

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            "{}",
            '{"schema": 2, "sparse_attention": {}}',
            file_of(a=ONE).replace("32", "33"),
            '{"schema": 1, "sparse_attention": {"a": {"block": 16}}}',
        ],
    )
    def test_others_are_refused(self, text):
        with pytest.raises(ValueError, match="not a kernel tuning file"):
            configs.loads(text)

    def test_dispatch_uses_it_for_its_device_only(self, tmp_path, monkeypatch):
        case = Case(torch.device("cuda"), torch.bfloat16, 128, 128, table=False)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        assert case.key == "A GPU/bfloat16/128/128/pointers"
        (tmp_path / "tuning.json").write_text(file_of(**{case.key: ONE}))
        usual = config_for(case)
        monkeypatch.setenv(configs.SETTING, str(tmp_path / "tuning.json"))
        assert config_for(case) == ONE != usual
        assert config_for(case._replace(value_dim=64)) == usual
        assert config_for(case._replace(plain=False)) not in (ONE, usual)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Another")
        assert config_for(case) == usual


def test_unknown_sizes_are_refused():
    with pytest.raises(ValueError, match="power of two"):
        Config(24, 16, 4, 1)
    with pytest.raises(ValueError, match="cannot be launched"):
        Config(16, 16, 3, 1)
