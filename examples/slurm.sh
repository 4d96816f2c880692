#!/bin/bash
# sbatch --nodes 2 --gpus-per-node 8 examples/slurm.sh train_ltx.py --config configs/ltx/13b_lora.yaml \
#     --data.train /shared/clips --output_dir /shared/runs/one
# CONFIG=configs/accelerate/zero2.yaml sbatch ... launches another of configs/accelerate.
# output_dir and data.cache_dir must be on a file system that all nodes share.
#SBATCH --job-name=reeltune
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600
set -euo pipefail

export CONFIG=${CONFIG:-configs/accelerate/multi_node.yaml}
export GPUS=${SLURM_GPUS_ON_NODE:-8}
export HOST PORT=${PORT:-29500}
HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
HOST=${HOST%%$'\n'*}  # the first of them
# After Slurm's TERM: time for the step in hand and for the checkpoint (30 s otherwise).
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-500}

# One launcher per node: SLURM_NODEID is known only inside srun, so a shell in it reads the variables.
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --config_file "$CONFIG" \
    --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * GPUS)) --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$HOST" --main_process_port "$PORT" "$@"' launch "$@"
