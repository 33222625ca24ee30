"""Data and orders that differ between processes, or from those of the run that is resumed."""

from __future__ import annotations

from itertools import chain

import pytest

from tests import cases


@pytest.mark.processes
def test_a_distributed_sampler_inside_another_stands_for_its_whole_order(ranks):
    results = ranks(cases.same_data.distributed_samplers)
    for name, found in results[0].items():
        of_all = [result[name][0] for result in results]
        epochs = [list(chain(*parts)) for parts in zip(*of_all, strict=True)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(16))] * 2, name
        assert epochs[0] != epochs[1], name  # shuffled again
        assert found[1] == pytest.approx(7.5), name


@pytest.mark.processes
def test_samplers_of_other_packages_that_give_each_process_a_part_are_refused(ranks):
    n = ranks.world_size
    for result in ranks(cases.same_data.other_samplers_of_parts):
        for name, said in result.items():
            assert f"gives one of {n} parts of its order" in said, name
            assert "return OwnShard(DataLoader(...))" in said, name


@pytest.mark.processes
def test_datasets_that_differ_between_processes_are_refused_on_all(ranks):
    results = ranks(cases.same_data.split_datasets)
    of_all = [result.pop("the same")[0] for result in results]
    first, second = ([sample for epochs in of_all for sample in epochs[number]] for number in (0, 1))
    assert len(first) == len(set(first)) == 12
    assert sorted(first) == sorted(second)
    for result in results:
        for name, said in result.items():
            assert "datasets with different rows, of lengths [" in said, name
            assert "call torch.manual_seed before random_split" in said, name


@pytest.mark.processes
def test_samplers_that_draw_another_order_on_each_process_under_a_seed_are_refused(ranks):
    results = ranks(cases.same_data.orders_of_their_own)
    of_all = [result.pop("the same")[0] for result in results]
    for parts in zip(*of_all, strict=True):
        assert sorted(chain(*parts)) == list(range(16))
    for result in results:
        for name, said in result.items():
            assert "gives another order on each process, of lengths [" in said, name
            assert "set_epoch(epoch)" in said, name
