"""Fields of requests. Each is defined once, for the check of requests and for /openapi.json.

Of other fields, unread.py has the list.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from edge.budget import parse_joules, parse_seconds
from edge.errors import InputError
from edge.flags import flags_of
from edge.grammar.grammar import Grammar
from edge.model.chat.thinking import EFFORTS, Think
from edge.records import dataclass
from edge.run.arguments import MOST_TOKENS
from edge.sampling import SamplingParams
from edge.server.protocols.fields import said, whole
from edge.server.protocols.offered import of_chat
from edge.server.refusal import RefusedError
from edge.values import brief

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_LOGPROBS = 20
MOST_PROMPTS = 64


Count = Annotated[int, whole(-1, MOST_TOKENS)]
Choices = Annotated[int, whole(1, MOST_CHOICES)]
Votes = Annotated[int, whole(2, MOST_CHOICES)]
Logprobs = Annotated[int, whole(0, MOST_LOGPROBS)]
TokenId = Annotated[int, whole(0, (1 << 31) - 1)]


@dataclass(frozen=True)
class Budget:
    """The budgets of one answer, and what it is from: field `edge` of a request."""

    energy: str | float | None = said("Joules, such as 30J: the answer ends before more is spent.")
    time: str | float | None = said("Seconds, such as 20s: the answer ends then, the wait for its turn included.")
    documents: str | None = said("An index of `edge serve --documents`, of which passages go before the question.")
    vote: Votes | None = said("In a chat: draw this many short answers, and send the one that most agree on.")
    evict: bool | None = said("Answer a prompt that is longer than the KV rows: the policy evicts the others.")


@dataclass(frozen=True)
class StreamOptions:
    include_usage: bool | None = said("End a stream with a chunk that has `usage`, and no choices.")


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Sampling, and limits that all protocols have. The fields of SamplingParams have edge's names."""

    model: str | None = said("A name of /v1/models; the first model without it.")
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_last_n: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = said(f"Texts before which the answer ends, {MOST_STOPS} at most.")
    stream: bool | None = said("Send the answer in pieces, as server-sent events.")
    edge: Budget | None = said("Budgets of this request.")
    ignore_eos: bool | None = said("Never end the turn; go on.")

    def sampling(self) -> dict[str, Any]:
        """The stated fields of SamplingParams. Raises RefusedError for impossible values."""
        found: dict[str, Any] = {name: getattr(self, name, None) for name in flags_of(SamplingParams)}
        found = {name: value for name, value in found.items() if value is not None}
        if (seed := found.get("seed")) is not None:
            found["seed"] = None if seed == -1 else seed % 2**64
        if found.get("top_k") == -1:
            found["top_k"] = 0
        for name, value in found.items():
            try:
                SamplingParams(**{name: value})
            except InputError as error:
                message = str(error).replace(flags_of(SamplingParams)[name].name, name)
                raise RefusedError(400, message, param=name, code="invalid_value") from None
        return {name: value for name, value in found.items() if value is not None}

    def stops(self) -> tuple[str, ...]:
        """The stop strings, without empty ones. Raises RefusedError for more than MOST_STOPS."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MOST_STOPS:
            raise RefusedError(
                400, f"stop has {len(stops)} texts, {MOST_STOPS} are the most", param="stop", code="invalid_value"
            )
        return tuple(each for each in stops if each)


Hint = bool | str | int | dict[str, Any]
_HINTS = ("effort", "type", "enabled")  # fields of hints that are objects
_WORDS = {"none": False, "off": False, "false": False, "disabled": False, "on": True, "true": True, "enabled": True,
          "adaptive": True}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Hints:
    """How long the model should think: hints, by the names of several programs. The nearest mode that the model has
    serves."""

    reasoning_effort: Hint | None = said("How long the model thinks: none, minimal, low, medium, high, xhigh or max.")
    reasoning: Hint | None = said("The same, in `effort`; or `enabled`.")
    enable_thinking: Hint | None = said("Whether the model thinks.")
    think: Hint | None = said("Whether the model thinks, or how long.")
    thinking: Hint | None = said("The same, in `type`: enabled or disabled.")

    def mode(self) -> Think:
        """The mode of the first hint that says one."""
        hints = (self.enable_thinking, self.think, self.thinking, self.reasoning_effort, self.reasoning)
        return next((found for hint in hints if (found := think_of(hint)).chosen), Think())


@dataclass(frozen=True, kw_only=True)
class OpenAI(Drawn):
    """Fields that chats and completions of OpenAI's API share."""

    max_tokens: Count | None = said("Most tokens of the answer; -1 or none: as many as fit.")
    n: Choices | None = said("The number of answers.")
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, float] | None = said("Added to the logits of tokens, by their ids.")
    user: str | None = said("Ignored.")
    repetition_penalty: float | None = said("The same as repeat_penalty, as vLLM has it.")
    response_format: dict[str, Any] | None = said("The form of the answer.")
    structured_outputs: dict[str, Any] | None = said(
        "The same, as vLLM has it: json, regex, choice, grammar, json_object."
    )
    guided_json: str | dict[str, Any] | None = said("A JSON schema, in older programs for vLLM.")
    guided_regex: str | None = said("A regular expression, likewise.")
    guided_choice: list[str] | None = said("Texts of which the answer is one, likewise.")
    guided_grammar: str | None = said("A grammar in Lark's notation or GBNF, likewise.")
    json_schema: str | dict[str, Any] | None = said("A JSON schema, as llama-server has it.")
    grammar: str | None = said("A grammar in GBNF or in Lark's notation, as llama-server has it.")

    def sampling(self) -> dict[str, Any]:
        alias = {} if self.repetition_penalty is None else {"repeat_penalty": self.repetition_penalty}
        return alias | super().sampling()

    def grammar_of_answer(self) -> Grammar | None:
        """The form of the answer. Raises RefusedError for an impossible one, or for two."""
        stated = {name: (kind, getattr(self, name)) for name, kind in _FORMS.items()}
        for key, value in (self.structured_outputs or {}).items():
            stated[f"structured_outputs.{key}"] = (key, value)
        if (self.response_format or {}).get("type", "text") != "text":
            stated["response_format"] = ("response_format", self.response_format)
        given = [(name, *each) for name, each in stated.items() if each[1] not in (None, "", False)]
        if len(given) > 1:
            message = f"{given[0][0]} and {given[1][0]} are two forms of one answer: state one"
            raise RefusedError(400, message, param=given[1][0], code="invalid_value")
        return _grammar(*given[0]) if given else None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


