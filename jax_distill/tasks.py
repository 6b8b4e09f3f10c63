"""Tasks of lm-evaluation-harness on models as they are, several beside each other:

    python -m jax_distill.tasks runs/quickstart TEACHER --tasks hellaswag,arc_easy --limit 200

A MODEL is a Hugging Face folder, a GGUF file, a hub id, or a run, whose export is taken.
`--include FOLDER` has tasks of your own (the harness's YAML files). Needs the extra `eval`.

Lengths are rounded up to powers of two and batches filled up, so that a request never compiles
again what a longer one has compiled.

Letters: B requests of a batch, T positions, D hidden, V vocabulary.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

from jax_distill import hf
from jax_distill.base.command import CommandLine, above_zero, at_least_zero, run_command
from jax_distill.base.console import console, progress, say
from jax_distill.base.errors import UserError
from jax_distill.base.files import check_new_file, find_path, write_json
from jax_distill.data import Tokenizer
from jax_distill.losses import head_matmul
from jax_distill.model import Decoder, continue_greedily

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
except ImportError:  # `main` names the extra
    lm_eval, TemplateLM = None, object

SHORTEST = 32  # positions of the smallest batch
NEW_TOKENS = 256  # the harness's own default of max_gen_toks


@jax.jit
def score(model: Decoder, tokens: jax.Array, scored: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(Σ log p fp32 [B], whether each is the most likely one [B]) of the tokens int32 [B,T+1] that
    `scored` bool [B,T] marks, tokens[:,1:] being predicted; the whole head counts, padding too, as
    in transformers. A row ends with its last scored token."""
    length = tokens.shape[1] - 1
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), scored.shape)
    last = jnp.max(jnp.where(scored, position, -1), axis=1, keepdims=True)
    segment_ids = (position <= last).astype(jnp.int32)
    hidden = model.hidden_states(tokens[:, :-1], segment_ids, position)
    weight = model.lm_head_weight()

    def of_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, labels, scored = row
        logits = head_matmul(hidden[None], weight)[0]
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]
        greedy = jnp.argmax(logits, axis=1) == labels
        return jnp.sum(jnp.where(scored, log_p, 0.0)), jnp.all(greedy | ~scored)

    return jax.lax.map(of_row, (hidden, tokens[:, 1:], scored))


def bucket(length: int, longest: int) -> int:
    """The power of two from SHORTEST on that holds `length`, at most `longest`."""
    return min(max(SHORTEST, 1 << (length - 1).bit_length()), longest)


