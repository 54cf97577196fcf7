"""API keys: hashed at rest, read again when their file changes, and refused alike."""

import hashlib
import json
import stat
from itertools import product

import pytest
from typer.testing import CliRunner

from ragcachekit.commands.app import app
from ragcachekit.errors import RagCacheError
from ragcachekit.server.errors import ApiError
from ragcachekit.server.keys import ApiKeys, Limits, Tenant, add_key, check_exposure, remove_key

EVERYBODY = Tenant("all", "public")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys.json"


def asking(keys, header):
    return keys.tenant({} if header is None else {"authorization": header})


def test_a_key_is_its_tenants_and_only_its_hash_is_kept(file):
    limits = Limits(requests_per_minute=60, parallel=3)
    key, other = add_key(file, "ada", "team", limits), add_key(file, "bob")
    assert key != other
    assert len(key) >= 43 + len("rck-"), "256 bits in base64"
    keys = ApiKeys(file, EVERYBODY)
    assert asking(keys, f"Bearer {key}") == Tenant("ada", "team", limits)
    assert asking(keys, f"bearer  {other} ") == Tenant("bob", "bob")
    text = file.read_text()
    assert key not in text
    assert other not in text
    assert json.loads(text)["keys"][0] == {
        "name": "ada",
        "namespace": "team",
        "sha256": hashlib.sha256(key.encode()).hexdigest(),
        "limits": {"requests_per_minute": 60, "parallel": 3},
    }
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic YTpi", "rck-x", "Bearer a b"])
def test_a_missing_key(file, header):
    add_key(file, "ada")
    with pytest.raises(ApiError, match="didn't provide an API key") as error:
        asking(ApiKeys(file, EVERYBODY), header)
    assert error.value.status == 401
    assert error.value.headers == {"WWW-Authenticate": "Bearer"}


def test_a_wrong_key_is_not_repeated(file):
    key = add_key(file, "ada")
    for wrong in (key[:-1], key + "x", key.upper(), "x" * 10_000, "\ud800", file.read_text().split('"')[13]):
        with pytest.raises(ApiError) as error:
            asking(ApiKeys(file, EVERYBODY), f"Bearer {wrong}")
        assert error.value.status == 401
        assert error.value.body()["error"] == {
            "message": "Incorrect API key provided.",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }


@pytest.mark.parametrize("name", ["x-goog-api-key", "x-api-key", "api-key"])
def test_headers_of_other_clients(file, name):
    key = add_key(file, "ada")
    assert ApiKeys(file, EVERYBODY).tenant({name: key}).name == "ada"
    with pytest.raises(ApiError):
        ApiKeys(file, EVERYBODY).tenant({name: key, "authorization": "Bearer wrong"})
    with pytest.raises(ApiError):
        ApiKeys(file, EVERYBODY).tenant({name: f"{key} {key}"})


def test_a_changed_file_is_read_again(file, caplog):
    key = add_key(file, "ada")
    keys = ApiKeys(file, EVERYBODY)
    other = add_key(file, "bob")
    assert asking(keys, f"Bearer {other}").name == "bob"
    remove_key(file, "ada")
    with pytest.raises(ApiError):
        asking(keys, f"Bearer {key}")
    file.write_text("{")
    assert asking(keys, f"Bearer {other}").name == "bob"
    file.unlink()
    assert asking(keys, f"Bearer {other}").name == "bob"
    assert asking(keys, f"Bearer {other}").name == "bob"
    assert caplog.text.count("that were read last") == 2


HASH = "0" * 64


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[" * 100_000,
        '{"keys": [{"name": "a"}]}',
        f'{{"keys": [{{"name": "a/b", "namespace": "a", "sha256": "{HASH}"}}]}}',
        f'{{"keys": [{{"name": "a", "namespace": 3, "sha256": "{HASH}"}}]}}',
        '{"keys": [{"name": "a", "namespace": "a", "sha256": "secret"}]}',
        f'{{"keys": [{{"name": "a", "namespace": "a", "sha256": "{HASH}", "limits": {{"paralel": 3}}}}]}}',
        f'{{"keys": [{{"name": "a", "namespace": "a", "sha256": "{HASH}", "limits": {{"parallel": 0}}}}]}}',
    ],
)
def test_files_that_cannot_be(file, content):
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(RagCacheError, match=r"keys\.json must be"):
        ApiKeys(file, EVERYBODY)


def test_files_that_cannot_be_trusted_or_are_missing(file):
    with pytest.raises(RagCacheError, match="cannot read the API keys"):
        ApiKeys(file, EVERYBODY)
    add_key(file, "ada")
    file.chmod(0o622)
    with pytest.raises(RagCacheError, match="chmod 600"):
        ApiKeys(file, EVERYBODY)


def test_names_are_unique_and_sound(file):
    add_key(file, "ada")
    with pytest.raises(RagCacheError, match="has a key named 'ada'"):
        add_key(file, "ada")
    for name in ("", "a/b", "a\n", "x" * 101):
        with pytest.raises(RagCacheError, match="is not 1 to 100"):
            add_key(file, name)
    with pytest.raises(RagCacheError, match="no key named 'bob'"):
        remove_key(file, "bob")
    assert len(json.loads(file.read_text())["keys"]) == 1


def test_the_command_shows_a_key_once(file):
    def run(*arguments):
        return CliRunner().invoke(app, ["keys", *arguments, "--file", str(file)])

    added = run("add", "ada", "--namespace", "team", "--tokens-per-minute", "1000")
    assert added.exit_code == 0
    key = added.stdout.strip()
    assert asking(ApiKeys(file, EVERYBODY), f"Bearer {key}") == Tenant(
        "ada", "team", Limits(tokens_per_minute=1000)
    )
    assert "shown this once" in added.stderr
    assert run("add", "ada").exit_code == 2
    assert run("remove", "ada").exit_code == 0
    assert json.loads(file.read_text()) == {"keys": []}


def test_a_server_without_keys_stays_on_its_machine(file):
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        check_exposure(host, None, False)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""):
        with pytest.raises(RagCacheError, match="--keys FILE"):
            check_exposure(host, None, False)
        check_exposure(host, None, True)
        check_exposure(host, file, False)


def test_partitions_of_a_tenant():
    ada, bob = Tenant("ada", "ada"), Tenant("bob", "bob")
    salts = list(product((None, "a", "b", "a\0", "\0a", "\ud800", "a\x001:b"), repeat=2))
    assert len({tenant.partition(*given) for tenant in (ada, bob) for given in salts}) == 2 * len(salts)
    assert ada.partition("", None) == ada.partition() == "ada"
    assert ada.partition("a", None) == ada.partition("a")
