#!/bin/bash
# A Ray cluster over the nodes of a SLURM job, and a run that joins it:
#   sbatch --nodes=4 --gpus-per-node=8 examples/cluster/slurm.sh qwen_8gpu_split generator.num_inference_engines=29
# The run folder must lie on a store that every node sees. SLURM warns two minutes before it ends the job: the run saves,
# and the job is queued again and resumes (delete the `scontrol requeue` where you do not want that). `scancel` ends it at
# once: episodes since the newest checkpoint are kept, and learned from again. Without --mem=0 a job has little memory.
#SBATCH --job-name=skyrl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:TERM@120
set -euo pipefail
shared=${SKYRL_SHARED:-$PWD}
port=${SKYRL_RAY_PORT:-6379}
# Ray's own niceness, 15, lets any other process starve the engines; nodes want the token that the first one has.
export RAY_worker_niceness=0 RAY_USAGE_STATS_ENABLED=0
[ ! -s ~/.ray/auth_token ] || export RAY_AUTH_MODE=token
[ $# -gt 0 ] || { echo "Name a recipe: sbatch slurm.sh RECIPE [a.b=c ...]" >&2; exit 2; }

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=$(srun --nodes=1 --ntasks=1 -w "${nodes[0]}" hostname --ip-address |
    awk '{for (i = 1; i <= NF; i++) if ($i !~ /^127|:/) {print $i; exit}}')
head=${head:-${nodes[0]}}
steps=()
trap 'kill "${steps[@]}" 2>/dev/null || true' EXIT
# --block keeps Ray in the foreground, so that the step ends with it. The run itself is on the first node.
srun --nodes=1 --ntasks=1 --overlap -w "${nodes[0]}" \
    ray start --head --node-ip-address="$head" --port="$port" --include-dashboard=false --block &
steps+=($!)
join() {  # a busy node may miss the limit that Ray has for its start
    step=
    trap 'kill ${step:+"$step"}; exit' TERM
    for _ in 1 2 3; do
        srun --nodes=1 --ntasks=1 --overlap -w "$1" ray start --address="$head:$port" --block &
        step=$!
        wait "$step" && return
        sleep "${SKYRL_POLL:-5}"
    done
}
for node in "${nodes[@]:1}"; do
    join "$node" &
    steps+=($!)
done
SECONDS=0
until [ "$(ray status --address="$head:$port" 2>/dev/null | grep -c '^ 1 node_')" -ge "${#nodes[@]}" ]; do
    [ "$SECONDS" -lt 300 ] || { echo "Not all ${#nodes[@]} nodes joined Ray at $head:$port within five minutes." >&2; exit 1; }
    sleep "${SKYRL_POLL:-5}"
done

# This script is on the first node. Without srun, which would make a SIGKILL of the SIGTERM below.
skyrl-trainer train "$@" ray.address="$head:$port" trainer.run_dir="$shared/runs/${SLURM_JOB_ID}" &
run=$!
stopped=0
trap 'stopped=1; kill -TERM "$run"' TERM  # SLURM's warning: the run saves a checkpoint and ends
status=0
wait "$run" || status=$?
while kill -0 "$run" 2>/dev/null; do
    status=0
    wait "$run" || status=$?
done
if [ "$stopped" = 1 ] && [ "$status" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
