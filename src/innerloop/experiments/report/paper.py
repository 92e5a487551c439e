"""The numbers of the paper: Table 1, and the appendix's "Full MAML++ model and inner optimizer
sweep search results". Accuracies on test tasks in percent, mean and standard deviation over three
seeds."""

from __future__ import annotations

from typing import NamedTuple


class Cell(NamedTuple):
    """A kind of task: a column of Table 1."""

    dataset: str
    way: int
    shot: int


class Setup(NamedTuple):
    """A kind of task, a model and an inner optimizer: a row of the appendix table."""

    dataset: str
    way: int
    shot: int
    model: str
    inner_optim: str

    @property
    def cell(self) -> Cell:
        return Cell(self.dataset, self.way, self.shot)


class Reported(NamedTuple):
    """An accuracy in percent and its spread."""

    mean: float
    std: float


CELLS = (
    Cell("omniglot", 5, 1),
    Cell("omniglot", 5, 5),
    Cell("omniglot", 20, 1),
    Cell("omniglot", 20, 5),
    Cell("mini-imagenet", 5, 1),
    Cell("mini-imagenet", 5, 5),
)


def _row(*numbers: tuple[float, float]) -> dict[Cell, Reported]:
    return {cell: Reported(*pair) for cell, pair in zip(CELLS, numbers, strict=True)}


# Table 1, row by row.
ANTONIOU = _row(
    (99.53, 0.26), (99.93, 0.09), (97.65, 0.05), (99.33, 0.03), (52.15, 0.26), (68.32, 0.44)
)
BASE = _row(
    (99.62, 0.08), (99.86, 0.02), (97.21, 0.11), (99.13, 0.13), (56.33, 0.27), (75.13, 0.67)
)
BEST = _row(
    (99.91, 0.05), (99.87, 0.03), (99.00, 0.33), (99.76, 0.01), (56.33, 0.27), (76.73, 0.52)
)
BEST_SETUP = dict(
    zip(
        CELLS,
        (
            ("resnet-4", "sgd"),
            ("resnet-4", "sgd"),
            ("resnet-12", "sgd"),
            ("resnet-8", "sgd"),
            ("vgg", "sgd"),
            ("resnet-8", "sgd"),
        ),
        strict=True,
    )
)

_APPENDIX = """
mini-imagenet 5 1 densenet-8 sgd 46.08 1.40
mini-imagenet 5 1 resnet-12 sgd 51.06 1.51
mini-imagenet 5 1 resnet-4 adam 49.71 3.71
mini-imagenet 5 1 resnet-4 sgd 54.36 0.23
mini-imagenet 5 1 resnet-8 sgd 54.16 1.35
mini-imagenet 5 1 vgg adam 47.93 11.64
mini-imagenet 5 1 vgg sgd 56.33 0.27
mini-imagenet 5 5 densenet-8 sgd 65.29 0.98
mini-imagenet 5 5 resnet-12 adam 37.40 3.64
mini-imagenet 5 5 resnet-12 sgd 69.14 3.19
mini-imagenet 5 5 resnet-4 adam 76.33 0.71
mini-imagenet 5 5 resnet-4 sgd 74.48 0.77
mini-imagenet 5 5 resnet-8 adam 68.03 15.19
mini-imagenet 5 5 resnet-8 sgd 76.73 0.52
mini-imagenet 5 5 vgg adam 72.82 2.36
mini-imagenet 5 5 vgg sgd 75.13 0.67
omniglot 5 1 densenet-8 sgd 99.54 0.33
omniglot 5 1 resnet-4 sgd 99.91 0.05
omniglot 5 1 vgg adam 99.62 0.08
omniglot 5 1 vgg sgd 99.62 0.08
omniglot 5 5 densenet-8 sgd 99.86 0.05
omniglot 5 5 resnet-4 sgd 99.87 0.03
omniglot 5 5 vgg adam 99.86 0.04
omniglot 5 5 vgg sgd 99.86 0.02
omniglot 20 1 densenet-8 sgd 93.20 0.32
omniglot 20 1 resnet-12 sgd 99.00 0.33
omniglot 20 1 resnet-4 adam 98.31 0.09
omniglot 20 1 resnet-4 sgd 96.31 0.15
omniglot 20 1 resnet-8 sgd 98.50 0.15
omniglot 20 1 vgg adam 96.15 0.16
omniglot 20 1 vgg sgd 97.21 0.11
omniglot 20 5 densenet-8 sgd 97.24 0.26
omniglot 20 5 resnet-12 sgd 99.69 0.17
omniglot 20 5 resnet-4 adam 99.44 0.23
omniglot 20 5 resnet-4 sgd 99.71 0.03
omniglot 20 5 resnet-8 sgd 99.76 0.01
omniglot 20 5 vgg adam 98.74 0.04
omniglot 20 5 vgg sgd 99.13 0.13
"""


def _parse(line: str) -> tuple[Setup, Reported]:
    dataset, way, shot, model, inner_optim, mean, std = line.split()
    setup = Setup(dataset, int(way), int(shot), model, inner_optim)
    return setup, Reported(float(mean), float(std))


APPENDIX: dict[Setup, Reported] = dict(_parse(line) for line in _APPENDIX.split("\n") if line)
