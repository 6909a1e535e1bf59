"""
How does a study run across machines?
=====================================

So far everything ran in one process. A deployed study runs on NVIDIA FLARE: a server, and one engine at each
hospital, which connect over mutual TLS. This page starts a real server and three hospitals on this machine,
runs the infant study over them, and compares every byte with a run in one process.
"""

# %%
# ``fedtmle deploy demo`` does by itself what ``fedtmle deploy init``, ``fedtmle server run``, ``fedtmle silo
# run`` and ``fedtmle silo approve`` do one by one in the guide to deployment.
import subprocess
import sys

command = [sys.executable, "-m", "fedtmle", "deploy", "demo", "--silos", "3", "--quiet"]
shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
print(shown.stdout)
