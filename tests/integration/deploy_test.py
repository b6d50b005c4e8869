#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What lies in deploy/, as far as a machine without systemd, Slurm, ModelArts, Kubernetes and Docker can check it. The case to
run is the argument; 77 where a tool is missing."""
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

from train_common import BIN, LIMIT, TINY, environment, free_port, path, run_case, started, synth, work

SOURCE = os.environ["PS_SOURCE"]
TINY = [*TINY, "--heartbeat_timeout", "60s"]  # the machine may be busy
DEPLOY = os.path.join(SOURCE, "deploy")


def need(*programs):
    missing = [p for p in programs if not shutil.which(p)]
    if missing:
        print("skipped: no", ", ".join(missing))
        sys.exit(77)


def run(*command, status=0, env=None, cwd=work, timeout=LIMIT):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd, timeout=timeout,
                          env={**environment, "PATH": BIN + ":" + os.environ["PATH"], **(env or {})})
    assert done.returncode == status, f"{command}: exit {done.returncode}, expected {status}\n{done.stdout}"
    return done.stdout


def text_of(*parts):
    with open(os.path.join(DEPLOY, *parts)) as f:
        return f.read()


def sidecar(*flags, env=None, **more):
    """A paramsyncd of the test's own; returns the process and its two ports."""
    daemon = subprocess.Popen([os.path.join(BIN, "paramsyncd"), "--data-dir", path("store"), "--grpc-listen", "127.0.0.1:0",
                               "--http-listen", "127.0.0.1:0", *flags], stdout=subprocess.PIPE, text=True,
                              env={**environment, **(env or {})}, **more)
    started.append(daemon)
    ports = re.search(r"gRPC 127\.0\.0\.1:(\d+), HTTP 127\.0\.0\.1:(\d+)", daemon.stdout.readline())
    return daemon, int(ports.group(1)), int(ports.group(2))


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        return answer.read().decode()


def case_scripts():
    """Shell scripts: shellcheck finds nothing; --help and bad arguments answer."""
    need("shellcheck")
    scripts = [s for s in glob.glob(f"{DEPLOY}/**/*", recursive=True) if s.endswith((".sh", ".sbatch"))]
    assert len(scripts) >= 6, scripts
    run("shellcheck", "-s", "bash", *[s for s in scripts if not s.endswith("backup.sh")])
    run("shellcheck", f"{DEPLOY}/systemd/backup.sh")
    for script in scripts:
        assert os.access(script, os.X_OK), script


def case_backup():
    """backup.sh beside a sidecar that is in use: copies that open, the newest two stay, nothing half-made does."""
    script = f"{DEPLOY}/systemd/backup.sh"
    daemon, grpc, _ = sidecar()
    subprocess.run([os.path.join(BIN, "paramsync"), "tail", "--run", "kept", "--sidecar", f"127.0.0.1:{grpc}"], check=True,
                   input="train | epoch: 1 | loss: 2.0\nval | epoch: 1 | loss: 1.5 | accuracy: 0.5 \n", text=True,
                   stdout=subprocess.DEVNULL, env=environment)
    for old in ("2020-01-01T00-00-00Z", "2021-01-01T00-00-00Z", ".unfinished-x", "mine"):
        os.makedirs(path("copies", old))
    run(script, path("store"), path("copies"), "2")
    names = sorted(os.listdir(path("copies")))
    assert len(names) == 3 and names[0] == "2021-01-01T00-00-00Z" and names[2] == "mine", names
    daemon.terminate()
    daemon.wait(30)
    shutil.rmtree(path("store"))
    os.rename(path("copies", names[1]), path("store"))  # restored as the script says
    daemon, grpc, _ = sidecar()
    assert "kept" in run("paramsync", "runs", "--sidecar", f"127.0.0.1:{grpc}")
    run(script, status=2)
    assert "KEEP" in run(script, path("store"), path("copies"), "0", status=2)
    run(script, path("nowhere"), path("copies"), status=1)
    assert not [n for n in os.listdir(path("copies")) if n.startswith(".")]


