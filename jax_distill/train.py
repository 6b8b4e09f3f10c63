"""`python -m jax_distill.train --config configs/x.yaml`: from a teacher to a distilled student.

The command alone: `distil.py` has the stages, `fit.py` the loop, `sweep.py` what `--sweep` does.
Re-run it to resume.
"""

import sys
from functools import partial

from jax_distill.base.command import run_command
from jax_distill.config import run_configured
from jax_distill.sweep import sweep

if __name__ == "__main__":
    if "--sweep" in sys.argv:
        run_command(partial(sweep, "jax_distill.train"))
    run_configured("jax_distill.train", "jax_distill.distil")
