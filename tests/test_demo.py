"""The demo: its output and exit status, and that its verdict can fail."""

import re
import sys
from pathlib import Path

import pytest
import torch

from tp_invariant.examples import demo_report
from tp_invariant.examples.demo_report import (
    Record,
    Step,
    differences,
    print_table,
    print_texts,
    share_of_parameters,
    texts,
    verdict,
)
from tp_invariant.examples.train_across_tp import machine, main
from tp_invariant.examples.words import PROMPT, encode

SMALL = (
    "--degrees 1,2 --steps 3 --layers 1 --hidden 64 --heads 2 --ffn 64 --batch 2 --sequence 64 --words 6 --device cpu"
)


def small(*extra: str) -> list[str]:
    return [*SMALL.split(), *extra]


def table_digests(output: str) -> list[list[str]]:
    """The digests of each table that was printed."""
    tables = re.split(r"^mode (?:on|off)(?:,| *$)", output, flags=re.MULTILINE)[1:]
    return [re.findall(rf"\b[0-9a-f]{{{demo_report.SHOWN}}}\b", table) for table in tables]


# --- whole runs -----------------------------------------------------------------------------------------------------


def test_demo_agrees_with_the_mode_on_and_differs_with_it_off(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "losses.png"
    assert main(small("--picture", str(picture))) == 0
    output = capsys.readouterr().out
    on, off = table_digests(output)
    assert len(on) == len(off) == 2
    assert on[0] == on[1]
    assert off[0] != off[1]
    assert "identical for all 3 steps, 2 ranks" in output
    verdict_line = re.sub(r"\n +", " ", output[output.index("Verdict:") :])  # in lines of 118 characters
    assert verdict_line.startswith(
        "Verdict: mode on: TP=1, 2 bit for bit the same on every rank for all 3 steps, and in all 6 words; "
    )
    assert re.search(
        r"mode off: TP=2 left TP=1 at step \d, by up to \S+ in the loss and in \S+% of the para", verdict_line
    )
    assert output.count("  mode on, TP=1, 2:\n") == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in output


def test_sequence_parallelism_changes_no_bit(capsys):
    printed = []
    for extra in ([], ["--sequence-parallel"]):
        assert main(small("--mode", "on", "--no-picture", *extra)) == 0
        printed.append(table_digests(capsys.readouterr().out))
    assert printed[0] == printed[1]
    assert len(set(printed[0][0])) == 1


README, PAGE = (Path(__file__).parents[1] / path for path in ("README.md", "docs/verification.md"))
_UPDATE = (
    "what the demo prints is no longer what docs/verification.md (its tables) and the README (texts, verdict) show: "
    "run the command, put its output there"
)


def shown_output() -> str:
    """The block of the page that begins as the demo's output does, and that of the README which ends as it does."""
    (begin,) = re.findall(r"```text\n(A transformer of .*?)```", PAGE.read_text(), flags=re.DOTALL)
    (end,) = re.findall(r"```text\n(The trained model .*?Verdict: .*?\n)```", README.read_text(), flags=re.DOTALL)
    return f"{begin}\n{end}"


def text_with_the_mode_on(output: str) -> str:
    (text,) = re.findall(r"^  mode on, TP=[\d, ]+:\n((?:    .*\n)+)", output, flags=re.MULTILINE)
    return text


def shape_of(output: str) -> list[str]:
    """The kinds of lines, in order, without digits, digests, lines of tables, texts and the name of the machine."""
    lines = (line for line in output.splitlines() if not line.startswith("    "))
    lines = (re.sub(r"[0-9a-f]{12}|\d[\d.,e+-]*|[^\x00-\x7f]+", "#", line) for line in lines)
    # a first word is enough where the rest depends on the machine, or on how many degrees there are
    first = r"(torch|Picture:|Verdict:|The trained model|  mode o[nf]+,) .*"
    kinds = [re.sub(r"\s+|[#%|]", "", re.sub(first, r"\1", line)) for line in lines]
    return [kind for i, kind in enumerate(kinds) if kind and kind not in kinds[:i]]


def test_the_pages_show_what_the_demo_prints(capsys):
    """Their form on every machine; numbers and text on the kind of machine that they name, whose bits they are."""
    shown = shown_output()
    on, off = table_digests(shown)
    assert len(set(on)) == 1 and len(set(off)) == len(off) == len(on) == 4
    own = machine("cpu")
    comparable = f"\n{own}.\n" in shown
    steps = ["--words", "10"] if comparable else ["--steps", "2", "--words", "2"]  # the README's; enough for the form
    assert main(["--degrees", "1", "--mode", "on", "--no-picture", "--device", "cpu", *steps]) == 0
    printed = capsys.readouterr().out
    missing = [kind for kind in shape_of(printed) if kind not in shape_of(shown) and "onedegreealone" not in kind]
    assert not missing, f"{_UPDATE}: {missing}"
    if not comparable:
        pytest.skip(f"the page's digest is another machine's; this one is {own}")
    assert table_digests(printed)[0] == on[:1], f"{_UPDATE}: the digest with the mode on is {table_digests(printed)[0]}"
    assert text_with_the_mode_on(printed) == text_with_the_mode_on(shown), _UPDATE


def test_the_texts_in_the_readme_differ_where_it_says():
    shown = shown_output()
    (reference,) = re.findall(r"^  mode off, TP=1[\d, ]*:\n((?:    .*\n)+)", shown, flags=re.MULTILINE)
    expected = encode(reference)
    found = re.findall(r"^  mode off, .* parts from TP=1 at word (\d+):\n((?:    .*\n)+)", shown, flags=re.MULTILINE)
    assert len(found) == 3, "the README says that each degree writes a text of its own"
    assert expected != encode(text_with_the_mode_on(shown)), "then the mode off at TP=1 would seem to be the reference"
    for word, text in found:
        same, other = map(encode, text.split(demo_report.PARTS))
        assert len(same) == len(encode(PROMPT)) + int(word) - 1
        assert same == expected[: len(same)] and other[0] != expected[len(same)]


# --- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--degrees 1,3", "--degrees: 3 does not divide --heads 8"),
        ("--heads 6 --degrees 1,2", "--heads 6 does not divide --hidden 128"),
        ("--degrees 8 --sequence 36 --sequence-parallel", "--degrees: 8 does not divide --sequence 36"),
        ("--sequence 600", "--sequence 600 is too long for a text of 527 words"),
        ("--lr nan", "argument --lr: 'nan' is not a positive number"),
        ("--seed -1", "argument --seed: '-1' is not a whole number from 0 to 2**63 - 1"),
        ("--picture a.txt", "argument --picture: 'a.txt' must end in .png, .pdf or .svg"),
        ("--picture nowhere/a.png", "argument --picture: the folder of 'nowhere/a.png' does not exist"),
    ],
)
def test_a_wrong_option_is_one_line(capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        main(["--device", "cpu", *options.split()])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("tp-invariant demo: error: ") and error.count("\n") == 1


# --- the verdict, on made-up records ---------------------------------------------------------------------------------


def made_up(degrees=(1, 2, 4), steps=5, changed=None, texts=None, parameters=None):
    """Equal records. `changed` maps (degree, rank, step from 1) to (tensor, its digest, loss), `texts` (degree, rank)
    to its text, and `parameters` a degree to its trained values."""
    runs = {}
    for degree in degrees:
        runs[degree] = []
        for rank in range(degree):
            record = []
            for step in range(1, steps + 1):
                tensors = {"loss": f"l{step}", "gradient of w": f"g{step}", "parameter w": f"p{step}"}
                loss = 3.0
                if (degree, rank, step) in (changed or {}):
                    name, tensors[name], loss = changed[degree, rank, step]
                record.append(Step.record(loss, 1.0, tensors))
            words = (texts or {}).get((degree, rank), "is the same model .").split()
            weights = {"w": torch.tensor((parameters or {}).get(degree, [0.0, 1, 2, 3]))} if rank == 0 else {}
            runs[degree].append(Record(record, words, weights))
    return runs


def test_verdict_on_equal_records():
    on, off = made_up(), made_up(changed={(4, r, s): ("loss", "x", 3.5) for r in range(4) for s in (3, 4, 5)})
    line, good = verdict(on, off)
    assert good
    assert line == (
        "Verdict: mode on: TP=1, 2, 4 bit for bit the same on every rank for all 5 steps, and in all 5 words; "
        "mode off: TP=4 left TP=1 at step 3, by up to 0.5 in the loss and in 0 of the parameters, and wrote "
        "the same text."
    )


def other_texts():
    """Runs with the mode off whose texts and parameters differ."""
    changed = {(4, rank, 2): ("loss", "x", 3.5) for rank in range(4)}
    written = {(4, rank): "is the other model ." for rank in range(4)}
    return made_up(changed=changed, texts=written, parameters={4: [-0.0, 1, 2, 4]})


def test_verdict_says_where_texts_and_parameters_differ():
    line, good = verdict(None, other_texts())
    assert good
    assert line.endswith("by up to 0.5 in the loss and in 50.0% of the parameters, and TP=4 in the text at word 3.")
    assert share_of_parameters(other_texts(), 2) == 0


def test_verdict_finds_a_rank_that_writes_another_text(capsys):
    on = made_up(texts={(4, 2): "is the same"})
    assert str(differences(on)[4]) == "differs from TP=1 from step 5 on: word 4 of the text (rank 2)"
    assert not verdict(on, None)[1]
    assert [found[0] for found in texts(on, None)] == [
        "mode on, TP=1, 2, 4",
        "mode on, TP=4, parts from TP=1 at word 4",
    ]


@pytest.mark.parametrize("rich", [True, False])
def test_texts_are_printed_once_and_marked(capsys, monkeypatch, rich):
    if rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    print_texts(PROMPT, made_up(), other_texts())
    assert capsys.readouterr().out == (
        '\nThe trained model continues "The model" by its likeliest words; | marks where a text parts from TP=1\'s\n'
        "  mode on, TP=1, 2, 4:\n    The model is the same model.\n"
        "  mode off, TP=1, 2:\n    The model is the same model.\n"
        "  mode off, TP=4, parts from TP=1 at word 3:\n    The model is the | other model.\n"
    )


def test_verdict_finds_one_rank_at_a_later_step(capsys):
    on = made_up(changed={(4, 3, 4): ("gradient of w", "other", 3.0)})
    found = differences(on)
    assert found[1] is None and found[2] is None
    assert str(found[4]) == "differs from TP=1 from step 4 on: gradient of w (rank 3)"
    line, good = verdict(on, None)
    assert not good
    assert line == "Verdict: FAILED, mode on: TP=4 differs from TP=1 from step 4 on: gradient of w (rank 3)."
    print_table("mode on", on)
    assert "differs from TP=1 from step 4 on" in capsys.readouterr().out


def test_a_control_that_agrees_is_no_control():
    line, good = verdict(made_up(), made_up())
    assert not good
    assert "WARNING, mode off: TP=1, 2, 4 agree too, so this control proves nothing" in line
    assert verdict(None, made_up(degrees=(2,)))[1]  # one degree alone is no control, and is none asked for
