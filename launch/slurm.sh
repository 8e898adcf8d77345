#!/usr/bin/env bash
# Trains over several nodes of a Slurm cluster: one torchrun on each node, which starts a process for each of its GPUs.
#
#   sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh CONFIG [key=value ...]
#
#   sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh configs/own/base.yaml \
#     run.output_dir=/shared/runs parallel.tensor=4 parallel.expert=8
#
#   PROCESSES=4 sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh configs/own/base.yaml run.output_dir=/shared/runs \
#     'rollout.engine={name: sglang, servers: {nodes: all, host: node, tensor: 4, expert: 4, first_gpu: 4}}' \
#     'weight_sync.transport={name: distributed, address: node}' parallel.expert=8
#
# Submit it from the repository; account, partition and a longer --time belong on the command line of sbatch, which wins
# over the lines below. PYTHON chooses the interpreter (.venv/bin/python by default); it must be there on every node, and
# so must the model, the data and run.output_dir (a shared file system).
#
#SBATCH --job-name=moerl
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
# Ten minutes before the time is over the batch script is sent SIGTERM, and hands it on: the step is finished and saved.
#SBATCH --signal=B:TERM@600
# One task per node: torchrun starts the processes, so Slurm must not start one for each GPU as well. --exclusive gives the
# task all cores; without it, ask for --cpus-per-task.
set -uo pipefail

if [ $# -lt 1 ] || [ -z "${SLURM_JOB_ID:-}" ]; then
  echo "usage: sbatch --nodes NODES --gpus-per-node GPUS launch/slurm.sh CONFIG [key=value ...]" >&2
  exit 2
fi

# Slurm runs a copy of this file, so the repository is where sbatch was called.
root=$SLURM_SUBMIT_DIR
python=${PYTHON:-$root/.venv/bin/python}

# What a node has: its GPUs as Slurm counts them (`8`, `h100:8`), or as many as it shows. PROCESSES starts fewer processes,
# on the first GPUs of each node; the rest is for servers (rollout.engine.servers.first_gpu, nodes: all).
gpus=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-$(nvidia-smi --list-gpus | wc -l)}}
gpus=${PROCESSES:-${gpus##*:}}

# Where the processes meet: the first node of the job, at a port that two jobs of one day are unlikely to share. c10d is a
# store inside torchrun; whichever torchrun runs on that host opens it, so that no rank of a node need be given.
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

# Each process has its share of the cores, for tokenizing, packing and verifiers. srun is told of all of them: by itself it
# would bind the one task of a node to one core.
cores=${SLURM_CPUS_ON_NODE:-$(getconf _NPROCESSORS_ONLN)}
threads=$((cores / gpus > 0 ? cores / gpus : 1))
export OMP_NUM_THREADS=$threads

# Two settings that clusters often need, both off here: the network of the rendezvous and of gloo (team.py), and of NCCL.
#   export GLOO_SOCKET_IFNAME=ib0
#   export NCCL_SOCKET_IFNAME=ib0

# A rank that fails ends its torchrun, --kill-on-bad-exit the others, and no torchrun starts the run again by itself
# (--max-restarts 0): submit the same command, which goes on from the last complete checkpoint.
# --shutdown-timeout must be longer than a step and a checkpoint take: until then torchrun waits for its processes.
srun --kill-on-bad-exit=1 --ntasks-per-node=1 --cpus-per-task="$cores" \
  "$python" -m torch.distributed.run \
  --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$gpus" --max-restarts 0 --shutdown-timeout 540 \
  --rdzv-backend c10d --rdzv-endpoint "$host:$port" --rdzv-id "$SLURM_JOB_ID" \
  -m moerl train "$@" "run.num_threads=$threads" &
step=$!
trap 'kill -s TERM "$step" 2> /dev/null' TERM

# `wait` returns early when the signal comes; the run ends by itself some time later, with 130.
while :; do
  wait "$step"
  status=$?
  kill -0 "$step" 2> /dev/null || break
done
exit "$status"
