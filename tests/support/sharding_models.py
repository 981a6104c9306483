"""Small models and data for tests of sharding."""

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn

from paddle_vl.nn.linear import Embedding, Linear, VocabHead
from paddle_vl.nn.operations import rms_norm
from paddle_vl.parallel.recompute import recompute_layers

VOCAB, DIM, ROWS = 11, 6, 5
NUM_LAYERS, NUM_BLOCKS = 3, 2
# For memory checks: width of the square float32 weight of each layer, and number of layers.
WIDE, NUM_WIDE = 256, 8
WIDE_BYTES = WIDE * WIDE * 4


class Block(nn.Layer):
    """A sharding unit whose input needs no gradient, as in a vision tower."""

    def __init__(self):
        super().__init__()
        self.proj = Linear(DIM, DIM, bias=True, init_std=0.4)

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD + paddle.tanh(self.proj(x_TD))


class Layer(nn.Layer):
    """A sharding unit with every difficult case: weights that autograd or a PyLayer saves, a frozen
    weight, one smaller than the group, a table, slices, and a gradient through a long chain of
    operations on weights only."""

    def __init__(self, is_sided: bool):
        super().__init__()
        self.is_sided = is_sided
        self.norm = self.create_parameter([DIM], default_initializer=nn.initializer.Constant(1.0))
        self.up = Linear(DIM, 7, bias=True, init_std=0.4)
        self.down = Linear(7, DIM, bias=False, init_std=0.4)
        self.sliced = self.create_parameter([DIM, 9])
        self.scale = self.create_parameter([1], default_initializer=nn.initializer.Constant(0.7))
        self.table = self.create_parameter([3, DIM])
        self.frozen = self.create_parameter([DIM, DIM])
        self.frozen.stop_gradient = True

    def forward(self, x_TD: Tensor, side_TD: Tensor, sizes: tuple[int, ...]) -> Tensor:
        h_TD = rms_norm(x_TD, self.norm, 1e-6)
        h_TD = self.down(F.silu(self.up(h_TD))) * self.scale + paddle.matmul(h_TD, self.frozen)
        h_TD = h_TD + paddle.matmul(h_TD, self.sliced[:, 2 : 2 + DIM])
        h_TD = h_TD + F.embedding(paddle.arange(ROWS) % 3, self.table)
        chained = self.norm * self.scale
        for _ in range(20):
            chained = paddle.tanh(chained * self.norm)
        x_TD = x_TD + h_TD + chained * len(sizes)
        return x_TD + side_TD if self.is_sided else x_TD


class Toy(nn.Layer):
    """Blocks over pixels, layers over tokens, and tables and parameters of the root."""

    def __init__(self, is_tied: bool = False):
        super().__init__()
        self.embedding = Embedding(VOCAB, DIM, init_std=0.5)
        self.blocks = nn.LayerList([Block() for _ in range(NUM_BLOCKS)])
        self.layers = nn.LayerList([Layer(is_sided=i < 2) for i in range(NUM_LAYERS)])
        self.rare = self.create_parameter([DIM], default_initializer=nn.initializer.Constant(0.3))
        self.fixed = self.create_parameter([DIM], default_initializer=nn.initializer.Constant(0.9))
        self.fixed.stop_gradient = True
        tied_weight = self.embedding.weight if is_tied else None
        self.head = VocabHead(DIM, VOCAB, init_std=0.5, tied_weight=tied_weight)

    @property
    def units(self) -> list[nn.Layer]:
        return [*self.blocks, *self.layers]

    @property
    def chains(self) -> list[list[nn.Layer]]:
        return [list(self.blocks), list(self.layers)]

    @property
    def tables(self) -> list[nn.Layer]:
        return [self.embedding, self.head]

    def forward(self, ids_T: Tensor, pixels_TD: Tensor | None, uses_rare: bool) -> Tensor:
        """The loss; without pixels, as in a text batch, no block runs."""
        side_TD = paddle.zeros([ROWS, DIM]) if pixels_TD is None else pixels_TD
        for block in self.blocks if pixels_TD is not None else ():
            side_TD = block(side_TD)
        x_TD = self.embedding(ids_T) * self.fixed
        if uses_rare:
            x_TD = x_TD * self.rare
        for layer in self.layers:
            x_TD = layer(x_TD, side_TD, (1, 2))
        return (self.head(x_TD) ** 2).mean()


class Wide(nn.Layer):
    """A product with few rows: the weight takes nearly all of the layer's memory."""

    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([WIDE, WIDE])

    def forward(self, x_TD: Tensor) -> Tensor:
        return paddle.tanh(paddle.matmul(x_TD, self.weight))


class WideStack(nn.Layer):
    def __init__(self):
        super().__init__()
        self.units = nn.LayerList([Wide() for _ in range(NUM_WIDE)])
        self.chains, self.tables = [self.units], []

    def forward(self, x_TD: Tensor) -> Tensor:
        for unit in self.units:
            x_TD = unit(x_TD)
        return x_TD.mean()


class Half(nn.Layer):
    """A weight stored in bfloat16 but used in float32, because CPUs cannot compute in bfloat16."""

    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([3, 5], dtype="bfloat16")
        self.bias = self.create_parameter([5])

    def forward(self, x_TD: Tensor) -> Tensor:
        return paddle.matmul(x_TD, self.weight.astype("float32")) + self.bias


class HalfModel(nn.Layer):
    def __init__(self):
        super().__init__()
        self.units = nn.LayerList([Half()])
        self.chains, self.tables = [self.units], []

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.units[0](x_TD).sum()


def sample(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor, bool]:
    """A rank's micro-batch; only rank 0 uses the rare parameter, in its first micro-batch."""
    random = np.random.default_rng([step, micro, rank])
    ids_T = random.integers(0, VOCAB, ROWS)
    pixels_TD = random.normal(size=(ROWS, DIM)).astype(np.float32)
    return paddle.to_tensor(ids_T), paddle.to_tensor(pixels_TD), rank == 0 and micro == 0


def toy(recomputed: bool = False) -> Toy:
    paddle.seed(5)
    model = Toy()
    if recomputed:
        recompute_layers(model.units)
    return model


def trained(model: nn.Layer) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if not parameter.stop_gradient]
