#!/usr/bin/env bash
# The loss on a real GPU: right against float64, time and peak of every implementation and of
# torch_ref's, planned against measured. At most 6 minutes on one H200.
#   .ci/gpu_check.sh          writes $OUT/gpu_check_jax.json, $OUT/gpu_check_torch_N.json (OUT: .)
#   .ci/gpu_check.sh --toy    the same on a CPU, small
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-.}
python=${PYTHON:-python3}

if [ "${1:-}" = "--toy" ]; then
  size="--tokens 32,64 --hidden 32 --vocab 1024 --top_k 16 --chunk_size 8,16 --dtype float32"
  torch_runs=("$size")
else
  size="--chunk_size 1024,2048,4096"
  torch_runs=("--tokens 8192,32768 $size"
    "--tokens 262144 --implementation fused_chunked,fused $size --repeats 1")
fi

# JAX keeps 75 % of a card by default; what fits is to be found out.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.95}
timeout 230 "$python" -m jax_distill.bench gpu_check "$@" --json "$out/gpu_check_jax.json"

part=0
for options in "${torch_runs[@]}"; do  # after JAX has let the card go
  part=$((part + 1))
  # shellcheck disable=SC2086
  timeout 65 "$python" -m torch_ref.head $options --json "$out/gpu_check_torch_$part.json"
done
