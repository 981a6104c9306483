"""Small models, data and steps for tests of sharding."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle import Tensor, nn
from paddle.distributed import fleet

from paddle_vl.checkpoint.reading import Materializable
from paddle_vl.config.schema import TrainConfig
from paddle_vl.nn.linear import Embedding, Linear, VocabHead, gradient_of
from paddle_vl.nn.master_weights import MasterWeights
from paddle_vl.nn.operations import rms_norm
from paddle_vl.nn.parameter_table import ParameterTable
from paddle_vl.parallel.ranks import ONE_RANK, FleetRanks
from paddle_vl.parallel.recompute import recompute_layers
from paddle_vl.parallel.sharding import FleetSharding, Sharding, ShardingOptions
from paddle_vl.parallel.topology import Topology
from paddle_vl.train.optimizer import Optimizer
from tests.support.states import gathered, states_of

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


def sample(step: int, micro: int, rank: int, always: bool = False) -> tuple[Tensor, Tensor, bool]:
    """A rank's micro-batch; only rank 0 uses the rare parameter, in its first micro-batch or
    always."""
    random = np.random.default_rng([step, micro, rank])
    ids_T = random.integers(0, VOCAB, ROWS)
    pixels_TD = random.normal(size=(ROWS, DIM)).astype(np.float32)
    uses_rare = rank == 0 and (always or micro == 0)
    return paddle.to_tensor(ids_T), paddle.to_tensor(pixels_TD), uses_rare


def toy(recomputed: bool = False) -> Toy:
    paddle.seed(5)
    model = Toy()
    if recomputed:
        recompute_layers(model.units)
    return model


def trained(model: nn.Layer) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if not parameter.stop_gradient]


RATE = 0.02
_TRAIN = TrainConfig(output_dir="unused", learning_rate=RATE, weight_decay=0.1, max_grad_norm=0.5)
_FLEETS = {
    "comm_buffer_size_MB": 256, "comm_overlap": False, "enable_fuse_optimizer_states": False,
}  # fmt: skip


class Mode(NamedTuple):
    """A sharding stage and its options; 0 is one device.

    Attributes:
        fleets: fleet's options of stage 1.
        overlaps_gathers: of stage 1.
    """

    stage: int
    options: ShardingOptions = ShardingOptions()
    fleets: Mapping[str, Any] = {}
    overlaps_gathers: bool = False


_ONE_DEVICE = Mode(0)


class Run:
    """A model with its optimizer at a sharding stage."""

    def __init__(
        self,
        model: Any,
        topology: Topology | None,
        mode: Mode = _ONE_DEVICE,
        chains: Sequence[Sequence[nn.Layer]] | None = None,
    ):
        self.model, self.topology, self.mode = model, topology, mode
        self.ranks = ONE_RANK if topology is None else FleetRanks(topology)
        placement = getattr(model, "placement", None)
        if placement is None:
            self.table = ParameterTable()
            for parameter in model.parameters():
                self.table.add([parameter])
        else:
            self.table = placement.parameter_table
        self.chains = model.chains if chains is None else chains
        self.tables = getattr(model, "tables", ())
        parameters = model.parameters()
        if isinstance(model, Materializable):
            parameters = model.materialize()
        self.trained: Any
        if mode.stage == 0:
            self.trained = MasterWeights(parameters)
        elif mode.stage == 1:
            configs = fleet.fleet._user_defined_strategy.strategy.hybrid_configs.sharding_configs
            for name, value in {**_FLEETS, **mode.fleets}.items():
                setattr(configs, name, value)
            units = [unit for chain in self.chains for unit in chain]
            self.trained = FleetSharding(
                parameters, topology, self.table, units, mode.overlaps_gathers
            )
        else:
            group = topology.sharding_group
            self.trained = Sharding(
                parameters, group, mode.stage, self.chains, self.tables, mode.options
            )
        named = [(n, p) for n, p in model.named_parameters() if not p.stop_gradient]
        decayed = {name for name, _ in named if not name.endswith("norm")}
        factors = {name: 0.5 for name, _ in named if ".up." in name}
        self.optimizer = Optimizer(
            named, _TRAIN, decayed, self.trained, self.table, rate_factors=factors
        )

    def backward(self, batches: Sequence[tuple], begins: bool = True) -> float:
        """The loss of these micro-batches."""
        total = 0.0
        if begins:
            self.trained.begin_step(len(batches))
        for batch in batches:
            loss = self.model(*batch)
            loss.backward()
            self.trained.end_micro_batch()
            total += loss.item()
        self.sum_gradients()
        return total

    def sum_gradients(self) -> None:
        self.trained.end_backward()
        self.ranks.sum_gradients(self.optimizer.tensors_with_specs)

    def update(self) -> float:
        """The gradient norm; without an update where it is not finite."""
        squares = self.optimizer.squared_norm(self.ranks)
        norm = self.ranks.sum_over_all(squares).sqrt().item()
        if np.isfinite(norm):
            self.optimizer.update(RATE, norm)
        self.optimizer.clear_gradients()
        return norm

    def gradients(self) -> dict[str, np.ndarray]:
        """Full gradients by name."""
        found = {}
        for name, parameter in self.optimizer.parameters:
            updated = self.trained.shard_of(parameter)
            grad = paddle.zeros([0]) if updated is None else gradient_of(updated)
            whole = gathered(self.trained, parameter, grad)
            found[f"gradient of {name}"] = whole.numpy().copy()
        return found

    def parameters(self) -> dict[str, np.ndarray]:
        """Full parameters by name."""
        return {
            name: self.trained.gathered_value(parameter).astype("float32").numpy().copy()
            for name, parameter in self.model.named_parameters()
        }

    def values(self) -> dict[str, np.ndarray]:
        """Full parameters and optimizer states."""
        return self.parameters() | states_of(self.optimizer)

    def train(self, of_steps: Sequence[Sequence[tuple]]) -> dict[str, Any]:
        """Losses and norms of all steps, gradients of the first, values after the last one."""
        losses, norms, first = [], [], {}
        for batches in of_steps:
            losses.append(self.backward(batches))
            first = first or self.gradients()
            norms.append(self.update())
        return {"losses": losses, "norms": norms} | first | self.values()
