"""The benchmark networks, written from their papers in plain torch.nn.

Goes in: a name of `NAMES`, the number of classes and, for some, sizes. Comes out: an
initialised nn.Module in training mode whose parameter count is the published one.
May touch: torch only; images are NCHW float, GPT tokens are (batch, length) integers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def build(name: str, num_classes: int = 1000, **sizes: Any) -> nn.Module:
    """Build one benchmark network with freshly drawn weights.

    Args:
        name: one of `NAMES`.
        num_classes: outputs per image, per pixel (unet) or per token (gpt: vocabulary).
        sizes: keyword arguments of the network's class, such as `width` or `depth`.

    Returns:
        The network, in training mode. Output shape: (batch, num_classes); unet
        (batch, num_classes, height, width); gpt (batch, length, num_classes).

    Raises:
        ValueError: the name is unknown, or a size does not fit the network.
    """
    if name not in _NETWORKS:
        raise ValueError(f"No network named {name!r}; choose one of {', '.join(NAMES)}.")
    return _NETWORKS[name](num_classes=num_classes, **sizes)


class AlexNet(nn.Module):
    """The one-tower form (Krizhevsky 2014), for 3x224x224 and down to 3x63x63."""

    def __init__(self, num_classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_conv_relu(3, 64, kernel=11, stride=4, padding=2),
            nn.MaxPool2d(3, 2),
            *_conv_relu(64, 192, kernel=5, padding=2),
            nn.MaxPool2d(3, 2),
            *_conv_relu(192, 384),
            *_conv_relu(384, 256),
            *_conv_relu(256, 256),
            nn.MaxPool2d(3, 2),
        )
        self.pool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),
        )
        self.apply(_init_convnet)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x = self.pool(self.features(x_NCHW))
        logits: Tensor = self.classifier(torch.flatten(x, 1))
        return logits


class VGG16(nn.Module):
    """Configuration D without batch normalisation (Simonyan & Zisserman 2015)."""

    STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))

    def __init__(self, num_classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width, depth in self.STAGES:
            for _ in range(depth):
                layers += _conv_relu(channels, width)
                channels = width
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, num_classes),
        )
        self.apply(_init_convnet)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x = self.pool(self.features(x_NCHW))
        logits: Tensor = self.classifier(torch.flatten(x, 1))
        return logits


class Residual(nn.Module):
    """relu(body(x) + shortcut(x)): both residual blocks of He et al. 2016."""

    def __init__(self, body: nn.Module, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(*_conv_bn(channels, width, kernel=1, stride=stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += self.shortcut(x)
        activated: Tensor = self.relu(out)
        return activated


def _basic(channels: int, width: int, stride: int) -> nn.Module:
    body = nn.Sequential(
        *_conv_bn(channels, width, stride=stride),
        nn.ReLU(inplace=True),
        *_conv_bn(width, width),
    )
    return Residual(body, channels, width, stride)


def _bottleneck(channels: int, width: int, stride: int) -> nn.Module:
    """Stride sits on the 3x3 convolution, as in the common "v1.5" form."""
    body = nn.Sequential(
        *_conv_bn(channels, width // 4, kernel=1),
        nn.ReLU(inplace=True),
        *_conv_bn(width // 4, width // 4, stride=stride),
        nn.ReLU(inplace=True),
        *_conv_bn(width // 4, width, kernel=1),
    )
    return Residual(body, channels, width, stride)


class ResNet(nn.Module):
    """ResNet for ImageNet (He et al. 2016): four stages of residual blocks."""

    def __init__(
        self,
        num_classes: int,
        block: Callable[[int, int, int], nn.Module],
        depths: tuple[int, ...],
        widths: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *_conv_bn(3, 64, kernel=7, stride=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.stages = nn.Sequential()
        channels = 64
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            blocks = nn.Sequential()
            for index in range(depth):
                blocks.append(block(channels, width, 2 if stage and not index else 1))
                channels = width
            self.stages.append(blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)
        self.apply(_init_convnet)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x = self.pool(self.stages(self.stem(x_NCHW)))
        logits: Tensor = self.classifier(torch.flatten(x, 1))
        return logits


class SqueezeExcite(nn.Module):
    """Channel gates from the pooled image (Hu et al. 2018)."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.expand = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.adaptive_avg_pool2d(x, 1)
        gate = self.expand(F.silu(self.reduce(gate), inplace=True))
        return x * torch.sigmoid(gate)


