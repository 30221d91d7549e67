"""Dense-prediction and sequence networks with random, seeded weights: a YOLO-like detector, U-Net, an LSTM tagger."""

from __future__ import annotations

import torch
from torch import nn

from tests.zoo.convnets import ConvBN


def conv_silu(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> ConvBN:
    return ConvBN(inputs, outputs, kernel, stride, act=nn.SiLU())


class SplitBottlenecks(nn.Module):
    """Split, bottlenecks with a residual Add, Concat of every intermediate (the C2f block)."""

    def __init__(self, inputs: int, outputs: int, depth: int, residual: bool) -> None:
        super().__init__()
        self.half = outputs // 2
        self.first = conv_silu(inputs, outputs, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(conv_silu(self.half, self.half), conv_silu(self.half, self.half)) for _ in range(depth)
        )
        self.last = conv_silu((2 + depth) * self.half, outputs, 1)
        self.residual = residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(self.first(x).split((self.half, self.half), 1))
        for block in self.blocks:
            y = block(parts[-1])
            parts.append(parts[-1] + y if self.residual else y)
        return self.last(torch.cat(parts, 1))


class PyramidPooling(nn.Module):
    """Three chained MaxPools, all concatenated (SPPF)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = conv_silu(channels, channels // 2, 1), conv_silu(2 * channels, channels, 1)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Detector(nn.Module):
    """SiLU, Split, Concat, SPPF, nearest upsampling, a two-level head with Sigmoid scores."""

    def __init__(self, classes: int = 16) -> None:
        super().__init__()
        self.stem, self.down1 = conv_silu(3, 16, 3, 2), conv_silu(16, 32, 3, 2)
        self.c1, self.down2 = SplitBottlenecks(32, 32, 1, True), conv_silu(32, 64, 3, 2)
        self.c2, self.down3 = SplitBottlenecks(64, 64, 2, True), conv_silu(64, 128, 3, 2)
        self.c3, self.sppf = SplitBottlenecks(128, 128, 1, True), PyramidPooling(128)
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.c4, self.down4 = SplitBottlenecks(192, 64, 1, False), conv_silu(64, 64, 3, 2)
        self.c5 = SplitBottlenecks(192, 128, 1, False)
        self.box = nn.ModuleList(nn.Sequential(conv_silu(c, 32), nn.Conv2d(32, 32, 1)) for c in (64, 128))
        self.score = nn.ModuleList(nn.Sequential(conv_silu(c, 32), nn.Conv2d(32, classes, 1)) for c in (64, 128))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        small = self.c2(self.down2(self.c1(self.down1(self.stem(x)))))
        large = self.sppf(self.c3(self.down3(small)))
        fine = self.c4(torch.cat([self.up(large), small], 1))
        coarse = self.c5(torch.cat([self.down4(fine), large], 1))
        boxes = [head(y).flatten(2) for head, y in zip(self.box, (fine, coarse), strict=True)]
        scores = [head(y).flatten(2) for head, y in zip(self.score, (fine, coarse), strict=True)]
        return torch.cat(boxes, 2), torch.cat(scores, 2).sigmoid()


class UNet(nn.Module):
    """Two levels, ConvTranspose upsampling, Concat skips, a one-channel mask."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()

        def double(inputs: int, outputs: int) -> nn.Sequential:
            return nn.Sequential(ConvBN(inputs, outputs, act=nn.ReLU()), ConvBN(outputs, outputs, act=nn.ReLU()))

        self.down1, self.down2, self.bottom = double(3, width), double(width, 2 * width), double(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.up2, self.up1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.merge2, self.merge1 = double(4 * width, 2 * width), double(2 * width, width)
        self.mask = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        y = self.bottom(self.pool(second))
        y = self.merge2(torch.cat([second, self.up2(y)], 1))
        y = self.merge1(torch.cat([first, self.up1(y)], 1))
        return self.mask(y).sigmoid()


class Tagger(nn.Module):
    """Convolution features, a bidirectional LSTM, a linear head."""

    def __init__(self, channels: int = 32, hidden: int = 48, tags: int = 20) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, 64, 5, padding=2)
        self.act = nn.ReLU()
        self.lstm = nn.LSTM(64, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, tags)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.lstm(self.act(self.conv(x)).transpose(1, 2))
        return self.head(y)
