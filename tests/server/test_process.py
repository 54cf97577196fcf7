"""The server as a process: a signal lets running answers end, and the tiers are flushed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from ragcachekit.commands.app import app as cli
from ragcachekit.server import ServerConfig, create_app
from ragcachekit.server import app as server_process
from ragcachekit.server.app import GracefulServer
from ragcachekit.server.middleware import Activity
from server_kit import DOCUMENTS, LONG, QUESTION, engine, served, until
from speaking import byte_level, speaker

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
CHAT = "/v1/chat/completions"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tiny"
    speaker(eos_token_id=None).save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


@pytest.fixture
def process(folder, tmp_path):
    command = [sys.executable, "-m", "ragcachekit", "serve", "--model", str(folder), "--port", "0"]
    options = ["--cache", str(tmp_path / "cache"), "--policy", "reuse", "--encoder", "standalone"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env={**os.environ}) as run:
        try:
            yield run
        finally:
            run.kill()


def address(process):
    lines = iter(process.stderr.readline, "")
    return next(line for line in lines if " at http" in line).split(" at ")[1].split("/v1")[0]


@contextmanager
def in_a_thread():
    """The server of the command, without loading a model in a process."""
    with engine() as rag, socket.create_server(("127.0.0.1", 0)) as bound:
        app = create_app(rag, ServerConfig("tiny"))
        server = GracefulServer(uvicorn.Config(app, log_level="warning"), app.state.activity)
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        runs = lambda: thread.join(LONG) or thread.is_alive()  # noqa: E731
        yield url, lambda: server.handle_exit(signal.SIGTERM, None), runs
        assert rag.queue.stats().cancelled == 0


@pytest.mark.soak
def test_a_process_ends_with_0_and_its_tiers_flushed(process, tmp_path):
    stops_gracefully(address(process), lambda: process.send_signal(signal.SIGTERM))
    assert process.wait(LONG) == 0
    assert [path for path in (tmp_path / "cache" / "kv").rglob("*") if path.is_file()]


def test_a_signal_lets_answers_end_and_refuses_new_ones():
    with in_a_thread() as (url, stop, runs):
        stops_gracefully(url, stop)
        assert not runs()


def stops_gracefully(url, stop):
    with httpx.Client(base_url=url, timeout=LONG) as http:
        until(lambda: _healthy(http))
        body = {**ASKED, "documents": list(DOCUMENTS), "max_tokens": 400, "stream": True}
        with http.stream("POST", CHAT, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            stop()
            until(lambda: http.get("/health").status_code == 503)
            refused = http.post(CHAT, json=ASKED)
            rest = list(lines)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert refused.headers["retry-after"] == "1"
    assert rest[-2] == "data: [DONE]"
    last = json.loads(rest[-4].removeprefix("data: "))["choices"][0]
    assert last["finish_reason"] in ("length", "stop")


def _healthy(http):
    try:
        return http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.soak
def test_a_second_signal_ends_at_once(process):
    url = address(process)
    with httpx.Client(base_url=url, timeout=LONG) as http:
        until(lambda: _healthy(http))
        body = {**ASKED, "n": 32, "max_tokens": 480, "stream": True}
        begun, errors = threading.Event(), []

        def ask():
            try:
                with http.stream("POST", CHAT, json=body) as response:
                    for _ in response.iter_lines():
                        begun.set()
            except httpx.TransportError as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        assert begun.wait(LONG)
        process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{url}/health").status_code == 503)
        until(lambda: process.send_signal(signal.SIGTERM) or process.poll() is not None)
        assert process.returncode == -signal.SIGTERM
        thread.join(LONG)
        assert errors


def test_an_address_in_use_is_said_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        result = CliRunner().invoke(cli, ["serve", "--model", "/nowhere", "--port", port])
    assert result.exit_code == 2
    assert "choose another --port" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--keys FILE"),
        (["--keys", "/nowhere/keys.json"], "cannot read the API keys"),
        (["--disk-gb", "1"], "needs --cache"),
        (["--port", "0"], "/nowhere is neither"),
    ],
)
def test_bad_options_are_one_line(options, message):
    result = CliRunner().invoke(cli, ["serve", "--model", "/nowhere", *options])
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


def test_configurations_that_cannot_be(tmp_path):
    for name in ("timeout", "max_choices", "heartbeat"):
        with pytest.raises(ValueError, match=name):
            ServerConfig(**{name: 0})
    with pytest.raises(AttributeError, match="no attribute"):
        __import__("ragcachekit.server").server.nothing  # noqa: B018


def test_an_engine_without_tokenizer_is_refused():
    from engine_kit import rag_for

    with rag_for("llama") as rag, pytest.raises(ValueError, match="needs a tokenizer"):
        create_app(rag)


def test_metrics_have_the_tokens_of_requests():
    from ragcachekit.telemetry import PrometheusObserver

    with (
        engine() as rag,
        served(create_app(rag, ServerConfig("tiny"), metrics=PrometheusObserver(rag).render)) as url,
    ):
        usage = httpx.post(url + CHAT, json=ASKED, timeout=LONG).json()["usage"]
        response = httpx.get(f"{url}/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    counts = {
        line.split(" ")[0]: float(line.split(" ")[1]) for line in response.text.splitlines() if line[0] != "#"
    }
    assert counts['ragcachekit_prompt_tokens_total{source="computed"}'] == usage["prompt_tokens"]
    assert counts["ragcachekit_output_tokens_total"] == usage["completion_tokens"]


async def test_a_flush_that_hangs_does_not_keep_the_stop(monkeypatch, caplog):
    with engine() as rag:
        seconds = []
        monkeypatch.setattr(rag, "flush", lambda timeout=None: seconds.append(timeout))
        app = create_app(rag, ServerConfig("tiny", flush_timeout=0.25))
        async with app.router.lifespan_context(app):
            pass
    assert seconds == [0.25]
    assert "not done within 0.25 s" in caplog.text


STUCK = """
import asyncio, socket, sys
from contextlib import asynccontextmanager
from fastapi import FastAPI
from ragcachekit.server.middleware import Activity
from ragcachekit.server.app import serve

