#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""deploy/ci: the jobs are YAML of the expected shape, and their steps after the build do what they say, in a copy of the scripts."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml

try:
    import yaml
except ImportError:
    print("skipped: no python3-yaml")
    sys.exit(77)
bin_dir, source = pathlib.Path(os.environ["PS_BIN"]).resolve(), pathlib.Path(os.environ["PS_SOURCE"])
if not (bin_dir / "paramsync").exists() or not (bin_dir / "paramsync-synth").exists():
    print("skipped: paramsync is not built")
    sys.exit(77)
failures = []


def check(what, good):
    if not good:
        failures.append(what)
        print(f"FAILED: {what}")


def run(script, folder, variables):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PARAMSYNC_", "GITHUB_", "CI_"))}
    done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", script], cwd=folder, capture_output=True, text=True, timeout=200,
                          env={**clean, "PATH": f"{bin_dir}:{os.environ['PATH']}", **variables})
    return done.returncode, done.stdout + done.stderr


def fresh(top, name):
    folder = top / name
    shutil.copytree(source / "deploy/ci", folder / "deploy/ci")
    return folder


def exists(path, what):
    check(f"{what}: {path} is in the repository", (source / path).exists())


def reports(folder, verdict, status):
    o = json.loads((folder / "report/gate.json").read_text())
    check(f"report: {o['verdict']}", o["verdict"] == verdict and o["exit"] == status)
    check("report: commit", o["runs"][0]["commit"] == "c0ffee")
    suite = xml.parse(folder / "report/gate.xml").getroot()[0]
    check("report: junit", (int(suite.get("failures")) > 0) == (status == 1))
    check("report: markdown", verdict in (folder / "report/gate.md").read_text())


with tempfile.TemporaryDirectory() as name:
    top = pathlib.Path(name)
    # GitHub Actions.
    job = yaml.safe_load((source / "deploy/ci/github-actions.yml").read_text())
    triggers = job.get("on", job.get(True))  # YAML 1.1 reads the key "on" as true
    check("github: triggers", set(triggers) == {"pull_request", "workflow_dispatch"} and job["permissions"] == {"contents": "read"})
    gate = job["jobs"]["gate"]
    steps = gate["steps"]
    named = {s["name"]: s for s in steps if "name" in s}
    check("github: every step does one thing", all(("run" in s) != ("uses" in s) for s in steps))
    check("github: the report is published whatever the verdict", all(s.get("if") == "always()" for s in steps[-2:]))
    check("github: artifact", steps[-1]["uses"].startswith("actions/upload-artifact@v") and "report/" in steps[-1]["with"]["path"])
    check("github: gate's status counts", "continue-on-error" not in named["Gate"])
    folder = fresh(top, "github")
    env = {**{k: str(v) for k, v in gate["env"].items()}, "GITHUB_SHA": "c0ffee", "GITHUB_STEP_SUMMARY": str(folder / "summary")}
    for step in ("Train", "Gate", "Summary"):
        status, out = run(named[step]["run"], folder, env)
        check(f"github {step}: {status}\n{out}", status == 0)
    reports(folder, "pass", 0)
    check("github: summary", "paramsync gate: pass" in (folder / "summary").read_text())
    check("github: artifacts are there", (folder / "ci-run/run.jsonl").exists())
    # The same folder against what it can't meet, and what can't be decided.
    status, out = run(named["Gate"]["run"], folder, {**env, "MIN_ACCURACY": "100%", "MAX_TOTAL_TIME": "1ms"})
    check(f"fails: {status}", status == 1)
    reports(folder, "fail", 1)
    status, _ = run("paramsync baseline set ci ./ci-run --free commit && deploy/ci/gate.sh ci-run", folder, {**env, "BASELINES": "baselines.json", "BASELINE": "ci"})
    check(f"against its own pin: {status}", status == 0)
    pins = json.loads((folder / "baselines.json").read_text())
    pins["baselines"]["ci"]["run"]["device"] = "another"
    (folder / "baselines.json").write_text(json.dumps(pins))
    status, _ = run("deploy/ci/gate.sh ci-run", folder, {**env, "BASELINES": "baselines.json", "BASELINE": "ci"})
    check(f"another device: {status}", status == 2)
    reports(folder, "cannot decide", 2)
    status, _ = run("deploy/ci/gate.sh ci-run", folder, {**env, "MIN_RUNS": "3"})
    check(f"too few runs: {status}", status == 2)
    for words, text in (("gate.sh", "name a run"), ("train.sh", "name the run"), ("train.sh --epochs 1", "name the run"), ("gate.sh nowhere", "./nowhere")):
        status, out = run(f"deploy/ci/{words}", folder, env)
        check(f"{words}: {status} {out}", status == 2 and text in out)
    check("the report says so", "cannot decide" in (folder / "report/gate.md").read_text())
    # GitLab: the same scripts, its own variables; two processes.
    job = yaml.safe_load((source / "deploy/ci/gitlab-ci.yml").read_text())["training-gate"]
    check("gitlab: artifacts", job["artifacts"]["when"] == "always" and job["artifacts"]["reports"]["junit"] == "report/gate.xml" and "allow_failure" not in job)
    folder = fresh(top, "gitlab")
    env = {**{k: str(v) for k, v in job["variables"].items()}, "CI_COMMIT_SHA": "c0ffee", "PROCESSES": "2"}
    status, out = run("\n".join(job["script"]), folder, env)
    check(f"gitlab: {status}\n{out}", status == 0)
    reports(folder, "pass", 0)
    check("gitlab: two processes", json.loads((folder / "report/gate.json").read_text())["runs"][0]["world_size"] == 2)
    check("gitlab: both jobs build alike", [c for c in job["before_script"] if "PATH" not in c] == named["Build"]["run"].split("\n")[:4])
    for path in ("deploy/install-deps.sh", "CMakePresets.json"):
        exists(path, "a step uses it")
    for script in ("train.sh", "gate.sh"):
        check(f"{script} --help", run(f"deploy/ci/{script} --help", folder, {})[0] == 0)
        if shutil.which("shellcheck"):
            done = subprocess.run(["shellcheck", source / "deploy/ci" / script], capture_output=True, text=True)
            check(f"shellcheck: {done.stdout}", done.returncode == 0)
sys.exit(1 if failures else 0)
