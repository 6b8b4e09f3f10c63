"""What a training loss computes (`Objective`), how (`Execution`), and what it returns.

JAX and PyTorch read them alike: the standard library only, and `ValueError` for what means nothing.
The temperature is not here: it comes with the targets (`batch.TopK`), so that targets read at one
temperature cannot be scored at another.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

TAILS = ("bucket", "renormalize", "truncate", "ignore")
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
HIDDEN_KINDS = ("cosine", "mse")
IMPLEMENTATIONS = ("dense", "forward_chunked", "fused_chunked", "fused")
LOG_FLOOR = -100.0
"""log p of an outcome that the teacher gives no probability, where log p itself is needed (reverse
KL). e^−100 is below fp32's smallest normal number: what lies lower is a zero in fp32."""


@dataclass(frozen=True)
class Objective:
    """The loss of one token: kl_weight·τ²·divergence + ce_weight·CE + z_loss_weight·lse(z)², nats.

    Attributes:
        tail: what represents the probability outside the K:
            `bucket` Σ p_k log(p_k/q_k) + p_t log(p_t/q_t), 0 only at agreement;
            `renormalize` KL(p/P ‖ q) with P = Σ p_k;
            `truncate` Σ p_k log(p_k/q_k), which can be negative and is not clamped;
            `ignore` both sides renormalized over the K: blind outside K, identically 0 at K = 1.
            It has nothing to say where nothing is outside: a live teacher, ids drawn at random.
        divergence: over the K outcomes and the tail. `forward_kl` Σ p log(p/q); `reverse_kl`
            Σ q log(q/p) with log p floored at LOG_FLOOR; `jsd` β Σ p log(p/m) + (1−β) Σ q log(q/m)
            with m = β p + (1−β) q (GKD, arXiv 2306.13649).
        jsd_beta: β, the teacher's weight in the mixture, in (0, 1).
        kl_weight: of the divergence, which is at the targets' temperature.
        ce_weight: of the cross-entropy against the labels, at temperature 1.
        z_loss_weight: of the squared log-normalizer, at temperature 1.

    Raises:
        ValueError: a name or a number that means nothing.
    """

    tail: str = "bucket"
    divergence: str = "forward_kl"
    jsd_beta: float = 0.5
    kl_weight: float = 1.0
    ce_weight: float = 0.0
    z_loss_weight: float = 0.0

    def __post_init__(self) -> None:
        _check_name("tail", self.tail, TAILS)
        _check_name("divergence", self.divergence, DIVERGENCES)
        if not 0.0 < self.jsd_beta < 1.0:
            raise ValueError(
                f"expected 0 < jsd_beta < 1, got {self.jsd_beta}; "
                "use divergence forward_kl or reverse_kl for the ends"
            )


Pair = tuple[int, int]


@dataclass(frozen=True)
class HiddenObjective:
    """The hidden-state term of one token: weight · mean over pairs of d(W_i·h_i, h'_i), where h_i
    and h'_i are the outputs of a student's and a teacher's layer and W_i projects from one width to
    the other (nothing where they are equal).

    Attributes:
        pairs: (student's layer, teacher's layer), 0 is the first; no layer twice.
        kind: `cosine` d(a, b) = 1 − a·b/(|a||b|); `mse` the mean of (a − b)² over the width.
        weight: of the term.

    Raises:
        ValueError: an unknown kind, no pairs, a layer that occurs twice.
    """

    pairs: tuple[Pair, ...]
    kind: str = "cosine"
    weight: float = 1.0

    def __post_init__(self) -> None:
        _check_name("kind", self.kind, HIDDEN_KINDS)
        for layers in (self.student_layers, self.teacher_layers):
            if not layers or len(set(layers)) != len(layers):
                raise ValueError(f"expected pairs of different layers, got {self.pairs}")

    @property
    def student_layers(self) -> tuple[int, ...]:
        """The student's layer of each pair."""
        return tuple(ours for ours, _ in self.pairs)

    @property
    def teacher_layers(self) -> tuple[int, ...]:
        """The teacher's layer of each pair."""
        return tuple(theirs for _, theirs in self.pairs)


