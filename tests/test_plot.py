"""The figure of an unrolled inner loop."""

import sys

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import innerloop as il
from innerloop.diagnose import diagnose
from innerloop.plot import plot_unroll


def squares(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


@pytest.fixture
def setup():
    model = nn.Linear(2, 1)
    inner = il.InnerLoop(
        model, torch.optim.SGD(model.parameters(), lr=0.1), squares, learn=("init", "lr")
    )
    *train, val = [(torch.randn(5, 2), torch.randn(5, 1)) for _ in range(5)]
    return inner, train, val


def test_a_report_is_drawn(setup, tmp_path):
    report = diagnose(*setup)
    figure = plot_unroll(report)
    loss, norms, memory = figure.axes
    assert isinstance(figure, Figure)
    assert list(loss.lines[0].get_ydata()) == list(report.losses)
    assert list(loss.lines[1].get_ydata()) == [report.val_loss]
    assert list(norms.lines[0].get_ydata()) == list(report.b_norms)
    assert list(norms.lines[1].get_ydata()) == list(report.grad_norms)
    assert norms.get_yscale() == "log"
    assert len(memory.patches) == len(report.memory.rows)
    shown = [label.get_text() for label in memory.get_yticklabels()]
    assert shown == [str(row.strategy) for row in report.memory.rows]
    figure.savefig(tmp_path / "unroll.png")
    assert (tmp_path / "unroll.png").stat().st_size > 0


def test_an_inner_loop_is_diagnosed_first(setup):
    figure = plot_unroll(*setup)
    assert list(figure.axes[0].lines[0].get_ydata()) == list(diagnose(*setup).losses)
    assert "4 steps with Tape()" in figure.get_suptitle()


def test_what_could_not_be_measured_is_left_empty(setup, tmp_path):
    inner, train, val = setup
    inner.loss = lambda model, batch: squares(model, batch).detach()
    figure = plot_unroll(inner, train, val)
    figure.savefig(tmp_path / "empty.png")
    assert [ax.texts[0].get_text() for ax in figure.axes] == ["not measured"] * 3


def test_norms_of_zero_are_left_out(setup):
    inner, train, val = setup
    inner.val_loss = lambda model, batch: squares(model, batch) * 0
    figure = plot_unroll(inner, train, val)
    assert [line.get_label() for line in figure.axes[1].lines] == ["|G_j|"]


def test_the_wrong_thing_is_refused(setup):
    with pytest.raises(il.InnerLoopError, match="You gave a Linear to plot_unroll"):
        plot_unroll(nn.Linear(1, 1))
    with pytest.raises(il.InnerLoopError, match="without batches"):
        plot_unroll(setup[0])


def test_without_matplotlib_the_error_names_the_extra(setup, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[plot\]'"):
        plot_unroll(*setup)