class TaskModel(TemplateLM):  # type: ignore[misc, valid-type]
    """A Decoder and its tokenizer as the harness asks a model."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, *, batch_size: int) -> None:
        super().__init__()
        self._model, self._tokens, self._rows = model, tokenizer, batch_size
        self.max_length = model.config.max_position_embeddings

    @property
    def eot_token_id(self) -> int:
        """The end of a text.

        Raises:
            UserError: the tokenizer names none.
        """
        if self._tokens.eos_id is None:
            raise UserError(
                f"expected a tokenizer with an end of text in {self._tokens.folder}, got none; "
                "name eos_token in its tokenizer_config.json"
            )
        return self._tokens.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context: BOS, else EOS."""
        return self.eot_token_id if self._tokens.bos_id is None else self._tokens.bos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Ids; BOS first where the tokenizer says so and the text does not begin with it."""
        ids = [int(token) for token in self._tokens.encode(string)]
        begins = ids[:1] == [self._tokens.bos_id]
        if add_special_tokens is False or not self._tokens.adds_bos or begins:
            return ids
        return [self.prefix_token_id, *ids]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        kept = [(context + after)[-(self.max_length + 1) :] for _, context, after in requests]
        order = sorted(range(len(kept)), key=lambda index: -len(kept[index]))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(kept)
        batches = [order[i : i + self._rows] for i in range(0, len(order), self._rows)]
        for chosen in progress(batches, "requests", total=len(batches)):
            length = bucket(len(kept[chosen[0]]) - 1, self.max_length)
            tokens = np.zeros((self._rows, length + 1), np.int32)
            scored = np.zeros((self._rows, length), bool)
            for row, index in enumerate(chosen):
                ids = kept[index]
                tokens[row, : len(ids)] = ids
                scored[row, max(len(ids) - 1 - len(requests[index][2]), 0) : len(ids) - 1] = True
            sums, greedy = jax.device_get(score(self._model, tokens, scored))
            for row, index in enumerate(chosen):
                found[index] = float(sums[row]), bool(greedy[row])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """log p of whole texts, in windows that share no predicted token."""
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            parts = lm_eval.utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for part in map(lm_eval.utils.make_disjoint_window, parts):
                windows.append((None, *part))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (value, _greedy) in zip(
            owners, self._loglikelihood_tokens(windows), strict=True
        ):
            sums[owner] += value
        return sums

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """Greedy continuations, each up to the first of its stop strings.

        Raises:
            UserError: a task that samples.
        """
        found = [""] * len(requests)
        groups: dict[int, list[int]] = {}
        encoded = (self.tok_encode(request.args[0]) for request in requests)
        contexts = [ids or [self.prefix_token_id] for ids in encoded]
        for index, request in enumerate(requests):
            options = request.args[1]
            if options.get("do_sample") and options.get("temperature", 1.0) > 0:
                raise UserError(
                    f"expected a task that decodes greedily, got do_sample true in {options}; "
                    "set temperature 0 in it, or leave the task out"
                )
            groups.setdefault(int(options.get("max_gen_toks", NEW_TOKENS)), []).append(index)
        for new_tokens, members in groups.items():
            room = self.max_length - new_tokens
            if room < 1:
                raise UserError(
                    f"expected max_gen_toks below the model's {self.max_length} positions, got "
                    f"{new_tokens}; lower it in the task"
                )
            members.sort(key=lambda index: -len(contexts[index]))
            batches = [members[i : i + self._rows] for i in range(0, len(members), self._rows)]
            for chosen in progress(batches, "continuations", total=len(batches)):
                made = self._continue([contexts[i][-room:] for i in chosen], new_tokens, room)
                for index, tokens in zip(chosen, made, strict=False):
                    found[index] = self._text(tokens, requests[index].args[1].get("until", []))
        return found

    def _continue(self, contexts: list[list[int]], new_tokens: int, room: int) -> np.ndarray:
        length = bucket(max(map(len, contexts)), room)
        tokens, segment_ids, positions = np.zeros((3, self._rows, length), np.int32)
        segment_ids[:, -1] = 1  # a row that fills up the batch continues one token
        for row, ids in enumerate(contexts):
            tokens[row, -len(ids) :] = ids
            segment_ids[row, -len(ids) :] = 1
            positions[row, -len(ids) :] = np.arange(len(ids))
        made = continue_greedily(
            self._model,
            tokens,
            segment_ids,
            positions,
            new_tokens=new_tokens,
            vocab_size=self._model.config.vocab_size,
        )
        return np.asarray(made)

    def _text(self, tokens: np.ndarray, until: str | Iterable[str]) -> str:
        ends = np.flatnonzero(tokens == self.eot_token_id)
        tokens = tokens[: ends[0]] if len(ends) else tokens
        text = self._tokens.decode(tokens[~np.isin(tokens, self._tokens.control_ids)])
        for stop in [until] if isinstance(until, str) else until:
            text = text.split(stop)[0] if stop else text
        return text


def model_folder_of(path: str) -> Path:
    """The Hugging Face folder that a path names; of a run its export."""
    run = Path(path).expanduser()
    if (run / "config.yaml").is_file() and (run / "export" / "config.json").is_file():
        return run / "export"
    return hf.local_folder(find_path(path), key="MODEL")


def results_of(
    path: str, names: list[str], manager: Any, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """{task: {metric: value, metric_stderr: its standard error}} of a model."""
    folder = model_folder_of(path)
    say(f"{path}: loading {folder}")
    dtype = jnp.dtype(options.dtype)
    model = hf.load_model(folder, param_dtype=dtype, compute_dtype=dtype, remat="none")
    found = lm_eval.simple_evaluate(
        model=TaskModel(model, Tokenizer.load(folder), batch_size=options.batch_size),
        tasks=names,
        task_manager=manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        log_samples=False,
    )
    numbers: dict[str, dict[str, float]] = {}
    for task, row in found["results"].items():
        named = {key.removesuffix(",none"): value for key, value in row.items()}
        numbers[task] = {k: v for k, v in named.items() if isinstance(v, float)}
    return numbers


def print_results(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Models beside each other, each number with its standard error."""
    table = Table("task", "metric", *results)
    first = next(iter(results.values()))
    for task, row in first.items():
        for metric in [name for name in row if not name.endswith("_stderr")]:
            cells = []
            for found in results.values():
                value, error = found[task][metric], found[task].get(f"{metric}_stderr")
                cells.append(f"{value:.4f}" + (f" ± {error:.4f}" if error is not None else ""))
            table.add_row(task, metric, *cells)
    console.print(table)


def main(argv: Sequence[str]) -> None:
    """The command line above."""
    parser = CommandLine("jax_distill.tasks")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="HF folder, GGUF, hub id, run")
    parser.add_argument("--tasks", required=True, help="names, with commas between them")
    parser.add_argument("--include", metavar="FOLDER", help="YAML files of your own tasks")
    parser.add_argument("--limit", type=above_zero, help="the first so many items of each task")
    parser.add_argument("--num_fewshot", type=at_least_zero, help="examples before each item")
    parser.add_argument("--batch_size", type=above_zero, default=8)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", help="write the results here, too")
    options = parser.parse_args(argv)
    if lm_eval is None:
        raise UserError(
            "expected the package lm-eval for tasks, got none; pip install 'jax_distill[eval]'"
        )
    check_new_file(options.json, "--json")
    names = options.tasks.split(",")
    manager = TaskManager(include_path=options.include, include_defaults=options.include is None)
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown:
        raise UserError(
            f"expected tasks that lm-evaluation-harness knows, got {', '.join(unknown)}; see "
            "python -m lm_eval ls tasks, or name your own folder with --include"
        )
    results = {path: results_of(path, names, manager, options) for path in options.models}
    print_results(results)
    if options.json:
        write_json(Path(options.json), results)
        say(f"wrote {options.json}")


if __name__ == "__main__":
    run_command(main)
