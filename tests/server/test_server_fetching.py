"""`edge serve --fetch-images`: which addresses are fetched, and in what bounds."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address, ip_network
from typing import Any

import pytest
from conftest import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from serving import error_of, served

from edge.server import fetching
from edge.server.fetching import Address, Fetcher, is_public
from edge.server.refusal import RefusedError

PIL = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
NOT_PUBLIC = [  # of IANA's registries of special addresses
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.2.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4",
    "240.0.0.0/4", "::/128", "::1/128", "64:ff9b:1::/48", "100::/64", "2001:db8::/32", "fc00::/7",
    "fe80::/10", "ff00::/8",
]  # fmt: skip
WITHIN = {  # IPv6 addresses that stand for an IPv4 address
    "mapped": lambda four: (0xFFFF << 32) | four,
    "compatible": lambda four: four,
    "6to4": lambda four: (0x2002 << 112) | four << 80 | 1,
    "NAT64": lambda four: (0x64FF9B << 96) | four,
}


def png() -> bytes:
    stream = BytesIO()
    PIL.new("RGB", (44, 30), "red").save(stream, "PNG")
    return stream.getvalue()


class Pictures(BaseHTTPRequestHandler):
    """What a path says: picture, large, slow, drip, to/ADDRESS (a redirect), short (less than it promises)."""

    def do_GET(self) -> None:
        what, _, rest = self.path[1:].partition("/")
        if what == "to":
            self.send_response(302)
            self.send_header("Location", rest)
            self.end_headers()
        elif what == "drip":
            self.wfile.write(b"HTTP/1.1 200 OK\r\nA: ")
            for _ in range(4000):
                time.sleep(0.05)
                self.wfile.write(b"b")
        elif what in ("picture", "large", "short"):
            data = {"picture": png(), "large": bytes(3 << 20), "short": b"abc"}[what]
            self.send_response(200)
            self.send_header("Content-Length", str(len(data) + (what == "short")))
            self.end_headers()
            self.wfile.write(data)
        else:
            self.send_error(404)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # connections that are cut off
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def local(address: Address) -> bool:
    return str(address) == "127.0.0.1"


def fetched(url: str, *, seconds: float = 60.0, most: int = 1 << 20, allowed: Any = local) -> bytes:
    part = {"type": "image_url", "image_url": {"url": url}}
    claimed = list[int]()
    Fetcher(most, seconds, allowed).fill([part], claimed.append)
    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])  # type: ignore[index]
    assert sum(claimed) == len(data)
    return data


@given(st.data())
def test_no_special_address_is_public(data: st.DataObject) -> None:
    network = ip_network(data.draw(st.sampled_from(NOT_PUBLIC)))
    found = network[data.draw(st.integers(0, network.num_addresses - 1))]
    assert not is_public(found)
    if isinstance(found, IPv4Address):
        for form in WITHIN.values():
            assert not is_public(IPv6Address(form(int(found))))


def test_public_addresses_may_be_fetched() -> None:
    for each in ("1.1.1.1", "93.184.215.14", "2606:4700::1111"):
        assert is_public(ip_address(each))


@given(st.sampled_from([each for each in NOT_PUBLIC if "." in each]), st.integers(0), st.integers(0, 4), st.booleans())
def test_spellings_of_an_address_are_judged_by_where_they_lead(block: str, index: int, form: int, tls: bool) -> None:
    network = IPv4Network(block)
    four = network[index % network.num_addresses]
    first, *rest = four.packed
    host = [
        str(four), str(int(four)), hex(int(four)), f"{first:#o}.{int.from_bytes(bytes(rest), 'big')}",
        f"[::ffff:{four}]",
    ][form].replace("0o", "0")  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", None)  # nothing may connect
        with pytest.raises(RefusedError) as refused:
            fetched(f"http{'s' * tls}://{host}/a.png", allowed=is_public)
    assert refused.value.status == 400
    assert "not in the public internet" in refused.value.message or "unknown" in refused.value.message


def test_a_name_is_resolved_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attacker's name server may say something else the second time."""
    asked, real = list[str](), socket.getaddrinfo

    def resolve(host: Any, *others: Any, **more: Any) -> Any:
        if host != "pictures.example":
            return real(host, *others, **more)
        asked.append(host)
        return real("127.0.0.1" if len(asked) == 1 else "127.0.0.2", *others, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert fetched(url.replace("127.0.0.1", "pictures.example") + "/picture") == png()
    assert asked == ["pictures.example"]


def test_redirects_are_judged_anew(url: str) -> None:
    assert fetched(f"{url}/to/{url}/to/{url}/picture") == png()
    assert fetched(f"{url}/to//picture") == png()  # to the same host
    refused = {
        f"{url}/to/http://127.0.0.2/a.png": "not in the public internet",
        f"{url}/to/file:///etc/passwd": "must be a http or https address",
        "http://[": "must be a http or https address",
        f"{url}/to/" * 5 + f"{url}/picture": "redirects more than 3 times",
    }
    for each, why in refused.items():
        with pytest.raises(RefusedError, match=why):
            fetched(each)


@pytest.mark.parametrize(("path", "why"), [
    ("/nothing", "status 404"), ("/large", "more than 1048576 bytes"), ("/drip", "took too long"),
    ("/short", "failed|broke off"),
])  # fmt: skip
def test_slow_large_and_broken_pictures_are_refused(path: str, why: str, url: str) -> None:
    started = time.monotonic()
    with pytest.raises(RefusedError, match=why):
        fetched(url + path, seconds=0.5 if path == "/drip" else 60)
    assert time.monotonic() - started < 100  # the drip goes on for 200 s


def test_request_on_a_connection_that_was_cut_off_took_too_long(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    get = fetching._Pinned.get
    monkeypatch.setattr(fetching._Pinned, "get", lambda pinned, parts: (pinned._timer.join(), get(pinned, parts))[1])
    with pytest.raises(RefusedError, match="took too long"):
        fetched(f"{url}/picture", seconds=0.2)


def test_fetched_pictures_cost_the_tokens_of_sent_ones(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "Fetcher", partial(Fetcher, allowed=local))
    options = {"mmproj": GOLDEN / "eyes" / "mmproj.gguf", "kv_dtype": "f32"}
    data = base64.b64encode(png()).decode()
    parts = {
        "/v1/chat/completions": lambda address: {"type": "image_url", "image_url": {"url": address}},
        "/v1/responses": lambda address: {"type": "input_image", "image_url": address},
        "/v1/messages": lambda address: {"type": "image", "source": {"type": "url", "url": address}},
    }
    with served(str(GOLDEN / "eyes" / "smolvlm.gguf"), options=options, fetch_images=True) as client:
        for path, part in parts.items():
            name = "input" if path == "/v1/responses" else "messages"
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            used = list[Any]()
            for address in (f"{url}/picture", f"data:image/png;base64,{data}"):
                shown = part(address)
                if address[:4] == "data" and path == "/v1/messages":
                    shown = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
                response = client.post(path, json={name: [{"role": "user", "content": [shown]}], limit: 1})
                assert response.status_code == 200, response.text
                used.append(response.json()["usage"].get("prompt_tokens", response.json()["usage"].get("input_tokens")))
            assert used[0] is not None
        body = {"messages": [{"role": "user", "content": [parts["/v1/chat/completions"](f"{url}/nothing")]}]}
        response = client.post("/v1/chat/completions", json=body)
        assert (response.status_code, error_of(response)["code"]) == (400, "image_not_fetched")
        body["messages"][0]["content"] = [parts["/v1/chat/completions"]("http://169.254.169.254/latest/meta-data")]
        assert "not in the public internet" in error_of(client.post("/v1/chat/completions", json=body))["message"]
