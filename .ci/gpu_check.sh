#!/usr/bin/env bash
# The loss on a real GPU: right against float64, time and peak of every implementation and of
# torch_ref's at 8K, 32K and 256K tokens, planned beside measured. At most 6 minutes on one H200:
# every part writes its rows as they come and begins none after its share of the time.
#   .ci/gpu_check.sh          writes $OUT/gpu_check_jax.json and $OUT/gpu_check_torch.json (OUT: .)
#   .ci/gpu_check.sh --toy    the same on a CPU, small
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-.}
python=${PYTHON:-python3}

size="--tokens 8192,32768,262144 --chunk_size 1024,2048,4096"
if [ "${1:-}" = "--toy" ]; then
  size="--tokens 32,64 --hidden 32 --vocab 1024 --top_k 16 --chunk_size 8,16 --dtype float32"
fi

# JAX keeps 75 % of a card by default; what fits is to be found out.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.95}
timeout 250 "$python" -m jax_distill.bench.gpu_check "$@" --seconds 200 \
    --json "$out/gpu_check_jax.json"

# After JAX has let the card go. The allocator's own choice fragments at the longest length.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# shellcheck disable=SC2086
timeout 105 "$python" -m torch_ref.head $size --repeats 2 --seconds 75 \
    --json "$out/gpu_check_torch.json"
echo "gpu_check: right, in $SECONDS s; rows in $out/gpu_check_jax.json, $out/gpu_check_torch.json"