@dataclass(frozen=True)
class Message:
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = said("The same, in other programs.")
    thinking: str | None = said("The same, as Ollama has it.")


@dataclass(frozen=True, kw_only=True)
class ChatBody(OpenAI, Hints):
    """POST /v1/chat/completions"""

    messages: list[Message] = field(metadata={"help": "The conversation; the last message is the user's."})
    max_completion_tokens: Count | None = said("The same as max_tokens, which it goes before.")
    logprobs: bool | None = said("Say how likely each token was.")
    top_logprobs: Logprobs | None = said("Alternatives of each token.")
    tools: list[dict[str, Any]] | None = said("Functions that the model may call.")
    tool_choice: str | dict[str, Any] | None = said("none, auto, required, or a function.")
    parallel_tool_calls: bool | None = said("Whether the model may call several functions.")
    chat_template_kwargs: dict[str, Any] | None = said("Variables of the chat template, such as enable_thinking.")

    continue_final_message: bool | None = said("false: begin anew behind a last message of the assistant.")

    @property
    def left_out(self) -> tuple[str, ...]:
        """Tools that the answer goes without."""
        return of_chat(self.tools).left_out

    def mode(self) -> Think:
        """The thinking mode, by the template's enable_thinking, else by other hints."""
        chosen = think_of((self.chat_template_kwargs or {}).get("enable_thinking"))
        return chosen if chosen.chosen else super().mode()


@dataclass(frozen=True, kw_only=True)
class CompletionBody(OpenAI):
    """POST /v1/completions"""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]] = field(
        metadata={"help": "A text, in which control tokens are recognized, or token ids; or several of either."}
    )
    echo: bool | None = said("Begin the answer with the prompt.")
    logprobs: Logprobs | None = said("Say how likely each token was, with as many alternatives.")
    suffix: str | None = said("Not supported, unless it is empty.")
    best_of: Choices | None = said("Draw this many answers, and send the n likeliest by token; not in a stream.")


