"""Wrong options end with one line that says what to give, before a model is loaded, most before torch is."""

import json
import subprocess
import sys

import pytest
import transformers

from benchmarks.world.reader_folder import READER

PROGRAM = """
import json, sys
from typer.testing import CliRunner
from ragcachekit.commands.app import app
for arguments in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    heavy = sorted({"torch", "transformers"} & sys.modules.keys())
    print(json.dumps([result.exit_code, " ".join(result.output.split()), heavy]))
"""

USES = {
    "ask": ("ask", "--corpus", "CORPUS", "Why?"),
    "precompute": ("precompute", "--corpus", "CORPUS"),
    "estimate": ("estimate", "--corpus", "CORPUS", "--log", "LOG"),
    "calibrate": ("calibrate", "--corpus", "CORPUS"),
    "fidelity": ("bench", "fidelity", "--corpus", "CORPUS"),
    "ttft": ("bench", "ttft"),
    "serve": ("serve",),
    "check-model": ("check-model",),
}
NO_MODEL = "cannot load the model: nope is neither a folder nor a model at hand"
FASTEST, ALONE = "unknown policy 'fastest'; known: full", "unknown encoder 'alone'; known: standalone"

LIGHT = [
    *((*USES[name], "--model", "nope", NO_MODEL) for name in USES if name != "check-model"),
    ("check-model", "nope", NO_MODEL),
    *((*USES[name], "--model", "EMPTY", "EMPTY is no model folder") for name in ("ask", "serve")),
    *((name, "--corpus", "EMPTY/none", "does not exist") for name in ("ask", "precompute", "calibrate")),
    *((*USES[name], "--model", READER, "--chunk-tokens", "0", "--chunk-tokens") for name in ("ask", "ttft")),
    *((*USES[name], "--k", "-1", "-k") for name in ("ask", "precompute", "estimate")),
    *((*USES[name], "--json", "EMPTY/x/y", "no folder EMPTY/x") for name in ("ttft", "estimate")),
    ("estimate", "--corpus", "CORPUS", "--log", "EMPTY/log", "there is no file EMPTY/log; give --log"),
    ("bench", "fidelity", "--questions", "EMPTY/q", "there is no file EMPTY/q; give --questions"),
    *((*USES[name], "--policy", "fastest", FASTEST) for name in ("ask", "precompute", "serve")),
    *((*USES[name], "--policies", "fastest,reuse", FASTEST) for name in ("calibrate", "fidelity", "ttft")),
    *((*USES[name], "--encoder", "alone", ALONE) for name in ("ask", "serve", "calibrate", "ttft")),
    (*USES["fidelity"], "--encoders", "system,alone", ALONE),
    (*USES["ask"], "--encoder", "sinks:x", "encoder 'sinks:x': sinks:n needs a number"),
    (*USES["ask"], "--policy", "lego", "policy 'lego': write 'lego:16'"),
    *((*USES["calibrate"], "--budget", x, f"--budget {x}: give nats") for x in ("-1", "0", "1")),
    (*USES["calibrate"], "--probes", "3", "--probes"),
    *((*USES[name], "--namespace", "", "--namespace is empty") for name in ("ask", "calibrate", "serve")),
    (*USES["ttft"], "--tiers", "tape", "unknown tiers tape; known: gpu, host, disk"),
    (*USES["ttft"], "--dtype", "auto", "unknown dtypes auto; known: float32"),
    *((*USES["ttft"], "--prompt-tokens", x, "--prompt-tokens") for x in ("many", "-1", "1.5")),
    ("calibrate", "--model", READER, "give --questions (JSONL), or --corpus"),
    ("bench", "fidelity", "--model", READER, "give --questions (JSONL), or --corpus"),
    (*USES["ask"], "--model", READER, "--dtype", "int3", "unknown dtype 'int3'; known:"),
    (*USES["ask"], "--model", READER, "--disk-gb", "0", "--disk-gb"),
    (*USES["ask"], "--model", READER, "--cache", "LOG", "it is a file); choose another --cache"),
    ("serve", "--model", READER, "--cache", "LOG", "it is a file); choose another --cache"),
    ("serve", "--model", READER, "--host", "0.0.0.0", "--keys"),
    ("serve", "--model", READER, "--host", "1.2.3.4", "--no-keys", "choose another --port"),
    (*USES["fidelity"], "--encoders", "standalone+int3", "unknown roundings int3; known: int8, fp8"),
    (*USES["fidelity"], "--encoders", ",", "give at least one encoder"),
    ("cache", "stats", "--cache", "EMPTY/none", "does not exist"),
]  # fmt: skip


@pytest.fixture(scope="session")
def places(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    (folder / "log").write_text("Why?\n")
    (folder / "EMPTY").mkdir()
    return {"CORPUS": str(corpus), "LOG": str(folder / "log"), "EMPTY": str(folder / "EMPTY")}


def placed(text, places):
    for name, path in places.items():
        text = text.replace(name, path)
    return text


def test_they_end_before_torch_is_imported(places):
    lines = [[placed(one, places) for one in line[:-1]] for line in LIGHT]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(lines)], capture_output=True, text=True, timeout=120
    )
    found = list(map(json.loads, done.stdout.splitlines()))
    assert len(found) == len(LIGHT), done.stderr
    for line, (code, output, heavy) in zip(LIGHT, found, strict=True):
        assert (code, heavy) == (2, []), (line, output)
        assert placed(line[-1], places) in output, line


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("ask", "--policy", "lego:-1", "policy 'lego:-1': lego:k needs k >= 1"),
        ("precompute", "--policy", "sensitive:2", "policy 'sensitive:2': "),
        ("serve", "--policy", "lego:16,reuse", "policy 'lego:16,reuse': "),
        ("serve", "--encoder", "sinks:4,system", "encoder 'sinks:4,system': "),
        ("calibrate", "--policies", "lego0", "policy lego0 is defined over encoder sinks:4"),
        ("ttft", "--prompt-tokens", "50", "has no room for a chunk; ask for 89 or more"),
        ("serve", "--tree-gb", "inf", "than or equal to"),
        ("ttft", "--device", "tpu", "--device tpu: this machine has no such device"),
        (
            "precompute",
            "--shared",
            "file:///x",
            "(--shared-key) is the name of an environment variable, and that one is not set: make one",
        ),
    ],
)
def test_what_needs_torch_is_checked_before_the_model(
    command, places, monkeypatch, name, option, value, message
):
    def load(*arguments, **options):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    uses = [placed(one, places) for one in USES[name]]
    result = command(*uses, "--model", READER, option, value)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
