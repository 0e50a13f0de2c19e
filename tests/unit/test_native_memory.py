"""Memory that the native engine gives back is the process's no more."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from tests.support.engine_model import CONFIG
from workers.engines.native.kv import KvCache
from workers.engines.native.model_shape import read_model_shape
from workers.engines.native.weights import WeightStore

MIB = 1 << 20


FREE = """
import sys
from pathlib import Path
import psutil, torch
from workers.engines.native.model_shape import read_model_shape
from workers.engines.native.weights import WeightStore

store = WeightStore(read_model_shape(Path(sys.argv[1])), torch.float32)
for view in store.named.values():
    view.fill_(1.0)
store.checksums()
held = psutil.Process().memory_info().rss
store.free()
print(store.num_bytes(), held - psutil.Process().memory_info().rss)
"""
"""A process of its own: in one that ran other tests the allocator may keep what it is given."""


def test_freed_weights_are_the_processs_no_more(tmp_path: Path) -> None:
    config = CONFIG | {"vocab_size": 131072, "hidden_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", FREE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    size, given_back = map(int, done.stdout.split())
    assert size > 128 * MIB
    assert given_back > 0.9 * size


def test_weights_come_back_as_zeros(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    store = WeightStore(read_model_shape(tmp_path), torch.float32)
    for view in store.named.values():
        view.fill_(1.0)
    size, before = store.num_bytes(), store.checksums()
    store.free()
    store.allocate()
    assert store.num_bytes() == size
    assert all(not view.any() for view in store.named.values())
    # Fused tensors and their parts are one memory again.
    qkv = store.layers[0].qkv
    store.named["model.layers.0.self_attn.k_proj.weight"].fill_(3.0)
    assert 0 < int((qkv == 3.0).sum()) < qkv.numel()
    for view in store.named.values():
        view.fill_(1.0)
    assert store.checksums() == before


def test_a_freed_cache_grows_again(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    cache = KvCache(read_model_shape(tmp_path), torch.float32, 64 * MIB, keep_experts=True)
    cache.ensure(4, 40, 40, live=0)
    assert cache.experts is not None
    cache.free()
    assert (cache.slots, cache.capacity, cache.keys, cache.experts) == (0, 0, [], None)
    cache.ensure(2, 33, 100, live=0)
    assert cache.slots >= 2
    assert cache.capacity >= 33
    assert cache.experts is not None
    assert len(cache.keys) == len(cache.values) == CONFIG["num_hidden_layers"]
