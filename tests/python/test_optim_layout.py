"""Parameters and groups that are not any more what the states were laid out for."""

import pytest
import tensorferry.optim
import torch


def test_a_parameter_that_is_laid_out_anew_is_refused_before_anything_is_stepped(tmp_path):
    """Its step would be that of a copy."""
    conv = torch.nn.Conv2d(4, 8, 3)
    optimizer = tensorferry.optim.AdamW(conv.parameters(), nvme_path=tmp_path)
    conv.to(memory_format=torch.channels_last)
    conv(torch.ones(1, 4, 8, 8)).sum().backward()
    before = [param.detach().clone() for param in conv.parameters()]
    with pytest.raises(RuntimeError, match="memory formats"):
        optimizer.step()
    for param, value in zip(conv.parameters(), before):
        assert torch.equal(param, value)


def test_param_groups_that_were_changed_by_hand_are_refused(tmp_path):
    def drop(groups):
        del groups[1]

    def replace(groups):
        groups[0]["params"][0] = torch.nn.Parameter(torch.ones(4))

    def renew(groups):
        groups[0] = {**groups[0], "lr": 1.0}

    for change in (drop, replace, renew):
        params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
        groups = [{"params": [param]} for param in params]
        optimizer = tensorferry.optim.AdamW(groups, nvme_path=tmp_path)
        sum(param.sum() for param in params).backward()
        optimizer.step()
        change(optimizer.param_groups)
        with pytest.raises(RuntimeError, match="add_param_group"):
            optimizer.step()


def test_optimizers_of_whole_parameters_do_not_take_parts_of_them(tmp_path):
    param = torch.nn.Parameter(torch.ones(4, 4))
    param.to_local = None  # as those of FSDP have it
    with pytest.raises(ValueError, match="spread over the ranks"):
        tensorferry.optim.offload(torch.optim.Adafactor([param]), nvme_path=tmp_path)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_twice_in_its_group_is_refused(tmp_path):
    """It would get two sets of states, of which a state_dict has one."""
    twice = [torch.nn.Parameter(torch.ones(5000))] * 2
    with pytest.raises(ValueError, match="twice in its group"):
        tensorferry.optim.AdamW(twice, nvme_path=tmp_path)
    param = torch.nn.Parameter(torch.ones(5000))
    optimizer = tensorferry.optim.AdamW([param], nvme_path=tmp_path)
    with pytest.raises(ValueError, match="twice in its group"):
        optimizer.add_param_group({"params": twice})
    assert len(optimizer.param_groups) == 1
    param.grad = torch.ones(5000)
    optimizer.step()
    optimizer.close()
