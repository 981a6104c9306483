"""Dropout of token rows: off in evaluation, Paddle's own draws otherwise, and inside of what it is
told to draw inside of."""

from contextlib import contextmanager

import paddle

from paddle_vl.nn.dropout import RowDropout


def test_rows_are_dropped_in_training_only():
    x, layer = paddle.ones([6, 8]), RowDropout(0.25)
    paddle.seed(5)
    found = layer(x)
    paddle.seed(5)
    assert (found == paddle.nn.Dropout(0.25)(x)).all()
    assert 0 < (found == 0).sum() < x.size
    layer.eval()
    assert (layer(x) == x).all()
    assert (RowDropout(0.0)(x) == x).all()


def test_draws_are_inside_of_the_generator_that_is_set():
    entered, layer = [], RowDropout(0.5)

    @contextmanager
    def generator():
        entered.append(1)
        yield

    layer.random = generator
    layer(paddle.ones([4, 4]))
    layer.eval()
    layer(paddle.ones([4, 4]))
    assert entered == [1]
