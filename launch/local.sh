#!/usr/bin/env bash
# Trains in several processes on this machine: torchrun over loopback, cores shared out evenly.
set -uo pipefail

usage() {
  cat <<'TEXT'
launch/local.sh PROCESSES CONFIG [key=value ...]     (PYTHON chooses the interpreter, .venv/bin/python by default)

  launch/local.sh 4 configs/demo/gspo.yaml parallel.tensor=2 parallel.expert=2

Data parallelism is what PROCESSES leaves of the other axes. Ctrl-C finishes the step, saves, and exits with 130; a second
one stops at once. The same command goes on from the last complete checkpoint. A rank that dies or hangs ends the run.
TEXT
}

case "${1:-}" in
  -h | --help) usage; exit 0 ;;
  '' | *[!0-9]* | 0) usage >&2; exit 2 ;;
esac
[ $# -ge 2 ] || { usage >&2; exit 2; }

processes=$1
shift
cores=$(getconf _NPROCESSORS_ONLN)
threads=$((cores / processes > 0 ? cores / processes : 1))
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v "$python" || command -v python3)

export OMP_NUM_THREADS=$threads
if ! command -v nvidia-smi > /dev/null; then
  export GLOO_SOCKET_IFNAME=lo
fi

interrupted=0
forward() {
  interrupted=1
  kill -s "$1" "$launcher" 2> /dev/null
}
# In a session of its own, so that a Ctrl-C reaches torchrun once, from here; it hands it to every rank.
setsid "$python" -m torch.distributed.run --standalone --nproc-per-node "$processes" --shutdown-timeout 3600 \
  -m moerl train "$@" "run.num_threads=$threads" &
launcher=$!
trap 'forward INT' INT
trap 'forward TERM' TERM

status=0
while kill -0 "$launcher" 2> /dev/null; do
  wait "$launcher"
  status=$?
done
[ "$interrupted" = 0 ] || exit 130
exit "$status"
