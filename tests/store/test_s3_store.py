"""The bulk tier on S3, as far as moto has it; for machines with ``ragcachekit[s3]`` and ``moto[server]``."""

import secrets

import fsspec
import pytest

from ragcachekit.store.backends import FsspecStore
from redis_kit import KEY_BYTES
from store_kit import contents, key_of, kv_of

pytest.importorskip("s3fs", reason="needs ragcachekit[s3]")
moto = pytest.importorskip("moto.server", reason="needs moto[server], which brings forty packages")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def endpoint():
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


def test_entries_of_two_processes_on_s3(endpoint, monkeypatch):
    import s3fs

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    bucket = f"bucket-{secrets.token_hex(4)}"
    fs = s3fs.S3FileSystem(endpoint_url=endpoint)
    fs.mkdir(bucket)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": endpoint})
    one, two = (FsspecStore(f"s3://{bucket}/kv", key=KEY_BYTES, deadline=20.0) for _ in range(2))
    assert all(one.put(key_of(number), kv_of(number)) for number in range(9))
    assert all(key_of(number) in two for number in range(9))
    found = two.get(key_of(8))
    assert contents(found.kv) == contents(kv_of(8))
    assert two.forget("acme/docs", frozenset({"chunk-8"})) == 1
    assert one.get(key_of(8)) is None
    assert two.forget("acme/docs") == 8
    assert [path for path in fs.find(f"{bucket}/kv") if path.endswith(".kv")] == []
    one.close()
    two.close()
