"""Chat templates modelled on those of published models, and tokenizers with them."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MARKED = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}{% else %}\
{{ message.content }}<|im_end|>{% endif %}

{% endfor %}"""

# Like Qwen3's: thoughts stay only after the last question, and the last turn always has a thought block.
QWEN = """{%- set ns = namespace(last_query=-1) %}
{%- for message in messages if message.role == 'user' %}
    {%- set ns.last_query = messages.index(message) %}
{%- endfor %}
{%- if ns.last_query < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- else %}
        {%- set thoughts = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if content or not loop.first else '' }}
            {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA = """{{- bos_token }}{% for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

MISTRAL = """{{- bos_token }}{% set ns = namespace(turn=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (ns.turn % 2 == 0) %}
            {{- raise_exception('user and assistant must take turns') }}
        {%- endif %}
        {%- set ns.turn = ns.turn + 1 %}
    {%- endif %}
    {%- if message.role == 'user' %}{{- '[INST] ' + message.content + ' [/INST]' }}
    {%- elif message.role == 'tool' %}{{- '[TOOL_RESULTS] ' + message.content + '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls %}{{- '[TOOL_CALLS] ' + (message.tool_calls | tojson) + eos_token }}
    {%- else %}{{- ' ' + message.content | trim + eos_token }}{% endif %}
{%- endfor %}"""

GEMMA = """{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# Thoughts stay only in the last answer, so that a later question changes earlier text.
FORGETFUL = """{% set last = messages | selectattr('role', 'eq', 'assistant') | list | last %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and message == last %}
    {{- '<think>' + (message.reasoning or '') + '</think>' }}
{%- endif %}
{{- message.content + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Like DeepSeek-R1's: the generation prompt starts a thought that earlier turns do not show.
PROMPTED = """{% for message in messages %}<|im_start|>{{ message.role }}:{{ message.content }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant:<think>{% endif %}"""

# Like Gemma 4's: results of a call are part of its turn, and the turn's text comes after them.
FOLDED = """{% for message in messages if message.role != 'tool' %}{{- '<start_of_turn>' + message.role + '\\n' }}
{%- if message.tool_calls %}
    {{- '[call]' }}
    {%- for result in messages if result.role == 'tool' %}{{- '[result]' + result.content + '[end]' }}{%- endfor %}
{%- endif %}
{{- (message.content or '') }}
{%- if not message.tool_calls or message.content %}{{- '<end_of_turn>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>assistant\\n' }}{%- endif %}"""

# Like Command R's and GLM's: an answer ends with two markers, and an empty answer has one space less before it.
DOUBLE = """{% for message in messages %}<|im_start|>{{ message.role }}
{%- if message.content %}{{- '\\n' + message.content }}{% endif %}</s><|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""

BARE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"

TEMPLATES = {
    name: (source, bos, eos)
    for name, source, bos, eos in [
        ("chatml", CHATML, None, "<|im_end|>"),
        ("marked", MARKED, None, "<|im_end|>"),
        ("qwen", QWEN, None, "<|im_end|>"),
        ("llama", LLAMA, "<|begin_of_text|>", "<|eot_id|>"),
        ("mistral", MISTRAL, "<s>", "</s>"),
        ("gemma", GEMMA, "<bos>", "<eos>"),
        ("forgetful", FORGETFUL, None, "<|im_end|>"),
        ("prompted", PROMPTED, None, "<|im_end|>"),
        ("folded", FOLDED, None, "<end_of_turn>"),
        ("double", DOUBLE, None, "<|im_end|>"),
        ("bare", BARE, None, "</s>"),
    ]
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<s>", "</s>", "[INST]", "[/INST]", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
CHAT = [
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "Bye 👋"},
    {"role": "assistant", "content": "So long 👋"},
]
CALL = [{"type": "function", "function": {"name": "sum", "arguments": {"a": 1}}}]


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def write_tokenizer(
    folder: Path, *, template: str | None, bos: str | None = None, eos: str = "</s>", trim: bool = False
) -> str:
    """Write a tokenizer of single bytes and one word, with special tokens, as transformers does."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġw", "Ġword", "or", "ord"]
    merges = [("Ġ", "w"), ("o", "r"), ("or", "d"), ("Ġw", "ord")]
    tokenizer = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(["<think>", "</think>"])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=template
    ).save_pretrained(folder)
    return str(folder)


def write_surrounding(folder: Path, shape: str, *, bos: str | None = "<s>", template: str | None = None) -> str:
    """Write a tokenizer whose special tokens around a text have a shape, such as `<s> $A </s>`."""
    write_tokenizer(folder, template=template, bos=bos)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = [(name, backend.token_to_id(name)) for name in shape.split() if name != "$A"]
    backend.post_processor = processors.TemplateProcessing(single=shape, special_tokens=special)
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)
