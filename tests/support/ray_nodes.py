"""A Ray cluster of nodes in this machine, a process of its own: `python ray_nodes.py`. It says its
address, then does what lines on its standard input say, and says "done" after each:

    add NAME      a node with the label roadtrain-host=NAME, also again
    kill NAME     all processes of a node, with SIGKILL

When its input ends, so does the cluster.
"""

from __future__ import annotations

import logging
import os
import sys

from ray.cluster_utils import Cluster

SMALL = 80 << 20  # bytes of the object store: nothing goes through it
FOUND_DEAD = {  # nodes are found dead within 2 s, not 15
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


def options(name: str) -> dict[str, object]:
    return {
        "num_cpus": 2,
        "object_store_memory": SMALL,
        "labels": {"roadtrain-host": name},
        "node_name": name,
    }


def main() -> None:
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    logging.disable(logging.WARNING)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            **options("a"),
            "include_dashboard": False,
            "_system_config": FOUND_DEAD,
        },
    )
    nodes = {}
    said.write(f"{cluster.address}\n")
    try:
        for line in sys.stdin:
            verb, name = line.split()
            if verb == "add":
                nodes[name] = cluster.add_node(**options(name))
            else:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            said.write("done\n")
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
