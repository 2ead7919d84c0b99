"""The service under a path prefix, behind nginx with the configuration of `deploy/`."""

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ecinn.web.catalogue import Catalogue
from ecinn.web.settings import Settings
from helpers.paths import REPOSITORY
from helpers.server import ask, metric, running, wait_until

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/local/bin:/usr/bin")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="needs nginx: install Debian's nginx-light"),
]
SETTINGS = Settings(
    threads=1, join_seconds=0.001, hosts=("example.org",), trusted_proxies=("127.0.0.1",)
)


@pytest.fixture(scope="module")
def address(catalogue: Catalogue, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(catalogue, SETTINGS) as address:
        yield address


@pytest.fixture(scope="module")
def proxied(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the page's address behind nginx."""
    folder = tmp_path_factory.mktemp("nginx")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    site = (REPOSITORY / "deploy" / "nginx.conf").read_text()
    for pattern, ours in (
        (r"listen 443 ssl;", f"listen 127.0.0.1:{port};"),
        (r"ssl_certificate\w* .*;", ""),
        (r"http://127\.0\.0\.1:8000/", f"{address}/"),
    ):
        site, count = re.subn(pattern, ours, site)
        assert count
    process = start(folder, site)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: listening(url), 10)
        yield f"{url}/ecinn/"
    finally:
        process.terminate()
        process.wait(10)


def start(folder: Path, site: str) -> "subprocess.Popen[bytes]":
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    own = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    configuration = folder / "nginx.conf"
    configuration.write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log stderr;\n"
        f"events {{}}\nhttp {{ access_log off; {own}\n{site}\n}}\n"
    )
    assert NGINX is not None
    return subprocess.Popen([NGINX, "-e", "stderr", "-p", str(folder), "-c", str(configuration)])


def listening(url: str) -> bool:
    try:
        httpx.get(url)
    except httpx.TransportError:
        return False
    return True


def test_every_file_of_the_page_is_found_under_the_prefix(proxied: str) -> None:
    page = httpx.get(proxied)
    assert page.status_code == 200
    names = re.findall(r'(?:href|src)="([^"#]+)"', page.text)
    assert len(names) > 5
    seen = set()
    for name in names:
        url = httpx.URL(proxied).join(name)
        if url.host == "127.0.0.1":
            assert httpx.get(url).status_code == 200, name
            seen.add(name)
            if name.endswith(".js"):
                names += [
                    str(url.join(other))
                    for other in re.findall(r'from "([^"]+)"', httpx.get(url).text)
                    if str(url.join(other)) not in names
                ]
    assert len(seen) > 15
    assert httpx.get(proxied[:-1]).headers["location"].endswith("/ecinn/")
    documentation = httpx.get(f"{proxied}docs").text
    for name in re.findall(r'href="([^"]+)"', documentation):
        assert httpx.get(httpx.URL(f"{proxied}docs").join(name)).status_code == 200
    # No script asks for an address that starts at the root.
    for name in seen:
        if name.endswith(".js"):
            script = httpx.get(httpx.URL(proxied).join(name)).text
            assert not re.search(r"[\"'`]/(api|static)/", script)


def test_posts_come_from_the_pages_origin_and_from_clients(proxied: str, address: str) -> None:
    url = f"{proxied}api/v1/predict"
    origin = proxied.removesuffix("/ecinn/")
    assert httpx.post(url, json=ask(), headers={"Origin": origin}).status_code == 200
    given = {"Host": "example.org", "Origin": "https://example.org"}
    assert httpx.post(url, json=ask(), headers=given).status_code == 200
    other = {"Origin": "http://evil.example"}
    assert httpx.post(url, json=ask(), headers=other).status_code == 403
    assert httpx.get(proxied, headers={"Host": "evil.example"}).status_code == 400
    assert metric(address, 'ecinn_refused_total{reason="origin"}') == 1


@pytest.mark.browser
def test_the_page_works_under_the_prefix_in_a_browser(proxied: str, browser) -> None:
    failed: list[str] = []
    page = browser.new_page()
    page.on("response", lambda answer: answer.ok or failed.append(answer.url))
    page.goto(proxied)
    page.wait_for_selector("#stage[data-state=ready]")
    page.close()
    assert not failed