class RowLayout(Protocol):
    """What `Execution` knows of a `losses.Layout`."""

    @property
    def row_shards(self) -> int: ...


@dataclass(frozen=True)
class Execution:
    """How the loss is computed; changes no result beyond rounding.

    Attributes:
        implementation: `dense` (the definition, [B,T,V] at once), `forward_chunked` (keeps the
            logits of every chunk), `fused_chunked` (recomputes them: the paper's method) or
            `fused` (computes the gradients in the forward: three matmuls, one chunk).
        chunk_size: C, tokens of one device in one chunk: the chunk's logits are [C,V] there,
            whatever the batch. A chunk takes C // (rows per device) positions of each row, at
            least one.
        gradient_chunks: of `fused` in JAX: chunks whose dlogits [C,V] are kept, in hidden's dtype,
            for one matmul of each gradient; of one chunk at a time there are fp32 logits.
        valid_first: sort each row's valid positions to the front and skip chunks without any; pays
            where much is masked (chat data).
        row_shards: devices over which the compiler splits the rows of a batch.
        layout: a `losses.Layout`, to split `fused` over a mesh explicitly, rows over its row_shards
            devices; None leaves the partitioning to the compiler.

    Raises:
        ValueError: an unknown implementation, a chunk_size, gradient_chunks or row_shards below 1,
            a row_shards that is not the layout's.
    """

    implementation: str = "fused"
    chunk_size: int = 1024
    gradient_chunks: int = 1
    valid_first: bool = False
    row_shards: int = 1
    layout: "RowLayout | None" = None

    def __post_init__(self) -> None:
        _check_name("implementation", self.implementation, IMPLEMENTATIONS)
        for name in ("chunk_size", "gradient_chunks", "row_shards"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"expected {name} of at least 1, got {getattr(self, name)}; raise it"
                )
        if self.layout is None or self.row_shards == 1:
            return
        if self.row_shards != self.layout.row_shards:
            raise ValueError(
                f"expected row_shards {self.layout.row_shards}, the layout's, got "
                f"{self.row_shards}; leave it out beside a layout"
            )

    def positions_per_chunk(self, rows: int, length: int) -> int:
        """C, the positions of each row in one chunk, for a batch of `rows` rows of `length` tokens:
        each device holds rows / row_shards of them, a layout's where there is one."""
        shards = self.row_shards if self.layout is None else self.layout.row_shards
        return positions_per_chunk(self.chunk_size, -(-rows // shards), length)


class TokenValues(NamedTuple):
    """fp32 arrays or tensors [B,T], one number per token in nats, 0 where masked.

    Attributes:
        loss: kl_weight·τ²·kl + ce_weight·cross_entropy + z_loss_weight·z_loss; differentiable.
        kl: the objective's divergence at the targets' τ, without τ²; of ids drawn at random its
            estimate, which can be negative.
        cross_entropy: against the label, at τ = 1; +inf where the head lacks the label.
        z_loss: logsumexp(z)², at τ = 1.
        teacher_mass, student_mass: probability of the K stored tokens, at τ.
        top1_agreement: 1 where the teacher's most likely token (of those drawn) is the student's.

    What was not computed (kl and the three that need a teacher, where there is none) is NaN.
    """

    loss: Any
    kl: Any
    cross_entropy: Any
    z_loss: Any
    teacher_mass: Any
    student_mass: Any
    top1_agreement: Any


class LossSums(NamedTuple):
    """Scalars: the fields of `TokenValues` summed over the valid tokens, and their count.

    Divide by the count of the whole optimizer step. `loss` is differentiable; the others are
    metrics without gradient, NaN where they were not computed.
    """

    loss: Any
    kl: Any
    cross_entropy: Any
    z_loss: Any
    teacher_mass: Any
    student_mass: Any
    top1_agreement: Any
    count: Any  # type: ignore[assignment]


def positions_per_chunk(chunk_size: int, rows: int, length: int) -> int:
    """How many positions of each of a device's `rows` rows make a chunk of at most `chunk_size`
    tokens: at least 1, at most `length`."""
    return min(max(chunk_size // max(rows, 1), 1), length)


def _check_name(field: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"expected {field} in {known}, got {value!r}; choose one of them")
