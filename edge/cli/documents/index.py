"""`edge index`: indexes of the user's own documents."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.terminal.show import note, print_json, printable, progress, table
from edge.errors import several
from edge.options import Options


@o.command
def index(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The index (default: list all).")] = None,
    sources: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FILE|DIR", help="What to add to it; without any, its files are read again."),
    ] = None,
    encoder: Annotated[
        str | None, o.flag("--encoder", metavar="MODEL", help="The model that embeds passages (default: all-minilm).")
    ] = None,
    remove: Annotated[
        bool, o.flag("--remove", help="Take these files and folders out of the index; without any, delete it.")
    ] = False,
    json: o.Json = False,
    *,
    options: Annotated[Options, o.only("memory", "threads", "backend")],
    quiet: o.Quiet = False,
) -> None:
    """Make or update an index of your documents, of which edge ask and edge chat --documents answer questions.

    \b
      edge index manuals ~/manuals letter.pdf
      edge index manuals
      edge ask manuals "How is a disk encrypted?" --model smollm2-135m

    Text, Markdown, reStructuredText, HTML and PDF are read. Only files that have changed are read again; those that are
    gone leave. An interrupted run leaves a whole index, and the next one goes on.
    """
    from edge.documents.indexing import index as make
    from edge.documents.indexing import remove as take_out
    from edge.documents.nearest import EXTRA, lacks_extra
    from edge.errors import InputError

    if name is None:
        if encoder is not None or remove:
            raise InputError("name the index, before its options")
        _list(json=json)
        return
    if remove:
        files, passages = take_out(name, *(sources or ()))
        removed = [str(each) for each in sources or ()]
        if json:
            print_json({"name": name, "removed": removed or True, "files": files, "passages": passages})
        else:
            what = f"{', '.join(map(printable, removed))} removed" if removed else "deleted"
            print(f"{name}: {what}, with {several(files, 'file')} and {several(passages, 'passage')}")
        return
    try:
        with progress(enabled=not quiet) as shown:

            def tell(step: str, part: float, whole: float) -> None:
                if step.startswith("waiting") and not quiet:
                    note(f"({step})")
                shown.step(step)(part, whole)

            done = make(name, *(sources or ()), encoder=encoder, options=options, on_progress=tell)
    except KeyboardInterrupt:
        if not quiet:
            note(f"interrupted: edge index {printable(name)} goes on")
        raise
    if json:
        print_json(asdict(done))
        return
    for path, reason in done.unread:
        note(f"not read: {printable(path)}: {printable(reason)}")
    changes = [f"{count} {what}" for count, what in
               ((done.added, "new"), (done.changed, "changed"), (done.removed, "gone")) if count]  # fmt: skip
    print(
        f"{name}: {several(done.files, 'file')} ({', '.join(changes) or 'unchanged'}), "
        f"{several(done.passages, 'passage')}, "
        f"{done.embedded:,} embedded by {done.encoder} in {done.seconds:.1f} s, {format_bytes(done.bytes)}"
    )
    if not done.passages:
        from edge.documents.reading import READERS

        why = "its files have no text" if done.files else f"no file there ends in {' '.join(sorted(READERS))}"
        note(f"({printable(name)} has nothing to answer by, {why}: edge index {printable(name)} FILE|DIR adds some)")
    if lacks_extra(done.passages):
        note(f"(so many vectors are compared one by one: pip install 'edge-runtime[{EXTRA}]', and run this again)")
    if not quiet:
        plan = "" if done.planned is None else f", of {format_bytes(done.planned)} planned for the encoder"
        note(f"(peak {format_bytes(done.peak)}{plan})")


def _list(*, json: bool) -> None:
    from edge.documents.store import Store, index_names, indexes_folder
    from edge.errors import EdgeError

    found, names = [], index_names()
    for name in names:
        try:
            with Store(name) as store:
                files, passages, waiting = store.counts()
                size = store.path.stat().st_size
                found.append({
                    "name": name, "files": files, "passages": passages, "without_vector": waiting,
                    "encoder": store.encoder, "bytes": size, "sources": store.sources,
                })  # fmt: skip
        except EdgeError as error:  # the others are listed all the same
            note(f"edge: {printable(str(error))}")
    if json:
        print_json(found)
    elif not names:
        print(f"{indexes_folder()}: no index yet: edge index NAME DIR makes one")
    elif found:
        rows = [[str(each["name"]), f"{each['files']:,}", f"{each['passages']:,}", str(each["encoder"]),
                 format_bytes(int(str(each["bytes"])))] for each in found]  # fmt: skip
        print(table(["index", "files", "passages", "encoder", "size"], rows))
        for each in found:
            if each["without_vector"]:
                note(waiting_line(str(each["name"]), int(str(each["without_vector"]))))


def waiting_line(name: str, waiting: int) -> str:
    """What an index lacks that was interrupted."""
    return f"(not embedded yet: {several(waiting, 'passage')} of {name}: edge index {name} goes on)"
