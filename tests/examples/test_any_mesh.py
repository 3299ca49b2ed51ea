"""The example of layouts: one digest in all of them, and others with the mode off."""

import pytest
from cases import more

pytest.importorskip("transformers", reason="the extra tp-invariant[hf] is not installed")
from tp_invariant.examples import any_mesh


@pytest.mark.parametrize("model", [more("dense"), "moe"])
def test_one_digest_in_layouts(model, capsys, monkeypatch):
    """Stopped in one layout and gone on in another, too; with the mode off they differ, by little."""
    monkeypatch.setattr(any_mesh, "FEW", any_mesh.FEW[1:4:2])
    assert any_mesh.main(["--steps", "2", "--model", model]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith("one digest in 2 layouts: ") and len(lines) == 3
    assert any_mesh.main(["--steps", "2", "--model", model, "--off"]) == 1
    *off, differ = capsys.readouterr().out.splitlines()
    assert differ.startswith("differ from pp1 dp2 cp2 tp2")
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines + off]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)


def test_all_layouts_are_those_of_eight_ranks():
    assert len(set(any_mesh.every_layout(8))) == 20
