"""A model folder to the Hugging Face hub (extra `hub`)."""

import importlib.util
from pathlib import Path

from jax_distill.base.errors import RunError, UserError
from jax_distill.base.json_object import one_line
from jax_distill.hf.folder import HUB_ID


def check_repo(repo: str) -> None:
    """Refuse, before any work, what is no hub id, or a missing package.

    Raises:
        UserError: either.
    """
    # The hub's own rules: 96 characters, no -- or .., no .git at the end.
    wrong = any(part in repo for part in ("--", "..")) or repo.endswith((".git", "-", "."))
    if not HUB_ID.fullmatch(repo) or wrong or len(repo) > 96:
        raise UserError(f"expected a hub id owner/name for --push, got {repo[:100]!r}; correct it")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise UserError(
            f"expected the package huggingface_hub for --push {repo}, got none; "
            "pip install 'jax-distill[hub]'"
        )


def push_folder(folder: Path, repo: str) -> str:
    """Upload all files of the folder in one commit → its address. A repository that does not exist
    is made, private. The token is huggingface_hub's: HF_TOKEN, or `hf auth login`.

    Raises:
        RunError: no token, no right, no connection; what is at `folder` stays.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(repo, private=True, exist_ok=True)
        done = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="A new export")
    except Exception as error:  # every network and hub failure ends in the same one line
        raise RunError(
            f"expected to push {folder} to {repo}, got {type(error).__name__}: {one_line(error)}; "
            f"the folder is written: hf auth login, then hf upload {repo} {folder}"
        ) from error
    return str(done.commit_url)
