"""What examples/ shows runs: here with a tiny model, whose answers mean nothing, and whose reuse does."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = (
    *("langchain_rag", "llama_index_rag", "fastapi_service", "multi_tenant"),
    *("offline_precompute", "own_policy", "chat_with_memory"),
)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pydantic look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


@pytest.fixture
def run(no_loop: None, at_home: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Runs a program with ``--model`` and returns what it printed."""
    loaded: list[str] = []

    def go(name: str, *arguments: str) -> str:
        module = load(name)
        loaded.append(module.__name__)
        module.main(["--model", str(tiny_folder), *arguments])
        return capsys.readouterr().out

    yield go
    for name in loaded:
        sys.modules.pop(name, None)


def reused(out: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+) prompt tokens reused", out)]


def test_every_program_is_here_and_small() -> None:
    files = {path.stem: path.read_text().splitlines() for path in EXAMPLES.glob("*.py")}
    assert files.keys() == set(NAMES)
    assert {name: len(lines) for name, lines in files.items() if len(lines) > 60} == {}


def test_the_two_lines_of_a_framework_are_marked() -> None:
    marks = {
        name: re.findall(r"(\w+)\(.*# <- line (\d)", (EXAMPLES / f"{name}.py").read_text())
        for name in ("langchain_rag", "llama_index_rag")
    }
    assert marks["langchain_rag"] == [("wrap", "1"), ("ChatRagCache", "2")]
    assert marks["llama_index_rag"] == [("RagCacheRetriever", "1"), ("RagCacheLLM", "2")]


def test_the_langchain_program_reuses_at_the_second_question(run: Any) -> None:
    first, second = reused(run("langchain_rag"))
    assert first[0] == 0
    assert second[0] > second[1] / 2


def test_the_llama_index_program_reuses_at_the_second_question(run: Any) -> None:
    first, second = (int(n) for n in re.findall(r"(\d+) entries of KV reused", run("llama_index_rag")))
    assert first == 0
    assert second >= 2


def test_tenants_share_nothing(run: Any) -> None:
    out = run("multi_tenant")
    used = re.findall(r"(\w+): (\d+) of (\d+) tokens", out)
    assert [tenant for tenant, *_ in used] == ["acme", "umbrella", "umbrella", "acme"]
    assert [count != "0" for _, count, _ in used] == [True, False, True, True]
    assert all(count in ("0", whole) for _, count, whole in used)
    assert "forgotten: 1 entries of umbrella" in out


def test_the_second_step_answers_from_the_disk(run: Any, tmp_path: Path) -> None:
    kv = str(tmp_path / "kv")
    assert re.search(
        r"[1-9]\d* entries, \S+ MB on disk", run("offline_precompute", "--kv", kv, "--step", "encode")
    )
    out = run("offline_precompute", "--kv", kv, "--step", "answer")
    assert len(re.findall(r"tokens from disk", out)) == 2


def test_the_own_policy_recomputes_what_it_chooses(run: Any) -> None:
    ratios = dict(re.findall(r"^(\S+): ratio (\S+),", run("own_policy"), re.MULTILINE))
    assert list(ratios) == ["ends:4", "lego:8", "reuse", "full"]
    assert 0 < float(ratios["ends:4"]) < 0.5
    assert float(ratios["reuse"]) == 0


def test_turns_of_a_conversation_are_reused(run: Any) -> None:
    first, second, third = reused(run("chat_with_memory"))
    assert first[0] == 0
    assert second[0] > 0.5 * second[1]
    assert third[0] > second[0]  # the turn before it, too


class Recorded:
    """What the service needs of FastAPI, where that is not installed."""

    def __init__(self, lifespan: Any, **_: Any) -> None:
        self.lifespan, self.state, self.routes = lifespan, SimpleNamespace(), {}

    def post(self, path: str) -> Any:
        return lambda handler: self.routes.setdefault(path, handler)


async def asked_by_http(app: Any, body: dict[str, Any]) -> dict[str, Any]:
    import httpx

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.post("/answer", json=body, headers={"tenant": "acme"})
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


async def asked_by_call(app: Recorded, module: ModuleType, body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = await app.routes["/answer"](module.Question(**body), "acme")
    return found


async def test_the_service_answers_and_reuses(
    at_home: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_http = importlib.util.find_spec("fastapi") is not None
    if not by_http:
        names = {"FastAPI": Recorded, "Header": lambda: None, "HTTPException": RuntimeError}
        monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(**names))
    module = load("fastapi_service")
    try:
        app = module.service(str(tiny_folder))
        body = {"question": "Where?", "documents": ["The river Spree flows in Berlin, the Seine in Paris."]}
        lifespan = app.router.lifespan_context if by_http else app.lifespan
        async with lifespan(app):
            found = []
            for _ in range(2):
                answer = asked_by_http(app, body) if by_http else asked_by_call(app, module, body)
                found.append(await answer)
                app.state.rag.flush()
    finally:
        del sys.modules[module.__name__]
    assert found[0]["reused_tokens"] == 0
    assert found[1]["reused_tokens"] > 0