@dataclass(frozen=True)
class TokenizeBody:
    """POST /tokenize"""

    content: str | None = said("The text.")
    prompt: str | None = said("The text, as vLLM has it: begins with the token that prompts begin with.")
    model: str | None = None
    add_special: bool | None = said("With the token that prompts begin with.")
    add_special_tokens: bool | None = said("The same, as vLLM has it.")
    parse_special: bool | None = said("Recognize control tokens (default: yes).")
    with_pieces: bool | None = said("With each token's text.")


@dataclass(frozen=True)
class DetokenizeBody:
    """POST /detokenize"""

    tokens: list[TokenId] = field(metadata={"help": "Token ids."})
    model: str | None = None


_FORMS = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "json_schema": "json", "grammar": "grammar",
}  # fmt: skip


def _grammar(name: str, kind: str, value: Any) -> Grammar | None:
    """The grammar of a stated form. Raises RefusedError."""
    if kind == "response_format":
        return grammar_of(value, name)
    try:
        if kind == "json":
            return Grammar(json_schema=value, param=name)
        if kind == "json_object":
            return Grammar(json_schema={"type": "object"}, param=name)
        if kind == "regex":
            return Grammar(regex=value, param=name)
        if kind == "grammar":
            return Grammar(lark=value, param=name)
        if kind == "choice":
            return Grammar.of_choices(value, name)
    except InputError as error:
        raise RefusedError(400, f"{name}: {error}", param=name, code="invalid_value") from None
    raise RefusedError(400, f"{name} is not supported", param=name, code="unsupported")


def grammar_of(form: dict[str, Any] | None, name: str) -> Grammar | None:
    """The grammar of a field with a form in OpenAI's words. name: the field's. Raises RefusedError."""
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else ""
    if kind == "text":
        return None
    schema: Any = (form.get("schema") or {"type": "object"}) if kind == "json_object" else None
    if kind == "json_schema":
        described = form.get("json_schema", form)  # of the chat API; the responses API has the schema beside the type
        schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict):
        message = f"{name} must have the type text, json_object, or json_schema with a schema, not {brief(form)}"
        raise RefusedError(400, message, param=name, code="invalid_value")
    try:
        return Grammar(json_schema=schema, param=name)
    except InputError as error:
        raise RefusedError(400, str(error), param=name, code="invalid_value") from None


def think_of(hint: object) -> Think:
    """The thinking mode of a hint: a word, whether to think, or an object of these. Other values say nothing."""
    if isinstance(hint, dict):
        tokens = next((hint[name] for name in ("budget_tokens", "max_tokens") if isinstance(hint.get(name), int)), 0)
        if hint.get("type") != "disabled" and tokens > 0:
            return Think(enabled=True, tokens=tokens)
        words = [hint[name] for name in _HINTS if isinstance(hint.get(name), bool | str)]
        return next((found for word in words if (found := think_of(word)).chosen), Think())
    if isinstance(hint, bool):
        return Think(enabled=hint)
    word = hint.strip().lower() if isinstance(hint, str) else ""
    if word in (*EFFORTS, "minimal", "xhigh", "max"):
        return Think(effort=word)
    return Think(enabled=_WORDS[word]) if word in _WORDS else Think()


def limits_of(budget: Budget | None, headers: Any, *, evict: bool = False, votes: bool = False) -> dict[str, Any]:
    """`time` (seconds) and `energy` (joules) of a request, from its body, else from the headers Edge-Time and
    Edge-Energy, and `evict`, as the protocol has it or from the body. votes: whether the protocol has `edge.vote`.
    Raises RefusedError."""
    if budget and budget.vote is not None and not votes:
        raise RefusedError(400, "edge.vote is a field of /v1/chat/completions", param="edge.vote", code="unsupported")
    found: dict[str, Any] = {"evict": evict or bool(budget and budget.evict)}
    for name, parse in (("time", parse_seconds), ("energy", parse_joules)):
        value = getattr(budget, name, None)
        value = headers.get(f"edge-{name}") if value is None else value
        try:
            found[name] = None if value is None else parse(value)
        except InputError as error:
            raise RefusedError(400, str(error), param=f"edge.{name}", code="invalid_value") from None
    return found
