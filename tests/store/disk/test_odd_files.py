"""Something that is no file stands under a name of ours: a miss or a clear error, and nobody waits."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ragcachekit.errors import RetrievalError, StoreError
from ragcachekit.files import OpenFile, make_folder, parse_json, read_regular
from ragcachekit.model.identity.weights_digest import FileDigests
from ragcachekit.model.prefill_profile import PrefillProfile
from ragcachekit.prefix_tree.disk import ForgetLog
from ragcachekit.quality.records import calibration_path, read_calibration
from ragcachekit.retrieval.index_files import read_index
from ragcachekit.store.disk_check import verify
from ragcachekit.store.entry import read_layout
from store_kit import file_of, filled, holds, key_of, kv_of, opened


def a_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


def a_folder(path: Path) -> None:
    (path / "below").mkdir(parents=True)


def a_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("this user may not make devices")


def a_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


ODD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "socket": a_socket,
    "folder": a_folder,
    "device": a_device,
    "link": a_link,
}


@pytest.fixture(params=ODD)
def odd(request: pytest.FixtureRequest) -> Callable[[Path], object]:
    def put(path: Path) -> None:
        path.unlink(missing_ok=True)
        ODD[request.param](path)

    return put


@pytest.mark.timeout(30)
def test_under_an_entrys_name(tmp_path: Path, odd: Callable[[Path], object]) -> None:
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    odd(file_of(path, key_of(1)))
    assert store.get(key_of(1)) is None
    assert store.open(key_of(1)) is None
    assert [holds(store, n) for n in (0, 2, 3)] == [True] * 3
    assert len(verify(path).damaged) + len(verify(path).unreadable) <= 1
    assert store.forget("acme/docs", frozenset(["chunk-2"])) >= 1
    store.close()
    again = opened(path)
    assert [holds(again, n) for n in range(4)] == [True, False, False, True]
    again.close()


@pytest.mark.timeout(30)
def test_a_fifo_is_replaced_by_the_next_put(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    filled(path)
    store = opened(path)
    file_of(path, key_of(1)).unlink()
    os.mkfifo(file_of(path, key_of(1)))
    assert not holds(store, 1)
    assert store.put(key_of(1), kv_of(1))
    assert holds(store, 1)
    store.close()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["lock", "writer", "temp"])
def test_under_other_names_of_the_folder(tmp_path: Path, odd: Callable[[Path], object], name: str) -> None:
    path = tmp_path / "kv"
    filled(path)
    odd(path / name.replace("temp", f"1-{'0' * 16}.tmp"))
    failure = ""
    try:
        store = opened(path)
        assert [holds(store, n) for n in range(4)] == [True] * 4
        store.close()
    except StoreError as error:
        failure = str(error)
    assert not failure or Path(name).name in failure, "which one to remove"


@pytest.mark.timeout(30)
def test_under_names_of_small_files(tmp_path: Path, odd: Callable[[Path], object]) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(b"weights")
    os.utime(weights, (1, 1))
    odd(tmp_path / "digests.json")
    assert len(FileDigests(tmp_path / "digests.json").get(weights)) == 64
    record = calibration_path(tmp_path, "model", "space")
    make_folder(record.parent)
    odd(record)
    assert read_calibration(tmp_path, "model", "space") is None
    odd(tmp_path / "index")
    with pytest.raises(RetrievalError, match="cannot read the index"):
        read_index(tmp_path / "index")
    log = ForgetLog(tmp_path / "forgets")
    assert log.unread("space") == []
    with log.forgetting("space", None):
        pass
    (note,) = [file for file in (tmp_path / "forgets").iterdir() if file.name != "lock"]
    odd(note)
    assert log.unread("space") in ([], [None])


DEEP = "[" * 100_000 + "]" * 100_000


def test_json_nested_however_deep_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)
    with pytest.raises(ValueError, match="nested too deeply"):
        read_layout(DEEP)
    with pytest.raises(ValueError, match="nested too deeply"):
        PrefillProfile.from_json(DEEP)
    weights = tmp_path / "weights"
    weights.write_bytes(b"weights")
    os.utime(weights, (1, 1))
    (tmp_path / "digests.json").write_text(DEEP)
    (tmp_path / "digests.json").chmod(0o600)
    assert len(FileDigests(tmp_path / "digests.json").get(weights)) == 64
    assert json.loads((tmp_path / "digests.json").read_text())[str(weights)]["sha256"]
    body = DEEP.encode()

    (tmp_path / "index").write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    with pytest.raises(RetrievalError, match="nested too deeply"):
        read_index(tmp_path / "index")


def test_folders_are_made_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = opened(tmp_path / "a" / "b" / "kv")
        make_folder(tmp_path / "c" / "d")
        FileDigests(tmp_path / "e" / "f" / "digests.json")._save({})
    finally:
        os.umask(before)
    store.put(key_of(1), kv_of(1))
    store.close()
    made = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert len(made) == 7
    assert {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()} == {0o600}


def test_a_descriptor_goes_with_its_last_reference(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    file = OpenFile(tmp_path / "file", os.O_RDONLY)
    number = file.fd
    assert os.read(number, 4) == b"text"
    del file
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)
    assert read_regular(tmp_path / "file") == b"text"


def test_what_is_not_our_own_is_not_read_as_own(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"{}")
    (tmp_path / "file").chmod(0o666)
    with pytest.raises(ValueError, match="written by others"):
        read_regular(tmp_path / "file", own=True)
