"""What a model folder holds beside its weights, and when one may be written over: text files, the
spelling of config.json, model card, generation config. Both backends write it; no jax."""

import contextlib
import fnmatch
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from jax_distill.base.console import say
from jax_distill.base.errors import RunError, UserError
from jax_distill.base.files import check_writable
from jax_distill.base.json_object import one_line, read_json_object, token_ids
from jax_distill.data.tokenizer import Tokenizer

CE_ONLY = "CE-only student"

# What README.md says in the folders that `student` and `export` of either backend wrote, and what
# stands in them beside the text files of their source.
STUDENT_MARKS = ("cut by jax_distill", "cut by torch_ref")


EXPORT_MARKS = ("Trained with jax_distill", "unfinished run of jax_distill")


# What is copied into a student and an export: the tokenizer, how the model speaks and generates,
# the terms it came under. Nothing else: an adapter_config.json, for one, would break loading.
TERMS = "LICENSE* LICENCE* NOTICE* COPYING* USE_POLICY*".split()
GENERATION = "generation_config.json"
TEXT_FILES = """tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json
    vocab.json vocab.txt merges.txt tokenizer.model spiece.model sentencepiece.bpe.model
    *.tiktoken chat_template.jinja chat_template.json""".split()
TEXT_FILES += [GENERATION, *TERMS]
MODEL_FILES = ["README.md", "*.json", "*.jinja", "*.model", "*.safetensors", *TEXT_FILES]


def check_new_folder(
    out: Path, *, marks: Sequence[str], apart: Iterable[Path], names: Collection[str] = ()
) -> None:
    """Refuse, before any work, to write the model folder `out` where something would be lost.

    A free target does not exist, is empty, or was written by the same command: its README.md has
    one of `marks`, and beside it are only model files and files called as in `names`.

    Raises:
        UserError: `out` is not free, holds one of `apart` (what the command reads), is the
            working directory, or cannot be written.
    """
    target = out.resolve()
    for source in (Path.cwd(), *apart):
        source = source.resolve()
        if target == source or target in source.parents:
            raise UserError(
                f"expected a new folder to write, got {out}, which is or holds {source}; "
                "name another"
            )
    check_writable(target, "the folder to write")
    if not target.exists() or not any(target.iterdir()):
        return
    card = target / "README.md"
    text = card.read_text("utf-8", errors="replace") if card.is_file() else ""
    known = [*MODEL_FILES, *names]
    foreign = [
        entry.name
        for entry in sorted(target.iterdir())
        if entry.is_dir() or not any(fnmatch.fnmatchcase(entry.name, name) for name in known)
    ]
    if foreign or not any(mark in text for mark in marks):
        what = foreign[0] if foreign else "files that this command did not write"
        raise UserError(
            f"expected an empty folder, or one that this command wrote, got {out} with {what}; "
            "name another, or move it away"
        )


