"""Episodes, samplers and datasets for few-shot learning."""

from innerloop.data.cifar import Cifar10 as Cifar10
from innerloop.data.cifar import Labelled as Labelled
from innerloop.data.cifar import cifar10 as cifar10
from innerloop.data.fetch import fetch as fetch
from innerloop.data.folder import folder as folder
from innerloop.data.glyphs import glyphs as glyphs
from innerloop.data.images import Images as Images
from innerloop.data.images import Splits as Splits
from innerloop.data.load import NAMES as NAMES
from innerloop.data.load import load as load
from innerloop.data.mini_imagenet import mini_imagenet as mini_imagenet
from innerloop.data.omniglot import omniglot as omniglot
from innerloop.data.sampler import Batch as Batch
from innerloop.data.sampler import Episode as Episode
from innerloop.data.sampler import Sampler as Sampler
