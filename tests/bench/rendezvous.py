# SPDX-License-Identifier: Apache-2.0
"""How long 1,000 ranks take to find each other through the sidecar: every rank is a client that makes the calls of
trainer/meet_sidecar.c. They are simulated in one process, over CONNECTIONS connections: with one each, Python's making of them
is most of what is measured. Prints seconds, and the calls a second beside
those of one client that calls Get on a key that is there.

    PS_BIN=build/default/bin PS_SOURCE=. PS_BUILD=build/default /usr/bin/python3 tests/bench/rendezvous.py [RANKS [CONNECTIONS]]"""
import asyncio
import pathlib
import secrets
import sys
import time

import grpc.aio

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "integration"))
numbers = [int(a) for a in sys.argv[1:]]
ranks, connections = (numbers + [1000, 100][len(numbers):])[:2]
sys.argv = sys.argv[:1]
from sidecar_common import *

d = Daemon("meet").connect()
pb = rendezvous


channels = {}


def stub(n):
    n %= connections
    if n in channels:
        return channels[n]
    # Channels of one process with the same arguments would share a connection.
    channel = grpc.aio.insecure_channel(d.address, options=[("grpc.use_local_subchannel_pool", 1), ("rank", n)])
    channels[n] = channel, rendezvous_grpc.RendezvousStub(channel)
    return channels[n]


async def other(n):
    channel, s = stub(n)
    nonce = secrets.token_hex(16)
    await s.Set(pb.SetRequest(run="big", key=f"hello/{n}", value=nonce.encode()), timeout=60)
    address = (await s.Get(pb.GetRequest(run="big", key=f"answer/{n}/{nonce}"), timeout=60)).value
    await s.Set(pb.SetRequest(run="big", key=f"taken/{n}/{nonce}/zero", value=b"1"), timeout=60)
    return address


async def zero():
    channel, s = stub(0)
    for n in range(1, ranks):
        nonce = (await s.Get(pb.GetRequest(run="big", key=f"hello/{n}"), timeout=60)).value.decode()
        await s.Set(pb.SetRequest(run="big", key=f"answer/{n}/{nonce}", value=b"5000 secret zero 127.0.0.1"), timeout=60)
        await s.Get(pb.GetRequest(run="big", key=f"taken/{n}/{nonce}/zero"), timeout=60)


async def main():
    begin = time.monotonic()
    answers = await asyncio.gather(zero(), *(other(n) for n in range(1, ranks)))
    took = time.monotonic() - begin
    assert all(a == answers[1] for a in answers[1:])
    channel, s = stub(0)
    await s.Set(pb.SetRequest(run="one", key="k", value=b"v"))
    begin = time.monotonic()
    for _ in range(1000):
        await s.Get(pb.GetRequest(run="one", key="k"))
    alone = 1000 / (time.monotonic() - begin)
    calls = 6 * (ranks - 1)
    print(f"{ranks} ranks over {connections} connections met in {took:.2f} s: {calls / took:.0f} calls/s, one client alone {alone:.0f} calls/s, ratio {calls / took / alone:.2f}")


async def all_of_it():
    await main()
    for channel, _ in channels.values():
        await channel.close()


asyncio.run(all_of_it())
d.stop()
