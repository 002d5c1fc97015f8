"""`edge serve-site`: a site on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edge.cli import options as o
from edge.cli.terminal.show import print_json


@o.command
def serve_site(
    folder: Annotated[Path, typer.Argument(help="What edge export --device web made.", show_default=False)],
    host: Annotated[
        str, o.flag("--host", help="The address to listen at: 0.0.0.0 for other devices, which then need HTTPS.")
    ] = "127.0.0.1",
    port: Annotated[int, o.flag("--port", help="0: any that is free.")] = 8080,
    json: o.Json = False,
) -> None:
    """Serve the folder of edge export --device web, with the headers that give the page threads. Ctrl-C ends it."""
    from edge.apps.serve import serving

    with serving(folder, host, port) as server:
        name = f"[{host}]" if ":" in host else host
        address = f"http://{name}:{server.server_address[1]}/"
        if json:
            print_json({"url": address})
        else:
            print(f"{address}  (Ctrl-C ends it)", flush=True)
        server.serve_forever()
