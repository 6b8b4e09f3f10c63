"""The top-K cache: rows of tokens, and at each position the teacher's distribution of the next one.

docs/CACHE.md is the format: arrays, manifest, commits, heads, checks, version policy.

    tokens, segment_ids, positions   [N,T]    int32
    loss_mask                        [N,T]    uint8
    teacher_indices                  [N,T,K]  uint16 or uint32
    teacher_count                    [N,T]    uint16
    teacher_gaps                     [N,T,K]  float16
    teacher_log_z, teacher_log_tail  [N,T,S]  float32

In the files, ids and gaps have the form of `coding`. N rows, B rows of a batch, T positions of a
row, K stored tokens, S temperatures, V vocabulary.
`location` is the only module that knows where these lie. Needs neither jax nor torch.
"""

from jax_distill.cache.arrays import metadata_key, shard_file
from jax_distill.cache.documents import (
    Commit,
    Head,
    commit_key,
    head_key,
    read_manifest,
    resume_point,
)
from jax_distill.cache.draws import row_uniforms
from jax_distill.cache.fingerprint import (
    teacher_fingerprint,
    vocabulary_conflict,
    vocabulary_fingerprint,
)
from jax_distill.cache.heldout import (
    CALIBRATION_BINS,
    check_targets,
    table_of,
    table_rows,
    validation_rows,
)
from jax_distill.cache.location import Location
from jax_distill.cache.manifest import Manifest, refuse_other_cache
from jax_distill.cache.reader import Cache
from jax_distill.cache.verdict import Verdict, judge
from jax_distill.cache.writer import Writer, create

__all__ = [
    "CALIBRATION_BINS",
    "Cache",
    "Commit",
    "Head",
    "Location",
    "Manifest",
    "Verdict",
    "Writer",
    "check_targets",
    "commit_key",
    "create",
    "head_key",
    "judge",
    "metadata_key",
    "read_manifest",
    "refuse_other_cache",
    "resume_point",
    "row_uniforms",
    "shard_file",
    "table_of",
    "table_rows",
    "teacher_fingerprint",
    "validation_rows",
    "vocabulary_conflict",
    "vocabulary_fingerprint",
]
