"""The server as a process: a signal lets running answers end, and the tiers are flushed."""

import json
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from ragcachekit.commands.app import app as cli
from ragcachekit.server import ServerConfig, create_app
from ragcachekit.server import app as server_app
from server_kit import DOCUMENTS, LONG, QUESTION, engine, until
from speaking import byte_level, speaker

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
CHAT = "/v1/chat/completions"


@pytest.mark.soak
def test_a_process_lets_answers_end_and_flushes_its_tiers(tmp_path):
    speaker(eos_token_id=None).save_pretrained(tmp_path / "tiny")
    byte_level().save_pretrained(tmp_path / "tiny")
    command = [sys.executable, "-m", "ragcachekit", "serve", "--model", str(tmp_path / "tiny"), "--port", "0"]
    options = ["--cache", str(tmp_path / "cache"), "--policy", "reuse", "--encoder", "standalone"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stderr.readline, "")
            url = next(line for line in lines if " at http" in line).split(" at ")[1].split("/v1")[0]
            stops_gracefully(url, lambda: process.send_signal(signal.SIGTERM))
            assert process.wait(LONG) == -signal.SIGTERM
        finally:
            process.kill()
    assert [path for path in (tmp_path / "cache" / "kv").rglob("*") if path.is_file()]


def test_a_stop_lets_answers_end_and_takes_no_new_connections():
    """The server of the command, without loading a model in a process."""
    with engine() as rag, socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(create_app(rag, ServerConfig("tiny")), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        stops_gracefully(url, lambda: server.handle_exit(signal.SIGTERM, None))
        thread.join(LONG)
        assert not thread.is_alive()
        assert rag.queue.stats().cancelled == 0


def stops_gracefully(url, stop):
    with httpx.Client(base_url=url, timeout=LONG) as http:
        until(lambda: is_up(url))
        body = {**ASKED, "documents": list(DOCUMENTS), "max_tokens": 400, "stream": True}
        with http.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            stop()
            until(lambda: not is_up(url))
            rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    last = json.loads(rest[-4].removeprefix("data: "))["choices"][0]
    assert last["finish_reason"] in ("length", "stop")


def is_up(url):
    try:
        return httpx.get(f"{url}/health", timeout=LONG).status_code == 200
    except httpx.TransportError:
        return False


def test_an_address_in_use_is_said_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        result = CliRunner().invoke(cli, ["serve", "--model", "sample", "--port", port])
    assert result.exit_code == 2
    assert "choose another --port" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--keys FILE"),
        (["--keys", "/nowhere/keys.json"], "cannot read the API keys"),
        (["--disk-gb", "1"], "needs --cache"),
        (["--port", "0", "--model", "/nowhere"], "/nowhere is neither"),
    ],
)
def test_bad_options_are_one_line(options, message):
    result = CliRunner().invoke(cli, ["serve", "--model", "sample", *options])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_missing_extra_is_named():
    program = (
        "import sys; sys.modules['fastapi'] = None\n"
        "try:\n    from ragcachekit.server import create_app\n"
        "except ImportError as error:\n    print(error)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LONG)
    assert "pip install fastapi uvicorn" in run.stdout, run.stderr


def test_configurations_that_cannot_be():
    for name in ("timeout", "max_choices", "heartbeat"):
        with pytest.raises(ValueError, match=name):
            ServerConfig(**{name: 0})


def test_an_engine_without_tokenizer_is_refused():
    from engine_kit import rag_for

    with rag_for("llama") as rag, pytest.raises(ValueError, match="needs a tokenizer"):
        create_app(rag)


async def test_a_flush_that_hangs_does_not_keep_the_stop(monkeypatch, caplog):
    with engine() as rag:
        seconds = []
        monkeypatch.setattr(rag, "flush", lambda timeout=None: seconds.append(timeout))
        app = create_app(rag, ServerConfig("tiny"))
        async with app.router.lifespan_context(app):
            pass
    assert seconds == [server_app.FLUSH_SECONDS]
    assert "not done within 30 s" in caplog.text
