"""The server around the sample model, asked by the openai package."""

import openai
from texts import DOCUMENTS, QUESTIONS

from ragcachekit.server import ServerConfig, create_app
from server_kit import LONG, served

ASKED = {"model": "sample", "temperature": 0, "max_tokens": 4}


def test_a_second_question_reuses_the_documents(rag):
    with (
        served(create_app(rag, ServerConfig(model_name="sample"))) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=LONG) as client,
    ):
        responses = [
            client.chat.completions.create(
                messages=[{"role": "user", "content": question}],
                extra_body={"documents": documents},
                **ASKED,
            )
            for question, documents in zip(QUESTIONS, (DOCUMENTS, DOCUMENTS[::-1]), strict=False)
        ]
    cached = [response.usage.prompt_tokens_details.cached_tokens for response in responses]
    assert cached[0] == 0
    assert cached[1] > 0.9 * sum(rag.count_tokens(document) for document in DOCUMENTS)
    blocks = [[{"type": "text", "text": text, "chunk": True}, "\n\n"] for text in DOCUMENTS[::-1]]
    content = [*(part for block in blocks for part in block), QUESTIONS[1]]
    answer = rag.generate([{"role": "user", "content": content}], max_new_tokens=4, do_sample=False)
    assert answer.report.link.reused_tokens == cached[1]
    assert answer.text == responses[1].choices[0].message.content