@asynccontextmanager
async def lifespan(_):
    yield
    print("stopping", flush=True)
    await asyncio.sleep(600)

app = FastAPI(lifespan=lifespan)
app.state.activity = Activity()
bound = socket.create_server(("127.0.0.1", 0))
print(bound.getsockname()[1], flush=True)
serve(app, bound)
"""


@pytest.fixture
def stuck():
    command = [sys.executable, "-c", STUCK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            port = process.stdout.readline().strip()
            until(lambda: answers(f"http://127.0.0.1:{port}/"))
            yield process
        finally:
            process.kill()


def answers(url):
    try:
        return httpx.get(url).status_code == 404
    except httpx.TransportError:
        return False


def test_a_second_signal_ends_a_stop_that_hangs(stuck):
    stuck.send_signal(signal.SIGTERM)
    assert stuck.stdout.readline() == "stopping\n"
    until(lambda: stuck.send_signal(signal.SIGINT) or stuck.poll() is not None)
    assert stuck.returncode == -signal.SIGINT


def test_a_signal_that_is_sent_and_forwarded_counts_once(monkeypatch):
    now, raised = [100.0], []
    monkeypatch.setattr(server_process.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(server_process.signal, "signal", lambda *_: None)
    monkeypatch.setattr(server_process.signal, "raise_signal", raised.append)
    activity = Activity()
    server = GracefulServer(uvicorn.Config("unused:app"), activity)
    for seconds, ended in ((0, []), (0.01, []), (0.9, []), (1.0, [signal.SIGTERM])):
        now[0] = 100 + seconds
        server.handle_exit(signal.SIGTERM, None)
        assert activity.stopping
        assert raised == ended
