"""The enums of edge.h in every language: statuses, roles, finish reasons, levels of trimming memory; and what other
languages call what messages of the C library name.

`bindings.py` writes them into edge.h and the bindings.
"""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    OK = 0
    BAD_ARGUMENT = -1
    BAD_FILE = -2
    UNSUPPORTED = -3
    NO_MEMORY = -4
    BUSY = -5
    FULL = -6
    FAILED = -7


class Role(IntEnum):
    SYSTEM, USER, ASSISTANT, RAW, IDS, RESULT = range(6)


class Finish(IntEnum):
    """Why an answer ended, in the words of `edge.run.report.StopReason`; GOING: it has not ended."""

    GOING, EOS, STOP, LENGTH, CAPACITY, INTERRUPTED, TIME, ENERGY, POWER, THERMAL, MEMORY, TOOL_CALLS = range(12)


class Trim(IntEnum):
    SOFT, HALF, ALL = range(3)


class Engine(IntEnum):
    AUTO, CPU, GPU, NPU = range(4)


class Speculate(IntEnum):
    AUTO, OFF = range(2)


class Form(IntEnum):
    """Of an answer, as the fields of `edge.Grammar`."""

    FREE, JSON_SCHEMA, REGEX = range(3)


class Pooling(IntEnum):
    """Of hidden states: as the model's file says, or as `edge.model.structure.layers.Pooling`."""

    MODEL, MEAN, CLS, LAST = range(4)


ROLES_OF_TEXT = [each for each in Role if each != Role.IDS]  # ids have functions of their own
ABOUT: dict[type[IntEnum], dict[int, str]] = {
    Status: {
        Status.BAD_ARGUMENT: "An invalid value, or a call out of order.",
        Status.BAD_FILE: "model.edge or a saved state is unreadable, damaged, cut short, or of another version.",
        Status.UNSUPPORTED: "This CPU, model or policy cannot do that.",
        Status.BUSY: "Another thread or process uses the session, or sessions of the model are open.",
        Status.FULL: "The text has more tokens than there are free rows, and the policy evicts none.",
        Status.FAILED: "The model computed no number (NaN).",
    },
    Role: {
        Role.SYSTEM: "Before the first turn. Its KV rows stay when others are evicted, as far as the plan has room.",
        Role.USER: "A turn. Its text never becomes a control token.",
        Role.ASSISTANT: "An answer from an earlier conversation.",
        Role.RAW: "Text without the chat template, in which control tokens are recognized.",
        Role.IDS: "Token ids, int32_t; count is their number.",
        Role.RESULT: "The result of a call of the last answer: of its first one, then of the next.",
    },
    Finish: {},
    Engine: {
        Engine.AUTO: "CPU or GPU: the faster, timed when the first session begins; a GPU needs edge_options.cache.",
        Engine.GPU: "Where the bundle has programs for it (edge export --gpu), and the device runs them.",
        Engine.NPU: "Where the bundle has graphs for it (edge export --npu), and the app brings ONNX Runtime.",
    },
    Speculate: {
        Speculate.AUTO: "Where drafts pay, on the CPU. Not with h2o.",
        Speculate.OFF: "Every token runs on its own.",
    },
    Form: {
        Form.FREE: "Any text.",
        Form.JSON_SCHEMA: "JSON that matches a schema.",
        Form.REGEX: "Text that matches a regular expression as a whole.",
    },
    Pooling: {
        Pooling.MODEL: "As the model's file says.",
        Pooling.MEAN: "The mean of all hidden states.",
        Pooling.CLS: "The state of the first token.",
        Pooling.LAST: "The state of the last token.",
    },
    Trim: {
        Trim.SOFT: "Unused pages. The next tokens take them again.",
        Trim.HALF: "Half of the rows that can be spared, too.",
        Trim.ALL: "All of them.",
    },
}

NAMES: dict[str, tuple[str, str, str]] = {  # in messages of C: what Kotlin, Swift and JavaScript call it
    "edge_open": ("EdgeModel.open", "EdgeModel.init", "Edge.open"),
    "edge_begin": ("session", "session", "Edge.open"),
    "edge_append": ("append", "append", "stream"),
    "edge_next": ("answer", "answer", "stream"),
    "edge_cancel": ("cancel", "cancel", "signal"),
    "edge_embed": ("embed", "embed", "embed"),
    "edge_image": ("image", "image", "image"),
    "edge_sound": ("sound", "sound", "sound"),
    "edge_picture": ("picture", "picture", "picture"),
    "edge_listen": ("transcribe", "listen", "transcribe"),
    "edge_hear": ("transcribe", "hear", "transcribe"),
    "edge_constrain": ("constrain", "constrain", "constrain"),
    "edge_bias": ("bias", "bias", "bias"),
    "edge_tools": ("tools", "tools", "tools"),
    "edge_choose": ("choose", "choose", "choose"),
    "EDGE_FREE": ("Form.FREE", "Form.free", "null"),
    "edge_role": ("Role", "Role", "role"),
    "edge_form": ("Form", "Form", "form"),
    "edge_options.npu": ("EdgeOptions.npu", "EdgeOptions.npu", "npu"),
    "EDGE_RAW": ("Role.RAW", "Role.raw", "the role 'raw'"),
    "EDGE_USER": ("Role.USER", "Role.user", "the role 'user'"),
}
