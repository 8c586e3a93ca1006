"""`roadtrain probe` over emulated links: the measured rate of every pair is that of its slower end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from roadtrain.lab import Network, Nic, network_available

RATES = {"a": 50e6, "b": 12.5e6, "c": 50e6}
CARRIED = 0.956  # of a link's bytes, by whole Ethernet frames
PORT = 7100
ASK = """
import json, sys
from roadtrain.probing_links import matrix
from roadtrain.wire.tcp import Options
found = matrix(sys.argv[2].split(","), Options(token=open(sys.argv[1], "rb").read().strip()))
print(json.dumps([[*pair, *both] for pair, both in found.items()]))
"""


@pytest.mark.skipif(network_available() is not None, reason=str(network_available()))
def test_every_pair_has_the_rate_of_its_slower_end(tmp_path):
    token = tmp_path / "token"
    token.write_text("a secret of the job")
    with Network({name: [Nic(rate)] for name, rate in RATES.items()}) as network:
        where = {name: f"{network.hosts[name].address}:{PORT}" for name in RATES}
        listening = [network.hosts[name].run(
            [sys.executable, "-m", "roadtrain.cli", "probe", "--listen", where[name], "--token-file", str(token)],
            stdout=subprocess.PIPE, text=True) for name in ("b", "c")]
        try:
            for process in listening:
                assert "listening at" in process.stdout.readline()
            asking = network.hosts["a"].run([sys.executable, "-c", ASK, str(token), f"{where['b']},{where['c']}"],
                                            stdout=subprocess.PIPE, text=True)
            out, _ = asking.communicate(timeout=120)
            assert asking.returncode == 0
        finally:
            for process in listening:
                process.terminate()
            for process in listening:
                process.communicate(timeout=30)
    names = {where["b"]: "b", where["c"]: "c", "here": "a"}
    found = {(names[one], names[other]): rate for one, other, rate, _ in json.loads(out.splitlines()[-1])}
    assert set(found) == {("a", "b"), ("a", "c"), ("b", "c"), ("c", "b")}
    for (one, other), rate in found.items():
        assert rate == pytest.approx(CARRIED * min(RATES[one], RATES[other]), rel=0.15), (one, other)
