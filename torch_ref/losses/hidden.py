"""The distance between layers' outputs of student and teacher, from the formula.

B rows, T positions, D the student's width, D' the teacher's, P pairs of layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from jax_distill.objective import HiddenObjective


def hidden_sum(
    student: Sequence[Tensor],
    teacher: Tensor,
    mask: Tensor,
    projection: Tensor | None,
    objective: HiddenObjective,
) -> Tensor:
    """Σ_valid (1/P) Σ_i d(W_i·h_i, h'_i), a float32 scalar without the term's weight.

    Args:
        student: P times [B,T,D]. teacher: [B,T,P,D'], constant.
        mask: bool [B,T]; what a masked cell holds is not used.
        projection: W [P,D',D], whose matmul is in the student's dtype; None where D' = D.
    """
    total = torch.zeros((), device=mask.device)
    for index, states in enumerate(student):
        a, b = states[mask], teacher[..., index, :][mask].float()
        if projection is not None:
            a = a @ projection[index].to(a.dtype).T
        a = a.float()
        if objective.kind == "mse":
            distance = (a - b).square().mean(-1)
        else:
            distance = 1 - torch.nn.functional.cosine_similarity(a, b, dim=-1, eps=1e-15)
        total = total + distance.sum()
    return total / len(student)
