"""Chat templates with tools, in the manner of well-known families: their wire forms, with fewer words around them."""

# ruff: noqa: E501
from __future__ import annotations

from typing import Any

# As Qwen3's: JSON in tags; consecutive results in one turn of the user; thoughts stay since the last question.
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools>\\n\\nReturn <tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <args>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith(\
'<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# As Qwen3.5's and Qwen3-Coder's: a tag for each parameter. The prompt opens the thoughts.
QWEN35 = """{%- if tools and tools is iterable and tools is not mapping %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\n<tool_call>\\n<function=NAME>\\n<parameter=P>\\nV\\n</parameter>\\n</function>\\n</tool_call>' }}
    {%- if messages[0].role == 'system' %}{{- '\\n\\n' + messages[0].content | trim }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content | trim %}
    {%- if message.role == "system" %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
    {%- elif message.role == "user" %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- if message.tool_calls and message.tool_calls is iterable and message.tool_calls is not mapping %}
            {%- for tool_call in message.tool_calls %}
                {%- set tool_call = tool_call.function %}
                {%- if loop.first %}{{- '\\n\\n' if content else '' }}{%- else %}{{- '\\n' }}{%- endif %}
                {{- '<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
                {%- for args_name, args_value in tool_call.arguments | items %}
                    {{- '<parameter=' + args_name + '>\\n' }}
                    {%- set args_value = args_value | string if args_value is string else args_value | tojson | safe %}
                    {{- args_value }}
                    {{- '\\n</parameter>\\n' }}
                {%- endfor %}
                {{- '</function>\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.previtem and loop.previtem.role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if not loop.last and loop.nextitem.role != "tool" or loop.last %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n' }}
{%- endif %}"""

# As Gemma 4's: sorted arguments, strings between marks of their own, results in the turn that called.
GEMMA4 = """{%- macro value_of(argument, escape_keys=True) -%}
    {%- if argument is string -%}{{- '<|"|>' + argument + '<|"|>' -}}
    {%- elif argument is boolean -%}{{- 'true' if argument else 'false' -}}
    {%- elif argument is mapping -%}
        {{- '{' -}}
        {%- for key, value in argument | dictsort -%}
            {%- if not loop.first %},{% endif -%}
            {{- '<|"|>' + key + '<|"|>' if escape_keys else key -}}:{{- value_of(value, escape_keys) -}}
        {%- endfor -%}
        {{- '}' -}}
    {%- elif argument is sequence -%}
        {{- '[' -}}
        {%- for item in argument -%}{{- value_of(item, escape_keys) -}}{%- if not loop.last %},{% endif -%}{%- endfor -%}
        {{- ']' -}}
    {%- else -%}{{- argument -}}
    {%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- set loop_messages = messages -%}
{%- if tools or messages[0]['role'] in ['system', 'developer'] or enable_thinking is defined and enable_thinking -%}
    {{- '<|turn>system\\n' -}}
    {%- if enable_thinking is defined and enable_thinking -%}{{- '<|think|>' -}}{%- endif -%}
    {%- if messages[0]['role'] in ['system', 'developer'] -%}
        {{- messages[0]['content'] | trim -}}
        {%- set loop_messages = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] -%}
        {%- set function = tool['function'] -%}
        {{- '<|tool>declaration:' + function['name'] + '{description:<|"|>' + function['description'] + '<|"|>,' -}}
        {%- for key, value in function['parameters']['properties'] | dictsort -%}
            {{- key + ':{type:<|"|>' + value['type'] | upper + '<|"|>}' -}}
            {%- if key in function['parameters']['required'] %}!{% endif -%}
        {%- endfor -%}
        {{- '}<tool|>' -}}
    {%- endfor -%}
    {{- '<turn|>\\n' -}}
{%- endif -%}
{%- for message in loop_messages -%}
    {{- '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
    {%- for tool_call in message['tool_calls'] or [] -%}
        {{- '<|tool_call>call:' + tool_call['function']['name'] -}}
        {{- value_of(tool_call['function']['arguments'], False) -}}
        {{- '<tool_call|>' -}}
    {%- endfor -%}
    {%- for response in message['tool_responses'] or [] -%}
        {{- '<|tool_response>response:' + response['name'] + '{value:' -}}
        {{- value_of(response['response'], False) + '}<tool_response|>' -}}
    {%- endfor -%}
    {%- if message['content'] is string -%}{{- message['content'].split('<channel|>')[-1] | trim -}}{%- endif -%}
    {%- if not (message['tool_responses'] and not message['content']) -%}{{- '<turn|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {%- if not loop_messages[-1]['tool_responses'] or loop_messages[-1]['content'] -%}{{- '<|turn>model\\n' -}}{%- endif -%}
    {%- if not enable_thinking | default(false) -%}{{- '<|channel>thought\\n<channel|>' -}}{%- endif -%}
{%- endif -%}"""

# As LFM2's: Python calls in a list.
LFM2 = """{{- bos_token -}}
{%- set ns = namespace(system_prompt="") -%}
{%- if messages[0]["role"] == "system" -%}
    {%- set ns.system_prompt = messages[0]["content"] -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{%- if tools -%}
    {%- set ns.system_prompt = ns.system_prompt + ("\\n" if ns.system_prompt else "") + "List of tools: <|tool_list_start|>["\
 -%}
    {%- for tool in tools -%}
        {%- set ns.system_prompt = ns.system_prompt + tool | tojson -%}
        {%- if not loop.last -%}{%- set ns.system_prompt = ns.system_prompt + ", " -%}{%- endif -%}
    {%- endfor -%}
    {%- set ns.system_prompt = ns.system_prompt + "]<|tool_list_end|>" -%}
{%- endif -%}
{%- if ns.system_prompt -%}{{- "<|im_start|>system\\n" + ns.system_prompt + "<|im_end|>\\n" -}}{%- endif -%}
{%- for message in messages -%}
    {{- "<|im_start|>" + message["role"] + "\\n" -}}
    {%- if message["role"] == "tool" -%}
        {{- "<|tool_response_start|>" + message["content"] + "<|tool_response_end|>" -}}
    {%- else -%}
        {{- message["content"] -}}
    {%- endif -%}
    {%- if message.tool_calls is defined -%}
        {%- set calls = namespace(all=[]) -%}
        {%- for call in message.tool_calls -%}
            {%- set given = namespace(all=[]) -%}
            {%- for name, value in call["function"]["arguments"].items() -%}
                {%- set text = "'" + value + "'" if value is string else value | tojson if value is mapping else value | \
string -%}
                {%- set given.all = given.all + [name + "=" + text] -%}
            {%- endfor -%}
            {%- set calls.all = calls.all + [call["function"]["name"] + "(" + given.all | join(", ") + ")"] -%}
        {%- endfor -%}
        {{- "<|tool_call_start|>[" + calls.all | join(", ") + "]<|tool_call_end|>" -}}
    {%- endif -%}
    {{- "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}"""

# As Llama 3.2's: one call at a time, in JSON that nothing marks; tools in the first question.
LLAMA32 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- set first_user_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nRespond in the format {"name": function name, "parameters": {}}.\\n\\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' + tool_call.arguments | tojson + "}" + "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# As SmolLM3's: Hermes' form; tools as Python writes them; earlier calls are dropped.
SMOLLM3 = """{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content.rstrip() + '\\n\\n' }}{%- endif %}
{%- if tools %}
    {{- '### Tools\\n\\n<tools>\\n' }}
    {%- for tool in tools %}{{- (tool | string) + '\\n' }}{%- endfor %}
    {{- '</tools>\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '' if enable_thinking is defined and enable_thinking else '<think>\\n\\n</think>\\n' }}
{%- endif %}"""

# As Mistral's: the name and the arguments behind marks.
MISTRAL = """{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should have 9 letters!') }}{%- endif %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content | tojson(ensure_ascii=True) + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""

# As gpt-oss's, in the harmony format: functions as types, one call a message, whose recipient stands behind the role.
GPT_OSS = """{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '\\n\\n' }}
{{- '# Valid channels: analysis, commentary, final.' }}
{%- if tools %}{{- "\\nCalls to these tools must go to the commentary channel: 'functions'." }}{%- endif %}
{{- '<|end|>' }}
{%- set system = messages[0].role in ['system', 'developer'] %}
{%- if system or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if system %}{{- '# Instructions\\n\\n' + messages[0].content + '\\n\\n' }}{%- endif %}
    {%- if tools %}
        {{- '# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' }}
        {%- for tool in tools %}
            {{- '// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: {\\n' }}
            {%- for name, field in tool.function.parameters.properties.items() %}
                {{- ('// ' + field.description + '\\n' if field.description else '') + name + ': ' + (field.type or 'any') + ',\\n' }}
            {%- endfor %}
            {{- '}) => any;\\n\\n' }}
        {%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in messages[(1 if system else 0):] %}
    {%- if message.role == 'assistant' %}
        {%- if 'tool_calls' in message %}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.content and message.thinking %}{{- raise_exception('Content and thinking beside a call') }}{%- endif %}
            {%- set said = message.content or message.thinking %}
            {%- if said %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + said + '<|end|>' }}{%- endif %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- call.arguments | tojson }}
            {{- '<|call|>' }}
            {%- set last.name = call.name %}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
            {%- set last.name = none %}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}{{- raise_exception('A result without a call') }}{%- endif %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message.content | tojson + '<|end|>' }}
    {%- else %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

TEMPLATES = {
    "qwen3": QWEN3, "qwen35": QWEN35, "gemma4": GEMMA4, "lfm2": LFM2, "llama32": LLAMA32, "smollm3": SMOLLM3,
    "mistral": MISTRAL, "gpt-oss": GPT_OSS,
}  # fmt: skip

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'The weather of a city, in "°C".\nNow.',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Its name"},
                "days": {"type": "integer", "default": 1},
                "Units": {"type": "string", "enum": ["metric", "imperial"]},
            },
            "required": ["city"],
        },
    },
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "time",
        "description": "The time",
        "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}, "required": []},
    },
}
TOOLS = [WEATHER, TIME]


def call(name: str, arguments: str, identifier: str = "call12345") -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}
