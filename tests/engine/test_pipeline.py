"""The order of a step's stages."""

from __future__ import annotations

from zerofp4.engine.pipeline import Stage, run_in_turns


def record(done, name):
    return Stage(
        lambda b: done.append(f"{name}{b}"),
        lambda b: done.append(f"begin {name}{b}"),
    )


def test_collectives_of_earlier_buckets_begin_before_a_later_one_is_worked_on():
    done = []
    run_in_turns(3, [record(done, "update"), record(done, "cast"), record(done, "gather")])
    assert [entry.removeprefix("begin ") for entry in done if "update" not in entry] == [
        *("cast0", "cast0"),
        *("cast1", "gather0", "cast1", "gather0"),
        *("cast2", "gather1", "cast2", "gather1"),
        *("gather2", "gather2"),
    ]
    assert done.index("begin cast0") < done.index("update1") < done.index("cast0")
    assert done.index("begin gather0") < done.index("update2") < done.index("cast1") < done.index("gather0")


def test_one_bucket_and_none():
    done = []
    run_in_turns(1, [record(done, "a"), record(done, "b")])
    assert done == ["begin a0", "a0", "begin b0", "b0"]
    run_in_turns(0, [record(done, "a")])
    assert len(done) == 4