def case_systemd():
    """systemd-analyze is content, the sandbox is tight, the settings file is read, and paramsyncd makes no system call that the
    unit's filter forbids (where strace is)."""
    need("systemd-analyze")
    units = sorted(glob.glob(f"{DEPLOY}/systemd/*.service") + glob.glob(f"{DEPLOY}/systemd/*.timer"))
    for unit in units:
        with open(unit) as f:
            text = f.read()
        with open(path(os.path.basename(unit)), "w") as f:
            f.write(text.replace("/usr/bin/paramsyncd", os.path.join(BIN, "paramsyncd")).replace(
                "/usr/lib/paramsync/backup.sh", f"{DEPLOY}/systemd/backup.sh"))
    said = run("systemd-analyze", "verify", "--man=no", *[path(os.path.basename(u)) for u in units])
    assert not [line for line in said.splitlines() if "paramsync" in line], said
    for unit, limit in (("paramsyncd.service", 1.5), ("paramsync-backup.service", 1.0)):
        said = run("systemd-analyze", "security", "--offline=yes", path(unit))
        score = float(re.search(r"exposure level for \S+ ([0-9.]+)", said).group(1))
        assert score <= limit, (unit, score)
    # The settings file, with what is commented out there switched on.
    text = text_of("systemd", "paramsyncd.conf")
    names = re.findall(r"^#? ?([a-z-]+) = ", text, re.M)
    known = run("paramsyncd", "--help")
    assert len(names) >= 6 and all(f"--{n} " in known for n in names), names
    with open(path("paramsyncd.conf"), "w") as f:
        f.write(re.sub(r":(50051|8080)", ":0", text))
    flags = ["--config", path("paramsyncd.conf")]
    if not shutil.which("strace"):
        return sidecar(*flags) and 0
    log = path("calls")
    daemon = subprocess.Popen(["strace", "-f", "-qq", "-c", "-S", "name", "-U", "name", "-o", log, os.path.join(BIN, "paramsyncd"),
                               "--data-dir", path("store"), *flags], stdout=subprocess.PIPE, text=True, env=environment)
    started.append(daemon)
    line = daemon.stdout.readline()
    ports = re.search(r"gRPC \S+?:(\d+), HTTP \S+?:(\d+)", line)
    if not ports:
        return 77 if os.environ.get("PS_SANITIZER") else 1  # a sanitizer's own calls are not the program's
    get(f"http://127.0.0.1:{ports.group(2)}/metrics")
    run("paramsync", "runs", "--sidecar", f"127.0.0.1:{ports.group(1)}")
    run("sh", "-c", f"pkill -TERM -P {daemon.pid}")
    daemon.wait(60)
    filters = {}
    for group in re.findall(r"@[a-z-]+", " ".join(re.findall(r"^SystemCallFilter=(.*)", text_of("systemd", "paramsyncd.service"), re.M))):
        filters[group] = calls_of(group)
    allowed = filters["@system-service"] - filters["@privileged"] - filters["@resources"]
    with open(log) as f:
        used = {w for w in re.findall(r"^(\w+)$", f.read(), re.M) if w not in ("syscall", "total")}
    if os.geteuid() == 0:
        used.discard("fchown")  # SQLite gives its files to the database's owner; only root can, and the unit is not root
    assert len(used) > 20 and not used - allowed, used - allowed


def calls_of(group):
    found = set()
    for line in run("systemd-analyze", "syscall-filter", group).splitlines()[1:]:
        word = line.strip()
        if word.startswith("@"):
            found |= calls_of(word)
        elif word and not word.startswith("#"):
            found.add(word)
    return found


def case_prometheus():
    """promtool is content with the rules, their tests, the configuration and what the sidecar says; every series that a rule or
    the Grafana dashboard names is one that the sidecar has."""
    need("promtool")
    run("promtool", "check", "config", f"{DEPLOY}/prometheus/prometheus.yml")
    run("promtool", "test", "rules", "alerts_test.yml", cwd=f"{DEPLOY}/prometheus")
    _, _, http = sidecar()
    said = get(f"http://127.0.0.1:{http}/metrics")
    done = subprocess.run(["promtool", "check", "metrics"], input=said, text=True, capture_output=True)
    # It would have counters alone end in _total and so on; what it calls wrong (exit 1) is a fault, what it advises is 3.
    assert done.returncode in (0, 3), done.stdout + done.stderr
    have = set(re.findall(r"^# TYPE (\w+) ", said, re.M))
    used = set(re.findall(r"\bparamsync_\w+", text_of("prometheus", "alerts.yml") + text_of("grafana", "paramsync.json")))
    assert len(used) >= 12 and used <= have, used - have
    board = json.loads(text_of("grafana", "paramsync.json"))
    ids = [p["id"] for p in board["panels"]]
    assert len(ids) == len(set(ids)) and all(p["targets"] for p in board["panels"])
    with open(path("queries.yml"), "w") as f:  # the expressions parse
        f.write("groups:\n  - name: g\n    rules:\n" + "".join(
            f"      - record: query_{p['id']}_{i}\n        expr: {json.dumps(t['expr'].replace('$instance', '.*'))}\n"
            for p in board["panels"] for i, t in enumerate(p["targets"])))
    run("promtool", "check", "rules", path("queries.yml"))


