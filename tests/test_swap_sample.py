"""swap with a sample: what the watched run finds, and what the report says."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from swap_cases import (
    STOCK,
    Block,
    D,
    acts,
    assert_as_stock,
    batch,
    mlp,
    only,
    plain,
    some_acts,
)
from torch import nn

import memkit
from memkit import SwapReport, swap, unswap
from memkit.swap import types

pytestmark = pytest.mark.usefixtures("repeatable")


# -- by sample ---------------------------------------------------------------------------------------------------------


def add_again(self, x):
    h = self.first(x)
    return self.second(self.act(h) + h)


def multiply_again(self, x):
    h = self.first(x)
    return self.second(self.act(h) * h)


def read_through_a_view(self, x):
    h = self.first(x)
    rows = h.view(-1)
    return self.second(self.act(h) * rows[:D])


def after_sigmoid(self, x):
    h = torch.sigmoid(self.first(x))
    return self.second(self.act(h))


def chunks(self, x):
    a, b = self.first(torch.cat([x, x])).chunk(2)
    return self.second(self.act(a) * b)


def output_changed(self, x):
    y = self.act(self.first(x))
    y += x
    return self.second(y)


def output_view_changed(self, x):
    y = self.act(self.first(x))
    y.view(-1)[:2] = 0
    return self.second(y)


def returned(self, x):
    return self.act(self.first(x))


def input_returned(self, x):
    h = self.first(x)
    return self.second(self.act(h)), h


def own_input(self, x):
    return self.second(self.act(x))


def parameter(self, x):
    return self.second(self.act(self.first.weight)) + x[:1]


def stored(self, x):
    self.kept = self.first(x)
    return self.second(self.act(self.kept))


def stored_detached(self, x):
    h = self.first(x)
    self.kept = h.detach()
    return self.second(self.act(h))


def stored_in_a_list(self, x):
    self.kept = [self.first(x)]
    return self.second(self.act(self.kept[0]))


def twice_on_one(self, x):
    h = self.first(x)
    return self.second(self.act(h)) + self.second(self.act(h))


def twice_on_two(self, x):
    h = self.act(self.first(x))
    h = self.second(h)
    h = self.act(h)
    return self.second(h)


def item(self, x):
    h = self.first(x)
    y = self.act(h)
    self.mean = h.mean().item()
    return self.second(y)


def changed_past_a_dropout(self, x):
    return self.second(F.dropout(self.act(self.first(x)), 0.5, self.training).mul_(2))


def changed_past_a_drop_path(self, x):
    y = self.act(self.first(x))
    y = (y * y.new_empty(len(y), 1).bernoulli_(0.5) if self.training else y).view(-1)
    return self.second(y.mul_(2).view(x.shape))


def returned_past_dropouts(self, x):
    return F.dropout(F.dropout(self.act(self.first(x)), 0.5, self.training), 0.1, self.training)


def out_argument(self, x):
    y = self.act(self.first(x))
    torch.mul(y.detach(), 2, out=y.detach())
    return self.second(y)


REFUSED = {
    add_again: "read again by aten.add",
    multiply_again: "read again by aten.mul",
    read_through_a_view: "read again by aten",
    output_changed: "changed in place by aten.add_",
    output_view_changed: "changed in place by aten",
    out_argument: "changed in place by aten.mul.out",
    changed_past_a_dropout: "changed in place by aten.mul_",
    changed_past_a_drop_path: "changed in place by aten.mul_",
    returned_past_dropouts: "the model returns its output",
    returned: "the model returns its output",
    own_input: "its input is the model's",
}
# In place never, from the output where that saves something.
OUT_OF_PLACE = {
    parameter: "its input is a parameter",
    stored: "still held",
    stored_detached: "still held",
    stored_in_a_list: "still held",
    input_returned: "the model returns its input",
    twice_on_one: "goes through an activation again",
    item: "read again by aten.mean",
}
IN_PLACE = [plain, twice_on_two]
AT_RUN_TIME = [after_sigmoid, chunks]  # references decide in each call


@pytest.mark.parametrize("run", REFUSED)
@pytest.mark.parametrize("act", ["gelu", "elu"])
def test_refused(run, act):
    model = Block(run, STOCK[act]())
    row = only(swap(model, sample=batch()))
    assert not row.changed
    assert REFUSED[run] in row.reason
    assert_as_stock(model, batch())
    assert_as_stock(model.eval(), batch())


@pytest.mark.parametrize("run", [changed_past_a_dropout, changed_past_a_drop_path])
def test_a_norm_in_front_of_an_idle_dropout(run):
    """In evaluation, where a dropout returns its input, the norm's own result is what the model changes."""
    model = Block(run, nn.LayerNorm(D))
    row = only(swap(model, sample=batch()))
    assert row.saved == "input"
    assert REFUSED[run] in row.reason
    assert_as_stock(model.eval(), batch())


