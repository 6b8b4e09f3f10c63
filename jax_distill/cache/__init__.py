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

The last two let log p_k = -gap/τ - log_z be moved until Σ p_k = 1 - p_t, which takes out most of
what float16 did: 1e-7 nats of KL per token are left (largest single log p_k off by 4e-3).

Size: 285 bytes a token at K=100, V=49,152, T=512 (SmolLM2-135M in fp32 on `builtin:pydoc_topics`;
ids 173, gaps 99, log_z and log_tail 7, the rows 6): 14 bits an id and 8 a gap, where the order-0
entropies are 11.3 and, of the differences between gaps, 5.4. Tried: zstd level 22 (clevel 9) saves
8 bytes and takes 2.5 × the time; clevel 5 costs 16 bytes; bitshuffle, transposed [K,T] and plain
zstd are larger; gaps rounded to 1/64 save 30 bytes and cost 4e-6 nats, which is not worth it.

    python -m jax_distill.teacher --config configs/smollm2.yaml --data.path builtin:pydoc_topics \
        --data.sequence_length 512 --teacher.dtype float32 --cache.path store
    python -m jax_distill.audit store

Padding has count 0 and the whole probability in the tail. A store with top_k 0 has no teacher
arrays: its rows serve training with the cross-entropy alone.
"""

from jax_distill.cache.arrays import commit_key, read_manifest, shard_file
from jax_distill.cache.fingerprint import teacher_fingerprint
from jax_distill.cache.manifest import Manifest, refuse_other_store
from jax_distill.cache.reader import Store, vocabulary_conflict
from jax_distill.cache.writer import Writer, create

__all__ = [
    "Manifest",
    "Store",
    "Writer",
    "commit_key",
    "create",
    "read_manifest",
    "refuse_other_store",
    "shard_file",
    "teacher_fingerprint",
    "vocabulary_conflict",
]
