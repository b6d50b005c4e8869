#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Man pages, completion, Debian packages: made from this build, and used from where they were unpacked."""
import glob
import os
import re
import shutil
import subprocess
import sys

from train_common import BIN, BUILD, LIMIT, TINY, environment, path, run_case, synth, work

SOURCE = os.environ["PS_SOURCE"]
TINY = [*TINY, "--heartbeat_timeout", "60s"]  # the machine may be busy


def run(*command, status=0, env=None, text=True, **more):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=text, timeout=LIMIT,
                          env={**environment, **(env or {})}, **more)
    assert done.returncode == status, f"{command}: exit {done.returncode}, expected {status}\n{done.stdout}"
    return done.stdout


def programs():
    """(arguments, name of the man page) of everything that has an options table."""
    yield ("paramsyncd",), "paramsyncd"
    yield ("paramsync-train",), "paramsync-train"
    text = run(os.path.join(BIN, "paramsync"), "--help")
    commands = re.findall(r"^  ([a-z]+)  ", text.split("Commands:\n")[1].split("\n\n")[0], re.M)
    assert {"launch", "plan", "doctor", "runs", "gate"} <= set(commands), commands
    for command in commands:
        yield ("paramsync", command), f"paramsync-{command}"


def words(arguments):
    out = run(os.path.join(BIN, arguments[0]), *arguments[1:], "--help", env={"PARAMSYNC_HELP": "words"})
    return [line.split("\t") for line in out.splitlines()]


def case_man():
    """One row, everywhere: each option of each program stands in --help and in its man page, and man has nothing to complain of."""
    pages = glob.glob(os.path.join(BUILD, "man", "*.1"))
    assert len(pages) >= 12, pages
    names = {os.path.basename(p)[:-2] for p in pages}
    for arguments, name in programs():
        assert name in names, name
        with open(os.path.join(BUILD, "man", name + ".1")) as f:
            page = f.read()
        shown = run(os.path.join(BIN, arguments[0]), *arguments[1:], "--help")
        options = words(arguments)
        assert len(options) >= 3, arguments
        for option in options:
            assert f"{option[0]}\n" in shown or f"{option[0]} " in shown, (name, option)
            assert "\\fB" + option[0].replace("-", "\\-") + "\\fR" in page or \
                   ", \\fB" + option[0].replace("-", "\\-") + "\\fR" in page, (name, option)
        assert page.count(".TP\n") == len(options), name
        assert run(os.path.join(BIN, arguments[0]), *arguments[1:], "--help", env={"PARAMSYNC_HELP": "man"}) == page, f"{name}: not up to date"
    if shutil.which("man"):
        for page in pages:
            said = subprocess.run(["man", "--warnings", "-l", page], capture_output=True, text=True,
                                  env={**environment, "MANPAGER": "cat", "MANWIDTH": "80", "LC_ALL": "C.UTF-8"})
            assert said.returncode == 0 and not said.stderr and "OPTIONS" in said.stdout + "OPTIONS" * page.endswith("paramsync.1"), (page, said.stderr)


def complete(*line):
    """What bash would offer for the last word."""
    script = (f"compopt() {{ echo \"opt $*\" >&2; }}; source {SOURCE}/deploy/packaging/completion.bash; "
              'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _paramsync; printf "%s\\n" "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", script, "x", *line], capture_output=True, text=True, timeout=LIMIT,
                          env={**environment, "PATH": BIN + ":" + os.environ["PATH"]})
    return done.stdout.split() + done.stderr.split("\n")[:-1]


def case_completion():
    assert complete("paramsync", "la") == ["launch"]
    assert "doctor" in complete("paramsync", "") and "--version" in complete("paramsync", "--v")
    assert complete("paramsync", "launch", "--max") == ["--max-restarts"]
    assert set(complete("paramsync", "plan", "--algorithm", "")) == {"auto", "ring", "tree", "hierarchical"}
    assert complete("paramsync-train", "--recipe", "f") == ["fast"]
    assert complete("paramsync-train", "--ckpt_format", "b") == ["both"]  # _ and - are the same
    assert complete("paramsyncd", "--data-dir", "") == ["opt -o dirnames"]
    assert complete("paramsyncd", "--config", "") == ["opt -o default"]
    assert "true" in complete("paramsync", "launch", "--", "tru")
    for arguments, _ in programs():  # every flag of every program is offered
        assert set(complete(*arguments, "--")) >= {w[0] for w in words(arguments)}, arguments


