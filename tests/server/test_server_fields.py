"""Every field of the protocols is honoured, refused by its name, harmless, or named in a header."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest
from serving import HELLO, PLACE, client_of
from starlette.testclient import TestClient

from edge.errors import MissingExtraError
from edge.server.protocols.anthropic import MessagesBody
from edge.server.protocols.bodies import ChatBody, CompletionBody
from edge.server.protocols.embeddings import EmbeddingsBody
from edge.server.protocols.ollama import ApiChatBody, ApiGenerateBody
from edge.server.protocols.rerank import RerankBody
from edge.server.protocols.responses import ResponsesBody
from edge.server.protocols.unread import HARMLESS, HEADER, REFUSED
from edge.server.refusal import refusal_of

BODIES: dict[str, tuple[type, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatBody, {"messages": HELLO, "max_tokens": 1}),
    "/v1/completions": (CompletionBody, {"prompt": "Hello", "max_tokens": 1}),
    "/v1/responses": (ResponsesBody, {"input": "Hello", "max_output_tokens": 1}),
    "/v1/messages": (MessagesBody, {"messages": HELLO, "max_tokens": 1}),
    "/api/chat": (ApiChatBody, {"messages": HELLO, "options": {"num_predict": 1}, "stream": False}),
    "/api/generate": (ApiGenerateBody, {"prompt": "Hello", "options": {"num_predict": 1}, "stream": False}),
    "/v1/embeddings": (EmbeddingsBody, {"input": "Hello"}),
    "/v1/rerank": (RerankBody, {"query": "Hello", "documents": ["Hello"]}),
}
PUBLISHED = {  # by the protocols' own references, and those of llama-server and vLLM
    "/v1/chat/completions": (
        "audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages"
        " metadata modalities model n parallel_tool_calls prediction presence_penalty prompt_cache_key"
        " prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream"
        " stream_options temperature tool_choice tools top_logprobs top_p user web_search_options"
        " grammar json_schema cache_prompt id_slot n_predict mirostat mirostat_tau typical_p dynatemp_range min_p top_k"
        " repeat_last_n dry_multiplier xtc_probability samplers n_probs lora t_max_predict_ms timings_per_token"
        " guided_json guided_regex guided_choice guided_grammar structured_outputs repetition_penalty ignore_eos"
        " min_tokens stop_token_ids bad_words allowed_token_ids use_beam_search length_penalty echo documents"
        " chat_template chat_template_kwargs prompt_logprobs skip_special_tokens include_stop_str_in_output priority"
    ),
    "/v1/completions": (
        "best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop stream"
        " stream_options suffix temperature top_p user response_format grammar json_schema structured_outputs"
        " guided_choice n_predict prompt_embeds use_beam_search stop_token_ids input_prefix"
    ),
    "/v1/responses": (
        "background conversation include input instructions max_output_tokens max_tool_calls metadata model"
        " parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_retention reasoning"
        " safety_identifier service_tier store stream stream_options temperature text tool_choice tools top_logprobs"
        " top_p truncation user"
    ),
    "/v1/messages": (
        "max_tokens messages model cache_control container context_management inference_geo mcp_servers metadata"
        " output_config output_format service_tier stop_sequences stream system temperature thinking tool_choice tools"
        " top_k top_p"
    ),
    "/api/chat": "model messages tools think format options stream keep_alive logprobs top_logprobs template",
    "/api/generate": (
        "model prompt suffix images format system template stream raw keep_alive options context think logprobs"
        " top_logprobs"
    ),
    "/v1/embeddings": "input model encoding_format dimensions user",
    "/v1/rerank": (
        "model query documents top_n return_documents max_tokens_per_doc rank_fields texts raw_scores return_text"
        " truncate truncation_direction"
    ),
}

client = client_of()


@pytest.mark.parametrize("path", BODIES)
def test_every_published_field_has_place(path: str) -> None:
    kind, _ = BODIES[path]
    known = {each.name for each in fields(kind)}
    assert set(PUBLISHED[path].split()) <= known | REFUSED[kind] | HARMLESS[kind]
    assert not REFUSED[kind] & HARMLESS[kind]


@pytest.mark.parametrize("path", BODIES)
def test_refused_fields_are_named(client: TestClient, path: str) -> None:
    kind, body = BODIES[path]
    for name in REFUSED[kind] - {each.name for each in fields(kind)}:
        response = client.post(path, json={**body, name: ["x"]})
        assert response.status_code == 400, name
        error = response.json()["error"]
        assert f"{name} is not supported" in (error if isinstance(error, str) else error["message"])


def test_missing_extras_are_not_retried() -> None:
    """Programs repeat what is answered with 5xx."""
    refused = refusal_of(MissingExtraError("llguidance", "grammar"))
    assert (refused.status, refused.type, refused.code) == (400, "invalid_request_error", "unsupported")
    assert refused.headers == {}
    assert "pip install" in refused.message


@pytest.mark.parametrize("path", BODIES)
def test_harmless_fields_are_silent_and_others_named(client: TestClient, path: str) -> None:
    """So are refused ones with the values that change nothing."""
    kind, body = BODIES[path]
    known = {each.name for each in fields(kind)}
    harmless = dict.fromkeys(HARMLESS[kind] - known, "x") | dict.fromkeys(REFUSED[kind] - known)
    response = client.post(path, json={**body, **harmless})
    assert response.status_code == 200, response.text
    assert HEADER not in response.headers
    response = client.post(path, json={**body, "later": 1, "null": None})
    assert (response.status_code, response.headers[HEADER]) == (200, "later")


def test_invalid_inner_fields_are_named(client: TestClient) -> None:
    for path, more, words in [
        ("/v1/chat/completions", {"edge": {"joules": 3}}, "edge.joules is unknown: choose from energy, time"),
        ("/api/chat", {"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ("/v1/responses", {"include": ["message.output_text.logprobs"]}, "there are no logprobs here"),
        ("/v1/chat/completions", {"structured_outputs": {"structural_tag": "x"}}, "structural_tag is not supported"),
        ("/v1/chat/completions", {"tool_choice": "required"}, "tool_choice must be"),
        ("/v1/chat/completions", {"guided_regex": "a", "grammar": "start: /b/"}, "guided_regex and grammar are two"),
        ("/v1/chat/completions", {"grammar": "root ::= nothing"}, "the grammar cannot be used"),
        ("/v1/completions", {"guided_choice": []}, "choices must be a list of texts"),
        ("/v1/messages", {"output_config": {"format": {"type": "xml"}}}, "output_config.format must have the type"),
        ("/v1/chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens must be at least 1"),
        ("/v1/chat/completions", {"response_format": True}, "response_format must be an object, not true"),
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt[1] must be text, not 5"),
        ("/api/chat", {"options": {"num_predict": "x"}}, "options.num_predict must be a whole number, not 'x'"),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": {"type": ["zzz"]}}], "tool_choice": {"type": "any"}},
         "tools[0].input_schema: Invalid type: zzz"),
        ("/api/chat", {"keep_alive": "zz"}, "keep_alive must be a duration, such as 5m, not 'zz'"),
        ("/api/chat", {"messages": [{"role": 5, "content": "x"}]}, "messages[0].role must be text, not 5"),
        ("/api/chat", {"messages": [{**HELLO[0], "images": "x"}]}, "[0].images must be a list of pictures in base64"),
        ("/api/chat", {"messages": [{**HELLO[0], "tool_calls": [3]}]}, "[0].tool_calls[0] must be an object with a"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": [2]}]}]}, "messages[0].content[0]"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ("/v1/messages", {"messages": [{"role": "user", "content": None}]}, "content must be text or a list, not null"),
        ("/v1/messages", {"tool_choice": {"type": "foo"}}, "tool_choice.type is 'foo': choose from auto"),
        ("/v1/messages", {"tool_choice": {}}, "tool_choice.type is missing"),
        ("/v1/messages", {"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ("/v1/messages", {"tools": [{"input_schema": {}}]}, "tools[0].name is missing"),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema must be an object"),
        ("/v1/rerank", {"documents": None}, "documents is missing"),
        ("/v1/rerank", {"documents": []}, "documents is empty"),
        ("/v1/rerank", {"texts": ["a"]}, "state documents or texts, not both"),
        ("/v1/completions", {"logit_bias": {"x": 1}}, r'by token ids, such as {\"28\": -100}, not'),
        ("/v1/messages", {"max_tokens": 0}, "max_tokens"), ("/v1/messages", {"temperature": 3}, "temperature"),
        ("/v1/messages", {"top_k": -5}, "top_k"), ("/v1/messages", {"messages": []}, "messages"),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 8}}, "thinking"),
    ]:  # fmt: skip
        response = client.post(path, json={**BODIES[path][1], **more})
        assert response.status_code == 400, (path, more)
        assert words in response.text
    response = client.post("/rerank", content=b"null", headers={"Content-Type": "application/json"})
    assert "the request must be a JSON object, not null" in response.text
    assert client.post("/rerank", json={"query": "a", "texts": ["a"]}).json()[0].keys() == {"index", "score"}
    response = client.post("/api/chat", json={**BODIES["/api/chat"][1], "options": {"num_ctx": 4096, "later": 1}})
    assert (response.status_code, response.headers[HEADER]) == (200, "options.later")


GBNF = 'root ::= ("yes" | "no") mark\nmark ::= [.!]\n'
OPENAI_FORMS: list[tuple[dict[str, Any], set[str] | None]] = [  # a field, and the possible answers; None: a PLACE
    ({"response_format": {"type": "json_object", "schema": PLACE}}, None),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}}, None),
    ({"json_schema": PLACE}, None),
    ({"guided_json": json.dumps(PLACE)}, None),
    ({"structured_outputs": {"json": PLACE}}, None),
    ({"guided_regex": "(yes|no)"}, {"yes", "no"}),
    ({"structured_outputs": {"regex": "(yes|no)"}}, {"yes", "no"}),
    ({"guided_choice": ["red", 'gr"een']}, {"red", 'gr"een'}),
    ({"structured_outputs": {"choice": ["red", "blue"]}}, {"red", "blue"}),
    ({"grammar": GBNF}, {"yes.", "yes!", "no.", "no!"}),
    ({"guided_grammar": 'start: "a" | "b"'}, {"a", "b"}),
    ({"structured_outputs": {"grammar": GBNF}}, {"yes.", "yes!", "no.", "no!"}),
]


@pytest.mark.parametrize("number", range(len(OPENAI_FORMS)))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_forms_of_answers_in_openais_protocol(client: TestClient, path: str, number: int) -> None:
    stated, answers = OPENAI_FORMS[number]
    found = client.post(path, json={**BODIES[path][1], "max_tokens": 60, **stated})
    assert found.status_code == 200, found.text
    choice = found.json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert text in answers if answers else json.loads(text)["city"] in ("Rome", "Oslo"), text


def test_tools_that_are_no_functions_are_named(client: TestClient) -> None:
    function = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
    custom = {"type": "custom", "custom": {"name": "shell"}}
    body = {"messages": HELLO, "max_tokens": 90, "tools": [custom, function], "tool_choice": "required"}
    response = client.post("/v1/chat/completions", json={**body, "parallel_tool_calls": False})
    assert response.headers[HEADER] == "tools[0] (custom)"
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
    body = {"messages": HELLO, "max_tokens": 1, "tools": [{"type": "bash_20250124", "name": "bash"}]}
    assert client.post("/v1/messages", json=body).headers[HEADER] == "tools[0] (bash_20250124)"
    response = client.post("/v1/messages", json={**body, "tool_choice": {"type": "any"}})
    assert response.status_code == 400
    assert "tool_choice must be" in response.text


def test_functions_of_namespaces_are_called_with_their_namespace(client: TestClient) -> None:
    """The model sees them by their names; calls say where they belong, also when they come back."""
    weather = {"type": "function", "name": "weather", "parameters": PLACE}
    space = {
        "type": "namespace", "name": "world", "description": "", "tools": [weather, {"type": "custom", "name": "x"}],
    }  # fmt: skip
    body = {"input": "Hello", "tools": [{"type": "web_search"}, space], "tool_choice": "required",
            "parallel_tool_calls": False, "max_output_tokens": 90}  # fmt: skip
    response = client.post("/v1/responses", json=body)
    assert response.headers[HEADER] == "tools[0] (web_search), tools[1].tools[1] (custom)"
    [item] = response.json()["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "world", "weather")
    same = [space, {**space, "name": "sea"}]
    choice = {"type": "function", "name": "weather", "namespace": "sea"}
    history = [{"role": "user", "content": "Hello"}, item,
               {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}]  # fmt: skip
    response = client.post("/v1/responses", json={**body, "input": history, "tools": same, "tool_choice": choice})
    [item] = response.json()["output"]
    assert (item["namespace"], item["name"]) == ("sea", "weather")
