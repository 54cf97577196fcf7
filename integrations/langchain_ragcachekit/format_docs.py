"""Documents as a prompt's context: texts unaltered, so that the engine recognises them."""

from __future__ import annotations

from collections.abc import Iterable

from langchain_core.documents import Document
from langchain_core.prompts import PromptTemplate

DOCUMENT_PROMPT = PromptTemplate.from_template("{page_content}")
"""For ``create_stuff_documents_chain(document_prompt=...)``: the text and nothing else."""


def format_docs(documents: Iterable[Document]) -> str:
    """The documents' texts as they are, a blank line between them.

    >>> format_docs([Document("Ada lives in Bern."), Document("Bob lives in Rome.")])
    'Ada lives in Bern.\\n\\nBob lives in Rome.'
    """
    return "\n\n".join(document.page_content for document in documents)
