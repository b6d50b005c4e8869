#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A foreign server (Python's grpcio) under our RPC client: answers that are no messages, that are compressed, too
large or missing, streams that end early, statuses with every kind of text."""
import os
import pathlib
import subprocess
import sys
from concurrent import futures

try:
    import grpc
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

program = pathlib.Path(os.environ["PS_BUILD"]) / "tests" / "rpc_probe_client"
tokens = set()


def field(number, data):
    """A length-delimited field on the wire."""
    size, length = len(data), b""
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def text_of(request):
    return request[2:].decode() if request[:1] == b"\x0a" else ""


def echo(request, context):
    tokens.add(dict(context.invocation_metadata()).get("authorization"))
    context.send_initial_metadata([("x-early", "yes")])
    context.set_trailing_metadata([("x-late", "yes")])
    match text_of(request):
        case "gzip":
            return field(3, b"a" * 200_000)
        case "empty":
            return b""
        case "not text":
            return field(1, b"\xff")
        case "garbage":
            return b"\x0a\x7f"
        case "oversize":
            return field(3, b"b" * (1 << 20))
        case "details":
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "größer")
        case "lines":
            context.abort(grpc.StatusCode.ABORTED, "one\ntwo")
        case "long details":
            context.abort(grpc.StatusCode.DATA_LOSS, "x" * 3000)
        case "raise":
            raise RuntimeError("as asked")
    return request


def count(request, context):
    match text_of(request):
        case "many":
            for i in range(5000):
                yield field(1, b"%d" % i)
        case "then fail":
            for i in range(100):
                yield b""
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "enough")
        case "fail at once":
            context.abort(grpc.StatusCode.NOT_FOUND, "nothing here")
        case "not text":
            yield field(4, field(1, b"\xc0\x80"))


def total(requests, context):
    next(requests)
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no more of this")


def chat(requests, context):
    yield next(requests)


def main():
    server = grpc.server(futures.ThreadPoolExecutor(4), compression=grpc.Compression.Gzip)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("paramsync.test.v1.Probe", {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Count": grpc.unary_stream_rpc_method_handler(count),
        "Sum": grpc.stream_unary_rpc_method_handler(total),
        "Chat": grpc.stream_stream_rpc_method_handler(chat),
    })])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    status = subprocess.run([program, f"127.0.0.1:{port}"], timeout=90).returncode
    server.stop(0)
    if tokens != {"Bearer secret"}:
        print(f"FAILED: the tokens were {tokens}")
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
