"""The smoke check's server process: a signal while it is awaited leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys

CODE = """
import sys, tempfile, subprocess
from tqtool.serve.smoke.process import ServerProcess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.PIPE)
import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
print(child.pid, flush=True)
with tempfile.TemporaryFile() as errors:
    server = ServerProcess(child, errors, "key")
    try:
        server.wait_until_ready()
    finally:
        server.kill()
"""


def test_a_signal_while_the_server_starts_ends_the_check():
    process = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        process.kill()
        process.stdout.close()