def case_deb():
    """cpack makes its packages; unpacked, the programs train, and a program of somebody's own builds against the library."""
    if os.environ.get("PS_SANITIZER") or not shutil.which("cpack") or not shutil.which("dpkg-shlibdeps"):
        print("skipped: a sanitizer's build, or no cpack or dpkg-dev")
        return 77
    run("cpack", "-G", "DEB", "-D", "CPACK_DEBIAN_COMPRESSION_TYPE=gzip", "-B", path("debs"), "--config", os.path.join(BUILD, "CPackConfig.cmake"))
    debs = {os.path.basename(d).split("_")[0]: d for d in glob.glob(path("debs", "*.deb"))}
    cuda = os.path.exists(os.path.join(BUILD, "lib", "paramsync", "libparamsync-cuda.so"))
    assert set(debs) == {"paramsync", "paramsyncd", "libparamsync0", "libparamsync-dev"} | ({"paramsync-cuda"} if cuda else set()), debs
    root, owners = path("root"), {}
    for name, deb in debs.items():
        run("dpkg-deb", "-x", deb, root)
        for file in re.findall(r"^-\S+ .* \.(/\S+)", run("dpkg-deb", "-c", deb), re.M):
            assert owners.setdefault(file, name) == name, (file, name, owners[file])
    for file, owner in {"/usr/bin/paramsync": "paramsync", "/usr/bin/paramsync-train": "paramsync", "/usr/bin/paramsyncd": "paramsyncd",
                        "/usr/lib/systemd/system/paramsyncd.service": "paramsyncd", "/etc/paramsync/paramsyncd.conf": "paramsyncd",
                        "/usr/lib/paramsync/backup.sh": "paramsyncd", "/usr/include/paramsync.h": "libparamsync-dev",
                        "/usr/share/man/man1/paramsyncd.1": "paramsyncd", "/usr/share/man/man1/paramsync-launch.1": "paramsync",
                        "/usr/share/bash-completion/completions/paramsync": "paramsync"}.items():
        assert owners.get(file) == owner, (file, owners.get(file))
    depends = {n: run("dpkg-deb", "-f", d, "Depends") for n, d in debs.items()}
    assert "libgrpc29" in depends["paramsyncd"] and "libdnnl2" not in depends["paramsyncd"], depends
    assert "libdnnl2" in depends["paramsync"] and "libgloo0" in depends["paramsync"], depends
    assert not cuda or (owners["/usr/lib/paramsync/libparamsync-cuda.so"] == "paramsync-cuda" and "libcud" not in depends["paramsync"])
    assert depends["libparamsync-dev"].startswith("libparamsync0 (= "), depends
    run("dpkg-deb", "-e", debs["paramsyncd"], path("control"))
    with open(path("control", "conffiles")) as f:
        assert f.read() == "/etc/paramsync/paramsyncd.conf\n"
    with open(os.path.join(root, "usr/lib/systemd/system/paramsyncd.service")) as f:
        assert "ExecStart=/usr/bin/paramsyncd " in f.read()
    # The programs where they lie now, with a sidecar of the job's own beside them.
    data = synth()
    bin_dir = os.path.join(root, "usr/bin")
    said = run(os.path.join(bin_dir, "paramsync"), "launch", "--nproc-per-node", "2", "--sidecar", "auto", "--", os.path.join(bin_dir, "paramsync-train"),
               "--data_url", data, *[("cpu" if a == "ref" else a) for a in TINY], "--epochs", "1", "--output_dir", path("out"), cwd=work)
    assert os.path.exists(path("out", "epoch_1.safetensors")) and os.path.exists(path("out", "sidecar", "paramsync.db")), said
    with open(path("own.c"), "w") as f:
        f.write('#include <paramsync.h>\n#include <stdio.h>\nint main(void) { puts(paramsync_version()); return 0; }\n')
    flags = run("pkg-config", "--cflags", "--libs", "paramsync", env={"PKG_CONFIG_PATH": os.path.join(root, "usr/lib/pkgconfig")}).split()
    run("cc", "-o", path("own"), path("own.c"), *flags, cwd=work)
    assert run(path("own"), env={"LD_LIBRARY_PATH": os.path.join(root, "usr/lib")}).strip() in run(os.path.join(bin_dir, "paramsync"), "--version")
    # A prefix of one's own: the units name it, settings that were changed stay.
    for _ in range(2):
        run("cmake", "--install", BUILD, "--component", "paramsyncd", "--prefix", path("own-prefix"))
        with open(path("own-prefix", "etc/paramsync/paramsyncd.conf"), "a") as f:
            f.write("# mine\n")
    with open(path("own-prefix", "lib/systemd/system/paramsyncd.service")) as f:
        text = f.read()
    assert f"ExecStart={path('own-prefix')}/bin/paramsyncd " in text and f"--config {path('own-prefix')}/etc/paramsync/" in text, text
    with open(path("own-prefix", "etc/paramsync/paramsyncd.conf")) as f:
        assert f.read().count("# mine") == 2
    return 0


run_case(globals())
