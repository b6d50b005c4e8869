#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""paramsync plan from a trace that the trainer wrote, and from figures; what it refuses."""
import json
import subprocess

from train_common import BIN, environment, path, run_case, synth, train, work


def plan(*args, status=0):
    done = subprocess.run([f"{BIN}/paramsync", "plan", *args], capture_output=True, text=True, env=environment, cwd=work, timeout=60)
    assert done.returncode == status, (done.returncode, done.stderr)
    return done.stderr if status else done.stdout


def case_all():
    data = synth(train=480)
    train("--data_url", data, "--width", "16", "--resolution", "8", "--batch", "16", "--epochs", "1", "--enable_gpu", "false",
          "--threads", "1", "--output_dir", "out", "--trace", "one.json")
    made = json.loads(plan("--trace", "one.json", "--batch", "16", "--images", "480", "--cards", "1,2,16", "--json"))
    one, two, many = made["predictions"]
    assert made["step"]["gradients"] == 62 and made["step"]["steps"] >= 20, made["step"]
    # The gradients in the trace are the whole net's, and backward's events lie within it.
    with open(path("one.json")) as f:
        spans = [e for e in json.load(f)["traceEvents"] if e["ph"] == "X"]
    elements = sum(e["args"]["elements"] for e in spans if e["name"] == "gradient") // sum(e["name"] == "update" for e in spans)
    assert sum(b["bytes"] for b in two["buckets"]) == 4 * elements > 2e6
    assert two["buckets"][-1]["ready_s"] <= made["step"]["backward_s"] and two["buckets"][0]["gradients"] > 1
    alone = sum(made["step"][k] for k in ("input_s", "forward_s", "backward_s", "update_s"))
    assert abs(one["step_s"] - alone) < 1e-9 and one["efficiency"] == 1 and one["buckets"][0]["algorithm"] == "none"
    assert two["step_s"] >= alone and 1 < two["speedup"] <= 2 and two["nodes"] == 1
    assert many["nodes"] == 2 and many["speedup"] <= 16
    slow = json.loads(plan("--trace", "one.json", "--cards", "16", "--inter", "eth-1g", "--json"))["predictions"][0]
    assert slow["efficiency"] < many["efficiency"]
    # Known answers: a bucket of 10 MB ready 10 ms into 20 ms of backward; two nodes at 1 GB/s and 1 ms: 2 + 10 ms.
    flags = ["--forward", "30ms", "--backward", "20ms", "--buckets", "10ms:10000000", "--cards", "2", "--cards-per-node", "1",
             "--algorithm", "ring", "--inter", "1ms:1", "--batch", "100", "--images", "1000", "--eval", "1s"]
    got = json.loads(plan(*flags, "--json"))["predictions"][0]
    assert abs(got["step_s"] - 0.052) < 1e-9 and abs(got["exposed_s"] - 0.002) < 1e-9 and abs(got["epoch_s"] - (5 * 0.052 + 0.5)) < 1e-9, got
    got = json.loads(plan(*flags, "--overlap", "false", "--json"))["predictions"][0]
    assert abs(got["step_s"] - 0.062) < 1e-9, got
    table = plan(*flags)
    assert "3.00x, efficiency 19 %" in table and "52.00 ms" in table and "96.2%" in table, table
    assert all(len(line) <= 80 for line in table.splitlines()), table
    assert "12.38x" not in table
    # Refusals, each by its reason.
    for args, why in ((["--trace", "nowhere.json"], "nowhere.json"), ([], "a measured step is missing"),
                      (["--trace", "one.json", "--forward", "1ms"], "not both"), ([*flags, "--inter", "string"], "eth-10g"),
                      ([*flags, "--cards", "0"], "--cards"), ([*flags, "--buckets", "1ms"], "TIME:BYTES"),
                      ([*flags, "--buckets", "9ms:1,3ms:1"], "gradient 1"), (["--trace", f"{data}/.."], "--trace"),
                      ([*flags, "--cards", "3", "--cards-per-node", "2", "--algorithm", "hierarchical"], "same number")):
        err = plan(*args, status=2)
        assert why in err and err.count("\n") == 1, (args, err)
    for name, text in (("empty.json", ""), ("list.json", "[1]"), ("none.json", '{"traceEvents": [1, {"ph": "X", "name": "update"}]}')):
        with open(path(name), "w") as f:
            f.write(text)
        assert name in plan("--trace", name, status=2)


run_case(globals())
