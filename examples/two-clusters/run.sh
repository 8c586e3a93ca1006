#!/usr/bin/env bash
# Creates the lab, trains on its four hosts, and removes the lab. Run as root from the root of the
# repository: examples/two-clusters/run.sh [options of `roadtrain train`]
set -euo pipefail
here=$(dirname "$0")
bin=${BIN:-.venv/bin}
hosts=(a0 a1 b0 b1)

"$bin/roadtrain" lab up "$here/lab.toml" --detach
trap '"$bin/roadtrain" lab down "$here/lab.toml"' EXIT

started=()
for rank in "${!hosts[@]}"; do
    "$bin/roadtrain" lab run "$here/lab.toml" "${hosts[rank]}" -- \
        "$bin/torchrun" --nnodes ${#hosts[@]} --nproc-per-node 1 --node-rank "$rank" \
        --master-addr a0 --master-port 29500 \
        --no-python "$bin/roadtrain" train "$here/job.toml" "$@" &
    started+=("$rank")
done
for _ in "${started[@]}"; do
    wait -n # the first failure ends the script; removing the lab ends the other processes
done
