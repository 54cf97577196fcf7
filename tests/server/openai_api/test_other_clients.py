"""litellm, ``llm``, ``google-genai`` and the newest ``openai``, unchanged, in processes of their own.

They need other releases of packages than the tests' environment has. ``make soak`` installs them beside it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from server_kit import DOCUMENTS, MODEL, QUESTION

pytestmark = pytest.mark.soak
HERE = Path(__file__).parent
CLIENTS = Path(os.environ.get("CLIENTS") or HERE.parents[2] / ".venv/clients")
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "true"}  # else it is fetched, which waits where nothing answers


@pytest.fixture
def want(rag):
    asked = [{"role": "user", "content": QUESTION}]
    return rag.generate(asked, policy="full", do_sample=False, max_new_tokens=8).text


def run(*command, **environment):
    own = {**os.environ, **OFFLINE, "PYTHONPATH": str(CLIENTS), **environment}
    done = subprocess.run([sys.executable, *command], env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_openai_and_litellm(url, rag, want):
    given = json.loads(run(HERE / "user_program.py", url, MODEL, QUESTION, DOCUMENTS[0]).splitlines()[-1])
    assert int(given["openai"].partition(".")[0]) > 2
    assert given["genai"] == [True, True, 404]
    answers = given["answers"]
    cached = [answers.pop(f"cached by litellm {provider}") for provider in ("openai", "anthropic")]
    assert min(cached) >= rag.count_tokens(DOCUMENTS[0]) - 1
    assert len(answers) == 10
    assert set(answers.values()) == {want}, answers


def test_llm(url, tmp_path, want):
    models = [{"model_id": "ours", "model_name": MODEL, "api_base": f"{url}/v1"}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    options = ["--key", "any", "-o", "temperature", "0", "-o", "max_tokens", "8"]
    said = run("-m", "llm", "-m", "ours", *options, QUESTION, LLM_USER_PATH=str(tmp_path))
    assert said == f"{want}\n"
