"""Transformers' own models, seen as the losses see a model: hidden states, and the head apart.

Shapes: B rows, T positions, D hidden, V vocabulary.

Rows hold several documents, kept apart by their segment ids. Transformers takes a ready-made mask
[B,1,T,T] (a dictionary of two where layers slide), so that is what it gets; whether the
architecture applies it, and whether its head is the one that `head` describes, is checked before
any work.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub import snapshot_download
from torch import Tensor

from jax_distill.base.errors import UserError
from jax_distill.base.files import find_path
from torch_ref.losses import Head, logits

Model = transformers.PreTrainedModel
# As jax_distill.hf fetches them; the second where a repository has no safetensors.
HUB_FILES = (["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"], ["pytorch_model*.bin*"])
WEIGHT_FILES = ("*.safetensors", "*.bin")


def source(path: str) -> dict[str, str]:
    """Arguments of `from_pretrained` for a path of the configuration: HF folder, GGUF file or hub
    id."""
    found = Path(find_path(path)).expanduser()
    if found.suffix == ".gguf":
        if not found.is_file():
            raise UserError(f"expected a GGUF file, got {path}, which is missing; check the path")
        return {"pretrained_model_name_or_path": str(found.parent), "gguf_file": found.name}
    return {"pretrained_model_name_or_path": str(found) if found.is_dir() else path}


def local_path(path: str) -> Path:
    """The folder or the GGUF file that a path of the configuration names; of a hub id, the folder
    of its revision in the hub's local cache, downloaded once.

    Raises:
        UserError: nothing there, and nothing to download.
    """
    arguments = source(path)
    folder = Path(arguments["pretrained_model_name_or_path"])
    if "gguf_file" in arguments:
        return folder / arguments["gguf_file"]
    if folder.is_dir():
        return folder
    try:
        for patterns in HUB_FILES:
            folder = Path(snapshot_download(path, allow_patterns=patterns))
            if list(folder.glob("*.safetensors")):
                break
    except Exception as error:  # every network and hub failure ends in the same one line
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"expected a model folder, a GGUF file or a hub id, got {path} ({reason}); check the "
            "path, or the connection"
        ) from error
    return folder


def load_config(path: str) -> Any:
    """transformers' configuration of a path of ours."""
    return transformers.AutoConfig.from_pretrained(**source(path))


def device_named(name: str) -> str:
    """The argument of `--device`, as argparse's `type`.

    Raises:
        UserError: neither cpu nor cuda, or a device that torch does not find.
    """
    kind, number = name, 0
    try:
        device = torch.device(name)
        kind, number = device.type, device.index or 0
    except RuntimeError:
        pass
    found = torch.cuda.device_count()
    if number >= {"cpu": 1, "cuda": found}.get(kind, 0):
        raise UserError(
            f"expected --device cpu or cuda (torch finds {found} of these), got {name}; "
            "give one that is here"
        )
    return name


def _refuse_weights(path: str, folder: Path) -> None:
    """What transformers would make another model of than the folder's: none, or an adapter."""
    adapter = next(folder.glob("adapter_*"), None)
    if adapter:
        raise UserError(
            f"expected a model without an adapter in {path}, got {adapter.name}; merge it into the "
            "weights, or move it away"
        )
    files = (file for pattern in WEIGHT_FILES for file in folder.glob(pattern))
    if (folder / "config.json").is_file() and next(files, None) is None:
        raise UserError(
            f"expected a model folder with weights, got {path}, which has config.json without any; "
            "name a folder with weights (only jax_distill.train starts a student from a seed)"
        )


def load_model(
    path: str, *, dtype: str, device: str = "cpu", attention: str | None = None
) -> Model:
    """Any causal language model that transformers loads, without dropout, in evaluation mode.

    Args:
        path: HF folder, GGUF file or hub id.
        dtype: of the weights, `float32`, `bfloat16` or `auto` (as they lie there).
        attention: transformers' name of an implementation; None is its own choice.

    Raises:
        UserError: nothing there; weights missing, superfluous or not finite; a tied model whose
            file has another head; or an architecture that does not keep packed documents apart.
    """
    arguments = source(path)
    is_gguf = "gguf_file" in arguments
    if not is_gguf:
        _refuse_weights(path, Path(arguments["pretrained_model_name_or_path"]))
    transformers.utils.logging.disable_progress_bar()
    try:
        config = _without_dropout(transformers.AutoConfig.from_pretrained(**arguments), is_gguf)
        loader: Any = transformers.AutoModelForCausalLM
        model, info = loader.from_pretrained(
            **arguments,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=attention,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"expected a model at {path}, got: {reason}; check the path") from error
    wrong = {k: sorted(map(str, v))[:3] for k, v in info.items() if v and k.endswith("_keys")}
    if wrong:
        raise UserError(f"expected the weights of {type(model).__name__} at {path}, got {wrong}")
    _check_weights(model, path)
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and is_gguf:  # its weights are plain by now
        quantizer.remove_quantization_config(model)
    model = model.to(device).eval()
    check_model(model)
    return model


