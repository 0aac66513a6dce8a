"""The ChatML template: the format of conversations for models without their own."""

from __future__ import annotations

# The tokens that open and close a turn. A tokenizer that uses this template should have both as special tokens.
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

# `{% generation %}` marks what the model itself is to write: the answer and the token that ends it.
CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] + '<|im_end|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
