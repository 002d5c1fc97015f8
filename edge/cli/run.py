"""`edge run`: one prompt, one answer, inside the budget."""

from __future__ import annotations

from typing import Annotated

import typer

from edge.cli import options as o
from edge.cli.answering import answer_prompt
from edge.cli.groups import NOT_OF_RUN, Output, PromptOptions
from edge.options import Options


@o.command
def run(
    model: o.ModelArgument,
    text: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="The prompt (default: stdin); - is stdin.")
    ] = None,
    *,
    question: PromptOptions,
    answer: o.AnswerOptions,
    options: Annotated[Options, o.without(*NOT_OF_RUN)],
    sampling: o.Sampling,
    output: Output,
) -> None:
    """Answer one prompt. Text goes to stdout as it is generated; progress and the report go to stderr.

    \b
      edge run smollm2-135m "Why is the sky blue?" --memory 256MiB
      git diff | edge run smollm2-135m -p "Describe this change." -n 100
      edge run model.gguf -f letter.txt --energy 30J --time 1m --json
      edge run smollm2-135m "Describe a person." --json-schema person.json

    Options can be set in the environment, too: edge help environment.
    """
    answer_prompt(model, text, question, answer, options, sampling, output)
