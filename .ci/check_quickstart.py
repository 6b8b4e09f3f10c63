"""The quickstart's promise: the distilled student beats the CE-only one in KL, cross-entropy and
acceptance rate."""

import json
import sys
from pathlib import Path


def main(path: str) -> int:
    summary = json.loads(Path(path).read_text("utf-8"))
    student, baseline = summary["test"]["student"], summary["test"]["ce_baseline"]
    small = summary["student_parameters"] * 2 < summary["teacher_parameters"]
    better = all(student[key] < baseline[key] for key in ("kl", "cross_entropy"))
    better &= student["acceptance_rate"] > baseline["acceptance_rate"]
    print(f"quickstart: student {student}, CE-only {baseline}, {summary['seconds']:.0f} s")
    return 0 if better and small else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