def case_nginx():
    """nginx -t, then nginx itself in front of a sidecar: pages, the API, gRPC, all by one TLS port."""
    need("nginx", "openssl")
    try:
        import grpc
    except ImportError:
        print("skipped: no grpcio")
        return 77
    _, grpc_port, http_port = sidecar("--allow-host", "paramsync.example", "--grpc-listen", "127.0.0.1:0",
                                      env={"PARAMSYNC_TOKEN": "apples"})
    run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj",
        "/CN=paramsync.example", "-addext", "subjectAltName=DNS:paramsync.example", "-keyout", path("key.pem"), "-out", path("cert.pem"))
    tls, plain = free_port(), free_port()
    site = text_of("nginx", "paramsync.conf")
    for old, new in (("127.0.0.1:8080;", f"127.0.0.1:{http_port};"), ("127.0.0.1:50051;", f"127.0.0.1:{grpc_port};"),
                     ("/etc/ssl/paramsync/server.pem", path("cert.pem")), ("/etc/ssl/paramsync/server.key", path("key.pem")),
                     ("listen 443 ", f"listen 127.0.0.1:{tls} "), ("listen 80;", f"listen 127.0.0.1:{plain};")):
        assert old in site, old
        site = site.replace(old, new)
    site = re.sub(r".*listen \[::\].*\n", "", site)
    with open(path("nginx.conf"), "w") as f:
        f.write(f"daemon off; master_process off; pid {work}/nginx.pid; error_log stderr;\nevents {{}}\nhttp {{\n access_log off;\n" +
                "".join(f" {n}_temp_path {work}/{n};\n" for n in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")) + site + "}\n")
    run("nginx", "-t", "-c", path("nginx.conf"), "-p", work)
    server = subprocess.Popen(["nginx", "-c", path("nginx.conf"), "-p", work], stderr=subprocess.PIPE)
    started.append(server)
    curl = ["curl", "-sS", "--retry", "40", "--retry-connrefused", "--retry-delay", "1", "--cacert", path("cert.pem"), "--connect-to",
            f"paramsync.example:443:127.0.0.1:{tls}"]
    assert "<html" in run(*curl, "https://paramsync.example/")
    assert run(*curl, "-o", path("out"), "-w", "%{http_code}", "https://paramsync.example/api/v1/runs") == "401"
    assert "runs" in run(*curl, "-H", "Authorization: Bearer apples", "https://paramsync.example/api/v1/runs")
    assert run("curl", "-sS", "-o", path("out"), "-w", "%{redirect_url}", "-H", "Host: paramsync.example",
               f"http://127.0.0.1:{plain}/x") == "https://paramsync.example/x"
    with open(path("cert.pem"), "rb") as f:
        credentials = grpc.ssl_channel_credentials(f.read())
    channel = grpc.secure_channel(f"127.0.0.1:{tls}", credentials, options=[("grpc.ssl_target_name_override", "paramsync.example")])
    health = channel.unary_unary("/grpc.health.v1.Health/Check")
    assert health(b"", timeout=20) == b"\x08\x01", "SERVING, without a token: probes have none"
    channel.close()
    # Our own client, through it, with a checkpoint-sized upload.
    with open(path("epoch_1.state"), "wb") as f:
        f.write(os.urandom(3 << 20))
    hosts = ["--sidecar", f"127.0.0.1:{tls}", "--tls-ca", path("cert.pem")]
    done = subprocess.run([os.path.join(BIN, "paramsync"), "runs", *hosts], capture_output=True, text=True,
                          env={**environment, "PARAMSYNC_TOKEN": "apples"})
    assert done.returncode != 0 and "127.0.0.1" in done.stderr  # the certificate is for a name


def fake_srun():
    """srun as far as the scripts use it: one task a node, as many nodes as NODES says, all on this machine."""
    with open(path("srun"), "w") as f:
        f.write(f"""#!{sys.executable}
import os, subprocess, sys
args = sys.argv[1:]
while args and args[0].startswith("--"):
    args.pop(0)
nodes = int(os.environ["NODES"])
tasks = [subprocess.Popen(args, env=dict(os.environ, SLURM_STEP_ID="0", SLURM_NODEID=str(i), SLURM_PROCID=str(i), SLURM_NNODES=str(nodes),
         SLURM_NTASKS=str(nodes), SLURM_STEP_NUM_NODES=str(nodes), SLURM_STEP_NUM_TASKS=str(nodes),
         SLURM_STEP_NODELIST=",".join(["127.0.0.1"] + ["localhost"] * (nodes - 1)))) for i in range(nodes)]
sys.exit(max(t.wait() for t in tasks))
""")
    os.chmod(path("srun"), 0o755)


def case_slurm():
    """Both batch scripts under a stand-in for srun: they train, and the sidecar of the job has the run."""
    data = synth()
    fake_srun()
    for script, nodes, ranks in (("single.sbatch", 1, 1), ("two-nodes.sbatch", 2, 2)):
        job = str(20000 + free_port() % 19000)
        said = run("bash", f"{DEPLOY}/slurm/{script}", *TINY, "--epochs", "2",
                   env={"PATH": f"{work}:{BIN}:{os.environ['PATH']}", "NODES": str(nodes), "DATA": data, "OUT": path(script),
                        "SLURM_JOB_ID": job, "RANKS_PER_NODE": str(ranks), "OMP_NUM_THREADS": "1"})
        assert f"rank 0 of {nodes * ranks}" in said or nodes * ranks == 1, said
        assert os.path.exists(path(script, "epoch_2.safetensors")) and os.path.exists(path(script, "sidecar", "paramsync.db")), said
        assert f"as run slurm-{job}" in said, said
    assert "DATA" in run("bash", f"{DEPLOY}/slurm/single.sbatch", status=1)


def case_modelarts():
    """The boot script with ModelArts' variables: two nodes of two cards on this machine."""
    data = synth()
    script = f"{DEPLOY}/modelarts/run_ddp.sh"
    port = free_port()
    common = {"VC_WORKER_HOSTS": "127.0.0.1,localhost", "MA_NUM_HOSTS": "2", "MA_NUM_GPUS": "2", "MA_VJ_NAME": "job-a",
              "MA_LOG_DIR": path("log"), "MA_JOB_DIR": DEPLOY, "PARAMSYNC_RDZV_PORT": str(port),
              "PATH": BIN + ":" + os.environ["PATH"]}
    nodes = [subprocess.Popen(["bash", script, *TINY, "--epochs", "2", f"--data_url={data}", f"--train_url={path('out')}", "--platform_flag=1"],
                              env={**environment, **common, "VC_TASK_INDEX": str(i)}, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, cwd=work) for i in range(2)]
    started.extend(nodes)
    said = [node.communicate(timeout=LIMIT)[0] for node in nodes]
    assert [n.returncode for n in nodes] == [0, 0], said
    assert "rank 0 of 4" in said[0] and "platform_flag" in said[0], said[0]
    assert "node 1 of 2, 2 ranks here" in said[1], said[1]
    assert sorted(os.listdir(path("log", "ranks-1"))) == ["rank_2.log", "rank_3.log"]
    assert os.path.exists(path("out", "epoch_2.safetensors")) and os.path.exists(path("out", "sidecar", "paramsync.db"))
    said = run("bash", script, f"--data_url={data}", *TINY, "--epochs", "1", f"--output_dir={path('one')}",
               env={"PATH": common["PATH"], "PARAMSYNC_SIDECAR": "none"})
    assert "node 0 of 1, 1 ranks here" in said and os.path.exists(path("one", "epoch_1.safetensors")), said
    assert "names 1" in run("bash", script, env={"MA_NUM_HOSTS": "2", "VC_WORKER_HOSTS": "a", "PATH": common["PATH"]}, status=2)
    assert "in one word" in run("bash", script, "--train_url", "x", env={"PATH": common["PATH"]}, status=2)


def case_kubernetes():
    """The manifests: they parse, names fit together, and every flag in them is one that the program knows. No API server saw them."""
    try:
        import yaml
    except ImportError:
        print("skipped: no PyYAML")
        return 77
    things = {}
    for name in ("sidecar.yaml", "job.yaml"):
        for thing in yaml.safe_load_all(text_of("k8s", name)):
            things[thing["kind"], thing["metadata"]["name"]] = thing
    deployment, job = things["Deployment", "paramsyncd"], things["Job", "paramsync-train"]
    pod, train = deployment["spec"]["template"], job["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert things["Service", "paramsyncd"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert things["Service", "paramsync-train"]["spec"]["selector"].items() <= train["metadata"]["labels"].items()
    assert train["spec"]["subdomain"] == "paramsync-train" and job["spec"]["completionMode"] == "Indexed"
    assert deployment["spec"]["replicas"] == 1 and deployment["spec"]["strategy"]["type"] == "Recreate"
    for spec in (pod["spec"], train["spec"]):
        volumes = {v["name"] for v in spec["volumes"]}
        for container in spec["containers"]:
            assert {m["name"] for m in container["volumeMounts"]} == volumes
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
    side, trainer = pod["spec"]["containers"][0], train["spec"]["containers"][0]
    assert side["readinessProbe"]["grpc"]["port"] == side["ports"][0]["containerPort"]
    claims = {v["persistentVolumeClaim"]["claimName"] for v in pod["spec"]["volumes"] if "persistentVolumeClaim" in v}
    assert all(("PersistentVolumeClaim", c) in things for c in claims)
    for program, flags in ((["paramsyncd"], side["args"]), (trainer["command"], trainer["args"][:trainer["args"].index("--")]),
                           (["paramsync-train"], trainer["args"][trainer["args"].index("--") + 2:])):
        known = run(*program, "--help").replace("_", "-")
        for flag in flags:
            assert f"--{flag[2:].split('=')[0].replace('_', '-')} " in known + " ", (program, flag)
    launch = dict(a[2:].split("=") for a in trainer["args"] if a.startswith("--") and "=" in a)
    assert int(launch["nnodes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(launch["nproc-per-node"]) == trainer["resources"]["limits"]["nvidia.com/gpu"]
    # The probe that the manifest asks for, as the kubelet makes it: without a token.
    try:
        import grpc
    except ImportError:
        return 0
    _, port, http = sidecar(env={"PARAMSYNC_TOKEN": "apples"})
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=20) == b"\x08\x01"
    get(f"http://127.0.0.1:{http}/readyz")
    get(f"http://127.0.0.1:{http}/healthz")
    return 0


def case_docker():
    """The Dockerfile's words without a daemon: stages exist, what is copied exists, packages exist; compose names its targets."""
    try:
        import yaml
    except ImportError:
        print("skipped: no PyYAML")
        return 77
    text = re.sub(r"\\\n", " ", text_of("docker", "Dockerfile"))
    stages, packages = set(), set()
    for line in text.splitlines():
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        assert words[0] in {"FROM", "RUN", "COPY", "WORKDIR", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD", "ENV"}, line
        if words[0] == "FROM":
            stages.add(words[3])
        if words[0] == "COPY" and words[1].startswith("--from="):
            assert words[1][7:] in stages, line
        elif words[0] == "COPY":
            assert all(os.path.exists(os.path.join(SOURCE, w)) for w in words[1:-1]), line
        if "install -y" in line:
            packages |= set(re.findall(r" (lib[a-z0-9.-]+)", line.split("install", 1)[1].split("&&")[0]))
    assert {"build", "sidecar", "trainer", "trainer-cuda"} <= stages and len(packages) >= 10
    if shutil.which("apt-cache") and run("apt-cache", "policy", "libc6").count("\n") > 3:
        known = run("apt-cache", "show", "--no-all-versions", *packages)
        assert all(f"Package: {p}\n" in known for p in packages), packages
    # What the programs link to is among the packages of their image.
    if shutil.which("dpkg-query") and not os.environ.get("PS_SANITIZER"):
        for program in ("paramsyncd", "paramsync"):
            linked = re.findall(r"=> (/\S+)", run("ldd", os.path.join(BIN, program)))
            direct = re.findall(r"NEEDED\s+(\S+)", run("objdump", "-p", os.path.join(BIN, program))) if shutil.which("objdump") else []
            for library in (p for p in linked if os.path.basename(p) in direct):
                owner = [subprocess.run(["dpkg-query", "-S", p], capture_output=True, text=True).stdout.split(":")[0]
                         for p in (os.path.realpath(library), library)]
                owner = next((o for o in owner if o), "")
                assert not owner or owner in packages | {"libc6", "libgcc-s1"}, (program, library, owner)
    compose = yaml.safe_load(text_of("docker", "compose.yaml"))
    for service in compose["services"].values():
        assert service["build"]["target"] in stages
        assert os.path.exists(os.path.join(DEPLOY, "docker", service["build"]["context"], service["build"]["dockerfile"]))
    return 0


run_case(globals())
