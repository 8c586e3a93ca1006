#!/usr/bin/env bash
# Starts a reducer, as on a spare host, and two DDP workers on this machine; then stops the reducer.
set -euo pipefail
here=$(dirname "$0")
mkdir -p runs/ddp-spares
(umask 077; head -c 32 /dev/urandom | base64 > runs/ddp-spares/token)

trap 'kill $(jobs -p); wait' EXIT
roadtrain serve 127.0.0.1:7010 --sum --budget 1GiB --token-file runs/ddp-spares/token \
    > runs/ddp-spares/spare.log &
torchrun --standalone --nproc-per-node 2 "$here/train.py"
roadtrain status 127.0.0.1:7010 --token-file runs/ddp-spares/token
