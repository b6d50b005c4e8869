#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The steps of deploy/docker/Dockerfile in chroots that mmdebstrap makes, for machines without Docker. Needs root, mmdebstrap, a Debian
mirror, 3 GB of disk and some ten minutes.

    /usr/bin/python3 tests/bench/docker_chroot.py [--jobs N] [STAGE ...]      default: build sidecar trainer

FROM debian:12-slim is a fresh Debian 12 (minbase); RUN, COPY, WORKDIR, ENV and USER do what they do in Docker as far as this file
uses them. At the end the size of each stage, and its entry point answers --version (or --help)."""
import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

SOURCE = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", ".."))
parser = argparse.ArgumentParser()
parser.add_argument("stages", nargs="*", default=["build", "sidecar", "trainer"])
parser.add_argument("--jobs", default=str(os.cpu_count()))
parser.add_argument("--keep", action="store_true")
options = parser.parse_args()
work = tempfile.mkdtemp(prefix="ps_docker.", dir="/var/tmp")


def sh(*command, **more):
    subprocess.run(command, check=True, **more)


def read_stages():
    with open(os.path.join(SOURCE, "deploy/docker/Dockerfile")) as f:
        text = re.sub(r"\\\n", " ", f.read())
    stages, steps = {}, None
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        word, rest = line.split(None, 1)
        if word == "FROM":
            base, _, name = rest.split()
            steps = stages[name] = {"base": base, "steps": []}
        else:
            steps["steps"].append((word, rest))
    return stages


def fresh(root):
    pristine = os.path.join(work, "debian.tar")
    if not os.path.exists(pristine):
        sh("mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", "bookworm", pristine)
    os.makedirs(root)
    sh("tar", "-xf", pristine, "-C", root)


class Stage:
    def __init__(self, name, root):
        self.name, self.root, self.cwd, self.env, self.user, self.entry, self.command = name, root, "/", {}, None, [], []

    def chroot(self, *command, user=True):
        prefix = ["chroot"] + ([f"--userspec={self.user}"] if self.user and user else []) + [self.root, "/usr/bin/env", "-i", "HOME=/root",
                  "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive",
                  f"CMAKE_BUILD_PARALLEL_LEVEL={options.jobs}", *[f"{k}={v}" for k, v in self.env.items()]]
        return [*prefix, *command]

    def step(self, word, rest, stages):
        print(f"[{self.name}] {word} {rest[:110]}", flush=True)
        if word == "RUN":
            sh(*self.chroot("sh", "-ec", f"cd {shlex.quote(self.cwd)} && {rest}"), stdout=subprocess.DEVNULL)
        elif word == "COPY":
            words = rest.split()
            source = SOURCE
            if words[0].startswith("--from="):
                source = stages[words.pop(0)[7:]].root
            target = os.path.join(self.root, os.path.join(self.cwd, words[-1]).lstrip("/"))
            for item in words[:-1]:
                if item == ".":
                    os.makedirs(target, exist_ok=True)
                    listed = subprocess.run(["git", "-C", SOURCE, "ls-files", "-z"], check=True, stdout=subprocess.PIPE).stdout
                    sh("rsync", "-a", "--from0", "--files-from=-", SOURCE + "/", target, input=listed) if shutil.which("rsync") else sh(
                        "sh", "-c", f"cd {shlex.quote(SOURCE)} && git ls-files -z | tar --null -T - -cf - | tar -xf - -C {shlex.quote(target)}")
                    continue
                path = os.path.join(source, item.lstrip("/"))
                os.makedirs(target if words[-1].endswith("/") else os.path.dirname(target), exist_ok=True)
                sh("cp", "-a", path + ("/." if item.endswith("/") else ""), target)
        elif word == "WORKDIR":
            self.cwd = rest.strip()
            os.makedirs(self.root + self.cwd, exist_ok=True)
        elif word == "ENV":
            self.env.update(pair.split("=", 1) for pair in shlex.split(rest))
        elif word == "USER":
            self.user = None if rest.strip() == "root" else rest.strip()
        elif word == "ENTRYPOINT":
            self.entry = json.loads(rest)
        elif word == "CMD":
            self.command = json.loads(rest)


def main():
    made, wanted = {}, read_stages()
    for name in options.stages:
        stage = made[name] = Stage(name, os.path.join(work, name))
        fresh(stage.root)
        for place in ("proc", "dev"):
            sh("mount", "--rbind", "/" + place, os.path.join(stage.root, place))
        shutil.copy("/etc/resolv.conf", os.path.join(stage.root, "etc/resolv.conf"))
        for configuration in ("apt/sources.list", "apt/apt.conf.d", "apt/sources.list.d"):  # the mirror of this machine
            path = os.path.join("/etc", configuration)
            if os.path.exists(path):
                sh("cp", "-rT", path, os.path.join(stage.root, "etc", configuration))
        for word, rest in wanted[name]["steps"]:
            stage.step(word, rest, made)
        size = subprocess.run(["du", "-xsm", "--exclude=./proc", "--exclude=./dev", "."], cwd=stage.root, check=True, stdout=subprocess.PIPE, text=True)
        print(f"[{name}] {size.stdout.split()[0]} MB unpacked", flush=True)
        if name != "build":
            program = (stage.entry + stage.command)[0]
            said = subprocess.run(stage.chroot(program, "--version"), check=True, stdout=subprocess.PIPE, text=True).stdout
            print(f"[{name}] {said.strip()}", flush=True)
        if name == "trainer":
            said = subprocess.run(stage.chroot("sh", "-ec", "cd /home/paramsync && paramsync-synth data --train 160 --test 50 && paramsync launch "
                                  "--nproc-per-node 2 --sidecar auto -- paramsync-train --data_url data --width 4 --resolution 8 --batch 16 "
                                  "--epochs 1 --enable_gpu false --output_dir out 2>&1 && ls out"), check=True, stdout=subprocess.PIPE, text=True).stdout
            assert "epoch_1.safetensors" in said and "backend cpu" in said, said
            print(f"[{name}] trained an epoch by two ranks with a sidecar of its own", flush=True)


try:
    main()
finally:
    for mount in sorted((l.split()[4] for l in open("/proc/self/mountinfo") if l.split()[4].startswith(work)), reverse=True):
        subprocess.run(["umount", "-l", mount], check=False)
    if not options.keep and not any(l.split()[4].startswith(work) for l in open("/proc/self/mountinfo")):
        shutil.rmtree(work, ignore_errors=True)
