"""Forms of calls, one for each family of models, which the parser and the grammars follow.

A family is found by what its chat template contains. To add one: an entry in FORMATS.
"""

from __future__ import annotations

from typing import Literal

from edge.records import dataclass

Body = Literal["json", "tags", "call", "python", "named", "header"]


@dataclass(frozen=True)
class ToolFormat:
    """How a family writes calls.

    body: the text between the marks: a JSON object with a name and arguments ("json"), a tag for the function and
    each parameter ("tags"), `call:NAME{key:value}` ("call"), a list of Python calls ("python"), the name and a JSON
    object ("named"), or a JSON object after a header with the name ("header").
    """

    name: str
    known_by: tuple[str, ...]  # a template that contains all of these texts belongs to the family
    body: Body
    opening: str = ""  # before one call or several; "": calls have no mark, and only known names are calls
    closing: str = ""
    also: tuple[str, ...] = ()  # other openings that models of the family write
    quote: str = ""  # around texts, if not as in JSON or Python
    arguments: str = "arguments"  # the name of their field in JSON
    between: str = "\n"  # the text between calls
    bare: bool = False  # an answer may begin with a call that lacks its mark
    joined: bool = False  # one pair of marks encloses all calls

    @property
    def begins(self) -> bool:
        """Whether a grammar includes the answer's thoughts, because the header after them tells if a call follows."""
        return self.body == "header"

    @property
    def ends(self) -> tuple[str, ...]:
        """Texts that end a value, or the thought before a call, where text is free up to them."""
        found = {"tags": "\n</parameter>\n", "call": self.quote, "header": "<|end|>"}.get(self.body)
        return (found,) if found else ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be tokens of their own, and which the parser must see."""
        return tuple(mark for mark in (self.opening, self.closing, *self.also, self.quote, *_INNER[self.body]) if mark)


_INNER: dict[Body, tuple[str, ...]] = {
    "json": (), "tags": (), "call": (), "python": (), "named": ("[ARGS]",),
    "header": ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>"),
}  # fmt: skip

HERMES = ToolFormat("hermes", ("<tool_call>",), "json", "<tool_call>", "</tool_call>", bare=True)

FORMATS = (
    ToolFormat(  # Qwen 3.5 and Qwen3-Coder
        "qwen-tags", ("<tool_call>", "<function=", "<parameter="), "tags", "<tool_call>", "</tool_call>",
        also=("<function=",),
    ),
    HERMES,  # Qwen 2.5 and 3, Hermes, SmolLM3, Granite 4 and others
    ToolFormat(
        "gemma4", ("<|tool_call>", "<tool_call|>"), "call", "<|tool_call>", "<tool_call|>", quote='<|"|>', between=""
    ),
    ToolFormat(
        "functiongemma", ("<start_function_call>",), "call", "<start_function_call>", "<end_function_call>",
        quote="<escape>", between="",
    ),
    ToolFormat(
        "lfm2", ("<|tool_call_start|>",), "python", "<|tool_call_start|>", "<|tool_call_end|>", joined=True
    ),
    ToolFormat("lfm2", ("<|tool_list_start|>",), "python", "<|tool_call_start|>", "<|tool_call_end|>", joined=True),
    ToolFormat("mistral", ("[TOOL_CALLS]", "[ARGS]"), "named", "[TOOL_CALLS]", between=""),
    ToolFormat("mistral-list", ("[TOOL_CALLS]",), "json", "[TOOL_CALLS]", joined=True),
    ToolFormat("harmony", ("<|channel|>commentary", "<|call|>"), "header", " to=functions.", between=""),  # gpt-oss
    ToolFormat(  # Llama 3.1 and 3.2
        "llama3", ("<|start_header_id|>", '"parameters"'), "json", also=("<|python_tag|>",), arguments="parameters",
        between="; ", bare=True,
    ),
)  # fmt: skip


def find_format(template: str | None) -> ToolFormat:
    """The form of calls of a model with this chat template; Hermes' if the template contains none."""
    found = (form for form in FORMATS if template is not None and all(part in template for part in form.known_by))
    return next(found, HERMES)
