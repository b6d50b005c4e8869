#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A foreign client (Python's grpcio) against our RPC server: every kind of call, what a client may do wrong, health,
reflection. Messages are compiled from the .proto files here, and once more fetched through reflection."""
import importlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

try:
    import grpc
    from google.protobuf import descriptor_pb2, descriptor_pool
    try:
        from google.protobuf.message_factory import GetMessageClass as message_class
    except ImportError:
        from google.protobuf.message_factory import MessageFactory
        message_class = MessageFactory().GetPrototype
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

source = pathlib.Path(os.environ["PS_SOURCE"])
program = pathlib.Path(os.environ["PS_BUILD"]) / "tests" / "rpc_probe_server"
grpc_protos = pathlib.Path("/usr/share/grpc-proto")
PROBE = "/paramsync.test.v1.Probe/"
failures = []


def check(what, good):
    if not good:
        failures.append(what)
        print(f"FAILED: {what}")


def status(what, wanted, call, text=None):
    """call() must end with the wanted status, and details that hold text."""
    try:
        call()
        got, details = grpc.StatusCode.OK, ""
    except grpc.RpcError as error:
        got, details = error.code(), error.details()
    check(f"{what}: {got} {details!r}, wanted {wanted}", got == wanted and (text is None or text in details))


def compile_protos(folder):
    subprocess.run(["protoc", f"-I{source / 'tests/proto'}", f"-I{grpc_protos}", f"--python_out={folder}",
                    "paramsync/test/v1/probe.proto", "grpc/health/v1/health.proto",
                    "grpc/reflection/v1alpha/reflection.proto"], check=True)
    # The generated folders are called grpc and paramsync: load them as files, or they would hide the grpc module.
    modules = []
    for name in ("paramsync/test/v1/probe", "grpc/health/v1/health", "grpc/reflection/v1alpha/reflection"):
        spec = importlib.util.spec_from_file_location(name.replace("/", "_"), f"{folder}/{name}_pb2.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        modules.append(module)
    return modules


class Methods:
    def __init__(self, channel, note):
        own = dict(request_serializer=note.SerializeToString, response_deserializer=note.FromString)
        self.echo = channel.unary_unary(PROBE + "Echo", **own)
        self.sum = channel.stream_unary(PROBE + "Sum", **own)
        self.count = channel.unary_stream(PROBE + "Count", **own)
        self.chat = channel.stream_stream(PROBE + "Chat", **own)


def calls(channel, pb):
    Note = pb.Note
    do = Methods(channel, Note)
    answer = do.echo(Note(text="grüß", number=-5, data=b"\0\xff", inner=pb.Inner(label="x"), words=["a", "b"]), timeout=10)
    check("echo", answer.text == "grüß" and answer.number == -5 and answer.data == b"\0\xff" and list(answer.words) == ["a", "b"])
    check("sum", do.sum((Note(number=i) for i in range(1, 101)), timeout=10).number == 5050)
    check("empty sum", do.sum(iter(()), timeout=10).number == 0)
    check("count", [n.number for n in do.count(Note(number=50), timeout=10)] == list(range(1, 51)))
    check("chat", [n.text for n in do.chat((Note(text=f"m{i}") for i in range(20)), timeout=10)] == [f"m{i}" for i in range(20)])
    check("large", len(do.echo(Note(data=b"z" * 3_000_000), timeout=20).data) == 3_000_000)
    check("metadata", do.echo(Note(text="metadata", words=["x-who"]), metadata=[("x-who", "me")], timeout=10).text == "me")

    for code in grpc.StatusCode:
        if code is not grpc.StatusCode.OK:
            status(f"status {code}", code, lambda: do.echo(Note(text="fail", number=-code.value[0], words=["größer"]), timeout=10), "größer")
    seen = []
    def half():
        for note in do.count(Note(number=3, text="then fail"), timeout=10):
            seen.append(note.number)
    status("fail after messages", grpc.StatusCode.ABORTED, half, "after 3 messages")
    check("messages before the failure", seen == [1, 2, 3])

    _, call = do.echo.with_call(Note(text="trailer", words=["x-end", "yes"]), timeout=10)
    check("trailer", ("x-end", "yes") in [(k, v) for k, v in call.trailing_metadata()])
    check("gzip", len(do.echo(Note(data=b"a" * 200_000), compression=grpc.Compression.Gzip, timeout=10).data) == 200_000)
    # 100 MB of zeros in a few kB: what is unpacked counts against the limit.
    status("gzip bomb", grpc.StatusCode.RESOURCE_EXHAUSTED,
           lambda: do.echo(Note(data=bytes(100_000_000)), compression=grpc.Compression.Gzip, timeout=30))
    check("after the bomb", do.echo(Note(text="still here"), timeout=10).text == "still here")

    status("deadline", grpc.StatusCode.DEADLINE_EXCEEDED, lambda: do.echo(Note(text="wait"), timeout=0.2))
    running = do.chat(iter([Note(text="one"), Note(text="wait")]), timeout=30)
    check("before the cancel", next(running).text == "one")
    threading.Timer(0.1, running.cancel).start()
    status("cancel", grpc.StatusCode.CANCELLED, lambda: next(running))


def wrong_calls(channel):
    raw = dict(request_serializer=None, response_deserializer=None)
    start = time.monotonic()
    status("unknown method", grpc.StatusCode.UNIMPLEMENTED, lambda: channel.unary_unary(PROBE + "Nothing", **raw)(b"", timeout=30), "Nothing")
    status("unknown service", grpc.StatusCode.UNIMPLEMENTED, lambda: channel.unary_unary("/nobody/Nothing", **raw)(b"", timeout=30))
    status("no request", grpc.StatusCode.UNIMPLEMENTED, lambda: channel.stream_unary(PROBE + "Echo", **raw)(iter(()), timeout=30))
    status("no message", grpc.StatusCode.INTERNAL, lambda: channel.unary_unary(PROBE + "Echo", **raw)(b"\x0a\x05ab", timeout=30), "Note")
    status("no text", grpc.StatusCode.INVALID_ARGUMENT, lambda: channel.unary_unary(PROBE + "Echo", **raw)(b"\x0a\x01\xff", timeout=30), "text")
    status("a NUL", grpc.StatusCode.INVALID_ARGUMENT, lambda: channel.unary_unary(PROBE + "Echo", **raw)(b"\x0a\x01\0", timeout=30), "text")
    status("no text in a stream", grpc.StatusCode.INVALID_ARGUMENT, lambda: channel.stream_unary(PROBE + "Sum", **raw)(iter([b"\x22\x03\x0a\x01\xff"]), timeout=30), "inner.label")
    check("refusals come at once", time.monotonic() - start < 15)


def health(channel, pb, server):
    own = dict(request_serializer=pb.HealthCheckRequest.SerializeToString, response_deserializer=pb.HealthCheckResponse.FromString)
    one = channel.unary_unary("/grpc.health.v1.Health/Check", **own)
    watch = channel.unary_stream("/grpc.health.v1.Health/Watch", **own)
    for service in ("", "paramsync.test.v1.Probe"):
        check(f"health of {service!r}", one(pb.HealthCheckRequest(service=service), timeout=10).status == 1)
    status("health of nobody", grpc.StatusCode.NOT_FOUND, lambda: one(pb.HealthCheckRequest(service="nobody"), timeout=10))
    news = watch(pb.HealthCheckRequest(service="switched"), timeout=30)
    check("watch: unknown", next(news).status == 3)
    for byte, value in ((b"+", 1), (b"-", 2), (b"+", 1)):
        server.stdin.write(byte)
        server.stdin.flush()
        check(f"watch: {byte}", next(news).status == value)
    news.cancel()


def reflection(channel, pb):
    for version in ("v1", "v1alpha"):
        ask = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                                    request_serializer=pb.ServerReflectionRequest.SerializeToString,
                                    response_deserializer=pb.ServerReflectionResponse.FromString)
        Request = pb.ServerReflectionRequest
        requests = [Request(list_services=""), Request(host="h", file_containing_symbol="paramsync.test.v1.Probe"),
                    Request(file_by_filename="paramsync/test/v1/probe.proto"), Request(file_by_filename="no.proto"),
                    Request(file_containing_symbol="no.such.Thing"), Request(),
                    Request(all_extension_numbers_of_type="paramsync.test.v1.Note"),
                    Request(file_containing_symbol="paramsync.test.v1.Probe.Echo")]
        answers = list(ask(iter(requests), timeout=20))
        check(f"{version}: one answer per request", len(answers) == len(requests))
        check(f"{version}: services", [s.name for s in answers[0].list_services_response.service] ==
              ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", "paramsync.test.v1.Probe"])
        check(f"{version}: request and host come back", answers[1].valid_host == "h" and answers[1].original_request == requests[1])
        check(f"{version}: errors are answers", [a.error_response.error_code for a in answers[3:6]] == [5, 5, 3])
        check(f"{version}: no extensions", answers[6].all_extension_numbers_response.base_type_name == "paramsync.test.v1.Note")
        check(f"{version}: a method is a symbol", len(answers[7].file_descriptor_response.file_descriptor_proto) == 1)

        # The described service can be called with nothing but the description.
        pool = descriptor_pool.DescriptorPool()
        for data in reversed(answers[1].file_descriptor_response.file_descriptor_proto):
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data)) if hasattr(pool, "Add") else pool.AddSerializedFile(data)
        method = pool.FindServiceByName("paramsync.test.v1.Probe").FindMethodByName("Echo")
        Note = message_class(method.input_type)
        do = Methods(channel, Note)
        check(f"{version}: call by description", do.echo(Note(text="described"), timeout=10).text == "described")


def sources():
    """Rules that only the source text shows."""
    for path in sorted((source / "services/rpc").glob("*.[ch]")):
        text = path.read_text()
        # A completion queue is polled with next, never plucked.
        check(f"{path.name}: no pluck", "pluck" not in text)
        # Slices that are sent must be copies: the core keeps references to them.
        check(f"{path.name}: static slices are literals", not re.search(r"from_static_(buffer|string)\((?!\")", text))


def main():
    with tempfile.TemporaryDirectory() as folder:
        probe_pb, health_pb, reflection_pb = compile_protos(folder)
    server = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        port = int(server.stdout.readline())
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1)]) as channel:
            calls(channel, probe_pb)
            wrong_calls(channel)
            health(channel, health_pb, server)
            reflection(channel, reflection_pb)
            # The server goes: a call that waits learns of it, and the program ends well.
            waiting = Methods(channel, probe_pb.Note).echo.future(probe_pb.Note(text="wait"), timeout=30)
            time.sleep(0.2)
            server.stdin.close()
            status("drain", grpc.StatusCode.UNAVAILABLE, waiting.result)
            check("exit status", server.wait(timeout=20) == 0)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    sources()
    print(f"{len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
