#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The HTTP face of a real paramsyncd, filled over gRPC: figures, ranges, hostile addresses, Host check, event streams
over a restart, login, and that every route and field is described in web/openapi.yaml."""
import contextlib
import http.client
import json
import math
import os
import pathlib
import re
import tempfile

from http_world import Sidecar, skip


def check(condition, *what):
    if not condition:
        raise AssertionError(what)


def figures(sidecar):
    one = sidecar.create("single", 1, model="resnet18", dataset="generated", dataset_hash="d1", epochs_planned=5, batch_per_rank=128,
                         config={"lr": 0.01, "world_size": 1})
    two = sidecar.create("dp/2 \"<b>\"", 2, model="resnet18", dataset="generated", dataset_hash="d1", epochs_planned=5, batch_per_rank=128,
                         config={"lr": 0.02, "world_size": 2})
    for e, accuracy in enumerate([0.4, 0.6, 0.75, 0.8, 0.82], 1):
        sidecar.epoch(one.id, e, accuracy, seconds=20, rate=1000, val_loss=math.nan if e == 2 else 0.5)
        sidecar.epoch(two.id, e, accuracy - 0.01, seconds=11, rate=1900)
    sidecar.steps(one.id, [("loss", i, math.inf if i == 7 else 1 / (i + 1), i * 0.01) for i in range(5000)])
    sidecar.finish(one.id, elapsed=101)

    runs = sidecar.json("/api/v1/runs")["runs"]
    check([r["name"] for r in runs] == ["dp/2 \"<b>\"", "single"], runs)
    check(runs[1]["state"] == "finished" and runs[0]["state"] == "running", runs)
    check(runs[1]["time_to_target_s"] == 80.0, runs[1])
    check(runs[0]["time_to_target_s"] == 55.0, runs[0])
    page = sidecar.json("/api/v1/runs?limit=1")
    check(len(page["runs"]) == 1 and page["next_page"], page)
    rest = sidecar.json("/api/v1/runs?limit=1&page=" + page["next_page"])
    check(rest["runs"][0]["name"] == "single" and rest["next_page"] is None, rest)
    check(len(sidecar.json("/api/v1/runs?q=SING")["runs"]) == 1)
    check(len(sidecar.json("/api/v1/runs?state=running,lost")["runs"]) == 1)

    series = sidecar.json(f"/api/v1/runs/{one.id}/series")
    check(series["epochs"]["val_loss"][1] == "NaN" and series["names"] == ["loss"], series)
    steps = sidecar.json(f"/api/v1/runs/single/series?name=loss&max_points=200")["series"][0]
    check(steps["total_points"] == 5000 and len(steps["steps"]) <= 200, len(steps["steps"]))
    check(steps["steps"][0] == 0 and steps["steps"][-1] == 4999, "first and last stay")
    check("Infinity" in steps["values"] and 1.0 in steps["values"], "the infinity and the maximum stay")

    rows = {r["name"]: r for r in sidecar.json(f"/api/v1/compare?runs={one.id},{two.id},sample-1&target=0.8")["rows"]}
    check(abs(rows["dp/2 \"<b>\""]["speedup"] - 1.9) < 1e-9 and abs(rows["dp/2 \"<b>\""]["efficiency"] - 0.95) < 1e-9, rows)
    check(abs(rows["dp/2 \"<b>\""]["time_speedup"] - 80 / 55) < 1e-9, rows)
    check(rows["single"]["total_s"] == 101.0, rows["single"])
    check(rows["sample-1"]["speedup"] is None and rows["sample-1"]["time_to_target_s"] is None, rows["sample-1"])
    other = sidecar.create("other", 2, model="resnet18", dataset="generated", dataset_hash="d2")
    refused = sidecar.json(f"/api/v1/compare?runs={one.id},{other.id}")["rows"][1]
    check(refused["refusal"] and refused["speedup"] is None, refused)
    return one


def downloads(sidecar, run):
    data = bytes(range(256)) * 1200
    sha256 = sidecar.put(run.id, 5, data, filename="epoch_5.safetensors")
    path = f"/api/v1/checkpoints/{sha256}"
    status, headers, body = sidecar.get(path)
    check(status == 200 and body == data, status, len(body))
    check(headers["etag"] == f'"{sha256}"' and headers["content-disposition"] == 'attachment; filename="epoch_5.safetensors"', headers)
    half = sidecar.get(path, Range=f"bytes=0-{len(data) // 2 - 1}")[2]
    rest_status, rest_headers, rest = sidecar.get(path, Range=f"bytes={len(half)}-")
    check(rest_status == 206 and half + rest == data, "a resumed download is the file")
    check(rest_headers["content-range"] == f"bytes {len(half)}-{len(data) - 1}/{len(data)}", rest_headers)
    check(sidecar.get(path, Range="bytes=-10")[2] == data[-10:])
    status, headers, _ = sidecar.get(path, Range=f"bytes={len(data)}-")
    check(status == 416 and headers["content-range"] == f"bytes */{len(data)}", status, headers)
    listed = sidecar.json(f"/api/v1/runs/{run.id}/checkpoints")["checkpoints"]
    check(listed[0]["sha256"] == sha256 and listed[0]["best"] is True, listed)


def hostile(sidecar):
    for path in ["/..%2f..%2fetc%2fpasswd", "/api/v1/runs/..%2f..%2fparamsync.db", "/api/v1/runs/%2e%2e", "/api/v1/runs/a%00b",
                 "/api/v1/checkpoints/..%2f..%2fparamsync.db", "/api/v1/checkpoints/" + "g" * 64, "/paramsync.db", "/.git/config",
                 "/api/v1/runs/%F0%28%8C%28", "/api/v1/runs/' OR 1=1 --".replace(" ", "%20")]:
        status, headers, body = sidecar.get(path)
        check(status == 404, path, status, body)
        check(json.loads(body)["error"]["code"] == "NOT_FOUND", path, body)
        check("default-src 'none'" in headers["content-security-policy"], headers)
    for host, wanted in [("evil.example", 403), (f"evil.example:{sidecar.port}", 403), ("localhost", 200), (f"127.0.0.1:{sidecar.port}", 200),
                         ("[::1]", 200), ("allowed.example", 200)]:
        status, _, body = sidecar.get("/api/v1/runs", Host=host)
        check(status == wanted, host, status, body)
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"]:
        status, headers, _ = sidecar.request(method, "/api/v1/runs", {"Content-Length": "0"})
        check(status == 405 and headers["allow"] == "GET, HEAD", method, status)
        check("access-control-allow-origin" not in headers, headers)
    check(sidecar.get("/" + "a" * 5000)[0] == 414)


def step_times(sidecar, run, world, late=None, steps=300, extra=0.03):
    """Step times of a run whose ranks wait for the late one from the middle on."""
    for rank in range(world):
        points = []
        for i in range(1, steps + 1):
            slow = extra if late is not None and i > steps // 2 else 0
            mine = slow if rank == late else 0
            points += [("compute_s", i, 0.1 + mine, i * 0.1), ("allreduce_wait_s", i, 0.01 + slow - mine, i * 0.1), ("input_wait_s", i, 0.002, i * 0.1)]
        points += [("evaluation_s", steps, 1.5, steps * 0.1)] + ([("checkpoint_s", steps, 0.6, steps * 0.1)] if rank == 0 else [])
        sidecar.steps(run.id, points, rank=rank)


def ranks(sidecar):
    run = sidecar.create("sixteen", 16)
    empty = sidecar.json(f"/api/v1/runs/{run.id}/ranks?bins=10")
    check(empty["verdict"]["state"] == "abstain" and empty["verdict"]["reason"] == "few_steps" and empty["heat"] == [], empty)
    step_times(sidecar, run, 16, late=5)
    got = sidecar.json(f"/api/v1/runs/{run.id}/ranks?bins=10")
    check(got["verdict"]["state"] == "critical" and [one["rank"] for one in got["verdict"]["late"]] == [5], got["verdict"])
    check(got["verdict"]["late"][0]["cause"] == "compute" and abs(got["verdict"]["late"][0]["lateness"] - 0.03 / 0.142) < 1e-6, got["verdict"])
    check((got["verdict"]["from_step"], got["verdict"]["to_step"]) == (101, 300), got["verdict"])
    check(got["bin_steps"] == [1, 31, 61, 91, 121, 151, 181, 211, 241, 271], got["bin_steps"])
    check(len(got["heat"]) == 16 and got["heat"][5]["compute_s"] == [0.1] * 5 + [0.13] * 5, got["heat"][5])
    check(abs(got["split"][0]["checkpoint_s"] - 0.002) < 1e-12 and got["split"][1]["checkpoint_s"] == 0, got["split"])
    check(abs(got["split"][3]["evaluation_s"] - 0.005) < 1e-12, got["split"])
    before = sidecar.json(f"/api/v1/runs/{run.id}/ranks?bins=10&to=150")
    check(before["verdict"]["state"] == "even", before["verdict"])
    check(sidecar.get(f"/api/v1/runs/{run.id}/ranks?bins=1001")[0] == 400)
    check(sidecar.get("/api/v1/runs/nobody/ranks?bins=5")[0] == 404)


def tables(sidecar):
    """The server sorts, filters, searches and judges a list of runs; what it does not know is refused."""
    names = lambda tail: [r["name"] for r in sidecar.json("/api/v1/runs?" + tail)["runs"]]  # noqa: E731
    for i, accuracy in enumerate([0.5, math.nan, 0.9]):
        run = sidecar.create(f"table-{i}", i + 1, tags=["Sorted"] if i == 2 else [], model="resnet18", dataset_hash="t")
        sidecar.epoch(run.id, 1, accuracy, rate=100.0 + i)
        sidecar.finish(run.id, elapsed=10 + i)
    check(names("q=table-&sort=accuracy") == ["table-0", "table-2", "table-1"], names("q=table-&sort=accuracy"))
    check(names("q=table-&sort=-accuracy") == ["table-2", "table-0", "table-1"], "NaN last either way")
    check(names("q=table-&sort=-name&offset=1&limit=1") == ["table-1"], "window")
    check(sidecar.json("/api/v1/runs?q=table-&offset=1&limit=1")["total"] == 3, "total")
    check(names("q=sorted&sort=name") == ["table-2"], "a tag is searched")
    check(names("tag=Sorted&sort=name") == ["table-2"], "tag")
    for bad in ["sort=bogus", "sort=--name", "sort=-", "offset=-1", "offset=x", "sort=name&page=1", "limit=0", "verdict=2", "state=flying"]:
        check(sidecar.get("/api/v1/runs?" + bad)[0] == 400, bad)


def edits(sidecar):
    """Tags, notes, the pin and deleting: from our own pages only, whole or not at all."""
    def send(method, run, body=None, status=200, **headers):
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", "Content-Length": str(len(data)), **{k.replace("_", "-"): v for k, v in headers.items()}}
        got, _, answer = sidecar.request(method, f"/api/v1/runs/{run}", {k: v for k, v in given.items() if v}, data)
        check(got == status, method, run, body, headers, got, answer)
        return json.loads(answer)

    one = sidecar.create("edited", 1, model="resnet18", dataset="d", dataset_hash="e")
    two = sidecar.create("edited-too", 2, model="resnet18", dataset="d", dataset_hash="e")
    for run, rate, seconds in [(one, 100, 20), (two, 190, 11)]:
        for e in range(1, 4):
            sidecar.epoch(run.id, e, 0.3 * e, rate=rate, seconds=seconds)
    send("DELETE", one.id, status=409)  # alive
    for run in (one, two):
        sidecar.finish(run.id, elapsed=61)
    changed = send("PATCH", one.id, {"notes": "“quoted”\n<b>", "tags": ["a", "b c"]})
    check(changed["notes"] == "“quoted”\n<b>" and changed["tags"] == ["a", "b c"], changed)
    check(send("PATCH", one.id, {"tags": []})["notes"] == "“quoted”\n<b>", "notes stay where they are not named")
    for bad in [b"", b"[]", b"{", b'{"notes": 3}', b'{"tags": "a"}', b'{"tags": [""]}', b'{"tags": [1]}', b'{"name": "x"}', b'{"baseline": 1}',
                b'{"notes": "a", "notes": "b"}', b'{"notes": "' + b"x" * 70000 + b'"}', b'{"notes": "\xff"}']:
        send("PATCH", one.id, bad, status=400)
    check(sidecar.json(f"/api/v1/runs/{one.id}")["notes"].startswith("“quoted”"), "nothing was changed")
    here = f"127.0.0.1:{sidecar.port}"
    send("PATCH", one.id, {"notes": "x"}, 403, Origin="http://evil.example")
    send("PATCH", one.id, {"notes": "x"}, 403, Origin="null")
    send("PATCH", one.id, {"notes": "x"}, 403, Sec_Fetch_Site="cross-site", Origin=f"http://{here}")
    send("PATCH", one.id, {"notes": "x"}, 403, Sec_Fetch_Site="same-site")
    send("PATCH", one.id, {"notes": "x"}, 403, Host="evil.example")
    send("PATCH", one.id, {"notes": "x"}, 415, Content_Type="text/plain")
    send("DELETE", one.id, status=403, Origin="http://evil.example")
    send("PATCH", one.id, {"notes": "ours"}, Origin=f"http://{here}")
    send("PATCH", one.id, {"notes": "ours too"}, Sec_Fetch_Site="same-origin")
    send("PATCH", "nobody", {"notes": "x"}, 404)
    status, headers, _ = sidecar.request("PUT", f"/api/v1/runs/{one.id}", {"Content-Length": "0"})
    check(status == 405 and headers["allow"] == "GET, HEAD, PATCH, DELETE", headers)
    check(sidecar.request("PATCH", f"/api/v1/runs/{one.id}/events", {"Content-Length": "0"})[0] == 405)
    # The pin, and what the others are worth against it.
    send("PATCH", one.id, {"baseline": True})
    answer = sidecar.json("/api/v1/runs?q=edited&sort=name&verdict=1")
    check(answer["baseline"] == one.id and answer["runs"][0]["verdict"]["verdict"] == "baseline", answer)
    judged = answer["runs"][1]["verdict"]
    check(judged["verdict"] == "pass" and abs(judged["speedup"] - 1.9) < 1e-9 and abs(judged["efficiency"] - 0.95) < 1e-9, judged)
    check(sidecar.json("/api/v1/runs?q=table-0&sort=name&verdict=1")["runs"][0]["verdict"]["verdict"] == "refused", "other data")
    check(sidecar.json(f"/api/v1/runs/{one.id}")["is_baseline"] is True)
    send("PATCH", one.id, {"baseline": False})
    check(sidecar.json("/api/v1/runs?verdict=1")["baseline"] is None)
    send("DELETE", two.id)
    check(sidecar.get(f"/api/v1/runs/{two.id}")[0] == 404)


def smoothing(sidecar):
    """All points are smoothed, then some are shown: the same figures however few are asked for."""
    run = sidecar.create("smooth", 1)
    values = [math.nan if i == 50 else math.sin(i / 9) for i in range(12001)]
    for seq in range(3):
        sidecar.steps(run.id, [("x", i, values[i], i * 0.1) for i in range(seq * 4000, min(12001, seq * 4000 + 4001))][:4000 + (seq == 2)], seq=seq + 1)
    wanted, average, mass = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            average, mass = 0.9 * average + 0.1 * value, 0.9 * mass + 0.1
        wanted.append(average / mass if math.isfinite(value) else value)
    for tail in ["max_points=10000", "max_points=50", "max_points=200&from=7000&to=9000"]:
        got = sidecar.json(f"/api/v1/runs/{run.id}/series?name=x&smooth=0.9&{tail}")["series"][0]
        check(len(got["smoothed"]) == len(got["steps"]) > 30, tail, len(got["steps"]))
        for step, value in zip(got["steps"], got["smoothed"]):
            check(value == "NaN" if step == 50 else abs(value - wanted[step]) < 1e-9, tail, step, value, wanted[step])
    for bad in ["smooth=1", "smooth=-1", "smooth=x", "smooth=nan"]:
        check(sidecar.get(f"/api/v1/runs/{run.id}/series?name=x&{bad}")[0] == 400, bad)


class Stream:
    """Reads server-sent events."""

    def __init__(self, sidecar, last=None, headers=None):
        self.connection = http.client.HTTPConnection("127.0.0.1", sidecar.port, timeout=30)
        self.connection.request("GET", "/api/v1/events", headers={**({"Last-Event-ID": str(last)} if last is not None else {}), **(headers or {})})
        self.response = self.connection.getresponse()
        check(self.response.status == 200, self.response.status)
        check(self.response.getheader("content-type") == "text/event-stream")
        self.next()  # the greeting: from here on nothing is missed

    def next(self):
        event = {}
        while True:
            line = self.response.readline().decode().rstrip("\n")
            if line == "" and "event" in event:
                return event
            if ": " in line and not line.startswith(":"):
                key, value = line.split(": ", 1)
                event[key] = value

    def run_event(self):
        while True:
            event = self.next()
            if event["event"] == "run":
                return int(event["id"]), json.loads(event["data"])

    def close(self):
        self.connection.close()


def events(sidecar):
    with contextlib.closing(Stream(sidecar)) as stream:
        run = sidecar.create("watched", 1)
        first, data = stream.run_event()
        check(data["kind"] == "created" and data["run"]["name"] == "watched", data)
        sidecar.epoch(run.id, 1, 0.5)
        kinds = []
        while "epoch" not in kinds:
            last, data = stream.run_event()
            kinds.append(data["kind"])
        check(data["run"]["accuracy"] == 0.5, data)
    sidecar.epoch(run.id, 2, 0.6)  # while nobody listens
    sidecar.stop()
    sidecar.start()
    sidecar.epoch(run.id, 3, 0.7)
    with contextlib.closing(Stream(sidecar, last)) as stream:
        ids = []
        while True:
            number, data = stream.run_event()
            ids.append(number)
            if data["kind"] == "epoch" and "epoch 3" in data["detail"]:
                break
        check(ids == sorted(set(ids)) and ids[0] > last, ids)
    status = sidecar.get("/api/v1/events", Last_Event_ID="not-a-number")[0]
    check(status == 400, status)


def metrics(sidecar):
    status, headers, body = sidecar.get("/metrics")
    check(status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4"), headers)
    text = body.decode()
    for line in text.splitlines():
        check(re.fullmatch(r'# (HELP|TYPE) [a-z_]+ .+|[a-z_]+(\{[a-z]+="[a-z]+"\})? [0-9.]+', line), line)
    for name in ["paramsync_epochs 19", 'paramsync_runs{state="finished"} 5', "process_resident_memory_bytes", "paramsync_store_wal_bytes"]:
        check(name in text, name, text)


def login():
    with Sidecar(token="correct-horse-battery") as sidecar:
        check(sidecar.get("/")[0] == 200, "the page itself asks for the token")
        check(sidecar.get("/api/v1/runs")[0] == 401)
        check(sidecar.get("/api/v1/runs", Authorization="Bearer wrong")[0] == 401)
        check(sidecar.get("/api/v1/runs", Authorization="Bearer correct-horse-battery")[0] == 200)
        status, headers, _ = sidecar.request("POST", "/api/v1/session", {"Authorization": "Bearer correct-horse-battery", "Content-Length": "0"})
        check(status == 200 and "HttpOnly" in headers["set-cookie"] and "SameSite=Strict" in headers["set-cookie"], headers)
        cookie = headers["set-cookie"].split(";")[0]
        check("correct-horse" not in cookie, cookie)
        check(sidecar.get("/api/v1/runs", Cookie=cookie)[0] == 200)
        with contextlib.closing(Stream(sidecar, headers={"Cookie": cookie})):
            pass


def roles():
    """Who may look may not change, who may change may not delete."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "tokens")
        path.write_text("admin tok-for-all-0000\nwrite tok-for-write-0000\nread tok-for-read-0000\n")
        path.chmod(0o600)
        with Sidecar("--token-file", str(path)) as sidecar:
            sidecar.token = "tok-for-all-0000"
            run = sidecar.create("guarded", 1)
            sidecar.finish(run.id)
            for method, token, wanted in [("PATCH", "none", 401), ("PATCH", "tok-for-read-0000", 403), ("PATCH", "tok-for-write-0000", 200),
                                          ("DELETE", "tok-for-read-0000", 403), ("DELETE", "tok-for-write-0000", 403), ("DELETE", "tok-for-all-0000", 200)]:
                body = b'{"notes": "x"}'
                status, _, answer = sidecar.request(method, f"/api/v1/runs/{run.id}", {
                    "Authorization": f"Bearer {token}", "Content-Type": "application/json", "Content-Length": str(len(body))}, body)
                check(status == wanted, method, token, status, answer)


