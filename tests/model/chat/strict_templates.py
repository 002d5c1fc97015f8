"""Chat templates with the guards of twenty families, as data: what each takes, refuses and drops, in words of our own.

`FAMILIES` says how a family treats roles, calls and results; `source_of` writes a template that does so.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from edge.model.chat.chat_template import ChatTemplate


@dataclass(frozen=True)
class Guards:
    """How a template treats a conversation. turn: in a turn of its own. raise, drop: refused, left out."""

    system: str = "turn"  # the first system message: turn, question (before the first question), raise, drop
    later: str = "turn"  # other system messages: turn, raise, drop
    alternate: str = ""  # user and assistant must alternate: strict, or but for calls and results
    tools: bool = True  # whether it writes tools
    calls: str = "all"  # all, one (raises for more), first (drops others), drop
    results: str = "tool"  # tool, user, drop, named (by its call's name), last (by the last call's name; or raise)
    behind: str = "turn"  # the user's text behind a result: turn, raise
    needs_question: bool = False  # raises without a message of the user
    ids: bool = False  # requires identifiers of nine letters
    developer: bool = False  # knows the role


FAMILIES = {
    "chatml": Guards(tools=False, calls="drop", results="tool"),
    "zephyr": Guards(tools=False, calls="drop", results="drop"),
    "llama2": Guards(system="question", later="raise", alternate="strict", tools=False, calls="drop", results="drop"),
    "llama32": Guards(calls="one"), "llama4": Guards(later="drop"),
    "gemma2": Guards(system="raise", later="raise", alternate="strict", tools=False, calls="drop", results="drop"),
    "gemma3": Guards(system="question", later="raise", alternate="strict", tools=False, calls="drop", results="drop"),
    "gemma4": Guards(later="drop", results="named"),
    "mistral": Guards(system="question", later="raise", alternate="strict", tools=False, calls="drop", results="drop"),
    "nemo": Guards(system="question", later="raise", alternate="but for calls", ids=True),
    "ministral3": Guards(later="raise", alternate="but for calls", behind="raise"), "qwen3": Guards(results="user"),
    "qwen35": Guards(later="raise", results="user", needs_question=True),
    "smollm3": Guards(later="drop", calls="drop", results="user"),
    "gpt-oss": Guards(later="drop", calls="first", results="last", developer=True),
    "phi3": Guards(tools=False, calls="drop", results="drop"),
    "command-r": Guards(later="raise", alternate="strict", tools=False, calls="drop", results="drop"),
    "starcoder": Guards(system="raise", later="raise", tools=False, calls="drop", results="drop"),
    "vicuna": Guards(system="drop", later="drop", tools=False, calls="drop", results="drop"),
    "gigachat": Guards(later="raise", calls="one", results="named", needs_question=True),
    "granite": Guards(later="drop", alternate="but for calls", behind="raise", developer=True),
}  # fmt: skip


@lru_cache
def template_of(family: str) -> ChatTemplate:
    return ChatTemplate(source_of(FAMILIES[family]), "<s>", "</s>")


def source_of(guards: Guards) -> str:
    """A template with these guards."""
    counted = {
        "": "false",
        "strict": "true",
        "but for calls": "message.role == 'user' or (message.role == 'assistant' and not message.tool_calls)",
    }[guards.alternate]
    systems = "['system', 'developer']" if guards.developer else "['system']"
    first = {
        "turn": "{{- '<|system|>' + messages[0].content + '\\n' }}",
        "question": "{%- set ns.before = messages[0].content + '\\n\\n' %}",
        "raise": "{{- raise_exception('a system prompt is beyond me') }}",
        "drop": "",
    }[guards.system]
    later = {
        "turn": "{{- '<|system|>' + message.content + '\\n' }}",
        "raise": "{{- raise_exception('a system prompt goes first') }}",
        "drop": "",
    }[guards.later]
    call = "{{- '<call ' + call.id + ' ' + call.function.name + ' ' + call.function.arguments | tojson + '>' }}"
    calls = {
        "all": f"{{%- for call in message.tool_calls %}}{call}{{%- endfor %}}",
        "one": "{%- if message.tool_calls | length > 1 %}{{- raise_exception('one call at a time') }}{%- endif %}"
        f"{{%- set call = message.tool_calls[0] %}}{call}",
        "first": f"{{%- set call = message.tool_calls[0] %}}{call}",
        "drop": "",
    }[guards.calls]
    result = {
        "tool": "{{- '<|tool|>' + message.content + '\\n' }}",
        "user": "{{- '<|user|><result>' + message.content + '</result>\\n' }}",
        "named": "{%- set found = namespace(name=none) %}"
        "{%- for other in messages %}{%- for call in other.tool_calls or [] %}"
        "{%- if call.id == message.tool_call_id %}{%- set found.name = call.function.name %}{%- endif %}"
        "{%- endfor %}{%- endfor %}"
        "{%- if found.name is none %}{{- raise_exception('whose result is this') }}{%- endif %}"
        "{{- '<|tool ' + found.name + '|>' + message.content + '\\n' }}",
        "last": "{%- if ns.called is none %}{{- raise_exception('a result, and no call') }}{%- endif %}"
        "{{- '<|tool ' + ns.called + '|>' + message.content + '\\n' }}",
        "drop": "",
    }[guards.results]
    ids = (
        "{%- for call in message.tool_calls %}{%- if call.id | length != 9 %}"
        "{{- raise_exception('identifiers have nine letters') }}{%- endif %}{%- endfor %}"
    )
    tools = "{%- if tools %}{{- '<tools>' + tools | tojson + '</tools>\\n' }}{%- endif %}" if guards.tools else ""
    return f"""{{%- set ns = namespace(before='', turns=0, called=none, behind=false, asked=false) -%}}
{{%- if messages and messages[0].role in {systems} %}}{first}{{%- set rest = messages[1:] %}}
{{%- else %}}{{%- set rest = messages %}}{{%- endif %}}
{tools}
{{%- for message in rest %}}
    {{%- if message.role in {systems} %}}{later}{{%- else %}}
        {{%- if message.role == 'user' %}}{{%- set ns.asked = true %}}{{%- endif %}}
        {{%- if {counted} %}}
            {{%- if (message.role == 'user') != (ns.turns % 2 == 0) %}}
                {{{{- raise_exception('the user and the assistant take turns') }}}}
            {{%- endif %}}
            {{%- set ns.turns = ns.turns + 1 %}}
        {{%- endif %}}
        {{%- if message.role == 'user' %}}
            {{%- if ns.behind and {"true" if guards.behind == "raise" else "false"} %}}
                {{{{- raise_exception('an answer goes behind a result') }}}}
            {{%- endif %}}
            {{{{- '<|user|>' + ns.before + message.content + '\\n' }}}}{{%- set ns.before = '' %}}
        {{%- elif message.role == 'assistant' %}}
            {{{{- '<|assistant|>' + message.content }}}}
            {{%- if message.tool_calls %}}
                {{%- set ns.called = message.tool_calls[0].function.name %}}
                {ids if guards.ids else ""}
                {calls}
            {{%- endif %}}
            {{{{- '\\n' }}}}
        {{%- elif message.role == 'tool' %}}{result}{{%- endif %}}
        {{%- set ns.behind = message.role == 'tool' %}}
    {{%- endif %}}
{{%- endfor %}}
{{%- if not ns.asked and {"true" if guards.needs_question else "false"} %}}
    {{{{- raise_exception('there is no question') }}}}
{{%- endif %}}
{{%- if add_generation_prompt %}}{{{{- '<|assistant|>' }}}}{{%- endif %}}"""
