#!/usr/bin/env bash
# Makes a Ray cluster of two nodes on this machine, plans a job for it, and launches the plan.
set -euo pipefail
here=$(dirname "$0")
head=127.0.0.1:6399
mkdir -p runs
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  # the cluster is empty when it ends

# With --block a node ends with its command. On machines of your own: `ray start` on each, once.
trap 'kill $(jobs -p) || true; wait' EXIT
node() { # for the background
    exec ray start --block --num-cpus 2 --min-worker-port 0 --max-worker-port 0 --disable-usage-stats "$@"
}
nodes() { # wait until the cluster has so many
    for _ in {1..60}; do
        [ "$(ray status --address "$head" 2>&1 | grep -c '1 node_')" = "$1" ] && break
        sleep 1
    done
}
node --head --port "${head#*:}" --include-dashboard false --labels roadtrain-host=node0 \
    > runs/node0.log 2>&1 &
nodes 1
node --address "$head" --labels roadtrain-host=node1 > runs/node1.log 2>&1 &
nodes 2

roadtrain plan "$here/cluster.toml" --job "$here/job.toml" --out runs/plan.toml | sed -n 1,2p
roadtrain launch runs/plan.toml "$here/job.toml" --name first --on ray --ray-address "$head"
