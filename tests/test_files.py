"""Small private files: only regular ones are read, only for this user, and nobody waits for another end."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from ragcachekit.files import OpenFile, make_folder, parse_json, read_regular, replace_file

ODD: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_regular_file_is_an_error_at_once(tmp_path: Path, odd: str) -> None:
    ODD[odd](tmp_path / "odd")
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        read_regular(tmp_path / "odd")


def test_json_nested_however_deep_is_no_json() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000 + "]" * 100_000)


def test_what_others_may_write_is_not_read_as_own(tmp_path: Path) -> None:
    replace_file(tmp_path / "a" / "file", "{}")
    assert read_regular(tmp_path / "a" / "file", own=True) == b"{}"
    (tmp_path / "a" / "file").chmod(0o666)
    with pytest.raises(ValueError, match="written by others"):
        read_regular(tmp_path / "a" / "file", own=True)


def test_folders_and_files_are_made_for_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_folder(tmp_path / "c" / "d")
        replace_file(tmp_path / "e" / "f" / "file", "text")
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*") if p.is_dir()}
    assert modes == {0o700}
    assert stat.S_IMODE((tmp_path / "e" / "f" / "file").stat().st_mode) == 0o600


def test_a_descriptor_goes_with_its_last_reference(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    file = OpenFile(tmp_path / "file", os.O_RDONLY)
    number = file.fd
    assert os.read(number, 4) == b"text"
    del file
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(number)
