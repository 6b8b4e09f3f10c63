"""What a teacher's hidden states become: the K largest logits of each position, their normalizers
and the tail. The teacher's pass puts them into a cache (teacher/), a step beside a live teacher
reads them at once (training/)."""

from jax_distill.targets.capture import batch_targets, capture, topk_targets
from jax_distill.targets.topk import grouped_top_k

__all__ = ["batch_targets", "capture", "grouped_top_k", "topk_targets"]
