#!/usr/bin/env bash
# Starts two servers and two workers on this machine, and stops the servers after the workers.
set -euo pipefail
here=$(dirname "$0")
mkdir -p runs/servers
(umask 077; head -c 32 /dev/urandom | base64 > runs/servers/token)

trap 'kill $(jobs -p); wait' EXIT
roadtrain serve 127.0.0.1:7000 --store runs/servers/0 --token-file runs/servers/token \
    > runs/servers/0.log &
roadtrain serve 127.0.0.1:7001 --store runs/servers/1 --token-file runs/servers/token \
    > runs/servers/1.log &
torchrun --standalone --nproc-per-node 2 "$here/train.py"
roadtrain status 127.0.0.1:7000,127.0.0.1:7001 --token-file runs/servers/token
