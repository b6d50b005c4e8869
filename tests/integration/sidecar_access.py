#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Who may do what: every gRPC method with no token, a wrong one and one of each role; browser sessions; SIGHUP puts new
tokens and certificates in the place of the old ones, over gRPC and HTTP; no token is ever written to the log."""
import http.client
import ssl

from sidecar_common import *

MODULES = (runs, metrics, checkpoints, gate, rendezvous)
TOKENS = {"read": "looker-5b1c", "write": "trainer-77aa", "admin": "chief-0f0f"}
# What each method asks for; a method that is missing here fails the test.
ROLES = {
    "Runs": {"CreateRun": "write", "GetRun": "read", "ListRuns": "read", "UpdateRun": "write", "FinishRun": "write",
             "DeleteRun": "admin", "Heartbeat": "write", "WatchRun": "read", "GetLog": "read"},
    "Metrics": {"ReportEpoch": "write", "ReportSteps": "write", "QuerySeries": "read", "GetConfusion": "read"},
    "Checkpoints": {"PutCheckpoint": "write", "RegisterCheckpoint": "write", "ListCheckpoints": "read",
                    "GetCheckpoint": "read", "PullCheckpoint": "read", "WatchCheckpoints": "read",
                    "DeleteCheckpoint": "admin"},
    "Rendezvous": {"Set": "write", "Get": "write", "Add": "write"},
    "Gate": {"Compare": "read", "Evaluate": "read"},
}
ORDER = ["none", "read", "write", "admin"]


def methods():
    """(service, method, callable) of every method there is, called with one empty request."""
    for module in MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield service, method


def ask(d, service, method, token):
    """The status of a call with an empty request: what it says beyond access does not matter."""
    path = f"/{service.full_name}/{method.name}"
    serialize, deserialize = (lambda _: b""), (lambda data: data)
    metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
    channel = d.channel
    try:
        if method.client_streaming and method.server_streaming:
            list(channel.stream_stream(path, serialize, deserialize)(iter([None]), metadata=metadata, timeout=20))
        elif method.client_streaming:
            channel.stream_unary(path, serialize, deserialize)(iter([None]), metadata=metadata, timeout=20)
        elif method.server_streaming:
            list(channel.unary_stream(path, serialize, deserialize)(None, metadata=metadata, timeout=20))
        else:
            channel.unary_unary(path, serialize, deserialize)(None, metadata=metadata, timeout=20)
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()


def streaming_flags():
    """protobuf's Python descriptors of Debian's version do not tell which methods stream: the files do."""
    from google.protobuf import descriptor_pb2
    flags = {}
    for module in MODULES:
        proto = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(proto)
        for service in proto.service:
            for method in service.method:
                flags[f"{service.name}/{method.name}"] = (method.client_streaming, method.server_streaming)
    return flags


class Method:
    def __init__(self, name, flags):
        self.name, (self.client_streaming, self.server_streaming) = name, flags


def token_text(**tokens):
    return "".join(f"{role} {token}\n" for role, token in tokens.items())


def test_every_method():
    path = folder / "tokens.txt"
    path.write_text(token_text(**TOKENS))
    d = Daemon("roles", "--token-file", path).connect()
    flags = streaming_flags()
    seen = {}
    for service, method in methods():
        seen.setdefault(service.name, set()).add(method.name)
        needed = ROLES.get(service.name, {}).get(method.name)
        if not needed:
            check(f"{service.name}/{method.name} has no role in this test", False)
            continue
        call = Method(method.name, flags[f"{service.name}/{method.name}"])
        for token in (None, "", "wrong", TOKENS["read"][:-1], TOKENS["read"] + " "):
            code = ask(d, service, call, token)
            same(f"{service.name}/{method.name} with {token!r}", code, grpc.StatusCode.UNAUTHENTICATED)
        for role, token in TOKENS.items():
            code = ask(d, service, call, token)
            allowed = ORDER.index(role) >= ORDER.index(needed)
            refused = code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
            check(f"{service.name}/{method.name} as {role}: {code}",
                  not refused if allowed else code == grpc.StatusCode.PERMISSION_DENIED)
    same("methods in this test", {s: set(m) for s, m in ROLES.items()}, seen)
    same("exit status", d.stop(), 0)


def fetch(d, path, method="GET", context=None, **headers):
    if context:
        connection = http.client.HTTPSConnection("localhost", d.http_port, timeout=20, context=context)
    else:
        connection = http.client.HTTPConnection("127.0.0.1", d.http_port, timeout=20)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.getheader("Set-Cookie"), body


def hang_up(d, words):
    """SIGHUP, and what the log says about it."""
    d.process.send_signal(signal.SIGHUP)
    wait_for(f"the log to say {words!r}", lambda: words in d.log.read_text())


class Logged(Daemon):
    def __init__(self, name, *flags, **options):
        self.log = folder / f"{name}.log"
        saved = os.dup(2)
        with open(self.log, "wb") as file:
            os.dup2(file.fileno(), 2)
            try:
                super().__init__(name, "--log-level", "debug", *flags, **options)
            finally:
                os.dup2(saved, 2)
                os.close(saved)


def test_sessions_and_reload():
    path = folder / "reload.txt"
    path.write_text(token_text(**TOKENS))
    path.chmod(0o600)
    d = Logged("reload", "--token-file", path, http=True).connect()
    service = next(s for s, _ in methods() if s.name == "Runs")
    listing = Method("ListRuns", (False, False))
    same("no session", fetch(d, "/api/v1/runs")[0], 401)
    same("login with a wrong token", fetch(d, "/api/v1/session", "POST", Authorization="Bearer nope")[0], 401)
    status, cookie, body = fetch(d, "/api/v1/session", "POST", Authorization=f"Bearer {TOKENS['read']}")
    check(f"login: {status} {cookie} {body}", status == 200 and "HttpOnly" in cookie and b'"role":"read"' in body)
    check("the cookie does not hold the token", TOKENS["read"] not in cookie)
    session = cookie.split(";")[0]
    same("with a session", fetch(d, "/api/v1/runs", Cookie=session)[0], 200)
    same("a made-up session", fetch(d, "/api/v1/runs", Cookie=session[:-1] + "0" * (session[-1] != "0") or "1")[0], 401)

    path.write_text("read " + TOKENS["read"] + "\nthis is not a role\n")
    hang_up(d, "line 2")
    same("a bad file changes nothing", ask(d, service, listing, TOKENS["admin"]), grpc.StatusCode.OK)
    path.write_text(token_text(read="fresh-9d9d", admin=TOKENS["admin"]))
    hang_up(d, "were read again")
    same("the old token", ask(d, service, listing, TOKENS["read"]), grpc.StatusCode.UNAUTHENTICATED)
    same("its session", fetch(d, "/api/v1/runs", Cookie=session)[0], 401)
    same("the new token", ask(d, service, listing, "fresh-9d9d"), grpc.StatusCode.OK)
    same("the one that stayed", ask(d, service, listing, TOKENS["admin"]), grpc.StatusCode.OK)
    command = (pathlib.Path("/proc") / str(d.process.pid) / "cmdline").read_bytes()
    same("exit status", d.stop(), 0)
    log = d.log.read_text()
    for token in [*TOKENS.values(), "fresh-9d9d"]:
        check(f"{token} is in the log or on the command line", token not in log and token.encode() not in command)


def certificate(name):
    key, cert = folder / f"{name}.key", folder / f"{name}.pem"
    made = subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                           "-keyout", key, "-out", cert, "-days", "2", "-subj", f"/CN={name}",
                           "-addext", "subjectAltName=DNS:localhost"], capture_output=True)
    check("a certificate", made.returncode == 0)
    return key, cert


def over_https(d, cert):
    try:
        return fetch(d, "/healthz", context=ssl.create_default_context(cafile=cert))[0]
    except ssl.SSLError:
        return "refused"


def over_grpc(d, cert):
    d.connect(grpc.ssl_channel_credentials(cert.read_bytes()))
    try:
        d.runs.ListRuns(runs.ListRunsRequest(), timeout=5, wait_for_ready=False)
        return "ok"
    except grpc.RpcError as error:
        return error.code()
    finally:
        d.channel.close()


def test_new_certificate():
    key, cert = folder / "live.key", folder / "live.pem"
    first, second = certificate("first"), certificate("second")
    key.write_bytes(first[0].read_bytes())
    cert.write_bytes(first[1].read_bytes())
    d = Logged("tls", "--tls-cert", cert, "--tls-key", key, http=True)
    same("gRPC, the first", over_grpc(d, first[1]), "ok")
    same("HTTPS, the first", over_https(d, first[1]), 200)
    stays = grpc.secure_channel(f"localhost:{d.port}", grpc.ssl_channel_credentials(first[1].read_bytes()))
    listing = runs_grpc.RunsStub(stays).ListRuns
    listing(runs.ListRunsRequest(), timeout=20)

    cert.write_bytes(second[1].read_bytes())  # the key does not belong to it yet
    hang_up(d, "does not belong")
    same("gRPC, half way", over_grpc(d, first[1]), "ok")
    key.write_bytes(second[0].read_bytes())
    for round in range(3):  # more than once, with connections of before still there
        d.log.write_text("")
        hang_up(d, "were read again")
        same("gRPC, the second", over_grpc(d, second[1]), "ok")
        check("gRPC, no longer the first", over_grpc(d, first[1]) != "ok")
        same("HTTPS, the second", over_https(d, second[1]), 200)
        same("HTTPS, no longer the first", over_https(d, first[1]), "refused")
    listing(runs.ListRunsRequest(), timeout=20)  # the open connection went on
    stays.close()
    same("exit status", d.stop(), 0)


for test in (test_every_method, test_sessions_and_reload, test_new_certificate):
    print(test.__name__, flush=True)
    test()
finish()
