#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The HTTP face as it is reached from elsewhere: under a sub-path behind a real nginx, and over TLS with a certificate."""
import contextlib
import http.client
import json
import os
import pathlib
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.request

import nginx_world
from http_world import Sidecar, skip


def check(condition, *what):
    if not condition:
        raise AssertionError(what)


def answer(url, method="GET", body=None, context=None, **headers):
    request = urllib.request.Request(url, method=method, data=body, headers={k.replace("_", "-"): v for k, v in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=20, context=context) as response:
            return response.status, dict(response.headers), response.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def next_event(stream):
    event = {}
    while True:
        line = stream.readline().decode().rstrip("\n")
        if line == "" and "event" in event:
            if event["event"] == "run":
                return event
            event = {}
        elif ": " in line and not line.startswith(":"):
            key, value = line.split(": ", 1)
            event[key] = value


def sub_path():
    if not nginx_world.program():
        print("no nginx: the sub-path is not tested")
        return False
    with Sidecar(token="a-token-of-some-length") as sidecar, nginx_world.Nginx(sidecar.port) as nginx:
        token = {"Authorization": "Bearer a-token-of-some-length"}
        run = sidecar.create("behind", 1)
        data = os.urandom(300000)
        sha256 = sidecar.put(run.id, 1, data)
        status, headers, page = answer(nginx.url)
        check(status == 200 and b'src="app.js"' in page, "links are relative")
        check("default-src 'none'" in headers["Content-Security-Policy"], headers)
        check(answer(nginx.url + "app.js")[0] == 200)
        check(answer(nginx.url + "api/v1/runs")[0] == 401)
        status, headers, _ = answer(nginx.url + "api/v1/session", "POST", b"", **token)
        check(status == 200 and "Path" not in headers["Set-Cookie"], "the cookie holds for the folder, whatever it is called")
        cookie = headers["Set-Cookie"].split(";")[0]
        check(json.loads(answer(nginx.url + "api/v1/runs", Cookie=cookie)[2])["runs"][0]["name"] == "behind")
        check(answer(nginx.url + f"api/v1/checkpoints/{sha256}", Cookie=cookie, Range="bytes=1000-1999")[2] == data[1000:2000])
        # Changes: nginx hands on the name that the browser used, so our own page is known as such.
        origin = f"http://127.0.0.1:{nginx.port}"
        patch = dict(method="PATCH", body=b'{"notes": "through nginx"}', Content_Type="application/json", Cookie=cookie)
        check(answer(nginx.url + f"api/v1/runs/{run.id}", Origin=origin, **patch)[0] == 200)
        check(answer(nginx.url + f"api/v1/runs/{run.id}", Origin="http://evil.example", **patch)[0] == 403)
        # Events come as they happen, not when a buffer is full.
        request = urllib.request.Request(nginx.url + "api/v1/events", headers={"Cookie": cookie})
        with contextlib.closing(urllib.request.urlopen(request, timeout=30)) as stream:
            stream.readline()
            sidecar.epoch(run.id, 1, 0.5)
            kinds = [json.loads(next_event(stream)["data"])["kind"]]
            while "epoch" not in kinds:
                kinds.append(json.loads(next_event(stream)["data"])["kind"])
    return True


def over_tls():
    if not shutil.which("openssl"):
        print("no openssl program: TLS is not tested")
        return False
    with tempfile.TemporaryDirectory(prefix="paramsync-tls-") as folder:
        key, certificate = f"{folder}/key.pem", f"{folder}/cert.pem"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-keyout", key, "-out", certificate,
                        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"], check=True, capture_output=True)
        os.chmod(key, 0o600)
        trusting = ssl.create_default_context(cafile=certificate)

        class Secure(Sidecar):
            def request(self, method, path, headers=None, body=None):
                connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=trusting)
                with contextlib.closing(connection):
                    connection.request(method, path, body, headers or {})
                    response = connection.getresponse()
                    return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()

        with Secure("--tls-cert", certificate, "--tls-key", key, token="a-token-of-some-length") as sidecar:
            check(sidecar.get("/")[0] == 200)
            status, headers, _ = sidecar.request("POST", "/api/v1/session", {"Authorization": "Bearer a-token-of-some-length"})
            check(status == 200 and "Secure" in headers["set-cookie"] and "HttpOnly" in headers["set-cookie"], headers)
            cookie = headers["set-cookie"].split(";")[0]
            check(sidecar.get("/api/v1/runs", Cookie=cookie)[0] == 200)
            connection = http.client.HTTPSConnection("127.0.0.1", sidecar.port, timeout=20, context=trusting)
            with contextlib.closing(connection):
                connection.request("GET", "/api/v1/events", headers={"Cookie": cookie})
                check(connection.getresponse().readline() != b"", "an event stream greets")
            # Plain text is not answered, an unknown certificate not trusted, an old protocol not spoken.
            plain = http.client.HTTPConnection("127.0.0.1", sidecar.port, timeout=20)
            with contextlib.closing(plain):
                try:
                    plain.request("GET", "/readyz")
                    check(plain.getresponse().status != 200, "plain HTTP on a TLS port")
                except (http.client.HTTPException, OSError):
                    pass
            for context, why in [(ssl.create_default_context(), "unknown certificate"), (old_protocol(certificate), "TLS 1.1")]:
                try:
                    answer(f"https://127.0.0.1:{sidecar.port}/readyz", context=context)
                except (urllib.error.URLError, OSError):
                    continue
                raise AssertionError(why)
    return True


def old_protocol(certificate):
    context = ssl.create_default_context(cafile=certificate)
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    return context


if __name__ == "__main__":
    if "PS_BIN" not in os.environ:
        skip("PS_BIN is not set")
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    done = [sub_path(), over_tls()]
    if not any(done):
        skip("neither nginx nor openssl")
    print("a sub-path behind nginx, and TLS: as at home")
