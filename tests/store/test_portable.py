"""Memory and disk tiers without what only Linux or only POSIX has: one round of every operation."""

LINUX = ("O_DIRECT", "posix_fadvise", "sync_file_range", "copy_file_range", "sendfile", "memfd_create")
POSIX = (
    *("fork", "forkpty", "register_at_fork", "geteuid", "getuid", "chown", "sync"),
    *("pread", "preadv", "pwrite", "pwritev", "readv", "writev", "mkfifo", "mknod", "openpty"),
    *("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_DIRECTORY", "O_SYNC"),
)

ROUND = """
import os, sys, warnings
import torch
import transformers

hidden = sys.argv[2].split(",")
for name in [name for name in sys.modules if name.partition(".")[0] in ("filelock", "ragcachekit")]:
    del sys.modules[name]
if "fcntl" in hidden:
    sys.modules.update(dict.fromkeys(("fcntl", "resource", "termios", "pwd", "grp"), None))
    import mmap
    del mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS
for name in hidden:
    if hasattr(os, name):
        delattr(os, name)
warnings.simplefilter("ignore")  # filelock's, that it has no better lock

from pathlib import Path
from store_kit import contents, entry_size, file_of, key_of, kv_of
from ragcachekit import StoreConfig
from ragcachekit.store.disk import DiskStore
from ragcachekit.store.tiered import open_store
from ragcachekit.prefix_tree.disk import ForgetLog

folder = Path(sys.argv[1]) / "kv"

def held(store, number):
    found = store.get(key_of(number))
    assert found is None or contents(found.kv) == contents(kv_of(number, tokens=900))
    return found is not None

def layered(store, number):
    source = store.open(key_of(number))
    for layer in range(source.layers):
        assert torch.equal(source.layer(layer)[0], kv_of(number, tokens=900).keys[layer])
    source.close()

store, other = DiskStore(folder, 1 << 30), DiskStore(folder, 1 << 30)
for number in range(4):
    assert store.put(key_of(number), kv_of(number, tokens=900))
    assert held(other, number)
layered(other, 1)
assert store.put(key_of(1), kv_of(1, tokens=900)), "in place of an older one"
assert other.forget("acme/docs", frozenset({"chunk-2"})) == 1
assert [held(store, n) for n in range(4)] == [True, True, False, True]
other.close()
store.close()

store = DiskStore(folder, 3 * entry_size(folder))
assert store.put(key_of(5), kv_of(5, tokens=900))
assert [held(store, n) for n in (0, 1, 2, 3, 5)] == [False, True, False, True, True]
assert store.stats()[0].evictions == 1
(folder / f"1-{'0' * 16}.tmp").write_bytes(b"left by a killed writer")
with open(file_of(folder, key_of(3)), "r+b") as file:
    file.truncate(500)
assert not held(store, 3) and store.stats()[0].damaged == 1
store.close()

tiers = open_store(StoreConfig(host_bytes=1 << 20, disk_path=folder))
assert tiers.put(key_of(6), kv_of(6, tokens=900)) and held(tiers, 6) and held(tiers, 5)
assert tiers.forget("acme/docs") >= 3
tiers.close()
assert {path.name for path in folder.iterdir() if path.is_file()} <= {"lock"}

log, heard = ForgetLog(folder / "tree"), ForgetLog(folder / "tree")
assert not heard.changed("acme")
with log.forgetting("acme"):
    pass
with log.writing() as may_write:
    assert may_write and heard.changed("acme")
print("all")
"""


def test_tiers_need_no_more_than_python(tmp_path, said_by):
    """In a process of its own, whose modules and functions are taken away before ours are imported."""
    assert said_by(ROUND, tmp_path, ",".join((*LINUX, *POSIX, "fcntl"))) == "all\n"
