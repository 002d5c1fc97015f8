"""Fields that protocols have and edge does not read. One that would change the answer is refused by its name; one
that is neither refused nor harmless, such as a hint or a later addition, is named in the header Edge-Ignored."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from edge.server.protocols.anthropic import MessagesBody
from edge.server.protocols.bodies import Budget, ChatBody, CompletionBody
from edge.server.protocols.embeddings import EmbeddingsBody
from edge.server.protocols.ollama import OPTIONS, ApiChatBody, ApiGenerateBody
from edge.server.protocols.rerank import RerankBody
from edge.server.protocols.responses import ResponsesBody
from edge.server.protocols.speech import TranscriptionBody, TranslationBody
from edge.server.refusal import RefusedError

HEADER = "Edge-Ignored"
_MOST_NAMES = 20  # in the header


def _names(*lines: str) -> frozenset[str]:
    return frozenset(" ".join(lines).split())


_SAMPLING = _names(
    "mirostat mirostat_mode tfs_z tfs typical_p typical top_a top_n_sigma dynatemp_range repeat_last_n epsilon_cutoff",
    "eta_cutoff no_repeat_ngram_size smoothing_factor penalize_nl penalize_newline samplers bad_words",
    "allowed_token_ids logits_processors min_keep adaptive_target",
)
_COMPLETING = _SAMPLING | _names(
    "n_predict max_new_tokens t_max_predict_ms n_probs prompt_logprobs use_beam_search beams num_beams length_penalty",
    "early_stopping",
    "stop_token_ids include_stop_str_in_output truncate_prompt_tokens skip_special_tokens return_tokens",
    "return_token_ids return_tokens_as_token_ids post_sampling_probs lora lora_request guided_whitespace_pattern",
    "structural_tag json_mode ebnf regex vllm_xargs grammar_lazy",
)
REFUSED: dict[type, frozenset[str]] = {
    ChatBody: _COMPLETING | _names(
        "functions function_call modalities audio web_search_options echo documents chat_template reasoning_format",
        "parse_tool_calls add_generation_prompt include_reasoning separate_reasoning mm_processor_kwargs best_of",
    ),
    CompletionBody: _COMPLETING | _names("prompt_embeds tools input_extra input_prefix input_suffix"),
    ResponsesBody: _names("background conversation prompt top_logprobs response_format max_tokens stop"),
    MessagesBody: _names("mcp_servers container response_format"),
    ApiChatBody: _names("template logprobs top_logprobs"),
    ApiGenerateBody: _names("template suffix context logprobs top_logprobs width height steps"),
    EmbeddingsBody: _names("truncate_prompt_tokens task input_type edge"),
    TranscriptionBody: _names("include known_speaker_names known_speaker_references hotwords without_timestamps"),
    TranslationBody: _names("hotwords without_timestamps"),
    RerankBody: _names("rank_fields max_chunks_per_doc raw_scores truncation_direction edge"),
}  # fmt: skip
_INSTEAD = {
    "functions": "use tools", "function_call": "use tool_choice", "n_predict": "use max_tokens",
    "max_new_tokens": "use max_tokens", "t_max_predict_ms": "use edge.time", "n_probs": "use logprobs",
    "bad_words": "use logit_bias", "allowed_token_ids": "use logit_bias", "stop_token_ids": "use stop",
    "lora": "name the adapter in model", "lora_request": "name the adapter in model", "ebnf": "use grammar",
    "prompt_logprobs": "use echo with logprobs on /v1/completions", "regex": "use structured_outputs",
    "documents": "put them into a message, or name an index in edge.documents",
    "json_mode": "use response_format", "tools": "use /v1/chat/completions",
    "conversation": "send the whole conversation as input", "prompt": "send its text as input",
    "max_tokens": "use max_output_tokens", "context": "send the conversation to /api/chat",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tfs_z": (1,), "tfs": (1,), "typical_p": (1,), "typical": (1,), "top_n_sigma": (-1,), "repeat_last_n": (64,),
    "adaptive_target": (-1,), "n_predict": (-1,), "t_max_predict_ms": (-1,), "length_penalty": (1,), "best_of": (1,),
    "beams": (1,), "num_beams": (1,),
    "skip_special_tokens": (True,), "parse_tool_calls": (True,), "add_generation_prompt": (True,),
    "include_reasoning": (True,), "separate_reasoning": (True,), "modalities": (["text"],),
    "reasoning_format": ("auto", "deepseek"),
}  # fmt: skip
"""Values of refused fields that change nothing, beside null, false, 0, and empty texts and lists."""

_OPENAI = _names(
    "metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prediction cache_prompt",
    "id_slot slot_id n_keep n_discard timings_per_token return_progress mirostat_tau mirostat_eta dynatemp_exponent",
    "guided_decoding_backend priority request_id cache_salt kv_transfer_params spaces_between_special_tokens",
    "add_special_tokens",
)
HARMLESS: dict[type, frozenset[str]] = {
    ChatBody: _OPENAI,
    CompletionBody: _OPENAI,
    ResponsesBody: _names(
        "store service_tier safety_identifier prompt_cache_key prompt_cache_retention user stream_options",
        "max_tool_calls client_metadata",
    ),
    MessagesBody: _names("metadata service_tier inference_geo cache_control context_management betas"),
    ApiChatBody: _names("shift"),
    ApiGenerateBody: _names("shift"),
    EmbeddingsBody: _names("user"),
    TranscriptionBody: _names("user chunking_strategy vad_filter"),
    TranslationBody: _names("user vad_filter language"),
    RerankBody: _names("user max_tokens_per_doc priority"),
}
_OPTIONS = _names(
    "num_ctx num_keep num_batch num_gpu main_gpu num_thread use_mmap use_mlock low_vram vocab_only numa f16_kv",
    "logits_all mirostat_tau mirostat_eta",
)
"""Harmless ones of Ollama's `options`."""