def described(sidecar, run):
    """web/openapi.yaml names every route, and every field that the server sends."""
    try:
        import yaml
    except ImportError:
        print("no python3-yaml: the description is not checked")
        return
    api = yaml.safe_load(pathlib.Path(os.environ["PS_SOURCE"], "web/openapi.yaml").read_text())
    check(api["openapi"].startswith("3.1"), api["openapi"])

    def resolve(schema):
        while "$ref" in schema:
            node = api
            for part in schema["$ref"].lstrip("#/").split("/"):
                node = node[part]
            schema = node
        return schema

    def fits(value, schema, where):
        schema = resolve(schema)
        if "oneOf" in schema or "anyOf" in schema:
            problems = []
            for one in schema.get("oneOf") or schema["anyOf"]:
                try:
                    fits(value, one, where)
                    return
                except AssertionError as error:
                    problems.append(error)
            raise AssertionError((where, value, problems))
        types = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
        wanted = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        check(any(isinstance(value, types[t]) and not (isinstance(value, bool) and t in ("integer", "number")) for t in wanted), where, value, wanted)
        check("enum" not in schema or value in schema["enum"], where, value)
        if isinstance(value, dict):
            check(set(value) <= set(schema["properties"]), where, set(value) - set(schema["properties"]))
            check(set(schema.get("required", [])) <= set(value), where, set(schema.get("required", [])) - set(value))
            for key, inner in value.items():
                fits(inner, schema["properties"][key], f"{where}.{key}")
        elif isinstance(value, list):
            for inner in value:
                fits(inner, schema["items"], where + "[]")

    asked = 0
    for path, methods in api["paths"].items():
        content = methods["get"]["responses"]["200"].get("content", {})
        if "application/json" not in content:
            continue
        address = path.replace("{run}", run.id).lstrip("/")
        if path.endswith("/compare"):
            address += f"?runs={run.id},sample-1"
        for suffix in {"series": ["", "?name=loss&max_points=10", "?name=loss&smooth=0.5&max_points=10"], "ranks": ["", "?bins=4"],
                       "runs": ["", "?sort=name&verdict=1"]}.get(path.rsplit("/", 1)[1], [""]):
            fits(sidecar.json("/" + address + suffix), content["application/json"]["schema"], path)
            asked += 1
    check(asked >= 10, asked)
    # And the other way round: what the sources route is described.
    source = pathlib.Path(os.environ["PS_SOURCE"], "services/sidecar")
    inner, outer = (source / "web_api.c").read_text(), (source / "http.c").read_text()
    served = {f"/api/v1/{name}" for name in re.findall(r'strcmp\(path, "([a-z]+)"\)', inner)}
    served |= {f"/api/v1/runs/{{run}}/{name}" for name in re.findall(r'strcmp\(what, "([a-z]+)"\)', inner)}
    served |= {path.rstrip("/") for path in re.findall(r'strn?cmp\(url, "(/[a-z0-9/]+)"', outer)} - {"/api/v1", "/api/v1/checkpoints", "/api/v1/runs"}
    check(len(served) >= 14, served)
    check(served <= set(api["paths"]), "not described", served - set(api["paths"]))
    check({"get", "patch", "delete"} <= set(api["paths"]["/api/v1/runs/{run}"]), "changes are described")
    fits(json.loads(sidecar.get("/nothing")[2]), {"$ref": "#/components/schemas/Error"}, "error")


