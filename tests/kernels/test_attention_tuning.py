"""Configs of the attention kernel: defaults, how many splits, the tuner and its file."""

from __future__ import annotations

import pytest
import torch

from ragcachekit_kernels.attention import configs
from ragcachekit_kernels.attention.configs import Config, default_config, splits_for

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ONE, TWO, THREE = Config(32, 16, 4, 1), Config(16, 16, 4, 1), Config(16, 32, 4, 1)


def smem(config, dtype, width):
    """Bytes that the query tile and the stages of keys and values take."""
    return (config.block_m + 2 * config.stages * config.block_n) * width * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize(("capability", "room"), [((9, 0), 227), ((8, 0), 163), ((8, 9), 99), ((12, 0), 99)])
def test_defaults_fit_into_shared_memory(dtype, width, capability, room):
    padded = {64: 64, 80: 128, 96: 128, 112: 128, 128: 128, 192: 256, 256: 256}[width]
    for table in (False, True):
        config = default_config(capability, dtype, width, 64, table)
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
        assert configs.loads(configs.dumps(both)) == both

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "[]",
            "{}",
            '{"schema": 2, "sparse_attention": {}}',
            configs.dumps({"a": ONE}).replace("32", "33"),
            '{"schema": 1, "sparse_attention": {"a": {"block": 16}}}',
        ],
    )
    def test_others_are_refused(self, text):
        with pytest.raises(ValueError, match="not a kernel tuning file"):
            configs.loads(text)

    def test_dispatch_uses_it_for_its_device_only(self, tmp_path, monkeypatch):
        device = torch.device("cuda")
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        key = configs.key_of(device, torch.bfloat16, 128, 128, table=False)
        assert key == "A GPU/bfloat16/128/128/pointers"
        (tmp_path / "tuning.json").write_text(configs.dumps({key: ONE}))
        usual = configs.config_for(device, torch.bfloat16, 128, 128, table=False)
        monkeypatch.setenv(configs.SETTING, str(tmp_path / "tuning.json"))
        assert configs.config_for(device, torch.bfloat16, 128, 128, table=False) == ONE != usual
        assert configs.config_for(device, torch.bfloat16, 128, 64, table=False) == usual
        masked = configs.config_for(device, torch.bfloat16, 128, 128, table=False, plain=False)
        assert masked not in (ONE, usual)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Another")
        assert configs.config_for(device, torch.bfloat16, 128, 128, table=False) == usual


class TestTuner:
    @pytest.fixture
    def shape(self):
        from ragcachekit_kernels.attention.tune import Shape

        return Shape(4, 2, 16, 64, range(0, 64, 7), torch.float32, value_dim=32, window=40)

    def test_the_fastest_wins(self, shape):
        from ragcachekit_kernels.attention import tune

        times = iter([3.0, 1.0, 2.0])
        tuned = tune.tune(shape, DEVICE, among=[ONE, TWO, THREE], timer=lambda call: next(times))
        assert tuned.best == TWO
        assert [t.milliseconds for t in tuned.tried] == [3.0, 1.0, 2.0]
        assert all(t.error < 1e-5 for t in tuned.tried)

    @pytest.mark.parametrize("table", [False, True])
    def test_a_wrong_one_is_refused_however_fast(self, shape, table, monkeypatch):
        from ragcachekit_kernels.attention import row_attention, tune

        name = "attention_at" if table else "attention"
        right = getattr(row_attention, name)

        def sometimes_wrong(*args, config, **options):
            out, lse = right(*args, config=config, **options)
            if config == ONE:
                out[1, 3] += 1e-3
            if config == TWO:
                lse[0, 0] = float("nan")
            return out, lse

        monkeypatch.setattr(row_attention, name, sometimes_wrong)
        tuned = tune.tune(shape, DEVICE, table=table, among=[ONE, TWO, THREE], timer=lambda call: 1.0)
        assert tuned.best == THREE
        assert [t.refused for t in tuned.tried] == ["differs from the reference"] * 2 + [None]
        with pytest.raises(ValueError, match=r"no candidate .* differs from the reference"):
            tune.tune(shape, DEVICE, table=table, among=[ONE, TWO], timer=lambda call: 1.0)

    def test_one_that_cannot_be_launched_is_no_candidate(self, shape, monkeypatch):
        from ragcachekit_kernels.attention import row_attention, tune

        right = row_attention.attention

        def too_large(*args, config, **options):
            if config == ONE:
                raise RuntimeError("out of shared memory")
            return right(*args, config=config, **options)

        monkeypatch.setattr(row_attention, "attention", too_large)
        tuned = tune.tune(shape, DEVICE, among=[ONE, TWO], timer=lambda call: 1.0)
        assert tuned.best == TWO
        assert tuned.tried[0].refused == "RuntimeError: out of shared memory"

    def test_save_and_load(self, shape, tmp_path):
        from ragcachekit_kernels.attention import tune

        tuned = tune.tune(shape, DEVICE, among=[TWO], timer=lambda call: 1.0)
        tune.save(tmp_path / "t.json", [tuned])
        ((key, config),) = configs.loads((tmp_path / "t.json").read_text()).items()
        assert key.endswith("/float32/16/32/pointers/masked")
        assert config == TWO

    def test_the_clock(self, shape):
        from ragcachekit_kernels.attention import tune

        calls = []
        assert tune.milliseconds(lambda: calls.append(1), repeats=5) >= 0
        assert len(calls) == 6

    @pytest.mark.parametrize("table", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_candidates_are_many_and_differ(self, dtype, table):
        from ragcachekit_kernels.attention import tune

        found = tune.candidates(dtype, table=table)
        assert len(set(found)) == len(found) >= 5
        assert not (table and any(c.descriptors for c in found))


def test_unknown_sizes_are_refused():
    with pytest.raises(ValueError, match="power of two"):
        Config(24, 16, 4, 1)
    with pytest.raises(ValueError, match="cannot be launched"):
        Config(16, 16, 3, 1)
