"""A target and drafters small enough for a real engine in a test: seconds to load, deterministic, no download."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline.engines import Captured

VOCAB_SIZE = 512
BOS, EOS, MASK, USER, ASSISTANT, END = "<|bos|>", "<|eos|>", "<|mask|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = (BOS, EOS, MASK, USER, ASSISTANT, END)
MASK_TOKEN_ID = SPECIAL.index(MASK)
EOS_TOKEN_ID = SPECIAL.index(EOS)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TARGET_LAYER_IDS = (1, 3, 4)


class HeldStates:
    """A sink (pipeline.engines.StatesSink) that holds every row's words in memory, in the order they came."""

    def __init__(self):
        self.words: dict[str, np.ndarray] = {}

    def add(self, row_id: str, words: np.ndarray, *, num_states: int) -> Captured:
        """Hold them as they are."""
        assert words.dtype == np.uint16 and len(words) == num_states
        self.words[row_id] = words.copy()
        return Captured(row_id, "held", len(self.words) - 1)


def tiny_target(
    folder: Path,
    *,
    layers: int = 6,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    favourite: int | None = None,
) -> Path:
    """A random float32 Llama with byte-level tokenizer and chat template, as a Hugging Face folder.

    With ``favourite`` it says that token often, so that a drafter which ``proposes`` it is accepted often.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=2048,
        initializer_range=0.08,
        bos_token_id=SPECIAL.index(BOS),
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    if favourite is not None:
        model.lm_head.weight.data[favourite] *= 4
    model.save_pretrained(folder)
    _tokenizer(Path(folder))
    return Path(folder)


def tiny_drafter(
    folder: Path,
    target: Path,
    *,
    block_size: int = 4,
    layers: int = 2,
    target_layer_ids: Sequence[int] = TARGET_LAYER_IDS,
    mask_token_id: int = MASK_TOKEN_ID,
    seed: int = 1,
    proposes: int | None = None,
) -> Path:
    """A random float32 drafter in the z-lab layout; with ``proposes`` it drafts that token in every slot."""
    shape = json.loads((Path(target) / "config.json").read_text())
    config = _drafter_config(shape, block_size, layers, list(target_layer_ids), mask_token_id)
    generator = torch.Generator().manual_seed(seed)
    scale = 0.08 if proposes is None else 1e-6
    tensors = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * scale
        for name, size in _drafter_shapes(config).items()
    }
    if proposes is not None:
        tensors["norm.weight"] = _norm_that_proposes(target, proposes, mask_token_id, config["rms_norm_eps"])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def counting_target(folder: Path, *, layers: int = 6) -> Path:
    """A Llama whose layer i adds exactly 1 to every element of the residual, so the state after it is i + 1.

    All matrices are zero; the attention's and the MLP's output biases are one half each.
    """
    folder = tiny_target(folder, layers=layers)
    config = json.loads((folder / "config.json").read_text()) | {"attention_bias": True, "mlp_bias": True}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: torch.zeros_like(value) for name, value in load_file(folder / "model.safetensors").items()}
    for name in [name for name in tensors if "_proj." in name]:
        out = torch.zeros(tensors[name].shape[0])
        tensors[name.replace("weight", "bias")] = out + (0.5 if "o_proj" in name or "down_proj" in name else 0.0)
    for name in [name for name in tensors if "norm" in name]:
        tensors[name] = torch.full_like(tensors[name], 7.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _drafter_config(target: dict, block_size: int, layers: int, layer_ids: list[int], mask_token_id: int) -> dict:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": layer_ids},
        "dtype": "float32",
        "head_dim": target["head_dim"],
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 2 * target["hidden_size"],
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": target["max_position_embeddings"],
        "num_attention_heads": target["num_attention_heads"],
        "num_hidden_layers": layers,
        "num_key_value_heads": target["num_key_value_heads"],
        "num_target_layers": target["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": target["vocab_size"],
    }


def _drafter_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, wide, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    num_states = len(config["dflash_config"]["target_layer_ids"])
    shapes = {"fc.weight": (hidden, num_states * hidden), "hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {
            f"layers.{i}.self_attn.q_proj.weight": (query, hidden),
            f"layers.{i}.self_attn.k_proj.weight": (kv, hidden),
            f"layers.{i}.self_attn.v_proj.weight": (kv, hidden),
            f"layers.{i}.self_attn.o_proj.weight": (hidden, query),
            f"layers.{i}.self_attn.q_norm.weight": (head,),
            f"layers.{i}.self_attn.k_norm.weight": (head,),
            f"layers.{i}.mlp.gate_proj.weight": (wide, hidden),
            f"layers.{i}.mlp.up_proj.weight": (wide, hidden),
            f"layers.{i}.mlp.down_proj.weight": (hidden, wide),
            f"layers.{i}.input_layernorm.weight": (hidden,),
            f"layers.{i}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes


def _norm_that_proposes(target: Path, token: int, mask_token_id: int, eps: float) -> torch.Tensor:
    """The final norm's weight that turns the mask's embedding into ``token``'s row of the head.

    With layers that add next to nothing, the last hidden state of a mask slot is the mask's embedding.
    """
    weights = load_file(Path(target) / "model.safetensors")
    mask = weights["model.embed_tokens.weight"][mask_token_id].float()
    normed = mask * torch.rsqrt(mask.pow(2).mean() + eps)
    return weights["lm_head.weight"][token].float() / normed


def _tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = list(SPECIAL) + alphabet
    words += [f"Ġw{i}" for i in range(len(words), VOCAB_SIZE)]  # never encoded, but every id decodes to something
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "mask_token": MASK,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