@contextlib.contextmanager
def new_folder(
    out: Path, *, marks: Sequence[str], apart: Iterable[Path], names: Collection[str] = ()
) -> Iterator[Path]:
    """A folder to fill that becomes `out` at the end, whole or not at all.

    Raises:
        UserError: see `check_new_folder`.
        RunError: the disk would not take it; what was at `out` is there as before.
    """
    check_new_folder(out, marks=marks, apart=apart, names=names)
    target = out.resolve()
    partial, old = (target.with_name(f".{target.name}.{end}") for end in ("partial", "old"))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # the second: Rust's own for a full disk
        raise RunError(
            f"expected to write {out}, got: {one_line(error)}; make room there, and run it again"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def kept_layers(
    depth: int, *, layers: Sequence[int] | None, parameters: int | None, layer: int, outside: int
) -> list[int]:
    """Which of a teacher's `depth` layers a student keeps: those named, or the most that fit into
    `parameters`, at `layer` parameters each beside `outside` others; then the ones that leave stand
    in the middle.

    The first and last layers matter most: on SmolLM2-135M dropping 6 of 30 in the middle starts at
    KL 0.98, keeping every third at 12.4.

    Raises:
        UserError: not exactly one of layers and parameters; a layer the teacher lacks; not even two
            layers fit (says the smallest size that does).
    """
    if (layers is None) == (parameters is None):
        raise UserError("expected one of student.from_teacher.layers and .parameters; set one")
    if layers is not None:
        if sorted(set(layers)) != list(layers) or not all(0 <= x < depth for x in layers):
            raise UserError(f"expected layers from 0 to {depth - 1}, rising, got {list(layers)}")
        return list(layers)
    assert parameters is not None
    keep = min((parameters - outside) // layer, depth)
    if keep < 2:
        raise UserError(
            f"expected student.from_teacher.parameters of {outside + 2 * layer:,} at least "
            f"(embeddings and two layers), got {parameters:,}"
        )
    first = (keep + 1) // 2
    return [*range(first), *range(depth - keep + first, depth)]


def _named_like(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def text_files(folder: Path) -> list[str]:
    """Names of what is copied of an HF folder besides weights and config.json (`TEXT_FILES`);
    nothing of what is no folder.

    Raises:
        UserError: one is a link to a file outside the folder, whose text would be published.
    """
    if not folder.is_dir():
        return []
    names = sorted(path.name for path in folder.iterdir() if _named_like(path.name, TEXT_FILES))
    names = [name for name in names if (folder / name).is_file()]
    for name in (*names, "config.json"):
        _check_inside(folder, name)
    return names


def _check_inside(folder: Path, name: str) -> None:
    """A folder of the hub's cache is all links, into `blobs` beside its `snapshots`."""
    real, root = (folder / name).resolve(), folder.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(each in real.parents for each in roots):
        raise UserError(
            f"expected {name} to be in {folder}, got a link to {real}; copy the file there"
        )


def copy_tokenizer(source: Path, out: Path) -> None:
    """The text files of an HF folder, unchanged."""
    for name in text_files(source):
        shutil.copyfile(source / name, out / name)


def collect_text_files(student: Path, text: Path, out: Path) -> None:
    """Put into `out` the text files that a student is exported with: its own; but where the
    tokenizer that made the training text (of the folder `text`) has other conventions, that one,
    so that the export ends and chats as the text does.

    Raises:
        UserError: the two differ so, and the student has tokens that the text's tokenizer lacks.
    """
    own, text_own = ((folder / "tokenizer.json").is_file() for folder in (student, text))
    source = student if own else text
    if own and text_own and student.resolve() != text.resolve():
        ours, theirs = Tokenizer.load(student), Tokenizer.load(text)
        if not _speak_alike(ours, theirs):
            if not ours.vocab.keys() <= theirs.vocab.keys():
                raise UserError(
                    f"expected {student} to begin, end and chat as {text}, whose tokenizer made "
                    f"the text, got another end mark or template; set data.tokenizer to {student}"
                )
            say(f"the export gets tokenizer and chat template of {text}, which made the text")
            source = text
    for name in text_files(out):  # of an earlier start with other files
        (out / name).unlink()
    copy_tokenizer(source, out)
    for name in text_files(student):
        if _named_like(name, (GENERATION, *TERMS)):
            shutil.copyfile(student / name, out / name)


def _speak_alike(ours: Tokenizer, texts: Tokenizer) -> bool:
    *marks, template = texts.conventions
    *own_marks, own_template = ours.conventions
    # A tokenizer without a template made no chats; the student's own template may stay.
    return marks == own_marks and template in (None, own_template)


def write_config(source: Path, out: Path, *, dtype: str | None = None, **changes: Any) -> None:
    """config.json and generation_config.json of the folder `out`, whose tokenizer is there already.

    config.json is the source's with `changes` (None: without the key), spelled for every reader
    (`both_spellings`); in both files the model stops at the token with which the training text
    ended, too.

    Raises:
        UserError: an id in one of them that is no token.
    """
    raw = {**read_json_object(source / "config.json"), **changes}
    raw = {key: value for key, value in raw.items() if changes.get(key, "") is not None}
    raw = both_spellings(raw, dtype=dtype)
    eos = Tokenizer.load(out).eos_id if (out / "tokenizer.json").is_file() else None
    raw = _stopping_at(raw, eos, raw.get("vocab_size"), f"{source}/config.json")
    (out / "config.json").write_text(json.dumps(raw, indent=2) + "\n", "utf-8")
    path = out / GENERATION
    if not path.is_file():
        path.write_text(generation_config(raw), "utf-8")
    found = read_json_object(path)
    stopping = _stopping_at(found, eos, raw.get("vocab_size"), f"{source}/{GENERATION}")
    if stopping != found:
        path.write_text(json.dumps(stopping, indent=2) + "\n", "utf-8")


def _stopping_at(
    values: Mapping[str, Any], eos: int | None, vocab_size: Any, file: str
) -> dict[str, Any]:
    size = vocab_size if type(vocab_size) is int else 2**31
    token_ids(values.get("bos_token_id"), size, f"{file}: bos_token_id")
    ids = token_ids(values.get("eos_token_id"), size, f"{file}: eos_token_id")
    if eos is None or eos in ids:
        return dict(values)
    token_ids(eos, size, f"{file}: the tokenizer's EOS")
    return {**values, "eos_token_id": [*ids, eos] if ids else eos}


def both_spellings(raw: Mapping[str, Any], *, dtype: str | None = None) -> dict[str, Any]:
    """A config.json whose dtype and rope every reader finds, whatever program wrote it.

    transformers 5 writes `dtype` and `rope_parameters` and reads the older keys as well (of both,
    `rope_scaling` first); before, it read only `torch_dtype`, `rope_theta` and `rope_scaling`, and
    took silent defaults where those were missing. A rope per layer type has no older spelling.
    dtype: None keeps the one there is.
    """
    out = dict(raw)
    dtype = dtype or raw.get("dtype") or raw.get("torch_dtype")
    if dtype is not None:
        out["dtype"] = out["torch_dtype"] = dtype
    rope: dict[str, Any] = {}
    # The first says it.
    for source in (raw.get("rope_scaling"), raw.get("rope_parameters"), _beside(raw)):
        for key, value in (source or {}).items():
            if isinstance(value, dict):
                return out
            if value is not None:
                rope.setdefault("rope_type" if key == "type" else key, value)
    if not rope:
        return out
    kind, context = rope.setdefault("rope_type", "default"), raw.get("max_position_embeddings")
    original = raw.get("original_max_position_embeddings")
    if kind in ("yarn", "llama3"):
        if original is not None:
            rope["original_max_position_embeddings"] = original
        elif context is not None:
            original = rope.setdefault("original_max_position_embeddings", context)
    if kind == "yarn" and context and "factor" not in rope:
        rope["factor"] = context / rope["original_max_position_embeddings"]
    older = {key: value for key, value in rope.items() if key not in _beside(rope)}
    if kind == "yarn" and older.get("original_max_position_embeddings") == context:
        # transformers 4 takes context / original for the factor wherever the original is named.
        del older["original_max_position_embeddings"]
    out |= _beside(rope)
    out["rope_scaling"] = None if kind == "default" else older
    out["rope_parameters"] = rope
    return out


def _beside(values: Mapping[str, Any]) -> dict[str, Any]:
    """What older files have beside the rope's dictionary, newer ones in it."""
    return {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if key in values}


def model_name(key: str) -> str:
    """What people read for a row of the test table: one name for the student that is trained
    without the teacher."""
    return {"ce_baseline": CE_ONLY}.get(key, key.replace("_", " "))


def _outside_k(config: Mapping[str, Any]) -> str:
    """What stood for the tokens outside the K."""
    if config["cache"].get("sampling") == "random":
        return f"{config['cache']['samples']} draws of the teacher"
    return f"tail {config['loss']['tail']}"


def model_card(
    *,
    summary: Mapping[str, Any],
    config: Mapping[str, Any],
    cache: str,
    program: str = "jax_distill",
) -> str:
    """Where this student comes from and what it was measured to do, as the hub shows it.

    summary: as in `summary.json`; `config`: resolved; `cache`: the fingerprint, '' where there is
    none at hand.
    """
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        f"tags: [{'distillation, ' if config['teacher']['path'] else ''}jax-distill]",
        "---",
        "",
        "# A distilled student" if config["teacher"]["path"] else "# A language model",
        "",
        f"Trained with {program} on {summary['tokens_trained']:,} tokens "
        f"({summary['steps']:,} steps).",
        "",
        "| | |",
        "|---|---|",
        f"| teacher | `{config['teacher']['path'] or 'none'}` |",
        f"| parameters | {summary['student_parameters']:,} |",
        f"| cache fingerprint | `{cache or 'not at hand'}` |",
        f"| data | `{config['data']['path']}` |",
        f"| loss | {config['loss']['divergence']}, {_outside_k(config)}, "
        f"temperature {config['loss']['temperature']}, ce_weight {config['loss']['ce_weight']} |",
    ]
    if summary.get("test"):
        lines += [
            "",
            "Held-out text, per token (KL to the teacher over the whole vocabulary, nats):",
            "",
            "| model | KL | cross-entropy | perplexity | top-1 agreement |",
            "|---|---|---|---|---|",
        ]
        for name, row in summary["test"].items():
            lines.append(
                f"| {model_name(name)} | {row['kl']:.4f} | {row['cross_entropy']:.4f} "
                f"| {row['perplexity']:.2f} | {row['top1_agreement']:.3f} |"
            )
    elif summary.get("validation"):
        lines += ["", "Validation rows, per token, as training logged it at this step:", ""]
        lines += [f"- {name}: {value:.4f}" for name, value in summary["validation"].items()]
    lines += ["", "```yaml", yaml.safe_dump(dict(config), sort_keys=False).rstrip(), "```", ""]
    return "\n".join(lines)


def generation_config(config: Mapping[str, Any]) -> str:
    """generation_config.json for a model folder that has none, of its config.json: the special
    tokens, as transformers writes them where it has to make one."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    found = {name: config[name] for name in names if config.get(name) is not None}
    return json.dumps({"_from_model_config": True, **found}, indent=2) + "\n"
