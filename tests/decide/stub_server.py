"""Stands in for `octavo serve`: answers /health and /metrics. Usage: stub_server.py MODE --port PORT."""

from __future__ import annotations

import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

METRICS = """# HELP vllm:num_requests_running x
vllm:num_requests_running{model_name="m",engine="0"} 3.0
num_requests_running{model_name="m",engine="0"} 3.0
vllm:request_success_total{finished_reason="stop"} 4.0
vllm:request_success_total{finished_reason="length"} 5.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="101",kv_bytes_per_token="23040",max_model_len="8192"} 1.0
"""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write((METRICS if self.path == "/metrics" else "ok").encode())

    def log_message(self, *_):
        pass


mode, port = sys.argv[1], int(sys.argv[3])
if mode == "fail":
    sys.exit("octavo: error: the model is broken")
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if mode == "mute":
    time.sleep(600)
HTTPServer(("127.0.0.1", port), Handler).serve_forever()
