"""Chat templates with tool calls, modelled on those of published models, and a tokenizer with their markers."""

from pathlib import Path
from typing import Any

from tests.support.tokenizers.turns import added, write

# Like GLM's: the marker of the next role ends a turn, and an added token ends a call.
GLM = """{% for m in messages %}
{%- if m.role == 'tool' %}<|observation|>{{ m.content }}
{%- else %}<|{{ m.role }}|>{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

# Like gpt-oss': a call is part of the header that the model writes, and an end token says what ended.
HARMONY = """{% for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
    {%- if m.content and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}<|end|>{% endif %}
    {{- '<|start|>assistant to=' + m.tool_calls[0].function.name + '<|message|>{}<|call|>' }}
{%- elif m.role == 'assistant' %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
    {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif m.role == 'tool' %}
    {%- if messages[loop.index0 - 1].tool_calls is not defined %}{{ raise_exception('no call') }}{% endif %}
    {{- '<|start|>tool<|message|>' + m.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""

# Like Mistral's: tools are before the last question, calls count as turns, and nothing else is written beside them.
MISTRAL = """{% set last = messages | selectattr('role', 'eq', 'user') | list | last %}{% set ns = namespace(turn=0) %}
{%- for m in messages if m.role != 'tool' and not m.tool_calls %}
    {%- if (m.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- set ns.turn = ns.turn + 1 %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if m == last and tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- elif m.tool_calls %}{{ '[TOOL_CALLS]' + m.tool_calls[0].function.arguments | tojson + eos_token }}
    {%- else %}{{ m.content + eos_token }}{% endif %}
{%- endfor %}"""

# Like DeepSeek's: calls are written only without content, and their arguments are joined as text.
DEEPSEEK = """{% for m in messages %}<|{{ m.role }}|>
{%- if m.role == 'assistant' and m.content is none %}
    {%- for call in m.tool_calls %}{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}
{%- else %}{{ m.content }}{% endif %}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# Like Command R's: the generation prompt is always written.
PROMPTED = """{% for m in messages %}<|start|><|{{ m.role }}|>{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<|action|>{{ call.function.arguments | tojson }}<|done|>{% endfor -%}
<|end|>{% endfor %}<|start|><|assistant|>"""

EOS = "<|endoftext|>"
MARKERS = added(
    *("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "<tool_call>", "</tool_call>", "</think>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|end|>", "<|tool|>", "<|action|>"),
    *("<|done|>", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[INST]", "[/INST]", "[TOOL_CALLS]", EOS),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    special=True,
)

# Like Gemma 4's: results are in the turn of their call, before its text; thoughts are shown after the last question.
FOLDED = """{% set last = messages | selectattr('role', 'eq', 'user') | list | last %}
{%- for m in messages if m.role != 'tool' %}<|{{ m.role }}|>{% generation %}
{%- if m.thinking and loop.index0 > messages.index(last) %}[{{ m.thinking }}]{% endif %}
{%- for c in m.tool_calls or [] %}<|call|>{{ c.function.name }}<|done|>{% endfor %}{% endgeneration %}
{%- if m.tool_calls %}{% for r in messages if r.role == 'tool' %}<|tool|>result:{{ r.content }}{% endfor %}{% endif %}
{%- generation %}{{ m.content or '' }}<|end|>{% endgeneration %}{% endfor %}"""


def call(arguments: Any = None, content: str | None = None) -> dict[str, Any]:
    function = {"name": "get", "arguments": {"a": 1} if arguments is None else arguments}
    return {"role": "assistant", "content": content, "tool_calls": [{"type": "function", "function": function}]}


RESULT = {"role": "tool", "content": "sun"}
TOOLS = [{"type": "function", "function": {"name": "get"}}]


def folder(home: Path, template: str, eos: str = EOS) -> str:
    return write(home, template, tokens=MARKERS, eos=eos)
