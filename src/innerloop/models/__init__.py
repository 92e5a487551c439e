"""Models of few-shot learning, and the DenseNet-BC of the paper's first experiment."""

from innerloop.models.by_name import NAMES as NAMES
from innerloop.models.by_name import build as build
from innerloop.models.by_name import check as check
from innerloop.models.densenet import DenseNet as DenseNet
from innerloop.models.densenet import DenseNetBC as DenseNetBC
from innerloop.models.mlp import MLP as MLP
from innerloop.models.resnet import ResNet as ResNet
from innerloop.models.vgg import VGG as VGG
