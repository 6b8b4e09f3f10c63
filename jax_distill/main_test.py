"""The console script: every command is found, and what needs no JAX does without it."""

import subprocess
import sys

import pytest

from jax_distill import __main__ as console
from jax_distill.base.errors import UserError
from jax_distill.base.files import find_path
from jax_distill.config import field_names, load


@pytest.mark.filterwarnings("ignore:.* found in sys.modules")  # another test imported it
@pytest.mark.parametrize("name", console.COMMANDS)
def test_each_command_shows_its_help(name, capsys, monkeypatch):
    with pytest.raises(SystemExit) as end:
        console.main([name, "--help"])
    assert end.value.code == 0
    assert "usage" in capsys.readouterr().out


@pytest.mark.parametrize("case", console.CASES)
def test_init_copies_a_configuration_that_loads_and_writes_over_nothing(case, tmp_path):
    console.main(["init", str(tmp_path / "new"), "--case", case])
    file = tmp_path / f"new/{case}.yaml"
    assert load(["--config", str(file)], "jax_distill.train").output_dir
    with pytest.raises(UserError, match="expected no file"):
        console.main(["init", str(tmp_path / "new"), "--case", case])


def test_a_command_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="got 'trian'; the nearest is train"):
        console.main(["trian"])


def test_bash_completes_commands_options_and_files(tmp_path, capsys):
    """In a real bash, with `compgen` and all."""
    console.main(["completion", "bash"])
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "x.yaml").touch()

    def completed(*words: str) -> list[str]:
        lines = f"""cd {tmp_path}; source {script}
        COMP_WORDS=(jax-distill {" ".join(map(repr, words))}); COMP_CWORD={len(words)}
        _jax_distill; printf '%s\\n' "${{COMPREPLY[@]}}" """
        command = ["bash", "-c", lines]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    assert completed("") == [*console.COMMANDS, *console.OWN]
    assert completed("tr") == ["train"]
    assert completed("train", "--loss.temp") == ["--loss.temperature"]
    assert completed("train", "--") == ["--config", *(f"--{key}" for key in field_names())]
    assert completed("audit", "x") == ["x.yaml"]


def test_neither_usage_nor_init_imports_jax(tmp_path):
    code = f"""
import sys
from jax_distill.__main__ import main
main([]); main(["init", {str(tmp_path)!r}]); main(["completion", "bash"]); main(["--version"])
assert not {{"jax", "torch", "tensorstore"}} & set(sys.modules)
"""
    assert find_path("configs/quickstart.yaml")
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
