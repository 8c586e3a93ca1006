"""A Ray cluster of nodes on this machine, run as `python ray_nodes.py`. The process prints its
address, then carries out the commands on its standard input and prints "done" after each:

    add NAME      add a node with the label roadtrain-host=NAME, possibly again
    kill NAME     kill all processes of a node with SIGKILL

The cluster ends with its input.
"""

from __future__ import annotations

import logging
import os
import sys

from ray.cluster_utils import Cluster

SMALL = 80 << 20  # bytes of the object store, which is unused
FOUND_DEAD = {  # dead nodes are detected within 2 s instead of 15
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
    output = os.fdopen(os.dup(1), "w", buffering=1)
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
    output.write(f"{cluster.address}\n")
    try:
        for line in sys.stdin:
            verb, name = line.split()
            if verb == "add":
                nodes[name] = cluster.add_node(**options(name))
            else:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            output.write("done\n")
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