def noise_in_training(self, x):
    y = self.act(self.first(x))
    if self.training:
        y *= 2
    return self.second(y)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("act", [nn.GELU, lambda: nn.LayerNorm(D)])
def test_what_training_alone_changes_is_seen_in_evaluation(act, lean):
    model = Block(noise_in_training, act()).eval()
    row = only(swap(model, sample=batch(), lean=lean, ops={"gelu", "layer_norm"}))
    assert "changed in place by aten.mul_.Tensor in training" in row.reason or row.saved == "input"
    with memkit.lean():
        assert_as_stock(model.train(), batch())
    assert_as_stock(model.train(), batch())


def test_a_model_that_runs_in_one_mode_alone_is_swapped_by_that():
    def run(self, x):
        if self.training:
            raise ValueError("no training")
        return self.second(self.act(self.first(x)))

    model = Block(run).eval()
    assert only(swap(model, sample=batch())).after == "in place"
    assert all(not module.training for module in model.modules())


def test_selu_in_front_of_alpha_dropout_works_in_place():
    model = nn.Sequential(nn.Linear(D, D), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(D, D)).double()
    report = swap(model, sample=batch(), ops={"selu"})
    assert only(report).after == "in place"


@pytest.mark.parametrize("run", OUT_OF_PLACE)
def test_out_of_place(run, calls):
    model = Block(run)
    row = only(swap(model, sample=batch()))
    assert OUT_OF_PLACE[run] in row.reason
    assert row.after == "output", row.reason
    assert_as_stock(model, batch())
    assert not any(overwritten for _, overwritten in calls)


@pytest.mark.parametrize("run", IN_PLACE)
@acts
def test_in_place(run, act, calls):
    model = Block(run, STOCK[act]())
    row = only(swap(model, sample=batch()))
    assert row.after == "in place", row.reason
    assert_as_stock(model, batch())
    assert calls
    # The first activation's output is the second Linear's input, whose output no one saved.
    # Of two calls that hold their input differently, the one that holds it more goes out of place.
    assert (all if run is plain else any)(overwritten for _, overwritten in calls)


@pytest.mark.parametrize("run", AT_RUN_TIME)
@some_acts
def test_decided_at_run_time(run, act, calls):
    model = Block(run, STOCK[act]())
    swap(model, sample=batch())
    assert_as_stock(model, batch())
    assert not any(overwritten for _, overwritten in calls)


# A variable that is read later, only the sample shows; of a change of the output, autograd tells, as of relu's in stock.
GUARDED = [
    read_through_a_view,
    returned,
    own_input,
    parameter,
    stored,
    stored_detached,
    stored_in_a_list,
    *IN_PLACE,
]


@some_acts
@pytest.mark.parametrize("run", GUARDED)
def test_flows_that_the_sample_did_not_take(run, act):
    """References to the input show in each call, so that most other ways to use a module stay right too."""
    model = Block(plain, STOCK[act]())
    assert only(swap(model, sample=batch())).after == "in place"
    model.run = run
    assert_as_stock(model, batch())


def test_a_hook_that_reads_the_input_is_seen():
    model = Block(plain)
    sums = []
    model.act.register_forward_hook(lambda m, i, o: sums.append(i[0].sum()))
    row = only(swap(model, sample=batch()))
    assert row.after == "output"
    assert "read again by aten.sum" in row.reason


def test_a_reader_in_backward_is_seen():
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, other):
            ctx.other = other  # not with save_for_backward, so only the read shows
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.other, None

    def run(self, x):
        h = self.first(x)
        return self.second(Reads.apply(self.act(h), h.detach()))

    model = Block(run)
    row = only(swap(model, sample=batch()))
    assert "read again by aten" in row.reason
    assert_as_stock(model, batch())


def test_not_called():
    assert (
        only(swap(Block(lambda self, x: self.second(x)), sample=batch())).reason == "not called on the sample"
    )


# -- the whole ---------------------------------------------------------------------------------------------------------


