#!/bin/bash
# << arithmetic >>
# sbatch launch/slurm.sh. Made by: << made_by >>
# The current folder, and with it the run folder, must be on a disk that all nodes share. Partition, account, memory and
# the activation of the environment are this cluster's own: add them.
#SBATCH --job-name=<< name >>
#SBATCH --nodes=<< nodes >>
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=<< gpus >>
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# Five minutes before the time is up, to what srun started: a checkpoint is saved, and all ranks end.
#SBATCH --signal=SIGUSR1@300
set -uo pipefail

# The shell outlives the signals that are meant for the ranks, to look at how the run ended. TERM is that of scancel.
trap : USR1
trap 'cancelled=yes' TERM

# torchrun forwards SIGUSR1 only when told to; without, it would die of it. A save may take longer than torch's 30 s.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
export PET_SHUTDOWN_TIMEOUT=240

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
# Two jobs on one node must not meet.
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

summary=<< run_dir >>/run_summary.json
before=$(stat -c %y "$summary" 2>/dev/null)

# The single quotes are meant: SLURM_NODEID is known on each node alone.
srun --kill-on-bad-exit=0 bash -c 'exec torchrun --nnodes=<< nodes >> --nproc_per_node=<< gpus >> \
    --node_rank="$SLURM_NODEID" --master_addr="$MASTER_ADDR" --master_port="$MASTER_PORT" "$@"' \
    torchrun << command >>
code=$?

# An earlier life's summary says nothing about a start that was refused.
if [ "$code" -ne 0 ] && [ "$(stat -c %y "$summary" 2>/dev/null)" != "$before" ]; then
    status=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["status"])' "$summary")
    if [ "$status" = interrupted ] && [ -z "${cancelled:-}" ]; then
        echo "interrupted after a checkpoint was saved: back into the queue"
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
fi
exit "$code"