class InvertedResidual(nn.Module):
    """MBConv: expand, depthwise, squeeze-excite, project (Tan & Le 2019)."""

    def __init__(self, channels: int, width: int, expand: int, kernel: int, stride: int, drop: float) -> None:
        super().__init__()
        inner = channels * expand
        layers: list[nn.Module] = []
        if expand != 1:
            layers += [*_conv_bn(channels, inner, kernel=1), nn.SiLU(inplace=True)]
        layers += _conv_bn(inner, inner, kernel=kernel, stride=stride, groups=inner)
        layers += [nn.SiLU(inplace=True), SqueezeExcite(inner, channels // 4)]
        layers += _conv_bn(inner, width, kernel=1)
        self.body = nn.Sequential(*layers)
        self.has_shortcut = stride == 1 and channels == width
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return x + _stochastic_depth(out, self.drop, self.training) if self.has_shortcut else out


def _stochastic_depth(x: Tensor, drop: float, training: bool) -> Tensor:
    """Zero whole samples with probability `drop`, scaling the others up."""
    if not training or drop == 0.0:
        return x
    keep = x.new_empty(x.shape[0], *[1] * (x.dim() - 1)).bernoulli_(1.0 - drop)
    return x * keep.div_(1.0 - drop)


class EfficientNetB0(nn.Module):
    """EfficientNet-B0 (Tan & Le 2019, table 1). `stochastic_depth=0` turns it off."""

    # expansion, kernel, stride, width, depth
    STAGES = (
        (1, 3, 1, 16, 1),
        (6, 3, 2, 24, 2),
        (6, 5, 2, 40, 2),
        (6, 3, 2, 80, 3),
        (6, 5, 1, 112, 3),
        (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    )

    def __init__(self, num_classes: int, dropout: float = 0.2, stochastic_depth: float = 0.2) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_conv_bn(3, 32, stride=2), nn.SiLU(inplace=True))
        self.blocks = nn.Sequential()
        channels, total = 32, sum(depth for *_, depth in self.STAGES)
        for expand, kernel, stride, width, depth in self.STAGES:
            for index in range(depth):
                drop = stochastic_depth * len(self.blocks) / total
                first_stride = stride if index == 0 else 1
                self.blocks.append(InvertedResidual(channels, width, expand, kernel, first_stride, drop))
                channels = width
        self.head = nn.Sequential(*_conv_bn(channels, 1280, kernel=1), nn.SiLU(inplace=True))
        self.dropout = nn.Dropout(dropout, inplace=True)
        self.classifier = nn.Linear(1280, num_classes)
        self.apply(_init_convnet)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.head(self.blocks(self.stem(x_NCHW))), 1)
        logits: Tensor = self.classifier(self.dropout(torch.flatten(x, 1)))
        return logits


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015), padded and batch-normalised as now usual.

    Height and width must be multiples of 2**depth.
    """

    def __init__(self, num_classes: int, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        inputs = [3, *widths]
        self.down = nn.ModuleList(_double_conv(a, b) for a, b in zip(inputs, widths, strict=False))
        ups = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in ups)
        self.merge = nn.ModuleList(_double_conv(a, b) for a, b in ups)
        self.classifier = nn.Conv2d(width, num_classes, 1)
        self.apply(_init_convnet)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        x, skips = self.down[0](x_NCHW), []
        for down in self.down[1:]:
            skips.append(x)
            x = down(F.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat((skips.pop(), up(x)), dim=1))
        logits: Tensor = self.classifier(x)
        return logits


class Attention(nn.Module):
    """Multi-head self-attention through scaled_dot_product_attention."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"Width {width} does not split into {heads} heads; make width a multiple of heads."
            )
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.heads, self.dropout, self.causal = heads, dropout, causal

    def forward(self, x_NTC: Tensor) -> Tensor:
        qkv = self.qkv(x_NTC).unflatten(-1, (3, self.heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        drop = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=drop, is_causal=self.causal)
        projected: Tensor = self.project(out.transpose(1, 2).flatten(2))
        return projected


class TransformerBlock(nn.Module):
    """Pre-norm attention and a four times wider GELU layer, each with a shortcut."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool, gelu: str, eps: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = Attention(width, heads, dropout, causal)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        self.dropout, self.gelu = nn.Dropout(dropout), gelu

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        hidden = F.gelu(self.expand(self.norm2(x)), approximate=self.gelu)
        out: Tensor = x + self.dropout(self.project(hidden))
        return out


class GPT(nn.Module):
    """A GPT-2 style language model (Radford et al. 2019); head tied to the embedding.

    GPT-2 small is `build("gpt", 50257, width=768, depth=12, heads=12, context=1024)`.
    """

    def __init__(
        self,
        num_classes: int,
        width: int = 256,
        depth: int = 4,
        heads: int = 4,
        context: int = 256,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_classes, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, dropout, True, "tanh", 1e-5) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width)
        self.apply(_init_transformer)
        _shrink_residual_projections(self.blocks)

    def forward(self, tokens_NT: Tensor) -> Tensor:
        positions = torch.arange(tokens_NT.shape[1], device=tokens_NT.device)
        x = self.dropout(self.tokens(tokens_NT) + self.positions(positions))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class ViT(nn.Module):
    """Vision transformer (Dosovitskiy et al. 2021); the image size is fixed at build."""

    def __init__(
        self,
        num_classes: int,
        width: int = 192,
        depth: int = 6,
        heads: int = 3,
        patch: int = 16,
        image: int = 224,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if image % patch:
            raise ValueError(
                f"Image side {image} does not split into patches of {patch}; make image a multiple of patch."
            )
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (image // patch) ** 2 + 1, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, heads, dropout, False, "none", 1e-6) for _ in range(depth))
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.classifier = nn.Linear(width, num_classes)
        self.apply(_init_transformer)
        nn.init.trunc_normal_(self.positions, std=0.02)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        patches_NTC = self.patches(x_NCHW).flatten(2).transpose(1, 2)
        token = self.class_token.expand(x_NCHW.shape[0], -1, -1)
        x = self.dropout(torch.cat((token, patches_NTC), dim=1) + self.positions)
        logits: Tensor = self.classifier(self.norm(self.blocks(x))[:, 0])
        return logits


def _conv_relu(
    channels: int, width: int, *, kernel: int = 3, stride: int = 1, padding: int = 1
) -> list[nn.Module]:
    conv = nn.Conv2d(channels, width, kernel, stride=stride, padding=padding)
    return [conv, nn.ReLU(inplace=True)]


def _conv_bn(
    channels: int, width: int, *, kernel: int = 3, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    conv = nn.Conv2d(channels, width, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(width)]


def _double_conv(channels: int, width: int) -> nn.Module:
    first, second = _conv_bn(channels, width), _conv_bn(width, width)
    return nn.Sequential(*first, nn.ReLU(inplace=True), *second, nn.ReLU(inplace=True))


def _init_convnet(module: nn.Module) -> None:
    """He et al. 2015 with fan-out for convolutions; N(0, 0.01) for linear layers."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        taps = module.kernel_size[0] * module.kernel_size[1]
        fan_out = taps * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=(2.0 / fan_out) ** 0.5)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.01)
    else:
        return
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def _init_transformer(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _shrink_residual_projections(blocks: nn.Sequential) -> None:
    """GPT-2's 1/sqrt(number of residual additions) on every projection back."""
    for name, parameter in blocks.named_parameters():
        if name.endswith("project.weight"):
            nn.init.trunc_normal_(parameter, std=0.02 / (2 * len(blocks)) ** 0.5)


_NETWORKS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "alexnet": AlexNet,
        "vgg16": VGG16,
        "resnet18": partial(ResNet, block=_basic, depths=(2, 2, 2, 2), widths=(64, 128, 256, 512)),
        "resnet50": partial(ResNet, block=_bottleneck, depths=(3, 4, 6, 3), widths=(256, 512, 1024, 2048)),
        "efficientnet_b0": EfficientNetB0,
        "unet": UNet,
        "gpt": GPT,
        "vit": ViT,
        "vit_b16": partial(ViT, width=768, depth=12, heads=12),
    }
)
NAMES: tuple[str, ...] = tuple(_NETWORKS)
