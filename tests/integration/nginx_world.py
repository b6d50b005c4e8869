# SPDX-License-Identifier: Apache-2.0
"""A real nginx on a free port that serves a sidecar under a sub-path, as an administrator would set it up."""
import http.client
import pathlib
import shutil
import subprocess
import tempfile
import time

from http_world import free_port

PREFIX = "/deep/er/"

CONFIG = """
daemon off;
pid {dir}/nginx.pid;
error_log {dir}/error.log;
worker_processes 1;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy; fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
    server {{
        listen 127.0.0.1:{port};
        location {prefix} {{
            proxy_pass http://127.0.0.1:{upstream}/;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_set_header Host $http_host;
            proxy_read_timeout 1h;
        }}
    }}
}}
"""


def program():
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/sbin")


class Nginx:
    def __init__(self, upstream):
        self.dir = tempfile.mkdtemp(prefix="paramsync-nginx-")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}{PREFIX}"
        config = pathlib.Path(self.dir, "nginx.conf")
        config.write_text(CONFIG.format(dir=self.dir, port=self.port, upstream=upstream, prefix=PREFIX))
        self.process = subprocess.Popen([program(), "-p", self.dir, "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 20
        while True:
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", PREFIX + "readyz")
                if connection.getresponse().status == 200:
                    break
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError("nginx does not start: " + (self.process.stderr.read() or "")[-1000:])
            time.sleep(0.05)  # polling a foreign process, not a synchronisation

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.dir, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()