@acts
def test_training_gives_the_same_losses(act):
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(D, 32), STOCK[act](), nn.Linear(32, 32), nn.LayerNorm(32), STOCK[act](), nn.Linear(32, 1)
    ).double()
    twin = copy.deepcopy(model)
    swap(model, sample=batch())
    x, y = batch(64, D), batch(64, 1)
    losses = []
    for m in (model, twin):
        optimizer = torch.optim.SGD(m.parameters(), 0.05, momentum=0.9)
        losses.append([])
        for _ in range(50):
            loss = F.mse_loss(m(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    tolerance = 1e-6 if act == "hardsigmoid" else 1e-9  # stock rounds its 1/6 to float32
    torch.testing.assert_close(*map(torch.DoubleTensor, losses), rtol=0, atol=tolerance)
    assert losses[0][-1] < losses[0][0]


def test_report_agrees_with_what_is_measured():
    model = nn.Sequential(
        nn.Linear(D, 64),
        nn.GELU(),
        nn.Linear(64, 64),
        nn.ELU(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 8),
    ).double()
    x = batch(32, D)
    report = swap(model, sample=x)
    n = 32 * 64 * 8
    assert [(r.bytes_before, r.bytes_after) for r in report] == [(n, 32 * 64 // 8), (n, 0), (0, 0)]
    assert [r.saved for r in report] == ["output + 1 bit", "output", "output"]
    assert report.saved_before - report.saved_after == report.bytes_before - report.bytes_after
    measured = memkit.memory.measure(lambda: model(x).sum().backward())
    unswap(model)
    stock = memkit.memory.measure(lambda: model(x).sum().backward())
    assert stock.saved - measured.saved == report.bytes_before - report.bytes_after
    assert measured.peak < stock.peak


def test_report():
    model = nn.Sequential(mlp(nn.GELU()), Block(add_again, nn.SiLU()))
    report = swap(model, sample=batch())
    assert isinstance(report, SwapReport)
    assert [row.path for row in report.changed] == ["0.1"]
    assert [row.path for row in report.left] == ["1.act"]
    text = str(report)
    assert text == repr(report)
    lines = text.splitlines()
    assert len(lines) == 5
    assert lines[0].split() == ["path", "before", "after", "saved", "bytes", "remark"]
    assert "512 B → 8 B" in lines[2]
    assert "1 of 2 sites changed; saved for backward" in lines[-1]
    table = report.to_dict()
    assert table["changed"] == table["left"] == 1
    assert table["rows"][0]["path"] == "0.1"
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize("lean", [False, True, "call"])
@pytest.mark.parametrize("by_sample", [False, True])
def test_report_says_where_the_saving_holds(lean, by_sample):
    report = swap(mlp(nn.GELU()), sample=batch() if by_sample else None, lean=lean)
    assert report.lean == report.to_dict()["lean"] == lean
    assert ("the saving holds inside memkit.lean()" in str(report).splitlines()[-1]) == (lean is True)
    nothing = swap(nn.GELU(), lean=lean, ops=["relu"])
    assert "inside" not in str(nothing)


def test_report_says_of_how_many_sites_nothing_is_saved():
    model = mlp(nn.Sequential(nn.GELU(), nn.Linear(D, D), nn.ReLU()))  # stock keeps relu's output alone, too
    report = swap(model, sample=batch())
    assert [row.bytes_after < row.bytes_before for row in report.changed] == [True, False]
    assert "2 of 2 sites changed, 1 of them without keeping less; saved" in str(report)
    assert "without" not in str(swap(model)).splitlines()[-1]
    assert "without" not in str(swap(model, sample=batch(), lean="call"))


def test_report_explains_that_nothing_changed():
    nothing = str(swap(nn.Linear(2, 2)))
    assert nothing.startswith("nothing to change: no activation, norm, dropout")
    mine = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
    assert str(swap(mine, ops=["gelu"])).endswith("the model has none of ops ['gelu'] as a module")
    root = str(swap(nn.GELU(), sample=batch())).splitlines()
    assert root[2].startswith("(the model)  GELU")
    assert root[-1] == "0 of 1 sites changed: the last column says why"
    unproven = str(swap(Block(add_again, nn.SiLU())))
    assert unproven.splitlines()[-1] == (
        "0 of 1 sites changed: the last column says why; "
        "swap(model, sample=...) with a batch as the model takes it can prove more"
    )


def test_what_would_keep_more_is_undone():
    """A batch norm's statistics are kept in double precision, which is more where nothing else is spared."""
    model = nn.Sequential(nn.BatchNorm2d(2), nn.ReLU(), nn.AvgPool2d(2))
    x = torch.randn(2, 2, 2, 2, requires_grad=True)
    report = swap(model, sample=x)
    assert [row.after for row in report.changed] == ["in place"], report  # the activation without the norm
    assert report.saved_after == report.saved_before
    assert [isinstance(module, types.Changed) for module in (model, *model)] == [False, False, True, False]
