"""Transformers' own models, seen as the losses see a model: hidden states, and the head apart.

Shapes: B rows, T positions, D hidden, V vocabulary.

Rows hold several documents, kept apart by their segment ids. Transformers takes a ready-made mask
[B,1,T,T] (a dictionary of two where layers slide), so that is what it gets; whether the
architecture heeds it, and whether its head is what we take it for, is tried out before any work.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from huggingface_hub import snapshot_download
from torch import Tensor

from jax_distill.config import Refusal, find_path

Model = transformers.PreTrainedModel
# As jax_distill.hf fetches them; the second where a repository has no safetensors.
HUB_FILES = (["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"], ["pytorch_model*.bin*"])
WEIGHT_FILES = ("*.safetensors", "*.bin")


class Head(NamedTuple):
    """What makes logits of hidden states: soft_cap·tanh((hidden·weightᵀ + bias)·scale/soft_cap)."""

    weight: Tensor
    bias: Tensor | None
    logit_scale: float | None
    soft_cap: float | None


def source(path: str) -> dict[str, str]:
    """What `from_pretrained` is told for a path of the configuration: HF folder, GGUF file or hub
    id."""
    place = Path(find_path(path)).expanduser()
    if place.suffix == ".gguf":
        if not place.is_file():
            raise Refusal(f"expected a GGUF file, got {path}, which is missing; check the path")
        return {"pretrained_model_name_or_path": str(place.parent), "gguf_file": place.name}
    return {"pretrained_model_name_or_path": str(place) if place.is_dir() else path}


def place_of(path: str) -> Path:
    """The folder or the GGUF file that a path of the configuration names; of a hub id, the folder
    of the revision in the local cache, where it is fetched to once.

    Raises:
        Refusal: nothing there, and nothing to fetch.
    """
    named = source(path)
    place = Path(named["pretrained_model_name_or_path"])
    if "gguf_file" in named:
        return place / named["gguf_file"]
    if place.is_dir():
        return place
    try:
        for patterns in HUB_FILES:
            place = Path(snapshot_download(path, allow_patterns=patterns))
            if list(place.glob("*.safetensors")):
                break
    except Exception as error:  # every network and hub failure ends in the same one line
        reason = " ".join(str(error).split())[:200]
        raise Refusal(
            f"expected a model folder, a GGUF file or a hub id, got {path} ({reason}); check the "
            "path, or the connection"
        ) from error
    return place


def device_named(name: str) -> str:
    """The argument of `--device`, as argparse's `type`.

    Raises:
        Refusal: neither cpu nor cuda, or a device that torch does not find.
    """
    kind, number = name, 0
    try:
        device = torch.device(name)
        kind, number = device.type, device.index or 0
    except RuntimeError:
        pass
    found = torch.cuda.device_count()
    if number >= {"cpu": 1, "cuda": found}.get(kind, 0):
        raise Refusal(
            f"expected --device cpu or cuda (torch finds {found} of these), got {name}; "
            "give one that is here"
        )
    return name


def _refuse_without_weights(path: str, folder: Path) -> None:
    files = (file for pattern in WEIGHT_FILES for file in folder.glob(pattern))
    if (folder / "config.json").is_file() and next(files, None) is None:
        raise Refusal(
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
        Refusal: nothing there, weights missing or superfluous, or an architecture that does not
            keep packed documents apart.
    """
    place = source(path)
    if "gguf_file" not in place:
        _refuse_without_weights(path, Path(place["pretrained_model_name_or_path"]))
    transformers.utils.logging.disable_progress_bar()
    try:
        config = _as_meant(transformers.AutoConfig.from_pretrained(**place), "gguf_file" in place)
        loader: Any = transformers.AutoModelForCausalLM
        model, info = loader.from_pretrained(
            **place,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=attention,
            output_loading_info=True,
        )
    except (OSError, ValueError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise Refusal(f"expected a model at {path}, got: {reason}; check the path") from error
    wrong = {k: sorted(map(str, v))[:3] for k, v in info.items() if v and k.endswith("_keys")}
    if wrong:
        raise Refusal(f"expected the weights of {type(model).__name__} at {path}, got {wrong}")
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and "gguf_file" in place:  # its weights are plain by now
        quantizer.remove_quantization_config(model)
    model = model.to(device).eval()
    check_model(model)
    return model


def _as_meant(config: Any, is_gguf: bool) -> Any:
    """Without dropout. A GGUF file keeps float32 numbers: the shortest decimals that read back as
    the same, as `jax_distill.hf` has them (rms_norm_eps 1e-05)."""
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
        raise Refusal(
            f"expected layers of full or sliding attention, got {sorted(kinds)} in "
            f"{type(model).__name__}; torch_ref cannot keep packed documents apart in them"
        )
    place = torch.arange(segment_ids.shape[1], device=segment_ids.device)
    distance = place[:, None] - place
    full = (distance >= 0) & (segment_ids[:, :, None] == segment_ids[:, None, :])
    if "sliding_attention" not in kinds:
        sees = full & (distance < window) if window and not kinds else full
        return _as_wanted(model, sees)
    sliding = full & (distance < window)
    return {
        "full_attention": _as_wanted(model, full),
        "sliding_attention": _as_wanted(model, sliding),
    }


def _as_wanted(model: Model, sees: Tensor) -> Tensor:
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
        scale,
        getattr(config, "final_logit_softcapping", None),
    )


def logits(rows: Tensor, head: Head) -> Tensor:
    """[N,D] → [N,V] float32: bias, then scale, then soft-cap."""
    weight = head.weight.to(rows.dtype)
    if rows.device.type == "cuda" and rows.dtype != torch.float32:
        z = torch.mm(rows, weight.T, out_dtype=torch.float32)
    else:
        z = rows.float() @ weight.float().T
    if head.bias is not None:
        z = z + head.bias.float()
    if head.logit_scale is not None:
        z = z * head.logit_scale
    return z if head.soft_cap is None else head.soft_cap * torch.tanh(z / head.soft_cap)


@torch.no_grad()
def check_model(model: Model) -> None:
    """Two documents in one row against each alone, and our logits against the model's own.

    Raises:
        Refusal: the architecture lets documents see each other, or changes its logits in a way
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
            raise Refusal(
                f"expected {type(model).__name__} to keep {name}, got logits that differ by "
                f"{worst:.3g}; torch_ref does not know this architecture well enough"
            )


def _alone(model: Model, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return hidden_states(model, tokens, torch.ones_like(tokens), positions)
