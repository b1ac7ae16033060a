"""Small networks of many architectures, as transformers builds them from configurations, with random weights.

Each entry of ARCHITECTURES makes a model and a function that draws a batch of its keyword arguments.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

Batch = dict[str, Any]
Made = tuple[torch.nn.Module, Callable[[], Batch]]

_WORDS = 99
_TEXT = {
    "vocab_size": _WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_IMAGE = {key: value for key, value in _TEXT.items() if key != "vocab_size"} | {"image_size": 64}
_GPT = {"vocab_size": _WORDS, "n_layer": 2, "n_head": 4}
_SEQ2SEQ = {
    "vocab_size": _WORDS,
    "d_model": 32,
    **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in
       (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))},
}  # fmt: skip
_SIDE, _CLASSES = 64, 2


def tokens(length: int = 32) -> torch.Tensor:
    """Two texts."""
    return torch.randint(3, _WORDS, (2, length))


def images(count: int = 2, side: int = _SIDE) -> torch.Tensor:
    """Noise in three channels."""
    return torch.randn(count, 3, side, side)


def classes(count: int = 2) -> torch.Tensor:
    """A class for each."""
    return torch.arange(count) % _CLASSES


def _text() -> Batch:
    words = tokens()
    return {"input_ids": words, "labels": words}


def _labelled_images(count: int = 2, side: int = _SIDE) -> Batch:
    return {"pixel_values": images(count, side), "labels": classes(count)}


def _language(config: str, batch: Callable[[], Batch] = _text, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        made = getattr(transformers, f"{config}Config")(**options)
        return transformers.AutoModelForCausalLM.from_config(made), batch

    return make


def _named(model: str, config: str, batch: Callable[[], Batch] = _text, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        return getattr(transformers, model)(getattr(transformers, f"{config}Config")(**options)), batch

    return make


class LanguageLSTM(torch.nn.Module):
    """Two layers over an embedding, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(_WORDS, 32)
        self.lstm = torch.nn.LSTM(32, 32, 2, batch_first=True, dropout=0.1)
        self.head = torch.nn.Linear(32, _WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        """The loss, as transformers' models return it first."""
        hidden, _ = self.lstm(self.embedding(input_ids))
        return (torch.nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten()),)


def _clip() -> Made:
    text, vision = {**_TEXT}, {**_IMAGE, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    batch = lambda: {"input_ids": tokens(16), "pixel_values": images(), "return_loss": True}  # noqa: E731
    return transformers.CLIPModel(config), batch


ARCHITECTURES: Mapping[str, Callable[[], Made]] = {
    "ALBERT": _named("AlbertForMaskedLM", "Albert", **_TEXT, embedding_size=16),
    "BART": _named("BartForConditionalGeneration", "Bart", **_SEQ2SEQ),
    "BERT": _named("BertForMaskedLM", "Bert", **_TEXT),
    "BLOOM": _language("Bloom", **_GPT, hidden_size=32),
    "CLIP": _clip,
    "ConvNeXt": _named(
        "ConvNextForImageClassification",
        "ConvNext",
        _labelled_images,
        hidden_sizes=[16, 32, 32, 32],
        depths=[1, 1, 2, 1],
    ),
    "data2vec": _named("Data2VecTextForMaskedLM", "Data2VecText", **_TEXT),
    "DeBERTa-v2": _named(
        "DebertaV2ForSequenceClassification",
        "DebertaV2",
        lambda: {"input_ids": tokens(), "labels": classes()},
        **_TEXT,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
    ),
    "DINOv2": _named(
        "Dinov2ForImageClassification",
        "Dinov2",
        lambda: _labelled_images(side=56),
        **{**_IMAGE, "image_size": 56},
        patch_size=14,
    ),
    "FNet": _named("FNetForMaskedLM", "FNet", **_TEXT),
    "Funnel": _named(
        "FunnelForMaskedLM",
        "Funnel",
        vocab_size=_WORDS,
        block_sizes=[1, 1],
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
    ),
    "Gemma": _language("Gemma", **_TEXT, num_key_value_heads=2, head_dim=8),
    "GPT-2": _language("GPT2", **_GPT, n_embd=32),
    "GPT-NeoX": _language("GPTNeoX", **_TEXT),
    "Llama": _language("Llama", **_TEXT, num_key_value_heads=2),
    "Longformer": _named("LongformerForMaskedLM", "Longformer", **_TEXT, attention_window=[8, 8]),
    "LSTM": lambda: (LanguageLSTM(), _text),
    "Mamba": _language("Mamba", vocab_size=_WORDS, hidden_size=32, num_hidden_layers=2),
    "Mamba-2": _language(
        "Mamba2",
        vocab_size=_WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        state_size=16,
    ),
    "Mixtral": _language("Mixtral", **_TEXT, num_key_value_heads=2, num_local_experts=4),
    "MobileNetV2": _named(
        "MobileNetV2ForImageClassification",
        "MobileNetV2",
        lambda: _labelled_images(4),
        depth_multiplier=0.35,
        image_size=_SIDE,
    ),
    "OPT": _language(
        "OPT",
        vocab_size=_WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=64,
        word_embed_proj_dim=32,
    ),
    "Phi": _language("Phi", **_TEXT),
    "Qwen2": _language("Qwen2", **_TEXT, num_key_value_heads=2),
    "ResNet": _named(
        "ResNetForImageClassification",
        "ResNet",
        _labelled_images,
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        layer_type="basic",
    ),
    "RWKV": _language("Rwkv", vocab_size=_WORDS, hidden_size=32, num_hidden_layers=2, context_length=64),
    "SegFormer": _named(
        "SegformerForSemanticSegmentation",
        "Segformer",
        lambda: {"pixel_values": images(), "labels": torch.randint(_CLASSES, (2, _SIDE, _SIDE))},
        hidden_sizes=[8, 16, 16, 32],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=32,
        num_attention_heads=[1, 2, 2, 4],
    ),
    "Swin": _named(
        "SwinForImageClassification",
        "Swin",
        _labelled_images,
        image_size=_SIDE,
        patch_size=4,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    "T5": _named(
        "T5ForConditionalGeneration",
        "T5",
        vocab_size=_WORDS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    ),
    "VideoMAE": _named(
        "VideoMAEForVideoClassification",
        "VideoMAE",
        lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": classes()},
        **{**_IMAGE, "image_size": 32},
        patch_size=8,
        num_frames=4,
    ),
    "ViT": _named("ViTForImageClassification", "ViT", _labelled_images, **_IMAGE, patch_size=8),
    "ViT-MAE": _named(
        "ViTMAEForPreTraining",
        "ViTMAE",
        lambda: {"pixel_values": images()},
        **_IMAGE,
        patch_size=8,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
    ),
    "wav2vec 2.0": _named(
        "Wav2Vec2ForCTC",
        "Wav2Vec2",
        lambda: {"input_values": torch.randn(2, 1600), "labels": torch.randint(1, 30, (2, 5))},
        **{**_TEXT, "vocab_size": 32},
        conv_dim=[16] * 3,
        conv_stride=[5, 2, 2],
        conv_kernel=[10, 3, 3],
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
        layerdrop=0.0,
    ),
    "Whisper": _named(
        "WhisperForConditionalGeneration",
        "Whisper",
        lambda: {"input_features": torch.randn(2, 16, 100), "labels": tokens(12)},
        **_SEQ2SEQ,
        max_source_positions=50,
        num_mel_bins=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
}