def _check_weights(model: Model, path: str) -> None:
    """Finite weights, and a head that is the embedding where config.json says so: transformers
    unties them, with a warning, where the file has both and they differ."""
    embedding: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings()
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and output.weight is not embedding.weight:
        raise UserError(
            f"expected the head to equal the embedding in the tied model {path}, got a difference; "
            "set tie_word_embeddings to false in config.json"
        )
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UserError(
                f"expected finite numbers in {name!r} of {path}, got NaN or infinity as "
                f"{str(weight.dtype).removeprefix('torch.')}; re-download it, or load it in float32"
            )


def _without_dropout(config: Any, is_gguf: bool) -> Any:
    """The configuration without dropout. A GGUF file keeps float32 numbers: the shortest decimals
    that read back as the same, as `jax_distill.hf` has them (rms_norm_eps 1e-05)."""
    for key, value in vars(config).items():
        if key.endswith(("dropout", "pdrop")) and value:
            setattr(config, key, 0.0)
        elif is_gguf and isinstance(value, float):
            setattr(config, key, float(str(np.float32(value))))
    return config


def attention_masks(model: Model, segment_ids: Tensor) -> Tensor | dict[str, Tensor]:
    """Which keys each query may see: earlier ones, or itself, of its own document.

    segment_ids [B,T] (0, padding, sees itself only as a document does) → [B,1,T,T]; a dictionary by
    layer type where config.json names sliding layers. Boolean for sdpa, else added to the scores.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) or 0
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise UserError(
            f"expected layers of full or sliding attention, got {sorted(kinds)} in "
            f"{type(model).__name__}; torch_ref cannot keep packed documents apart in them"
        )
    position = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    distance = position[:, None] - position
    full = (distance >= 0) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    if "sliding_attention" not in kinds:
        sees = full & (distance < window) if window and not kinds else full
        return _mask_for(model, sees)
    sliding = full & (distance < window)
    return {
        "full_attention": _mask_for(model, full),
        "sliding_attention": _mask_for(model, sliding),
    }


def _mask_for(model: Model, sees: Tensor) -> Tensor:
    """[B,T,T] boolean → [B,1,T,T] in the form that the attention implementation takes."""
    sees = sees[:, None]
    if model.config._attn_implementation == "sdpa":
        return sees
    return torch.where(sees, 0.0, torch.finfo(model.dtype).min).to(model.dtype)


def hidden_states(model: Model, tokens: Tensor, segment_ids: Tensor, positions: Tensor) -> Tensor:
    """[B,T] integer ids, documents and rotary positions → [B,T,D] after the final norm."""
    return model.base_model(
        input_ids=tokens,
        attention_mask=attention_masks(model, segment_ids),
        position_ids=positions,
        use_cache=False,
    ).last_hidden_state


@contextlib.contextmanager
def layer_outputs(model: Model, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """What those layers (0 is the first) return in the forward pass within, [B,T,D] each, before
    any norm, in the order asked for: a list that is filled by then.

    Raises:
        UserError: an architecture whose layers are not called so.
    """
    stack: Any = getattr(model.base_model, "layers", None)
    if layers and stack is None:
        raise UserError(
            f"expected {type(model.base_model).__name__}.layers for loss.hidden_weight, got none; "
            "torch_ref does not know where its layers are"
        )
    found: list[Any] = [None] * len(layers)

    def keep(slot: int) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            found[slot] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [stack[layer].register_forward_hook(keep(slot)) for slot, layer in enumerate(layers)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def recompute_layers(model: Model) -> None:
    """Keep only each layer's input for the backward pass (remat `layer`)."""
    enable = getattr(model, "activation_checkpointing_enable", None)  # its name since 5.20
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.train()  # which is what turns it on; there is no dropout


def head(model: Model) -> Head:
    """The model's head, with the scale and the soft-cap of its config (Cohere, Granite, Gemma)."""
    linear: Any = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None)
    divisor = getattr(config, "logits_scaling", None)
    if divisor:
        scale = 1 / divisor
    return Head(
        linear.weight,
        getattr(linear, "bias", None),
        soft_cap=getattr(config, "final_logit_softcapping", None),
        logit_scale=scale,
    )


@torch.no_grad()
def check_model(model: Model) -> None:
    """Two documents in one row against each alone, and our logits against the model's own.

    Raises:
        UserError: the architecture lets documents see each other, or changes its logits in a way
            that `head` does not know.
    """
    device = model.device
    lengths = (9, 7)
    embedding: Any = model.get_input_embeddings()
    count = embedding.num_embeddings
    tokens = (torch.arange(sum(lengths), device=device) * 7919 + 13)[None] % count
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    segments = torch.repeat_interleave(
        torch.tensor([1, 2], device=device), torch.tensor(lengths, device=device)
    )[None]
    packed = hidden_states(model, tokens, segments, positions)
    second = slice(lengths[0], None)
    own = model(tokens[:, second], use_cache=False).logits.float()
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.1
    for name, rows in (
        ("its packed documents apart", packed[:, second]),
        ("its logits those of its head", _alone(model, tokens[:, second])),
    ):
        ours = logits(rows[0], head(model))
        worst = (ours - own[0]).abs().max().item()
        if not worst <= tolerance * own.abs().max().item():
            raise UserError(
                f"expected {type(model).__name__} to keep {name}, got logits that differ by "
                f"{worst:.3g}; torch_ref does not know this architecture well enough"
            )


def _alone(model: Model, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return hidden_states(model, tokens, torch.ones_like(tokens), positions)
