"""Promise: errors whose texts look alike are told apart by their cause. Where torch or safetensors can
raise the error here, the text is theirs."""

from __future__ import annotations

import pytest
import torch
from tests.doctor.test_explain_logs import PREFETCH, SUMMARY, TRACEBACK, ranked
from torch import nn

from shardproof.doctor.explain import explain, told


def test_an_empty_deque_is_the_engines_only_where_its_own_line_is_above():
    (found,) = explain(ranked(PREFETCH))
    assert (found.known.name, found.line) == ("stale prefetch", "IndexError: pop from an empty deque")
    own = TRACEBACK + '  File "/home/me/feed.py", line 20, in forward\n    return self.ahead.popleft()\n'
    for log in ("[INFO] [deepspeed/runtime/engine.py:1914] step=3\n" + own, own, ""):
        assert explain(log + "IndexError: pop from an empty deque\n") == []


def of(work) -> str:
    """The text of the error that `work` ends with."""
    with pytest.raises(RuntimeError) as raised:
        work()
    return f"{TRACEBACK}RuntimeError: {raised.value}\n"


class Edited(nn.Module):
    """Two layers; what `edit` does stands between forward and backward."""

    def __init__(self, edit) -> None:
        super().__init__()
        self.first, self.scale, self.last = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), nn.Linear(8, 8)
        self.register_buffer("place", torch.zeros(4, dtype=torch.long))
        self.edit = edit

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        out = self.last((hidden * self.scale)[self.place])
        with torch.no_grad():
            self.edit(self, hidden)
        return out.sum()


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (lambda model, hidden: hidden.add_(1), "an activation changed in place"),
        (lambda model, hidden: model.last.weight.add_(1), "weights changed before backward"),
        (lambda model, hidden: model.scale.add_(1), "weights changed before backward"),
        (lambda model, hidden: model.place.add_(1), "a buffer changed in place"),
    ],
    ids=["activation", "weight of a linear layer", "weight", "buffer"],
)
def test_what_was_changed_in_place_is_told_apart(edit, name):
    model = Edited(edit)
    text = of(lambda: model(torch.randn(4, 8)).backward())
    assert "modified by an inplace operation" in text
    assert [match.known.name for match in explain(text)] == [name]


@pytest.mark.parametrize(
    ("made", "name"),
    [
        ("AddmmBackward0", "an activation changed in place"),
        ("ReluBackward0", "an activation changed in place"),
        ("TanhBackward0", "an activation changed in place"),
        ("AsStridedBackward0", "weights changed before backward"),
        ("TBackward", "weights changed before backward"),
    ],
)
def test_the_operation_that_a_text_names_says_what_was_changed(made, name):
    text = (
        "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation:"
        f" [torch.cuda.HalfTensor [1, 512]], which is output 0 of {made}, is at version 1; expected version 0 instead."
    )
    assert [match.known.name for match in explain(text)] == [name]


def empty_weights(model: nn.Module) -> nn.Module:
    """As ZeRO-3 leaves them: placeholders of size zero."""
    for module in model.modules():
        for name in module._parameters:
            setattr(module, name, nn.Parameter(torch.empty(0)))
    return model


def test_loading_and_partitioned_weights():
    """Whole weights into placeholders, and placeholders out of a file."""
    whole, empty = nn.Linear(4, 3), empty_weights(nn.Linear(4, 3))
    for into, given, name in (
        (empty, whole, "whole weights for a partitioned model"),
        (whole, empty, "a file of empty weights"),
    ):
        text = of(lambda into=into, given=given: into.load_state_dict(given.state_dict()))
        found = [match.known.name for match in explain(ranked(text) + SUMMARY)]
        assert found == [name, "a summary of the launcher"]


def test_rows_for_new_tokens_under_zero_3():
    weight = torch.empty(0)

    def write() -> None:
        weight[:] = torch.ones(4096)

    text = of(write)
    line = " ".join(text.splitlines()[-1].split())
    assert "The expanded size of the tensor (0)" in line
    above = '  File "train.py", line 88, in add_tokens\n    model.get_input_embeddings().weight.data[-1:] = mean\n'
    for log in (line, text.replace("RuntimeError", above + "RuntimeError")):
        (found,) = explain(log)
        assert (found.known.name, found.line) == ("embeddings resized under ZeRO-3", line)
    assert explain(text.replace("RuntimeError", '  File "boxes.py", line 7, in f\nRuntimeError')) == []


def test_tied_weights_in_a_file(tmp_path):
    from safetensors.torch import save_file

    tied = {"lm_head.weight": torch.ones(2, 2)}
    tied["model.embed_tokens.weight"] = tied["lm_head.weight"]
    text = of(lambda: save_file(tied, tmp_path / "model.safetensors"))
    assert [match.known.name for match in explain(ranked(text))] == ["tensors that share memory"]


@pytest.mark.parametrize(
    "line",
    [
        "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 5e-05, 'epoch': 0.54}",
        "{'loss': '0', 'grad_norm': 'nan', 'learning_rate': '5e-05', 'epoch': '0.54'}",
        '{"loss": 0.0, "token_acc": 0.0, "grad_norm": NaN, "learning_rate": 1e-06, "memory(GiB)": 41.2}',
        "{'loss': nan, 'grad_norm': nan, 'learning_rate': 1e-06, 'epoch': 0.1}",
    ],
)
def test_a_loss_of_nothing_is_told(line):
    log = "{'loss': 1.8, 'grad_norm': 2.1, 'learning_rate': 5e-05, 'epoch': 0.5}\n  2%|2   | 20/1233 [00:07<00:51]\n"
    (found,) = explain(log + (line + "\n") * 3)
    assert (found.known.name, found.line) == ("a loss of 0 and a gradient norm of nan", line)


def test_a_device_map_is_told_without_four_bits_and_what_is_sharded_here():
    (found,) = explain(
        "DeepSpeed Zero-3 is not compatible with `low_cpu_mem_usage=True` or with passing a `device_map`"
    )
    assert "device_map=None" in found.known.there
    assert "bits" not in found.known.means
    assert "stays whole" not in told(found)
