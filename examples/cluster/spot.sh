#!/bin/bash
# A run on machines that may be taken away:    spot.sh RUN_FOLDER RECIPE [a.b=c ...]
# RUN_FOLDER is a folder that the next machine sees, too, or an address (s3://bucket/runs/mine). On SIGTERM the run
# saves and ends with 143; started again anywhere with the same folder, it goes on. An engine's or a node's death ends a
# run with 2 or 1: it is started again, at most SKYRL_TRIES times (5). Where the cloud only announces its notice,
# SKYRL_NOTICE is a command that succeeds once it has come, asked every five seconds.
set -uo pipefail
[ $# -ge 2 ] || { echo "Give a run folder and a recipe: spot.sh RUN_FOLDER RECIPE [a.b=c ...]" >&2; exit 2; }
folder=$1; shift
local=$folder
# Where the run works, if that is an address.
case $folder in *://*) local=${XDG_CACHE_HOME:-$HOME/.cache}/skyrl-trainer/${folder/:\/\//\/} ;; esac
for try in $(seq "${SKYRL_TRIES:-5}"); do
    skyrl-trainer train "$@" trainer.run_dir="$folder" &
    run=$!
    trap 'kill -TERM "$run" 2>/dev/null' TERM INT
    if [ -n "${SKYRL_NOTICE:-}" ]; then
        (while kill -0 "$run" 2>/dev/null; do bash -c "$SKYRL_NOTICE" && { kill -TERM "$run"; break; }; sleep "${SKYRL_POLL:-5}"; done) &
        watch=$!
    fi
    status=0
    wait "$run" || status=$?
    while kill -0 "$run" 2>/dev/null; do
        status=0
        wait "$run" || status=$?
    done
    [ -z "${watch:-}" ] || kill "$watch" 2>/dev/null
    # 0: done. 128 and more: by a signal, and this machine goes. 2 without a checkpoint: a wrong setting, which stays wrong.
    [ "$status" -ne 0 ] && [ "$status" -lt 128 ] && [ -n "$(ls "$local/checkpoints" 2>/dev/null)" ] || exit "$status"
    echo "ended with $status, started again ($try of ${SKYRL_TRIES:-5})" >&2
done
exit "$status"