def long_run(sidecar):
    """Of more events than one answer holds the newest come, and a client that has some gets the next ones."""
    run = sidecar.create("long")
    for number in range(1, 1061):
        sidecar.epoch(run.id, number, 0.5)
    got = sidecar.json(f"/api/v1/runs/{run.id}/events")["events"]
    check(len(got) == 1000 and got[-1]["detail"].startswith("epoch 1060"), len(got), got[-1])
    check([e["id"] for e in got] == sorted(e["id"] for e in got), "order")
    few = sidecar.json(f"/api/v1/runs/{run.id}/events?limit=3")["events"]
    check([e["id"] for e in few] == [e["id"] for e in got[-3:]], few)
    later = sidecar.json(f"/api/v1/runs/{run.id}/events?since={got[0]['id']}&limit=2")["events"]
    check([e["id"] for e in later] == [e["id"] for e in got[1:3]], later)


def main():
    with Sidecar("--allow-host", "allowed.example") as sidecar:
        run = figures(sidecar)
        downloads(sidecar, run)
        hostile(sidecar)
        ranks(sidecar)
        tables(sidecar)
        edits(sidecar)
        smoothing(sidecar)
        described(sidecar, run)
        events(sidecar)
        metrics(sidecar)
        long_run(sidecar)
    login()
    roles()
    print("the HTTP face answers as described")


if __name__ == "__main__":
    if "PS_BIN" not in os.environ:
        skip("PS_BIN is not set")
    main()
