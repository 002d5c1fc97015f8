"""Write the parts that edge.h and the bindings share: enums and fields of structs, in each language.

In Kotlin and Swift, a line `generated: NAME` stands for each part until a bundle is written (`copy_source`). The other
files lie in the repository as apps and documents read them: `python -m edge.apps.bindings` writes the parts
between `generated: NAME` and `end`, and a test compares them. Kotlin and JavaScript write and read structs as C lays
them out, so their native code names no field.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from pathlib import Path

from edge.apps import gpu_programs
from edge.apps.enums import ABOUT, NAMES, ROLES_OF_TEXT, Engine, Finish, Form, Pooling, Role, Speculate, Status, Trim
from edge.apps.structs import STRUCTS, Field, layout, members
from edge.backends.tvm.gpu.design import State
from edge.backends.tvm.gpu.picking import TOP

_HERE = Path(__file__).parent
_KINDS: dict[str, type[IntEnum]] = {
    kind.__name__: kind for kind in (Status, Role, Finish, Form, Trim, Engine, Speculate, Pooling)
}
_PART = re.compile(r"(^ *(?://|/\*) generated: (\w+)[^\n]*\n).*?(^ *(?://|/\*) end\b)", re.MULTILINE | re.DOTALL)
_PLACE = re.compile(r"^ *// generated: (\w+)$", re.MULTILINE)
_WIDTH = 120
_LP64, _WASM = 8, 4  # bytes of a pointer


def generated(name: str) -> str:
    """The text of a file of FILES or EXPORTED, with its generated parts."""
    text = (_HERE / name).read_text(encoding="utf-8")
    if write := EXPORTED.get(name):
        return _PLACE.sub(lambda match: write(match[1]), text)
    return _PART.sub(lambda match: f"{match[1]}{FILES[name](match[2])}\n{match[3]}", text)


def copy_source(source: str | Path, target: str | Path) -> None:
    """Copy a file of this folder into a bundle, with its generated parts."""
    name = Path(source).relative_to(_HERE).as_posix()
    if name in EXPORTED:
        Path(target).write_text(generated(name), encoding="utf-8")
    else:
        shutil.copyfile(source, target)


# ---- C --------------------------------------------------------------------------------------------------------------

_C_TYPES = {
    "uint32": "uint32_t ", "int32": "int32_t ", "uint64": "uint64_t ", "int64": "int64_t ", "double": "double ",
    "flag": "uint32_t ", "seed": "uint64_t ", "text": "const char *", "texts": "const char *const *",
    "ids": "const int32_t *",
}  # fmt: skip


def _c(part: str) -> str:
    if part in _KINDS:
        return _c_enum(_KINDS[part])
    if part in STRUCTS:
        return "\n".join(line for field in STRUCTS[part] for line in _c_member(field))
    struct = STRUCTS[part.removeprefix("EDGE_").capitalize()]
    unset = {field.name: f"{field.unset}" for field in struct}
    values = ("NULL" if kind == "pointer" else unset.get(name, "0") for name, kind in members(struct)[1:])
    return f"#define {part} {{sizeof({part.lower()}), {', '.join(values)}}}"


def _c_member(field: Field) -> Iterator[str]:
    declared = f"    {_C_TYPES[field.kind]}{field.name};"
    if field.kind == "seed":
        yield f"    uint32_t seeded; /* 0: {field.otherwise} */"
        about = field.about
    else:
        about = _about(field, "NULL" if field.kind == "text" else "Less than 0" if field.unset else "0")
        if field.enum:
            about = f"An edge_{field.enum.__name__.lower()}. {about}"
    if about and len(declared) + len(about) + 7 > _WIDTH:
        yield textwrap.fill(about + " */", _WIDTH, initial_indent="    /* ", subsequent_indent="     * ")
        about = ""
    yield f"{declared} /* {about} */" if about else declared
    if field.kind in ("texts", "ids"):
        yield f"    uint32_t {field.name}_count;"


def _c_enum(kind: type[IntEnum]) -> str:
    prefix = "EDGE_" + {Trim: "TRIM_", Engine: "ENGINE_", Speculate: "SPECULATE_", Pooling: "POOLING_"}.get(kind, "")
    if kind is Finish:
        return _list((f"{prefix}{each.name}" for each in kind), 4)
    lines = []
    for each in kind:
        about = f" /* {ABOUT[kind][each]} */" if each in ABOUT[kind] else ""
        lines.append(f"    {prefix}{each.name} = {each.value},{about}")
    return "\n".join(lines)


# ---- Kotlin ---------------------------------------------------------------------------------------------------------

_KOTLIN_TYPES = {
    "uint32": "Int", "int32": "Int", "uint64": "Long", "int64": "Long", "seed": "Long", "double": "Double",
    "flag": "Boolean", "text": "String", "texts": "List<String>",
}  # fmt: skip
_KOTLIN_DEFAULTS = {"flag": " = false", "texts": " = emptyList()"}
_BUFFERS = {"Int": "Int", "Long": "Long", "Double": "Double", "Boolean": "Int", "String": "Long"}


def _kotlin(part: str) -> str:
    if part in _KINDS:
        return _kotlin_enum(_KINDS[part])
    if part == "Names":
        return "\n".join(f'    "{name}" to "{ours}",' for name, (ours, _, _) in NAMES.items())
    name = re.sub("(Bytes|Read|Builder)$", "", part)
    struct = [field for field in STRUCTS[name] if "kotlin" not in field.without]
    places, size = layout(STRUCTS[name], _LP64)
    if part == name:
        return "\n".join(
            line for field in struct for line in _kotlin_member(field, name in ("Options", "Hearing", "Readings"))
        )
    if part.endswith("Builder"):
        return "\n\n".join(_kotlin_setter(field) for field in struct)
    if part.endswith("Bytes"):
        puts = [put for field in struct for put in _kotlin_puts(field, places)]
        return "\n            ".join((f"        struct({size})", *puts, ".array()"))
    reads = "".join(f"            {camel(field.name)} = {_kotlin_read(field, places)},\n" for field in struct)
    return (
        f"    internal companion object {{\n        const val BYTES = {size}\n\n"
        f"        fun of(struct: ByteBuffer) = {name}(\n{reads}        )\n    }}"
    )


def _kotlin_member(field: Field, optional: bool) -> Iterator[str]:
    if about := _about(field, "Null"):
        yield _document(about, "    /** ", "     * ", " */")
    yield f"    public val {camel(field.name)}: {_kotlin_type(field, optional)},"


def _kotlin_type(field: Field, optional: bool, default: bool = True) -> str:
    if field.enum:
        own, least = field.enum.__name__, f" = {field.enum.__name__}.{field.enum(0).name}"
    else:
        own, least = _KOTLIN_TYPES[field.kind], _KOTLIN_DEFAULTS.get(field.kind, "? = null")
    return own + (least if default else "?" * least.startswith("?")) * optional


def _kotlin_setter(field: Field) -> str:
    name = camel(field.name)
    return (
        f"        public fun {name}({name}: {_kotlin_type(field, True, default=False)}): Builder = apply {{\n"
        f"            options = options.copy({name} = {name})\n        }}"
    )


def _kotlin_puts(field: Field, places: dict[str, int]) -> Iterator[str]:
    name, at = camel(field.name), places[field.name]
    if field.kind == "seed":
        yield f".putInt({places['seeded']}, if ({name} == null) 0 else 1)"
    if field.kind == "flag":
        yield f".putInt({at}, if ({name}) 1 else 0)"
    elif field.enum:
        yield f".putInt({at}, {name}.ordinal)"
    elif field.kind not in ("text", "texts"):  # which the library copies
        unset = f"{field.unset}.0" if field.kind == "double" else f"{field.unset}"
        yield f".put{_BUFFERS[_KOTLIN_TYPES[field.kind]]}({at}, {name} ?: {unset})"


def _kotlin_read(field: Field, places: dict[str, int]) -> str:
    value = f"struct.get{_BUFFERS[_KOTLIN_TYPES[field.kind]]}({places[field.name]})"
    if field.enum:
        return f"{field.enum.__name__}.entries[{value}]"
    return {"flag": f"{value} != 0", "text": f"Native.text({value}).decodeToString()"}.get(field.kind, value)


def _kotlin_enum(kind: type[IntEnum]) -> str:
    if kind is Role:
        return "\n".join(f"    /** {ABOUT[Role][each]} */\n    {each.name}({each.value})," for each in ROLES_OF_TEXT)
    if kind is Status:
        return "\n".join(f"    {each.name}({each.value})," for each in Status if each.value)
    return "\n".join(f"    {each.name}," for each in kind)


# ---- Swift ----------------------------------------------------------------------------------------------------------

_SWIFT_TYPES = {
    "uint32": "Int", "int32": "Int", "uint64": "UInt64", "int64": "Int64", "seed": "UInt64", "double": "Double",
    "flag": "Bool", "text": "String", "texts": "[String]",
}  # fmt: skip


def _swift(part: str) -> str:
    if part in _KINDS:
        return _swift_enum(_KINDS[part])
    if part == "Names":
        return "\n".join(f'    "{name}": "{ours}",' for name, (_, ours, _) in NAMES.items())
    name = re.sub("(Native|Read)$", "", part)
    struct = [field for field in STRUCTS[name] if "swift" not in field.without]
    if part == name:
        return "\n".join(
            line for field in struct for line in _swift_member(field, name in ("Options", "Hearing", "Readings"))
        )
    if part.endswith("Read"):
        return "\n".join(f"        {camel(field.name)} = {_swift_read(field)}" for field in struct)
    indent = " " * (12 if name == "Options" else 8)
    return "\n".join(f"{indent}{line}" for field in struct for line in _swift_sets(field))


def _swift_member(field: Field, optional: bool) -> Iterator[str]:
    if about := _about(field, "Nil"):
        yield _document(about, "    /// ", "    /// ")
    name, of_swift = camel(field.name), _SWIFT_TYPES[field.kind]
    if field.enum:
        own = field.enum.__name__
        yield (
            f"    public var {name}: {own} = .{camel(field.enum(0).name)}"
            if optional
            else f"    public let {name}: {own}"
        )
    elif not optional:
        yield f"    public let {name}: {of_swift}"
    elif field.kind == "flag":
        yield f"    public var {name} = false"
    else:
        yield f"    public var {name}: {of_swift}{' = []' if field.kind == 'texts' else '?'}"


def _swift_sets(field: Field) -> Iterator[str]:
    name = camel(field.name)
    if field.kind == "seed":
        yield f"native.seeded = {name} == nil ? 0 : 1"
    if field.kind == "flag":
        yield f"native.{field.name} = {name} ? 1 : 0"
    elif field.enum:
        yield f"native.{field.name} = {name}.rawValue"
    elif field.kind in ("uint32", "int32"):
        of_c = "UInt32" if field.kind == "uint32" else "Int32"
        yield f"native.{field.name} = {of_c}(clamping: {name} ?? {field.unset})"
    elif field.kind not in ("text", "texts"):  # whose memory has to be kept
        yield f"native.{field.name} = {name} ?? {field.unset}"


def _swift_read(field: Field) -> str:
    value = f"native.{field.name}"
    if field.enum:
        return f"{field.enum.__name__}(rawValue: {value}) ?? .{camel(field.enum(0).name)}"
    return {
        "uint32": f"Int({value})", "flag": f"{value} != 0", "text": f'{value}.map {{ String(cString: $0) }} ?? ""',
    }.get(field.kind, value)  # fmt: skip


def _swift_enum(kind: type[IntEnum]) -> str:
    if kind is Role:
        return "\n".join(
            f"    /// {ABOUT[Role][each]}\n    case {each.name.lower()} = {each.value}" for each in ROLES_OF_TEXT
        )
    if kind is Status:
        return "\n".join(f"        case {camel(each.name)} = {each.value}" for each in Status if each.value)
    return _list((camel(each.name) for each in kind), 4, "case ")


# ---- JavaScript -----------------------------------------------------------------------------------------------------

_VIEWS = {
    "uint32": "Uint32", "int32": "Int32", "uint64": "BigUint64", "double": "Float64", "flag": "Flag", "text": "Text",
    "seed": "BigUint64",
}  # fmt: skip
_SCRIPT_TYPES = {"flag": "boolean", "text": "string", "texts": "string[]", "seed": "number | bigint"}


def _script(part: str) -> str:
    if part in _KINDS:
        return _script_enum(_KINDS[part])
    if part == "Names":
        return "\n".join(f'  "{name}": "{ours}",' for name, (_, _, ours) in NAMES.items())
    places, _ = layout(STRUCTS[part], _WASM)
    entries = []
    for field in STRUCTS[part]:
        if field.kind == "seed":
            entries.append(f'["seeded", "Flag", {places["seeded"]}, 0]')
        given = part in ("Options", "Hearing")
        if field.kind != "texts" and "web" not in field.without and not (part == "Hearing" and field.kind == "text"):
            unset = f", {field.unset}" * given
            entries.append(f'["{camel(field.name)}", "{_VIEWS[field.kind]}", {places[field.name]}{unset}]')
    return _list(entries, 2) + ","


def _script_enum(kind: type[IntEnum]) -> str:
    if kind is Status:
        return _list((f"[{each.value}]: {_quoted(each)}" for each in Status if each.value), 2)
    if kind in (Role, Form):
        return _list((f"{camel(each.name)}: {each.value}" for each in kind), 2)
    return _list(map(_quoted, kind), 2)


def _programs(part: str) -> str:
    """Each struct's size in bytes, and its fields: name, type, offset, and number of values (of a text, of bytes)."""
    if part == "PASSES":
        return _list(map('"{}"'.format, gpu_programs.PASSES), 2)
    if part == "TOP":
        return f"export const TOP = {TOP}; // logits that are read where they are enough for a draw"
    if part == "STATE":
        return _list((f"{name}: {getattr(State, name)}" for name in gpu_programs.STATE), 2)
    lines = []
    for name, struct in gpu_programs.STRUCTS.items():
        entries = []
        for field, (kind, at, *_) in (struct.fields or {}).items():
            each, (count,) = kind.subdtype or (kind, (kind.itemsize if kind.kind == "S" else 1,))
            view = {"S": "Text", "u": {4: "Uint32", 8: "BigUint64"}.get(each.itemsize)}[each.kind]
            entries.append(f'["{field}", "{view}", {at}, {count}]')
        lines += [f"  {name}: [{struct.itemsize},", _list(entries, 4) + "],"]
    return "\n".join(lines)


