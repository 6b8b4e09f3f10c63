#!/usr/bin/env bash
# What a GPU must show before it is believed, in at most 6 minutes on one H200:
#   1. loss, attention and experts right against float64; time and peak of every loss at 8K and 256K
#      tokens, planned beside measured                                          at most 150 s
#   2. 50 fp32 steps of the quickstart, JAX against torch                       at most 80 s
#   3. one 8K step of the 3.2B student, planned beside measured                 at most 80 s
#   4. torch_ref's rows of the table of 1.                                      at most 45 s
# The limits add up to 355 s: a part that runs into its own is named, and the others run all the
# same; 1. and 4. write their rows as they come and begin none after their share of the time.
#   .ci/gpu_check.sh          writes $OUT/gpu_check_{jax,steps,torch}.json (OUT: .)
#   .ci/gpu_check.sh --toy    the same on a CPU, small, however long it takes
# Needs the package with its test extra: pip install '.[cuda13,test]'.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-.}
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"

size="--tokens 8192,262144 --chunk_size 2048"
student="--config configs/llama31_8b_to_3b_8k.yaml --train.batch_size 1"
rows="--train.batch_size 8 --data.max_rows 400"
limits=(150 80 80 45)
if [ "${1:-}" = "--toy" ]; then
    size="--tokens 32,64 --hidden_size 32 --vocab_size 1024 --top_k 16 --chunk_size 16 --dtype float32"
    student="--config configs/quickstart.yaml --data.sequence_length 16 --train.batch_size 2"
    rows="--data.sequence_length 32 --train.batch_size 2 --data.max_rows 100"
    limits=(3000 3000 3000 3000)
fi

failed=()
part() {  # name, seconds, command …
    local name=$1 seconds=$2 code=0
    shift 2
    timeout "$seconds" "$@" || code=$?
    if [ "$code" -ne 0 ]; then failed+=("$name (exit $code)"); fi
    echo "gpu_check: $name ended after $SECONDS s, exit $code"
}

# JAX keeps 75 % of a card by default; what fits is to be found out.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.95}
part "loss, attention and experts" "${limits[0]}" "$python" -m jax_distill.bench.gpu_check "$@" \
    --seconds $((limits[0] - 30)) --json "$out/gpu_check_jax.json"

compare() {
    # shellcheck disable=SC2206
    local options=(--config configs/quickstart.yaml $rows --train.steps 50 --train.log_every 1
        --data.max_heldout_rows 8 --train.ce_baseline false --train.eval_every null
        --train.save_every null --cache.path "$work/cache")
    JAX_DEFAULT_MATMUL_PRECISION=highest "$python" -m jax_distill.train "${options[@]}" \
        --output_dir "$work/jax" >"$work/log" 2>&1 || { tail -n 5 "$work/log"; return 1; }
    "$python" -m torch_ref.train "${options[@]}" \
        --output_dir "$work/torch" >"$work/log" 2>&1 || { tail -n 5 "$work/log"; return 1; }
    "$python" .ci/check_compare.py "$work/jax" "$work/torch" 1e-4
}
export -f compare
export python work rows
part "50 steps, JAX against torch" "${limits[1]}" bash -c compare

# shellcheck disable=SC2086
part "one step" "${limits[2]}" "$python" -m jax_distill.bench step $student --in_process \
    --setups fused --steps 1 --json "$out/gpu_check_steps.json"
"$python" - "$out/gpu_check_steps.json" <<'EOF' || failed+=("one step: no row")
import json, sys
(row,) = json.load(open(sys.argv[1], encoding="utf-8"))
print("one step of {batch_size} × {sequence_length} on {device}: {seconds:.2f} s, peak "
      "{peak_bytes} bytes, planned {planned_bytes}".format(**row))
EOF

# After JAX has let the card go. The allocator's own choice fragments at the longest length.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# shellcheck disable=SC2086
part "torch_ref's losses" "${limits[3]}" "$python" -m torch_ref.head $size --repeats 2 \
    --seconds $((limits[3] - 15)) --json "$out/gpu_check_torch.json"
if [ ${#failed[@]} -gt 0 ]; then
    printf 'gpu_check: failed: %s\n' "${failed[@]}"
    exit 1
fi
echo "gpu_check: right, in $SECONDS s; rows in $out/gpu_check_{jax,steps,torch}.json"
