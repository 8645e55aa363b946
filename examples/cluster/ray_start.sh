#!/bin/bash
# Plain machines without a scheduler. On the first:    ray_start.sh head
# on each other:                                       ray_start.sh join FIRST_MACHINE
# and the run, on the first machine:                   ray_start.sh train qwen_8gpu_split trainer.run_dir=/shared/run
set -euo pipefail
port=${SKYRL_RAY_PORT:-6379}
# Ray's own niceness, 15, lets any other process starve the engines; machines want the token that the first one has.
export RAY_worker_niceness=0
[ ! -s ~/.ray/auth_token ] || export RAY_AUTH_MODE=token
case "${1:-}" in
    head) exec ray start --head --port="$port" --include-dashboard=false --disable-usage-stats ;;
    join) exec ray start --address="${2:?the name of the first machine}:$port" --disable-usage-stats ;;
    train) shift; exec skyrl-trainer train "$@" ray.address="127.0.0.1:$port" ;;
    stop) exec ray stop ;;
    *) echo "Say head, join FIRST_MACHINE, train RECIPE [a.b=c ...] or stop." >&2; exit 2 ;;
esac
