"""Groups of options that only the command line has, beside `Options` and `SamplingParams`."""

from __future__ import annotations

from pathlib import Path

from edge.flags import OUTPUT, PROMPT, SAMPLING, option
from edge.records import dataclass

NOT_OF_RUN = ("sequences",)
"""Fields of `Options` that `edge run` lacks: it runs one sequence."""


@dataclass(frozen=True)
class PromptOptions:
    """Options of `edge run` alone."""

    prompt: str | None = option(
        None, "-p", "--prompt", group=PROMPT, twin=False, help="The same; piped text goes before it."
    )
    file: Path | None = option(
        None, "-f", "--file", group=PROMPT, twin=False, help="Read the prompt from a file; its text goes before -p."
    )  # fmt: skip
    prune: str | None = option(
        None, "--prune", group=PROMPT, twin=False, metavar="0.4|auto",
        help="Leave sentences out of the text before -p: keep at most this part of it, or (auto) what fits.",
    )  # fmt: skip
    image: list[str] | None = option(
        None, "--image", group=PROMPT, twin=False,
        help="A picture before the prompt, for models that see; may be repeated; - is stdin.",
    )  # fmt: skip
    audio: list[str] | None = option(
        None, "--audio", group=PROMPT, twin=False,
        help="A sound before the prompt, for models that hear: WAV, FLAC, OGG, MP3; may be repeated; - is stdin.",
    )  # fmt: skip
    json_schema: Path | None = option(
        None, "--json-schema", group=PROMPT, twin=False, help="Answer in JSON, by the JSON schema in this file."
    )
    grammar: Path | None = option(
        None,
        "--grammar",
        group=PROMPT,
        twin=False,
        help="Answer by the grammar in this file, in Lark's notation or GBNF.",
    )
    regex: str | None = option(
        None, "--regex", group=PROMPT, twin=False, help="Answer so that this matches all of it."
    )  # fmt: skip
    beams: int | None = option(
        None, "--beams", group=SAMPLING, twin=False,
        help="Search the likeliest answer with this many beams; it comes at once.",
    )  # fmt: skip
    vote: int | None = option(
        None, "--vote", group=SAMPLING, twin=False, metavar="N",
        help="Draw N short answers side by side, and give the one that most agree on.",
    )  # fmt: skip
    outline: bool = option(
        False, "--outline", group=PROMPT, twin=False,
        help="Where a question has independent points, write an outline, and then the points side by side.",
    )  # fmt: skip
    length_penalty: float = option(
        1.0, "--length-penalty", group=SAMPLING, twin=False,
        help="Of --beams: scores are divided by length to this power.",
    )  # fmt: skip


@dataclass(frozen=True)
class AnswerOptions:
    """Keywords of `Session.stream`; max_tokens: -1 has no limit."""

    max_tokens: int = option(512, "-n", "--max-tokens", group=PROMPT, help="Tokens to generate; -1 has no limit.")
    system: str | None = option(None, "--system", group=PROMPT, help="System prompt.")
    raw: bool = option(
        False, "--raw", group=PROMPT, twin=False,
        help="Continue the prompt as it is, without a chat template; control tokens in it are recognized.",
    )  # fmt: skip
    stop: list[str] | None = option(None, "--stop", group=PROMPT, help="Stop before this text; may be repeated.")
    ignore_eos: bool = option(False, "--ignore-eos", group=PROMPT, help="Never end the turn; go on.")
    think: str | None = option(
        None, "--think", group=PROMPT,
        help="Think before the answer: on, off, for at most 256 tokens or 5J, or low, medium, high (default: as the "
        "chat template has it).",
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Raises InputError."""
        if self.stop:
            from edge.run.arguments import check_stop  # here: few runs state one

            check_stop(self.stop)


@dataclass(frozen=True)
class Output:
    """Options of output."""

    json: bool = option(False, "--json", group=OUTPUT, help="Print JSON to stdout.")
    quiet: bool = option(False, "-q", "--quiet", group=OUTPUT, help="No progress and no report on stderr.")
    verbose: bool = option(
        False, "-v", "--verbose", group=OUTPUT, help="The whole report on stderr instead of a line."
    )  # fmt: skip
