"""Run the README's fenced shell commands, in order, as a reader would.

```bash            runs as it stands
```bash long       runs with 2 steps and few, short rows (a command of more than 5 minutes)
```bash needs-gpu  (or needs-hub, needs-cluster, needs-bucket, planned) is shown and not run here;
                   the options of training commands are read
"""

import re
import subprocess
import sys
import time
from pathlib import Path

FENCE = re.compile(r"^```(?:bash|sh)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TRAINING = re.compile(r"^python -m jax_distill\.train (?:.*\\\n)*.*", re.MULTILINE)
SHORT = "--train.steps 2 --data.sequence_length 128 --data.max_rows 8 --data.max_heldout_rows 2"
NOT_HERE = {"needs-gpu", "needs-hub", "needs-cluster", "needs-bucket", "planned"}


def main() -> int:
    readme = Path("README.md").read_text("utf-8")
    blocks = FENCE.findall(readme)
    if len(blocks) != len(re.findall(r"^```(?:bash|sh)", readme, re.MULTILINE)) or not blocks:
        print("README.md: a shell fence is not closed, or there is none")
        return 1
    for info, commands in blocks:
        words = set(info.split())
        if words - NOT_HERE - {"long"}:
            print(f"README.md: unknown mark on a fence: {info}")
            return 1
        if words & NOT_HERE:
            print(f"-- not here ({info.strip()}):\n{commands}", flush=True)
            for command in TRAINING.findall(commands):
                subprocess.run(f"{command} --print_config > /dev/null", shell=True, check=True)
            continue
        if "long" in words:
            commands = re.sub(r"(--config \S+)", rf"\1 {SHORT}", commands)
        print(f"-- {commands.strip()}", flush=True)
        begin = time.monotonic()
        result = subprocess.run(["bash", "-euo", "pipefail", "-c", commands])
        print(f"-- exit {result.returncode} after {time.monotonic() - begin:.0f} s", flush=True)
        if result.returncode:
            return result.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
