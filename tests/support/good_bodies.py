"""Bodies of a response and of a message that use most of what each format has, without the model."""

from __future__ import annotations

from typing import Any

_SCHEMA = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
IMAGE = "data:image/png;base64,iVBORw0KGgo="
GOOD_RESPONSE: dict[str, Any] = {
    "input": [
        {"role": "user", "content": "3 tokens at once, please"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "a"}]},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": IMAGE}],
        },
    ],
    "instructions": "Be brief.",
    "tools": [
        {"type": "function", "name": "add", "parameters": _SCHEMA, "strict": True},
        {"type": "custom", "name": "patch", "format": {"type": "text"}},
        {
            "type": "namespace",
            "name": "n",
            "tools": [{"type": "function", "name": "add", "parameters": _SCHEMA}],
        },
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "function", "name": "add"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "max_output_tokens": 8,
    "temperature": 0.5,
    "store": False,
    "stream": False,
    "parallel_tool_calls": True,
}
GOOD_MESSAGE: dict[str, Any] = {
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "3 tokens at once, please"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "a", "signature": "x"},
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "t", "name": "add", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "3"}]},
                {
                    "type": "image",
                    "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
                },
                {"type": "text", "text": "a"},
            ],
        },
    ],
    "tools": [{"name": "add", "description": "adds", "input_schema": _SCHEMA}],
    "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
    "max_tokens": 8,
    "temperature": 0.5,
    "stream": False,
}
