"""Networks and data of experiments/training: gradients against finite differences, files as packages have them."""

import numpy as np
import pytest
from layers import LSTM, Affine, Convolution, Flatten, Pool, Relu
from network import Network, perceptron
from tasks import of_images, of_plays

RNG = np.random.default_rng(0)
CONVOLUTIONS = [
    Convolution("one", 2, 3, 3),
    Pool(),
    Relu(),
    Convolution("two", 3, 2, 2),
]
NETWORKS = {
    "perceptron": (
        perceptron(5, 7, 3),
        RNG.standard_normal((20, 5)),
        RNG.integers(3, size=20),
    ),
    "convolutional": (
        [*CONVOLUTIONS, Flatten(), Affine("out", 8, 4)],
        RNG.standard_normal((2, 8, 8, 3)),
        RNG.integers(4, size=3),
    ),
    "recurrent": (
        [LSTM("lstm", 3, 4), LSTM("above", 4, 4), Affine("out", 4, 5)],
        RNG.standard_normal((2, 6, 3)),
        RNG.integers(5, size=(2, 6)),
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradient_of_a_network_is_the_slope_of_its_loss(name):
    layers, inputs, labels = NETWORKS[name]
    network = Network(layers, 0)
    start, h = network.parameters.astype(float), 1e-6
    gradient = network.gradient(inputs, labels, start)

    def loss(at):
        return network.evaluate(inputs, labels, at)[0]

    slopes = [
        (loss(start + step) - loss(start - step)) / (2 * h)
        for step in h * np.eye(start.size)
    ]
    np.testing.assert_allclose(gradient, slopes, atol=1e-8)
    assert np.abs(gradient).max() > 0.01


@pytest.mark.slow
def test_both_networks_have_the_sizes_of_the_papers_and_learn():
    raw = np.zeros((200, 28, 28), np.uint8)
    labels = np.arange(200) % 10
    raw[np.arange(200), 3 + 2 * labels] = 255  # a line whose height is the class
    for task, size, rate in (
        (of_images(raw, labels, 40), 147_146, 0.1),
        (of_plays(b"abcdefgh " * 900), 71_817, 1.0),
    ):
        network, chosen = task.network(0), task.training("test")[:32]
        assert task.parameters == size
        before = task.evaluate(network, task.held_out("test"))[0]
        for _ in range(30):
            network.parameters -= np.float32(rate) * network.gradient(
                *task.examples(chosen)
            )
        assert task.evaluate(network, task.held_out("test"))[0] < 0.7 * before
