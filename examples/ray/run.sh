#!/usr/bin/env bash
# Makes a Ray cluster of two nodes on this machine, plans a job for it, and launches the plan.
set -euo pipefail
here=$(dirname "$0")
head=127.0.0.1:6399
mkdir -p runs
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0  # the cluster is empty when it ends

# With --block a node ends with its command. On machines of your own: `ray start` on each, once.
trap 'kill $(jobs -p); wait' EXIT
ray start --head --block --port "${head#*:}" --node-ip-address 127.0.0.1 --num-cpus 2 \
    --labels roadtrain-host=node0 --include-dashboard false --disable-usage-stats > runs/node0.log 2>&1 &
until ray status --address "$head" > runs/status.log 2>&1; do sleep 1; done
ray start --address "$head" --block --num-cpus 2 --labels roadtrain-host=node1 > runs/node1.log 2>&1 &
until [ "$(ray status --address "$head" 2>&1 | grep -c '1 node_')" = 2 ]; do sleep 1; done

roadtrain plan "$here/cluster.toml" --job "$here/job.toml" --out runs/plan.toml | sed -n 1,2p
roadtrain launch runs/plan.toml "$here/job.toml" --name first --on ray --ray-address "$head"
