"""Measurements: `python -m jax_distill.bench head | peers | gpu_check | step`, each with --help."""

MATMULS = {"dense": 3, "forward_chunked": 3, "fused_chunked": 4, "fused": 3, "kl_and_grads": 3}
"""Matmuls of T·D·V that each of our losses makes: the logits, d_hidden, d_weight, and logits
recomputed. `kl_and_grads` is the core of `fused`, hidden donated."""
CPU_FLOPS = 2e13
"""More than this on a CPU takes minutes to hours: refused."""