def check_fields(kind: type, data: Any) -> list[str]:
    """The names of ignored fields that are not known to be harmless. Raises RefusedError for a field that edge would
    have to honour."""
    if kind not in REFUSED or not isinstance(data, dict):
        return []
    known = {each.name for each in fields(kind)} | HARMLESS[kind]
    ignored = _check({name: each for name, each in data.items() if name not in known}, REFUSED[kind])
    if isinstance(options := data.get("options"), dict) and "options" in known:
        options = {name: each for name, each in options.items() if name not in OPTIONS and name not in _OPTIONS}
        ignored += [f"options.{name}" for name in _check(options, _SAMPLING, "options.")]
    if isinstance(budget := data.get("edge"), dict):
        names = [each.name for each in fields(Budget)]
        if unknown := sorted(budget.keys() - set(names)):
            message = f"edge.{unknown[0][:40]} is unknown: choose from {', '.join(names)}"
            raise RefusedError(400, message, param="edge", code="invalid_value")
    return ignored + _details(data)


def _details(data: dict[str, Any]) -> list[str]:
    """Details that a client asks of its pictures: all have the size that --image-tokens sets."""
    found, name = list[str](), "messages" if "messages" in data else "input"
    for number, message in enumerate(data[name] if isinstance(data.get(name), list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for at, part in enumerate(content if isinstance(content, list) else []):
            kind = part.get("type") if isinstance(part, dict) else None
            picture = part.get("image_url") if kind == "image_url" else part if kind == "input_image" else None
            if isinstance(picture, dict) and picture.get("detail", "auto") not in ("auto", None):
                found.append(f"{name}[{number}].content[{at}].detail")
    return found


def _check(others: dict[str, Any], refused: frozenset[str], where: str = "") -> list[str]:
    for name, value in others.items():
        set_to = value or isinstance(value, dict)  # an empty object, too: it switches a feature on
        if name in refused and set_to and value not in _NEUTRAL.get(name, ()):
            message = f"{where}{name} is not supported" + (f": {_INSTEAD[name]}" if name in _INSTEAD else "")
            raise RefusedError(400, message, param=f"{where}{name}", code="unsupported")
    return [name for name, value in others.items() if name not in refused and value is not None]


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """The header that names what a request has and edge ignores; none without names."""
    named = [re.sub(r"[^\w.\[\]() -]", "?", name, flags=re.ASCII)[:60] for name in names]
    more = ["and others"] if len(named) > _MOST_NAMES else []
    return {HEADER: ", ".join(named[:_MOST_NAMES] + more)} if named else {}
