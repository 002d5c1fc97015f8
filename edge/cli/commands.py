"""All commands of `edge` in one application: for the reference in docs/cli.md, and for tests."""

from __future__ import annotations

from edge.cli.application import application

app = application()