def _types(part: str) -> str:
    if part in _KINDS:
        return "  finish: " + " | ".join(_quoted(each) for each in _KINDS[part] if each.value) + ";"
    lines = []
    for field in STRUCTS[part]:
        if not {"web", "types"} & {*field.without}:
            meanings = ", ".join(f"{each.value}: {each.name.lower()}" for each in field.enum or ())
            if about := " ".join(filter(None, (_about(field, "Default"), meanings and f"{meanings}."))):
                lines.append(_document(about, "  /** ", "   * ", " */"))
            mark = "?" * (part in ("Options", "Hearing"))
            lines.append(f"  {camel(field.name)}{mark}: {_SCRIPT_TYPES.get(field.kind, 'number')};")
    return "\n".join(lines)


# ---- all of them ----------------------------------------------------------------------------------------------------

FILES: dict[str, Callable[[str], str]] = {
    "runtime/edge.h": _c,
    "web/package/abi.js": _script,
    "web/package/programs.js": _programs,
    "web/package/index.d.ts": _types,
}
EXPORTED: dict[str, Callable[[str], str]] = {
    "kotlin/src/edge/runtime/EdgeException.kt": _kotlin,
    "kotlin/src/edge/runtime/EdgeOptions.kt": _kotlin,
    "swift/Sources/EdgeKit/EdgeOptions.swift": _swift,
}


def _about(field: Field, unset: str) -> str:
    """The description of a field. unset: the language's word for a field that is not given."""
    return " ".join(filter(None, (field.about, field.otherwise and f"{unset}: {field.otherwise}.")))


def _document(about: str, start: str, line: str, end: str = "") -> str:
    return textwrap.fill(about + end, _WIDTH, initial_indent=start, subsequent_indent=line)


def _list(members: Iterable[str], indent: int, before: str = "") -> str:
    """Members in lines of at most 120 characters, which break only between members."""
    margin, whole = " " * indent, (each.replace(" ", "\0") for each in members)
    filled = textwrap.fill(
        ", ".join(whole), _WIDTH - 1, initial_indent=margin + before, subsequent_indent=margin, break_on_hyphens=False
    )
    return filled.replace("\0", " ")


def _quoted(each: IntEnum) -> str:
    return f'"{each.name.lower().replace("_", "-")}"'


def camel(name: str) -> str:
    first, *others = name.lower().split("_")
    return first + "".join(map(str.capitalize, others))


if __name__ == "__main__":
    for each in FILES:
        (_HERE / each).write_text(generated(each), encoding="utf-8")
