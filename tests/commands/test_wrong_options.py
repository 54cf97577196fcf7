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
    "doctor": ("doctor", "LOG", "-d", "LOG"),
}
NO_MODEL = "cannot load the model: nope is neither a folder nor a model at hand"

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
    (*USES["calibrate"], "--model", READER, "--budget", "-1", "--budget"),
    ("calibrate", "--model", READER, "give --questions (JSONL), or --corpus"),
    ("bench", "fidelity", "--model", READER, "give --questions (JSONL), or --corpus"),
    (*USES["ask"], "--model", READER, "--dtype", "int3", "unknown dtype 'int3'; known:"),
    (*USES["ask"], "--model", READER, "--disk-gb", "0", "--disk-gb"),
    (*USES["ask"], "--model", READER, "--cache", "LOG", "it is a file); choose another --cache"),
    ("serve", "--model", READER, "--cache", "LOG", "it is a file); choose another --cache"),
    ("serve", "--model", READER, "--host", "0.0.0.0", "--keys"),
    ("doctor", "EMPTY/prompt", "EMPTY/prompt cannot be read as text"),
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


@pytest.mark.parametrize("name", ["ask", "precompute", "calibrate", "fidelity", "ttft", "serve"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--policy", "fastest", "unknown policy 'fastest'; known: full, reuse"),
        ("--policy", "lego:-1", "policy 'lego:-1': "),
        ("--encoder", "alone", "unknown encoder 'alone'; known: standalone"),
        ("--encoder", "sinks:x", "encoder 'sinks:x': sinks:n needs a number"),
    ],
)
def test_policies_and_encoders_are_checked_before_the_model(
    command, places, monkeypatch, name, option, value, message
):
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", loaded)
    option += "s" * (name == "fidelity")
    option = "--policies" if option == "--policy" and name in ("calibrate", "ttft") else option
    option = option.replace("--policys", "--policies")
    uses = [placed(one, places) for one in USES[name]]
    result = command(*uses, "--model", READER, option, value)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    [
        ("serve", "--namespace", "", "namespace must be a non-empty string"),
        ("calibrate", "--policies", "lego0", "policy lego0 is defined over encoder sinks:4"),
        ("ttft", "--prompt-tokens", "50", "has no room for a chunk; ask for 89 or more"),
        ("ttft", "--tiers", "tape", "unknown tiers ('tape',); known: gpu"),
        ("precompute", "--shared", "tape", "x"),
    ],
)
def test_others_that_no_model_is_needed_for(command, places, monkeypatch, name, option, value, message):
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", loaded)
    uses = [placed(one, places) for one in USES[name]]
    result = command(*uses, "--model", READER, option, value)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def loaded(*arguments, **options):
    raise AssertionError("a model is loaded")
