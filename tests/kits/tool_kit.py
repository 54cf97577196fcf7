"""A chat template with tools, and a script that the real engine's model is made to say."""

import copy

TOOLS = (
    "{% if tools %}<|im_start|>system\nCall tools as JSON between <tool_call> tags.\n{% for tool in tools %}"
    "{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}{% for call in message['tool_calls'] or [] %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_tools(tokenizer):
    """The tokenizer with a chat template that renders tools."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = TOOLS
    return tokenizer


def scripted(tokenizer, say):
    """A ``prefix_allowed_tokens_fn``: the answer to a prompt's text is ``say(text)``, token by token."""

    def allowed(_, ids):
        prompt, _, said = tokenizer.decode(ids).rpartition("<|im_start|>assistant\n")
        rest = say(prompt)[len(said) :]
        return tokenizer(rest, add_special_tokens=False).input_ids[:1] or [tokenizer.eos_token_id]

    return allowed
