"""The top-K store: rows of tokens, and at each position what the teacher said of the next token.

N rows, B rows of a batch, T positions of a row, K stored tokens, S temperatures, V vocabulary.

A store is one folder of TensorStore zarr3 arrays, a `manifest.json` that never changes, and
`commits/<shard>.json`. A shard is `shard_rows` whole rows, one file in each array; it counts only
once its commit exists, and that is written after the data is flushed to disk.

    tokens            [N,T]    int32
    segment_ids       [N,T]    int32    documents of a row from 1 on; 0 is padding
    positions         [N,T]    int32    rotary positions, from 0 in each document
    loss_mask         [N,T]    uint8    1 iff predicting tokens[t+1] from position t counts
    teacher_indices   [N,T,K]  uint16 (V <= 65536) or uint32; by value descending, ties by id
    teacher_count     [N,T]    uint16   how many of the K are real; no id has a special meaning
    teacher_gaps      [N,T,K]  float16  largest logit - logit
    teacher_log_z     [N,T,S]  float32  logsumexp(z/τ) - max(z)/τ, nats
    teacher_log_tail  [N,T,S]  float32  log of the probability outside the K, nats

Padding has count 0 and the whole probability in the tail. A store with top_k 0 has no teacher
arrays: its rows serve training with the cross-entropy alone.
"""

from jax_distill.cache.arrays import shard_file
from jax_distill.cache.manifest import Manifest, refuse_other_store
from jax_distill.cache.reader import Store, vocabulary_conflict
from jax_distill.cache.writer import Writer, create

__all__ = [
    "Manifest",
    "Store",
    "Writer",
    "create",
    "refuse_other_store",
    "shard_file",
    "vocabulary_conflict",
]
