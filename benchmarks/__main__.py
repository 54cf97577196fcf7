"""``python -m benchmarks``: what proves the library's claims. Naming a command imports its module."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from ragcachekit.commands.console import Commands

COMMANDS = {
    "demo": "demo.command:demo",
    "ttft": "shapes:ttft",
    "serve": "serve.command:serve",
    "query-cache": "query_cache.hits:query_cache",
    "query-cache-lookup": "query_cache.lookups:query_cache_lookup",
    "near-misses": "near_misses.run:near_misses",
    "fidelity": "fidelity:fidelity",
    "contexts": "contexts:contexts",
    "frontier": "frontier:frontier",
    "stream": "stream:stream",
    "craft-in-prompt": "selection.craft_in_prompt:craft_in_prompt",
    "families": "families.check:families",
    "novel-questions": "novel_questions:novel_questions",
    "order": "order:order",
    "speculation": "speculation:speculation",
    "framework-batches": "framework_batches:framework_batches",
    "shared-kv": "shared_kv:shared_kv",
    "routing": "cluster.routing:routing",
    "serve-routing": "cluster.serve_routing:serve_routing",
    "store": "store:store",
    "eviction": "eviction.run:eviction",
    "kernels": "kernels.run:kernels",
}


class Benchmarks(Commands):
    """The commands of :data:`COMMANDS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import one."""
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name].partition(":")
        single = typer.Typer(add_completion=False)
        single.command(cmd_name)(getattr(import_module(f"benchmarks.{module}"), name))
        return typer.main.get_command(single)


def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Options of all commands."""


app = typer.Typer(
    cls=Benchmarks,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="What RagCacheKit claims, measured: a demo, the sample world and its reader, simulations, kernels.",
)
app.callback()(root)

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
