"""What an exported folder says beside weights, config.json and tokenizer: the model card, and the
tokens that end a text. Both backends write it."""

import json
from collections.abc import Mapping
from typing import Any

import yaml


def model_card(
    *,
    summary: Mapping[str, Any],
    config: Mapping[str, Any],
    store: str,
    program: str = "jax_distill",
) -> str:
    """Where this student comes from and what it was measured to do, as the hub shows it.

    summary: as in `summary.json`; `config`: resolved; `store`: the fingerprint, '' where there is
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
        f"| store fingerprint | `{store or 'not at hand'}` |",
        f"| data | `{config['data']['path']}` |",
        f"| loss | {config['loss']['divergence']}, tail {config['loss']['tail']}, "
        f"temperature {config['loss']['temperature']}, ce_weight {config['loss']['ce_weight']} |",
    ]
    if summary.get("heldout"):
        lines += [
            "",
            "Held-out text, per token (KL to the teacher over the whole vocabulary, nats):",
            "",
            "| model | KL | cross-entropy | perplexity | top-1 agreement |",
            "|---|---|---|---|---|",
        ]
        for name, row in summary["heldout"].items():
            lines.append(
                f"| {name.replace('_', ' ')} | {row['kl']:.4f} | {row['cross_entropy']:.4f} "
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
