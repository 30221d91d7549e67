"""Residual and mobile convolution networks with random, seeded weights: ResNet-18/50, MobileNetV2/V3, ConvNeXt."""

from __future__ import annotations

import torch
from torch import nn


class ConvBN(nn.Sequential):
    """Convolution, BatchNorm with non-trivial statistics, activation."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: nn.Module | None = None
    ) -> None:
        norm = nn.BatchNorm2d(outputs)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, std=0.2)
        nn.init.normal_(norm.running_mean, std=0.1)
        nn.init.uniform_(norm.running_var, 0.5, 1.5)
        layers: list[nn.Module] = [
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
            norm,
        ]
        super().__init__(*layers, *([act] if act is not None else []))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = ConvBN(inputs, width, 3, stride, act=nn.ReLU())
        self.conv2 = ConvBN(width, width, 3)
        self.downsample = ConvBN(inputs, width, 1, stride) if stride != 1 or inputs != width else None
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        return self.relu(self.conv2(self.conv1(x)) + skip)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = ConvBN(inputs, width, 1, act=nn.ReLU())
        self.conv2 = ConvBN(width, width, 3, stride, act=nn.ReLU())
        self.conv3 = ConvBN(width, 4 * width, 1)
        self.downsample = ConvBN(inputs, 4 * width, 1, stride) if stride != 1 or inputs != 4 * width else None
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = x if self.downsample is None else self.downsample(x)
        return self.relu(self.conv3(self.conv2(self.conv1(x))) + skip)


class ResNet(nn.Module):
    def __init__(self, block: type[nn.Module], depths: tuple[int, ...], classes: int = 1000) -> None:
        super().__init__()
        expansion = 4 if block is Bottleneck else 1
        self.stem = ConvBN(3, 64, 7, 2, act=nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        stages, channels = [], 64
        for number, depth in enumerate(depths):
            width = 64 << number
            blocks = []
            for index in range(depth):
                blocks.append(block(channels, width, 2 if number and not index else 1))
                channels = width * expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.stages(self.pool(self.stem(x))))
        return self.fc(torch.flatten(x, 1))


def resnet18(classes: int = 1000) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), classes)


def resnet50(classes: int = 1000) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), classes)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.act, self.gate = nn.ReLU(), nn.Hardsigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(self.fc2(self.act(self.fc1(self.pool(x)))))


class InvertedResidual(nn.Module):
    def __init__(
        self, inputs: int, hidden: int, outputs: int, kernel: int, stride: int, act: type[nn.Module], squeeze: int = 0
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [] if hidden == inputs else [ConvBN(inputs, hidden, 1, act=act())]
        layers.append(ConvBN(hidden, hidden, kernel, stride, groups=hidden, act=act()))
        if squeeze:
            layers.append(SqueezeExcite(hidden, squeeze))
        layers.append(ConvBN(hidden, outputs, 1))
        self.layers = nn.Sequential(*layers)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layers(x)
        return x + out if self.residual else out


class MobileNetV2(nn.Module):
    SETTINGS = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [ConvBN(3, 32, 3, 2, act=nn.ReLU6())]
        channels = 32
        for expand, outputs, repeats, stride in self.SETTINGS:
            for index in range(repeats):
                layers.append(
                    InvertedResidual(channels, channels * expand, outputs, 3, stride if not index else 1, nn.ReLU6)
                )
                channels = outputs
        self.features = nn.Sequential(*layers, ConvBN(channels, 1280, 1, act=nn.ReLU6()))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(1280, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.flatten(self.pool(self.features(x)), 1))


class MobileNetV3(nn.Module):
    """The small variant: squeeze-and-excitation gates, HardSwish."""

    #           kernel, hidden, out, squeeze, hardswish, stride
    SETTINGS = (
        (3, 16, 16, 8, False, 2), (3, 72, 24, 0, False, 2), (3, 88, 24, 0, False, 1), (5, 96, 40, 24, True, 2),
        (5, 240, 40, 64, True, 1), (5, 120, 48, 32, True, 1), (5, 288, 96, 72, True, 2), (5, 576, 96, 144, True, 1),
    )  # fmt: skip

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [ConvBN(3, 16, 3, 2, act=nn.Hardswish())]
        channels = 16
        for kernel, hidden, outputs, squeeze, hardswish, stride in self.SETTINGS:
            act = nn.Hardswish if hardswish else nn.ReLU
            layers.append(InvertedResidual(channels, hidden, outputs, kernel, stride, act, squeeze))
            channels = outputs
        self.features = nn.Sequential(*layers, ConvBN(channels, 576, 1, act=nn.Hardswish()))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Linear(576, 1024), nn.Hardswish(), nn.Linear(1024, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm over the channels of an NCHW tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.act = nn.GELU()
        self.gamma = nn.Parameter(0.3 * torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pwconv2(self.act(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(
        self, depths: tuple[int, ...] = (2, 2, 3, 2), widths: tuple[int, ...] = (48, 96, 192, 384), classes: int = 100
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), ChannelLayerNorm(widths[0])]
        for number, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            if number:
                layers += [ChannelLayerNorm(widths[number - 1]), nn.Conv2d(widths[number - 1], width, 2, 2)]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        self.features = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.features(x).mean((2, 3))))
