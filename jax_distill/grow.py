"""More text for a cache that is finished:

    python -m jax_distill.grow --config X.yaml --more FILE_OR_FOLDER

X.yaml is the configuration that the cache was made with, its data.path as it was: nothing that is
there is made again. The same teacher reads the new text, and `<cache.path>/train` gets its rows,
from a shard of their own on; they count once all of them are there, and until then the cache is
what it was. Re-run the same command to resume. `<cache.path>/heldout` stays, so that tables before
and after can be compared; documents of the new text that the hash holds out are left out.
"""

from collections.abc import Sequence
from dataclasses import replace

from jax_distill import data, processes, sharding
from jax_distill.base.command import CommandLine, above_zero, run_command
from jax_distill.base.console import say
from jax_distill.base.errors import UserError
from jax_distill.base.files import find_path
from jax_distill.cache import Cache, refuse_other_cache, resume_point
from jax_distill.config import Config, load
from jax_distill.teacher import load_teacher, write_cache
from jax_distill.teacher.caches import Plan, contexts, make_plan, text_rows
from jax_distill.teacher.rows import AppendedRows


def fingerprint_of(config: Config, plan: Plan, more: str, max_rows: int | None) -> str:
    """Of a growth: its text, and how many rows at most.

    Raises:
        UserError: it is the text that the cache was made from.
    """
    text, growth = (
        data.fingerprint(
            more, format=config.data.format, tokenizer=plan.tokenizer, settings=settings
        )
        for settings in ({}, {"max_rows": max_rows})
    )
    if text == plan.manifests["train"].data_fingerprint:
        raise UserError(
            f"expected other text than that of the cache at {config.cache.path}, got {more}; "
            "name new text"
        )
    return growth


def corpus_of(config: Config, plan: Plan, more: str) -> data.Corpus:
    """The new text, as the cache's own is read."""
    return data.Corpus(
        more,
        format=config.data.format,
        tokenizer=plan.tokenizer,
        heldout_fraction=config.data.heldout_fraction,
        holds_out_one=False,
    )


def grow(config: Config, more: str, *, max_rows: int | None = None) -> Cache:
    """The training cache with the rows of `more` behind its own, at most `max_rows` of them.

    Raises:
        UserError: no finished cache there, one of another configuration, or one that was made from
            this text; several processes; see also `write_cache`.
        RunError: a damaged cache.
    """
    if config.mesh.coordinator_address:
        raise UserError("expected one process to grow a cache, got a coordinator; start one alone")
    plan, path = make_plan(config), f"{config.cache.path}/train"
    manifest, cache = plan.manifests["train"], Cache.open(path)
    refuse_other_cache(path, cache.manifest, manifest)
    more = find_path(more)
    stamps = data.file_stamps(more, format=config.data.format)
    growth = fingerprint_of(config, plan, more, max_rows)
    begun = {each["data_fingerprint"]: each["rows"] for each in cache.head.growth}
    # Of a growth that is finished, what lacks a commit is written again.
    if growth not in begun or cache.complete:
        cache.require_complete()
    if growth in begun and cache.complete:
        say(f"cache: {path} has the rows of {more}")
        return cache

    corpus = corpus_of(config, plan, more)
    wanted = replace(manifest, data={**manifest.data, "max_rows": max_rows})
    start = None if growth in begun else resume_point(path, growth)
    rows = text_rows(config, plan._replace(stamps=stamps), corpus, "train", wanted, start)
    first_shard = -(-begun.get(growth, cache.layout.extent) // manifest.shard_rows)
    mesh, model = sharding.make_mesh(**config.mesh.axes), None
    sharding.check_rows(mesh, config.teacher.batch_size, "teacher.batch_size")
    if plan.teacher is not None and not config.teacher.is_live:
        model = load_teacher(plan.teacher.require_model(other="grow")[0], config, mesh)
    before = cache.rows
    cache = write_cache(
        path,
        manifest,
        AppendedRows(rows, first_shard, manifest.shard_rows, growth),
        model=model,
        mesh=mesh,
        batch_size=config.teacher.batch_size,
        chunk_size=config.loss.chunk_size,
        growth=None if growth in begun else growth,
    )
    cache.require_complete()
    say(f"text: {corpus.counts}")
    for name, limit in contexts(config, plan).items():
        data.check_context(rows.beyond[name], limit, name)
    say(f"cache: {path} has grown from {before:,} to {cache.rows:,} rows, {cache.tokens:,} tokens")
    return cache


def main(argv: Sequence[str]) -> None:
    """The command line above; all options of a configuration besides."""
    parser = CommandLine("jax_distill.grow", description=__doc__, add_help=False)
    parser.add_argument("--more", help="text as data.path has it, in the same format")
    parser.add_argument("--rows", type=above_zero, help="at most so many (all)")
    options, rest = parser.parse_known_args(argv)
    if {"--help", "-h"} & set(rest):
        parser.print_help()
    config = load(rest, "jax_distill.grow")
    if not options.more:
        raise UserError("expected --more FILE_OR_FOLDER with new text, got none; name it")
    with processes.started(**config.mesh.processes):
        grow(config, options.more, max_rows=options.rows)


if __name__ == "__main__":
    run_command(main)
