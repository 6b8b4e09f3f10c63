"""The held-out text of each source of a mixture, to measure models on it apart."""

from dataclasses import replace
from pathlib import Path

from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.cache import Cache
from jax_distill.config import Config
from jax_distill.teacher.caches import tokenizer_folder, write_caches


def source_caches(config: Config, teacher_folder: Path | None) -> dict[str, Cache]:
    """Path of each source of `data.path` → its held-out rows, at most `data.max_heldout_rows`; {}
    where there are not two sources.

    A row of the mixture may hold documents of several sources, so each source's are packed into
    rows of their own, without targets, below `<cache.path>/by_source`. They are the source's own
    held-out documents, the mixture's among them (with weights it takes a share of them), since a
    hash of each one decides; those by which checkpoints are compared are among them, too. A
    paragraph that repeats one of another source is left out in the mixture alone. A source that
    cannot be read, or has nothing held out, is left out, and one line says so.
    """
    sources = config.data.path
    if isinstance(sources, str) or len(sources) < 2:
        return {}
    # A tokenizer that was trained is the mixture's.
    tokenizer = str(tokenizer_folder(config, teacher_folder))
    cache = replace(config.cache, sampling="top_k", top_p=None, read_top_k=None, hidden_layers=0)
    found = {}
    for number, source in enumerate(sources):
        own = replace(
            config,
            teacher=replace(config.teacher, mode="online"),
            data=replace(config.data, path=source.path, tokenizer=tokenizer, max_rows=1),
            cache=replace(cache, path=f"{config.cache.path}/by_source/{number}"),
        )
        try:
            _, heldout = write_caches(own)
        except UserError as error:
            say(f"no test table of {source.path} alone: {error}")
            continue
        found[source.path] = heldout
    return found
